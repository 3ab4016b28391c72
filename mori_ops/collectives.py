"""What gemm_ar runs over torch.distributed (gloo; NCCL where P2P memory is missing): agreement between ranks, wire formats, algorithms.

Everything travels by sends and receives under tags of their own: they never pair with a user's, a failure tells which rank is
missing, and gloo moves them in its own thread while this one computes. The order of every sum is fixed, so a row has the same
bits on all ranks, in every run and by every algorithm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

QUANTS = ("ptpc", "blockscale", "mxfp8", "mxfp8_raw")
WIRES = ("bf16", "fp8")
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

BLOCK = 32  # of MXFP8, along K and along the rows of a weight
PACK_ROWS = 64  # rows of A whose packed scales stand together: bands start at multiples of it
E4M3_MAX = 448.0
SCALE_BYTES = 4  # one fp32 scale behind the e4m3 codes of each row on the fp8 wire

HEADER_TAG, SUM_TAG, GATHER_TAG = 0x6D6F7269, 0x6D6F726A, 0x6D6F726B
HEADER_FIELDS = ("M", "N", "out_dtype", "quant", "wire", "bias")
REFUSED = [-1] * len(HEADER_FIELDS)


@dataclass(frozen=True)
class Group:
    """A process group as seen from one of its ranks. `control` carries what hosts tell each other."""

    process_group: dist.ProcessGroup | None
    name: str
    rank: int
    world: int
    control: dist.ProcessGroup | None = None

    @classmethod
    def named(cls, name: str) -> Group:
        if not name:
            return cls(None, name, 0, 1)
        try:
            process_group = dist.distributed_c10d._resolve_process_group(name)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"gemm_ar: group_name must name a process group of this rank, got '{name}'") from error
        return cls(process_group, name, process_group.rank(), process_group.size(), control_group(process_group))

    @property
    def peers(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    @property
    def timeout(self) -> float:
        """Seconds."""
        return self.control._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    def shares(self, size: int) -> list[int]:
        """`size` things dealt out to the ranks: the first ranks take one more where they do not divide evenly."""
        return [size // self.world + (rank < size % self.world) for rank in range(self.world)]


# By name, with the group that it was made for: a name may be used again for another group.
_control_groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
_control_names: Counter[str] = Counter()


def control_group(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group itself if it can move CPU tensors; else (NCCL alone) a gloo group of the same ranks, made in the first call."""
    if process_group.size() == 1 or torch.device("cpu") in process_group._device_types:
        return process_group
    known = _control_groups.get(process_group.group_name)
    if known is None or known[0] is not process_group:
        timeout = process_group._get_backend(process_group._device_types[0]).options._timeout
        known = process_group, gloo_group(process_group, timeout)
        _control_groups[process_group.group_name] = known
    return known[1]


