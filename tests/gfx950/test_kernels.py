"""The HIP kernels that ship, executed instruction by instruction: results against float64 and against the CPU's bits."""

import itertools

import numpy as np
import pytest
import torch

import mori_ops

from . import launches, mx
from .interpreter import SCHEDULES
from .toolchain import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

FP32_FLOOR = 1e-6
FLOOR = {np.dtype(np.float32): FP32_FLOOR, np.dtype(np.uint16): 2.2e-3, np.dtype(np.float16): 4e-4}
OUTPUTS = [np.float32, np.uint16, np.float16]  # uint16 holds bf16 bits
NAN = {np.dtype(np.float32): np.nan, np.dtype(np.uint16): 0x7FFF, np.dtype(np.float16): np.nan}
GEMMS = list(launches.GEMM_KERNELS)
RAW = [name for name in GEMMS if name.startswith("raw")]
PACKED = [name for name in GEMMS if name.startswith("packed")]


def output(m: int, n: int, dtype=np.float32) -> np.ndarray:
    return np.full((m, n), NAN[np.dtype(dtype)], dtype)


def floats(x: np.ndarray) -> np.ndarray:
    return mx.from_bf16(x) if x.dtype == np.uint16 else x


def as_dtype(x: np.ndarray, dtype) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().view(torch.uint16).numpy() if dtype == np.uint16 else x.astype(dtype)


def operands(m: int, n: int, k: int, seed: int = 0) -> mx.Operands:
    return mx.operands(m, n, k, b_rows=32, seed=seed, scales=(112, 124))  # sums fit fp16


def multiply(name: str, x: mx.Operands, **options) -> np.ndarray:
    out = output(*x.product.shape)
    launches.gemm(name, x.a, x.b, x.a_scale, x.b_scale, out, **options)
    return out


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.retire}-{s.order}")
@pytest.mark.parametrize("name", GEMMS)
def test_gemm_under_every_schedule(name, schedule):
    """Six steps: the fill, the main loop, a refilled scale chunk and the tail; a ragged edge in both directions."""
    x = operands(193, 100, 768)
    assert mx.error(multiply(name, x, schedule=schedule), x.product) < FP32_FLOOR


