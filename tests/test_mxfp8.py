"""The GEMMs of the MXFP8 family: mxfp8, mxfp8_raw, mxfp8_linear and scaled_gemm against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import mori_ops
from mori_ops import reference
from tests.cases import DTYPES, GEMM_SHAPES, QUANTS, RELATIVE_L2, assert_close, gemm_operands, random_codes, random_scales, relative_l2, same_bits

ops = torch.ops.mori
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
ONE, MOST, NAN_CODES = 0x38, 0x7E, (0x7F, 0xFF)  # e4m3 codes of 1 and 448, and both NaNs


@pytest.fixture(params=["native", "generic"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The processor's own instruction set, and the portable kernels."""
    if request.param == "generic":
        monkeypatch.setenv("MORI_CPU_ISA", "generic")
    return request.param


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the thread count back."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def codes(*shape: int, code: int = ONE) -> Tensor:
    return torch.full(shape, code, dtype=torch.uint8).view(E4M3)


def scales(*shape: int, byte: int = 127) -> Tensor:
    return torch.full(shape, byte, dtype=torch.uint8)


def raw_gemm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    return ops.mxfp8_raw(a, b, a_scale, b_scale, out_dtype=torch.float32)


def assert_float64(result: Tensor, operands: tuple[Tensor, ...], quant: str) -> None:
    """Every fp32 element within RELATIVE_L2 of its sum of magnitudes; NaN and infinities where float64 rounded to fp32 has them."""
    expected = reference.scaled_gemm(*operands, quant)
    magnitudes = [t.view(torch.uint8).bitwise_and(0x7F).view(E4M3) if t.dtype == E4M3 else t for t in operands]
    magnitudes = [t.abs() if t.dtype == torch.float32 else t for t in magnitudes]
    limit = RELATIVE_L2[torch.float32] * reference.scaled_gemm(*magnitudes, quant) + 1e-44
    rounded = expected.to(torch.float32)
    assert torch.equal(result.isnan(), rounded.isnan())
    assert torch.equal(result[rounded.isinf()], rounded[rounded.isinf()])
    finite = rounded.isfinite()
    assert ((result.double() - expected).abs() <= limit)[finite].all()


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=str)
def test_gemm_is_the_float64_product(shape: tuple[int, int, int], quant: str, isa: str) -> None:
    m, n, k = shape
    operands = gemm_operands(m, n, k, quant, seed=sum(shape))
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
    assert_close(ops.scaled_gemm(*operands, quant, out_dtype=torch.float32), reference.scaled_gemm(*operands, quant))
    assert_close(
        ops.scaled_gemm(*operands, quant, bias=bias, out_dtype=torch.float32),
        reference.scaled_gemm(*operands, quant, bias=bias),
    )


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("k", [1024, 1056, 2048, 6176])
def test_long_sums_keep_fp32_accuracy(k: int, quant: str, isa: str) -> None:
    operands = gemm_operands(7, 45, k, quant, seed=k)
    assert_close(ops.scaled_gemm(*operands, quant, out_dtype=torch.float32), reference.scaled_gemm(*operands, quant))


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES], ids=str)
def test_one_rounding_to_each_output_dtype(quant: str, bias_dtype: torch.dtype | None, isa: str) -> None:
    operands = gemm_operands(6, 70, 320, quant, seed=3)
    bias = None if bias_dtype is None else torch.randn(70, generator=torch.Generator().manual_seed(4)).to(bias_dtype)
    full = ops.scaled_gemm(*operands, quant, bias=bias, out_dtype=torch.float32)
    assert_close(full, reference.scaled_gemm(*operands, quant, bias=bias))
    for dtype in (torch.bfloat16, torch.float16):
        assert same_bits(ops.scaled_gemm(*operands, quant, bias=bias, out_dtype=dtype), full.to(dtype))
    assert ops.scaled_gemm(*operands, quant).dtype == torch.bfloat16


