"""Which kernel would run for a shape, and why: reads the table that the launcher itself uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GEMM = ("m", "n", "k")
DIMENSIONS = {
    "mxfp8": _GEMM,
    "mxfp8_raw": _GEMM,
    "mxfp8_linear": _GEMM,
    "scaled_gemm": _GEMM,
    "gemm_ar": ("world", "m", "n"),
    "qsa_flash": ("t", "s", "cells", "hq", "hkv", "d"),
    "gr_down": ("ntok", "n", "k"),
}


@dataclass(frozen=True)
class Route:
    kernel: str
    why: str


def route(op: str, *, device: str | torch.device = "cpu", **dims: int) -> Route:
    """The kernel that `op` runs for these dimensions on `device`.

    Args:
        op: an operator with a choice of kernels, e.g. ``"mxfp8_raw"``.
        device: ``"cpu"``, ``"cuda"`` or ``"mps"``; only the type counts.
        **dims: the operator's dimensions: ``m, n, k`` (GEMMs), ``world, m, n`` (gemm_ar), ``t, s, cells, hq, hkv, d`` (qsa_flash),
            ``ntok, n, k`` (gr_down).

    >>> mori_ops.route("mxfp8_raw", m=4, n=7168, k=2048).kernel
    """
    if op not in DIMENSIONS:
        raise ValueError(f"route: op must be one of {', '.join(DIMENSIONS)}, got {op!r}")
    names = DIMENSIONS[op]
    if set(dims) != set(names):
        raise TypeError(f"route: {op} takes the dimensions {', '.join(names)}, got {', '.join(dims) or 'none'}")
    if torch.device(device).type == "mps" and torch.backends.mps.is_built():
        from mori_ops import mps

        if op in mps.ROUTES:
            return mps.route(op, **dims)
    kernel, why = torch.ops.mori._route(op, torch.device(device).type, [dims[name] for name in names]).split("\t")
    return Route(kernel, why)
