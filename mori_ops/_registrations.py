"""What torch needs beside the compiled kernels: shapes for tracing, autocast, and a sentence when a device has no kernel.

There is no autograd kernel: a Python one would cost every call about 5 us, and torch's own fallback keeps
``requires_grad`` and warns at ``backward()``, so nothing is detached silently. The fakes state shape, dtype and strides only; arguments are checked by the kernels (csrc/*/<family>.h), and
tests/test_torch_integration.py ties the two together.
"""

from __future__ import annotations

import torch
from torch import Tensor

_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_library = torch.library.Library("mori", "IMPL")

OPS = (
    "mxfp8_quantize", "mxfp8_quantize_weight", "mxfp8_dequantize", "mxfp8_pack_a_scale", "mxfp8_pack_b_scale",
    "mxfp8", "mxfp8_raw", "mxfp8_linear", "scaled_gemm", "gemm_ar",
    "kv_quantize", "qsa_flash", "qsa_attn", "qsa_merge",
    "q8_0_quantize", "q8_0_dequantize", "gr_down",
)  # fmt: skip
DEVICES = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS"}


# --- shapes and dtypes ------------------------------------------------------------------------------------------------


def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def _rows(t: Tensor) -> int:
    rows = 1
    for size in t.shape[:-1]:
        rows = rows * size
    return rows