def test_ops_and_python_functions_agree_with_scaled_gemm() -> None:
    raw, packed = gemm_operands(9, 40, 96), gemm_operands(9, 40, 96, "mxfp8")
    expected = ops.scaled_gemm(*raw, "mxfp8_raw")
    assert same_bits(ops.mxfp8_raw(*raw), expected)
    assert same_bits(mori_ops.mxfp8_raw(*raw), expected)
    assert same_bits(mori_ops.mxfp8(*packed), ops.scaled_gemm(*packed, "mxfp8"))
    assert same_bits(mori_ops.scaled_gemm(*raw, "mxfp8_raw"), expected)


@pytest.mark.parametrize("shape", [(1, 33, 64), (63, 40, 96), (64, 64, 128), (65, 70, 1408), (130, 129, 32)], ids=str)
def test_packed_and_raw_scales_give_the_same_bits(shape: tuple[int, int, int], isa: str) -> None:
    a, b, a_scale, b_scale = gemm_operands(*shape, seed=5)
    packed = reference.mxfp8_pack_a_scale(a_scale), reference.mxfp8_pack_b_scale(b_scale)
    for dtype in DTYPES:
        assert same_bits(ops.mxfp8(a, b, *packed, out_dtype=dtype), ops.mxfp8_raw(a, b, a_scale, b_scale, out_dtype=dtype))


def test_uint8_scales_are_the_same_bytes() -> None:  # N7
    a, b, a_scale, b_scale = gemm_operands(5, 33, 64)
    as_bytes = ops.mxfp8_raw(a, b, a_scale.view(torch.uint8), b_scale.view(torch.uint8))
    assert same_bits(as_bytes, ops.mxfp8_raw(a, b, a_scale, b_scale))
    one_block = raw_gemm(codes(1, 32), codes(1, 32), scales(1, 1, byte=122), scales(1, 1))
    assert one_block.item() == 32 * 2**-5


