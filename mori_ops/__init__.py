"""Low-precision kernels for LLM serving as PyTorch operators. Importing this registers ``torch.ops.mori.*``."""

import re

import torch

from mori_ops import _library

_library.load()
build_info = dict(re.findall(r"(\w+)=([^;]*);", torch.ops.mori.build_info()))

from mori_ops import _registrations  # noqa: E402  (needs the schemas)
from mori_ops.distributed import gemm_ar  # noqa: E402  (registers the kernel)

_kernels = _registrations.register(build_info["backends"])

from mori_ops.ops import (  # noqa: E402
    gr_down,
    kv_quantize,
    mxfp8,
    mxfp8_dequantize,
    mxfp8_linear,
    mxfp8_pack_a_scale,
    mxfp8_pack_b_scale,
    mxfp8_quantize,
    mxfp8_quantize_weight,
    mxfp8_raw,
    q8_0_dequantize,
    q8_0_quantize,
    qsa_attn,
    qsa_flash,
    qsa_merge,
    scaled_gemm,
)
from mori_ops.routes import Route, route  # noqa: E402


def kernels() -> dict[str, dict[str, bool]]:
    """Which operators have a kernel for which device in this build: ``{op: {"cpu": True, "cuda": False, ...}}``."""
    return {op: dict(devices) for op, devices in _kernels.items()}


__all__ = [
    "Route", "build_info", "gemm_ar", "gr_down", "kernels", "kv_quantize", "mxfp8", "mxfp8_dequantize", "mxfp8_linear",
    "mxfp8_pack_a_scale", "mxfp8_pack_b_scale", "mxfp8_quantize", "mxfp8_quantize_weight", "mxfp8_raw",
    "q8_0_dequantize", "q8_0_quantize", "qsa_attn", "qsa_flash", "qsa_merge", "route", "scaled_gemm",
]  # fmt: skip
