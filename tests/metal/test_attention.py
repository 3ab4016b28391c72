"""qsa_flash and its split form on Metal: the shapes of the public report, equal bits of all forms and layouts, and its edges.

Tokens are independent of each other, so that a prompt of 1984 tokens is shown by a few of them over its 30,000 cells.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

import mori_ops
from mori_ops import mps, reference
from tests import cases
from tests.cases import assert_close, same_bits
from tests.metal import emulator
from tests.metal.device import DEVICE, emulated_only, gpu, metal_operators, needs_metal, settings  # noqa: F401

pytestmark = needs_metal
KV_DTYPES = (torch.int8, torch.float16, torch.bfloat16)
TOLERANCE = {torch.int8: 6e-4, torch.float16: 4e-4, torch.bfloat16: 4e-3}  # of the products' operands, fp32 out
HQ, HKV, D = cases.QSA_HQ, cases.QSA_HKV, cases.QSA_D
PROMPTS = (
    *((tokens, position) for position in (0, 30000) for tokens in (96, 512, 1024, 1984)),
    (96, 1984), (96, 2050), (1, 0), (64, 1987), (200, 1900), (1, 2050), (1, 2051), (3, 2049), (33, 30000),
)  # fmt: skip


def cache(cells: int, heads: int, dim: int, dtype: torch.dtype = torch.int8, *, seed: int = 0) -> dict[str, Tensor]:
    if dtype == torch.int8:
        return dict(zip(("k", "v", "k_scale", "v_scale"), cases.kv_cache(cells, heads, dim, seed=seed), strict=True))
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(cells, heads, dim, generator=generator).to(dtype) for name in ("k", "v")}


def queries(tokens: int, heads: int, dim: int, dtype: torch.dtype = torch.float16, *, seed: int = 1) -> Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.to(DEVICE) for name, t in tensors.items()}


def flash(q: Tensor, ids: Tensor, *, out_dtype: torch.dtype = torch.float32, gate: Tensor | None = None, **kv: Tensor) -> Tensor:
    """The public operator, from and to the host."""
    gate = None if gate is None else gate.to(DEVICE)
    return mori_ops.qsa_flash(q.to(DEVICE), ids=ids.to(DEVICE), gate=gate, out_dtype=out_dtype, **moved(kv)).cpu()


def split(q: Tensor, ids: Tensor, *, splits: int = 3, gate: Tensor | None = None, **kv: Tensor) -> Tensor:
    partial, lse = mori_ops.qsa_attn(q.to(DEVICE), ids=ids.to(DEVICE), splits=splits, **moved(kv))
    return mori_ops.qsa_merge(partial, lse, gate=None if gate is None else gate.to(DEVICE)).cpu()


def run(q: Tensor, ids: Tensor, kernel: str, *, hoisted: bool = True, gate: Tensor | None = None, **kv: Tensor) -> Tensor:
    """The launch below the operator, with the form to be chosen."""
    out = torch.full(q.shape, math.nan, dtype=torch.float16, device=DEVICE)
    on = {name: None if t is None else t.to(DEVICE) for name, t in {"q": q, "ids": ids, "gate": gate, "k_scale": None, "v_scale": None, **kv}.items()}
    mps.attend(**on, sm_scale=None, out=out, lse=None, splits=1, kernel=kernel, hoisted=hoisted)
    return out.cpu()


def kernel_of(gpu: str) -> str:  # noqa: F811
    if gpu == "M5" and not mps.tensor_units():
        pytest.skip("no tensor units here")
    return "tensor" if gpu == "M5" else "simdgroup"


@functools.cache
def prompt(tokens: int, position: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], Tensor]:
    """Some tokens of a prompt of the model's shape, its last one included: q, ids, gate, cache, and the reference's result."""
    ids = cases.prompt_ids(tokens, position)
    some = sorted({tokens // 3, tokens - 1})
    q, gate, kv = queries(len(some), HQ, D), queries(len(some), HQ, D, torch.float32, seed=2), cache(tokens + position, HKV, D)
    return q, ids[some], gate, kv, reference.qsa_flash(q, ids=ids[some], gate=gate, **kv)


@pytest.mark.parametrize("tokens, position", PROMPTS)
def test_prompts_of_the_report_in_both_forms(gpu: str, tokens: int, position: int) -> None:  # noqa: F811
    q, ids, gate, kv, want = prompt(tokens, position)
    hoisted = flash(q, ids, gate=gate, out_dtype=torch.float16, **kv)
    assert same_bits(hoisted, run(q, ids, kernel_of(gpu), gate=gate, hoisted=False, **kv))
    assert_close(hoisted, want, TOLERANCE[torch.int8])


@emulated_only
@pytest.mark.parametrize("tokens, position", [(512, 0), (1984, 30000)])
def test_a_layout_that_cannot_be_hoisted_gives_the_same_bits(tokens: int, position: int) -> None:
    q, ids, gate, kv, _ = prompt(tokens, position)
    hoisted = run(q[:1], ids[-1:], "tensor", gate=gate[:1], **kv)
    with settings(cooperative_layout="runs"):
        assert same_bits(hoisted, run(q[:1], ids[-1:], "tensor", gate=gate[:1], **kv))


LAYOUTS_AND_ORDERS = (
    *({"cooperative_layout": name} for name in emulator.COOPERATIVE_LAYOUTS),
    *({"matrix_layout": name} for name in emulator.MATRIX_LAYOUTS),
    {"order": "reverse"}, *({"order": "shuffled", "seed": seed} for seed in (1, 2)), {"poison": 0x3C},
)  # fmt: skip


@emulated_only
@pytest.mark.parametrize("hoisted", [True, False])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("hq, hkv, dim", [(24, 2, 256), (3, 1, 64), (9, 1, 128)])
def test_bits_depend_on_no_layout_and_no_order_of_lanes(gpu: str, hq: int, hkv: int, dim: int, kv_dtype: torch.dtype, hoisted: bool) -> None:  # noqa: F811
    q, kv, ids = queries(2, hq, dim), cache(90, hkv, dim, kv_dtype), cases.selected_ids(2, 140, 90)
    first = run(q, ids, kernel_of(gpu), hoisted=hoisted, **kv)
    for changes in LAYOUTS_AND_ORDERS:
        with settings(**changes):
            assert same_bits(run(q, ids, kernel_of(gpu), hoisted=hoisted, **kv), first), changes


@emulated_only
def test_orders_of_summation_stay_within_the_tolerance(gpu: str) -> None:  # noqa: F811
    q, kv, ids = queries(3, HQ, D), cache(400, HKV, D), cases.selected_ids(3, 300, 400)
    want = reference.qsa_flash(q, ids=ids, **kv)
    for changes in (*({"simd_sum": name} for name in emulator.SIMD_SUMS), *({"product_order": name} for name in emulator.PRODUCT_ORDERS)):
        with settings(**changes):
            assert_close(flash(q, ids, **kv), want, TOLERANCE[torch.int8])


@emulated_only
@pytest.mark.parametrize("hoisted", [True, False])
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.bfloat16], ids=str)
def test_the_checker_passes_the_model_shape(gpu: str, kv_dtype: torch.dtype, hoisted: bool) -> None:  # noqa: F811
    q, kv, ids, gate = queries(1, HQ, D), cache(150, HKV, D, kv_dtype), cases.selected_ids(1, 130, 150), queries(1, HQ, D, seed=2)
    ids[:, 32:64] = -1  # chunks without a cell
    ids[:, 64:128] = -1
    plain = run(q, ids, kernel_of(gpu), gate=gate, hoisted=hoisted, **kv)
    with settings(checked=True, order="reverse"):
        assert same_bits(run(q, ids, kernel_of(gpu), gate=gate, hoisted=hoisted, **kv), plain)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("hq, hkv, dim", [(24, 2, 256), (12, 1, 128), (14, 2, 64), (3, 3, 64), (8, 1, 256), (25, 1, 128)])
def test_head_groups_dims_and_the_split_form(gpu: str, hq: int, hkv: int, dim: int, kv_dtype: torch.dtype) -> None:  # noqa: F811
    q, kv, ids = queries(3, hq, dim), cache(300, hkv, dim, kv_dtype), cases.selected_ids(3, 200, 300)
    ids[1] = -1
    want = reference.qsa_flash(q, ids=ids, **kv)
    assert_close(flash(q, ids, **kv), want, TOLERANCE[kv_dtype])
    assert_close(split(q, ids, **kv), want, TOLERANCE[kv_dtype])
    assert same_bits(flash(q, ids, **kv)[1], torch.zeros(hq, dim)) and same_bits(split(q, ids, **kv)[1], torch.zeros(hq, dim))


@pytest.mark.parametrize("splits", [1, 2, 5, 100])
def test_split_form_gives_the_log_sum_exp(gpu: str, splits: int) -> None:  # noqa: F811
    q, kv, ids = queries(3, 6, 64), cache(200, 2, 64), cases.selected_ids(3, 70, 200, empty=0.5)
    ids[0, :40] = -1
    partial, lse = (t.cpu() for t in mori_ops.qsa_attn(q.to(DEVICE), ids=ids.to(DEVICE), splits=splits, **moved(kv)))
    want_partial, want_lse = reference.qsa_attn(q, ids=ids, splits=splits, **kv)
    assert_close(partial, want_partial, TOLERANCE[torch.int8])
    finite = want_lse != -math.inf
    assert torch.equal(lse == -math.inf, ~finite)
    assert (lse[finite] - want_lse[finite]).abs().max() < 2e-3
    assert same_bits(partial[~finite], torch.zeros_like(partial[~finite]))


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("slots", [1, 31, 32, 33, 63, 64, 65, 129])
def test_q5_any_slot_count_with_stale_ids_past_the_cells(gpu: str, slots: int, id_dtype: torch.dtype) -> None:  # noqa: F811
    q, kv, ids = queries(3, 3, 64), cache(130, 1, 64), cases.selected_ids(3, slots, 130)
    want = reference.qsa_flash(q, ids=ids, **kv)
    stale = ids.clone()
    stale[stale < 0] = torch.tensor([-1, -2, 130, 2**30, -(2**31), 2**31 - 1]).repeat(slots)[: int((stale < 0).sum())].to(torch.int32)
    assert_close(flash(q, stale.to(id_dtype), **kv), want, TOLERANCE[torch.int8])
    assert same_bits(flash(q, stale.to(id_dtype), **kv), flash(q, ids, **kv))


def test_ids_past_the_cells_raise_when_they_are_to_be_checked(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    q, kv, ids = queries(3, 3, 64), cache(130, 1, 64), cases.selected_ids(3, 20, 130)
    ids[1, 7] = 130
    flash(q, ids, **kv)
    monkeypatch.setenv("MORI_CHECK_IDS", "1")
    with pytest.raises(IndexError, match="ids holds 130, but k holds 130 cells"):
        flash(q, ids, **kv)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("hoisted", [True, False])
def test_unselected_cells_never_reach_the_output_cell_0_included(gpu: str, kv_dtype: torch.dtype, hoisted: bool) -> None:  # noqa: F811
    q, kv, ids = queries(4, 6, 64), cache(90, 2, 64, kv_dtype), cases.selected_ids(4, 70, 45) * 2 + 1
    ids[ids < 0] = -1
    poisoned = {name: t.clone() for name, t in kv.items()}
    for name in ("k_scale", "v_scale") if "k_scale" in kv else ("k", "v"):
        poisoned[name][::2] = math.nan
        poisoned[name][::6] = math.inf
    for kernel in {kernel_of(gpu), "simdgroup"}:
        assert same_bits(run(q, ids, kernel, hoisted=hoisted, **poisoned), run(q, ids, kernel, hoisted=hoisted, **kv))


@pytest.mark.parametrize("gate_value", [3.0, math.nan, -math.inf])
def test_q2_a_row_without_a_cell_is_exactly_zero(gpu: str, gate_value: float) -> None:  # noqa: F811
    q, kv, ids, gate = queries(5, 4, 64), cache(90, 2, 64), cases.selected_ids(5, 40, 90), queries(5, 4, 64, seed=2)
    full = flash(q, ids, gate=gate, **kv)
    for rows in ([2], [0, 1, 2, 3, 4]):
        holes, poisoned = ids.clone(), gate.clone()
        holes[rows] = -1
        poisoned[rows] = gate_value
        kept = [t for t in range(5) if t not in rows]
        for result in (flash(q, holes, gate=poisoned, **kv), split(q, holes, gate=poisoned, **kv)):
            assert same_bits(result[rows], torch.zeros(len(rows), 4, 64))
        assert same_bits(flash(q, holes, gate=poisoned, **kv)[kept], full[kept])


def test_q4_a_duplicate_counts_as_often_as_it_stands(gpu: str) -> None:  # noqa: F811
    kv = cache(10, 1, 64, torch.float16)
    result = flash(torch.zeros(1, 2, 64), torch.tensor([[5, 5, 9]]), **kv)
    assert_close(result[0], ((2 * kv["v"][5].double() + kv["v"][9].double()) / 3).expand(2, 64), 1e-6)
    everyone = flash(queries(70, 2, 64), torch.zeros(70, 7, dtype=torch.int64), **kv)
    assert_close(everyone, kv["v"][0].double().expand(70, 2, 64), 1e-6)


def test_q6_twelve_query_heads_read_their_kv_head(gpu: str) -> None:  # noqa: F811
    v = torch.empty(50, 2, 256, dtype=torch.float16)
    v[:, 0], v[:, 1] = 1.0, 2.0
    v[:, :, 128:] += 10
    result = flash(queries(2, 24, 256), cases.selected_ids(2, 20, 50), k=torch.randn(50, 2, 256).half(), v=v, gate=torch.full((2, 24, 256), 40.0))
    want = torch.cat([torch.full((12, 256), 1.0), torch.full((12, 256), 2.0)])
    want[:, 128:] += 10
    assert_close(result, want.double().expand(2, 24, 256), 1e-6)


def test_appended_empty_slots_are_exactly_neutral(gpu: str) -> None:  # noqa: F811
    q, kv, ids = queries(3, 6, 64), cache(90, 2, 64), cases.selected_ids(3, 50, 90)
    padded = torch.cat([ids, torch.full((3, 200), -1, dtype=torch.int32)], 1)
    assert same_bits(flash(q, padded, **kv), flash(q, ids, **kv))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1e6, 1e30])
def test_query_of_any_magnitude(gpu: str, magnitude: float) -> None:  # noqa: F811
    q, kv, ids = queries(4, 4, 64, torch.float32) * magnitude, cache(90, 2, 64), cases.selected_ids(4, 40, 90)
    want = reference.qsa_flash(q, ids=ids, sm_scale=0.1 / magnitude, **kv)
    result = mori_ops.qsa_flash(q.to(DEVICE), ids=ids.to(DEVICE), sm_scale=0.1 / magnitude, **moved(kv)).cpu()
    assert_close(result, want, TOLERANCE[torch.int8])


def test_nan_and_infinity_stay_in_their_query_head(gpu: str) -> None:  # noqa: F811
    q, kv, ids = queries(3, 24, 256), cache(90, 2, 256), cases.selected_ids(3, 140, 90)
    clean = flash(q, ids, **kv)
    q[1, 3, 77], q[2, 20, 5] = math.nan, math.inf
    result = flash(q, ids, **kv)
    for token, head in ((1, 3), (2, 20)):
        assert result[token, head].isnan().all()
        result[token, head] = clean[token, head]
    assert same_bits(result, clean)


def test_a_nan_in_a_selected_cell_is_not_hidden(gpu: str) -> None:  # noqa: F811
    q, kv = queries(2, 4, 64), cache(90, 2, 64, torch.float16)
    ids = torch.arange(80, dtype=torch.int32).repeat(2, 1)
    for name in ("k", "v"):
        poisoned = {**kv, name: kv[name].clone()}
        poisoned[name][40, 1] = math.nan
        result = flash(q, ids, **poisoned)
        assert result[:, 2:].isnan().all() and result[:, :2].isfinite().all()


def test_a_pool_and_interleaved_projections_are_read_in_place(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """No copy of a cache that lies in a pool, or of q and gate that lie side by side; the same bits."""
    kv, q, gate, ids = cache(90, 2, 64), queries(3, 6, 64), queries(3, 6, 64, seed=2), cases.selected_ids(3, 40, 90)
    want = flash(q, ids, gate=gate, **kv)
    both = torch.cat([q, gate], 2).to(DEVICE)  # q | gate per head
    pool = torch.stack([kv["k"], kv["v"]], 1).to(DEVICE)  # [cells, 2, Hkv, D]
    scales = torch.stack([kv["k_scale"], kv["v_scale"]], 1).to(DEVICE)
    monkeypatch.setattr(mps, "_dense", lambda t: pytest.fail("copied"))
    result = mori_ops.qsa_flash(
        both[..., :64], pool[:, 0], pool[:, 1], ids.to(DEVICE), gate=both[..., 64:], k_scale=scales[:, 0], v_scale=scales[:, 1], out_dtype=torch.float32
    )
    assert same_bits(result.cpu(), want)


@pytest.mark.parametrize("tokens, slots, cells", [(0, 5, 9), (4, 0, 9), (4, 5, 0), (0, 0, 0)])
def test_s3_empty_calls_give_empty_or_zero_results(gpu: str, tokens: int, slots: int, cells: int) -> None:  # noqa: F811
    q, kv, ids = queries(tokens, 4, 64), cache(cells, 2, 64), torch.full((tokens, slots), -1)
    assert same_bits(flash(q, ids, **kv), torch.zeros(tokens, 4, 64))
    assert same_bits(split(q, ids, **kv), torch.zeros(tokens, 4, 64))


def test_refused_arguments_are_named_and_nothing_is_written() -> None:
    kv, q, ids = moved(cache(90, 2, 64)), torch.zeros(3, 4, 64, device=DEVICE), torch.zeros(3, 5, dtype=torch.int64, device=DEVICE)
    out = torch.full(q.shape, 7.0, device=DEVICE)
    for changed, message in (
        (dict(q=torch.zeros(3, 25, 64, device=DEVICE)), "Hq of q must be a multiple of Hkv of k, got Hq 25 and Hkv 2"),
        (dict(k_scale=None), "k_scale is required when k and v are int8"),
        (dict(sm_scale=math.nan), "sm_scale must be finite"),
        (dict(out=torch.zeros(3, 4, 65, device=DEVICE)), "out must have shape"),
        (dict(out=q), "out must not share memory with an input"),
    ):
        with pytest.raises(ValueError, match=f"qsa_flash: {message}"):
            torch.ops.mori.qsa_flash.out(**{"q": q, "ids": ids, "out": out, **kv, **changed})
    with pytest.raises(ValueError, match="qsa_attn: splits must be at least 1, got 0"):
        torch.ops.mori.qsa_attn(q, ids=ids, splits=0, **kv)
    with pytest.raises(ValueError, match="qsa_merge: lse must have shape"):
        mori_ops.qsa_merge(torch.zeros(2, 3, 4, 64, device=DEVICE), torch.zeros(2, 3, 5, device=DEVICE))
    assert (out == 7).all() and (q == 0).all()


def test_q8_offsets_beyond_2_gib_in_a_pool_with_a_huge_token_stride() -> None:
    blocks, stride = 2066, 1_039_680
    kv, q, ids = cache(blocks, 2, 64), queries(1, 4, 64), torch.tensor([[2065, 7, 2064, -1, 2065]])
    pool = torch.empty(blocks * stride, dtype=torch.int8, device=DEVICE)
    strided = moved(kv)
    for name, offset in (("k", 0), ("v", 128)):
        view = pool.as_strided((blocks, 2, 64), (stride, 64, 1), offset)
        view.copy_(strided[name])
        strided[name] = view
    result = mori_ops.qsa_flash(q.to(DEVICE), ids=ids.to(DEVICE), out_dtype=torch.float32, **strided).cpu()
    assert same_bits(result, flash(q, ids, **kv))
