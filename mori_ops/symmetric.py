"""gemm_ar on CUDA over P2P memory: the symmetric workspace of a group (torch.distributed._symmetric_memory), or why there is none.

The protocol and the kernels are csrc/gemm_ar/*_sm90.* and, on AMD GPUs, *_gfx950.*. No multicast, no multimem. What ranks must agree on is exchanged between
their hosts, as on the CPU, before anything is launched: nothing waits for the GPU, and a disagreement raises in the call itself.
Replays of a CUDA graph have no host: there a rank that is missing runs into the kernels' own timeout, its absence raises in the
next call, and the output is NaN.
"""

from __future__ import annotations

import math
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mori_ops.collectives import PACK_ROWS, Gemm, Group, ranks_text

MAX_WORLD = 16
SIGNAL_BYTES = 16 << 10  # csrc/gemm_ar/gemm_ar_sm90.h
ONE_SHOT_BYTES = 32 << 20  # partial sums of one_shot on all ranks, at most (csrc/gemm_ar/gemm_ar_sm90.cpp)
SPANS, SPAN_CHUNKS = 4, 4  # spans of each rank and chunks of a span where every span is a launch of the GEMM
TILE_ROWS, TILE_SPANS = 256, 16  # unit of spans and spans of each rank where one launch delivers them all
SIGNALS = ("partial sums", "finished rows", "end")


