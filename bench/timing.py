"""Paired timing: all arms of a case in one process, taking turns, medians of many short rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# A cold arm rotates operands of at least this size in total: four times the last-level cache (32 MB of an EPYC, 60 of an H200,
# 256 of an MI355X).
COLD_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30 if torch.version.hip else 256 << 20}
ROUND_SECONDS = 0.02  # calls per round are chosen so that a round takes about this long
ROUNDS = 25
BUDGET = 20.0  # seconds that the rounds of a case in one mode may take, past the first five
MOST_COPIES = 64


@dataclass
class Arm:
    """One implementation: `call(operands)` computes; `operands` are equal-sized copies of what it reads."""

    name: str
    call: Callable[[Any], Any]
    operands: Sequence[Any]


@dataclass
class Goal:
    """ours must be at least `ratio` times as fast as the named arms (the fastest of them)."""

    against: tuple[str, ...]
    ratio: float
    mode: str = "hot"  # "hot" or "cold"


@dataclass
class Case:
    """A shape of an operator with the arms to compare; the first arm is ours."""

    op: str
    shape: dict[str, int | str]
    arms: list[Arm]
    verify: Callable[[], dict[str, Any] | None]  # raises AssertionError when our result is wrong; figures about the result
    goals: list[Goal] = field(default_factory=list)
    bytes_moved: int = 0  # what any implementation must read and write
    flops: int = 0
    modes: tuple[str, ...] = ("hot", "cold")  # and on a GPU "alone": cold, between kernels that launches cannot overlap


def copies_of(operand: torch.Tensor) -> list[torch.Tensor]:
    """Enough copies that a cold arm, taking them in turn, finds none of them in the cache."""
    copies = -(-COLD_BYTES[operand.device.type] // max(operand.nbytes, 1))
    return [operand, *(operand.clone() for _ in range(min(MOST_COPIES, copies) - 1))]


class _HostRound:
    """Seconds per call by the host's clock. A cold call takes the next copy; a hot one always the first."""

    def __init__(self, arm: Arm, cold: bool) -> None:
        self.arm, self.cold, self.next = arm, cold, 0
        self.calls = max(1, round(ROUND_SECONDS / min(self.run(1) for _ in range(2))))  # also warms up

    def run(self, calls: int) -> float:
        operands = self.arm.operands
        start = time.perf_counter()
        for _ in range(calls):
            self.arm.call(operands[self.next if self.cold else 0])
            self.next = (self.next + 1) % len(operands)
        return (time.perf_counter() - start) / calls

    def __call__(self) -> float:
        return self.run(self.calls)


class _GraphRound:
    """Seconds per call inside the replay of a CUDA graph, by device events: no launch gaps of the host's."""

    def __init__(self, arm: Arm, cold: bool) -> None:
        once = self._capture(arm, 2, cold)
        self._replay(once, 2)
        self.calls = min(200, max(2, len(arm.operands) if cold else 0, round(ROUND_SECONDS / 4 / self._replay(once, 2))))
        self.graph = self._capture(arm, self.calls, cold)
        self()

    @staticmethod
    def _capture(arm: Arm, calls: int, cold: bool) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            arm.call(arm.operands[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                arm.call(arm.operands[i % len(arm.operands) if cold else 0])
        return graph

    @staticmethod
    def _replay(graph: torch.cuda.CUDAGraph, calls: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    def __call__(self) -> float:
        return self._replay(self.graph, self.calls)


class _AloneRound:
    """Seconds that a cold call adds to a graph in which a small kernel stands before every call, so that launches cannot overlap."""

    def __init__(self, arm: Arm) -> None:
        counter = torch.zeros(64, device="cuda")

        def spaced(operands: Any) -> None:
            counter.add_(1)
            arm.call(operands)

        self.both = _GraphRound(Arm(arm.name, spaced, arm.operands), cold=True)
        self.spacers = _GraphRound(Arm("spacer", lambda _: counter.add_(1), [None]), cold=False)

    def __call__(self) -> float:
        return self.both() - self.spacers()


def paired(case: Case, mode: str, device: str, *, rounds: int = ROUNDS, budget: float = BUDGET) -> dict[str, list[float]]:
    """Seconds per call of each arm, a sample per round. Arms alternate and change their order from round to round."""
    def timer(arm: Arm) -> Callable[[], float]:
        if mode == "alone":
            return _AloneRound(arm)
        return (_GraphRound if device == "cuda" else _HostRound)(arm, mode == "cold")

    timers = {arm.name: timer(arm) for arm in case.arms}
    samples: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    start = time.perf_counter()
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(timers[name]())
        if i >= 4 and time.perf_counter() - start > budget:
            break
    return samples


def summary(samples: list[float]) -> dict[str, float]:
    """Median and quartiles in microseconds."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return {"median_us": middle * 1e6, "q1_us": low * 1e6, "q3_us": high * 1e6, "rounds": len(samples)}


def _median_seconds(call: Callable[[], Any], device: str) -> float:
    return statistics.median(_time_once(call, device) for _ in range(9))


def _time_once(call: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_bandwidth(device: str) -> float:
    """Bytes per second of Tensor.copy_, read plus write, on 256 MB (1 GB on a GPU)."""
    source = torch.ones((256 if device == "cuda" else 64) << 20, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device)


def matmul_flops(device: str) -> float:
    """FLOP per second of torch's matmul: float32 1024x2048x2048 on the CPU, bfloat16 8192x8192x8192 on a GPU."""
    m, n, k, dtype = (8192, 8192, 8192, torch.bfloat16) if device == "cuda" else (1024, 2048, 2048, torch.float32)
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    return 2 * m * n * k / _median_seconds(lambda: a @ b, device)
