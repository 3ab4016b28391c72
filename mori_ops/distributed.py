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

from functools import lru_cache
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from mori_ops.collectives import ALGORITHMS, BLOCK, REFUSED, WIRES, Gemm, Group, Headers, Workspace, reserve
from mori_ops.routes import route
from mori_ops.symmetric import Board, Sizes, SymmetricWorkspace, open_workspace, partial_bytes

TIMEOUT = 60.0  # seconds that a CUDA kernel waits for another rank


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

    Calls may alternate between weights, shapes and scale layouts. More rows than `m_max` work too, some at a time; more columns
    than `n_max` are refused. All ranks of the group construct it, call it and close it in the same order, and use one for one
    stream of calls at a time.

    On CUDA, calls may be captured in graphs and the workspace is symmetric memory. A rank that is missing from a replay is noticed
    by the others after `timeout` seconds: the result is NaN, and `check()` and the next call raise.

    >>> with GemmAllReduce(m_max=16384, n_max=7168, group=tp, device="cuda") as all_reduce:
    ...     all_reduce(a, b, a_scale, b_scale, "mxfp8_raw", out=out)
    """

    def __init__(
        self,
        m_max: int,
        n_max: int,
        group: dist.ProcessGroup | str | None = None,
        *,
        device: torch.device | str = "cpu",
        out_dtype: torch.dtype = torch.bfloat16,
        timeout: float | None = None,
    ) -> None:
        if m_max < 1 or n_max < 1:
            raise ValueError(f"GemmAllReduce: m_max and n_max must be positive, got {m_max} and {n_max}")
        self.n_max, self.out_dtype = n_max, out_dtype
        self._engine: Engine | None = Engine(Group.named(group_name(group)), torch.device(device), timeout)
        self._engine.reserve(m_max, n_max, out_dtype)

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
        """See gemm_ar. With `out`, dense and of shape `[.., N]`, no memory is allocated for the result; returns it."""
        if self._engine is None:
            raise RuntimeError("GemmAllReduce: it is closed")
        dtype = out.dtype if out is not None else out_dtype or self.out_dtype
        return self._engine.run(Gemm(a, b, a_scale, b_scale, quant, bias, dtype, wire), out, self.n_max)

    def check(self) -> None:
        """Raises when a kernel has given up waiting for a rank; call it behind a synchronisation."""
        if self._engine is not None:
            self._engine.check()

    @property
    def nbytes(self) -> int:
        """Bytes of workspace on this rank."""
        return 0 if self._engine is None else self._engine.nbytes

    def close(self) -> None:
        """Frees the workspace; further calls are refused. Closing twice is fine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> GemmAllReduce:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Engine:
    """What runs the calls of one group on one device, with the memory that it keeps between them."""

    def __init__(self, group: Group, device: torch.device, timeout: float | None = None) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.group, self.device, self.timeout = group, device, TIMEOUT if timeout is None else timeout
        self.workspace = Workspace()
        # Of growing size: a captured graph may still use the earlier ones. None: tried, and this group cannot share memory.
        self.symmetric: list[SymmetricWorkspace] | None = [] if device.type == "cuda" and group.world > 1 else None
        self.board: Board | None = None

    def reserve(self, m_max: int, n_max: int, out_dtype: torch.dtype) -> None:
        if self.group.world == 1:
            return
        if self.symmetric is not None:
            self.open(Sizes.of(m_max, n_max, partial_bytes(out_dtype), self.group.world))
        if self.symmetric is None:
            reserve(self.workspace, m_max, n_max, self.group, self.device)

    def open(self, sizes: Sizes) -> None:
        """Collective."""
        opened = open_workspace(self.group, sizes, self.device, self.timeout)
        if opened is None:
            self.symmetric = self.board = None
            return
        self.symmetric.append(opened)
        self.board = self.board or Board.open(self.group)

    def check(self) -> None:
        for workspace in self.symmetric or ():
            workspace.check()

    @property
    def nbytes(self) -> int:
        return self.workspace.nbytes + sum(workspace.nbytes for workspace in self.symmetric or ())

    def close(self) -> None:
        self.workspace.blocks.clear()
        for workspace in self.symmetric or ():
            workspace.close()

    def run(self, gemm: Gemm, out: Tensor | None, n_max: int | None = None) -> Tensor:
        group = self.group
        try:
            gemm.check(out)
            if gemm.a.device != self.device:
                raise ValueError(f"gemm_ar: a must be on {self.device}, the device of this GemmAllReduce, got {gemm.a.device}")
            if n_max is not None and gemm.columns > n_max:
                raise ValueError(f"gemm_ar: N must be at most the n_max of this GemmAllReduce, {n_max}, got {gemm.columns}")
            self.check()
        except (ValueError, RuntimeError):
            if group.world > 1 and (headers := self.meet(REFUSED)) is not None:
                headers.wait()
            raise
        if out is None:
            out = gemm.a.new_empty(gemm.out_shape, dtype=gemm.out_dtype)
        if group.world == 1:
            torch.ops.mori.scaled_gemm.out(*gemm.operands, bias=gemm.bias, out=out)
            return out
        headers = self.meet(gemm.header())
        if headers is not None and (self.symmetric is not None or not out.numel()):
            headers.agree()
        if not out.numel():
            return out
        rows = out.view(gemm.rows, gemm.columns)
        if self.symmetric is not None:
            self.make_room(gemm, keep=n_max is not None)
        algorithm = algorithm_of(out.device.type, group.world, *rows.shape)
        if self.symmetric is not None:
            self.symmetric[-1].run(gemm, algorithm, rows)
        else:
            ALGORITHMS["one_shot" if algorithm == "one_shot" else "bands"](gemm, group, headers, self.workspace, rows)
        return out

    def meet(self, header: list[int]) -> Headers | None:
        """What every rank came with, under way; None: the same on all of them."""
        if self.board is not None and self.board.same(header):
            return None
        return Headers(header, self.group)

    def make_room(self, gemm: Gemm, *, keep: bool) -> None:
        """Symmetric memory for this call; `keep`: any amount will do. All ranks have agreed on its shape."""
        if keep and self.symmetric:
            return
        wanted = Sizes.of(gemm.rows, gemm.columns, partial_bytes(gemm.out_dtype), self.group.world)
        if self.symmetric:
            have = self.symmetric[-1].sizes
            if have.joined(wanted) == have or torch.cuda.is_current_stream_capturing():
                return
            wanted = wanted.joined(Sizes(*(2 * size for size in have)))  # a few growing ones, not one for each M
        elif torch.cuda.is_current_stream_capturing():
            raise RuntimeError("gemm_ar: symmetric memory cannot be set up while a graph is captured: call gemm_ar once before, or use GemmAllReduce")
        self.open(wanted)


