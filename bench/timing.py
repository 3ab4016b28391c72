"""Paired timing: all arms of a case in one process, taking turns, medians of many short rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

COLD_BYTES = 128 << 20  # a cold arm rotates operands of at least this size in total: four times a 32 MB last-level cache
ROUND_SECONDS = 0.02  # calls per round are chosen so that a round takes about this long
ROUNDS = 25


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
    verify: Callable[[], None]  # raises AssertionError when our result is wrong
    goals: list[Goal] = field(default_factory=list)
    bytes_moved: int = 0  # what any implementation must read and write
    flops: int = 0
    modes: tuple[str, ...] = ("hot", "cold")


def copies_of(operand: torch.Tensor) -> list[torch.Tensor]:
    """Enough copies that a cold arm, taking them in turn, finds none of them in the cache."""
    return [operand, *(operand.clone() for _ in range(max(1, -(-COLD_BYTES // max(operand.nbytes, 1)) - 1)))]


def _round(arm: Arm, calls: int, offset: int, cold: bool) -> float:
    """Seconds per call. A cold call takes the next copy; a hot one always the first."""
    count = len(arm.operands)
    start = time.perf_counter()
    for i in range(calls):
        arm.call(arm.operands[(offset + i) % count if cold else 0])
    return (time.perf_counter() - start) / calls


def paired(case: Case, mode: str, *, rounds: int = ROUNDS, budget: float = 20.0) -> dict[str, list[float]]:
    """Seconds per call of each arm, a sample per round. Arms alternate and change their order from round to round."""
    cold = mode == "cold"
    calls = {}
    for arm in case.arms:
        once = min(_round(arm, 1, i, cold) for i in range(2))  # also warms up
        calls[arm.name] = max(1, round(ROUND_SECONDS / once))
    samples: dict[str, list[float]] = {arm.name: [] for arm in case.arms}
    offsets = dict.fromkeys(samples, 0)
    start = time.perf_counter()
    for i in range(rounds):
        shift = i % len(case.arms)
        for arm in case.arms[shift:] + case.arms[:shift]:
            samples[arm.name].append(_round(arm, calls[arm.name], offsets[arm.name], cold))
            offsets[arm.name] += calls[arm.name]
        if i >= 4 and time.perf_counter() - start > budget:
            break
    return samples


def summary(samples: list[float]) -> dict[str, float]:
    """Median and quartiles in microseconds."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return {"median_us": middle * 1e6, "q1_us": low * 1e6, "q3_us": high * 1e6, "rounds": len(samples)}


def copy_bandwidth(device: str) -> float:
    """Bytes per second of Tensor.copy_ on 256 MB, read plus write."""
    source = torch.ones(64 << 20, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(times)


def matmul_flops(device: str) -> float:
    """FLOP per second of a float32 matmul of 1024x2048 by 2048x2048."""
    a, b = torch.randn(1024, 2048, device=device), torch.randn(2048, 2048, device=device)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * 1024 * 2048 * 2048 / statistics.median(times)