def chunks(rows: int, world: int, *, one_launch: bool) -> tuple[int, int]:
    """Rows that an owner reduces at a time, and how many times that make a span, what the GEMM computes for one owner at a time."""
    if one_launch and rows > world * TILE_ROWS:
        return -(-rows // (world * TILE_SPANS * TILE_ROWS)) * TILE_ROWS, 1
    unit = TILE_ROWS if rows >= TILE_ROWS * world else PACK_ROWS
    span = -(-rows // (world * SPANS * unit)) * unit
    return (span // SPAN_CHUNKS, SPAN_CHUNKS) if span % (SPAN_CHUNKS * PACK_ROWS) == 0 else (span, 1)


def own_rows(rows: int, world: int, chunk: int, span_chunks: int) -> int:
    span = chunk * span_chunks
    return -(-rows // (span * world)) * span


@contextmanager
def without_multicast() -> Iterator[None]:
    """A rendezvous that asks the fabric for nothing that we use; it also fails on machines without NVLink switches."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class SymmetricWorkspace:
    """Memory that every rank of the group reads and writes, for calls of up to `slot_bytes` of partial sums per owner."""

    def __init__(self, group: Group, slot_bytes: int, device: torch.device, timeout: float) -> None:
        import torch.distributed._symmetric_memory as symm_mem  # 80 ms that only this needs

        self.group, self.device, self.timeout = group, device, timeout
        self.slot_bytes = max(64 << 10, -(-slot_bytes // 1024) * 1024)
        sums = SIGNAL_BYTES + group.world * self.slot_bytes
        scales = sums + self.slot_bytes
        self.layout = [self.slot_bytes, sums, scales]
        self.scale_bytes = self.slot_bytes // 16
        self.nbytes = scales + self.scale_bytes
        with torch.cuda.device(device), without_multicast():
            self.memory = symm_mem.empty(self.nbytes, dtype=torch.uint8, device=device)
            self.memory[:SIGNAL_BYTES].zero_()
            self.handle = symm_mem.rendezvous(self.memory, group.process_group.group_name)
            self.failure = torch.zeros(4, dtype=torch.int32, pin_memory=True)
            self.side = torch.cuda.Stream(device, priority=-1)
            torch.cuda.synchronize(device)
        dist.barrier(group=group.control)
        self.workspaces = list(self.handle.buffer_ptrs)

    def peers_see_writes(self) -> bool:
        """Every rank writes to every other and finds what they wrote (an IOMMU may drop it)."""
        at = (SIGNAL_BYTES - 4 * MAX_WORLD) // 4
        for rank in self.group.peers:
            self.handle.get_buffer(rank, (1,), torch.int32, at + self.group.rank).fill_(self.group.rank + 1)
        torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group.control)
        found = self.handle.get_buffer(self.group.rank, (self.group.world,), torch.int32, at).tolist()
        return all(found[rank] == rank + 1 for rank in self.group.peers)

    def check(self) -> None:
        missing, signal, epoch = self.failure[:3].tolist()
        if missing:
            raise RuntimeError(
                f"gemm_ar: {ranks_text([missing - 1])} of group '{self.group.name}' did not take part in call {epoch} on this workspace: "
                f"its {SIGNALS[signal]} did not come within {self.timeout:g} s (seen by rank {self.group.rank}); the result was NaN"
            )

    def run(self, gemm: Gemm, one_shot: bool, out: torch.Tensor) -> None:
        """As many rows at a time as fit."""
        world, row_bytes = self.group.world, gemm.columns * partial_bytes(gemm.out_dtype)
        one_launch = gemm.quant.startswith("mxfp8") and gemm.out_dtype == torch.bfloat16 and gemm.columns % 8 == 0
        one_shot = one_shot and gemm.rows * row_bytes <= self.slot_bytes
        most_rows = min(self.slot_bytes // row_bytes, self.scale_bytes // 4)  # of one owner
        step = gemm.rows
        while not one_shot and own_rows(step, world, *chunks(step, world, one_launch=one_launch)) > most_rows:
            step = -(-step // (2 * PACK_ROWS)) * PACK_ROWS
        for start in range(0, gemm.rows, step):
            stop = min(start + step, gemm.rows)
            a, a_scale = gemm.band(start, stop)
            torch.ops.mori._gemm_ar_symmetric(
                a, gemm.b, a_scale, gemm.b_scale, gemm.quant, gemm.bias, gemm.wire, one_shot, *chunks(stop - start, world, one_launch=one_launch),
                self.group.rank, self.workspaces, self.layout, self.failure.data_ptr(), self.timeout, self.side.cuda_stream,
                out=out[start:stop],
            )  # fmt: skip

    def close(self) -> None:
        """Nobody touches a rank's memory after the end of its own last call."""
        torch.cuda.synchronize(self.device)
        self.workspaces = []
        del self.handle, self.memory


def partial_bytes(out_dtype: torch.dtype) -> int:
    """Of a partial sum: bf16 for a bf16 result, fp32 for the others."""
    return 2 if out_dtype == torch.bfloat16 else 4


def slot_bytes(m_max: int, n_max: int, itemsize: int, world: int) -> int:
    """Enough for any number of rows up to m_max, in whichever way they are cut."""
    span = max(math.prod(chunks(m_max, world, one_launch=one_launch)) for one_launch in (False, True))
    one_shot = min(m_max * n_max * itemsize, ONE_SHOT_BYTES // world)
    return max((m_max // world + 2 * span) * n_max * itemsize, one_shot)


def obstacle(group: Group, device: torch.device) -> str | None:
    """Why this group cannot share memory; the same answer on every rank."""
    mine = (socket.gethostname(), device.index)
    places: list[tuple[str, int]] = [mine] * group.world
    dist.all_gather_object(places, mine, group=group.control)
    if group.world > MAX_WORLD:
        return f"it has more than {MAX_WORLD} ranks"
    if len({host for host, _ in places}) > 1:
        return "its ranks are on several hosts"
    if len(set(places)) < group.world:
        return "two of its ranks use the same GPU"
    reachable = all(torch.cuda.can_device_access_peer(device, index) for _, index in places if index != device.index)
    answers = [reachable] * group.world
    dist.all_gather_object(answers, reachable, group=group.control)
    return None if all(answers) else "some of its GPUs cannot access each other's memory"


def open_workspace(group: Group, wanted_bytes: int, device: torch.device, timeout: float) -> SymmetricWorkspace | None:
    """A workspace, or None with a warning on every rank when one of them cannot have it."""
    reason = obstacle(group, device)
    workspace = None
    if reason is None:
        try:
            workspace = SymmetricWorkspace(group, wanted_bytes, device, timeout)
            if not workspace.peers_see_writes():
                reason = "writes to another GPU's memory do not arrive"
        except RuntimeError as error:
            reason = f"symmetric memory cannot be set up: {error}"
    reasons = [reason] * group.world
    dist.all_gather_object(reasons, reason, group=group.control)
    reason = next((r for r in reasons if r is not None), None)
    if reason is None:
        return workspace
    warnings.warn(f"gemm_ar: group '{group.name}' falls back to sends and receives of torch.distributed, without P2P memory: {reason}", stacklevel=2)
    return None
