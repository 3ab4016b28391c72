"""The formats against implementations that nobody here wrote: ml_dtypes (e4m3, e8m0), torchao (MX quantiser), gguf (Q8_0)."""

from __future__ import annotations

import math

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

import mori_ops
from tests import cases
from tests.samples import assert_same_bits

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def assert_same_values(result: Tensor, expected: np.ndarray) -> None:
    """Equal, NaN at the same places, zeros of the same sign."""
    np.testing.assert_array_equal(result.numpy(), expected)
    np.testing.assert_array_equal(np.signbit(result.numpy()), np.signbit(expected))


# --- ml_dtypes --------------------------------------------------------------------------------------------------------


def test_all_e4m3_codes_decode_as_in_ml_dtypes():
    scale = torch.full((8, 1), 127, dtype=torch.uint8)
    value = mori_ops.mxfp8_dequantize(ALL_BYTES.view(8, 32).view(E4M3), scale, out_dtype=torch.float32)
    finite = ~value.isnan()
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(8, 32)
    assert_same_values(value[finite], expected[finite.numpy()])
    assert (~finite).flatten().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert np.isnan(expected[~finite.numpy()]).all()


def test_all_e8m0_bytes_decode_as_in_ml_dtypes():
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[:, None].repeat(32, 1)
    one = torch.ones(256, 32).to(E4M3)
    for scale in (ALL_BYTES[:, None], ALL_BYTES[:, None].view(E8M0)):
        assert_same_values(mori_ops.mxfp8_dequantize(one, scale, out_dtype=torch.float32), expected)


def test_every_code_times_every_scale_decodes_as_in_ml_dtypes():
    codes = ALL_BYTES.view(1, 256).expand(256, 256).view(E4M3)
    scale = ALL_BYTES.view(256, 1).expand(256, 8)
    code_values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scale_values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        product = scale_values[:, None] * code_values[None, :]
        for dtype, oracle in ((torch.float32, np.float32), (torch.float16, np.float16), (torch.bfloat16, ml_dtypes.bfloat16)):
            result = mori_ops.mxfp8_dequantize(codes, scale, out_dtype=dtype).float()
            np.testing.assert_array_equal(result.numpy(), product.astype(oracle).astype(np.float32))


