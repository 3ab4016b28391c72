"""Attention over selected cells: float64 per token, exact neutrality of what is not selected, and bits that never move."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mori_ops
from mori_ops import reference
from tests import cases
from tests.cases import assert_close, same_bits

ops = torch.ops.mori
KV_DTYPES = (torch.int8, torch.float16, torch.bfloat16)


@pytest.fixture(params=["native", "generic"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The processor's own instruction set, and the portable kernels."""
    if request.param == "generic":
        monkeypatch.setenv("MORI_CPU_ISA", "generic")
    return request.param


def cache(cells: int, heads: int, dim: int, dtype: torch.dtype = torch.int8, *, seed: int = 0) -> dict[str, Tensor]:
    """k, v (and for int8 their scales), as keyword arguments."""
    if dtype == torch.int8:
        return dict(zip(("k", "v", "k_scale", "v_scale"), cases.kv_cache(cells, heads, dim, seed=seed), strict=True))
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(cells, heads, dim, generator=generator).to(dtype) for name in ("k", "v")}


def queries(tokens: int, heads: int, dim: int, dtype: torch.dtype = torch.float32, *, seed: int = 1) -> Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(q: Tensor, ids: Tensor, *, gate: Tensor | None = None, sm_scale: float | None = None, **kv: Tensor) -> Tensor:
    """The float64 reference, a few tokens at a time."""
    part = lambda t, i: None if t is None else t[i : i + 8]  # noqa: E731
    rows = [
        reference.qsa_flash(q[i : i + 8], ids=ids[i : i + 8], gate=part(gate, i), sm_scale=sm_scale, **kv)
        for i in range(0, q.shape[0], 8)
    ]
    return torch.cat(rows)


def flash(q: Tensor, ids: Tensor, **kw: object) -> Tensor:
    return ops.qsa_flash(q, kw.pop("k"), kw.pop("v"), ids, **kw)


def split(q: Tensor, ids: Tensor, *, gate: Tensor | None = None, splits: int = 4, out_dtype: torch.dtype | None = None, **kw: object) -> Tensor:
    partial, lse = ops.qsa_attn(q, kw.pop("k"), kw.pop("v"), ids, splits=splits, **kw)
    return ops.qsa_merge(partial, lse, gate=gate, out_dtype=out_dtype)


# ---- against float64 ----


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 257])
@pytest.mark.parametrize("slots", [1, 63, 64, 65])
def test_q5_any_token_and_slot_count(isa: str, tokens: int, slots: int, kv_dtype: torch.dtype) -> None:
    q, kv, ids = queries(tokens, 3, 64), cache(130, 1, 64, kv_dtype), cases.selected_ids(tokens, slots, 130)
    gate = queries(tokens, 3, 64, seed=2)
    assert_close(flash(q, ids, gate=gate, **kv), expected(q, ids, gate=gate, **kv))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("hq, hkv, dim", [(24, 2, 256), (12, 1, 128), (14, 2, 64), (3, 3, 64), (8, 1, 256), (25, 1, 128)])
def test_head_groups_and_dims(isa: str, hq: int, hkv: int, dim: int, kv_dtype: torch.dtype) -> None:
    q, kv, ids = queries(5, hq, dim), cache(700, hkv, dim, kv_dtype), cases.selected_ids(5, 300, 700)
    result = flash(q, ids, **kv)
    assert_close(result, expected(q, ids, **kv))
    assert_close(split(q, ids, splits=3, **kv), expected(q, ids, **kv))


@pytest.mark.parametrize(
    "tokens, position",
    [(96, 0), (96, 1984), (96, 2050), (1, 0), (64, 1987), (200, 1900), (1, 2050), (1, 2051), (3, 2049), (33, 30000)],
)
def test_prompts_of_the_seed(tokens: int, position: int) -> None:
    kv, q, ids = cache(position + tokens, 1, 64), queries(tokens, 3, 64), cases.prompt_ids(tokens, position)
    assert_close(flash(q, ids, **kv), expected(q, ids, **kv))


