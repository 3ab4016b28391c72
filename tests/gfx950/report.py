"""`make gfx950-report`: what the compiler made of the GEMM kernels, counted and run, beside Triton's kernel; and the cycle model.

Per K step means: executed by one wave per 128 of K in the main loop. MFMA share: clocks of the matrix core over those plus 4 for
every other instruction of the loop. Waits at K = 2048: s_waitcnt with a vmcnt that one wave executes in the whole kernel.
"""

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from . import cycles, mx
from .assembly import Kernel
from .interpreter import Launch, Machine, Statistics
from .toolchain import TritonGemm, compile_triton

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- gfx950-report: make gfx950-report ARGS=--write -->", "<!-- end of gfx950-report -->"
LDS_BYTES = 160 * 1024
K = 2048
STEP = 128
# The shapes that the seed times or names: M x N x K.
SHAPES = (
    (64, 5120, 2048),
    (64, 8192, 1280),
    (1024, 5120, 2048),
    (1024, 8192, 1280),
    (8192, 7168, 640),
    (8192, 7168, 2048),
    (8192, 7168, 4096),
    (16384, 5120, 2048),
    (16384, 7168, 2048),
    (32768, 7168, 1792),
)
LATENCIES = (600, 1200, 1800, 2400, 3200)
NARROW_BELOW = 140  # workgroups of 256 x 256
TRITON = {"Triton 256x256": TritonGemm(), "Triton 256x128": TritonGemm(block_n=128)}


def names() -> list[str]:
    from .launches import GEMM_KERNELS

    return [*GEMM_KERNELS, *TRITON]


def columns(name: str) -> int:
    return int(name.split("x")[1])


@functools.cache
def kernel(name: str) -> tuple[Kernel, int]:
    """And its LDS bytes."""
    from .launches import gemm_kernel

    if name in TRITON:
        return compile_triton(TRITON[name])
    k = gemm_kernel(name)
    return k, k.metadata["group_segment_fixed_size"]


@functools.cache
def execute(name: str, k: int) -> Statistics:
    """One workgroup on one tile, traced; the result is checked."""
    from .launches import gemm_args, pack_a, pack_b

    n = columns(name)
    code, lds = kernel(name)
    machine, out = Machine(), np.full((256, n), 0xFFFF, np.uint16)
    if name in TRITON:
        x = mx.operands(256, n, k)
        arguments = (x.a, x.b, x.a_scale, x.b_scale, out, 256, n, k)
    else:
        x = mx.operands(256, n, k, b_rows=32)
        packed = name.startswith("packed")
        scales = (pack_a(x.a_scale), pack_b(x.b_scale)) if packed else (x.a_scale, x.b_scale)
        arguments = (gemm_args(machine, x.a, x.b, *scales, None, out),)
    stats = machine.run(Launch(code, (1, 1, 1), 512, arguments, lds, trace=1 << 18))[0]
    assert mx.error(mx.from_bf16(out), x.product) < 2e-3
    return stats


@dataclass(frozen=True)
class Row:
    kernel: str
    vgpr: int
    agpr: int
    spills: int
    lds: int
    waves_per_simd: int
    waits: int
    waits_per_step: float
    mfma: float
    ds_read: float
    copies: float
    loads: float
    valu: float
    barriers: float
    share: float
    conflicts: int


