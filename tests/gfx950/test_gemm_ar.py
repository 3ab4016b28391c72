"""gemm_ar's kernels for gfx950, two and four ranks of them executed against each other in one memory: bits, interleavings, planted bugs."""

import dataclasses
import functools
import itertools
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mori_ops import symmetric

from . import launches, mx
from .assembly import Kernel
from .interpreter import CACHE, Hazard, Schedule
from .ranks import TILES, Call, Ranks
from .test_kernels import FLOOR, as_dtype, floats, output
from .toolchain import compile_hip, missing, only

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

F32, BF16, F16 = np.float32, np.uint16, np.float16  # uint16 holds bf16 bits
K = 128


@functools.cache
def operands(m: int, n: int, seed: int) -> mx.Operands:
    return mx.operands(m, n, K, b_rows=32, seed=seed, scales=(112, 124))


@functools.cache
def partial(form: str, m: int, n: int, seed: int, dtype: type) -> np.ndarray:
    """One rank's summand, from the GEMM alone."""
    x, out = operands(m, n, seed), output(m, n, dtype)
    launches.gemm(form, x.a, x.b, x.a_scale, x.b_scale, out)
    return out


def through_fp8(rows: np.ndarray) -> np.ndarray:
    scale = np.maximum(np.abs(rows).max(1, keepdims=True) * F32(1 / 448), np.finfo(F32).tiny)
    return (rows * (1 / scale)).astype(ml_dtypes.float8_e4m3fn).astype(F32) * scale


class Case:
    """A call with fresh data, and the bits that it must give: fp32 sums in rank order, the bias, one rounding."""

    def __init__(self, world: int, m: int, n: int, seed: int, dtype: type = F32, bias: type | None = None, **options) -> None:
        seeds = range(100 * seed, 100 * seed + world)
        row = None if bias is None else as_dtype(np.random.default_rng(seed).standard_normal(n).astype(F32) * 100, bias)
        self.call = Call([operands(m, n, s) for s in seeds], [output(m, n, dtype) for _ in seeds], bias=row, **options)
        self.summands = [floats(partial(self.call.form, m, n, s, self.call.partial.type)).astype(F32) for s in seeds]

    def wanted(self, order: int = 1) -> np.ndarray:
        first, *rest = self.summands[::order]
        total = functools.reduce(np.add, rest, first)
        if self.call.bias is not None:
            total = total + floats(self.call.bias).astype(F32)
        if self.call.fp8_wire:
            total = through_fp8(total)
        return as_dtype(total, self.call.outs[0].dtype.type)

    def right(self) -> bool:
        return all(np.array_equal(out, self.wanted()) for out in self.call.outs)

    def check(self) -> None:
        exact = sum(x.product for x in self.call.parts) + (0 if self.call.bias is None else floats(self.call.bias).astype(np.float64))
        dtype, fp8 = self.call.outs[0].dtype, self.call.fp8_wire
        assert mx.error(floats(self.wanted()), exact) < (4e-2 if fp8 else 2 * FLOOR[dtype])
        for out in self.call.outs:
            np.testing.assert_array_equal(out, self.wanted())