def test_model_shape_with_its_full_budget() -> None:
    kv, q, ids = cache(4000, cases.QSA_HKV, cases.QSA_D), queries(3, cases.QSA_HQ, cases.QSA_D), cases.selected_ids(3, cases.QSA_S, 4000)
    gate = queries(3, cases.QSA_HQ, cases.QSA_D, torch.bfloat16, seed=2)
    assert_close(flash(q, ids, gate=gate, **kv), expected(q, ids, gate=gate, **kv))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("gate_dtype", cases.DTYPES)
def test_dtypes_of_query_gate_and_output(isa: str, dtype: torch.dtype, gate_dtype: torch.dtype) -> None:
    q, kv, ids, gate = queries(9, 4, 64, dtype), cache(90, 2, 64), cases.selected_ids(9, 40, 90), queries(9, 4, 64, gate_dtype, seed=2)
    want = expected(q, ids, gate=gate, **kv)
    assert flash(q, ids, **kv).dtype == dtype
    for out_dtype in cases.DTYPES:
        result = flash(q, ids, gate=gate, out_dtype=out_dtype, **kv)
        assert result.dtype == out_dtype
        assert_close(result, want)
        assert_close(split(q, ids, gate=gate, out_dtype=out_dtype, **kv), want)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [3, 50])
def test_both_id_dtypes_give_the_same_bits(id_dtype: torch.dtype, tokens: int) -> None:
    q, kv, ids = queries(tokens, 4, 64), cache(90, 2, 64), cases.selected_ids(tokens, 40, 90)
    assert same_bits(flash(q, ids.to(id_dtype), **kv), flash(q, ids, **kv))


@pytest.mark.parametrize("sm_scale", [0.0, 1e-3, 0.5, -0.3])
def test_any_softmax_scale(isa: str, sm_scale: float) -> None:
    q, kv, ids = queries(9, 4, 64), cache(90, 2, 64), cases.selected_ids(9, 40, 90)
    assert_close(flash(q, ids, sm_scale=sm_scale, **kv), expected(q, ids, sm_scale=sm_scale, **kv))


@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e-3, 1e30, 3e38])
def test_query_of_any_magnitude(isa: str, magnitude: float) -> None:
    q = queries(9, 4, 64).clamp(-1, 1) * magnitude
    kv, ids = cache(90, 2, 64), cases.selected_ids(9, 40, 90)
    for sm_scale in (None, 1 / magnitude if magnitude > 1e-38 else 1e38):
        assert_close(flash(q, ids, sm_scale=sm_scale, **kv), expected(q, ids, sm_scale=sm_scale, **kv), 2e-6)


def test_large_logits_pick_the_largest_cell(isa: str) -> None:
    q, kv, ids = queries(9, 4, 64) * 1e4, cache(90, 2, 64), cases.selected_ids(9, 40, 90)
    assert_close(flash(q, ids, **kv), expected(q, ids, **kv), 1e-5)


def test_fp16_scales_of_any_size_subnormals_included(isa: str) -> None:
    q, kv, ids = queries(9, 4, 64), cache(90, 2, 64), cases.selected_ids(9, 40, 90)
    kv["v_scale"] = (torch.randint(1, 1024, kv["v_scale"].shape) * 2.0**-24).half()
    kv["k_scale"][:45] *= 2.0**-14
    want = expected(q, ids, **kv)
    assert_close(flash(q, ids, **kv), want)
    torch.set_flush_denormal(True)
    try:
        assert_close(flash(q, ids, **kv), want)
    finally:
        torch.set_flush_denormal(False)


# ---- what is selected, and nothing else ----


def poison(kv: dict[str, Tensor], cells: Tensor) -> dict[str, Tensor]:
    """Copies of the cache with NaN (for int8: NaN and infinite scales) in `cells`."""
    kv = {name: t.clone() for name, t in kv.items()}
    for name in ("k_scale", "v_scale") if "k_scale" in kv else ("k", "v"):
        kv[name][cells] = math.nan
        kv[name][cells[::3]] = math.inf
    return kv


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("tokens", [1, 40])
def test_unselected_cells_never_reach_the_output(isa: str, tokens: int, kv_dtype: torch.dtype) -> None:
    q, kv, ids = queries(tokens, 6, 64), cache(300, 2, 64, kv_dtype), cases.selected_ids(tokens, 70, 150) * 2
    ids[ids < 0] = -1
    assert same_bits(flash(q, ids, **poison(kv, torch.arange(1, 300, 2))), flash(q, ids, **kv))


