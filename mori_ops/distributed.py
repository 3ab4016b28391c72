"""`gemm_ar`: a row-parallel linear layer, C = sum over ranks of A_r @ B_r.T (+ bias once), over torch.distributed.

Every rank holds a K slice of the activations and of the weight and gets the whole sum. One call is

  1. check      the arguments of this rank; a refusal is told to the others before it is raised
  2. agree      a header of six integers from every rank to every rank, on its way during the GEMM: all raise, or none does
  3. GEMM       the local partial sum in fp32
  4. reduce     partial sums travel in fp32 and are added up in rank order; then the bias, then the single rounding
  5. gather     where ranks reduced bands of rows: every band to every rank, in the output dtype or as e4m3 (`wire="fp8"`)

The order of every sum is fixed, so the result is the same bits on all ranks, in every run and by every algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mori_ops.routes import route

QUANTS = ("ptpc", "blockscale", "mxfp8", "mxfp8_raw")
WIRES = ("bf16", "fp8")
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

BLOCK = 32  # of MXFP8, along K and along the rows of a weight
E4M3_MAX = 448.0
SCALE_BYTES = 4  # one fp32 scale behind the e4m3 codes of each row on the fp8 wire

# Headers travel under a tag of their own: they never pair with a user's send, and an absent rank can be named.
HEADER_TAG = 0x6D6F7269
HEADER_FIELDS = ("M", "N", "out_dtype", "quant", "wire", "bias")
REFUSED = [-1] * len(HEADER_FIELDS)


def gemm_ar(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    quant: str,
    group: dist.ProcessGroup | str | None = None,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    wire: str = "bf16",
) -> torch.Tensor:
    """The sum over the group's ranks of `a @ b.T`, plus `bias` once, on every rank.

    Args:
        a: float8_e4m3fn `[.., K]`, this rank's slice of K; ranks may hold slices of different width.
        b: float8_e4m3fn `[N, K]`, this rank's slice of the weight.
        a_scale, b_scale: scales as `quant` asks for; see `mori_ops.scaled_gemm`.
        quant: `"ptpc"`, `"blockscale"`, `"mxfp8"` (packed scales) or `"mxfp8_raw"`.
        group: a process group, its name, or None: the default group, or this process alone when there is none.
            A group of one rank is `mori_ops.scaled_gemm`, bit for bit.
        bias: `[N]` fp32, bf16 or fp16, the same on every rank; added after the sum, before the rounding.
        out_dtype: bfloat16, float16 or float32.
        wire: `"bf16"` gathers the rows in `out_dtype`; `"fp8"` as e4m3 with one fp32 scale (amax/448) per row: half the
            bytes of bf16 at a relative error of about 2.5e-2. A row that holds Inf or NaN arrives there as NaN.

    Returns:
        `[.., N]` in `out_dtype`, the same bits on every rank.

    Raises:
        ValueError: a refused argument, on the rank that has it and (naming that rank) on every other; or ranks that differ
            in M, N, out_dtype, quant, wire or in having a bias. Nothing is written and the group stays usable.
        RuntimeError: a rank did not take part within the group's timeout; it is named. The group is then broken, as after
            any collective that timed out.
    """
    return torch.ops.mori.gemm_ar(a, b, a_scale, b_scale, quant, group_name(group), bias=bias, out_dtype=out_dtype, wire=wire)


def group_name(group: dist.ProcessGroup | str | None) -> str:
    """The name that torch.ops.mori.gemm_ar takes; "" is this process alone."""
    if isinstance(group, str):
        return group
    if group is None:
        return dist.group.WORLD.group_name if dist.is_initialized() else ""
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"gemm_ar: group must be a process group that this rank belongs to, its name or None, got {group!r}")
    return group.group_name


def shard(features: int, group: dist.ProcessGroup | str | None = None) -> slice:
    """The features that this rank holds of a layer split over the group, in whole blocks of 32, so that slicing and
    quantising commute: of the outputs of a column-parallel layer, of the inputs of the row-parallel layer behind it.

    Raises:
        ValueError: `features` is not a multiple of 32, or there are fewer blocks than ranks.
    """
    here = Group.named(group_name(group))
    blocks, rest = divmod(features, BLOCK)
    if rest or blocks < here.world:
        raise ValueError(f"shard: features must be a multiple of {BLOCK}, a block or more for each of {here.world} ranks, got {features}")
    shares = here.shares(blocks)
    start = sum(shares[: here.rank])
    return slice(BLOCK * start, BLOCK * (start + shares[here.rank]))


@dataclass(frozen=True)
class Group:
    """A process group as seen from one of its ranks."""

    process_group: dist.ProcessGroup | None
    name: str
    rank: int
    world: int

    @classmethod
    def named(cls, name: str) -> Group:
        if not name:
            return cls(None, name, 0, 1)
        try:
            process_group = dist.distributed_c10d._resolve_process_group(name)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"gemm_ar: group_name must name a process group of this rank, got '{name}'") from error
        return cls(process_group, name, process_group.rank(), process_group.size())

    def shares(self, size: int) -> list[int]:
        """`size` things dealt out to the ranks: the first ranks take one more where they do not divide evenly."""
        return [size // self.world + (rank < size % self.world) for rank in range(self.world)]


@dataclass(frozen=True)
class Gemm:
    """One rank's operands, and what is to become of the sum."""

    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor
    quant: str
    bias: torch.Tensor | None
    out_dtype: torch.dtype
    wire: str

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, str]:
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

    def check(self, out: torch.Tensor | None) -> None:
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

    def partial(self) -> torch.Tensor:
        """This rank's summand, fp32 [M, N]."""
        return torch.ops.mori.scaled_gemm(*self.operands, out_dtype=torch.float32).view(self.rows, self.columns)

    def with_bias(self, total: torch.Tensor) -> torch.Tensor:
        return total if self.bias is None else total.add_(self.bias)


