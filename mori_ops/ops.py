"""The operators as typed Python functions over ``torch.ops.mori.*``.

Terms used below. *e4m3*: ``torch.float8_e4m3fn`` (the OCP format; ``e4m3fnuz`` and ``e5m2`` are refused). *e8m0*: a scale
byte, ``torch.float8_e8m0fnu`` or ``torch.uint8`` with the same bits, value ``2^(byte - 127)``, 255 is NaN. ``[.., K]``:
any number of leading dimensions, flattened into M rows. Float inputs are float32, bfloat16 or float16.

Every function accepts strided inputs, M = 0, and gives the same bits from run to run. Bad input raises ``ValueError``
naming the argument, what came and what was expected, before anything is written. Each op has a ``.out`` overload
(``torch.ops.mori.<op>.out(..., out=...)``) that writes into the caller's contiguous tensors. The ops are for inference:
they have no gradient formula, and torch warns when ``backward()`` reaches one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.mori


# --- MXFP8: quantise, dequantise, pack --------------------------------------------------------------------------------


def mxfp8_quantize(x: Tensor, *, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    """Quantises activations to MXFP8, one scale per 32 consecutive values (1x32).

    Args:
        x: ``[.., K]`` float, K a multiple of 32.
        rounding: how the scale follows from the block's largest magnitude *amax*. ``"rceil"``: the smallest power of two
            with ``amax / scale <= 448``, so that nothing saturates. ``"floor"``: OCP MX v1.0 section 6.3,
            ``2^(floor(log2 amax) - 8)``; magnitudes above ``448 * scale`` saturate to 448.

    Returns:
        ``(codes, scale)``: e4m3 ``[.., K]``, rounded to nearest even, and e8m0 ``[.., K/32]``. A block of zeros gets
        byte 0 and codes 0 (signs kept); a block with NaN or Inf gets byte 255, so all of it decodes to NaN.
    """
    return _ops.mxfp8_quantize(x, rounding=rounding)


def mxfp8_quantize_weight(w: Tensor, *, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    """Quantises a weight to MXFP8, one scale per 32x32 block.

    Args:
        w: ``[N, K]`` float, K a multiple of 32; the last block may have fewer than 32 rows.
        rounding: see :func:`mxfp8_quantize`.

    Returns:
        ``(codes, scale)``: e4m3 ``[N, K]`` and e8m0 ``[ceil(N/32), K/32]``.
    """
    return _ops.mxfp8_quantize_weight(w, rounding=rounding)


def mxfp8_dequantize(codes: Tensor, scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decodes MXFP8: ``code * 2^(scale - 127)``, rounded once to ``out_dtype``.

    Args:
        codes: e4m3 ``[.., K]``.
        scale: e8m0 ``[.., K/32]`` (1x32 blocks) or, for codes ``[N, K]``, ``[ceil(N/32), K/32]`` (32x32 blocks).
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[.., K]`` of ``out_dtype``.
    """
    return _ops.mxfp8_dequantize(codes, scale, out_dtype=out_dtype)


def mxfp8_pack_a_scale(scale: Tensor) -> Tensor:
    """Packs the raw activation scales ``[.., K/32]`` (e8m0) for :func:`mxfp8`.

    Returns:
        int32 ``[ceil64(M) * K/128]``: scale (m, j) is byte ``(m % 64) / 16`` of dword
        ``j * ceil64(M)/4 + (m / 64) * 16 + m % 16``; rows past M hold 127.
    """
    return _ops.mxfp8_pack_a_scale(scale)


def mxfp8_pack_b_scale(scale: Tensor) -> Tensor:
    """Packs the raw weight scales ``[ceil(N/32), K/32]`` (e8m0) for :func:`mxfp8`.

    Returns:
        int32 ``[K/32 * ceil(N/32)]``: scale (nb, j) is the low byte of dword ``j * ceil(N/32) + nb``.
    """
    return _ops.mxfp8_pack_b_scale(scale)


# --- MXFP8: matrix products -------------------------------------------------------------------------------------------


