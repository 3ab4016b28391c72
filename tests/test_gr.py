"""gr_down and the Q8_0 format: ggml's own bytes, float64, and rows that never change with the window they sit in."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import mori_ops
from mori_ops import reference
from tests import cases
from tests.cases import assert_close, same_bits

ops = torch.ops.mori
VARIANTS = ("4_4", "4_4_r2", "8_8", "8_8_r2", "auto_8")
WINDOWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 64)


@pytest.fixture(params=["native", "generic"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The processor's own instruction set, and the portable kernels."""
    if request.param == "generic":
        monkeypatch.setenv("MORI_CPU_ISA", "generic")
    return request.param


def random_q8(n: int, k: int, *, seed: int = 0) -> Tensor:
    """Q8_0 bytes with every code, -128 included, and a scale per block of either sign."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (n, k // 32, 34), dtype=torch.uint8, generator=generator)
    d = torch.randn(n, k // 32, 1, generator=generator) * 0.01
    blocks[..., :2] = d.half().view(torch.uint8)
    return blocks.flatten(1)


def q8_blocks(d: float, q: int, n: int, k: int) -> Tensor:
    """Q8_0 bytes of an [N, K] weight whose blocks are all the same."""
    block = torch.cat([torch.tensor([d]).half().view(torch.uint8), torch.full((32,), q, dtype=torch.int8).view(torch.uint8)])
    return block.repeat(n, k // 32)


def random_x(ntok: int, k: int, dtype: torch.dtype = torch.float32, *, seed: int = 1) -> Tensor:
    return torch.randn(ntok, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ggml_bytes(w: Tensor) -> Tensor:
    with np.errstate(over="ignore", invalid="ignore"):  # scales outside the range of fp16
        return torch.from_numpy(gguf.quants.quantize(w.float().cpu().numpy(), gguf.GGMLQuantizationType.Q8_0)).to(w.device)


# ---- Q8_0 ----


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("n, k", [(1, 32), (3, 64), (65, 320), (130, 1056)])
def test_quantize_writes_the_bytes_of_ggml(n: int, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    spread = torch.exp(3 * torch.randn(n, k // 32, 1, generator=generator))
    w = (torch.randn(n, k // 32, 32, generator=generator) * spread).flatten(1).clamp(-60000, 60000).to(dtype)
    w[0, :32] = 0
    assert same_bits(ops.q8_0_quantize(w), ggml_bytes(w))
    assert same_bits(ops.q8_0_quantize(w), reference.q8_0_quantize(w.cpu()).to(w.device))


def test_quantize_rounds_ties_away_from_zero_as_ggml_does() -> None:
    w = torch.arange(-126.5, 127, 0.5)[: 15 * 33].reshape(15, 33)
    w[:, 0] = 127  # d = 1: half of the values are exact ties
    w = w[:, :32].contiguous()
    w[0, 1:5] = torch.tensor([0.5, -0.5, 0.49999997, -0.49999997])
    codes = ops.q8_0_quantize(w)
    assert same_bits(codes, ggml_bytes(w))
    assert codes[0, 3:7].view(torch.int8).tolist() == [1, -1, 0, 0]


def test_quantize_matches_ggml_over_the_range_of_the_scale() -> None:
    exponents = torch.arange(-126, 127)
    w = torch.randn(exponents.numel(), 32, generator=torch.Generator().manual_seed(0)) * torch.exp2(exponents.float())[:, None]
    ours, theirs = ops.q8_0_quantize(w), ggml_bytes(w)
    assert same_bits(ours[:, :2], theirs[:, :2])
    defined = w.abs().amax(1) >= 127 * 2.0**-128  # below, ggml divides by zero and its codes are undefined
    assert defined.sum() > 240 and same_bits(ours[defined], theirs[defined])
    assert (ops.q8_0_dequantize(ours[~defined]) == 0).all()


def test_a_block_with_nan_or_infinity_reads_back_as_nan_and_spares_its_neighbours() -> None:
    w = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    w[0, 40], w[1, 33], w[2, 63] = torch.nan, torch.inf, -torch.inf
    back = ops.q8_0_dequantize(ops.q8_0_quantize(w))
    assert back[:3, 32:64].isnan().all()
    assert back[:, :32].isfinite().all() and back[:, 64:].isfinite().all() and back[3].isfinite().all()


@pytest.mark.parametrize("rows", [65535, 65536, 131073])
def test_quantize_s2_many_rows(rows: int) -> None:
    w = torch.randn(rows, 128, generator=torch.Generator().manual_seed(0))
    q = ops.q8_0_quantize(w)
    assert same_bits(q[-3:], ggml_bytes(w[-3:])) and same_bits(q[32767:32770], ggml_bytes(w[32767:32770]))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_dequantize_is_exact_and_rounded_once(dtype: torch.dtype) -> None:
    w = random_q8(37, 352)
    w[0, :34] = q8_blocks(6e-8, -128, 1, 32)  # a subnormal scale
    back = ops.q8_0_dequantize(w, out_dtype=dtype)
    assert same_bits(back, reference.q8_0_dequantize(w, out_dtype=torch.float32).to(dtype))
    if dtype == torch.float32:
        assert same_bits(back, torch.from_numpy(gguf.quants.dequantize(w.cpu().numpy(), gguf.GGMLQuantizationType.Q8_0)).to(w.device))


# ---- gr_down: values ----


@pytest.mark.parametrize("ntok", WINDOWS)
@pytest.mark.parametrize("n, k", [(1, 32), (7, 96), (61, 544), (33, 1056)])
def test_gr_down_matches_float64(isa: str, n: int, k: int, ntok: int) -> None:
    x, w = random_x(ntok, k), random_q8(n, k)
    assert_close(ops.gr_down(x, w), reference.gr_down(x, w))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("ntok", [1, 4, 8, 130])
def test_gr_down_matches_float64_at_the_size_of_the_model(dtype: torch.dtype, ntok: int) -> None:
    x, w = random_x(ntok, cases.GR_K, dtype), random_q8(cases.GR_N, cases.GR_K)
    assert_close(ops.gr_down(x, w), reference.gr_down(x, w))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("norm_dtype", cases.DTYPES)
@pytest.mark.parametrize("hc", [1, 2, 4])
def test_fused_norm_matches_float64(isa: str, hc: int, norm_dtype: torch.dtype, dtype: torch.dtype) -> None:
    k = 352
    w, norm = random_q8(45, k), (0.5 + torch.rand(k, generator=torch.Generator().manual_seed(3))).to(norm_dtype)
    for ntok in (1, 3, 9):
        x = (random_x(ntok, k) * torch.exp(random_x(ntok, 1, seed=2) * 2)).to(dtype)
        assert_close(ops.gr_down(x, w, norm_weight=norm, hc=hc, eps=1e-3), reference.gr_down(x, w, norm_weight=norm, hc=hc, eps=1e-3))


def test_fused_norm_holds_for_groups_that_are_no_multiple_of_a_vector(isa: str) -> None:
    x, w, norm = random_x(3, 96), random_q8(5, 96), torch.rand(96)
    for hc in (3, 32, 96):
        assert_close(ops.gr_down(x, w, norm_weight=norm, hc=hc), reference.gr_down(x, w, norm_weight=norm, hc=hc))


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_fused_norm_squares_neither_overflow_nor_vanish(isa: str, magnitude: float) -> None:
    x, w, norm = random_x(3, 128) * magnitude, random_q8(5, 128), torch.rand(128)
    assert_close(ops.gr_down(x, w, norm_weight=norm, eps=0.0), reference.gr_down(x, w, norm_weight=norm, eps=0.0))


@pytest.mark.parametrize("ntok", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_n13_large_activations_do_not_overflow(isa: str, ntok: int) -> None:
    w = q8_blocks(2.0**-10, 1, 3, 256)
    for dtype in (torch.bfloat16, torch.float32):
        assert (ops.gr_down(torch.full((ntok, 256), 99840.0, dtype=dtype), w) == 24960).all()


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("ntok", [1, 4, 9])
def test_n13_extreme_codes_and_scales_are_exact(isa: str, ntok: int, flush: bool) -> None:
    x = torch.full((ntok, 256), 3.0)
    torch.set_flush_denormal(flush)
    try:
        for d, q in ((0.5, -128), (0.0, 127), (-0.25, 127), (2.0**-24, 1), (2.0**-24, -128), (2.0**-14 - 2.0**-24, 100), (65504.0, -128)):
            assert (ops.gr_down(x, q8_blocks(d, q, 2, 256)) == 256 * 3 * d * q).all(), (d, q)
    finally:
        torch.set_flush_denormal(False)


def test_nan_and_infinity_reach_only_their_own_token_or_row(isa: str) -> None:
    x, w = random_x(9, 96), random_q8(13, 96)
    clean = ops.gr_down(x, w)
    x[4, 50] = torch.nan
    w[7, 34:36] = torch.tensor([torch.inf]).half().view(torch.uint8)
    y = ops.gr_down(x, w)
    assert y[4].isnan().all() and not y[:, 7].isfinite().any()
    others = [t for t in range(9) if t != 4]
    columns = [n for n in range(13) if n != 7]
    assert same_bits(y[others][:, columns], clean[others][:, columns])


# ---- gr_down: bits ----


def test_n14_a_row_keeps_its_bits_in_any_window_and_at_any_place(isa: str) -> None:
    w, row, norm = random_q8(41, 1120), random_x(1, 1120, seed=5), torch.rand(1120)
    for norm_weight in (None, norm):
        alone = ops.gr_down(row, w, norm_weight=norm_weight)
        for ntok in (*WINDOWS, 130):
            for place in {0, ntok // 2, ntok - 1}:
                x = random_x(ntok, 1120)
                x[place] = row[0]
                assert same_bits(ops.gr_down(x, w, norm_weight=norm_weight)[place], alone[0]), (ntok, place)


def test_an_output_column_keeps_its_bits_for_any_number_of_rows(isa: str) -> None:
    w, x = random_q8(41, 608), random_x(10, 608)
    full = ops.gr_down(x, w)
    for ntok in (1, 3, 10):
        for n in (1, 2, 5, 6, 7, 12, 40):
            assert same_bits(ops.gr_down(x[:ntok], w[:n]), full[:ntok, :n].contiguous())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_same_bits(variant: str) -> None:
    w = random_q8(20, 320)
    for ntok in WINDOWS:
        x = random_x(ntok, 320)
        assert same_bits(ops.gr_down(x, w, variant=variant), ops.gr_down(x, w))


def test_results_do_not_depend_on_the_number_of_threads(isa: str) -> None:
    w, norm, threads = random_q8(61, 2080), torch.rand(2080), torch.get_num_threads()
    try:
        for ntok in (1, 4, 8, 9, 130):
            x = random_x(ntok, 2080)
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(ops.gr_down(x, w, norm_weight=norm))
            assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])
            assert same_bits(results[2], ops.gr_down(x, w, norm_weight=norm))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_s7_s9_views_give_the_bits_of_their_dense_copies(isa: str, dtype: torch.dtype) -> None:
    k, w = 128, random_q8(9, 128)
    base = random_x(24, 400, dtype)
    views = {
        "transposed": base[:, :k].t().contiguous().t(), "every other column": base[:, : 2 * k : 2], "every other row": base[::2, :k],
        "inner columns": base[:, 32 : 32 + k], "misaligned start": base[:, 1 : 1 + k], "expanded": base[:1, :k].expand(8, k),
        "expanded columns": base[:, :1].expand(24, k), "reversed roles": base.t()[:k].t(),
    }  # fmt: skip
    for name, x in views.items():
        assert same_bits(ops.gr_down(x, w), ops.gr_down(x.contiguous(), w)), name
        assert same_bits(ops.q8_0_quantize(x), ops.q8_0_quantize(x.contiguous())), name


def test_s7_misaligned_and_strided_weights_give_the_bits_of_their_dense_copies(isa: str) -> None:
    w, x = random_q8(11, 352), random_x(7, 352)
    n, width = w.shape
    views = {"rows with a gap": torch.zeros(n, width + 5, dtype=torch.uint8)[:, 3 : 3 + width],
             "every other row": torch.zeros(2 * n, width, dtype=torch.uint8)[::2],
             "transposed": torch.zeros(width, n, dtype=torch.uint8).t()}  # fmt: skip
    for offset in (1, 2, 7):
        views[f"offset {offset}"] = torch.zeros(offset + n * width, dtype=torch.uint8)[offset:].view(n, width)
    for name, view in views.items():
        view.copy_(w)
        for ntok in (1, 7):
            assert same_bits(ops.gr_down(x[:ntok], view), ops.gr_down(x[:ntok], w)), name
        assert same_bits(ops.q8_0_dequantize(view), ops.q8_0_dequantize(w)), name


# ---- gr_down: shapes, out, errors ----


def test_s3_empty_dimensions(isa: str) -> None:
    w = random_q8(5, 64)
    for ntok in (0, 1, 9):
        for n in (0, 5):
            y = ops.gr_down(random_x(ntok, 64), w[:n], norm_weight=torch.ones(64))
            assert y.shape == (ntok, n) and y.dtype == torch.float32
    assert (ops.gr_down(torch.zeros(3, 0), w[:, :0]) == 0).all() and ops.gr_down(torch.zeros(30, 0), w[:, :0]).shape == (30, 5)
    for n, k in ((0, 64), (3, 0)):
        q = ops.q8_0_quantize(torch.zeros(n, k))
        assert q.shape == (n, k // 32 * 34) and ops.q8_0_dequantize(q).shape == (n, k)


@pytest.mark.parametrize("ntok", [1, 4, 5, 9])
def test_out_is_written_whole_and_equals_the_functional_form(isa: str, ntok: int) -> None:
    x, w, norm = random_x(ntok, 160), random_q8(17, 160), torch.rand(160)
    out = torch.full((ntok, 17), torch.nan)
    ops.gr_down.out(x, w, norm_weight=norm, hc=1, out=out)
    assert same_bits(out, ops.gr_down(x, w, norm_weight=norm, hc=1))


def test_q8_0_out_forms_equal_the_functional_ones() -> None:
    x = random_x(6, 160)
    q = torch.full((6, 170), 0xFF, dtype=torch.uint8)
    ops.q8_0_quantize.out(x, out=q)
    assert same_bits(q, ops.q8_0_quantize(x))
    for dtype in cases.DTYPES:
        back = torch.full((6, 160), torch.nan, dtype=dtype)
        ops.q8_0_dequantize.out(q, out=back)
        assert same_bits(back, ops.q8_0_dequantize(q, out_dtype=dtype))


X, W = torch.zeros(2, 64), torch.zeros(3, 68, dtype=torch.uint8)


@pytest.mark.parametrize(
    "x, w, options, message",
    [
        (X.double(), W, {}, "x must be float32 or bfloat16 or float16, got float64"),
        (X[0], W, {}, r"x must be \[ntok, K\], got float32 \[64\]"),
        (X[:, :32], W, {}, r"x must have the K of w, 64, got float32 \[2, 32\]"),
        (X, W.to(torch.int8), {}, "w must be uint8, got int8"),
        (X, W[:, :67], {}, r"w must be Q8_0 bytes \[N, K/32 \* 34\], got uint8 \[3, 67\]"),
        (X, W, {"variant": "4_8"}, "variant must be 'auto'.*got '4_8'"),
        (X, W, {"norm_weight": torch.ones(32)}, r"norm_weight must have shape \[64\]"),
        (X, W, {"norm_weight": torch.ones(64, dtype=torch.int32)}, "norm_weight must be float32"),
        (X, W, {"norm_weight": torch.ones(64), "hc": 3}, "hc must be positive and divide K = 64, got 3"),
        (X, W, {"norm_weight": torch.ones(64), "hc": 0}, "hc must be positive"),
        (X, W, {"norm_weight": torch.ones(64), "eps": -1.0}, "eps must be finite and not negative, got -1"),
    ],
)
def test_refused_inputs_are_named_and_write_nothing(x: Tensor, w: Tensor, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.gr_down(x, w, **options)
    out = torch.full((2, 3), 7.0)
    with pytest.raises(ValueError, match=message):
        ops.gr_down.out(x, w, out=out, **options)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "out, message",
    [
        (torch.full((2, 4), 7.0), r"out must have shape \[2, 3\]"),
        (torch.full((2, 3), 7.0, dtype=torch.float16), "out must be float32"),
        (torch.full((3, 2), 7.0).t(), "out must be contiguous"),
    ],
)
def test_refused_out(out: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.gr_down.out(X, W, out=out)
    assert (out == 7).all()


def test_refused_out_that_overlaps_an_input() -> None:
    memory = torch.zeros(2 * 64)
    with pytest.raises(ValueError, match="out must not share memory with an input"):
        ops.gr_down.out(memory.view(2, 64), W, out=memory[:6].view(2, 3))


def test_refused_q8_0_inputs() -> None:
    for w, message in ((torch.zeros(2, 33), "K a multiple of 32"), (torch.zeros(64), r"\[N, K\]"), (torch.zeros(2, 32).int(), "w must be float32")):
        with pytest.raises(ValueError, match=message):
            ops.q8_0_quantize(w)
    with pytest.raises(ValueError, match=r"Q8_0 bytes .* got uint8 \[2, 33\]"):
        ops.q8_0_dequantize(torch.zeros(2, 33, dtype=torch.uint8))
    with pytest.raises(ValueError, match="out_dtype must be bfloat16, float16 or float32, got float64"):
        ops.q8_0_dequantize(torch.zeros(2, 34, dtype=torch.uint8), out_dtype=torch.float64)


def test_routes_say_which_kernel_runs() -> None:
    shape = {"n": cases.GR_N, "k": cases.GR_K}
    assert mori_ops.route("gr_down", ntok=1, **shape).kernel == "stream"
    assert mori_ops.route("gr_down", ntok=64, **shape).kernel == "panel"
