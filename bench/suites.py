"""The cases of each suite: shapes, operands, named baselines, goals. On a GPU the baseline is cuBLAS in bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import mori_ops
from bench.timing import COLD_BYTES, Arm, Case, Goal, copies_of
from mori_ops import reference
from tests import cases

GEMM_M = {
    "cpu": (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 33, 34, 64, 256, 1024),
    "cuda": (1, 8, 16, 17, 32, 33, 64, 128, 256, 512, 1024, 4096, 16384),
}
GEMM_LINEARS = {"cpu": ("wo_b_wide", "wo_b"), "cuda": ("square", "wo_b_wide", "wq_b", "wo_b")}
INT8PACK = "torch._weight_int8pack_mm"
FP32, BF16 = "F.linear fp32", "F.linear bf16"
ROWWISE, DOT_SCALED = "torch._scaled_mm rowwise", "Triton dot_scaled"


def _int8_arm(x: Tensor, w: Tensor) -> Arm:
    """torch's weight-only int8 product, quantised per row."""
    amax = w.abs().amax(1, keepdim=True)
    codes, scale, x_bf16 = (w / amax * 127).round().to(torch.int8), (amax[:, 0] / 127).bfloat16(), x.bfloat16()
    return Arm(INT8PACK, lambda o: torch._weight_int8pack_mm(x_bf16, o, scale), copies_of(codes))


def _linear_arms(x: Tensor, w: Tensor, *, bf16: bool) -> list[Arm]:
    """torch's own ways to multiply x by the weight: fp32, weight-only int8, and bf16 where it is not hopeless."""
    x_bf16 = x.bfloat16()
    if x.is_cuda:
        fp8, ones = x.to(torch.float8_e4m3fn), torch.ones(max(x.shape[0], w.shape[0]), device=x.device)
        scales = {"scale_a": ones[: x.shape[0], None], "scale_b": ones[None, : w.shape[0]]}
        return [
            Arm(BF16, lambda o: F.linear(x_bf16, o), copies_of(w.bfloat16())),
            Arm(ROWWISE, lambda o: torch._scaled_mm(fp8, o.t(), **scales, out_dtype=torch.bfloat16), copies_of(w.to(torch.float8_e4m3fn))),
        ]
    arms = [Arm(FP32, lambda o: F.linear(x, o), copies_of(w)), _int8_arm(x, w)]
    if bf16:
        arms.append(Arm(BF16, lambda o: F.linear(x_bf16, o), copies_of(w.bfloat16())))
    return arms


def mxfp8_gemm(op: str, device: str) -> Iterator[Callable[[], Case]]:
    for name in GEMM_LINEARS[device]:
        n, k = cases.LINEARS[name]
        for m in GEMM_M[device]:
            yield lambda n=n, k=k, m=m: gemm_case(op, m, n, k, device)


def gemm_case(op: str, m: int, n: int, k: int, device: str) -> Case:
    """The peers multiply what the codes and scales stand for."""
    a, a_raw = mori_ops.mxfp8_quantize(cases.blocks_of_any_size(m, k, device=device))
    b, b_raw = mori_ops.mxfp8_quantize_weight(cases.blocks_of_any_size(n, k, 32, device=device))
    x, w = mori_ops.mxfp8_dequantize(a, a_raw, out_dtype=torch.float32), mori_ops.mxfp8_dequantize(b, b_raw, out_dtype=torch.float32)
    a_scale, b_scale = (a_raw, b_raw) if op == "mxfp8_raw" else (mori_ops.mxfp8_pack_a_scale(a_raw), mori_ops.mxfp8_pack_b_scale(b_raw))
    run = getattr(mori_ops, op)
    goals = []
    if op == "mxfp8_raw" and device == "cpu":
        if m <= 8:
            goals.append(Goal((INT8PACK,), 0.95 if m == 1 else 1.15))
        if m in (1, 4, 8):
            goals.append(Goal((FP32, BF16), 2.0 if m == 1 else 4.0))
        if m in (64, 256, 1024):
            goals.append(Goal((FP32,), 1.0))
    arms = [Arm(f"mori.{op}", lambda o: run(a, o, a_scale, b_scale), copies_of(b)), *_linear_arms(x, w, bf16=m <= 64)]

    def verify() -> dict[str, dict[str, float]]:
        expected = reference.scaled_gemm(a, b, a_scale, b_scale, op)
        results = {arm.name: arm.call(arm.operands[0]) for arm in arms if arm.name in (arms[0].name, BF16)}
        cases.assert_close(results[arms[0].name], expected)
        return {"misrounded": {name: (result != expected.to(result.dtype)).double().mean().item() for name, result in results.items()}}

    if op == "mxfp8_raw" and device == "cuda":
        goals.append(Goal((BF16,), 1.0, "cold"))
        if m >= 1024:
            from bench import dot_scaled  # Triton comes with torch's builds for GPUs alone

            arms.append(Arm(DOT_SCALED, lambda o: dot_scaled.mxfp8_gemm(a, o, a_scale, b_scale), copies_of(b)))
            goals.append(Goal((DOT_SCALED,), 4.0, "cold"))
    return Case(
        op,
        {"m": m, "n": n, "k": k},
        arms,
        verify,
        goals,
        bytes_moved=n * k + b_scale.nbytes + m * k + 2 * m * n,
        flops=2 * m * n * k,
        modes=("cold",) if device == "cuda" else ("hot", "cold") if m <= 64 else ("hot",),
    )