class Headers:
    """A header from every rank to every rank, under way while this rank computes.

    Sends rather than a collective: what fails then tells which rank is missing.
    """

    def __init__(self, mine: list[int], group: Group) -> None:
        self.group = group
        self.received = torch.tensor([mine] * group.world)
        own = self.received[group.rank].clone()
        peers = [rank for rank in range(group.world) if rank != group.rank]
        where = {"group": group.process_group, "tag": HEADER_TAG}
        self.works = [(rank, dist.irecv(self.received[rank], group_src=rank, **where)) for rank in peers]
        self.works += [(rank, dist.isend(own, group_dst=rank, **where)) for rank in peers]

    def wait(self) -> list[list[int]]:
        """All headers, in rank order."""
        missing: dict[int, Exception] = {}
        for rank, work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                missing.setdefault(rank, error)
        if missing:
            cause = next(iter(missing.values()))
            raise RuntimeError(
                f"gemm_ar: {ranks_text(sorted(missing))} of group '{self.group.name}' did not take part in this call "
                f"(rank {self.group.rank} made it): {cause}"
            ) from cause
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


def exchange(send: torch.Tensor, send_rows: list[int], receive: torch.Tensor, receive_rows: list[int], group: Group) -> None:
    """Consecutive rows to and from each rank, moved as bytes: gloo does not know every dtype."""
    dist.all_to_all_single(
        receive.view(torch.uint8), send.view(torch.uint8), receive_rows, send_rows, group=group.process_group
    )


def add_in_rank_order(summands: torch.Tensor) -> torch.Tensor:
    """[world, rows, N] -> [rows, N], whatever the number of rows the same order of additions."""
    total = summands[0]
    for summand in summands[1:]:
        total += summand
    return total