@pytest.mark.parametrize("hq", [1, 5, 12])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_later_token_of_a_prompt_does_not_leak_into_an_earlier_one(isa: str, hq: int, kv_dtype: torch.dtype) -> None:
    tokens = 150
    q, kv, ids = queries(tokens, hq, 64), cache(tokens, 1, 64, kv_dtype), cases.prompt_ids(tokens, 0)
    for bad in (1, 17, 131):
        result = flash(q, ids, **poison(kv, torch.arange(bad, tokens)))
        assert same_bits(result[:bad], flash(q, ids, **kv)[:bad])
        assert result[bad:].isnan().any(-1).all()


@pytest.mark.cpu
@pytest.mark.parametrize("tokens", [5, 60])
def test_empty_slots_are_exactly_neutral_wherever_they_stand(isa: str, tokens: int) -> None:
    q, kv, packed = queries(tokens, 6, 64), cache(400, 2, 64), cases.selected_ids(tokens, 150, 400, empty=0.0)
    spread = torch.full((tokens, 301), -1, dtype=torch.int32)
    for t in range(tokens):
        spread[t, torch.randperm(301)[:150].sort().values] = packed[t]
    spread[spread < 0] = torch.where(torch.rand(int((spread < 0).sum())) < 0.5, -1, -(2**31)).to(torch.int32)
    assert same_bits(flash(q, spread, **kv), flash(q, packed, **kv))