ONE_FEWER = "one token fewer"


def mxfp8_steps(device: str) -> Iterator[Callable[[], Case]]:
    """What one more token costs: no step may be a cliff."""
    shapes = [(m, "wo_b_wide") for m in range(2, 34 if device == "cpu" else 66)]
    if device == "cuda":
        shapes += [(m, name) for name in ("wo_b", "wq_b", "square") for m in (2, 9, 17, 25, 33, 65)]
    for m, name in shapes:
        yield lambda m=m, name=name: _step_case(m, *cases.LINEARS[name], device)


def _step_case(m: int, n: int, k: int, device: str) -> Case:
    a, b, a_scale, b_scale = (t.to(device) for t in cases.gemm_operands(m, n, k, seed=m))
    copies, mode = copies_of(b), "cold" if device == "cuda" else "hot"
    return Case(
        "mxfp8_steps",
        {"m": m, "n": n, "k": k},
        [
            Arm("mori.mxfp8_raw", lambda o: mori_ops.mxfp8_raw(a, o, a_scale, b_scale), copies),
            Arm(ONE_FEWER, lambda o: mori_ops.mxfp8_raw(a[:-1], o, a_scale[:-1], b_scale), copies),
        ],
        lambda: cases.assert_close(mori_ops.mxfp8_raw(a, b, a_scale, b_scale), reference.mxfp8_raw(a, b, a_scale, b_scale)),
        [Goal((ONE_FEWER,), 1 / 1.3, mode)],
        bytes_moved=n * k + b_scale.nbytes + m * k + 2 * m * n,
        flops=2 * m * n * k,
        modes=(mode,),
    )


# The shapes of the seed: small and large M on the two linears it serves, a short and a long K.
LAYOUT_SHAPES = (
    *((m, n, k) for n, k in ((5120, 2048), (8192, 1280)) for m in (64, 1024, 4096, 8192)),
    (8192, 7168, 640),
    (8192, 7168, 4096),
)
FEW_TOKENS_LAYOUT_SHAPES = tuple((16, 8192, k) for k in (256, 512, 640, 1280, 2048))  # where reading scales weighs most


def mxfp8_layouts(device: str) -> Iterator[Callable[[], Case]]:
    """Raw scales against packed ones, hot and cold."""
    for m, n, k in (*LAYOUT_SHAPES, *(FEW_TOKENS_LAYOUT_SHAPES if device == "cuda" else ())):
        yield lambda m=m, n=n, k=k: _layouts_case(m, n, k, device)


