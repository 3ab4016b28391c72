"""A peer of qsa_flash: attention over selected int8 cells as a Triton kernel, one program per token and KV head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps, num_stages=2) for block in (32, 64) for warps in (4, 8)]


@triton.jit
def _cells(codes, scales, at, DIM: tl.constexpr, dtype: tl.constexpr):  # noqa: N803
    """[len(at), DIM] values of the rows `at`."""
    groups: tl.constexpr = DIM // 64
    values = tl.load(codes + at[:, None] * DIM + tl.arange(0, DIM)[None, :])
    scale = tl.load(scales + at[:, None] * groups + tl.arange(0, groups)[None, :])
    product = tl.reshape(values, (at.shape[0], groups, 64)).to(tl.float16) * scale[:, :, None]
    return tl.reshape(product, (at.shape[0], DIM)).to(dtype)


@triton.autotune(CONFIGS, key=["slots"])
@triton.jit
def _attend(
    q, k, v, k_scale, v_scale, ids, out, slots, log2_scale, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr  # noqa: N803
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, 16)
    place = ((token * HEADS + head) * GROUP + row)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    queries = tl.load(q + place, mask=row[:, None] < GROUP, other=0.0)
    top = tl.full((16,), -1e30, tl.float32)
    total = tl.zeros((16,), tl.float32)
    result = tl.zeros((16, DIM), tl.float32)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        cell = tl.load(ids + token * slots + slot, mask=slot < slots, other=-1)
        at = tl.maximum(cell, 0).to(tl.int64) * HEADS + head
        scores = tl.dot(queries, tl.trans(_cells(k, k_scale, at, DIM, queries.dtype))) * log2_scale
        scores = tl.where(cell[None, :] >= 0, scores, float("-inf"))
        most = tl.maximum(top, tl.max(scores, 1))
        p, shrink = tl.exp2(scores - most[:, None]), tl.exp2(top - most)
        total = total * shrink + tl.sum(p, 1)
        result = tl.dot(p.to(queries.dtype), _cells(v, v_scale, at, DIM, queries.dtype), result * shrink[:, None])
        top = most
    tl.store(out + place, (result / total[:, None]).to(out.dtype.element_ty), mask=row[:, None] < GROUP)


def qsa_flash(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *, k_scale: Tensor, v_scale: Tensor) -> Tensor:
    """As mori_ops.qsa_flash for contiguous operands, up to 16 query heads per KV head, and at least one cell per token."""
    tokens, heads, dim = q.shape
    out = torch.empty_like(q)
    log2_scale = dim**-0.5 * 1.4426950408889634
    _attend[(tokens, k.shape[1])](q, k, v, k_scale, v_scale, ids, out, ids.shape[1], log2_scale, HEADS=k.shape[1], GROUP=heads // k.shape[1], DIM=dim)
    return out