@pytest.mark.parametrize("rounding", ("rceil", "floor"))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_codes_are_rounded_as_in_ml_dtypes(rounding, dtype):
    x = (torch.randn(300, 96, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    codes, scale = mori_ops.mxfp8_quantize(x, rounding=rounding)
    scale_value = scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64).repeat(32, -1)
    scaled = np.clip(x.double().numpy() / scale_value, -448, 448)  # ml_dtypes turns 465 into NaN
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_ties_are_rounded_to_even_as_in_ml_dtypes():
    values = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    between = np.concatenate(((values[1:] + values[:-1]) / 2, np.nextafter((values[1:] + values[:-1]) / 2, np.float32(0))))
    x = torch.zeros(len(between), 32)
    x[:, 0], x[:, 1], x[:, 2] = torch.from_numpy(between), -torch.from_numpy(between), 448.0  # 448 makes the scale 1
    codes, scale = mori_ops.mxfp8_quantize(x)
    assert (scale.view(torch.uint8) == 127).all()
    for column, sign in ((0, 1), (1, -1)):
        expected = (sign * between).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(codes[:, column].view(torch.uint8).numpy(), expected)


# --- torchao ----------------------------------------------------------------------------------------------------------

TORCHAO_MODE = {"floor": ScaleCalculationMode.FLOOR, "rceil": ScaleCalculationMode.RCEIL}


def torchao_quantize(x: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    scale, codes = to_mx(x, E4M3, 32, TORCHAO_MODE[rounding])
    return codes, scale.view(E8M0)


def both(x: Tensor, rounding: str) -> tuple[int, int, int, int]:
    """(our byte, our first code, torchao's byte, its first code) of one block."""
    ours, theirs = mori_ops.mxfp8_quantize(x, rounding=rounding), torchao_quantize(x, rounding)
    first = lambda t: t.view(torch.uint8).flatten()[0].item()  # noqa: E731
    return first(ours[1]), first(ours[0]), first(theirs[1]), first(theirs[0])


def block(*first: float) -> Tensor:
    x = torch.zeros(1, 32)
    x[0, : len(first)] = torch.tensor(first)
    return x


@pytest.mark.parametrize("rounding", ("floor", "rceil"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_quantised_bits_are_torchaos(rounding, dtype):
    generator = torch.Generator().manual_seed(0)
    magnitude = torch.exp2(torch.randint(-110, 110, (2000, 1), generator=generator).float())
    x = (torch.randn(2000, 128, generator=generator) * magnitude).to(dtype)
    assert_same_bits(mori_ops.mxfp8_quantize(x, rounding=rounding), torchao_quantize(x, rounding))


@pytest.mark.parametrize("rounding", ("floor", "rceil"))
def test_quantised_bits_are_torchaos_at_powers_of_two_and_at_saturation(rounding):
    x = torch.cat([block(sign * first, second) for sign in (1, -1) for second in (0.0, 0.3)
                   for first in (1.0, 1.75, 240, 448, 450, 464, 465, 510, 957, 2.0**-100, 2.0**100, 2.0**127)])  # fmt: skip
    assert_same_bits(mori_ops.mxfp8_quantize(x, rounding=rounding), torchao_quantize(x, rounding))


def test_difference_to_torchao_the_smallest_scale_is_not_widened():
    """At byte 0 torchao's floor divides by 2^-126 and its rceil by 1, so its codes do not decode to the input. Byte 0 is
    2^-127 in OCP MX v1.0, and that is what the codes are relative to here."""
    assert both(block(2.0**-119), "floor") == (0, 0x78, 0, 0x70)
    assert both(block(2.0**-119), "rceil") == (0, 0x78, 0, 0x00)
    assert mori_ops.mxfp8_dequantize(*mori_ops.mxfp8_quantize(block(2.0**-119)), out_dtype=torch.float32)[0, 0] == 2.0**-119


def test_difference_to_torchao_no_logarithm_rounds_a_scale_down():
    """torchao takes ceil(log2(amax / 448)) in fp32, where amax just above 448 * 2^k looks like 448 * 2^k and saturates; the
    exponent is taken from the bits here."""
    just_above = block(448 * 2.0**10 * (1 + 2.0**-23))
    assert both(just_above, "rceil") == (138, 0x76, 137, 0x7E)


@pytest.mark.parametrize("rounding", ("floor", "rceil"))
def test_difference_to_torchao_a_nan_makes_the_whole_block_nan_in_its_codes_too(rounding):
    """Scale byte 255 is the same; torchao leaves other elements' codes finite, or 0. All of them are NaN here, so that a
    reader who ignores scale NaNs cannot pass for a number."""
    x = block(1.0, math.nan)
    ours, _ = mori_ops.mxfp8_quantize(x, rounding=rounding)
    byte, _, torchao_byte, _ = both(x, rounding)
    assert byte == torchao_byte == 255
    assert (ours.view(torch.uint8) == 0x7F).all()


@pytest.mark.parametrize(("rounding", "torchao_byte"), (("floor", 247), ("rceil", 254)))
def test_difference_to_torchao_infinity_is_not_quantised_to_a_finite_number(rounding, torchao_byte):
    """torchao's codes and scale for an Inf decode to a finite number; here the block is NaN."""
    byte, code, their_byte, their_code = both(block(math.inf), rounding)
    assert (byte, code) == (255, 0x7F)
    assert (their_byte, their_code) == (torchao_byte, 0x7E)


# --- gguf -------------------------------------------------------------------------------------------------------------


def q8_0_weights() -> Tensor:
    """Random rows, and rows with zeros, halves that round, tiny and large scales."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 320, generator=generator) * torch.exp2(torch.randint(-20, 12, (64, 1), generator=generator).float())
    special = torch.zeros(4, 320)
    special[1] = torch.arange(320) % 32 - 15.5
    special[1, ::32] = 127.0  # d = 1: halves stay halves
    special[2] = -1e-7
    special[3] = torch.linspace(-8e6, 8e6, 320)
    return torch.cat((rows, special))


def test_q8_0_bytes_are_ggufs():
    w = q8_0_weights()
    expected = gguf.quantize(w.numpy(), gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(mori_ops.q8_0_quantize(w).numpy(), expected)


def test_q8_0_values_are_ggufs():
    w = torch.randint(0, 256, (16, 10 * 34), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    w[:, 1::34] &= 0x7B  # finite fp16 scales
    value = mori_ops.q8_0_dequantize(w)
    assert_same_values(value, gguf.dequantize(w.numpy(), gguf.GGMLQuantizationType.Q8_0))
    assert value.isfinite().all()


def test_gr_down_multiplies_ggufs_weight():
    w = q8_0_weights()[:64]
    encoded = gguf.quantize(w.numpy(), gguf.GGMLQuantizationType.Q8_0)
    x = torch.randn(4, 320, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ torch.from_numpy(gguf.dequantize(encoded, gguf.GGMLQuantizationType.Q8_0)).double().t()
    cases.assert_close(mori_ops.gr_down(x, torch.from_numpy(encoded)), expected)
