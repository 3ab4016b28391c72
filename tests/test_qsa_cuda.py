"""Attention over selected cells on CUDA: every route against float64, what is not selected stays out, bits repeat.

Skipped where there is no CUDA device, or no CUDA backend in the build.
"""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch import Tensor

import mori_ops
from tests import cases
from tests.cases import same_bits
from tests.test_cuda_runtime import in_a_fresh_process
from tests.test_qsa import KV_DTYPES, cache, expected, poison, queries

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and mori_ops.kernels()["qsa_flash"]["cuda"]), reason="no CUDA device or no CUDA backend in this build"
)

# A 16-bit output may come from probabilities and V scales in fp16: two more roundings of fp16's size.
TOLERANCE = cases.RELATIVE_L2 | {torch.float16: 4e-4, torch.float32: 1e-5}
# The model's heads, then groups of one to three tiles of 16 rows, an odd number of KV heads, and every D.
HEADS = [(24, 2, 256), (8, 1, 256), (40, 2, 256), (25, 1, 128), (12, 1, 128), (14, 2, 64), (3, 3, 64), (40, 1, 64)]
SEED_PROMPTS = [
    (96, 0), (96, 1984), (96, 2050), (1, 0), (64, 1987), (200, 1900), (1, 2050), (1, 2051), (3, 2049), (33, 30000),
    (512, 0), (1024, 0), (1984, 0), (96, 30000), (512, 30000), (1024, 30000), (1984, 30000),
]  # fmt: skip


def on_device(value):
    return value.cuda() if isinstance(value, Tensor) else value


def flash(q: Tensor, ids: Tensor, **kw: object) -> Tensor:
    return mori_ops.qsa_flash(on_device(q), ids=on_device(ids), **{name: on_device(value) for name, value in kw.items()})


def split(q: Tensor, ids: Tensor, *, gate: Tensor | None = None, splits: int = 4, out_dtype: torch.dtype = torch.float32, **kw: object) -> Tensor:
    partial, lse = mori_ops.qsa_attn(on_device(q), ids=on_device(ids), splits=splits, **{name: on_device(value) for name, value in kw.items()})
    return mori_ops.qsa_merge(partial, lse, gate=on_device(gate), out_dtype=out_dtype)


def check(result: Tensor, wanted: Tensor) -> None:
    few = wanted.numel() < cases.FEW and result.dtype in cases.HALF_ULP
    cases.assert_close(result.cpu(), wanted.cpu(), None if few else TOLERANCE[result.dtype])


def check_some(result: Tensor, q: Tensor, ids: Tensor, gate: Tensor | None = None, **kv: Tensor) -> None:
    """Against float64 on up to 24 tokens: the reference gathers S cells for each."""
    some = torch.linspace(0, len(q) - 1, min(len(q), 24)).long()
    check(result[some.cuda()], expected(q[some], ids[some], gate=None if gate is None else gate[some], **kv))


# ---- against float64 ----


@pytest.mark.parametrize("tokens, position", SEED_PROMPTS)
def test_prompts_of_the_seed(tokens: int, position: int) -> None:
    kv, ids = cache(position + tokens, cases.QSA_HKV, cases.QSA_D), cases.prompt_ids(tokens, position)
    q = queries(tokens, cases.QSA_HQ, cases.QSA_D, torch.bfloat16)
    gate = queries(tokens, cases.QSA_HQ, cases.QSA_D, torch.bfloat16, seed=2)
    result = flash(q, ids, gate=gate, **kv)
    check_some(result, q, ids, gate, **kv)
    assert same_bits(result, flash(q, ids, gate=gate, **kv))
    if tokens <= 200:
        assert cases.relative_l2(result, split(q, ids, gate=gate, **kv)) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("tokens", [1, 9, 70])