def _layouts_case(m: int, n: int, k: int, device: str) -> Case:
    a, b, a_raw, b_raw = (t.to(device) for t in cases.gemm_operands(m, n, k, seed=m))
    a_packed, b_packed = mori_ops.mxfp8_pack_a_scale(a_raw), mori_ops.mxfp8_pack_b_scale(b_raw)
    copies = copies_of(b)

    def verify() -> None:
        raw = mori_ops.mxfp8_raw(a, b, a_raw, b_raw)
        assert torch.equal(raw, mori_ops.mxfp8(a, b, a_packed, b_packed)), "packed and raw scales give different bits"
        cases.assert_close(raw[:256], reference.mxfp8_raw(a[:256], b, a_raw[:256], b_raw))

    return Case(
        "mxfp8_layouts",
        {"m": m, "n": n, "k": k},
        [
            Arm("mori.mxfp8_raw", lambda o: mori_ops.mxfp8_raw(a, o, a_raw, b_raw), copies),
            Arm("mori.mxfp8", lambda o: mori_ops.mxfp8(a, o, a_packed, b_packed), copies),
        ],
        verify,
        bytes_moved=n * k + b_raw.nbytes + m * k + 2 * m * n,
        flops=2 * m * n * k,
    )


def mxfp8_linear(device: str) -> Iterator[Callable[[], Case]]:
    shapes = [(m, "wo_b_wide") for m in {"cpu": (1, 4, 8, 64, 256), "cuda": (1, 8, 16, 64, 256, 1024, 4096, 16384)}[device]]
    if device == "cuda":
        shapes += [(m, name) for name in ("square", "wq_b", "wo_b") for m in (1, 16)]
    for m, name in shapes:
        yield lambda m=m, name=name: _linear_case(m, *cases.LINEARS[name], device)


def _linear_case(m: int, n: int, k: int, device: str) -> Case:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16().to(device)
    b, b_scale = mori_ops.mxfp8_quantize_weight(torch.randn(n, k, device=device) / k**0.5)
    a, a_scale = mori_ops.mxfp8_quantize(x)

    def two_ops(weight: Tensor) -> Tensor:
        codes, scale = mori_ops.mxfp8_quantize(x)
        return mori_ops.mxfp8_raw(codes, weight, scale, b_scale)

    return Case(
        "mxfp8_linear",
        {"m": m, "n": n, "k": k},
        [
            Arm("mori.mxfp8_linear", lambda o: mori_ops.mxfp8_linear(x, o, b_scale), copies_of(b)),
            Arm("mori quantize + raw", two_ops, copies_of(b)),
            Arm("mori raw alone", lambda o: mori_ops.mxfp8_raw(a, o, a_scale, b_scale), copies_of(b)),
            Arm(BF16, lambda o: F.linear(x, o), copies_of(torch.randn(n, k, device=device).bfloat16())),
        ],
        lambda: cases.assert_close(mori_ops.mxfp8_linear(x, b, b_scale), reference.mxfp8_linear(x, b, b_scale)),
        bytes_moved=n * k + m * k * 2 + 2 * m * n,
        flops=2 * m * n * k,
    )


def mxfp8_quantize(device: str) -> Iterator[Callable[[], Case]]:
    for rows, k in ((1, 2048), (64, 2048), (64, 7168), (16384, 2048)):
        yield lambda rows=rows, k=k: _quantize_case("mxfp8_quantize", rows, k, device)
    yield lambda: _quantize_case("mxfp8_quantize_weight", 16384, 2048, device)
    yield lambda: _quantize_case("kv_quantize", 16384 * 8, 256, device)


def _quantize_case(op: str, rows: int, k: int, device: str) -> Case:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).bfloat16().to(device)
    run, oracle = getattr(mori_ops, op), getattr(reference, op)
    target = torch.empty_like(x)

    def verify() -> None:
        for result, expected in zip(run(x), oracle(x[-1024:]), strict=True):  # blocks are independent: the last rows will do
            assert cases.same_bits(result[-len(expected) :], expected), f"{op}: differs from the reference"

    goals = [Goal(("Tensor.copy_",), 0.5)] if op == "mxfp8_quantize" and rows * k >= 1 << 25 and device == "cpu" else []
    return Case(
        op,
        {"rows": rows, "k": k, "dtype": "bfloat16"},
        [Arm(f"mori.{op}", run, [x]), Arm("Tensor.copy_", lambda o: target.copy_(o), [x])],
        verify,
        goals,
        bytes_moved=3 * x.numel(),
        modes=("hot",),
    )