def _quantize(x, *, rounding="rceil"):
    return x.new_empty(x.shape, dtype=_E4M3), x.new_empty((*x.shape[:-1], x.shape[-1] // 32), dtype=_E8M0)


def _quantize_weight(w, *, rounding="rceil"):
    n, k = w.shape
    return w.new_empty((n, k), dtype=_E4M3), w.new_empty((_ceil_div(n, 32), k // 32), dtype=_E8M0)


def _dequantize(codes, scale, *, out_dtype=None):
    return codes.new_empty(codes.shape, dtype=out_dtype or torch.bfloat16)


def _pack_a_scale(scale):
    return scale.new_empty((_ceil_div(_rows(scale), 64) * 16 * scale.shape[-1],), dtype=torch.int32)


def _pack_b_scale(scale):
    return scale.new_empty((scale.shape[0] * scale.shape[1],), dtype=torch.int32)


def _gemm(a, b, a_scale, b_scale, *, bias=None, out_dtype=None):
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=out_dtype or torch.bfloat16)


def _scaled_gemm(a, b, a_scale, b_scale, quant, *, bias=None, out_dtype=None):
    return _gemm(a, b, a_scale, b_scale, out_dtype=out_dtype)


def _gemm_ar(a, b, a_scale, b_scale, quant, group_name, *, bias=None, out_dtype=None, wire="bf16"):
    return _gemm(a, b, a_scale, b_scale, out_dtype=out_dtype)


def _linear(x, b, b_scale, *, bias=None, rounding="rceil", out_dtype=None):
    return x.new_empty((*x.shape[:-1], b.shape[0]), dtype=out_dtype or x.dtype)


def _kv_quantize(x):
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], x.shape[-1] // 64), dtype=torch.float16)


def _flash(q, k, v, ids, *, k_scale=None, v_scale=None, gate=None, sm_scale=None, out_dtype=None):
    return q.new_empty(q.shape, dtype=out_dtype or q.dtype)


def _attn(q, k, v, ids, *, k_scale=None, v_scale=None, sm_scale=None, splits=4):
    tokens, heads, dim = q.shape
    return q.new_empty((splits, tokens, heads, dim), dtype=torch.float32), q.new_empty((splits, tokens, heads), dtype=torch.float32)


def _merge(partial, lse, *, gate=None, out_dtype=None):
    return partial.new_empty(partial.shape[1:], dtype=out_dtype or torch.float32)


def _q8_quantize(w):
    return w.new_empty((w.shape[0], w.shape[1] // 32 * 34), dtype=torch.uint8)


def _q8_dequantize(w, *, out_dtype=None):
    return w.new_empty((w.shape[0], w.shape[1] // 34 * 32), dtype=out_dtype or torch.float32)


def _down(x, w, *, norm_weight=None, eps=1e-6, hc=4, variant="auto"):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32)


_FAKES = {
    "mxfp8_quantize": _quantize,
    "mxfp8_quantize_weight": _quantize_weight,
    "mxfp8_dequantize": _dequantize,
    "mxfp8_pack_a_scale": _pack_a_scale,
    "mxfp8_pack_b_scale": _pack_b_scale,
    "mxfp8": _gemm,
    "mxfp8_raw": _gemm,
    "mxfp8_linear": _linear,
    "scaled_gemm": _scaled_gemm,
    "gemm_ar": _gemm_ar,
    "kv_quantize": _kv_quantize,
    "qsa_flash": _flash,
    "qsa_attn": _attn,
    "qsa_merge": _merge,
    "q8_0_quantize": _q8_quantize,
    "q8_0_dequantize": _q8_dequantize,
    "gr_down": _down,
}


def _out_fake(*args, **kwargs):
    return None  # an out overload returns nothing


def _on_one_device(op: str, overload: str, fake):
    """`fake`, refusing mixed devices: one meta tensor among real ones (a weight that was never loaded) brings the call here,
    and the result would be uninitialised memory."""
    names = [argument.name for argument in getattr(getattr(torch.ops.mori, op), overload)._schema.arguments]

    def checked(*args, **kwargs):
        given = [(name, t) for name, t in (*zip(names, args), *kwargs.items()) if isinstance(t, Tensor)]
        first_name, first = given[0]
        for name, t in given:
            if t.device != first.device:
                raise ValueError(f"{op}: {name} must be on the same device as {first_name}, {first.device}, got {t.device}")
        return fake(*args, **kwargs)

    return checked


# --- autocast --------------------------------------------------------------------------------------------------------


def _register_linear_autocast(device: str, key: str) -> None:
    """Without an out_dtype the result has the autocast dtype, as with torch's own linear. x is quantised as it comes."""

    def kernel(x, b, b_scale, *, bias=None, rounding="rceil", out_dtype=None):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            out_dtype = out_dtype or torch.get_autocast_dtype(device)
            return torch.ops.mori.mxfp8_linear(x, b, b_scale, bias=bias, rounding=rounding, out_dtype=out_dtype)

    _library.impl("mxfp8_linear", kernel, key)


# --- devices ----------------------------------------------------------------------------------------------------------


def has_kernel(op: str, device: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"mori::{op}", DEVICES[device])


_ADVICE = {
    "cuda": "Reinstall it beside a CUDA toolkit: MORI_BACKENDS=cuda pip install . --no-build-isolation",
    "mps": "Move the tensors to the CPU for this operator: x.cpu()",
}


def _explain_missing(op: str, device: str, built: str) -> None:
    """Turns the dispatcher's dump for a device without a kernel into one sentence."""

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"mori_ops: {op} has no {device} kernel in this build (built: {built}). {_ADVICE[device]}")

    for overload in (op, f"{op}.out"):
        _library.impl(overload, kernel, DEVICES[device])


def register(built: str) -> dict[str, dict[str, bool]]:
    """Registers all of the above; returns, per op, the devices that have a kernel of their own."""
    for op, fake in _FAKES.items():
        torch.library.register_fake(f"mori::{op}", _on_one_device(op, "default", fake))
        torch.library.register_fake(f"mori::{op}.out", _on_one_device(op, "out", _out_fake))
    if torch.backends.mps.is_built():
        from mori_ops import mps

        mps.register(_library)
    for device in ("cpu", "cuda"):
        _register_linear_autocast(device, f"Autocast{DEVICES[device]}")
    table = {op: {device: has_kernel(op, device) for device in DEVICES} for op in OPS}
    for op, devices in table.items():
        for device in _ADVICE:
            if not devices[device]:
                _explain_missing(op, device, built)
    return table
