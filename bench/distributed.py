"""gemm_ar in two processes (on GPUs: distributed_cuda.py): the same paired rounds as the other suites, every call between barriers, the slower rank counts.

On one host gloo is only a copy by the same cores, so there is nothing to hide behind a GEMM. The `link` cases therefore hold every
TCP connection to a rate (SO_MAX_PACING_RATE, by the kernel) at which the split form spends as long on the link as on the GEMM:
what two hosts on a network have.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import mori_ops
from bench import distributed_cuda, report
from bench.timing import Arm, Case, Goal
from mori_ops import collectives, reference
from mori_ops.collectives import Band, BandBuffers, Gemm, Group, Headers, Workspace
from mori_ops.distributed import GemmAllReduce
from tests import cases

WORLD = 2
ROUNDS = 11
SHAPES = ((1, 7168, 2048), (64, 7168, 2048), (512, 7168, 512))
SO_MAX_PACING_RATE = 47
NO_LIMIT = 2**64 - 1
SPLIT, ALL_REDUCE = "the same without overlap", "GEMM, then dist.all_reduce bf16"


def available(device: str) -> bool:
    return device == "cpu" or (torch.cuda.device_count() >= WORLD and mori_ops.kernels()["gemm_ar"]["cuda"])


def rows(device: str) -> list[dict[str, Any]]:
    """The rows of the report, from rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, device), nprocs=WORLD)
        return torch.load(f"{folder}/rows.pt", weights_only=False)


def _rank(rank: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)  # two processes on two cores
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    if device == "cuda":
        found = [distributed_cuda.row(case) for case in distributed_cuda.cases_of(rank, WORLD)]
    else:
        found = [report.row(case, "hot", _paired(case)) for case in _cases(rank)]
    if rank == 0:
        torch.save(found, f"{folder}/rows.pt")
    dist.destroy_process_group()


def _cases(rank: int) -> Iterator[Case]:
    for m, n, k in SHAPES:
        for link in ("loopback", "paced") if m >= 512 else ("loopback",):
            yield _case(rank, m, n, k, link)


def _case(rank: int, m: int, n: int, k: int, link: str) -> Case:
    operands = cases.gemm_operands(m, n, k, "mxfp8_raw", seed=rank)
    group = Group.named(dist.group.WORLD.group_name)
    all_reduce = GemmAllReduce(m, n)
    buffers = BandBuffers(Workspace(), m, n, group, torch.device("cpu"), fp8=False)
    out = torch.empty(m, n, dtype=torch.bfloat16)
    gemm = Gemm(*operands, "mxfp8_raw", None, torch.bfloat16, "bf16")
    partial = torch.empty(m, n)

    def split(_) -> None:
        band = Band(gemm, group, buffers, 0, out)
        headers = Headers(gemm.header(), group)
        band.multiply(0)
        headers.agree()
        band.scatter()
        band.reduce()
        band.complete()

    def standard(_) -> None:
        torch.ops.mori.mxfp8_raw.out(*operands, out=out)
        dist.all_reduce(out)

    def ours(_) -> None:
        all_reduce(*operands, "mxfp8_raw", out=out)

    arms = [Arm("mori.gemm_ar", ours, [None]), Arm(SPLIT, split, [None]), Arm(ALL_REDUCE, standard, [None])]
    arms.append(Arm("GEMM alone", lambda _: gemm.partial(0, m, partial), [None]))

    shape = {"m": m, "n": n, "k": k, "ranks": WORLD, "link": link}
    _pace(NO_LIMIT)
    if link == "paced":
        seconds = statistics.median(_timed(arms[-1]) for _ in range(5))
        rate = 3 * m * n / seconds  # half of the rows as fp32, half of the result as bf16
        _pace(int(rate))
        shape["link"] = f"{rate / 1e6:.0f} MB/s"

    def verify() -> None:
        some = torch.randperm(m, generator=torch.Generator().manual_seed(m))[:32]
        expected = 0
        for r in range(WORLD):
            a, b, a_scale, b_scale = cases.gemm_operands(m, n, k, "mxfp8_raw", seed=r)
            expected = expected + reference.scaled_gemm(a[some], b, a_scale[some], b_scale, "mxfp8_raw")
        for arm in arms[:2]:
            out.fill_(torch.nan)
            arm.call(None)
            cases.assert_close(out[some], expected)

    goals = [Goal((SPLIT,), 1.2)] if link == "paced" else []
    return Case("gemm_ar", shape, arms, verify, goals, flops=2 * m * n * k, modes=("hot",))


def _pace(rate: int) -> None:
    """Holds every TCP connection of this process to `rate` bytes per second in its sending direction."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate.to_bytes(8, sys.byteorder))
        except OSError:
            continue  # no socket


def _timed(arm: Arm) -> float:
    """Seconds of one call, of the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    arm.call(None)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _paired(case: Case) -> dict[str, list[float]]:
    case.verify()
    samples: dict[str, list[float]] = {arm.name: [] for arm in case.arms}
    for i in range(ROUNDS):
        shift = i % len(case.arms)
        for arm in case.arms[shift:] + case.arms[:shift]:
            samples[arm.name].append(_timed(arm))
    return samples
