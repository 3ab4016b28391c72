"""Every operator in plain PyTorch, in float64: the oracle of the tests, written to be read first.

Functions have the names and arguments of :mod:`mori_ops.ops`. Results that a kernel rounds (GEMMs, attention,
projections) are returned in float64, unrounded; results that are defined bit for bit (codes, scales, packed layouts,
Q8_0 bytes) have the operator's own dtypes and bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3_MAX = 448.0  # largest finite e4m3fn value, 1.75 * 2^8
E4M3_NAN = 0x7F
MX_BLOCK = 32
BLOCKSCALE_BLOCK = 128
KV_GROUP = 64
Q8_BLOCK, Q8_BYTES = 32, 34


# --- MXFP8 ------------------------------------------------------------------------------------------------------------


def e8m0_value(scale: Tensor) -> Tensor:
    """Bytes (uint8 or float8_e8m0fnu) to float64: 2^(byte - 127), 255 is NaN."""
    byte = scale.view(torch.uint8).to(torch.float64)
    return torch.where(byte == 255, math.nan, torch.exp2(byte - 127))


def e4m3_value(codes: Tensor) -> Tensor:
    """float8_e4m3fn (or its bytes) to float64."""
    return codes.view(torch.float8_e4m3fn).to(torch.float64)


def _scale_byte(amax: Tensor, rounding: str) -> Tensor:
    """The block scale's byte for a block maximum (float64, which holds every input dtype's exponents exactly).

    OCP MX v1.0 section 6.3 is "floor": 2^(floor(log2 amax) - 8). "rceil" is the smallest power of two with
    amax / scale <= 448. A maximum of 0 gives byte 0, NaN or Inf byte 255.
    """
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    byte = exponent.to(torch.int64) - 1 - 8 + 127
    if rounding == "rceil":
        byte = byte + (mantissa * 2 > 1.75)
    elif rounding != "floor":
        raise ValueError(f"rounding must be 'rceil' or 'floor', got {rounding!r}")
    byte = torch.where(amax == 0, 0, byte.clamp(0, 254))
    return torch.where(amax.isfinite(), byte, 255).to(torch.uint8)


def _e4m3_codes(value: Tensor) -> Tensor:
    """float64 to float8_e4m3fn: nearest, ties to even, saturating at 448, NaN kept, sign of zero kept."""
    magnitude = value.abs().clamp(max=E4M3_MAX)
    _, exponent = torch.frexp(magnitude)
    step = torch.exp2((exponent - 1).clamp(min=-6).to(torch.float64) - 3)  # spacing of e4m3 around the value
    rounded = torch.copysign((magnitude / step).round() * step, value)  # torch rounds ties to even
    return rounded.to(torch.float32).to(torch.float8_e4m3fn)  # exact: `rounded` is an e4m3 value


def _quantize_blocks(blocks: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """blocks [..., elements of one block] float64 -> codes of the same shape, bytes [...]"""
    amax = torch.where(blocks.isfinite().all(-1), blocks.abs().amax(-1), math.nan)
    byte = _scale_byte(amax, rounding)
    codes = _e4m3_codes(blocks / e8m0_value(byte)[..., None]).view(torch.uint8)
    codes = torch.where((byte == 255)[..., None], E4M3_NAN, codes)
    return codes.to(torch.uint8), byte


def mxfp8_quantize(x: Tensor, *, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    blocks = x.to(torch.float64).unflatten(-1, (-1, MX_BLOCK))
    codes, byte = _quantize_blocks(blocks, rounding)
    return codes.flatten(-2).view(torch.float8_e4m3fn), byte.view(torch.float8_e8m0fnu)


def mxfp8_quantize_weight(w: Tensor, *, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    n, k = w.shape
    row_blocks, k_blocks = -(-n // MX_BLOCK), k // MX_BLOCK
    padded = torch.zeros(row_blocks * MX_BLOCK, k, dtype=torch.float64, device=w.device)
    padded[:n] = w.to(torch.float64)
    blocks = padded.view(row_blocks, MX_BLOCK, k_blocks, MX_BLOCK).transpose(1, 2)
    codes, byte = _quantize_blocks(blocks.flatten(-2), rounding)
    codes = codes.view(row_blocks, k_blocks, MX_BLOCK, MX_BLOCK).transpose(1, 2).reshape(-1, k)[:n]
    return codes.contiguous().view(torch.float8_e4m3fn), byte.view(torch.float8_e8m0fnu)


def mxfp8_dequantize(codes: Tensor, scale: Tensor, *, out_dtype: torch.dtype = torch.float64) -> Tensor:
    """Both block shapes: scale [.., K/32] (1x32) or, for codes [N, K], [ceil(N/32), K/32] (32x32)."""
    factor = e8m0_value(scale)
    if factor.shape[:-1] != codes.shape[:-1]:
        factor = factor.repeat_interleave(MX_BLOCK, 0)[: codes.shape[0]]
    return (e4m3_value(codes) * factor.repeat_interleave(MX_BLOCK, -1)).to(out_dtype)


def _packed_a_positions(m: int, blocks: int) -> Tensor:
    """Byte index of raw scale (row, block) in the packed A layout (see csrc/mxfp8/mxfp8.h), [m, blocks]."""
    row, j = torch.arange(m)[:, None], torch.arange(blocks)[None, :]
    padded = -(-m // 64) * 64
    dword = j * (padded // 4) + row // 64 * 16 + row % 16
    return dword * 4 + row % 64 // 16


def mxfp8_pack_a_scale(scale: Tensor) -> Tensor:
    byte = scale.view(torch.uint8).flatten(0, -2) if scale.dim() > 1 else scale.view(torch.uint8)[None]
    m, blocks = byte.shape
    packed = torch.full((-(-m // 64) * 64 * blocks,), 127, dtype=torch.uint8, device=scale.device)
    packed[_packed_a_positions(m, blocks).to(scale.device)] = byte
    return packed.view(torch.int32)


def mxfp8_pack_b_scale(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).t().to(torch.int32).flatten()


def mxfp8_unpack_a_scale(packed: Tensor, m: int, blocks: int) -> Tensor:
    """The raw [m, blocks] bytes of a packed A scale."""
    return packed.view(torch.uint8)[_packed_a_positions(m, blocks).to(packed.device)]


def mxfp8_unpack_b_scale(packed: Tensor, row_blocks: int, blocks: int) -> Tensor:
    """The raw [row_blocks, blocks] bytes of a packed B scale."""
    return packed.view(blocks, row_blocks).t().to(torch.uint8).contiguous()


# --- GEMMs ------------------------------------------------------------------------------------------------------------


def scaled_gemm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, quant: str, *, bias: Tensor | None = None) -> Tensor:
    """C[.., n] = sum_k A[.., k] B[n, k] (+ bias[n]) of the decoded values, float64."""
    n, k = b.shape
    m, blocks = a.numel() // k if k else math.prod(a.shape[:-1]), k // MX_BLOCK
    rows = a.reshape(m, k)
    if quant == "mxfp8":
        a_scale, b_scale = mxfp8_unpack_a_scale(a_scale, m, blocks), mxfp8_unpack_b_scale(b_scale, -(-n // MX_BLOCK), blocks)
    if quant in ("mxfp8", "mxfp8_raw"):
        left, right = mxfp8_dequantize(rows, a_scale.reshape(m, blocks)), mxfp8_dequantize(b, b_scale)
    elif quant == "ptpc":
        left = e4m3_value(rows) * a_scale.to(torch.float64).reshape(m, 1)
        right = e4m3_value(b) * b_scale.to(torch.float64)[:, None]
    elif quant == "blockscale":
        across_k = lambda scale: scale.to(torch.float64).repeat_interleave(BLOCKSCALE_BLOCK, -1)[..., :k]  # noqa: E731
        left = e4m3_value(rows) * across_k(a_scale.reshape(m, a_scale.shape[-1]))
        right = e4m3_value(b) * across_k(b_scale.repeat_interleave(BLOCKSCALE_BLOCK, 0)[:n])
    else:
        raise ValueError(f"unknown quant {quant!r}")
    out = left @ right.t()
    if bias is not None:
        out = out + bias.to(torch.float64)
    return out.reshape(*a.shape[:-1], n)


def mxfp8(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, bias: Tensor | None = None) -> Tensor:
    return scaled_gemm(a, b, a_scale, b_scale, "mxfp8", bias=bias)


def mxfp8_raw(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, bias: Tensor | None = None) -> Tensor:
    return scaled_gemm(a, b, a_scale, b_scale, "mxfp8_raw", bias=bias)


def mxfp8_linear(x: Tensor, b: Tensor, b_scale: Tensor, *, bias: Tensor | None = None, rounding: str = "rceil") -> Tensor:
    codes, scale = mxfp8_quantize(x, rounding=rounding)
    return mxfp8_raw(codes, b, scale, b_scale, bias=bias)


# --- Attention over selected cells ------------------------------------------------------------------------------------


def kv_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """scale = fp16(max|x| / 127) per 64 values, code = clamp(rint(x / scale), -127, 127); scale 0 gives codes 0.

    The two divisions are fp32 divisions, which is what a kernel does: the codes are defined bit for bit.
    """
    groups = x.to(torch.float32).unflatten(-1, (-1, KV_GROUP))
    scale = (groups.abs().amax(-1) / 127).to(torch.float16)
    divisor = scale.to(torch.float32)[..., None]
    codes = torch.where(divisor == 0, 0.0, (groups / divisor).round().clamp(-127, 127))
    return codes.to(torch.int8).flatten(-2), scale


def kv_dequantize(codes: Tensor, scale: Tensor | None) -> Tensor:
    """int8 codes with fp16 scales, or floating-point K/V as they are, to float64."""
    value = codes.to(torch.float64)
    return value if scale is None else value * scale.to(torch.float64).repeat_interleave(KV_GROUP, -1)


def _selected_scores(q: Tensor, k: Tensor, ids: Tensor, k_scale: Tensor | None, sm_scale: float | None) -> Tensor:
    """Scores [T, Hq, S] with -inf at empty slots; only selected cells are ever read."""
    heads_per_kv = q.shape[1] // k.shape[1]
    scale = 1 / math.sqrt(q.shape[2]) if sm_scale is None else sm_scale
    cells = ids.clamp(min=0).long()
    keys = kv_dequantize(k[cells], None if k_scale is None else k_scale[cells])  # [T, S, Hkv, D]
    keys = torch.where((ids >= 0)[:, :, None, None], keys, 0.0).repeat_interleave(heads_per_kv, 2)
    scores = torch.einsum("thd,tshd->ths", q.to(torch.float64), keys) * scale
    return scores.masked_fill((ids < 0)[:, None, :], -math.inf)


def qsa_attn(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    sm_scale: float | None = None, splits: int = 4,
) -> tuple[Tensor, Tensor]:
    """Split form: partial [splits, T, Hq, D] and natural log-sum-exp [splits, T, Hq] over `splits` runs of slots."""
    tokens, q_heads, dim = q.shape
    partials, lses = [], []
    run = -(-ids.shape[1] // splits)
    for i in range(splits):
        part = ids[:, i * run : (i + 1) * run]
        if k.shape[0] == 0 or part.shape[1] == 0:
            partials.append(torch.zeros(tokens, q_heads, dim, dtype=torch.float64))
            lses.append(torch.full((tokens, q_heads), -math.inf, dtype=torch.float64))
            continue
        scores = _selected_scores(q, k, part, k_scale, sm_scale)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
        cells = part.clamp(min=0).long()
        values = kv_dequantize(v[cells], None if v_scale is None else v_scale[cells])
        values = torch.where((part >= 0)[:, :, None, None], values, 0.0).repeat_interleave(q_heads // k.shape[1], 2)
        partials.append(torch.einsum("ths,tshd->thd", weights, values))
        lses.append(lse)
    return torch.stack(partials), torch.stack(lses)


def qsa_merge(partial: Tensor, lse: Tensor, *, gate: Tensor | None = None) -> Tensor:
    """out = sum_i exp(lse_i - lse) * partial_i, then times sigmoid(gate); a token without a cell gives exact 0."""
    partial, lse = partial.to(torch.float64), lse.to(torch.float64)
    total = torch.logsumexp(lse, 0)
    empty = total == -math.inf
    weights = torch.exp(lse - torch.where(empty, 0.0, total))
    out = (weights[..., None] * partial).sum(0)
    if gate is not None:
        out = out * torch.sigmoid(gate.to(torch.float64))
    return torch.where(empty[..., None], 0.0, out)


def qsa_flash(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    gate: Tensor | None = None, sm_scale: float | None = None,
) -> Tensor:
    partial, lse = qsa_attn(q, k, v, ids, k_scale=k_scale, v_scale=v_scale, sm_scale=sm_scale, splits=1)
    return qsa_merge(partial, lse, gate=gate)


# --- Q8_0 projection --------------------------------------------------------------------------------------------------


def q8_0_quantize(w: Tensor) -> Tensor:
    """ggml's Q8_0 bytes [N, K/32 * 34]: fp16 d = max|w| / 127, then 32 int8 = w / d rounded half away from zero."""
    blocks = w.to(torch.float32).unflatten(-1, (-1, Q8_BLOCK))
    d = blocks.abs().amax(-1) / 127
    inverse = torch.where(d == 0, 0.0, 1 / d)
    scaled = blocks * inverse[..., None]
    codes = torch.copysign((2 * scaled.abs()).floor().add(1).div(2).floor(), scaled).to(torch.int8)  # + 0.5 would round up 0.5 - 2^-25
    parts = (d.to(torch.float16)[..., None].view(torch.uint8), codes.view(torch.uint8))
    return torch.cat(parts, -1).flatten(-2)


def q8_0_dequantize(w: Tensor, *, out_dtype: torch.dtype = torch.float64) -> Tensor:
    blocks = w.unflatten(-1, (-1, Q8_BYTES))
    d = blocks[..., :2].contiguous().view(torch.float16).to(torch.float64)
    return (d * blocks[..., 2:].contiguous().view(torch.int8).to(torch.float64)).flatten(-2).to(out_dtype)


def gr_down(
    x: Tensor, w: Tensor, *, norm_weight: Tensor | None = None, eps: float = 1e-6, hc: int = 4, variant: str = "auto",
) -> Tensor:
    """y[t, n] = sum_k W[n, k] xn[t, k]; `variant` names a kernel, never another result."""
    value = x.to(torch.float64)
    if norm_weight is not None:
        groups = value.unflatten(-1, (hc, -1))
        value = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * norm_weight.to(torch.float64)
    return value @ q8_0_dequantize(w).t()