@lru_cache(maxsize=1024)
def algorithm_of(device: str, world: int, rows: int, columns: int) -> str:
    return route("gemm_ar", device=device, world=world, m=rows, n=columns).kernel


# Engines of the functional operator, by group and device, with the process group that they were made for.
_engines: dict[tuple[str, torch.device], Engine] = {}


def engine_of(name: str, device: torch.device) -> Engine:
    group = Group.named(name)
    if device.type != "cuda":
        return Engine(group, device)
    known = _engines.get((name, device))
    if known is None or known.group.process_group is not group.process_group:
        known = _engines[name, device] = Engine(group, device)
    return known


def _gemm_ar(a, b, a_scale, b_scale, quant, group_name, *, bias=None, out_dtype=None, wire="bf16"):
    gemm = Gemm(a, b, a_scale, b_scale, quant, bias, out_dtype or torch.bfloat16, wire)
    return engine_of(group_name, a.device).run(gemm, None)


def _gemm_ar_out(a, b, a_scale, b_scale, quant, group_name, *, bias=None, wire="bf16", out):
    engine_of(group_name, a.device).run(Gemm(a, b, a_scale, b_scale, quant, bias, out.dtype, wire), out)


_library = torch.library.Library("mori", "IMPL")
for _key in ("CPU", "CUDA") if any(name in torch.ops.mori.build_info() for name in ("cuda", "hip")) else ("CPU",):
    _library.impl("gemm_ar", _gemm_ar, _key)
    _library.impl("gemm_ar.out", _gemm_ar_out, _key)