@pytest.mark.parametrize("gate_value", [None, 3.0, math.nan])
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_q2_a_row_without_a_cell_is_exactly_zero(isa: str, tokens: int, gate_value: float | None) -> None:
    q, kv, ids = queries(tokens, 4, 64), cache(90, 2, 64), cases.selected_ids(tokens, 40, 90)
    gate = torch.zeros(tokens, 4, 64)
    full = flash(q, ids, gate=gate, **kv)
    for rows in ([tokens // 2], list(range(tokens))):
        holes, poisoned = ids.clone(), gate.clone()
        holes[rows] = -1
        if gate_value is not None:
            poisoned[rows] = gate_value
        out = torch.full_like(full, math.nan)
        ops.qsa_flash.out(q, kv["k"], kv["v"], holes, k_scale=kv["k_scale"], v_scale=kv["v_scale"], gate=poisoned, out=out)
        merged = split(q, holes, gate=poisoned, **kv)
        kept = [t for t in range(tokens) if t not in rows]
        assert same_bits(out[rows], torch.zeros(len(rows), 4, 64)) and same_bits(merged[rows], torch.zeros(len(rows), 4, 64))
        assert same_bits(out[kept], full[kept])


def test_q4_a_duplicate_counts_as_often_as_it_stands(isa: str) -> None:
    kv = cache(10, 1, 64, torch.float16)
    result = flash(torch.zeros(1, 2, 64), torch.tensor([[5, 5, 9]]), **kv)
    want = (2 * kv["v"][5].double() + kv["v"][9].double()) / 3
    assert_close(result[0], want.expand(2, 64))
    everyone = flash(queries(256, 2, 64), torch.zeros(256, 7, dtype=torch.int64), **kv)
    assert_close(everyone, kv["v"][0].double().expand(256, 2, 64))


@pytest.mark.parametrize("tokens", [1, 20])
def test_q6_twelve_query_heads_read_their_kv_head(isa: str, tokens: int) -> None:
    v = torch.empty(50, 2, 256, dtype=torch.float16)
    v[:, 0], v[:, 1] = 1.0, 2.0
    v[:, :, 128:] += 10
    k = torch.randn(50, 2, 256).half()
    result = flash(queries(tokens, 24, 256), cases.selected_ids(tokens, 20, 50), k=k, v=v, gate=torch.full((tokens, 24, 256), 40.0))
    want = torch.cat([torch.full((12, 256), 1.0), torch.full((12, 256), 2.0)])
    want[:, 128:] += 10
    assert_close(result, want.double().expand(tokens, 24, 256))


# ---- memory layouts ----


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("tokens", [3, 40])
def test_s7_strided_inputs_give_the_bits_of_contiguous_ones(isa: str, tokens: int, kv_dtype: torch.dtype) -> None:
    heads, dim = 6, 64
    kv, ids = cache(90, 2, dim, kv_dtype), cases.selected_ids(tokens, 40, 90)
    q, gate = queries(tokens, heads, dim), queries(tokens, heads, dim, seed=2)
    want = flash(q, ids, gate=gate, **kv)
    both = torch.stack([q, gate], 2).flatten(2)  # q | gate, interleaved per head
    assert same_bits(flash(both[..., :dim], ids, gate=both[..., dim:], **kv), want)
    transposed = {name: t.transpose(0, 1).contiguous().transpose(0, 1) for name, t in kv.items()}
    assert same_bits(flash(q, ids, gate=gate, **transposed), want)
    last = {name: t.transpose(0, 2).contiguous().transpose(0, 2) for name, t in kv.items()}
    assert same_bits(flash(q, ids, gate=gate, **last), want)
    every_other = {name: torch.stack([t, torch.full_like(t, 1)], 1).flatten(0, 1)[::2] for name, t in kv.items()}
    assert same_bits(flash(q, torch.stack([ids, ids], 2)[..., 1], gate=gate, **every_other), want)
    padded = torch.randn(tokens, heads, dim + 1)
    padded[..., 1:] = q
    assert same_bits(flash(padded[..., 1:], ids.t().contiguous().t(), gate=gate.transpose(1, 2).contiguous().transpose(1, 2), **kv), want)
    assert same_bits(split(padded[..., 1:], ids, gate=both[..., dim:], **every_other), split(q, ids, gate=gate, **kv))


def test_s9_expanded_inputs_give_the_bits_of_contiguous_ones(isa: str) -> None:
    kv = cache(90, 2, 64)
    q, gate, ids = queries(1, 1, 64).expand(20, 6, 64), queries(1, 1, 64, seed=2).expand(20, 6, 64), cases.selected_ids(1, 40, 90).expand(20, 40)
    kv["k_scale"] = torch.tensor(0.01).half().expand(90, 2, 1)
    dense = {name: t.contiguous() for name, t in kv.items()}
    assert same_bits(flash(q, ids, gate=gate, **kv), flash(q.contiguous(), ids.contiguous(), gate=gate.contiguous(), **dense))


def test_q8_offsets_beyond_2_gib_in_a_large_pool() -> None:
    cells, count = 4_194_304 + 128, 128
    small = cache(count, 2, 256)
    large = {name: torch.empty(cells, *t.shape[1:], dtype=t.dtype) for name, t in small.items()}
    for name, t in small.items():
        large[name][-count:] = t
    for tokens in (1, 20):
        q, ids = queries(tokens, 24, 256), cases.selected_ids(tokens, 100, count)
        ids[0, :2] = torch.tensor([count - 1, count - 2])
        moved = torch.where(ids >= 0, ids + cells - count, ids)
        assert same_bits(flash(q, moved, **large), flash(q, ids, **small))


def test_q8_pool_with_a_huge_token_stride() -> None:
    blocks, stride = 2066, 1_039_680
    small, q, ids = cache(blocks, 2, 256), queries(20, 24, 256), cases.selected_ids(20, 100, blocks)
    pool = torch.empty(blocks * stride, dtype=torch.int8)  # only the pages that are written exist
    strided = dict(small)
    for name, offset in (("k", 0), ("v", 512)):
        strided[name] = pool[offset:].as_strided((blocks, 2, 256), (stride, 256, 1), offset)
        strided[name].copy_(small[name])
    assert same_bits(flash(q, ids, **strided), flash(q, ids, **small))
    assert same_bits(split(q, ids, **strided), split(q, ids, **small))


# ---- the split form ----


@pytest.mark.parametrize("splits", [1, 2, 5, 100])
@pytest.mark.parametrize("tokens", [2, 30])
def test_split_form_agrees_with_flash_and_float64(isa: str, splits: int, tokens: int) -> None:
    q, kv, ids = queries(tokens, 6, 64), cache(400, 2, 64), cases.selected_ids(tokens, 70, 400, empty=0.5)
    ids[0, :40] = -1
    gate = queries(tokens, 6, 64, seed=2)
    partial, lse = ops.qsa_attn(q, kv["k"], kv["v"], ids, k_scale=kv["k_scale"], v_scale=kv["v_scale"], splits=splits)
    want_partial, want_lse = reference.qsa_attn(q, ids=ids, splits=splits, **kv)
    assert_close(partial, want_partial)
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    finite = lse != -math.inf
    assert_close(lse[finite], want_lse[finite])
    assert same_bits(partial[~finite], torch.zeros_like(partial[~finite]))
    merged = ops.qsa_merge(partial, lse, gate=gate)
    assert_close(merged, flash(q, ids, gate=gate, **kv).double(), 1e-6)


def test_merge_of_any_head_dim_and_strides(isa: str) -> None:
    partial, lse, gate = torch.randn(3, 7, 5, 21), torch.randn(3, 7, 5) * 20, torch.randn(7, 5, 21)
    lse[1, 2], lse[:, 4] = -math.inf, -math.inf
    partial[1, 2], partial[:, 4] = 0, 0
    want = reference.qsa_merge(partial, lse, gate=gate)
    assert_close(ops.qsa_merge(partial, lse, gate=gate), want)
    strided = partial.transpose(0, 3).contiguous().transpose(0, 3)
    assert same_bits(ops.qsa_merge(strided, lse.transpose(0, 2).contiguous().transpose(0, 2), gate=gate), ops.qsa_merge(partial, lse, gate=gate))


# ---- bits ----


def test_bits_do_not_depend_on_run_thread_count_or_call(isa: str) -> None:
    q, kv, ids = queries(40, 12, 128), cache(700, 2, 128), cases.selected_ids(40, 300, 700)
    ids[20:32] = cases.prompt_ids(300, 0)[-12:]  # a stretch whose tokens share a prefix
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            results.append((flash(q, ids, **kv), split(q, ids, **kv)))
    finally:
        torch.set_num_threads(threads)
    for flashed, merged in results[1:]:
        assert same_bits(flashed, results[0][0]) and same_bits(merged, results[0][1])
    for begin, end in ((0, 1), (7, 9), (25, 26), (22, 40), (39, 40)):  # also through the route for few tokens
        assert same_bits(flash(q[begin:end], ids[begin:end], **kv), results[0][0][begin:end])


def test_routes_are_readable() -> None:
    dims = dict(s=2051, cells=30000, hq=24, hkv=2, d=256, device="cpu")
    assert mori_ops.route("qsa_flash", t=1, **dims).kernel == "chunks"
    assert mori_ops.route("qsa_flash", t=96, **dims).kernel == "tokens"


# ---- edges, .out and refusals ----


@pytest.mark.parametrize("tokens, slots, cells", [(0, 5, 9), (4, 0, 9), (4, 5, 0), (0, 0, 0), (100, 0, 0)])
def test_s3_empty_calls_give_empty_or_zero_results(tokens: int, slots: int, cells: int) -> None:
    q, kv, ids = queries(tokens, 4, 64), cache(cells, 2, 64), torch.full((tokens, slots), -1)
    assert same_bits(flash(q, ids, **kv), torch.zeros(tokens, 4, 64))
    assert same_bits(split(q, ids, **kv), torch.zeros(tokens, 4, 64))
    test_q4_a_duplicate_counts_as_often_as_it_stands("native")


def test_out_overloads_write_every_element(isa: str) -> None:
    q, kv, ids, gate = queries(9, 4, 64), cache(90, 2, 64), cases.selected_ids(9, 40, 90), queries(9, 4, 64, seed=2)
    scales = dict(k_scale=kv["k_scale"], v_scale=kv["v_scale"])
    for dtype in cases.DTYPES:
        out = torch.full((9, 4, 64), math.nan, dtype=dtype)
        ops.qsa_flash.out(q, kv["k"], kv["v"], ids, gate=gate, out=out, **scales)
        assert same_bits(out, flash(q, ids, gate=gate, out_dtype=dtype, **kv))
    partial, lse = torch.full((3, 9, 4, 64), math.nan), torch.full((3, 9, 4), math.nan)
    ops.qsa_attn.out(q, kv["k"], kv["v"], ids, partial=partial, lse=lse, **scales)
    want = ops.qsa_attn(q, kv["k"], kv["v"], ids, splits=3, **scales)
    assert same_bits(partial, want[0]) and same_bits(lse, want[1])
    merged = torch.full((9, 4, 64), math.nan)
    ops.qsa_merge.out(partial, lse, gate=gate, out=merged)
    assert same_bits(merged, ops.qsa_merge(partial, lse, gate=gate))


@pytest.mark.cpu
@pytest.mark.parametrize("bad", [90, 2**30])
@pytest.mark.parametrize("place", [(0, 0), (8, 39), (4, 17)])
def test_q8_an_id_beyond_the_cells_raises_and_writes_nothing(place: tuple[int, int], bad: int) -> None:
    q, kv, ids = queries(9, 4, 64), cache(90, 2, 64), cases.selected_ids(9, 40, 90)
    ids[place] = bad
    scales = dict(k_scale=kv["k_scale"], v_scale=kv["v_scale"])
    out, partial, lse = torch.full((9, 4, 64), 7.0), torch.full((3, 9, 4, 64), 7.0), torch.full((3, 9, 4), 7.0)
    with pytest.raises(IndexError, match=rf"qsa_flash: ids\[{place[0]}, {place[1]}\] is {bad}, but k holds 90 cells"):
        ops.qsa_flash.out(q, kv["k"], kv["v"], ids, out=out, **scales)
    with pytest.raises(IndexError, match=rf"qsa_attn: ids\[{place[0]}, {place[1]}\] is {bad}"):
        ops.qsa_attn.out(q, kv["k"], kv["v"], ids, partial=partial, lse=lse, **scales)
    assert all((t == 7).all() for t in (out, partial, lse))


REFUSED = {
    "heads": (dict(q=torch.zeros(3, 25, 64)), "Hq of q must be a multiple of Hkv of k, got Hq 25 and Hkv 2"),
    "dim": (dict(q=torch.zeros(3, 4, 96)), "D, the last dimension of q, must be 64, 128 or 256"),
    "k dim": (dict(k=torch.zeros(90, 2, 128, dtype=torch.int8)), "k must have the D of q, 64"),
    "v dtype": (dict(v=torch.zeros(90, 2, 64, dtype=torch.float16)), "v must be int8, got float16"),
    "v shape": (dict(v=torch.zeros(91, 2, 64, dtype=torch.int8)), "v must have shape"),
    "ids rows": (dict(ids=torch.zeros(4, 5, dtype=torch.int64)), r"ids must be \[T, S\] with T = 3"),
    "ids dtype": (dict(ids=torch.zeros(3, 5)), "ids must be int32 or int64, got float32"),
    "no scale": (dict(k_scale=None), "k_scale is required when k and v are int8"),
    "scale dtype": (dict(v_scale=torch.zeros(90, 2, 1)), "v_scale must be float16, got float32"),
    "scale shape": (dict(v_scale=torch.zeros(90, 2, 2).half()), "v_scale must have shape"),
    "gate shape": (dict(gate=torch.zeros(3, 4, 32)), "gate must have shape"),
    "sm_scale": (dict(sm_scale=math.inf), "sm_scale must be finite, got inf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_arguments_are_named_and_nothing_is_written(name: str) -> None:
    changed, message = REFUSED[name]
    arguments = dict(q=torch.zeros(3, 4, 64), ids=torch.zeros(3, 5, dtype=torch.int64), **cache(90, 2, 64)) | changed
    out = torch.full(arguments["q"].shape, 7.0)
    with pytest.raises(ValueError, match=f"qsa_flash: {message}"):
        ops.qsa_flash.out(**arguments, out=out)
    assert (out == 7).all()


def test_refused_outputs_and_split_counts() -> None:
    q, kv, ids = queries(3, 4, 64), cache(90, 2, 64), cases.selected_ids(3, 5, 90)
    scales = dict(k_scale=kv["k_scale"], v_scale=kv["v_scale"])
    with pytest.raises(ValueError, match="qsa_flash: out must not share memory with an input"):
        ops.qsa_flash.out(q, kv["k"], kv["v"], ids, out=q, **scales)
    with pytest.raises(ValueError, match="qsa_flash: out must have shape"):
        ops.qsa_flash.out(q, kv["k"], kv["v"], ids, out=torch.zeros(3, 4, 65), **scales)
    with pytest.raises(ValueError, match="qsa_flash: out_dtype must be bfloat16, float16 or float32, got float64"):
        ops.qsa_flash(q, kv["k"], kv["v"], ids, out_dtype=torch.float64, **scales)
    with pytest.raises(ValueError, match="qsa_attn: splits must be at least 1, got 0"):
        ops.qsa_attn(q, kv["k"], kv["v"], ids, splits=0, **scales)
    with pytest.raises(ValueError, match="qsa_merge: lse must have shape"):
        ops.qsa_merge(torch.zeros(2, 3, 4, 64), torch.zeros(2, 3, 5))


# ---- kv_quantize ----


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", [(64,), (3, 128), (5, 2, 256), (0, 2, 64), (2, 3, 5, 192)])
def test_kv_quantize_gives_the_bits_of_the_formula(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(*shape) * torch.exp2(torch.randint(-30, 12, (*shape[:-1], 1)).float())).to(dtype)
    codes, scale = ops.kv_quantize(x)
    want_codes, want_scale = reference.kv_quantize(x)
    assert same_bits(codes, want_codes) and same_bits(scale, want_scale)
    if x.numel() > 64:
        strided = x.transpose(0, -1).contiguous().transpose(0, -1)
        assert all(same_bits(a, b) for a, b in zip(ops.kv_quantize(strided), (codes, scale), strict=True))
    out_codes, out_scale = torch.full_like(codes, 99), torch.full_like(scale, math.nan)
    ops.kv_quantize.out(x, codes=out_codes, scale=out_scale)
    assert same_bits(out_codes, codes) and same_bits(out_scale, scale)


def test_kv_quantize_edges(isa: str) -> None:
    x = torch.zeros(6, 64)
    x[1, 3], x[2, 5], x[3, 7], x[4, 9] = 1e-7, math.nan, math.inf, 1e9
    x[5] = torch.linspace(-127, 127, 64)
    codes, scale = ops.kv_quantize(x)
    assert (codes[:5] == 0).all() and (scale[:2] == 0).all()  # a zero group, and one whose scale rounds to 0
    assert scale[2].isnan() and scale[3:5].isinf().all()
    assert scale[5] == 1 and codes[5].min() == -127 and codes[5].max() == 127


def test_s2_kv_quantize_of_more_than_65535_rows() -> None:
    for rows in (65_535, 65_536, 131_073):
        x = torch.randn(rows, 128)
        codes, scale = ops.kv_quantize(x)
        want_codes, want_scale = reference.kv_quantize(x[-3:])
        assert same_bits(codes[-3:], want_codes) and same_bits(scale[-3:], want_scale)


def test_kv_quantize_refuses_a_ragged_last_dimension() -> None:
    codes, scale = torch.full((2, 65), 7, dtype=torch.int8), torch.full((2, 1), 7.0).half()
    with pytest.raises(ValueError, match=r"kv_quantize: x must be \[.., D\] with D a multiple of 64, got float32 \[2, 65\]"):
        ops.kv_quantize.out(torch.zeros(2, 65), codes=codes, scale=scale)
    assert (codes == 7).all() and (scale == 7).all()