def row(name: str) -> Row:
    code, lds = kernel(name)
    stats = execute(name, K)
    waves = len(stats.traces)
    body = code.loop()
    loop = [(code.instructions[i], stats.executed[i] / waves) for i in body]
    clocks = {id(x): cycles.mfma_clocks(x) for x, _ in loop}
    matrix = sum(n * clocks[id(x)] for x, n in loop)
    steps = matrix * waves / (256 * columns(name) * STEP * 2 / cycles.OPERATIONS)

    def per_step(choose) -> float:
        return sum(n for x, n in loop if choose(x)) / steps

    def waits(pairs) -> float:
        return sum(n for x, n in pairs if x.opcode == "s_waitcnt" and "vmcnt" in x.modifiers)

    registers = code.metadata["vgpr_count"]
    return Row(
        kernel=name,
        vgpr=registers - code.metadata["agpr_count"],
        agpr=code.metadata["agpr_count"],
        spills=code.metadata["vgpr_spill_count"],
        lds=lds,
        waves_per_simd=min(512 // (-(-registers // 8) * 8), LDS_BYTES // lds * waves // 4),
        waits=round(waits(zip(code.instructions, stats.executed / waves, strict=True))),
        waits_per_step=waits(loop) / steps,
        mfma=per_step(lambda x: clocks[id(x)] > 0),
        ds_read=per_step(lambda x: x.opcode.startswith("ds_read")),
        copies=per_step(lambda x: x.is_copy),
        loads=per_step(lambda x: x.is_load and not x.is_copy),
        valu=per_step(lambda x: x.opcode.startswith("v_") and not clocks[id(x)]),
        barriers=per_step(lambda x: x.opcode == "s_barrier"),
        share=matrix / (matrix + 4 * sum(n for x, n in loop if not clocks[id(x)])),
        conflicts=int(sum(stats.conflict_cycles[i] for i in body)),
    )


def table() -> str:
    heads = [
        "kernel",
        "VGPR",
        "AGPR",
        "spills",
        "LDS bytes",
        "waves per SIMD",
        f"vmcnt waits, K={K}",
        "per K step: vmcnt waits",
        "MFMA",
        "ds_read",
        "copies to LDS",
        "other loads",
        "VALU",
        "barriers",
        "MFMA share",
        "bank conflicts",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name in names():
        r = row(name)
        numbers = [
            r.vgpr,
            r.agpr,
            r.spills,
            r.lds,
            r.waves_per_simd,
            r.waits,
            r.waits_per_step,
            r.mfma,
            r.ds_read,
            r.copies,
            r.loads,
            r.valu,
            r.barriers,
        ]
        lines.append(
            "| "
            + " | ".join(
                [name, *(f"{n:.4g}" if isinstance(n, float) else str(n) for n in numbers), f"{r.share:.0%}", str(r.conflicts)]
            )
            + " |"
        )
    return "\n".join(lines)


@functools.cache
def cycles_at(name: str, k: int, cold: bool) -> float:
    """By the model; linear in K between two runs that lie eight steps apart."""
    short, long = 5 * STEP, 13 * STEP
    low, high = (cycles.workgroup(execute(name, n), cold=cold).cycles for n in (short, long))
    return low + (high - low) * (k - short) / (long - short)


def predicted(form: str, m: int, n: int, k: int, *, cold: bool, tile: int | None = None) -> float:
    """Seconds, by the model."""
    if tile is None:
        tile = 128 if -(-m // 256) * -(-n // 256) < NARROW_BELOW else 256
    tiles = -(-m // 256) * -(-n // tile)
    moved = m * k + n * k + 2 * m * n
    return cycles.seconds(cycles_at(f"{form} 256x{tile}", k, cold), tiles, moved if cold else 0)


def latency_ratio(tile: int, latency: int) -> float:
    """Clocks of raw over packed at K = 2048."""
    device = replace(cycles.MI355X, memory_latency=latency)
    packed, raw = (cycles.workgroup(execute(f"{form} 256x{tile}", K), device).cycles for form in ("packed", "raw"))
    return raw / packed


def model() -> str:
    lines = [
        "Cycle model (a prediction from stated parameters, see tests/gfx950/cycles.py; never a measurement): one workgroup, K = 2048",
        "",
    ]
    lines += ["| kernel | clocks, data in L2 | data in HBM | matrix cores busy |", "|---|---|---|---|"]
    for name in names():
        hot, cold = (cycles.workgroup(execute(name, K), cold=c) for c in (False, True))
        lines.append(f"| {name} | {hot.cycles} | {cold.cycles} | {hot.matrix_busy:.0%} |")
    lines += [
        "",
        "raw / packed by the latency of memory, the parameter that decides between them (clocks under load are not published):",
        "",
    ]
    lines += ["| tile | " + " | ".join(map(str, LATENCIES)) + " |", "|---" * (1 + len(LATENCIES)) + "|"]
    for tile in (256, 128):
        ratios = (latency_ratio(tile, latency) for latency in LATENCIES)
        lines.append(f"| 256x{tile} | " + " | ".join(f"{r - 1:+.0%}" for r in ratios) + " |")
    lines += [
        "",
        "| M x N x K | tile | model: packed, hot | raw, hot | raw / packed, hot | raw / packed, cold |",
        "|---|---|---|---|---|---|",
    ]
    for m, n, k in SHAPES:
        tile = 128 if -(-m // 256) * -(-n // 256) < NARROW_BELOW else 256
        packed, raw, packed_cold, raw_cold = (predicted(f, m, n, k, cold=c) for c in (False, True) for f in ("packed", "raw"))
        hot = f"{packed * 1e6:.1f} us | {raw * 1e6:.1f} us | {raw / packed - 1:+.1%}"
        lines.append(f"| {m} x {n} x {k} | 256x{tile} | {hot} | {raw_cold / packed_cold - 1:+.1%} |")
    return "\n".join(lines)


def main() -> None:
    counted = table()
    print(counted, model(), sep="\n\n")
    if "--write" in sys.argv:
        text = README.read_text()
        before, _, rest = text.partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{counted}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