def all_summands(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """Every rank's partial sum, [world, M, N]."""
    summands = partial.new_empty(group.world, *partial.shape)
    rows = [len(partial)] * group.world
    exchange(partial.repeat(group.world, 1), rows, summands.flatten(0, 1), rows, group)
    return summands


def band_summands(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """Every rank's partial sum of this rank's band of rows, [world, rows, N]."""
    bands = group.shares(len(partial))
    rows = bands[group.rank]
    summands = partial.new_empty(group.world, rows, partial.shape[1])
    exchange(partial, bands, summands.flatten(0, 1), [rows] * group.world, group)
    return summands


def gather_bands(band: torch.Tensor, gathered: torch.Tensor, group: Group) -> None:
    exchange(band.repeat(group.world, 1), [len(band)] * group.world, gathered, group.shares(len(gathered)), group)


def encode_rows(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, N] as bytes [rows, N + 4]: e4m3 codes, then the row's scale."""
    tiny = torch.finfo(torch.float32).tiny  # a zero row must not divide by zero
    scale = (rows.abs().amax(1, keepdim=True) / E4M3_MAX).clamp_min(tiny)
    codes = (rows / scale).to(torch.float8_e4m3fn)
    return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], 1)


def decode_rows(payload: torch.Tensor) -> torch.Tensor:
    codes = payload[:, :-SCALE_BYTES].view(torch.float8_e4m3fn)
    scale = payload[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return codes.float() * scale


def one_shot(partial: torch.Tensor, gemm: Gemm, group: Group, out: torch.Tensor) -> None:
    """Everyone's partial sums to everyone: one exchange, for few rows, where latency is what counts."""
    total = gemm.with_bias(add_in_rank_order(all_summands(partial, group)))
    out.copy_(total if gemm.wire == "bf16" else decode_rows(encode_rows(total)))  # rows have the bits of two_shot


def two_shot(partial: torch.Tensor, gemm: Gemm, group: Group, out: torch.Tensor) -> None:
    """Reduce-scatter and gather by bands of rows: each rank moves about two copies of the result, whatever the world."""
    band = gemm.with_bias(add_in_rank_order(band_summands(partial, group)))
    if gemm.wire == "bf16":
        gather_bands(band.to(out.dtype), out, group)
    else:
        payload = torch.empty(len(out), out.shape[1] + SCALE_BYTES, dtype=torch.uint8)
        gather_bands(encode_rows(band), payload, group)
        out.copy_(decode_rows(payload))


# Which one serves a call stands in csrc/gemm_ar/gemm_ar.cpp; the table looks only at what all ranks have agreed on.
ALGORITHMS: dict[str, Callable[[torch.Tensor, Gemm, Group, torch.Tensor], None]] = {"one_shot": one_shot, "two_shot": two_shot}


def run(gemm: Gemm, name: str, out: torch.Tensor | None) -> torch.Tensor:
    group = Group.named(name)
    try:
        gemm.check(out)
    except ValueError:
        if group.world > 1:
            Headers(REFUSED, group).wait()
        raise
    if out is None:
        out = gemm.a.new_empty(gemm.out_shape, dtype=gemm.out_dtype)
    if group.world == 1:
        torch.ops.mori.scaled_gemm.out(*gemm.operands, bias=gemm.bias, out=out)
        return out
    headers = Headers(gemm.header(), group)
    partial = gemm.partial()
    headers.agree()
    if out.numel():
        kernel = route("gemm_ar", device=out.device, world=group.world, m=gemm.rows, n=gemm.columns).kernel
        ALGORITHMS[kernel](partial, gemm, group, out.view(gemm.rows, gemm.columns))
    return out


def _gemm_ar(a, b, a_scale, b_scale, quant, group_name, *, bias=None, out_dtype=None, wire="bf16"):
    return run(Gemm(a, b, a_scale, b_scale, quant, bias, out_dtype or torch.bfloat16, wire), group_name, None)


def _gemm_ar_out(a, b, a_scale, b_scale, quant, group_name, *, bias=None, wire="bf16", out):
    run(Gemm(a, b, a_scale, b_scale, quant, bias, out.dtype, wire), group_name, out)


_library = torch.library.Library("mori", "IMPL")
_library.impl("gemm_ar", _gemm_ar, "CPU")
_library.impl("gemm_ar.out", _gemm_ar_out, "CPU")
