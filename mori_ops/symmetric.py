"""gemm_ar on CUDA over P2P memory: the symmetric workspace of a group (torch.distributed._symmetric_memory), or why there is none.

The protocol and the kernels are csrc/gemm_ar/*_sm90.* and, on AMD GPUs, *_gfx950.*. No multicast, no multimem. What ranks must agree
on is exchanged between their hosts before anything is launched: nothing waits for the GPU, and a disagreement raises in the call itself.
Replays of a CUDA graph have no host: there a rank that is missing runs into the kernels' own timeout, its absence raises in the
next call, and the output is NaN.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from mori_ops.collectives import BLOCK, PACK_ROWS, Gemm, Group, ranks_text

MAX_WORLD = 16
SIGNAL_BYTES = 64 << 10  # csrc/gemm_ar/gemm_ar_sm90.h
ONE_SHOT_ELEMENTS = 4 << 20  # the most that the table in csrc/gemm_ar/gemm_ar_sm90.cpp gives to one_shot
SPANS, SPAN_CHUNKS = 4, 4  # of `spans`: spans of each rank, chunks of a span
TILE_ROWS, PAIR_CHUNKS = 256, 4  # of `pair`: rows of a GEMM tile, chunks of each rank
DELIVERY_SPANS = 16  # of `overlapped`: spans of each rank
WIRE_TAIL = 16  # bytes behind the codes of a row on the fp8 wire
SIDE_STREAMS = 2  # for the copies of `pair`, which take the chunks in turn
SIGNALS = ("partial sums", "finished rows", "end", "own partial sums")


def one_chunk(rows: int, world: int) -> tuple[int, int]:
    return rows, 1


def span_chunks(rows: int, world: int) -> tuple[int, int]:
    """`spans`: rows that an owner reduces at a time, and how many times that make a span, what the GEMM computes for one owner at a time."""
    unit = TILE_ROWS if rows >= TILE_ROWS * world else PACK_ROWS
    span = -(-rows // (world * SPANS * unit)) * unit
    return (span // SPAN_CHUNKS, SPAN_CHUNKS) if span % (SPAN_CHUNKS * PACK_ROWS) == 0 else (span, 1)


def pair_chunks(rows: int, world: int) -> tuple[int, int]:
    """`pair`: rows of a chunk, and chunks of a rank's span; there is one span for each rank."""
    tiles = -(-rows // (world * TILE_ROWS))
    chunk = -(-tiles // PAIR_CHUNKS)
    return chunk * TILE_ROWS, -(-tiles // chunk)


def delivery_chunks(rows: int, world: int) -> tuple[int, int]:
    """`overlapped`: the same where one GEMM delivers to all owners: a chunk is a span."""
    if rows <= world * TILE_ROWS:
        return span_chunks(rows, world)
    return -(-rows // (world * DELIVERY_SPANS * TILE_ROWS)) * TILE_ROWS, 1


def own_rows(rows: int, world: int, chunk: int, chunks: int) -> int:
    span = chunk * chunks
    return -(-rows // (span * world)) * span


@dataclass(frozen=True)
class Part:
    """Rows that are computed by one launch."""

    start: int
    stop: int
    algorithm: str
    chunk: int
    chunks: int


CUTS = {"one_shot": one_chunk, "pair": pair_chunks, "spans": span_chunks, "overlapped": delivery_chunks}


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


class Board:
    """What ranks on one host must agree on, call by call, without a message: a word of each rank in memory that they share.

    A word is the number of the call and a hash of its header. Where hashes differ, every rank sees it. Words of successive calls
    alternate between two places: nobody is two calls ahead.
    """

    PLACES, HASH_BITS = 8, 40  # a rank's words are apart by a cache line

    def __init__(self, group: Group, words: ctypes.Array) -> None:
        self.group, self.words, self.timeout = group, words, group.timeout
        self.call = 0

    @classmethod
    def open(cls, group: Group) -> Board | None:
        """Collective. None on all ranks when one of them does not see the others' memory."""
        size = 8 * cls.PLACES * group.world
        words = file = path = None
        try:
            if group.rank == 0:
                file, path = tempfile.mkstemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
                os.ftruncate(file, size)
        except OSError:
            path = None
        paths: list[str | None] = [path] * group.world
        dist.all_gather_object(paths, path, group=group.control)
        try:
            if group.rank != 0:
                file = os.open(paths[0] or "", os.O_RDWR)
            words = (ctypes.c_uint64 * (size // 8)).from_buffer(mmap.mmap(file, size))
        except (OSError, TypeError, ValueError):
            pass
        opened = [False] * group.world
        dist.all_gather_object(opened, words is not None, group=group.control)
        if file is not None:
            os.close(file)
        if path is not None:
            os.unlink(path)
        return cls(group, words) if all(opened) else None

    def same(self, header: list[int]) -> bool:
        """Whether all ranks have come with this header."""
        self.call += 1
        mine = self.call << self.HASH_BITS | hash(tuple(header)) & (1 << self.HASH_BITS) - 1
        place = self.call % 2
        words = self.words
        words[self.PLACES * self.group.rank + place] = mine
        same = True
        for rank in self.group.peers:
            word = words[self.PLACES * rank + place]
            if word >> self.HASH_BITS != self.call:
                word = self.wait(rank, place)
            same &= word == mine
        return same

    def wait(self, rank: int, place: int) -> int:
        start, turns = time.monotonic(), 0
        while (word := self.words[self.PLACES * rank + place]) >> self.HASH_BITS != self.call:
            turns += 1
            if turns > 2000:  # about 200 us: from here on another thread is welcome to the processor
                time.sleep(2e-5)
                if time.monotonic() - start > self.timeout:
                    raise RuntimeError(
                        f"gemm_ar: {ranks_text([rank])} of group '{self.group.name}' did not take part in this call "
                        f"(rank {self.group.rank} made it): nothing came within {self.timeout:g} s"
                    )
        return word


class SymmetricWorkspace:
    """Memory that every rank of the group reads and writes, for calls whose rows take up to `sizes`."""

    def __init__(self, group: Group, sizes: Sizes, device: torch.device, timeout: float) -> None:
        import torch.distributed._symmetric_memory as symm_mem  # 80 ms that only this needs

        self.group, self.device, self.timeout = group, device, timeout
        self.sizes = Sizes(*(max(64 << 10, -(-size // 1024) * 1024) for size in sizes))
        sums = SIGNAL_BYTES + group.world * self.sizes.slot
        codes = sums + self.sizes.slot
        inboxes = codes + 2 * self.sizes.codes  # own and fetched ones
        self.nbytes = inboxes + 2 * group.world * self.sizes.inbox
        self.layout = [self.sizes.slot, sums, codes, self.sizes.codes, inboxes, self.sizes.inbox]
        with torch.cuda.device(device), without_multicast():
            self.memory = symm_mem.empty(self.nbytes, dtype=torch.uint8, device=device)
            self.memory[:SIGNAL_BYTES].zero_()
            self.handle = symm_mem.rendezvous(self.memory, group.process_group.group_name)
            self.failure = torch.zeros(4, dtype=torch.int32, pin_memory=True)
            self.failed = (ctypes.c_uint32 * 4).from_address(self.failure.data_ptr())
            self.sides = [torch.cuda.Stream(device, priority=-1) for _ in range(SIDE_STREAMS)]
            self.side_streams = [side.cuda_stream for side in self.sides]
            torch.ops.mori._gemm_ar_prepare(self.memory)
            torch.cuda.synchronize(device)
        dist.barrier(group=group.control)
        self.workspaces = list(self.handle.buffer_ptrs)
        self.plans: dict[tuple, list[Part]] = {}

    def peers_see_writes(self) -> bool:
        """Every rank writes to every other and finds what they wrote (an IOMMU may drop it)."""
        at = (SIGNAL_BYTES - 4 * MAX_WORLD) // 4
        mine = torch.full((1,), self.group.rank + 1, dtype=torch.int32, device=self.device)
        for rank in self.group.peers:
            self.handle.get_buffer(rank, (1,), torch.int32, at + self.group.rank).copy_(mine)  # by a copy engine, as in `pair`
        torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group.control)
        found = self.handle.get_buffer(self.group.rank, (self.group.world,), torch.int32, at).tolist()
        return all(found[rank] == rank + 1 for rank in self.group.peers)

    def check(self) -> None:
        if not self.failed[0]:
            return
        missing, signal, epoch = self.failed[:3]
        raise RuntimeError(
            f"gemm_ar: {ranks_text([missing - 1])} of group '{self.group.name}' did not take part in call {epoch} on this workspace: "
            f"its {SIGNALS[signal]} did not come within {self.timeout:g} s (seen by rank {self.group.rank}); the result was NaN"
        )

    def run(self, gemm: Gemm, algorithm: str, out: torch.Tensor) -> None:
        """As many rows at a time as fit."""
        for part in self.parts(gemm.rows, gemm.columns, gemm.quant, gemm.out_dtype, algorithm):
            a, a_scale = gemm.band(part.start, part.stop)
            operands, rows = (a, gemm.b, a_scale, gemm.b_scale, gemm.quant), out[part.start : part.stop]
            target = rows
            if part.algorithm == "pair":
                operands, target = fit_pair(*operands), aligned(rows)
            torch.ops.mori._gemm_ar_symmetric(
                *operands, gemm.bias, gemm.wire, part.algorithm, part.chunk, part.chunks, self.group.rank, self.workspaces, self.layout,
                self.failure.data_ptr(), self.timeout, self.side_streams, out=target,
            )  # fmt: skip
            if target is not rows:
                rows.copy_(target)

    def parts(self, rows: int, columns: int, quant: str, out_dtype: torch.dtype, algorithm: str) -> list[Part]:
        """From what all ranks have agreed on, so that it is the same on all of them."""
        key = rows, columns, quant, out_dtype, algorithm
        if key not in self.plans:
            self.plans[key] = list(self.plan(*key))
        return self.plans[key]

    def plan(self, rows: int, columns: int, quant: str, out_dtype: torch.dtype, algorithm: str) -> Iterator[Part]:
        world, row_bytes = self.group.world, columns * partial_bytes(out_dtype)
        if algorithm == "one_shot" and rows * row_bytes > self.sizes.inbox:
            algorithm = "overlapped" if torch.version.hip else "pair" if world == 2 else "spans"
        if algorithm == "pair" and not (quant.startswith("mxfp8") and out_dtype == torch.bfloat16 and columns % 8 == 0):
            algorithm = "spans"
        most_rows = min(self.sizes.slot // row_bytes, self.sizes.codes // (columns + WIRE_TAIL))  # of one owner
        step = rows
        while algorithm != "one_shot" and own_rows(step, world, *CUTS[algorithm](step, world)) > most_rows:
            step = -(-step // (2 * PACK_ROWS)) * PACK_ROWS
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            here = "spans" if algorithm == "pair" and stop - start <= TILE_ROWS else algorithm
            yield Part(start, stop, here, *CUTS[here](stop - start, world))

    def close(self) -> None:
        """Nobody touches a rank's memory after the end of its own last call."""
        torch.cuda.synchronize(self.device)
        self.workspaces = []
        del self.handle, self.memory


def aligned(t: torch.Tensor) -> torch.Tensor:
    """Where 16 bytes can be moved at a time."""
    return t if t.data_ptr() % 16 == 0 else t.clone()


def fit_pair(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, quant: str) -> tuple:
    """Operands that the GEMM of `pair` takes: whether these are such is a matter of one rank, the algorithm one of all."""
    if a.shape[-1]:
        return aligned(a), aligned(b), a_scale, b_scale, quant
    (m, _), (n, _) = a.shape, b.shape
    codes, scales = ([t.new_zeros(rows, width) for rows in sizes] for t, width, sizes in ((a, BLOCK, (m, n)), (a.view(torch.uint8), 1, (m, -(-n // BLOCK)))))
    return *codes, *scales, "mxfp8_raw"


def partial_bytes(out_dtype: torch.dtype) -> int:
    """Of a partial sum: bf16 for a bf16 result, fp32 for the others."""
    return 2 if out_dtype == torch.bfloat16 else 4


class Sizes(NamedTuple):
    """Bytes of a slot (partial sums of a rank's rows), of its rows' codes on the fp8 wire, and of an inbox."""

    slot: int
    codes: int
    inbox: int

    @classmethod
    def of(cls, m_max: int, n_max: int, itemsize: int, world: int) -> Sizes:
        """Enough for any number of rows up to m_max, in whichever way they are cut."""
        span = max(math.prod(span_chunks(m_max, world)), math.prod(delivery_chunks(m_max, world)), pair_chunks(m_max, world)[0] + TILE_ROWS)
        rows = m_max // world + 2 * span
        inbox = min(m_max * n_max, ONE_SHOT_ELEMENTS) * itemsize
        return cls(max(rows * n_max * itemsize, inbox), rows * (n_max + WIRE_TAIL), inbox)

    def joined(self, other: Sizes) -> Sizes:
        return Sizes(*map(max, self, other))


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


def open_workspace(group: Group, sizes: Sizes, device: torch.device, timeout: float) -> SymmetricWorkspace | None:
    """A workspace, or None with a warning on every rank when one of them cannot have it."""
    reason = obstacle(group, device)
    workspace = None
    if reason is None:
        try:
            workspace = SymmetricWorkspace(group, sizes, device, timeout)
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
