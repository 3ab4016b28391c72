"""MXFP8 quantise, dequantise and scale packing: exact codes and scales against float64 and against other people's formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import mori_ops  # noqa: F401  (registers the operators)
from mori_ops import reference
from tests.cases import DTYPES, random_codes, same_bits

ops = torch.ops.mori
ROUNDINGS = ("rceil", "floor")
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


@pytest.fixture(params=["native", "generic"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The processor's own instruction set, and the portable kernels."""
    if request.param == "generic":
        monkeypatch.setenv("MORI_CPU_ISA", "generic")
    return request.param


@contextmanager
def flushing_subnormals() -> Iterator[None]:
    """The calling thread flushes fp32 subnormals, as some engines set it."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the thread count back."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def bytes_of(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


def block(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """One row of 32: the values, then zeros."""
    return torch.tensor([*values, *[0.0] * (32 - len(values))], dtype=torch.float64).to(dtype)[None]


def random_bits(rows: int, k: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Every bit pattern of the format, NaN and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integer)
    return torch.randint(info.min, info.max + 1, (rows, k), generator=generator, dtype=torch.int64).to(integer).view(dtype)


def random_blocks(rows: int, k: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Blocks over the whole exponent range of the format, 24 binades wide inside, a third of the values on ties of e4m3."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (-24, 15) if dtype == torch.float16 else (-140, 127)
    top = torch.randint(low, high + 1, (rows, k // 32, 1), generator=generator).double()
    inside = torch.randint(0, 24, (rows, k // 32, 32), generator=generator).double()
    significand = 1 + torch.rand(rows, k // 32, 32, generator=generator, dtype=torch.float64)
    tie = torch.rand(rows, k // 32, 32, generator=generator) < 1 / 3
    significand = torch.where(tie, (significand * 16).round() / 16, significand)
    sign = torch.randint(0, 2, inside.shape, generator=generator) * 2 - 1
    return (sign * significand * torch.exp2(top - inside)).flatten(1).to(dtype)


def assert_quantized(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    (codes, scale), (expected_codes, expected_scale) = result, expected
    assert codes.dtype == E4M3 and scale.dtype == E8M0
    assert codes.is_contiguous() and scale.is_contiguous()
    assert same_bits(scale, expected_scale), "scale bytes differ"
    assert same_bits(codes, expected_codes), "codes differ"


# ---- Exactness ----


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [random_bits, random_blocks])
def test_rows_are_exact_over_the_whole_range(inputs, dtype: torch.dtype, rounding: str, isa: str) -> None:
    x = inputs(512, 320, dtype)
    assert_quantized(ops.mxfp8_quantize(x, rounding=rounding), reference.mxfp8_quantize(x, rounding=rounding))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", [(1, 32), (31, 64), (32, 32), (33, 96), (40, 2080), (129, 4128)])
def test_weights_are_exact_with_partial_edge_blocks(n: int, k: int, dtype: torch.dtype, rounding: str, isa: str) -> None:
    w = random_blocks(n, k, dtype, seed=n)
    w[-1, -32:] *= 0.125  # S10: the edge block's scale comes from its real rows alone
    assert_quantized(ops.mxfp8_quantize_weight(w, rounding=rounding), reference.mxfp8_quantize_weight(w, rounding=rounding))


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantise_is_exact_in_a_thread_that_flushes_subnormals(dtype: torch.dtype, isa: str) -> None:
    x = random_blocks(256, 320, dtype, seed=5)
    with flushing_subnormals():
        rows, weight = ops.mxfp8_quantize(x), ops.mxfp8_quantize_weight(x)
    assert_quantized(rows, reference.mxfp8_quantize(x))
    assert_quantized(weight, reference.mxfp8_quantize_weight(x))


@pytest.mark.parametrize("scale", [119, 0, 3, 246], ids=lambda byte: f"scale{byte}")
def test_elements_round_to_nearest_even_beside_every_code_and_every_tie(scale: int, isa: str) -> None:
    values = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).to(torch.float64)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2]).repeat_interleave(3)
    exact = torch.stack([points, points], 0) * torch.tensor([[1.0], [-1.0]], dtype=torch.float64) * 2.0 ** (scale - 127)
    x = exact.flatten().to(torch.float32)
    x[0::3] = torch.nextafter(x[0::3], torch.tensor(-math.inf))
    x[1::3] = torch.nextafter(x[1::3], torch.tensor(math.inf))
    x = x[x.abs() <= 448 * 2.0 ** (scale - 127)]
    rows = torch.zeros(-(-x.numel() // 31), 32)
    rows[:, 0] = 448 * 2.0 ** (scale - 127)  # fixes the block's scale
    rows[:, 1:] = torch.nn.functional.pad(x, (0, rows.shape[0] * 31 - x.numel())).view(-1, 31)
    codes, byte = ops.mxfp8_quantize(rows)
    assert (bytes_of(byte) == scale).all()
    assert_quantized((codes, byte), reference.mxfp8_quantize(rows))


@pytest.mark.cpu
def test_codes_are_those_of_ml_dtypes(isa: str) -> None:
    x = random_blocks(256, 320, torch.float32, seed=7)
    codes, scale = ops.mxfp8_quantize(x)
    quotient = x.double().numpy() / np.repeat(bytes_of(scale).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=-1)
    assert torch.equal(bytes_of(codes), torch.from_numpy(quotient.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)))


@pytest.mark.cpu
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_are_those_of_torchao(dtype: torch.dtype, rounding: str, isa: str) -> None:
    """Two differences. torchao divides by at least 2^-126, also where it stores byte 0, which decodes as 2^-127: its codes
    of such a block are half of what they stand for. A block with an infinity gets a finite scale there, byte 255 here."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    x = random_blocks(512, 320, dtype, seed=13)
    mode = ScaleCalculationMode.RCEIL if rounding == "rceil" else ScaleCalculationMode.FLOOR
    theirs_scale, theirs_codes = to_mx(x, E4M3, 32, mode)
    codes, scale = ops.mxfp8_quantize(x, rounding=rounding)
    assert torch.equal(bytes_of(scale), bytes_of(theirs_scale).view(scale.shape))
    same_policy = (bytes_of(scale) != 0).repeat_interleave(32, 1)
    assert same_policy.float().mean() > 0.9
    assert torch.equal(bytes_of(codes)[same_policy], bytes_of(theirs_codes).view(codes.shape)[same_policy])


