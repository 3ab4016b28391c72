"""A cycle model of one compute unit, driven by what the interpreter's waves executed. It ranks variants; it measures nothing.

Parameters are of the MI355X, from AMD's public documents (CDNA 4 white paper, MI355X data sheet: 256 CUs at 2.4 GHz, 5.03 PFLOP/s
MXFP8, 8 TB/s HBM3E, 64 B/clk from L2 to a CU), for the LDS one clock per phase of core/lds.h (256 B/clk for wide reads, 128 for
writes), and, where nothing is published, round assumptions (latencies). In the model: issue of one instruction per wave every 4
clocks, the matrix core and the vector ALU of each SIMD, the LDS with its bank conflicts, a memory pipe with a bandwidth and a
latency that returns in order, waits, barriers, priorities. Not in it: register dependencies that no wait covers, hazard nops,
instruction caches, DRAM pages, other workgroups, clock management.
"""

import re
from collections import deque
from dataclasses import dataclass

import numpy as np

from .assembly import Instruction
from .interpreter import Statistics

SIMDS = 4


@dataclass(frozen=True)
class Device:
    clock: float = 2.4e9
    units: int = 256
    issue: int = 4  # clocks between two instructions of a wave
    valu: int = 4
    copy_bytes: int = 128  # into the LDS, per clock
    lds_latency: int = 64
    memory_latency: int = 600  # L2; cold data: see `cold_latency`
    cold_latency: int = 1200
    memory_bytes: float = 64  # per clock and unit, from L2
    hbm_bytes: float = 8e12  # per second
    launch: float = 3e-6  # seconds of every launch that do not depend on its size


MI355X = Device()
OPERATIONS = 2048  # fp8, per clock and SIMD: 5.03 PFLOP/s


@dataclass(frozen=True)
class _Kind:
    unit: str  # matrix, valu, lds, memory, wait, barrier, other
    clocks: int = 0
    size: int = 0  # bytes that the LDS or the memory moves
    vmcnt: int = -1
    lgkmcnt: int = -1


def _phases(x: Instruction) -> int:
    """Of an LDS instruction, as in core/lds.h."""
    per_lane = _bytes(x) // 64
    if "read" in x.opcode:
        return {16: 4, 12: 8, 8: 2}.get(per_lane, 1) * (2 if "read2" in x.opcode else 1)
    return {16: 8, 12: 8, 8: 4}.get(per_lane, 2) * (2 if "write2" in x.opcode else 1)


def _bytes(x: Instruction) -> int:
    for suffix, n in (("x4", 16), ("b128", 16), ("x3", 12), ("b96", 12), ("x2", 8), ("b64", 8)):
        if x.opcode.endswith(suffix):
            return 64 * n
    return 64 * 4


def mfma_clocks(x: Instruction) -> int:
    """0 if it is not a matrix instruction. bf16 and fp16 run at half the rate of fp8."""
    shape = re.search(r"^v_mfma\w*_(\d+)x(\d+)x(\d+)_(\w+)", x.opcode)
    if not shape:
        return 0
    m, n, k = map(int, shape.groups()[:3])
    return 2 * m * n * k // OPERATIONS * (2 if "f16" in shape[4] else 1)