# K of one step, of fewer than the stages, of whole and partial scale chunks, of the seed's shapes.
@pytest.mark.parametrize("k", [128, 256, 384, 512, 640, 1280, 2048])
@pytest.mark.parametrize("name", GEMMS)
def test_gemm_of_whole_tiles(name, k):
    x = operands(256, launches.GEMM_KERNELS[name][1], k, seed=k)
    assert mx.error(multiply(name, x, schedule=SCHEDULES[k // 128 % len(SCHEDULES)]), x.product) < FP32_FLOOR


@pytest.mark.parametrize(("m", "n"), [(1, 7), (64, 264), (100, 1), (192, 33), (257, 136)])
@pytest.mark.parametrize("name", GEMMS)
def test_gemm_of_ragged_edges(name, m, n):
    x = operands(m, n, 256, seed=m)
    assert mx.error(multiply(name, x, schedule=SCHEDULES[m % len(SCHEDULES)]), x.product) < FP32_FLOOR


@pytest.mark.parametrize("k", [32, 96, 160, 352, 416, 1056])
@pytest.mark.parametrize("name", PACKED)
def test_packed_gemm_of_partial_steps(name, k):
    """Past K lies the next row: codes that would be NaN there must not be read."""
    x = operands(70, 40, k, seed=k)
    x.a[1::2], x.b[1::2] = 0x7F, 0x7F
    got, want = multiply(name, x), x.product[::2, ::2]
    assert mx.error(got[::2, ::2], want) < FP32_FLOOR
    assert np.isnan(got[1::2]).all() and np.isnan(got[:, 1::2]).all()


@pytest.mark.parametrize("n", [72, 75], ids=["16-byte pieces", "single elements"])
@pytest.mark.parametrize(("dtype", "bias"), [*itertools.product(OUTPUTS, OUTPUTS), (np.uint16, None)])
def test_output_and_bias_dtypes(dtype, bias, n):
    x = operands(40, n, 128)
    row = None if bias is None else as_dtype(np.random.default_rng(1).standard_normal(n).astype(np.float32) * 100, bias)
    out = output(40, n, dtype)
    launches.gemm("packed 256x128", x.a, x.b, x.a_scale, x.b_scale, out, bias=row)
    want = x.product + (0 if bias is None else floats(row).astype(np.float64))
    assert mx.error(floats(out), want) < FLOOR[np.dtype(dtype)]


@pytest.mark.parametrize("k", [512, 640])
@pytest.mark.parametrize("tile", ["256x256", "256x128"])
def test_packed_and_raw_scales_give_the_same_bits(tile, k):
    x = operands(100, 72, k)
    np.testing.assert_array_equal(multiply(f"packed {tile}", x), multiply(f"raw {tile}", x))


def extremes(x: mx.Operands) -> None:
    """Least, largest and NaN scales, NaN codes, NaN scales over zero codes."""
    x.a_scale[3], x.a_scale[4, 1], x.a_scale[5], x.a_scale[6, 2] = 0, 255, 254, 255
    x.b_scale[1], x.a[6, 64:96], x.a[7, 9], x.b[70, 100] = 0, 0, 0xFF, 0x7F
    x.product[:] = mx.decode(x.a, x.a_scale) @ mx.decode(x.b, x.b_scale, 32).T


def check_extremes(got: np.ndarray, want: np.ndarray) -> None:
    overflows = np.abs(want) > 1e38
    assert not np.isfinite(got[np.abs(want) > 1e39]).any()
    np.testing.assert_array_equal(np.isnan(got[~overflows]), np.isnan(want[~overflows]))
    for row, column in np.ndindex(len(want), -(-want.shape[1] // 32)):  # blocks differ by many orders of magnitude
        block = row, slice(32 * column, 32 * column + 32)
        fits = np.isfinite(want[block]) & ~overflows[block]
        least = 2.0**-149 * np.sqrt(fits.sum())  # of fp32: what is below rounds to it or to zero
        assert np.linalg.norm(got[block][fits] - want[block][fits]) <= FP32_FLOOR * np.linalg.norm(want[block][fits]) + 8 * least


@pytest.mark.parametrize("name", [*GEMMS, "skinny packed", "skinny raw", "simple packed", "simple raw"])
def test_extreme_scales_and_nan(name):
    x = operands(20, 72, 256)
    extremes(x)
    out = output(20, 72)
    args = (x.a, x.b, x.a_scale, x.b_scale, out)
    if name in GEMMS:
        launches.gemm(name, *args)
    elif name.startswith("skinny"):
        launches.skinny(*args, packed=name.endswith("packed"))
    else:
        launches.simple(*args, name.split()[1])
    check_extremes(out, x.product)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 128), (5, 33, 640), (16, 16, 1056), (17, 40, 96), (32, 20, 2048), (3, 16, 2304)])
@pytest.mark.parametrize("packed", [False, True], ids=["raw", "packed"])
def test_skinny(packed, m, n, k):
    x = operands(m, n, k, seed=k)
    out = output(m, n)
    launches.skinny(x.a, x.b, x.a_scale, x.b_scale, out, packed=packed, schedule=SCHEDULES[m % len(SCHEDULES)])
    assert mx.error(out, x.product) < FP32_FLOOR


@pytest.mark.parametrize("dtype", OUTPUTS)
def test_skinny_output_dtypes_and_independent_tokens(dtype):
    x = operands(32, 20, 1280)
    bias = as_dtype(np.linspace(-50, 50, 20, dtype=np.float32), dtype)
    out = output(32, 20, dtype)
    launches.skinny(x.a, x.b, x.a_scale, x.b_scale, out, packed=False, bias=bias)
    assert mx.error(floats(out), x.product + floats(bias)) < FLOOR[np.dtype(dtype)]
    alone = output(2, 20, dtype)
    launches.skinny(x.a[5:7].copy(), x.b, x.a_scale[5:7].copy(), x.b_scale, alone, packed=False, bias=bias)
    np.testing.assert_array_equal(alone, out[5:7])


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize("quant", ["raw", "packed", "ptpc", "blockscale"])
def test_simple(quant, arch):
    m, n, k = 67, 70, 288
    x = operands(m, n, k)
    rng = np.random.default_rng(2)
    a_scale, b_scale, want = x.a_scale, x.b_scale, x.product
    if quant in ("ptpc", "blockscale"):
        rows, columns = (1, k) if quant == "ptpc" else (128, 128)
        a_scale, b_scale = (rng.uniform(0.5, 2, (count, -(-k // columns))).astype(np.float32) for count in (m, -(-n // rows)))
        spread = [np.repeat(np.repeat(s.astype(np.float64), r, 0)[:count], columns, 1)[:, :k] for s, r, count in ((a_scale, 1, m), (b_scale, rows, n))]
        want = (mx.E4M3[x.a] * spread[0]) @ (mx.E4M3[x.b] * spread[1]).T
    for dtype in OUTPUTS:
        out = output(m, n, dtype)
        launches.simple(x.a, x.b, a_scale, b_scale, out, quant, arch=arch)
        assert mx.error(floats(out), want) < FLOOR[np.dtype(dtype)] if quant in ("raw", "packed") or dtype == np.float32 else True


def values(rows: int, k: int, dtype) -> np.ndarray:
    """Random magnitudes from subnormals to the largest, zero blocks, NaN and infinity."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, k)).astype(np.float32) * np.exp2(rng.integers(-14, 15, (rows, 1)).astype(np.float32))
    x[0, :32], x[1, 5], x[2, 40], x[3] = 0, np.nan, -np.inf, x[3] * np.float32(2.0**-130)
    return as_dtype(x, dtype)


def to_torch(x: np.ndarray) -> torch.Tensor:
    t = torch.from_numpy(x)
    return t.view(torch.bfloat16) if x.dtype == np.uint16 else t


@pytest.mark.parametrize("aligned", [True, False], ids=["wide loads", "single loads"])
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("dtype", OUTPUTS)
def test_quantisers_give_the_bits_of_the_cpu(dtype, rounding, aligned):
    x = values(37, 544, dtype)
    for run, op, rows in ((launches.quantize, mori_ops.mxfp8_quantize, 37), (launches.quantize_weight, mori_ops.mxfp8_quantize_weight, 2)):
        codes, scale = np.full(x.shape, 0xAA, np.uint8), np.full((rows, 17), 0xAA, np.uint8)
        run(x, rounding == "rceil", codes, scale, aligned=aligned)
        want = op(to_torch(x), rounding=rounding)
        np.testing.assert_array_equal(scale, want[1].view(torch.uint8).numpy())
        np.testing.assert_array_equal(codes, want[0].view(torch.uint8).numpy())


@pytest.mark.parametrize("rows_per_scale", [1, 32], ids=["activation", "weight"])
@pytest.mark.parametrize("dtype", OUTPUTS)
def test_dequantise_gives_the_bits_of_the_cpu(dtype, rows_per_scale):
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(0, 256, (33, 96), dtype=np.uint8), rng.integers(0, 256, (-(-33 // rows_per_scale), 3), dtype=np.uint8)
    scale[0] = 0, 255, 127
    out = output(33, 96, dtype)
    launches.dequantize(codes, scale, rows_per_scale, out)
    want = mori_ops.mxfp8_dequantize(torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scale), out_dtype=to_torch(out).dtype)
    np.testing.assert_array_equal(floats(out), want.float().numpy())


@pytest.mark.parametrize("rows", [1, 64, 100])
def test_packers_give_the_documented_layout(rows):
    scale = np.random.default_rng(rows).integers(0, 256, (rows, 5), dtype=np.uint8)
    for side, wanted in (("a", launches.pack_a(scale)), ("b", launches.pack_b(scale))):
        out = np.zeros_like(wanted)
        launches.pack_scales(scale, side, out)
        np.testing.assert_array_equal(out, wanted)
        op = mori_ops.mxfp8_pack_a_scale if side == "a" else mori_ops.mxfp8_pack_b_scale
        np.testing.assert_array_equal(out.view(np.int32).ravel(), op(torch.from_numpy(scale)).numpy())