# ---- Reports of users of such libraries: see the named block of the list in the test's name ----

# amax, (byte, code) for floor, (byte, code) for rceil
ORACLE_TABLE = [
    (0.0, (0, 0x00), (0, 0x00)),
    (1.0, (119, 0x78), (119, 0x78)),
    (1.75, (119, 0x7E), (119, 0x7E)),
    (240.0, (126, 0x7E), (127, 0x77)),
    (448.0, (127, 0x7E), (127, 0x7E)),
    (450.0, (127, 0x7E), (128, 0x76)),
    (957.0, (128, 0x7E), (129, 0x77)),
    (2.0**-120, (0, 0x70), (0, 0x70)),
    (2.0**-126, (0, 0x40), (0, 0x40)),
    (2.0**-133, (0, 0x08), (0, 0x08)),
    (448 * 2.0**10 * (1 + 2.0**-23), (137, 0x7E), (138, 0x76)),
    (3.3895e38, (246, 0x7E), (247, 0x78)),
    (0.3, (117, 0x7A), (117, 0x7A)),
]


@pytest.mark.parametrize("amax, floor, rceil", ORACLE_TABLE, ids=[f"{row[0]:.4g}" for row in ORACLE_TABLE])
@pytest.mark.parametrize("weight", [False, True], ids=["rows", "weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_oracle_table_n3_n4_n9(amax: float, floor, rceil, dtype: torch.dtype, weight: bool, isa: str) -> None:
    x = block(amax, dtype=dtype)
    if dtype == torch.bfloat16 and amax == 448 * 2.0**10 * (1 + 2.0**-23):
        rceil = (137, 0x7E)  # bf16 makes it 448 * 2^10
    quantize = ops.mxfp8_quantize_weight if weight else ops.mxfp8_quantize
    for rounding, (byte, code) in (("floor", floor), ("rceil", rceil)):
        codes, scale = quantize(x, rounding=rounding)
        assert bytes_of(scale).item() == byte
        assert bytes_of(codes)[0].tolist() == [code, *[0] * 31]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiny_inputs_never_become_nan_n1(dtype: torch.dtype, isa: str) -> None:
    x = block(2.8094e-36, 9.18e-40, dtype=torch.bfloat16).to(dtype)
    for rounding, byte, code in (("rceil", 1, 0x77), ("floor", 0, 0x7E)):
        codes, scale = ops.mxfp8_quantize(x, rounding=rounding)
        assert bytes_of(scale).item() == byte and bytes_of(codes)[0, 0].item() == code
        assert_quantized((codes, scale), reference.mxfp8_quantize(x, rounding=rounding))


def test_tiny_inputs_under_flushing_n1(isa: str) -> None:
    x = block(2.8094e-36, 9.18e-40, 2.0**-133, dtype=torch.bfloat16)
    with flushing_subnormals():
        codes, scale = ops.mxfp8_quantize(x)
        value = ops.mxfp8_dequantize(codes, scale, out_dtype=torch.float32)
    assert bytes_of(scale).item() == 1 and bytes_of(codes)[0, :4].tolist() == [0x77, 0x1A, 0x04, 0x00]
    assert torch.equal(value.double(), reference.mxfp8_dequantize(codes, scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_block_with_nan_or_infinity_is_nan_as_a_whole_n4(bad: float, dtype: torch.dtype, rounding: str, isa: str) -> None:
    x = torch.ones(3, 96, dtype=dtype)
    x[1, 40] = bad
    codes, scale = ops.mxfp8_quantize(x, rounding=rounding)
    assert bytes_of(scale).tolist() == [[119] * 3, [119, 255, 119], [119] * 3]
    assert (bytes_of(codes)[1, 32:64] == 0x7F).all()
    assert ops.mxfp8_dequantize(codes, scale).isnan().nonzero().tolist() == [[1, k] for k in range(32, 64)]
    codes, scale = ops.mxfp8_quantize_weight(x, rounding=rounding)
    assert bytes_of(scale).tolist() == [[119, 255, 119]]
    assert torch.equal(ops.mxfp8_dequantize(codes, scale)[:, :32], torch.ones(3, 32, dtype=torch.bfloat16))
    assert ops.mxfp8_dequantize(codes, scale)[:, 32:64].isnan().all()


def test_zero_blocks_are_exact_and_keep_their_sign_n5(isa: str) -> None:
    w = torch.zeros(256, 256)
    w[0, 0] = 1.0
    w[64:96] = -0.0
    codes, scale = ops.mxfp8_quantize_weight(w)
    assert same_bits(ops.mxfp8_dequantize(codes, scale, out_dtype=torch.float32), w)
    assert bytes_of(scale).flatten().tolist() == [119, *[0] * 63]
    codes, scale = ops.mxfp8_quantize(w)
    assert same_bits(ops.mxfp8_dequantize(codes, scale, out_dtype=torch.float32), w)


def test_uint8_scales_are_exponents_n7(isa: str) -> None:
    codes = torch.full((1, 32), 0x38, dtype=torch.uint8).view(E4M3)
    value = ops.mxfp8_dequantize(codes, torch.tensor([[122]], dtype=torch.uint8))
    assert (value == 0.03125).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_floor_saturates_n8(dtype: torch.dtype, isa: str) -> None:
    codes, scale = ops.mxfp8_quantize(block(510, 464, 450, -510, dtype=dtype), rounding="floor")
    assert bytes_of(scale).item() == 127
    assert bytes_of(codes)[0, :5].tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x00]


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_zero_and_subnormal_codes_n10(dtype: torch.dtype, isa: str) -> None:
    codes, scale = ops.mxfp8_quantize(block(448, 2.0**-9, 2.0**-10, 3 * 2.0**-11, -(2.0**-11), -0.0, dtype=dtype))
    assert bytes_of(scale).item() == 127
    assert bytes_of(codes)[0, :6].tolist() == [0x7E, 0x01, 0x00, 0x01, 0x80, 0x80]


@pytest.mark.parametrize("position", [0, 15, 16, 31])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_depends_on_its_own_block_only_i12(dtype: torch.dtype, position: int, isa: str) -> None:
    x = torch.full((2, 96), 3000.0)
    x[:, 32:64] = 0.25
    x[:, 32 + position] = 3.0
    _, scale = ops.mxfp8_quantize(x.to(dtype))
    assert bytes_of(scale)[:, 1].tolist() == [120, 120]


@pytest.mark.parametrize("rows", [65_535, 65_536, 131_073])
def test_more_rows_than_a_grid_dimension_s2(rows: int) -> None:
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).bfloat16()
    codes, scale = ops.mxfp8_quantize(x)
    expected_codes, expected_scale = reference.mxfp8_quantize(x[-100:])
    assert same_bits(codes[-100:], expected_codes) and same_bits(scale[-100:], expected_scale)
    assert same_bits(ops.mxfp8_dequantize(codes, scale)[-1], reference.mxfp8_dequantize(codes[-1:], scale[-1:], out_dtype=torch.bfloat16)[0])


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (4, 0), (0, 0), (0,)])
def test_empty_inputs_give_empty_results_s3(shape: tuple[int, ...], isa: str) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    codes, scale = ops.mxfp8_quantize(x)
    assert codes.shape == shape and scale.shape == (*shape[:-1], shape[-1] // 32)
    assert ops.mxfp8_dequantize(codes, scale).shape == shape
    assert ops.mxfp8_pack_a_scale(scale).numel() == -(-math.prod(shape[:-1]) // 64) * 16 * (shape[-1] // 32)
    if len(shape) == 2:
        codes, scale = ops.mxfp8_quantize_weight(x)
        assert codes.shape == shape and scale.shape == (-(-shape[0] // 32), shape[1] // 32)
        assert ops.mxfp8_dequantize(codes, scale).shape == shape
        assert ops.mxfp8_pack_b_scale(scale).numel() == scale.numel()
    assert bytes_of(ops.mxfp8_quantize(torch.ones(1, 32))[1]).item() == 119  # a normal call afterwards


BASE = torch.randn(6, 64, 192, generator=torch.Generator().manual_seed(3))
VIEWS = {
    "transposed": lambda b: b[0].t()[:, :64],
    "column step": lambda b: b[0, :, : 2 * 64 : 2],
    "row step": lambda b: b[0, ::2],
    "column slice": lambda b: b[0, :, 32:160],
    "misaligned start": lambda b: b[0, :, 1:129],
    "3-D slice": lambda b: b[:, 3:7],
    "3-D transposed": lambda b: b.transpose(0, 1),
    "expanded row (S9)": lambda b: b[0, 0].expand(8, 192),
    "expanded scalar (S9)": lambda b: b[0, 0, :1].expand(5, 64),
    "one row": lambda b: b[0, 0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs_equal_their_dense_copy_s7(view: str, dtype: torch.dtype) -> None:
    x = VIEWS[view](BASE.to(dtype))
    assert_quantized(ops.mxfp8_quantize(x), reference.mxfp8_quantize(x.contiguous()))
    if x.dim() == 2:
        assert_quantized(ops.mxfp8_quantize_weight(x), reference.mxfp8_quantize_weight(x.contiguous()))


def test_strided_codes_and_scales_equal_their_dense_copies_s7() -> None:
    codes, scale = random_codes(96, 70).t()[:64], torch.randint(0, 256, (3, 128), dtype=torch.uint8).t()[:64]
    assert not codes.is_contiguous() and not scale.is_contiguous()
    assert same_bits(ops.mxfp8_dequantize(codes, scale), ops.mxfp8_dequantize(codes.contiguous(), scale.contiguous()))
    for pack in (ops.mxfp8_pack_a_scale, ops.mxfp8_pack_b_scale):
        assert same_bits(pack(scale), pack(scale.contiguous()))


# ---- Dequantise ----


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("flush", [False, True])
def test_every_code_times_every_scale_is_exact_n10(out_dtype: torch.dtype, flush: bool, isa: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(E4M3)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    value = codes.double() * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    expected = value.float().to(out_dtype)  # float32 holds every product, or overflows to infinity
    with flushing_subnormals() if flush else nullcontext():
        result = ops.mxfp8_dequantize(codes, scale.view(E8M0), out_dtype=out_dtype)
        as_uint8 = ops.mxfp8_dequantize(codes, scale, out_dtype=out_dtype)
    nan = torch.isin(bytes_of(codes), torch.tensor([0x7F, 0xFF], dtype=torch.uint8)) | (scale == 255).repeat_interleave(32, 1)
    assert torch.equal(result.isnan(), nan)
    assert same_bits(result[~nan], expected[~nan])
    assert same_bits(result, as_uint8)


@pytest.mark.cpu
def test_e8m0_values_are_those_of_ml_dtypes(isa: str) -> None:
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    ones = torch.full((256, 32), 0x38, dtype=torch.uint8).view(E4M3)
    value = ops.mxfp8_dequantize(ones, scale, out_dtype=torch.float32)[:, 0]
    np.testing.assert_array_equal(value.numpy(), scale[:, 0].numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


@pytest.mark.parametrize("n, k", [(1, 32), (33, 96), (64, 64), (130, 2080)])
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_both_block_shapes_dequantise(n: int, k: int, out_dtype: torch.dtype, isa: str) -> None:
    codes = random_codes(n, k)
    for scale in (torch.randint(90, 160, (n, k // 32), dtype=torch.uint8), torch.randint(90, 160, (-(-n // 32), k // 32), dtype=torch.uint8)):
        expected = reference.mxfp8_dequantize(codes, scale).to(torch.float32).to(out_dtype)
        assert same_bits(ops.mxfp8_dequantize(codes, scale, out_dtype=out_dtype), expected)


def test_every_code_survives_a_round_trip(isa: str) -> None:
    finite = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    codes = torch.full((finite.numel(), 32), 0x7E, dtype=torch.uint8)  # 448 pins the scale
    codes[:, 1] = finite
    for byte in (0, 1, 60, 127, 200, 246):
        scale = torch.full((finite.numel(), 1), byte, dtype=torch.uint8)
        value = ops.mxfp8_dequantize(codes.view(E4M3), scale, out_dtype=torch.float32)
        assert_quantized(ops.mxfp8_quantize(value), (codes.view(E4M3), scale.view(E8M0)))
        assert_quantized(ops.mxfp8_quantize(value, rounding="floor"), (codes.view(E4M3), scale.view(E8M0)))


def test_dequantise_defaults_to_bfloat16() -> None:
    assert ops.mxfp8_dequantize(random_codes(2, 32), torch.full((2, 1), 127, dtype=torch.uint8)).dtype == torch.bfloat16


# ---- Packed scales ----


@pytest.mark.parametrize("m", [1, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("blocks", [1, 3, 44])
@pytest.mark.parametrize("dtype", [torch.uint8, E8M0])
def test_packed_scales_have_the_documented_layout(m: int, blocks: int, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (m, blocks), dtype=torch.uint8)
    packed_a, packed_b = ops.mxfp8_pack_a_scale(raw.view(dtype)), ops.mxfp8_pack_b_scale(raw.view(dtype))
    padded = -(-m // 64) * 64
    assert packed_a.dtype == packed_b.dtype == torch.int32
    assert packed_a.shape == (padded * blocks // 4,) and packed_b.shape == (blocks * m,)
    expected = torch.full((padded, blocks), 127, dtype=torch.uint8)
    expected[:m] = raw
    for row in {0, m // 2, m - 1, padded - 1}:
        for j in range(blocks):
            dword = packed_a[j * (padded // 4) + row // 64 * 16 + row % 16].item()
            assert dword >> 8 * (row % 64 // 16) & 255 == expected[row, j].item()
    assert same_bits(packed_a, reference.mxfp8_pack_a_scale(raw))
    assert same_bits(packed_b, reference.mxfp8_pack_b_scale(raw))


# ---- Caller's buffers, repeatability, refusals ----


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full((torch.empty(shape, dtype=dtype).nbytes,), 0xFF, dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("scale_dtype", [E8M0, torch.uint8])
def test_out_overloads_overwrite_every_byte(scale_dtype: torch.dtype, isa: str) -> None:
    x = random_blocks(40, 352, torch.bfloat16, seed=9)
    x[3, 64] = math.nan
    for op, rows in ((ops.mxfp8_quantize, 40), (ops.mxfp8_quantize_weight, 2)):
        codes, scale = poisoned((40, 352), E4M3), poisoned((rows, 11), scale_dtype)
        op.out(x, codes=codes, scale=scale)
        assert_quantized((codes, scale.view(E8M0)), op(x))
        for out_dtype in DTYPES:
            out = poisoned((40, 352), out_dtype)
            ops.mxfp8_dequantize.out(codes, scale, out=out)
            assert same_bits(out, ops.mxfp8_dequantize(codes, scale, out_dtype=out_dtype))
        for pack in (ops.mxfp8_pack_a_scale, ops.mxfp8_pack_b_scale):
            out = poisoned(tuple(pack(scale).shape), torch.int32)
            pack.out(scale, out=out)
            assert same_bits(out, pack(scale))


def test_results_do_not_depend_on_the_thread_count(threads: None, isa: str) -> None:
    x = random_blocks(300, 4128, torch.bfloat16, seed=11)
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        codes, scale = ops.mxfp8_quantize(x)
        weight_codes, weight_scale = ops.mxfp8_quantize_weight(x)
        results.append((codes, scale, weight_codes, weight_scale, ops.mxfp8_dequantize(codes, scale), ops.mxfp8_pack_a_scale(scale)))
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other))


X, CODES, SCALE = torch.ones(4, 64), random_codes(4, 64), torch.full((4, 2), 127, dtype=torch.uint8)
REFUSED = {
    "quantise float64": (lambda: ops.mxfp8_quantize(X.double()), "mxfp8_quantize: x must be float32 or bfloat16 or float16, got float64 [4, 64]"),
    "quantise ragged K": (lambda: ops.mxfp8_quantize(X[:, :63]), "mxfp8_quantize: K, the last dimension of x, must be a multiple of 32, got float32 [4, 63]"),
    "quantise scalar": (lambda: ops.mxfp8_quantize(torch.tensor(1.0)), "x must be [.., K], got float32 []"),
    "rounding": (lambda: ops.mxfp8_quantize(X, rounding="even"), "mxfp8_quantize: rounding must be 'rceil' or 'floor', got 'even'"),
    "weight rounding": (lambda: ops.mxfp8_quantize_weight(X, rounding=""), "mxfp8_quantize_weight: rounding must be 'rceil' or 'floor', got ''"),
    "weight 3-D": (lambda: ops.mxfp8_quantize_weight(X[None]), "mxfp8_quantize_weight: w must be [N, K], got float32 [1, 4, 64]"),
    "weight ragged K": (lambda: ops.mxfp8_quantize_weight(torch.ones(40, 48)), "K, the last dimension of w, must be a multiple of 32, got float32 [40, 48]"),
    "e5m2 codes": (lambda: ops.mxfp8_dequantize(X.to(torch.float8_e5m2), SCALE), "codes must be float8_e4m3fn, got float8_e5m2 [4, 64]"),
    "fnuz codes": (lambda: ops.mxfp8_dequantize(X.to(torch.float8_e4m3fnuz), SCALE), "codes must be float8_e4m3fn, got float8_e4m3fnuz [4, 64]"),
    "uint8 codes": (lambda: ops.mxfp8_dequantize(bytes_of(CODES), SCALE), "codes must be float8_e4m3fn, got uint8 [4, 64]"),
    "float scale": (lambda: ops.mxfp8_dequantize(CODES, SCALE.float()), "scale must be float8_e8m0fnu or uint8, got float32 [4, 2]"),
    "scale shape": (lambda: ops.mxfp8_dequantize(CODES, SCALE[:3]), "scale must have shape [4, 2] (1x32 blocks) or [1, 2] (32x32 blocks), got uint8 [3, 2]"),
    "integer out_dtype": (lambda: ops.mxfp8_dequantize(CODES, SCALE, out_dtype=torch.int8), "out_dtype must be bfloat16, float16 or float32, got int8"),
    "pack a float": (lambda: ops.mxfp8_pack_a_scale(SCALE.float()), "mxfp8_pack_a_scale: scale must be float8_e8m0fnu or uint8, got float32 [4, 2]"),
    "pack b 1-D": (lambda: ops.mxfp8_pack_b_scale(SCALE[0]), "mxfp8_pack_b_scale: scale must be [ceil(N/32), K/32], got uint8 [2]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_inputs_name_the_argument_and_what_was_expected(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def test_refused_out_buffers_stay_untouched() -> None:
    codes, scale = poisoned((4, 64), E4M3), poisoned((4, 2), E8M0)
    quantize = ops.mxfp8_quantize.out
    overlapping = torch.zeros(4, 64)
    refused = [
        (lambda: quantize(X, codes=codes[:3], scale=scale), "codes must have shape [4, 64]"),
        (lambda: quantize(X, codes=bytes_of(codes), scale=scale), "codes must be float8_e4m3fn, got uint8"),
        (lambda: quantize(X, codes=codes, scale=scale[:, :1]), "scale must have shape [4, 2]"),
        (lambda: quantize(X, codes=codes, scale=scale.view(torch.int8)), "scale must be float8_e8m0fnu or uint8, got int8"),
        (lambda: quantize(X, codes=codes, scale=poisoned((2, 4), E8M0).t()), "scale must be contiguous"),
        (lambda: quantize(overlapping, codes=bytes_of(overlapping).view(-1)[:256].view(4, 64).view(E4M3), scale=scale), "codes must not share memory with an input"),
        (lambda: quantize(X, codes=codes, scale=bytes_of(codes).view(-1)[:8].view(4, 2)), "scale must not share memory with an input"),
        (lambda: quantize(X, codes=codes, scale=scale, rounding="up"), "rounding must be 'rceil' or 'floor', got 'up'"),
        (lambda: ops.mxfp8_quantize_weight.out(X, codes=codes, scale=scale), "scale must have shape [1, 2]"),
    ]  # fmt: skip
    for call, message in refused:
        with pytest.raises(ValueError) as error:
            call()
        assert message in str(error.value)
    assert (bytes_of(codes) == 0xFF).all() and (bytes_of(scale) == 0xFF).all() and (overlapping == 0).all()

    out = poisoned((4, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="out must be bfloat16 or float16 or float32, got int16"):
        ops.mxfp8_dequantize.out(CODES, SCALE, out=out.view(torch.int16))
    with pytest.raises(ValueError, match="scale must have shape"):
        ops.mxfp8_dequantize.out(CODES, SCALE[:, :1], out=out)
    packed = poisoned((32,), torch.int32)
    with pytest.raises(ValueError, match=r"out must have shape \[32\]"):
        ops.mxfp8_pack_a_scale.out(SCALE, out=packed[:31])
    assert (bytes_of(out) == 0xFF).all() and (bytes_of(packed) == 0xFF).all()