def slot_bytes(cases: list[Case]) -> int:
    """Just enough: what lies behind the last row belongs to another rank."""
    most = 0
    for case in cases:
        (m, n), span = case.call.shape, case.call.chunk_rows * case.call.span_chunks
        rows = m if case.call.one_shot else -(-m // (span * len(case.call.parts))) * span
        most = max(most, rows * n * case.call.partial.itemsize)
    return -(-most // 1024) * 1024


def run(cases: list[Case], schedule: Schedule, **options) -> Ranks:
    ranks = Ranks(len(cases[0].call.parts), slot_bytes(cases))
    ranks.run([case.call for case in cases], schedule, **options)
    return ranks


def random(seed: int, retire: str = "random", resident: int = 4, budget: int = 10_000_000) -> Schedule:
    return Schedule(retire, "random", quantum=100, seed=seed, resident=resident, caches=True, budget=budget)


# --- sums ---

SHAPES = {
    "ragged": (2, 300, 53, F32, {}),
    "16-byte pieces, two tiles of columns": (2, 140, 136, BF16, {}),
    "single elements, two tiles of columns": (2, 140, 137, BF16, {}),
    "spans of whole tiles": (2, 520, 24, F32, {"chunk_rows": 256}),
    "four chunks to a span": (2, 600, 24, BF16, {"span_chunks": 4}),
    "chunks across tiles": (2, 500, 36, F32, {"chunk_rows": 192}),
    "owners without rows": (4, 70, 40, BF16, {}),
    "four ranks, two rounds": (4, 300, 33, F32, {}),
    "one-shot": (4, 20, 136, F32, {"one_shot": True}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_three_launches_give_the_sums_in_rank_order_on_every_rank(shape):
    """On one workspace, with other data each time."""
    world, m, n, dtype, options = SHAPES[shape]
    cases = [Case(world, m, n, seed, dtype, **options) for seed in range(3)]
    run(cases, random(m))
    for case in cases:
        case.check()


@pytest.mark.parametrize("form", TILES)
def test_every_tile_and_scale_layout(form):
    case = Case(2, 193, 300 if "256x256" in form else 140, 1, BF16, form=form)
    run([case], random(5))
    case.check()


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
@pytest.mark.parametrize(("dtype", "bias", "n"), [(F32, BF16, 36), (BF16, F32, 40), (F16, F16, 40), (F16, None, 33), (BF16, F16, 33)])
def test_bias_is_added_once_and_every_dtype_and_wire(dtype, bias, n, wire):
    cases = [Case(2, 150, n, 7, dtype, bias, fp8_wire=wire == "fp8"), Case(2, 10, n, 8, dtype, bias, fp8_wire=wire == "fp8", one_shot=True)]
    run(cases, random(n))
    for case in cases:
        case.check()


def test_the_order_of_the_sum_shows_in_its_bits():
    case = Case(4, 70, 40, 0)
    assert not np.array_equal(case.wanted(), case.wanted(order=-1))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_nan_stays_in_its_row(fp8):
    case = Case(2, 100, 40, 1, fp8_wire=fp8)
    x = case.call.parts[1] = dataclasses.replace(case.call.parts[1], a_scale=case.call.parts[1].a_scale.copy())
    x.a_scale[[3, 70]] = 255
    run([case], random(4))
    for out in case.call.outs:
        np.testing.assert_array_equal(np.isnan(out).all(1).nonzero()[0], [3, 70])
        np.testing.assert_array_equal(np.delete(out, [3, 70], 0), np.delete(case.wanted(), [3, 70], 0))


@pytest.mark.parametrize("quant", ["raw", "ptpc"])
def test_the_plain_kernel_delivers_too(quant):
    """What has no scaled MFMA: fp32 scales, misaligned operands, gfx942."""
    m, n, parts = 150, 70, [dataclasses.replace(operands(150, 70, seed)) for seed in (1, 2)]
    for i, x in enumerate(parts) if quant == "ptpc" else ():
        a_scale, b_scale = (np.random.default_rng(i).uniform(0.5, 2, rows).astype(F32) for rows in (m, n))
        x.product = (mx.E4M3[x.a] * a_scale[:, None].astype(np.float64)) @ (mx.E4M3[x.b] * b_scale[:, None].astype(np.float64)).T
        x.a_scale, x.b_scale = a_scale, b_scale
    call = Call(parts, [output(m, n) for _ in parts], form=f"simple {quant}")
    Ranks(2, 128 * n * 4).run([call], random(2))
    assert mx.error(call.outs[0], parts[0].product + parts[1].product) < FLOOR[np.dtype(F32)]
    np.testing.assert_array_equal(*call.outs)


# --- interleavings ---


def alternating(world: int) -> list[Case]:
    """Shapes that put other rows and other ranks' data in the same places."""
    return [Case(world, 140, 48, 1), Case(world, 260, 24, 2, BF16, chunk_rows=128), Case(world, 12, 48, 3, one_shot=True), Case(world, 140, 48, 4)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"delay": {0: 60_000}},
        {"delay": {1: 60_000}},
        {"delay": {rank: 60_000 for rank in range(1, 4)}},
        {"pace": {0: 8}},
        {"pace": {1: 8}},
        {},
    ],
    ids=["rank 0 late", "rank 1 late", "rank 0 early", "rank 0 slow", "rank 1 slow", "even"],
)
def test_ranks_that_come_late_or_early_or_run_slowly(world, options):
    for seed, retire in enumerate(("random", "late") if world == 2 else ("late",)):
        cases = alternating(world)
        run(cases, random(seed, retire), **options)
        for case in cases:
            case.check()


@pytest.mark.parametrize("resident", [1, 2, 64])
def test_a_device_that_holds_few_workgroups_comes_to_an_end(resident):
    cases = alternating(2)
    run(cases, random(9, resident=resident))
    assert all(case.right() for case in cases)


def test_signals_are_left_as_the_next_call_needs_them():
    cases = alternating(2)
    ranks = run(cases, random(3))
    for workspace in ranks.workspaces:
        signals = workspace[: symmetric.SIGNAL_BYTES].view(np.uint32)
        done, own = signals[2 * 16 * 64 :][:16], signals[2 * 16 * 64 + 16 :]
        assert done.tolist() == [4, 4] + [0] * 14
        assert own[0] == 4 and not own[1:].any()  # the epoch; no failure, no count, no ticket


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_is_named_and_the_result_is_nan(absent):
    case = Case(2, 100, 40, 1, timeout=100_000, absent=(absent,))
    ranks = run([case], random(1))
    present = 1 - absent
    assert ranks.failures[present][:3].tolist()[0] == absent + 1 and ranks.failures[present][2] == 1
    assert np.isnan(case.call.outs[present]).any() and not ranks.failures[absent].any()


# --- planted bugs ---

ROOT = Path(__file__).parents[2] / "csrc"
# By kernel: its file, and what is instantiated there instead of the launchers, so that nothing else is compiled.
KERNELS = {
    "deliver": ("gemm_ar_gfx950.hip", "deliver_tiles<1, mxfp8::RawScales>(const GemmArgs, const Call)"),
    "collective": ("collective_gfx950.hip", "collective<float, float, 8, false>(const Call, int)"),
    "one_shot": ("collective_gfx950.hip", "one_shot<float, float, 8, false>(const Call, int)"),
}
SIGNALS, DELIVER, COLLECTIVE = "signals_gfx950.h", "gemm_ar_gfx950.hip", "collective_gfx950.hip"
FENCE = '  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");\n'
STORED = "  gfx950::wait<0, 0>();\n  gfx950::barrier();\n"
# Name: the kernels that have it, the file, what is replaced by what.
BUGS = {
    "no tile releases its data": ("deliver", SIGNALS, FENCE, "", "value, __ATOMIC_RELEASE", "value, __ATOMIC_RELAXED"),
    "only the last tile releases its data": ("deliver", SIGNALS, FENCE, ""),
    "a tile is counted before its waves have stored": ("deliver", SIGNALS, STORED, ""),
    "the first tile of a chunk raises its flag": ("deliver", DELIVER, "chunk.number], tiles)", "chunk.number], 1)"),
    "tiles of all owners in one counter": ("deliver", DELIVER, "delivered[chunk.owner][chunk.number]", "delivered[0][chunk.number]"),
    "a counter is not reset": ("deliver", SIGNALS, "__hip_atomic_store(counter, 0u", "__hip_atomic_store(counter, all"),
    "flags are not stamped with the epoch": ("deliver", DELIVER, "mine->epoch + 1", "1u"),
    "summands in the slot of another rank": ("deliver", DELIVER, "call.slot(chunk.owner, call.rank)", "call.slot(chunk.owner, chunk.owner)"),
    "reducers do not wait": ("collective", COLLECTIVE, "if (!wait.all_arrived(number))", "if (false)"),
    "gatherers do not wait": ("collective", COLLECTIVE, "if (!wait.reduced(of,", "if (false && wait.reduced(of,"),
    "nobody drops what caches hold": ("deliver collective", SIGNALS, '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "")', ""),
    "sums are announced before they are stored": ("collective", SIGNALS, STORED, ""),
    "the epoch does not advance": ("collective", COLLECTIVE, "if (all) mine->epoch = wait.epoch;", ""),
    "sums begin with the own summand": ("collective", COLLECTIVE, "<Partial>(s);", "<Partial>((rows.call.rank + s) % rows.call.world);"),
    "a call ends without the others": ("one_shot", COLLECTIVE, "all &= wait(&mine->done[s], s, kDone)", "all &= true"),
    "a call's end is announced before its last read": ("one_shot", COLLECTIVE, "!is_last(&mine->finished_groups, groups)", "thread_id() != 0"),
}  # fmt: skip


def planted(name: str) -> dict[str, Kernel]:
    """The kernels with that bug, compiled from a copy of the sources, which lies where it lay the last time: compilers' output is cached."""
    which, file, *changes = BUGS[name]
    folder = CACHE / "planted" / re.sub(r"\W+", "_", name)
    for part in ("common", "mxfp8", "gemm_ar"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.cpp", "*.cu*", "*.metal"), dirs_exist_ok=True)
    changed = folder / "gemm_ar" / file
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in changed.read_text(), f"{old!r} does not stand in {file}"
        changed.write_text(changed.read_text().replace(old, new))
    kernels = {}
    for kernel in which.split():
        source, instantiated = KERNELS[kernel]
        text = (folder / "gemm_ar" / source).read_text()
        launchers = re.search(r"template <[^>]*(?:<int>[^>]*)?>\nhipError_t launch", text).start()
        only_it = folder / "gemm_ar" / f"{kernel}.hip"
        only_it.write_text(f"{text[:launchers]}template __global__ void {instantiated};\n}}\n}}\n")
        kernels[kernel] = only(compile_hip(only_it))
    return kernels


def attempts(one_shot: bool, kernels: dict[str, Kernel]):
    """Whether all is right, under one interleaving after the other."""
    for seed, pace in itertools.product(range(2), ({0: 8}, {2: 8}, {})):
        cases = [Case(3, m, 136, i, one_shot=one_shot) for i, m in enumerate((12, 10, 12) if one_shot else (140, 200))]
        try:
            run(cases, random(seed, ("late", "random")[seed % 2], budget=1_500_000), kernels=kernels, pace=pace)
        except Hazard as hazard:
            assert hazard.kind == "no-progress", hazard
            yield False
        else:
            yield all(case.right() for case in cases)


@pytest.mark.parametrize("one_shot", [False, True], ids=["overlapped", "one-shot"])
def test_without_a_bug_every_interleaving_is_right(one_shot):
    assert all(attempts(one_shot, {}))


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name):
    assert not all(attempts("one_shot" in BUGS[name][0], planted(name)))