@pytest.mark.parametrize("quant", ["mxfp8", "mxfp8_raw"])
def test_portable_and_native_kernels_give_the_same_bits(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = gemm_operands(11, 67, 2080, quant, seed=6)
    native = ops.scaled_gemm(*operands, quant, out_dtype=torch.float32)
    monkeypatch.setenv("MORI_CPU_ISA", "generic")
    assert same_bits(ops.scaled_gemm(*operands, quant, out_dtype=torch.float32), native)


# --- numerics of the public reports --------------------------------------------------------------------------------------


def test_every_code_decodes_to_its_value_and_negative_zero_is_zero(isa: str) -> None:  # N10
    every = torch.arange(256, dtype=torch.uint8)
    for side in ("a", "b"):
        a, b = codes(256, 32, code=0), codes(256, 32, code=0)
        (a if side == "a" else b).view(torch.uint8)[:, 5] = every
        (b if side == "a" else a).view(torch.uint8)[:, 5] = ONE
        out = raw_gemm(a, b, scales(256, 1), scales(8, 1))
        values = out[:, 0] if side == "a" else out[0]
        expected = reference.e4m3_value(every)
        assert torch.equal(values.isnan(), expected.isnan())
        assert sorted(every[values.isnan()].tolist()) == list(NAN_CODES)
        assert torch.equal(values[~values.isnan()].double(), expected[~expected.isnan()])


def test_blockscale_scales_are_not_cut_to_powers_of_two(isa: str) -> None:  # N12
    out = ops.scaled_gemm(codes(2, 128), codes(3, 128), torch.full((2, 1), 1.5), torch.full((1, 1), 1.25), "blockscale")
    assert (out == 240).all()
    with pytest.raises(ValueError, match="mxfp8_raw: a_scale must be float8_e8m0fnu or uint8, got float32"):
        ops.mxfp8_raw(codes(2, 128), codes(3, 128), torch.full((2, 4), 1.5), scales(1, 4))
    assert (raw_gemm(codes(2, 128), codes(3, 128), scales(2, 4), scales(1, 4)) == 128).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_one_large_product_keeps_4095_small_ones(quant: str, isa: str) -> None:
    a, b = codes(1, 4096), codes(33, 4096)
    a.view(torch.uint8)[:, 77] = MOST
    b.view(torch.uint8)[:, 77] = MOST
    a_scale, b_scale = {
        "mxfp8_raw": (scales(1, 128), scales(2, 128)),
        "mxfp8": (reference.mxfp8_pack_a_scale(scales(1, 128)), reference.mxfp8_pack_b_scale(scales(2, 128))),
        "ptpc": (torch.ones(1), torch.ones(33)),
        "blockscale": (torch.ones(1, 32), torch.ones(1, 32)),
    }[quant]
    exact = 448 * 448 + 4095
    assert (ops.scaled_gemm(a, b, a_scale, b_scale, quant, out_dtype=torch.float32) == exact).all()
    assert (ops.scaled_gemm(a, b, a_scale, b_scale, quant) == torch.tensor(float(exact)).bfloat16()).all()


@pytest.mark.cpu  # elsewhere within one kernel: test_public_reports.py, N14
@pytest.mark.parametrize("quant", QUANTS)
def test_a_rows_bits_do_not_depend_on_the_batch(quant: str, isa: str) -> None:  # N14
    k, n = 1120, 70
    a, b, a_scale, b_scale = gemm_operands(330, n, k, "mxfp8_raw" if quant == "mxfp8" else quant, seed=8)

    def product(rows: Tensor) -> Tensor:
        left = a_scale[rows]
        if quant == "mxfp8":
            scale = (reference.mxfp8_pack_a_scale(left), reference.mxfp8_pack_b_scale(b_scale))
        else:
            scale = (left, b_scale)
        return ops.scaled_gemm(a[rows], b, *scale, quant, out_dtype=torch.float32)

    alone = product(torch.tensor([0]))[0]
    for m in (2, 3, 4, 5, 6, 8, 9, 11, 16, 17, 64, 330):
        for position in (0, m - 1):
            rows = torch.arange(1, m + 1).clamp(max=329)
            rows[position] = 0
            assert same_bits(product(rows)[position], alone), f"M = {m}, row {position}"


@pytest.mark.cpu
@pytest.mark.parametrize("quant", ["mxfp8_raw", "ptpc"])
@pytest.mark.parametrize("odd", ["nan code", "huge scale", "tiny scale", "nan scale"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_an_odd_row_in_a_large_batch_changes_no_other_and_keeps_its_own_bits(side: str, odd: str, quant: str, isa: str) -> None:
    m, n, k = 40, 133, 352
    a, b, a_scale, b_scale = gemm_operands(m, n, k, quant, seed=9)
    values, scale = (a, a_scale) if side == "a" else (b, b_scale)
    if odd == "nan code":
        values.view(torch.uint8)[2, 70] = 0x7F
    elif quant == "ptpc":
        scale[2] = {"huge scale": 2.0**90, "tiny scale": 2.0**-90, "nan scale": float("nan")}[odd]
    else:
        scale.view(torch.uint8)[2, 3] = {"huge scale": 217, "tiny scale": 37, "nan scale": 255}[odd]
    batch = ops.scaled_gemm(a, b, a_scale, b_scale, quant, out_dtype=torch.float32)
    assert batch.isnan().any() == ("nan" in odd)
    alone = torch.cat([ops.scaled_gemm(a[i : i + 1], b, a_scale[i : i + 1], b_scale, quant, out_dtype=torch.float32) for i in range(m)])
    assert torch.equal(batch.isnan(), alone.isnan())
    assert same_bits(batch.nan_to_num(), alone.nan_to_num())


# --- extreme scales ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bytes_ab",
    [(0, 127), (127, 0), (0, 254), (254, 0), (254, 127), (0, 0), (254, 254), (91, 91), (127, 60), (165, 127), (166, 127), (59, 127)],
    ids=str,
)
@pytest.mark.parametrize("quant", ["mxfp8", "mxfp8_raw"])
def test_extreme_scales_are_exact(bytes_ab: tuple[int, int], quant: str, isa: str) -> None:
    """One block of three at the extreme; 448 * 2^127 and 2^-136 and their products with ordinary blocks."""
    m, n, k = 7, 40, 96
    a, b, a_scale, b_scale = gemm_operands(m, n, k, seed=9)
    a_scale.view(torch.uint8)[1, 1], b_scale.view(torch.uint8)[0, 1] = bytes_ab
    a_scale.view(torch.uint8)[:, 0] = 127
    scale = (a_scale, b_scale)
    if quant == "mxfp8":
        scale = reference.mxfp8_pack_a_scale(a_scale), reference.mxfp8_pack_b_scale(b_scale)
    operands = (a, b, *scale)
    assert_float64(ops.scaled_gemm(*operands, quant, out_dtype=torch.float32), operands, quant)


def test_large_blocks_that_cancel_leave_the_small_one(isa: str) -> None:
    a, b = codes(1, 96), codes(4, 96)
    b.view(torch.uint8)[:, 32:64] = 0xB8  # -1
    a_scale = torch.tensor([[254, 254, 127]], dtype=torch.uint8)
    assert (raw_gemm(a, b, a_scale, scales(1, 3)) == 32).all()


@pytest.mark.parametrize("byte", [0, 254])
def test_zero_blocks_contribute_nothing_whatever_their_scale(byte: int, isa: str) -> None:
    a, b, a_scale, b_scale = gemm_operands(6, 64, 96, seed=10)
    expected = None
    for mark in (127, byte):
        a.view(torch.uint8)[2:4, 32:64] = 0x80
        a_scale.view(torch.uint8)[2:4, 1] = mark
        b.view(torch.uint8)[:32, 64:] = 0
        b_scale.view(torch.uint8)[0, 2] = mark
        out = raw_gemm(a, b, a_scale, b_scale)
        expected = out if expected is None else expected
        assert same_bits(out, expected)


def test_nan_codes_and_scale_255_reach_exactly_their_rows_and_columns(isa: str) -> None:
    for code in NAN_CODES:
        a, b, a_scale, b_scale = gemm_operands(9, 75, 2112, seed=11)
        a.view(torch.uint8)[4, 2111] = code
        b.view(torch.uint8)[33, 1] = code
        b.view(torch.uint8)[74, 1500] = code
        out = raw_gemm(a, b, a_scale, b_scale)
        expected = torch.zeros(9, 75, dtype=torch.bool)
        expected[4], expected[:, 33], expected[:, 74] = True, True, True
        assert torch.equal(out.isnan(), expected)
    a, b, a_scale, b_scale = gemm_operands(9, 75, 96, seed=12)
    a.view(torch.uint8)[3, 32:64] = 0  # NaN even against and within zeros
    b.view(torch.uint8)[32:64, :32] = 0
    a_scale.view(torch.uint8)[3, 1] = 255
    b_scale.view(torch.uint8)[1, 0] = 255
    out = raw_gemm(a, b, a_scale, b_scale)
    expected = torch.zeros(9, 75, dtype=torch.bool)
    expected[3], expected[:, 32:64] = True, True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize("value", [0.0, -1.5, 1e-40, 3e38, 1e-30, float("inf"), float("nan")])
@pytest.mark.parametrize("quant", ["ptpc", "blockscale"])
def test_any_fp32_scale(value: float, quant: str, isa: str) -> None:
    for side in (2, 3):
        operands = list(gemm_operands(6, 140, 160, quant, seed=13))
        operands[side].view(-1)[1] = value
        assert_float64(ops.scaled_gemm(*operands, quant, out_dtype=torch.float32), tuple(operands), quant)


@pytest.mark.parametrize("quant", QUANTS)
def test_results_do_not_depend_on_flushed_subnormals(quant: str, isa: str, threads: None) -> None:
    """The smallest codes are fp32 subnormals inside a kernel, byte 0 is one outside."""
    torch.set_num_threads(1)
    operands = gemm_operands(5, 40, 128, quant, seed=14)
    operands[0].view(torch.uint8)[0] &= 0x83
    operands[1].view(torch.uint8)[:33] &= 0x83
    if quant == "mxfp8_raw":
        operands[2].view(torch.uint8)[1, 0], operands[3].view(torch.uint8)[:, 0] = 0, 254
    expected = ops.scaled_gemm(*operands, quant, out_dtype=torch.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert same_bits(ops.scaled_gemm(*operands, quant, out_dtype=torch.float32), expected)
    finally:
        torch.set_flush_denormal(False)


# --- shapes and strides --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("n", [1, 33, 768, 2112])
@pytest.mark.parametrize("k", [64, 192, 576])
def test_shards_smaller_than_a_block(n: int, k: int, quant: str) -> None:  # S10
    operands = gemm_operands(3, n, k, quant, seed=n + k)
    assert_close(ops.scaled_gemm(*operands, quant, out_dtype=torch.float32), reference.scaled_gemm(*operands, quant))


def test_k_of_one_block_keeps_the_bias(isa: str) -> None:  # S5
    out = ops.mxfp8_raw(codes(128, 32), codes(128, 32), scales(128, 1), scales(4, 1), bias=torch.full((128,), 7.0))
    assert (out == 39).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_empty_dimensions(quant: str, isa: str) -> None:  # S3
    for m, n, k in ((0, 40, 64), (4, 0, 64), (0, 0, 64), (4, 40, 0)):
        operands = gemm_operands(m, n, k, quant)
        out = ops.scaled_gemm(*operands, quant, out_dtype=torch.float16)
        assert out.shape == (m, n)
        assert out.dtype == torch.float16
        assert (out == 0).all()
        bias = torch.arange(n, dtype=torch.float32)
        assert torch.equal(ops.scaled_gemm(*operands, quant, bias=bias), bias.bfloat16().expand(m, n))
    operands = gemm_operands(4, 40, 64, quant)
    assert_close(ops.scaled_gemm(*operands, quant, out_dtype=torch.float32), reference.scaled_gemm(*operands, quant))


def test_leading_dimensions_are_rows(isa: str) -> None:
    for quant in QUANTS:
        a, b, a_scale, b_scale = gemm_operands(24, 33, 128, quant)
        flat = ops.scaled_gemm(a, b, a_scale, b_scale, quant)
        left = a_scale if quant == "mxfp8" else a_scale.view(2, 3, 4, *a_scale.shape[1:])
        assert same_bits(ops.scaled_gemm(a.view(2, 3, 4, 128), b, left, b_scale, quant), flat.view(2, 3, 4, 33))
    a, b, a_scale, b_scale = gemm_operands(1, 33, 128)
    assert same_bits(ops.mxfp8_raw(a[0], b, a_scale[0], b_scale), ops.mxfp8_raw(a, b, a_scale, b_scale)[0])


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every other column": lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2],
    "every other row": lambda t: torch.stack((t, t), 1).flatten(0, 1)[::2],
    "middle of a wider base": lambda t: torch.cat((t, t, t), -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "misaligned": lambda t: torch.cat((t[:, :1], t), -1)[:, 1:],
}


@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("position", range(4))
def test_strided_inputs_give_the_bits_of_contiguous_ones(position: int, layout: str) -> None:  # S7
    for quant in ("mxfp8_raw", "blockscale"):
        operands = list(gemm_operands(9, 40, 256, quant, seed=15))
        expected = ops.scaled_gemm(*operands, quant)
        original = operands[position]
        plain = original if original.dtype == torch.float32 else original.view(torch.uint8)
        strided = STRIDED[layout](plain)
        assert torch.equal(strided, plain)
        operands[position] = strided if original.dtype == torch.float32 else strided.view(original.dtype)
        assert same_bits(ops.scaled_gemm(*operands, quant), expected)


def test_expanded_inputs_give_the_bits_of_contiguous_ones() -> None:  # S9
    a, b, a_scale, b_scale = gemm_operands(1, 40, 64)
    expanded = a.expand(8, 64), b, a_scale.expand(8, 2), b_scale
    assert same_bits(ops.mxfp8_raw(*expanded), ops.mxfp8_raw(*(t.contiguous() for t in expanded)))
    a, b, _, b_scale = gemm_operands(8, 40, 64, "ptpc")
    scale = torch.tensor(0.37)
    expected = ops.scaled_gemm(a, b, torch.full((8,), 0.37), b_scale, "ptpc", bias=torch.full((40,), 0.37))
    assert same_bits(ops.scaled_gemm(a, b, scale.expand(8), b_scale, "ptpc", bias=scale.expand(40)), expected)


def test_offsets_beyond_2_31(isa: str) -> None:
    """Rows of the weight that start 2^31 bytes in; the others are pages that are never touched."""
    if isa == "generic":
        pytest.skip("the offsets are computed in the shared driver")
    k = 1 << 20
    n = (1 << 31) // k + 3
    weight = torch.zeros(n, k, dtype=torch.uint8)  # untouched pages cost no memory
    a = random_codes(1, k, generator=torch.Generator().manual_seed(16))
    weight[-2:] = random_codes(2, k, generator=torch.Generator().manual_seed(17)).view(torch.uint8)
    b_scale = scales(-(-n // 32), k // 32, byte=115)
    out = raw_gemm(a, weight.view(E4M3), scales(1, k // 32, byte=115), b_scale)
    assert_float64(out[:, -2:], (a, weight[-2:].view(E4M3), scales(1, k // 32, byte=115), b_scale[-1:]), "mxfp8_raw")
    assert (out[:, :-2] == 0).all()


# --- determinism, out=, refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", QUANTS)
def test_bits_repeat_and_do_not_depend_on_the_thread_count(quant: str, isa: str, threads: None) -> None:
    operands = gemm_operands(70, 200, 1056, quant, seed=18)
    torch.set_num_threads(1)
    first = ops.scaled_gemm(*operands, quant, out_dtype=torch.float32)
    for count in (2, 2, 3):
        torch.set_num_threads(count)
        assert same_bits(ops.scaled_gemm(*operands, quant, out_dtype=torch.float32), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_overwrites_every_element(dtype: torch.dtype, isa: str) -> None:
    bias = torch.randn(45, generator=torch.Generator().manual_seed(19))
    poisoned = lambda: torch.full((7, 45), float("nan"), dtype=dtype)  # noqa: E731
    for quant in QUANTS:
        operands, out = gemm_operands(7, 45, 96, quant, seed=20), poisoned()
        assert ops.scaled_gemm.out(*operands, quant, bias=bias, out=out) is None
        assert same_bits(out, ops.scaled_gemm(*operands, quant, bias=bias, out_dtype=dtype))
    for op, quant in ((ops.mxfp8, "mxfp8"), (ops.mxfp8_raw, "mxfp8_raw")):
        operands, out = gemm_operands(7, 45, 96, quant, seed=20), poisoned()
        op.out(*operands, out=out)
        assert same_bits(out, op(*operands, out_dtype=dtype))
    _, b, _, b_scale = gemm_operands(7, 45, 96, seed=20)
    x, out = torch.randn(7, 96, generator=torch.Generator().manual_seed(21)), poisoned()
    ops.mxfp8_linear.out(x, b, b_scale, bias=bias, out=out)
    assert same_bits(out, ops.mxfp8_linear(x, b, b_scale, bias=bias, out_dtype=dtype))


def refusals() -> list[tuple[str, dict[str, object], str]]:
    """(quant, replaced arguments, text) around a valid call with M 8, N 40, K 64."""
    good = "mxfp8_raw"
    return [
        (good, {"a": torch.zeros(8, 64)}, "a must be float8_e4m3fn, got float32 \\[8, 64\\]"),
        (good, {"a": codes(8, 64).view(torch.float8_e5m2)}, "a must be float8_e4m3fn, got float8_e5m2"),
        (good, {"b": codes(40, 64).view(torch.float8_e4m3fnuz)}, "b must be float8_e4m3fn, got float8_e4m3fnuz"),
        (good, {"a": codes(8, 63)}, "K, the last dimension of a, must be a multiple of 32, got float8_e4m3fn \\[8, 63\\]"),
        (good, {"b": codes(40, 96)}, "b must have the K of a, 64, got float8_e4m3fn \\[40, 96\\]"),
        (good, {"b": codes(2, 40, 64)}, "b must be \\[N, K\\], got float8_e4m3fn \\[2, 40, 64\\]"),
        (good, {"a_scale": scales(7, 2)}, "a_scale must have shape \\[8, 2\\]"),
        (good, {"a_scale": scales(8, 1)}, "a_scale must have shape \\[8, 2\\]"),
        (good, {"b_scale": scales(1, 2)}, "b_scale must have shape \\[2, 2\\] \\(ceil\\(N/32\\), K/32\\)"),
        (good, {"b_scale": torch.ones(2, 2)}, "b_scale must be float8_e8m0fnu or uint8, got float32"),
        (good, {"bias": torch.zeros(39)}, "bias must have shape \\[40\\]"),
        (good, {"bias": torch.zeros(40, dtype=torch.float64)}, "bias must be float32 or bfloat16 or float16, got float64"),
        ("mxfp8", {"a_scale": torch.zeros(16, dtype=torch.int32)}, "a_scale must have shape \\[32\\] \\(packed"),
        ("mxfp8", {"b_scale": torch.zeros(4, dtype=torch.uint8)}, "b_scale must be int32, got uint8"),
        ("ptpc", {"a_scale": torch.ones(9)}, "a_scale must have shape \\[8\\]"),
        ("ptpc", {"b_scale": torch.ones(40).double()}, "b_scale must be float32, got float64"),
        ("blockscale", {"b_scale": torch.ones(1, 2)}, "b_scale must have shape \\[1, 1\\]"),
        (good, {"quant": "mxfp4"}, "quant must be 'ptpc', 'blockscale', 'mxfp8' or 'mxfp8_raw', got 'mxfp4'"),
    ]


@pytest.mark.parametrize(("quant", "replaced", "text"), refusals(), ids=[f"{i}" for i in range(len(refusals()))])
def test_refused_inputs_are_named_and_nothing_is_written(quant: str, replaced: dict[str, object], text: str) -> None:
    names = ("a", "b", "a_scale", "b_scale")
    arguments = {**dict(zip(names, gemm_operands(8, 40, 64, quant), strict=True)), "quant": quant, "bias": None, **replaced}
    out = torch.full((8, 40), 123.0)
    with pytest.raises(ValueError, match=f"scaled_gemm: {text}"):
        ops.scaled_gemm(**arguments, out_dtype=torch.float32)
    with pytest.raises(ValueError, match=f"scaled_gemm: {text}"):
        ops.scaled_gemm.out(**arguments, out=out)
    assert (out == 123).all()


def test_refused_outputs_are_named_and_nothing_is_written() -> None:
    operands = gemm_operands(8, 40, 64)
    with pytest.raises(ValueError, match="mxfp8_raw: out_dtype must be bfloat16, float16 or float32, got float64"):
        ops.mxfp8_raw(*operands, out_dtype=torch.float64)
    for out, text in (
        (torch.full((8, 41), 123.0), "out must have shape \\[8, 40\\]"),
        (torch.full((8, 40), 123.0, dtype=torch.float64), "out must be bfloat16 or float16 or float32, got float64"),
        (torch.full((40, 8), 123.0).t(), "out must be contiguous"),
    ):
        with pytest.raises(ValueError, match=f"mxfp8_raw: {text}"):
            ops.mxfp8_raw.out(*operands, out=out)
        assert (out == 123).all()
    memory = torch.zeros(8 * 64 * 4, dtype=torch.uint8)
    a, out = memory[: 8 * 64].view(8, 64).view(E4M3), memory[: 8 * 40 * 4].view(torch.float32).view(8, 40)
    with pytest.raises(ValueError, match="mxfp8_raw: out must not share memory with an input"):
        ops.mxfp8_raw.out(a, *operands[1:], out=out)


# --- mxfp8_linear and routes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_is_quantise_then_gemm(dtype: torch.dtype, rounding: str, isa: str) -> None:
    _, b, _, b_scale = gemm_operands(1, 45, 160, seed=22)
    base = torch.randn(2, 160, 5, generator=torch.Generator().manual_seed(23)).to(dtype)
    bias = torch.randn(45, generator=torch.Generator().manual_seed(24)).to(dtype)
    for x in (base.transpose(1, 2), base.transpose(1, 2).contiguous()):
        quantised, scale = ops.mxfp8_quantize(x, rounding=rounding)
        result = ops.mxfp8_linear(x, b, b_scale, bias=bias, rounding=rounding)
        assert result.dtype == dtype
        assert same_bits(result, ops.mxfp8_raw(quantised, b, scale, b_scale, bias=bias, out_dtype=dtype))
    full = ops.mxfp8_linear(base.transpose(1, 2), b, b_scale, rounding=rounding, out_dtype=torch.float32)
    assert_close(full, reference.mxfp8_linear(base.transpose(1, 2), b, b_scale, rounding=rounding))


def test_linear_is_near_the_unquantised_layer() -> None:
    generator = torch.Generator().manual_seed(25)
    x, w = torch.randn(6, 512, generator=generator), torch.randn(70, 512, generator=generator)
    b, b_scale = reference.mxfp8_quantize_weight(w)
    assert relative_l2(ops.mxfp8_linear(x, b, b_scale), x @ w.t()) < 0.06


def test_linear_handles_empty_and_refused_inputs() -> None:
    _, b, _, b_scale = gemm_operands(1, 40, 64)
    assert ops.mxfp8_linear(torch.zeros(0, 64), b, b_scale).shape == (0, 40)
    with pytest.raises(ValueError, match="mxfp8_linear: x must be float32 or bfloat16 or float16, got float64"):
        ops.mxfp8_linear(torch.zeros(2, 64, dtype=torch.float64), b, b_scale)
    with pytest.raises(ValueError, match="mxfp8_linear: rounding must be 'rceil' or 'floor', got 'up'"):
        ops.mxfp8_linear(torch.zeros(2, 64), b, b_scale, rounding="up")
    with pytest.raises(ValueError, match="mxfp8_linear: b must have the K of x, 96"):
        ops.mxfp8_linear(torch.zeros(2, 96), b, b_scale)


@pytest.mark.parametrize("op", ["mxfp8", "mxfp8_raw", "mxfp8_linear", "scaled_gemm"])
def test_route_names_the_kernel_of_every_size(op: str) -> None:
    few, some, most, many = (ops._route(op, "cpu", [m, 5120, 2048]) for m in (5, 6, 11, 12))
    assert few.startswith("one pass\t")
    assert some.startswith("token groups\t")
    assert most.startswith("token groups\t")
    assert many.startswith("panels\t")


def test_random_scales_hold_the_range_of_the_fast_kernels() -> None:
    """The shared inputs must not fall onto the float64 path, which would leave the kernels untested."""
    byte = random_scales(64, 64).view(torch.uint8)
    assert byte.min() >= 127 - 34
    assert byte.max() <= 127 + 19
