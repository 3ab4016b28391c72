"""One table of inputs per operator, for the tests that hold for every operator (tracing, strides, refusals).

    args = arguments("mxfp8_raw", rows=5)        # by schema name
    operator("mxfp8_raw")(**args)
    call_out("mxfp8_raw", args)                  # the same through the .out overload, into poisoned tensors
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mori_ops import reference
from tests import cases
from tests.cases import bits

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The dimensions of one sample; each operator reads those it has."""

    rows: int = 5  # M, T, ntok, or N of the weight quantisers
    n: int = 40  # a partial block of weight rows
    k: int = 96
    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    cells: int = 37
    slots: int = 9
    hc: int = 3


def _random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _rows(size: Size, dtype: torch.dtype, seed: int) -> Tensor:
    return _random(size.rows, size.k, dtype=dtype, seed=seed)


def _rounding(seed: int) -> str:
    return ("rceil", "floor")[seed % 2]


def _quantize(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    return {"x": _rows(size, dtype, seed), "rounding": _rounding(seed)}


def _quantize_weight(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    return {"w": _rows(size, dtype, seed), "rounding": _rounding(seed)}


def _dequantize(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    codes, _, scale, _ = cases.gemm_operands(size.rows, size.n, size.k, seed=seed)
    return {"codes": codes, "scale": scale, "out_dtype": dtype}


def _pack(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    return {"scale": cases.gemm_operands(size.rows, size.n, size.k, seed=seed)[2]}


def _gemm(quant: str, size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    a, b, a_scale, b_scale = cases.gemm_operands(size.rows, size.n, size.k, quant, seed=seed)
    bias = _random(size.n, dtype=dtype, seed=seed + 1)
    return {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "bias": bias, "out_dtype": dtype}


def _mxfp8(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    return _gemm("mxfp8", size, dtype, seed)


def _mxfp8_raw(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    return _gemm("mxfp8_raw", size, dtype, seed)


def _scaled_gemm(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    quant = ("ptpc", "blockscale")[seed % 2]
    return {**_gemm(quant, size, dtype, seed), "quant": quant}


def _gemm_ar(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    quant = cases.QUANTS[seed % 4]
    return {**_gemm(quant, size, dtype, seed), "quant": quant, "group_name": ""}


def _linear(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    _, b, _, b_scale = cases.gemm_operands(size.rows, size.n, size.k, seed=seed)
    bias = _random(size.n, dtype=dtype, seed=seed + 1)
    return {"x": _rows(size, dtype, seed), "b": b, "b_scale": b_scale, "bias": bias, "rounding": _rounding(seed)}


def _kv_quantize(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    return {"x": _random(size.rows, size.dim, dtype=dtype, seed=seed)}


def _attn(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    k, v, k_scale, v_scale = cases.kv_cache(size.cells, size.kv_heads, size.dim, seed=seed)
    ids = cases.selected_ids(size.rows, size.slots, size.cells, seed=seed)
    q = _random(size.rows, size.q_heads, size.dim, dtype=dtype, seed=seed)
    return {"q": q, "k": k, "v": v, "ids": ids, "k_scale": k_scale, "v_scale": v_scale}


def _flash(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    return {**_attn(size, dtype, seed), "gate": _random(size.rows, size.q_heads, size.dim, dtype=dtype, seed=seed + 1)}


def _split_attn(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    return {**_attn(size, dtype, seed), "splits": 2 + seed % 2}


def _merge(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    shape = (size.rows, size.q_heads, size.dim)
    partial = _random(3, *shape, dtype=torch.float32, seed=seed)
    lse = _random(3, *shape[:-1], dtype=torch.float32, seed=seed + 1)
    return {"partial": partial, "lse": lse, "gate": _random(*shape, dtype=dtype, seed=seed + 2), "out_dtype": dtype}


def _q8_quantize(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    return {"w": _rows(size, dtype, seed)}


def _q8_dequantize(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    return {"w": reference.q8_0_quantize(_rows(size, torch.float32, seed)), "out_dtype": dtype}


def _down(size: Size, dtype: torch.dtype, seed: int) -> Arguments:
    w = reference.q8_0_quantize(_random(size.n, size.k, dtype=torch.float32, seed=seed + 1))
    norm_weight = _random(size.k, dtype=dtype, seed=seed + 2)
    return {"x": _rows(size, dtype, seed), "w": w, "norm_weight": norm_weight, "hc": size.hc}


SAMPLES: dict[str, Callable[[Size, torch.dtype, int], Arguments]] = {
    "mxfp8_quantize": _quantize,
    "mxfp8_quantize_weight": _quantize_weight,
    "mxfp8_dequantize": _dequantize,
    "mxfp8_pack_a_scale": _pack,
    "mxfp8_pack_b_scale": _pack,
    "mxfp8": _mxfp8,
    "mxfp8_raw": _mxfp8_raw,
    "mxfp8_linear": _linear,
    "scaled_gemm": _scaled_gemm,
    "gemm_ar": _gemm_ar,
    "kv_quantize": _kv_quantize,
    "qsa_flash": _flash,
    "qsa_attn": _split_attn,
    "qsa_merge": _merge,
    "q8_0_quantize": _q8_quantize,
    "q8_0_dequantize": _q8_dequantize,
    "gr_down": _down,
}
OPS = tuple(SAMPLES)
# Results that are defined bit for bit; the others are float64 results rounded once.
EXACT = {
    "mxfp8_quantize", "mxfp8_quantize_weight", "mxfp8_dequantize", "mxfp8_pack_a_scale", "mxfp8_pack_b_scale",
    "kv_quantize", "q8_0_quantize", "q8_0_dequantize",
}  # fmt: skip


def arguments(op: str, rows: int = 5, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **size: int) -> Arguments:
    """Random arguments of `op` by name, optional tensors included; the seed also chooses modes such as the rounding."""
    return SAMPLES[op](Size(rows, **size), dtype, seed)


def operator(op: str, overload: str = "default"):
    return getattr(getattr(torch.ops.mori, op), overload)


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def call(op: str, args: Arguments) -> tuple[Tensor, ...]:
    return as_tuple(operator(op)(**args))


class Call(torch.nn.Module):
    """An operator with its other arguments fixed, as a module over its tensors (for torch.compile and torch.export)."""

    def __init__(self, op: str, args: Arguments) -> None:
        super().__init__()
        self.op = op
        self.constants = {name: value for name, value in args.items() if not isinstance(value, Tensor)}

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return as_tuple(operator(self.op)(**inputs, **self.constants))


def assert_same_bits(results: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
    assert len(results) == len(others)
    for result, other in zip(results, others, strict=True):
        assert cases.same_bits(result, other)


def tensors(args: Arguments) -> dict[str, Tensor]:
    return {name: value for name, value in args.items() if isinstance(value, Tensor)}


def map_tensors(function: Callable[[Tensor], Tensor], args: Arguments) -> Arguments:
    return {name: function(value) if isinstance(value, Tensor) else value for name, value in args.items()}


def expected(op: str, args: Arguments) -> tuple[Tensor, ...]:
    """The reference's result: float64, or the exact bits for EXACT ops."""
    known = {"out_dtype", "group_name", "wire"} if op not in ("mxfp8_dequantize", "q8_0_dequantize") else set()
    function = reference.scaled_gemm if op == "gemm_ar" else getattr(reference, op)
    return as_tuple(function(**{name: value for name, value in args.items() if name not in known}))


def _poison(t: Tensor) -> Tensor:
    bits(t).fill_(0xFF if t.element_size() == 1 else -1)
    return t


def poisoned_like(t: Tensor) -> Tensor:
    """A contiguous tensor of bytes 0xFF: NaN in every floating-point format here, -1 in the signed integers."""
    return _poison(torch.empty(t.shape, dtype=t.dtype))


def out_arguments(op: str, args: Arguments, results: tuple[Tensor, ...]) -> tuple[Arguments, tuple[Tensor, ...]]:
    """The arguments of `op`.out, with poisoned outputs shaped like `results`."""
    schema = operator(op, "out")._schema.arguments
    outs = [a.name for a in schema if a.alias_info is not None]
    buffers = {name: poisoned_like(result) for name, result in zip(outs, results, strict=True)}
    inputs = {a.name: args[a.name] for a in schema if a.name in args}
    return {**inputs, **buffers}, tuple(buffers.values())


def call_out(op: str, args: Arguments) -> tuple[Tensor, ...]:
    given, outs = out_arguments(op, args, call(op, args))
    operator(op, "out")(**given)
    return outs


# --- layouts ----------------------------------------------------------------------------------------------------------

def _embedded(t: Tensor, shape: tuple[int, ...], window: tuple[slice, ...]) -> Tensor:
    base = _poison(torch.empty(shape, dtype=t.dtype))
    bits(base)[window].copy_(bits(t))
    return base[window]


def sliced(t: Tensor) -> Tensor:
    """Columns 1.. of a wider tensor: row stride K + 3, misaligned start; the rest is poison."""
    return _embedded(t, (*t.shape[:-1], t.shape[-1] + 3), (..., slice(1, 1 + t.shape[-1])))


def strided(t: Tensor) -> Tensor:
    """Every other element of every other row."""
    shape = (2 * t.shape[0], *t.shape[1:-1], 2 * t.shape[-1]) if t.dim() > 1 else (2 * t.shape[0],)
    window = (slice(None, None, 2), ..., slice(1, None, 2)) if t.dim() > 1 else (slice(1, None, 2),)
    return _embedded(t, shape, window)


def transposed(t: Tensor) -> Tensor:
    """Stored with the last two dimensions swapped."""
    return bits(t).transpose(-1, -2).contiguous().transpose(-1, -2).view(t.dtype) if t.dim() > 1 else t


def expanded(t: Tensor) -> Tensor:
    """The first row for every row, stride 0: other values than t's."""
    return bits(t)[:1].expand(t.shape).view(t.dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": transposed,
    "sliced": sliced,
    "strided": strided,
    "expanded": expanded,
}