def mxfp8(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``a @ b.T + bias`` of MXFP8 operands with *packed* scales.

    Products of decoded values are exact, the sum is fp32, and there is one rounding to ``out_dtype``. Bitwise equal to
    :func:`mxfp8_raw` on the same device.

    Args:
        a: e4m3 ``[.., K]``, K a multiple of 32.
        b: e4m3 ``[N, K]``.
        a_scale: int32 ``[ceil64(M) * K/128]`` from :func:`mxfp8_pack_a_scale`.
        b_scale: int32 ``[K/32 * ceil(N/32)]`` from :func:`mxfp8_pack_b_scale`.
        bias: float ``[N]``, added in fp32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[.., N]`` of ``out_dtype``.
    """
    return _ops.mxfp8(a, b, a_scale, b_scale, bias=bias, out_dtype=out_dtype)


def mxfp8_raw(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``a @ b.T + bias`` of MXFP8 operands with *raw* (row-major) scales, as quantisers and checkpoints hold them.

    Args:
        a: e4m3 ``[.., K]``, K a multiple of 32.
        b: e4m3 ``[N, K]``.
        a_scale: e8m0 ``[.., K/32]``.
        b_scale: e8m0 ``[ceil(N/32), K/32]``.
        bias: float ``[N]``, added in fp32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[.., N]`` of ``out_dtype``; numerics as in :func:`mxfp8`.
    """
    return _ops.mxfp8_raw(a, b, a_scale, b_scale, bias=bias, out_dtype=out_dtype)


def mxfp8_linear(
    x: Tensor, b: Tensor, b_scale: Tensor, *, bias: Tensor | None = None, rounding: str = "rceil",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A linear layer: quantises ``x`` and multiplies, bitwise :func:`mxfp8_quantize` then :func:`mxfp8_raw`.

    Args:
        x: ``[.., K]`` float, K a multiple of 32.
        b: e4m3 weight ``[N, K]``.
        b_scale: e8m0 ``[ceil(N/32), K/32]``.
        bias: float ``[N]``, added in fp32.
        rounding: see :func:`mxfp8_quantize`.
        out_dtype: bfloat16, float16 or float32; None is the autocast dtype under autocast, else x's.

    Returns:
        ``[.., N]`` of ``out_dtype``.
    """
    return _ops.mxfp8_linear(x, b, b_scale, bias=bias, rounding=rounding, out_dtype=out_dtype)


def scaled_gemm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, quant: str, *, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """One rank's product of :func:`mori_ops.gemm_ar`: ``a @ b.T + bias`` of e4m3 operands in any of its scale layouts.

    Args:
        a: e4m3 ``[.., K]``, K a multiple of 32.
        b: e4m3 ``[N, K]``.
        a_scale, b_scale: for ``quant``
            ``"ptpc"``: fp32 ``[..]`` (one per row of a) and ``[N]``;
            ``"blockscale"``: fp32 ``[.., ceil(K/128)]`` and ``[ceil(N/128), ceil(K/128)]``;
            ``"mxfp8"``: packed as for :func:`mxfp8`; ``"mxfp8_raw"``: raw as for :func:`mxfp8_raw`.
        bias: float ``[N]``, added in fp32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[.., N]`` of ``out_dtype``.
    """
    return _ops.scaled_gemm(a, b, a_scale, b_scale, quant, bias=bias, out_dtype=out_dtype)


# --- Attention over selected cells ------------------------------------------------------------------------------------


def kv_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises keys or values to int8 with one fp16 scale per 64 values.

    ``scale = fp16(max|x| / 127)``, ``code = clamp(rint(x / scale), -127, 127)``, in fp32.

    Args:
        x: ``[.., D]`` float, D a multiple of 64.

    Returns:
        ``(codes, scale)``: int8 ``[.., D]`` and float16 ``[.., D/64]``.
    """
    return _ops.kv_quantize(x)


def qsa_flash(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    gate: Tensor | None = None, sm_scale: float | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention of each token over the cells that were selected for it (Qwen sparse attention).

    ``out[t, h] = sigmoid(gate[t, h]) * softmax_s(sm_scale * q[t, h] . k[ids[t, s], h // g]) @ v[ids[t, s], h // g]`` with
    ``g = Hq / Hkv`` query heads per KV head. A negative id is an empty slot, anywhere in the row; a duplicate counts as
    often as it stands; a token without a cell gives exact 0. What lies in cells that are not selected never matters.

    Args:
        q: ``[T, Hq, D]`` float, D 64, 128 or 256, Hq a multiple of Hkv.
        k, v: ``[cells, Hkv, D]``, both int8 (with scales), float16 or bfloat16; a strided pool is read in place.
        ids: int32 or int64 ``[T, S]``, physical cells.
        k_scale, v_scale: float16 ``[cells, Hkv, D/64]``, for int8 only (see :func:`kv_quantize`).
        gate: float ``[T, Hq, D]``, before the sigmoid.
        sm_scale: factor of the scores, default ``D ** -0.5``.
        out_dtype: bfloat16, float16 or float32, default q's.

    Returns:
        ``[T, Hq, D]`` of ``out_dtype``.

    Raises:
        IndexError: an id is not below the number of cells (CPU; devices treat it as empty; with ``MORI_CHECK_IDS=1`` they raise).
    """
    return _ops.qsa_flash(
        q, k, v, ids, k_scale=k_scale, v_scale=v_scale, gate=gate, sm_scale=sm_scale, out_dtype=out_dtype
    )


def qsa_attn(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    sm_scale: float | None = None, splits: int = 4,
) -> tuple[Tensor, Tensor]:
    """The first half of :func:`qsa_flash`'s split form: attention over each of ``splits`` runs of ceil(S/splits) slots.

    Args:
        q, k, v, ids, k_scale, v_scale, sm_scale: as in :func:`qsa_flash`.
        splits: number of runs, at least 1.

    Returns:
        ``(partial, lse)``: normalised outputs float32 ``[splits, T, Hq, D]`` and natural log-sum-exp float32
        ``[splits, T, Hq]``; a run without a cell gives 0 and -inf.
    """
    return _ops.qsa_attn(q, k, v, ids, k_scale=k_scale, v_scale=v_scale, sm_scale=sm_scale, splits=splits)


def qsa_merge(
    partial: Tensor, lse: Tensor, *, gate: Tensor | None = None, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The second half: ``sigmoid(gate) * sum_i exp(lse_i - logsumexp(lse)) * partial_i``.

    Args:
        partial: float32 ``[splits, T, Hq, D]``.
        lse: float32 ``[splits, T, Hq]``.
        gate: float ``[T, Hq, D]``, before the sigmoid.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[T, Hq, D]`` of ``out_dtype``.
    """
    return _ops.qsa_merge(partial, lse, gate=gate, out_dtype=out_dtype)


# --- Q8_0 projection --------------------------------------------------------------------------------------------------


def q8_0_quantize(w: Tensor) -> Tensor:
    """Quantises a weight to ggml's Q8_0: per 32 values along K an fp16 ``d = max|w| / 127``, then 32 int8 ``w / d``.

    Args:
        w: ``[N, K]`` float, K a multiple of 32.

    Returns:
        uint8 ``[N, K/32 * 34]``, byte for byte what ggml writes.
    """
    return _ops.q8_0_quantize(w)


def q8_0_dequantize(w: Tensor, *, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """Decodes Q8_0: ``d * q``, rounded once to ``out_dtype``.

    Args:
        w: uint8 ``[N, K/32 * 34]``.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[N, K]`` of ``out_dtype``.
    """
    return _ops.q8_0_dequantize(w, out_dtype=out_dtype)


def gr_down(
    x: Tensor, w: Tensor, *, norm_weight: Tensor | None = None, eps: float = 1e-6, hc: int = 4, variant: str = "auto"
) -> Tensor:
    """``x @ W.T`` for a verify window of 1..8 tokens and a Q8_0 weight; more tokens work too.

    With ``norm_weight`` x is the residual row of ``hc`` streams: each of its ``hc`` groups is first divided by its root
    mean square (``sqrt(mean(x^2) + eps)``) and multiplied by ``norm_weight``. A row's bits do not depend on how many
    tokens, up to 8, it is computed with.

    Args:
        x: ``[ntok, K]`` float.
        w: uint8 ``[N, K/32 * 34]`` from :func:`q8_0_quantize`.
        norm_weight: float ``[K]``, or None for no norm.
        eps, hc: of the norm; hc divides K.
        variant: a member of the Metal kernel family (``"4_4"``, ``"4_4_r2"``, ``"8_8"``, ``"8_8_r2"``), or ``"auto"`` or ``"auto_8"``:
            the best one for the number of tokens among the first or the last two, whose bits are equal. Other devices run their own
            kernel for every name.

    Returns:
        float32 ``[ntok, N]``.
    """
    return _ops.gr_down(x, w, norm_weight=norm_weight, eps=eps, hc=hc, variant=variant)