def _kind(x: Instruction, device: Device, conflicts: float) -> _Kind:
    op = x.opcode
    if op.startswith("v_mfma"):
        return _Kind("matrix", mfma_clocks(x))
    if op == "s_waitcnt":
        return _Kind("wait", vmcnt=int(x.modifiers.get("vmcnt", -1)), lgkmcnt=int(x.modifiers.get("lgkmcnt", -1)))
    if op == "s_barrier":
        return _Kind("barrier")
    if op.startswith("ds_"):
        return _Kind("lds", clocks=round(_phases(x) + conflicts))
    if op.startswith(("buffer_", "global_", "scratch_", "flat_")):
        return _Kind("memory", size=_bytes(x), clocks=_bytes(x) // device.copy_bytes if x.is_copy else 0)
    if op.startswith("s_load"):
        return _Kind("scalar")
    return _Kind("valu", device.valu) if op.startswith("v_") else _Kind("other")


@dataclass
class Estimate:
    cycles: int  # of one workgroup
    matrix_busy: float  # share of the cycles in which the matrix cores work
    waits: dict[str, int]  # cycles that wave 0 spends in waits and barriers


def workgroup(stats: Statistics, device: Device = MI355X, *, cold: bool = False) -> Estimate:
    """One workgroup alone on its unit, from the traces of its waves."""
    code = stats.kernel.instructions
    conflicts = np.divide(stats.conflict_cycles, stats.ds_accesses, out=np.zeros(len(code)), where=stats.ds_accesses > 0)
    kinds = [_kind(x, device, c) for x, c in zip(code, conflicts, strict=True)]
    priority = [int(x.text.split()[1], 0) if x.opcode == "s_setprio" else -1 for x in code]
    latency = device.cold_latency if cold else device.memory_latency

    waves = len(stats.traces)
    traces = [t.tolist() for t in stats.traces]
    at, ready, prio = [0] * waves, [0] * waves, [0] * waves
    vm: list[deque] = [deque() for _ in range(waves)]
    lgkm: list[deque] = [deque() for _ in range(waves)]
    matrix, valu, lds, memory = [0] * SIMDS, [0] * SIMDS, 0, 0.0
    arrived: dict[int, int] = {}
    busy, waited = 0, {"vmcnt": 0, "lgkmcnt": 0, "barrier": 0, "matrix": 0}

    def claim(free: float, now: int, clocks: float) -> float:
        return max(free, now) + clocks

    while True:
        live = [w for w in range(waves) if at[w] < len(traces[w]) and w not in arrived]
        if not live:
            if not arrived:
                break
            now = max(arrived.values())
            waited["barrier"] += now - arrived.get(0, now)
            for w in arrived:
                ready[w], at[w] = now + device.issue, at[w] + 1
            arrived = {}
            continue
        w = min(live, key=lambda i: (ready[i], -prio[i], i))
        now, simd = ready[w], w % SIMDS
        pc = traces[w][at[w]]
        k = kinds[pc]
        if priority[pc] >= 0:
            prio[w] = priority[pc]
        if k.unit == "barrier":
            arrived[w] = now
            continue
        if k.unit == "matrix":
            start = max(now, matrix[simd])
            waited["matrix"] += (start - now) * (w == 0)
            matrix[simd], busy, now = start + k.clocks, busy + k.clocks, start
        elif k.unit == "valu":
            now = max(now, valu[simd])
            valu[simd] = now + k.clocks
        elif k.unit == "lds":
            lds = claim(lds, now, k.clocks)
            lgkm[w].append(lds + device.lds_latency)
        elif k.unit == "memory":
            memory = claim(memory, now, k.size / device.memory_bytes)
            done = max(memory + latency, vm[w][-1] if vm[w] else 0)
            if k.clocks:
                lds = max(lds, now) + k.clocks  # the copy's share of the LDS
            vm[w].append(done)
        elif k.unit == "scalar":
            lgkm[w].append(now + device.memory_latency // 2)
        elif k.unit == "wait":
            for name, queue, left in (("vmcnt", vm[w], k.vmcnt), ("lgkmcnt", lgkm[w], k.lgkmcnt)):
                while 0 <= left < len(queue):
                    done = queue.popleft()
                    waited[name] += max(0, int(done) - now) * (w == 0)
                    now = max(now, int(done))
        ready[w], at[w] = int(now) + device.issue, at[w] + 1

    cycles = max(*ready, *matrix)
    return Estimate(cycles, busy / (SIMDS * cycles), waited)


def seconds(tile_cycles: float, tiles: int, hbm_bytes: float = 0, device: Device = MI355X) -> float:
    """A whole GEMM: rounds of workgroups over the units, each as long as one alone; not faster than the memory delivers."""
    return device.launch + max(-(-tiles // device.units) * tile_cycles / device.clock, hbm_bytes / device.hbm_bytes)