@pytest.mark.parametrize("hq, hkv, dim", HEADS)
def test_head_groups_dims_and_dtypes(hq: int, hkv: int, dim: int, tokens: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    kv, ids = cache(700, hkv, dim, kv_dtype), cases.selected_ids(tokens, 300, 700)
    q, gate = queries(tokens, hq, dim, dtype), queries(tokens, hq, dim, dtype, seed=2)
    result = flash(q, ids, gate=gate, **kv)
    assert result.dtype == dtype
    check_some(result, q, ids, gate, **kv)
    check_some(split(q, ids, gate=gate, splits=3, **kv), q, ids, gate, **kv)


@pytest.mark.parametrize("tokens", [1, 4, 63, 64, 65])
@pytest.mark.parametrize("slots", [1, 31, 63, 64, 65, 129])
def test_any_token_and_slot_count(tokens: int, slots: int) -> None:
    q, kv, ids = queries(tokens, 12, 128, torch.float16), cache(130, 2, 128), cases.selected_ids(tokens, slots, 130)
    check(flash(q, ids, **kv), expected(q, ids, **kv))


@pytest.mark.parametrize("tokens", [1, 8, 9])
@pytest.mark.parametrize("slots", [1, 17, 144, 145, 1000, 2304, 2305, 5000])
def test_any_slot_count_of_a_verify_window(tokens: int, slots: int) -> None:
    """One CTA holds 144 slots, a cluster of them 2304."""
    q, kv, ids = queries(tokens, 24, 256, torch.bfloat16), cache(6000, 2, 256), cases.selected_ids(tokens, slots, 6000, empty=0.05)
    result = flash(q, ids, **kv)
    check_some(result, q, ids, **kv)
    assert same_bits(result, flash(q, ids, **kv))


@pytest.mark.parametrize("sm_scale", [0.0, 1e-3, 0.5, -0.3])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_any_softmax_scale(sm_scale: float, dtype: torch.dtype) -> None:
    q, kv, ids = queries(40, 4, 64, dtype), cache(90, 2, 64), cases.selected_ids(40, 40, 90)
    check(flash(q, ids, sm_scale=sm_scale, **kv), expected(q, ids, sm_scale=sm_scale, **kv))


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-3, 1e6, 1e30])
@pytest.mark.parametrize("tokens", [4, 40])
def test_query_of_any_magnitude(tokens: int, magnitude: float) -> None:
    kv, ids = cache(90, 2, 64), cases.selected_ids(tokens, 40, 90)
    for dtype in (torch.bfloat16, torch.float32):
        q = (queries(tokens, 6, 64).clamp(-1, 1) * magnitude).to(dtype)
        for out_dtype in (torch.bfloat16, torch.float32):
            result = flash(q, ids, sm_scale=1 / magnitude, out_dtype=out_dtype, **kv)
            check(result, expected(q, ids, sm_scale=1 / magnitude, **kv))


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("slots, prefix", [(40, False), (170, False), (170, True)])
def test_scales_of_any_size(slots: int, prefix: bool, dim: int) -> None:
    """Subnormal, huge, and mixed by 2^20 inside one token: groups of their own, so each shows in the result."""
    q, kv = queries(150, 6, dim, torch.bfloat16), cache(170, 2, dim)
    ids = cases.prompt_ids(150, 20) if prefix else cases.selected_ids(150, slots, 170)
    sizes = {
        "subnormal": (torch.randint(1, 1024, kv["v_scale"].shape) * 2.0**-24).half(),
        "huge": torch.empty(kv["v_scale"].shape).uniform_(2.0**14, 65504.0).half(),
        "mixed": (kv["v_scale"].float() * 2.0 ** torch.randint(-8, 12, kv["v_scale"].shape[:1])[:, None, None]).half(),
        "negative": -kv["v_scale"],
    }
    for name, v_scale in sizes.items():
        changed = kv | {"v_scale": v_scale}
        result, wanted = flash(q, ids, **changed).float().cpu(), expected(q, ids, **changed)
        for group in range(dim // 64):
            part = slice(64 * group, 64 * group + 64)
            assert cases.relative_l2(result[..., part], wanted[..., part]) <= 2.2e-3, name
    for factor in (2.0**-12, 2.0**14):
        changed = kv | {"k_scale": (kv["k_scale"].float() * factor).half()}
        check(flash(q, ids, sm_scale=dim**-0.5 / factor, **changed), expected(q, ids, sm_scale=dim**-0.5 / factor, **changed))


# ---- what is selected, and nothing else ----


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("tokens, slots, dim", [(1, 70, 64), (40, 70, 64), (1, 70, 256), (4, 300, 256), (20, 70, 256), (20, 200, 256)])
def test_unselected_cells_never_reach_the_output(tokens: int, slots: int, dim: int, kv_dtype: torch.dtype) -> None:
    q, kv, ids = queries(tokens, 6, dim, torch.bfloat16), cache(800, 2, dim, kv_dtype), cases.selected_ids(tokens, slots, 399, empty=0.3) * 2 + 1
    ids[ids < 0] = -1
    assert same_bits(flash(q, ids, **poison(kv, torch.arange(0, 800, 2))), flash(q, ids, **kv))  # cell 0 among them


@pytest.mark.parametrize("hq, hkv, dim", [(24, 2, 256), (5, 1, 64)])
def test_a_later_token_of_a_prompt_does_not_leak_into_an_earlier_one(hq: int, hkv: int, dim: int) -> None:
    tokens = 150
    q, kv, ids = queries(tokens, hq, dim, torch.bfloat16), cache(tokens, hkv, dim), cases.prompt_ids(tokens, 0)
    wanted = expected(q, ids, **kv)
    for bad in (1, 17, 131):
        result = flash(q, ids, **poison(kv, torch.arange(bad, tokens)))
        check(result[:bad], wanted[:bad])
        assert result[bad:].isnan().any(-1).all()


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens, slots", [(3, 130), (50, 130), (50, 190), (150, 190)])
def test_ids_beyond_the_cells_are_empty_and_never_read(tokens: int, slots: int, id_dtype: torch.dtype) -> None:
    q, kv, ids = queries(tokens, 12, 256, torch.bfloat16), cache(200, 1, 256), cases.selected_ids(tokens, slots, 200)
    wild = ids.to(id_dtype)
    wild[ids < 0] = torch.tensor([200, 2**31 - 1, -(2**31), 201]).to(id_dtype)[torch.randint(0, 4, (int((ids < 0).sum()),))]
    if id_dtype == torch.int64:
        wild[0, ids[0] < 0] = 2**40
    assert same_bits(flash(q, wild, **kv), flash(q, ids, **kv))


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_ids_beyond_the_cells_raise_where_the_switch_is_set(id_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_CHECK_IDS", "1")
    q, kv, ids = queries(3, 4, 64), cache(90, 2, 64), cases.selected_ids(3, 40, 90).to(id_dtype)
    assert flash(q, ids, **kv).isfinite().all()
    ids[1, 5] = 90
    for op, call in (("qsa_flash", flash), ("qsa_attn", split)):
        with pytest.raises(IndexError, match=f"{op}: ids holds 90, but k holds 90 cells"):
            call(q, ids, **kv)


@pytest.mark.parametrize("tokens, slots, dim", [(1, 40, 64), (5, 40, 64), (200, 40, 64), (5, 40, 256), (20, 150, 256), (200, 150, 256)])
def test_a_row_without_a_cell_is_exactly_zero(tokens: int, slots: int, dim: int) -> None:
    q, kv, ids = queries(tokens, 4, dim, torch.bfloat16), cache(160, 2, dim), cases.selected_ids(tokens, slots, 160)
    gate = torch.zeros(tokens, 4, dim)
    full = flash(q, ids, gate=gate, **kv)
    for rows in ([tokens // 2], list(range(tokens))):
        holes, poisoned = ids.clone(), gate.clone()
        holes[rows], poisoned[rows] = -1, math.nan
        out = flash(q, holes, gate=poisoned, **kv)
        merged = split(q, holes, gate=poisoned, **kv)
        kept = [t for t in range(tokens) if t not in rows]
        assert same_bits(out[rows].float(), torch.zeros(len(rows), 4, dim, device="cuda"))
        assert same_bits(merged[rows], torch.zeros(len(rows), 4, dim, device="cuda"))
        assert same_bits(out[kept], full[kept])


def test_a_duplicate_counts_as_often_as_it_stands() -> None:
    for kv in (cache(10, 1, 64), cache(10, 1, 64, torch.float16)):
        q, ids = queries(40, 2, 64, torch.bfloat16), torch.tensor([[5, 5, 9, -1]]).expand(40, 4)
        check(flash(q, ids, **kv), expected(q, ids, **kv))


@pytest.mark.parametrize("tokens, slots, cells", [(0, 5, 9), (4, 0, 9), (4, 5, 0), (0, 0, 0), (100, 0, 0)])
def test_empty_calls_give_empty_or_zero_results(tokens: int, slots: int, cells: int) -> None:
    q, kv, ids = queries(tokens, 4, 64, torch.bfloat16), cache(cells, 2, 64), torch.full((tokens, slots), -1)
    zeros = torch.zeros(tokens, 4, 64, device="cuda")
    assert same_bits(flash(q, ids, **kv).float(), zeros) and same_bits(split(q, ids, **kv), zeros)


# ---- prefixes ----


@pytest.mark.parametrize("change", ["none", "hole", "swap", "duplicate", "late", "short", "int64"])
@pytest.mark.parametrize("tokens, position", [(96, 0), (160, 0), (140, 300)])
def test_prompts_that_are_almost_a_prefix(tokens: int, position: int, change: str) -> None:
    q, kv, ids = queries(tokens, 24, 256, torch.bfloat16), cache(position + tokens + 5, 2, 256), cases.prompt_ids(tokens, position)
    if change == "hole":
        ids[tokens // 2, 3:9] = -1
    elif change == "swap":
        ids[5, :2] = torch.tensor([1, 0])
    elif change == "duplicate":
        ids[tokens - 1, 4] = 3
    elif change == "late":
        ids[tokens - 2, -1] = position + tokens + 4
    elif change == "short":
        ids[7, 2:] = -1
        ids[40] = -1
    elif change == "int64":
        ids = ids.long()
    check_some(flash(q, ids, **kv), q, ids, **kv)


def test_a_prompt_longer_than_the_budget() -> None:
    tokens = 2300
    q, kv, ids = queries(tokens, 24, 256, torch.bfloat16), cache(tokens, 2, 256), cases.prompt_ids(tokens, 0)
    result = flash(q, ids, **kv)
    check_some(result, q, ids, **kv)
    last = slice(2040, 2060)
    check(result[last], expected(q[last], ids[last], **kv))


# ---- memory layouts, graphs ----


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float16])
@pytest.mark.parametrize("tokens", [3, 40])
def test_strided_inputs_give_the_bits_of_contiguous_ones(tokens: int, kv_dtype: torch.dtype) -> None:
    heads, dim = 6, 64
    kv = {name: t.cuda() for name, t in cache(90, 2, dim, kv_dtype).items()}
    ids = cases.selected_ids(tokens, 40, 90).cuda()
    q, gate = queries(tokens, heads, dim, torch.bfloat16).cuda(), queries(tokens, heads, dim, torch.bfloat16, seed=2).cuda()
    want = flash(q, ids, gate=gate, **kv)
    both = torch.stack([q, gate], 2).flatten(2)  # q | gate, interleaved per head
    assert same_bits(flash(both[..., :dim], ids, gate=both[..., dim:], **kv), want)
    transposed = {name: t.transpose(0, 1).contiguous().transpose(0, 1) for name, t in kv.items()}
    assert same_bits(flash(q, ids, gate=gate, **transposed), want)
    last = {name: t.transpose(0, 2).contiguous().transpose(0, 2) for name, t in kv.items()}
    assert same_bits(flash(q, ids, gate=gate, **last), want)
    every_other = {name: torch.stack([t, torch.full_like(t, 1)], 1).flatten(0, 1)[::2] for name, t in kv.items()}
    assert same_bits(flash(q, torch.stack([ids, ids], 2)[..., 1], gate=gate, **every_other), want)
    padded = torch.randn(tokens, heads, dim + 1, device="cuda").bfloat16()
    padded[..., 1:] = q
    assert same_bits(flash(padded[..., 1:], ids.t().contiguous().t(), gate=gate.transpose(1, 2).contiguous().transpose(1, 2), **kv), want)
    shifted = {name: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for name, t in kv.items()}
    assert same_bits(flash(q, ids, gate=gate, **shifted), want)


@pytest.mark.parametrize("tokens", [1, 20])
def test_offsets_beyond_2_gib_in_a_large_pool(tokens: int) -> None:
    count = 128
    cells = 4_194_304 + count
    small = cache(count, 2, 256)
    large = {name: torch.empty(cells, *t.shape[1:], dtype=t.dtype, device="cuda") for name, t in small.items()}
    for name, t in small.items():
        large[name][-count:] = t.cuda()
    q, ids = queries(tokens, 24, 256, torch.bfloat16), cases.selected_ids(tokens, 100, count)
    ids[0, :2] = torch.tensor([count - 1, count - 2])
    moved = torch.where(ids >= 0, ids + cells - count, ids)
    assert same_bits(flash(q, moved, **large), flash(q, ids, **small))
    # The same cells at a huge distance from each other.
    stride = 40_000_000
    pool = torch.empty(count * stride, dtype=torch.int8, device="cuda")
    apart = dict(small)
    for name, offset in (("k", 0), ("v", 512)):
        apart[name] = pool.as_strided((count, 2, 256), (stride, 256, 1), offset)
        apart[name].copy_(small[name])
    assert same_bits(flash(q, ids, **apart), flash(q, ids, **small))


@pytest.mark.parametrize("tokens", [1, 8, 60, 150])
def test_a_replay_follows_the_ids(tokens: int) -> None:
    """The routes that depend on what the ids hold are taken on the device: a graph replayed over other ids is right."""
    kv = {name: t.cuda() for name, t in cache(tokens + 140, 2, 256).items()}
    q, ids = queries(tokens, 24, 256, torch.bfloat16), cases.selected_ids(tokens, tokens + 60, tokens + 140)
    on_gpu = ids.cuda()
    flash(q, on_gpu, **kv)
    graph, query = torch.cuda.CUDAGraph(), q.cuda()
    with torch.cuda.graph(graph):
        captured = flash(query, on_gpu, **kv)
    for other in (cases.prompt_ids(tokens, 60), ids, torch.full_like(ids, -1), cases.prompt_ids(tokens, 60)):
        on_gpu.copy_(other)
        graph.replay()
        assert same_bits(captured, flash(query, on_gpu, **kv))
        check(captured, expected(q, other, **{name: t.cpu() for name, t in kv.items()}))


def test_refused_arguments_write_nothing() -> None:
    q, kv, ids = queries(3, 4, 64).cuda(), cache(90, 2, 64), cases.selected_ids(3, 5, 90).cuda()
    kv = {name: t.cuda() for name, t in kv.items()}
    out = torch.full((3, 4, 64), 7.0, device="cuda")
    with pytest.raises(ValueError, match="qsa_flash: v_scale is required"):
        torch.ops.mori.qsa_flash.out(q, kv["k"], kv["v"], ids, k_scale=kv["k_scale"], out=out)
    with pytest.raises(ValueError, match="qsa_flash: ids must be on the same device as q"):
        torch.ops.mori.qsa_flash.out(q, kv["k"], kv["v"], ids.cpu(), k_scale=kv["k_scale"], v_scale=kv["v_scale"], out=out)
    assert (out == 7).all()


EVERY_ROUTE = """
import torch
from tests import cases
from tests.test_qsa_cuda import flash
from tests.test_qsa import cache, queries
# A cluster of one CTA and of several; prefixes, and rows that are none; parts of a token merged, with and without a dense attempt.
for tokens, slots, cells, dim, prefix in (
    (3, 70, 90, 256, False), (1, 500, 600, 256, False), (140, 150, 150, 256, True), (130, 150, 160, 256, False), (12, 130, 150, 64, False),
):
    ids = cases.prompt_ids(tokens, cells - tokens, slots) if prefix else cases.selected_ids(tokens, slots, cells)
    flash(queries(tokens, 24, dim, torch.bfloat16), ids, **cache(cells, 2, dim))
torch.cuda.synchronize()
"""


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing_in_any_route(tool: str) -> None:
    in_a_fresh_process(EVERY_ROUTE, command=("compute-sanitizer", f"--tool={tool}", "--error-exitcode=1"))
