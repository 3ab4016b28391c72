"""Runs gfx950 kernels from their assembly: encodes them for core/ (C++), builds kernel arguments, reports hazards by source line."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .assembly import Instruction, Kernel, Operand

CORE = Path(__file__).parent / "core"
CACHE = Path(__file__).parents[2] / "build" / "gfx950"

# The same order as enum Mod in core/program.h.
MODS = [
    "target", "vmcnt", "lgkmcnt", "offset", "offset0", "offset1", "offen", "idxen", "lds", "sc0", "sc1", "nt",
    "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "cbsz", "blgp", "bitop3", "clamp", "omod",
    "dpp", "dpp_arg", "row_mask", "bank_mask", "bound_ctrl", "sdwa", "dst_sel", "dst_unused", "operands",
]  # fmt: skip
_MOD = {name: i for i, name in enumerate(MODS)}
_FLAGS = {"offen", "idxen", "lds", "sc0", "sc1", "nt", "clamp", "gds"}
_NUMBERS = {"offset", "offset0", "offset1", "cbsz", "blgp", "bitop3", "row_mask", "bank_mask", "bound_ctrl", "vmcnt", "lgkmcnt"}
_BITS = {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"}
_SELECT = {"BYTE_0": 0, "BYTE_1": 1, "BYTE_2": 2, "BYTE_3": 3, "WORD_0": 4, "WORD_1": 5, "DWORD": 6}
_UNUSED = {"UNUSED_PAD": 0, "UNUSED_SEXT": 1, "UNUSED_PRESERVE": 2}
_DPP = {
    "quad_perm": 1,
    "row_shl": 2,
    "row_shr": 3,
    "row_ror": 4,
    "row_mirror": 5,
    "row_half_mirror": 6,
    "row_bcast": 7,
    "row_newbcast": 8,
    "wave_shr": 9,
}
_OMOD = {"2": 1, "4": 2}
_KIND = {"off": 0, "s": 1, "v": 2, "int": 3, "float": 4, "label": 0}

OPERAND = np.dtype([("kind", "u1"), ("count", "u1"), ("mods", "u1"), ("sel", "u1"), ("index", "<i4"), ("value", "<u8")])
INST = np.dtype([("op", OPERAND, 6), ("mod", "<i4", len(MODS))])
COUNTERS = np.dtype([("executed", "<u8"), ("ds_accesses", "<u8"), ("conflict_cycles", "<u8")])


class Hazard(AssertionError):
    """The kernel did something that the hardware would not forgive, or not always."""

    def __init__(self, kind: str, text: str, where: str):
        super().__init__(f"{kind}: {text}\n  {where}")
        self.kind = kind


@dataclass(frozen=True)
class Schedule:
    """When transfers take effect, in which order waves run, and how the raw-buffer range check reads."""

    retire: str = "late"  # late: only when a wait demands it; early: at issue; random
    order: str = "forward"  # forward, reverse, random
    quantum: int = 1 << 20  # instructions before another wave runs (order random: at most)
    seed: int = 0
    soffset_checked: bool = True
    resident: int = 1  # workgroups of one launch in flight
    caches: bool = False  # model the caches: stores and loads reach as far as their scope says, no further
    budget: int = 200_000_000


LATE = Schedule()
# One order alone misses bugs: what retires late hides a missing barrier from the first wave, early hides a missing wait.
SCHEDULES = (
    LATE,
    Schedule("late", "reverse", soffset_checked=False),
    Schedule("early", "forward", soffset_checked=False),
    Schedule("random", "random", quantum=64, seed=1),
)


@dataclass
class Launch:
    kernel: Kernel
    grid: tuple[int, ...]
    block: int | tuple[int, ...]
    arguments: tuple = ()
    lds_bytes: int | None = None  # dynamic LDS: instead of the kernel's own size
    device: int = 0
    after: "Launch | None" = None  # the launch of the same run that ends before this one starts: a stream
    delay: int = 0  # instructions that the others execute first, if they can
    pace: int = 1  # its waves run in one of this many rounds
    trace: int = 0  # program counters to keep per wave of the first workgroup


@dataclass
class Statistics:
    kernel: Kernel
    executed: np.ndarray  # per instruction, over all waves
    ds_accesses: np.ndarray
    conflict_cycles: np.ndarray
    traces: list[np.ndarray] = field(default_factory=list)  # per wave of the first workgroup
    trace_lengths: np.ndarray | None = None

    def count(self, prefix: str) -> int:
        return sum(int(n) for n, x in zip(self.executed, self.kernel.instructions, strict=True) if x.opcode.startswith(prefix))

    def opcodes(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for n, x in zip(self.executed, self.kernel.instructions, strict=True):
            out[x.opcode] = out.get(x.opcode, 0) + int(n)
        return out


class _Launch(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_void_p), ("names", ctypes.c_void_p), ("counters", ctypes.c_void_p), ("trace", ctypes.c_void_p),
        ("trace_length", ctypes.c_void_p), ("trace_capacity", ctypes.c_uint64), ("length", ctypes.c_uint32), ("lds_bytes", ctypes.c_uint32),
        ("scratch_bytes", ctypes.c_uint32), ("user_sgprs", ctypes.c_uint32), ("workgroup_ids", ctypes.c_uint32),
        ("device", ctypes.c_uint32), ("after", ctypes.c_int32), ("pace", ctypes.c_uint32), ("delay", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("user_sgpr", ctypes.c_uint32 * 32),
    ]  # fmt: skip


class _Buffer(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64), ("size", ctypes.c_uint64), ("data", ctypes.c_void_p)]


class _Policy(ctypes.Structure):
    _fields_ = [
        (n, ctypes.c_int32) for n in ("retire", "order", "quantum", "seed", "soffset_checked", "resident", "caches", "unused")
    ] + [("budget", ctypes.c_uint64)]


class _Error(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char * 40), ("text", ctypes.c_char * 280), ("launch", ctypes.c_int32), ("pc", ctypes.c_int32),
                ("wave", ctypes.c_int32), ("workgroup", ctypes.c_int32 * 3)]  # fmt: skip


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


@functools.cache
def core() -> ctypes.CDLL:
    """The C++ core, built when its sources have changed."""
    sources = sorted(CORE.iterdir())
    key = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]
    library = CACHE / f"core-{key}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        scratch = library.with_suffix(f".{os.getpid()}.tmp")
        subprocess.run([compiler(), "-std=c++17", "-O3", "-shared", "-fPIC", "-o", scratch, CORE / "machine.cpp"], check=True)
        scratch.rename(library)
    lib = ctypes.CDLL(str(library))
    assert lib.gfx950_sizes(0) == INST.itemsize and lib.gfx950_sizes(1) == ctypes.sizeof(_Launch), (
        "interpreter.py and core/ disagree on a layout"
    )
    return lib


def knows(opcode: str) -> bool:
    return bool(core().gfx950_knows(opcode.encode()))


def _encode(kernel: Kernel) -> np.ndarray:
    """Once per kernel: it takes longer than many a run."""
    if kernel.encoded is not None:
        return kernel.encoded
    code = np.zeros(len(kernel.instructions), INST)
    for x, out in zip(kernel.instructions, code, strict=True):
        try:
            _encode_one(x, kernel.labels, out)
        except (KeyError, ValueError) as e:
            raise ValueError(f"assembly line {x.line}: cannot encode `{x.text}`: {e!r}") from e
    kernel.encoded = code
    return code


def _encode_one(x: Instruction, labels: dict[str, int], out: np.void) -> None:
    mod = out["mod"]
    mod[_MOD["vmcnt"]] = mod[_MOD["lgkmcnt"]] = -1
    mod[_MOD["op_sel_hi"]] = -1
    mod[_MOD["row_mask"]] = mod[_MOD["bank_mask"]] = 15
    mod[_MOD["dst_sel"]] = 6
    mod[_MOD["operands"]] = len(x.operands)
    for i, o in enumerate(x.operands):
        out["op"][i] = _encode_operand(o, x.modifiers.get(f"src{i - 1}_sel", "DWORD"))
        if o.kind == "label":
            mod[_MOD["target"]] = labels[o.value]
    for key, value in x.modifiers.items():
        if key == "encoding":
            mod[_MOD["sdwa"]] = value == "sdwa"
        elif key in _FLAGS:
            mod[_MOD[key]] = 1
        elif key in _NUMBERS:
            mod[_MOD[key]] = np.int64(int(value, 0)).astype(np.int32)
        elif key in _BITS:
            mod[_MOD[key]] = sum(int(b) << i for i, b in enumerate(value.strip("[]").split(",")))
        elif key in _DPP:
            mod[_MOD["dpp"]] = _DPP[key]
            lanes = value.strip("[]").split(",")
            mod[_MOD["dpp_arg"]] = sum(int(v) << (2 * i) for i, v in enumerate(lanes)) if key == "quad_perm" else int(value, 0)
        elif key in ("mul", "div"):
            mod[_MOD["omod"]] = 3 if key == "div" else _OMOD[value]
        elif key == "dst_sel":
            mod[_MOD["dst_sel"]] = _SELECT[value]
        elif key == "dst_unused":
            mod[_MOD["dst_unused"]] = _UNUSED[value]
        elif key not in ("src0_sel", "src1_sel", "expcnt"):
            raise ValueError(f"unknown modifier {key}")


def _encode_operand(o: Operand, select: str) -> tuple:
    value = 0
    if o.kind == "int":
        value = o.value & 0xFFFFFFFFFFFFFFFF
    elif o.kind == "float":
        value = int(np.float64(o.value).view(np.uint64))
    return (_KIND[o.kind], o.count, o.neg | o.abs << 1 | o.sext << 2, _SELECT[select], o.index, value)


class Machine:
    """Arrays at device addresses, shared by everything that runs on it."""

    def __init__(self) -> None:
        self._arrays: list[tuple[np.ndarray, int]] = []
        self._next = 0x7F00_0000_0000

    def address(self, array: np.ndarray) -> int:
        """Where kernels find this array (which they read and write in place). A part of an earlier array lies inside it."""
        if not array.flags.c_contiguous:
            raise ValueError("kernel arguments must be contiguous")
        start = array.ctypes.data
        for other, address in self._arrays:
            offset = start - other.ctypes.data
            if 0 <= offset and offset + array.nbytes <= other.nbytes and array.nbytes:
                return address + offset
            if -array.nbytes < offset < other.nbytes:
                raise ValueError("an array overlaps an earlier one: pass the larger one first")
        self._arrays.append((array, self._next))
        self._next += (array.nbytes + (1 << 33)) >> 32 << 32
        return self._arrays[-1][1]

    def run(self, *launches: Launch, schedule: Schedule = LATE) -> list[Statistics]:
        """Runs the launches together, on memory they share; raises Hazard."""
        keep: list[object] = []
        c_launches = (_Launch * len(launches))()
        stats = []
        for launch, c in zip(launches, c_launches, strict=True):
            stats.append(self._prepare(launch, c, keep))
            c.after = next((i for i, other in enumerate(launches) if other is launch.after), -1)
        buffers = (_Buffer * len(self._arrays))(*[_Buffer(address, a.nbytes, a.ctypes.data) for a, address in self._arrays])
        policy = _Policy(
            ("late", "early", "random").index(schedule.retire),
            ("forward", "reverse", "random").index(schedule.order),
            schedule.quantum,
            schedule.seed,
            schedule.soffset_checked,
            schedule.resident,
            schedule.caches,
            0,
            schedule.budget,
        )
        error = _Error()
        if core().gfx950_run(c_launches, len(launches), buffers, len(buffers), ctypes.byref(policy), ctypes.byref(error)):
            raise _hazard(error, launches)
        for s in stats:
            s.traces = [t[:n] for t, n in zip(s.traces, s.trace_lengths, strict=True)]
        return stats

    def _prepare(self, launch: Launch, c: _Launch, keep: list) -> Statistics:
        kernel = launch.kernel
        grid, block = _three(launch.grid), _three(launch.block)
        code = _encode(kernel)
        counters = np.zeros(len(code), COUNTERS)
        names = (ctypes.c_char_p * len(code))(*[x.opcode.encode() for x in kernel.instructions])
        kernarg = self._kernarg(kernel, launch.arguments, grid, block)
        waves = -(-int(np.prod(block)) // 64)
        trace, lengths = np.zeros((waves, max(launch.trace, 1)), np.uint32), np.zeros(waves, np.uint64)
        keep += [code, counters, names, kernarg, trace, lengths]
        c.code, c.names, c.counters = code.ctypes.data, ctypes.cast(names, ctypes.c_void_p), counters.ctypes.data
        c.trace, c.trace_length, c.trace_capacity = (
            trace.ctypes.data if launch.trace else None,
            lengths.ctypes.data,
            launch.trace,
        )
        d = kernel.directives
        lds = launch.lds_bytes if launch.lds_bytes is not None else d.get("group_segment_fixed_size", 0)
        c.length, c.lds_bytes, c.scratch_bytes, c.device = len(code), lds, d.get("private_segment_fixed_size", 0), launch.device
        c.pace, c.delay = launch.pace, launch.delay
        sgprs = self._user_sgprs(kernel, kernarg, grid, block)
        c.user_sgprs = len(sgprs)
        c.user_sgpr[: len(sgprs)] = sgprs
        c.workgroup_ids = sum(d.get(f"system_sgpr_workgroup_id_{a}", 1) << i for i, a in enumerate("xyz"))
        c.grid[:], c.block[:] = grid, block
        traced = (list(trace), lengths) if launch.trace else ([], lengths[:0])
        return Statistics(kernel, counters["executed"], counters["ds_accesses"], counters["conflict_cycles"], *traced)

    def _user_sgprs(self, kernel: Kernel, kernarg: np.ndarray, grid: tuple, block: tuple) -> list[int]:
        d = kernel.directives
        out: list[int] = []
        packet = np.zeros(64, np.uint8)  # hsa_kernel_dispatch_packet_t
        packet[4:10].view(np.uint16)[:] = block
        packet[12:24].view(np.uint32)[:] = np.multiply(grid, block)
        if d.get("user_sgpr_dispatch_ptr", 0):
            out += _words(self.address(packet))
        if d.get("user_sgpr_queue_ptr", 0):
            out += [0, 0]
        if d.get("user_sgpr_kernarg_segment_ptr", 1):
            out += _words(self.address(kernarg))
        if d.get("user_sgpr_dispatch_id", 0):
            out += [0, 0]
        if d.get("user_sgpr_private_segment_size", 0):
            out += [d.get("private_segment_fixed_size", 0)]
        length, offset = d.get("user_sgpr_kernarg_preload_length", 0), d.get("user_sgpr_kernarg_preload_offset", 0)
        return out + kernarg.view(np.uint32)[offset : offset + length].tolist()

    def _kernarg(self, kernel: Kernel, arguments: tuple, grid: tuple, block: tuple) -> np.ndarray:
        explicit = [a for a in kernel.arguments if not a[2].startswith("hidden_")]
        layout = kernel.arguments or [(8 * i, 8, "") for i in range(len(arguments))]
        if kernel.arguments and len(arguments) > len(explicit):
            raise ValueError(f"{kernel.name} takes {len(explicit)} arguments, got {len(arguments)}")
        raw = np.zeros(-(-max([o + s for o, s, _ in layout], default=0) // 16) * 16 + 64, np.uint8)
        values = iter(arguments)
        hidden = {f"hidden_block_count_{a}": n for a, n in zip("xyz", grid, strict=True)}
        hidden |= {f"hidden_group_size_{a}": n for a, n in zip("xyz", block, strict=True)}
        for offset, size, kind in layout:
            data = b""
            if kind.startswith("hidden_"):
                data = int(hidden.get(kind, 0)).to_bytes(size, "little")
            elif (value := next(values, None)) is not None:
                data = self._bytes(value, size)
            raw[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return raw

    def _bytes(self, value: object, size: int) -> bytes:
        if isinstance(value, np.ndarray):
            return self.address(value).to_bytes(8, "little")
        if isinstance(value, bytes):
            data = value
        elif isinstance(value, np.generic):
            data = value.tobytes()
        else:
            data = int(value).to_bytes(size, "little", signed=int(value) < 0)
        if len(data) != size:
            raise ValueError(f"an argument of {len(data)} bytes where the kernel takes {size}")
        return data


def run(
    kernel: Kernel,
    grid: int | tuple,
    block: int | tuple,
    *arguments: object,
    schedule: Schedule = LATE,
    lds_bytes: int | None = None,
    trace: int = 0,
) -> Statistics:
    """One launch. Arrays are written in place; unsigned and signed Python integers take the size that the kernel declares."""
    return Machine().run(Launch(kernel, _three(grid), _three(block), arguments, lds_bytes, trace=trace), schedule=schedule)[0]


def _three(n: int | tuple) -> tuple[int, int, int]:
    n = (n,) if isinstance(n, int) else tuple(n)
    return (*n, 1, 1)[:3]


def _words(x: int) -> list[int]:
    return [x & 0xFFFFFFFF, x >> 32]


def _hazard(error: _Error, launches: tuple[Launch, ...]) -> Hazard:
    kernel = launches[error.launch].kernel
    where = f"kernel {kernel.name}, workgroup {tuple(error.workgroup)}, wave {error.wave}"
    if 0 <= error.pc < len(kernel.instructions):
        x = kernel.instructions[error.pc]
        where += f"\n  assembly line {x.line}: {x.text}" + (f"\n  from {x.source}" if x.source else "")
    return Hazard(error.kind.decode(), error.text.decode(), where)