def gloo_group(process_group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of the same ranks, made by them alone.

    dist.new_group wants all processes of the job, or (use_local_synchronization) names a group by the number of groups that a
    process belongs to: where ranks belong to different numbers of them, they wait for each other under different names.
    """
    c10d, members = dist.distributed_c10d, dist.get_process_group_ranks(process_group)
    name = f"{process_group.group_name}/mori_ops/{_control_names[process_group.group_name]}"
    _control_names[process_group.group_name] += 1
    group, _ = c10d._new_process_group_helper(
        len(members), process_group.rank(), members, dist.Backend("gloo"), c10d._get_default_store(), name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {member: rank for rank, member in enumerate(members)}
    return group


class Workspace:
    """Memory that an algorithm asks for by name and finds again in its next call; grows when a call needs more."""

    def __init__(self) -> None:
        self.blocks: dict[str, Tensor] = {}
        self.band_limit: int | None = None  # rows of a band that it was reserved for

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if name not in self.blocks or self.blocks[name].numel() < size:
            self.blocks[name] = torch.empty(size, dtype=torch.uint8, device=device)
        return self.blocks[name][:size].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())


@dataclass(frozen=True)
class Gemm:
    """One rank's operands, and what is to become of the sum."""

    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    quant: str
    bias: Tensor | None
    out_dtype: torch.dtype
    wire: str

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, str]:
        return self.a, self.b, self.a_scale, self.b_scale, self.quant

    @property
    def rows(self) -> int:
        return self.a.shape[:-1].numel()

    @property
    def columns(self) -> int:
        return self.b.shape[0]

    @property
    def out_shape(self) -> torch.Size:
        return self.a.shape[:-1] + self.b.shape[:1]

    def check(self, out: Tensor | None) -> None:
        torch.ops.mori._gemm_ar_check(*self.operands, self.bias, self.wire, self.out_dtype, out)

    def header(self) -> list[int]:
        return [
            self.rows,
            self.columns,
            OUT_DTYPES.index(self.out_dtype),
            QUANTS.index(self.quant),
            WIRES.index(self.wire),
            int(self.bias is not None),
        ]

    def band(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows start..stop of a and their scales; `start` is a multiple of PACK_ROWS."""
        width = self.a.shape[-1]
        a = self.a.reshape(self.rows, width)[start:stop]
        if self.quant != "mxfp8":
            return a, self.a_scale.reshape(self.rows, *self.a_scale.shape[self.a.dim() - 1 :])[start:stop]
        groups = self.a_scale.reshape(width // BLOCK, -(-self.rows // PACK_ROWS), PACK_ROWS // 4)
        return a, groups[:, start // PACK_ROWS : -(-stop // PACK_ROWS)].reshape(-1)

    def partial(self, start: int, stop: int, out: Tensor) -> Tensor:
        """This rank's summand of rows start..stop, written to `out` [stop - start, N]."""
        a, a_scale = self.band(start, stop)
        torch.ops.mori.scaled_gemm.out(a, self.b, a_scale, self.b_scale, self.quant, out=out)
        return out

    def finish(self, summands: list[Tensor]) -> Tensor:
        """The sum, in rank order whatever the number of rows, and the bias; written over the first summand."""
        total = summands[0]
        for summand in summands[1:]:
            total += summand
        return total if self.bias is None else total.add_(self.bias)


# --- agreement --------------------------------------------------------------------------------------------------------


def transfers(sends: dict[int, Tensor], receives: dict[int, Tensor], group: Group, tag: int) -> dict[int, list[dist.Work]]:
    """Starts to send and to receive, by rank; empty tensors do not travel."""
    works: dict[int, list[dist.Work]] = {rank: [] for rank in group.peers}
    on_device = receives[group.peers[0]].is_cuda
    process_group = group.process_group if on_device else group.control
    operations: list[dist.P2POp] = []
    for rank in group.peers:
        for start, tensor in ((dist.irecv, receives[rank]), (dist.isend, sends[rank])):
            if not tensor.numel():
                continue
            if on_device:  # NCCL runs them in order unless they start together
                operations.append(dist.P2POp(start, tensor, group=process_group, group_peer=rank))
            else:
                where = {"group_src" if start is dist.irecv else "group_dst": rank}
                works[rank].append(start(tensor, group=process_group, tag=tag, **where))
    if operations:
        works[group.peers[0]] = dist.batch_isend_irecv(operations)
    return works


def finish(works: dict[int, list[dist.Work]], group: Group) -> None:
    """Waits for transfers; a rank that does not take part in them is named."""
    missing: dict[int, Exception] = {}
    for rank, of_rank in works.items():
        for work in of_rank:
            try:
                work.wait()
            except RuntimeError as error:
                missing.setdefault(rank, error)
    if missing:
        cause = next(iter(missing.values()))
        raise RuntimeError(
            f"gemm_ar: {ranks_text(sorted(missing))} of group '{group.name}' did not take part in this call "
            f"(rank {group.rank} made it): {cause}"
        ) from cause


class Headers:
    """A header from every rank to every rank, under way while this rank computes."""

    def __init__(self, mine: list[int], group: Group) -> None:
        self.group = group
        self.received = torch.tensor([mine] * group.world)
        own = self.received[group.rank].clone()
        peers = group.peers
        self.works = transfers(dict.fromkeys(peers, own), {rank: self.received[rank] for rank in peers}, group, HEADER_TAG)

    def wait(self) -> list[list[int]]:
        """All headers, in rank order."""
        works, self.works = self.works, {}  # gloo's may be waited for only once
        finish(works, self.group)
        return self.received.tolist()

    def agree(self) -> None:
        """Raises on every rank unless all came with the same header."""
        headers = self.wait()
        refused = [rank for rank, header in enumerate(headers) if header == REFUSED]
        if refused:
            raise ValueError(f"gemm_ar: {ranks_text(refused)} of group '{self.group.name}' refused the arguments; see the error there")
        differences = [field_text(field, values) for field, values in zip(HEADER_FIELDS, zip(*headers)) if len(set(values)) > 1]
        if differences:
            raise ValueError(f"gemm_ar: the ranks of group '{self.group.name}' disagree: {'; '.join(differences)}")


def field_text(field: str, values: tuple[int, ...]) -> str:
    """Who came with what, like: M is 8 on rank 0, 9 on ranks 1, 2."""
    names = {"out_dtype": OUT_DTYPES, "quant": QUANTS, "wire": WIRES, "bias": ("absent", "given")}.get(field)
    ranks: dict[int, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return f"{field} is " + ", ".join(f"{names[v] if names else v} on {ranks_text(r)}" for v, r in ranks.items())


def ranks_text(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


# --- the fp8 wire -----------------------------------------------------------------------------------------------------


def encode_rows(rows: Tensor) -> Tensor:
    """fp32 [rows, N] as bytes [rows, N + 4]: e4m3 codes, then the row's scale."""
    tiny = torch.finfo(torch.float32).tiny  # a zero row must not divide by zero
    scale = (rows.abs().amax(1, keepdim=True) / E4M3_MAX).clamp_min(tiny)
    codes = (rows / scale).to(torch.float8_e4m3fn)
    return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], 1)


def decode_rows(payload: Tensor) -> Tensor:
    codes = payload[:, :-SCALE_BYTES].view(torch.float8_e4m3fn)
    scale = payload[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return codes.float() * scale


# --- algorithms -------------------------------------------------------------------------------------------------------

ONE_SHOT_BYTES = 512 * 1024  # the most that the table in gemm_ar.cpp gives to one_shot

Algorithm = Callable[[Gemm, Group, Headers, Workspace, Tensor], None]


def one_shot(gemm: Gemm, group: Group, headers: Headers, workspace: Workspace, out: Tensor) -> None:
    """Everyone's partial sums to everyone: one exchange, for few rows, where latency is what counts."""
    summands = workspace.take("received", (group.world, *out.shape), torch.float32, out.device)
    own = gemm.partial(0, len(out), summands[group.rank])
    headers.agree()
    peers = group.peers
    finish(transfers(dict.fromkeys(peers, own), {rank: summands[rank] for rank in peers}, group, SUM_TAG), group)
    total = gemm.finish(list(summands))
    out.copy_(total if gemm.wire == "bf16" else decode_rows(encode_rows(total)))  # rows have the bits of the other algorithms


# Measured on a link that takes as long as the GEMM (bench/results/cpu_gemm_ar.json): lower bands cost the GEMM its blocking.
LEAST_BAND, BANDS = 128, 8


def band_height(rows: int) -> int:
    """Rows of a band: a multiple of PACK_ROWS that does not fall as `rows` grows."""
    return max(LEAST_BAND, -(-rows // (BANDS * PACK_ROWS)) * PACK_ROWS)


def by_bands(gemm: Gemm, group: Group, headers: Headers, workspace: Workspace, out: Tensor) -> None:
    """Reduce-scatter and gather, band by band: each rank moves about two copies of the result, whatever the world, and the sums
    of a band travel during the GEMM of the next. Two bands are in flight, in two sets of buffers."""
    height = min(band_height(len(out)), workspace.band_limit or len(out))
    buffers = BandBuffers(workspace, height, out.shape[1], group, out.device, fp8=gemm.wire == "fp8")
    arriving = gathering = None
    for i, start in enumerate(range(0, len(out), height)):
        band = Band(gemm, group, buffers, i, out[start : start + height])
        band.multiply(start)
        if i == 0:
            headers.agree()
        band.scatter()
        if arriving is not None:
            arriving.reduce()
            if gathering is not None:
                gathering.complete()
            gathering = arriving
        arriving = band
    arriving.reduce()
    for band in filter(None, (gathering, arriving)):
        band.complete()


class BandBuffers:
    """Two bands' worth of memory."""

    def __init__(self, workspace: Workspace, height: int, columns: int, group: Group, device: torch.device, *, fp8: bool) -> None:
        own = group.shares(height)[0]
        self.partials = workspace.take("partials", (2, height, columns), torch.float32, device)
        self.received = workspace.take("received", (2, group.world, own, columns), torch.float32, device)
        self.payloads = workspace.take("payloads", (2, height, columns + SCALE_BYTES), torch.uint8, device) if fp8 else None


class Band:
    """One band of rows on its way: multiply, scatter, reduce, complete. `out` is where its result goes."""

    def __init__(self, gemm: Gemm, group: Group, buffers: BandBuffers, number: int, out: Tensor) -> None:
        self.gemm, self.group, self.out = gemm, group, out
        self.shares = group.shares(len(out))
        self.partial = buffers.partials[number % 2, : len(out)]
        self.received = buffers.received[number % 2, :, : self.shares[group.rank]]
        self.payload = out if buffers.payloads is None else buffers.payloads[number % 2, : len(out)]
        self.works: dict[int, list[dist.Work]] = {}

    def multiply(self, start: int) -> None:
        self.gemm.partial(start, start + len(self.out), self.partial)

    def scatter(self) -> None:
        """Sets out this rank's summands for the owners of the rows."""
        parts = self.partial.split(self.shares)
        self.summands = list(self.received)
        self.summands[self.group.rank] = parts[self.group.rank]
        self.works = transfers(dict(enumerate(parts)), dict(enumerate(self.summands)), self.group, SUM_TAG)

    def reduce(self) -> None:
        """Finishes this rank's own rows and sets them out for everybody."""
        finish(self.works, self.group)
        total = self.gemm.finish(self.summands)
        parts = self.payload.split(self.shares)
        mine = parts[self.group.rank]
        mine.copy_(total if self.payload is self.out else encode_rows(total))
        self.works = transfers(dict.fromkeys(self.group.peers, mine), dict(enumerate(parts)), self.group, GATHER_TAG)

    def complete(self) -> None:
        finish(self.works, self.group)
        if self.payload is not self.out:
            self.out.copy_(decode_rows(self.payload))


def reserve(workspace: Workspace, m_max: int, n_max: int, group: Group, device: torch.device) -> None:
    """Memory for every call of up to m_max rows and n_max columns; calls with more rows take lower bands."""
    workspace.band_limit = band_height(m_max)
    workspace.take("received", (ONE_SHOT_BYTES,), torch.uint8, device)
    BandBuffers(workspace, workspace.band_limit, n_max, group, device, fp8=True)


# Which one serves a call stands in csrc/gemm_ar/gemm_ar.cpp; the table looks only at what all ranks have agreed on.
ALGORITHMS: dict[str, Algorithm] = {"one_shot": one_shot, "bands": by_bands}