def gr_down(device: str) -> Iterator[Callable[[], Case]]:
    gpu = device == "cuda"
    for ntok in (1, 2, 3, 4, 5, 6, 7, 8, 16, *((32,) if gpu else ()), 64, 256, *((512, 1024) if gpu else ())):
        yield lambda ntok=ntok: gr_case(ntok, device, fused=False)
    for ntok in (1, 4, 8, 64, 256, 1024) if gpu else (4,):
        yield lambda ntok=ntok: gr_case(ntok, device, fused=True)
    for ntok in (1, 8, 64, 256, 512, 1024) if gpu else ():
        yield lambda ntok=ntok: gr_case(ntok, device, fused=False, dtype=torch.bfloat16)


def gr_case(ntok: int, device: str, *, fused: bool, dtype: torch.dtype = torch.float32) -> Case:
    n, k = cases.GR_N, cases.GR_K
    generator = torch.Generator().manual_seed(ntok)
    x, w = torch.randn(ntok, k, generator=generator).to(device, dtype), (torch.randn(n, k, generator=generator) / k**0.5).to(device)
    norm = (torch.rand(k, generator=generator) + 0.5).to(device) if fused else None
    packed = mori_ops.q8_0_quantize(w)
    goals = []
    if device == "cuda":
        x_bf16 = x.bfloat16()
        peers = [Arm(BF16, lambda o: F.linear(x_bf16, o), copies_of(w.bfloat16())), *([_int8_arm(x, w)] if ntok in (1, 8) and not fused else [])]
        if ntok >= 64 and not fused:
            goals.append(Goal((BF16,), 1.0, "cold"))
    else:
        peers = _linear_arms(x, w, bf16=ntok <= 16)
        if not fused and (ntok <= 4 or ntok == 8):
            goals.append(Goal((INT8PACK,), 1.2 if ntok == 8 else 1.0))
        if not fused and ntok in (1, 4, 8, 64, 256):
            goals.append(Goal((FP32,), {1: 2.5, 4: 4.0, 8: 4.0}.get(ntok, 1.0)))
    return Case(
        "gr_down",
        {"ntok": ntok, "n": n, "k": k, "norm": "fused" if fused else "none"} | ({"dtype": "bfloat16"} if dtype == torch.bfloat16 else {}),
        [Arm("mori.gr_down", lambda o: mori_ops.gr_down(x, o, norm_weight=norm), copies_of(packed)), *peers],
        lambda: cases.assert_close(mori_ops.gr_down(x, packed, norm_weight=norm), reference.gr_down(x, packed, norm_weight=norm)),
        goals,
        bytes_moved=packed.nbytes + x.nbytes + 4 * ntok * n,
        flops=2 * ntok * n * k,
        modes=("hot", "cold") if device == "cpu" else ("cold", "alone") if ntok in (1, 8) else ("cold",),
    )


GATHER = "gather + einsum per token"
SDPA, CUDNN, FLEX = "SDPA causal, dequantised", "cuDNN SDPA causal, dequantised", "flex_attention causal, dequantised"
TRITON = "Triton int8 KV"


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


@functools.cache
def _causal_blocks(tokens: int, device: str) -> BlockMask:
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=device)


def qsa_flash(device: str) -> Iterator[Callable[[], Case]]:
    for tokens in (1, 4, 96) if device == "cpu" else (1, 4, 8, 96, 512, 1984):
        yield lambda tokens=tokens: qsa_case(tokens, 30000 - tokens, device)
    for tokens in (96, 512, 1984):
        yield lambda tokens=tokens: qsa_case(tokens, 0, device)


