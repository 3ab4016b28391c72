"""A plain Triton GEMM over `tl.dot_scaled`: what a user of Hopper writes for MXFP8 today. A baseline of the benchmarks alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 128, 128, 128  # of a tile, not tuned


@triton.jit
def _gemm(a, b, a_scale, b_scale, c, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    across, blocks = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, DEPTH):
        left = tl.load(a + row[:, None] * k + (start + across)[None, :], mask=row[:, None] < m, other=0)
        right = tl.load(b + column[None, :] * k + (start + across)[:, None], mask=column[None, :] < n, other=0)
        left_scale = tl.load(a_scale + row[:, None] * (k // 32) + (start // 32 + blocks)[None, :], mask=row[:, None] < m, other=0)
        right_scale = tl.load(b_scale + (column // 32)[:, None] * (k // 32) + (start // 32 + blocks)[None, :], mask=column[:, None] < n, other=0)
        total = tl.dot_scaled(left, left_scale, "e4m3", right, right_scale, "e4m3", total)
    tl.store(c + row[:, None] * n + column[None, :], total.to(tl.bfloat16), mask=(row[:, None] < m) & (column[None, :] < n))


def mxfp8_gemm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """bf16 [M, N] of `mori_ops.mxfp8_raw`'s operands; K a multiple of 128."""
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n, dtype=torch.bfloat16, device=a.device)
    as_bytes = [t.view(torch.uint8) for t in (a, b, a_scale, b_scale)]
    _gemm[(triton.cdiv(m, ROWS), triton.cdiv(n, COLUMNS))](*as_bytes, c, m, n, k, ROWS, COLUMNS, DEPTH, num_warps=8, num_stages=3)
    return c
