"""`gemm_ar`: a row-parallel linear layer, C = sum over ranks of A_r @ B_r.T (+ bias once), over torch.distributed.

Every rank holds a K slice of the activations and of the weight and gets the whole sum. One call is

  1. check      the arguments of this rank; a refusal is told to the others before it is raised
  2. agree      a header of six integers from every rank to every rank, on its way during the GEMM: all raise, or none does
  3. GEMM       the local partial sum, in bands of rows where there are many
  4. reduce     the rows of a band are dealt out to the ranks; partial sums of a row travel to its owner, who adds them up in rank
                order, then the bias, then rounds once; bands travel during the GEMM of the next ones
  5. gather     every owner's rows to every rank, in the output dtype or as e4m3 (`wire="fp8"`)

The order of every sum is fixed, so the result is the same bits on all ranks, in every run and by every algorithm.
"""

from __future__ import annotations

from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from mori_ops.collectives import ALGORITHMS, BLOCK, REFUSED, WIRES, Gemm, Group, Headers, Workspace, reserve
from mori_ops.routes import route


def gemm_ar(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    quant: str,
    group: dist.ProcessGroup | str | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    wire: str = "bf16",
) -> Tensor:
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


class GemmAllReduce:
    """gemm_ar for engines: owns the memory that calls of up to `m_max` rows and `n_max` columns need, and writes into the caller's.

    Calls may alternate between weights, shapes and scale layouts. More rows than `m_max` work too, by bands of the same size;
    more columns than `n_max` are refused. All ranks of the group construct it, call it and close it in the same order.

    >>> with GemmAllReduce(m_max=16384, n_max=7168, group=tp) as all_reduce:
    ...     all_reduce(a, b, a_scale, b_scale, "mxfp8_raw", out=out)
    """

    def __init__(self, m_max: int, n_max: int, group: dist.ProcessGroup | str | None = None) -> None:
        if m_max < 1 or n_max < 1:
            raise ValueError(f"GemmAllReduce: m_max and n_max must be positive, got {m_max} and {n_max}")
        self.n_max = n_max
        self._group: Group | None = Group.named(group_name(group))
        self._workspace = Workspace()
        reserve(self._workspace, m_max, n_max, self._group)

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        quant: str,
        *,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        wire: str = "bf16",
    ) -> Tensor:
        """See gemm_ar. With `out`, dense and of shape `[.., N]`, no memory is allocated; returns it."""
        if self._group is None:
            raise RuntimeError("GemmAllReduce: it is closed")
        dtype = out.dtype if out is not None else out_dtype or torch.bfloat16
        return run(Gemm(a, b, a_scale, b_scale, quant, bias, dtype, wire), self._group, self._workspace, out, self.n_max)

    @property
    def nbytes(self) -> int:
        """Bytes of workspace on this rank."""
        return self._workspace.nbytes

    def close(self) -> None:
        """Frees the workspace; further calls are refused. Closing twice is fine."""
        self._group = None
        self._workspace.blocks.clear()

    def __enter__(self) -> GemmAllReduce:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def run(gemm: Gemm, group: Group, workspace: Workspace, out: Tensor | None, n_max: int | None = None) -> Tensor:
    try:
        gemm.check(out)
        if n_max is not None and gemm.columns > n_max:
            raise ValueError(f"gemm_ar: N must be at most the n_max of this GemmAllReduce, {n_max}, got {gemm.columns}")
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
    if out.numel() == 0:
        headers.agree()
        return out
    kernel = route("gemm_ar", device=out.device, world=group.world, m=gemm.rows, n=gemm.columns).kernel
    ALGORITHMS[kernel](gemm, group, headers, workspace, out.view(gemm.rows, gemm.columns))
    return out


def _gemm_ar(a, b, a_scale, b_scale, quant, group_name, *, bias=None, out_dtype=None, wire="bf16"):
    gemm = Gemm(a, b, a_scale, b_scale, quant, bias, out_dtype or torch.bfloat16, wire)
    return run(gemm, Group.named(group_name), Workspace(), None)


def _gemm_ar_out(a, b, a_scale, b_scale, quant, group_name, *, bias=None, wire="bf16", out):
    run(Gemm(a, b, a_scale, b_scale, quant, bias, out.dtype, wire), Group.named(group_name), Workspace(), out)


_library = torch.library.Library("mori", "IMPL")
_library.impl("gemm_ar", _gemm_ar, "CPU")
_library.impl("gemm_ar.out", _gemm_ar_out, "CPU")