def qsa_case(tokens: int, position: int, device: str) -> Case:
    cells = position + tokens
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.randn(tokens, cases.QSA_HQ, cases.QSA_D, generator=torch.Generator().manual_seed(tokens)).to(device, dtype)
    cache = tuple(t.to(device) for t in cases.kv_cache(cells, cases.QSA_HKV, cases.QSA_D, seed=tokens))  # k, v and their scales
    ids = cases.prompt_ids(tokens, position).to(device)
    heads = (cases.QSA_HKV, cases.QSA_HQ // cases.QSA_HKV)
    copies = 1 if device == "cpu" else min(64, 1 + COLD_BYTES[device] // sum(t.nbytes for t in cache))
    caches = [tuple(t.clone() for t in cache) for _ in range(copies)]

    def ours(kv):
        return mori_ops.qsa_flash(q, kv[0], kv[1], ids, k_scale=kv[2], v_scale=kv[3])

    # One token at a time on the CPU, 64 on a GPU: S cells are copied for each.
    pieces = range(tokens) if device == "cpu" else [slice(t, t + 64) for t in range(0, tokens, 64)]

    def gather(kv):
        results = []
        for piece in pieces:
            row = ids[piece]
            picked = row.clamp(min=0).long()
            keys, values = (
                (codes[picked].to(dtype).unflatten(-1, (-1, 64)) * scale[picked].to(dtype)[..., None]).flatten(-2)
                for codes, scale in (kv[::2], kv[1::2])
            )
            scores = torch.einsum("...hgd,...shd->...hgs", q[piece].unflatten(-2, heads), keys) * cases.QSA_D**-0.5
            p = scores.masked_fill((row < 0)[..., None, None, :], -torch.inf).softmax(-1)
            results.append(torch.einsum("...hgs,...shd->...hgd", p, values).reshape(-1, cases.QSA_HQ, cases.QSA_D))
        return torch.cat(results)

    def sdpa(dense):
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], *dense, is_causal=True, enable_gqa=True)

    def cudnn(dense):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(dense)

    def flex(dense):
        return _compiled_flex()(q.transpose(0, 1)[None], *dense, block_mask=_causal_blocks(tokens, device), enable_gqa=True)

    def triton(kv):
        from bench import qsa_triton  # triton comes with torch for CUDA only

        return qsa_triton.qsa_flash(q, kv[0], kv[1], ids, k_scale=kv[2], v_scale=kv[3])

    arms = [Arm("mori.qsa_flash", ours, caches)]
    goals = []
    if position == 0:
        dense = tuple(reference.kv_dequantize(c, s).to(dtype).transpose(0, 1)[None] for c, s in (cache[::2], cache[1::2]))
        peers = {SDPA: sdpa} if device == "cpu" else {SDPA: sdpa, CUDNN: cudnn} | ({FLEX: flex} if tokens >= 512 else {})
        dense_caches = [tuple(t.clone() for t in dense) for _ in caches]
        arms += [Arm(name, call, dense_caches) for name, call in peers.items()]
        if device == "cuda":
            goals = [Goal(tuple(peers), 1.0, "cold")]
        elif tokens == 1984:
            goals = [Goal((SDPA,), 1.2)]
    elif device == "cuda" and tokens >= 96:
        arms.append(Arm(TRITON, triton, caches))
        goals = [Goal((TRITON,), 2.4, "cold")] if tokens == 1984 else []
    elif tokens <= 96:
        arms.append(Arm(GATHER, gather, caches))
        goals = [Goal((GATHER,), 4.0)] if tokens == 96 and device == "cpu" else []

    def verify() -> None:
        some = torch.randperm(tokens)[:32].to(device)  # the float64 reference gathers S cells per token: not for all of a long prompt
        wanted = reference.qsa_flash(q[some], cache[0], cache[1], ids[some], k_scale=cache[2], v_scale=cache[3])
        cases.assert_close(ours(cache)[some], wanted, 4e-6 if device == "cpu" else None)

    return Case(
        "qsa_flash",
        {"t": tokens, "s": ids.shape[1], "cells": cells, "pos": position},
        arms,
        verify,
        goals,
        flops=4 * int((ids >= 0).sum()) * cases.QSA_HQ * cases.QSA_D,
        modes=("hot",) if device == "cpu" else ("cold",),
    )


SUITES: dict[str, Callable[[str], Iterator[Callable[[], Case]]]] = {
    "mxfp8": lambda device: mxfp8_gemm("mxfp8", device),
    "mxfp8_raw": lambda device: mxfp8_gemm("mxfp8_raw", device),
    "mxfp8_layouts": mxfp8_layouts,
    "mxfp8_steps": mxfp8_steps,
    "mxfp8_linear": mxfp8_linear,
    "quantize": mxfp8_quantize,
    "gr_down": gr_down,
    "qsa_flash": qsa_flash,
}
CPU_SUITES = tuple(name for name in SUITES if name != "mxfp8_layouts")  # one kernel serves both layouts there
