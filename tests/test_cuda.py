"""The CUDA kernels: against float64, against the CPU's bits where the bits are defined, and against themselves.

Skipped where there is no CUDA device, or no CUDA backend in the build.
"""

from __future__ import annotations

import pytest
import torch

import mori_ops
from mori_ops import reference
from tests import cases
from tests.samples import EXACT, arguments, as_tuple, call, expected, map_tensors, operator, out_arguments

CUDA_OPS = [op for op, devices in mori_ops.kernels().items() if devices["cuda"]]
pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() and CUDA_OPS), reason="no CUDA device or no CUDA backend in this build")

TOLERANCE = cases.RELATIVE_L2 | {torch.float32: cases.TENSOR_CORE_L2}
# Beside the ragged shapes of the CPU tests: around the 32 tokens where the kernel changes, rows per CTA of it, its longest K, and
# whole and partial tiles.
GEMM_SHAPES = (
    *cases.GEMM_SHAPES, (3, 5100, 640), (17, 5100, 160), (12, 8130, 256), (2, 64, 16384), (32, 1024, 1280), (33, 1024, 1280),
    (128, 512, 256), (192, 520, 640), (257, 300, 1408), (300, 136, 96), (1000, 1032, 640),
)  # fmt: skip


def cuda(value):
    return value.cuda()


def check(result: torch.Tensor, wanted: torch.Tensor) -> None:
    few = wanted.numel() < cases.FEW and result.dtype in cases.HALF_ULP
    cases.assert_close(result.cpu(), wanted.cpu(), None if few else TOLERANCE[result.dtype])


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 33, 70])
@pytest.mark.parametrize("op", CUDA_OPS)
def test_results_match_the_reference_and_repeat(op: str, rows: int, dtype: torch.dtype) -> None:
    args = arguments(op, rows, dtype, seed=rows)
    on_device = map_tensors(cuda, args)
    results = call(op, on_device)
    for result, again, wanted in zip(results, call(op, on_device), expected(op, args), strict=True):
        assert cases.same_bits(result, again)
        if op in EXACT:
            assert cases.same_bits(result.cpu(), wanted.to(result.dtype))
        else:
            check(result, wanted)
    with_out, outs = out_arguments(op, args, tuple(r.cpu() for r in results))
    names = [a.name for a in operator(op, "out")._schema.arguments if a.alias_info is not None]
    with_out = map_tensors(cuda, with_out)
    operator(op, "out")(**with_out)
    assert all(cases.same_bits(with_out[name], result) for name, result in zip(names, results, strict=True))


@pytest.mark.parametrize("quant", cases.QUANTS)
@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=str)
def test_gemms_of_ragged_shapes(shape: tuple[int, int, int], quant: str) -> None:
    m, n, k = shape
    operands = [cuda(t) for t in cases.gemm_operands(m, n, k, quant, seed=m)]
    bias = torch.randn(n, device="cuda")
    wanted = reference.scaled_gemm(*operands, quant)
    for dtype in cases.DTYPES:
        check(mori_ops.scaled_gemm(*operands, quant, out_dtype=dtype), wanted)
        check(mori_ops.scaled_gemm(*operands, quant, bias=bias, out_dtype=dtype), wanted + bias)


@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=str)
def test_packed_and_raw_scales_give_the_same_bits(shape: tuple[int, int, int]) -> None:
    a, b, a_scale, b_scale = (cuda(t) for t in cases.gemm_operands(*shape, seed=2))
    packed = mori_ops.mxfp8(a, b, mori_ops.mxfp8_pack_a_scale(a_scale), mori_ops.mxfp8_pack_b_scale(b_scale))
    assert torch.equal(packed, mori_ops.mxfp8_raw(a, b, a_scale, b_scale))


@pytest.mark.parametrize("quant", ["ptpc", "blockscale"])
@pytest.mark.parametrize("m", [1, 3, 64, 130])
def test_fp32_scales_take_the_fp8_tensor_cores_of_torch(m: int, quant: str) -> None:
    n, k = 272, 4096
    assert mori_ops.route("scaled_gemm", device="cuda", m=m, n=n, k=k).kernel == "torch._scaled_mm"
    a, b, a_scale, b_scale = (cuda(t) for t in cases.gemm_operands(m, n, k, quant, seed=m))
    wanted, bias = reference.scaled_gemm(a, b, a_scale, b_scale, quant), torch.randn(n, device="cuda").bfloat16()
    check(mori_ops.scaled_gemm(a, b, a_scale, b_scale, quant), wanted)
    check(mori_ops.scaled_gemm(a, b, a_scale, b_scale, quant, bias=bias), wanted + bias)
    assert cases.relative_l2(mori_ops.scaled_gemm(a, b, a_scale, b_scale, quant), wanted.bfloat16()) <= 1.2e-3  # one in ten rounds to the neighbour
    a.view(torch.uint8)[m // 2, 77] = 0x7F
    result = mori_ops.scaled_gemm(a, b, a_scale, b_scale, quant)
    assert result.isnan().any(1).nonzero().flatten().tolist() == [m // 2] and result[m // 2].isnan().all()
    a.view(torch.uint8).fill_(0x38)[:, 77] = b.view(torch.uint8).fill_(0x38)[:, 77] = 0x7E  # 448 * 448 beside 4095 ones
    ones = torch.ones_like(a_scale), torch.ones_like(b_scale)
    assert (mori_ops.scaled_gemm(a, b, *ones, quant) == 204800).all()


EXTREMES = {
    "NaN scale of A over zero codes": lambda a, b, sa, sb: (sa[len(a) // 2, 1:2].fill_(255), a[len(a) // 2, 32:64].fill_(0)),
    "NaN scale of B over zero codes": lambda a, b, sa, sb: (sb[-1, 1:2].fill_(255), b[-4:, 32:64].fill_(0)),
    "NaN code in A": lambda a, b, sa, sb: a[len(a) // 2, 40:41].fill_(0xFF),
    "NaN code in B": lambda a, b, sa, sb: b[len(b) // 2, 40:41].fill_(0x7F),
    "least scale of A": lambda a, b, sa, sb: (sa[len(a) // 2].fill_(0), sb.fill_(200)),
    "least scale of B": lambda a, b, sa, sb: (sb[0].fill_(0), sa.fill_(200)),
    "largest scale of A": lambda a, b, sa, sb: (sa[len(a) // 2].fill_(254), sb.fill_(60)),
    "largest scale of B": lambda a, b, sa, sb: (sb[0].fill_(254), sa.fill_(60)),
    "scales that cancel": lambda a, b, sa, sb: (sa.fill_(254), sb.fill_(0)),
    "just past a bf16 operand": lambda a, b, sa, sb: (sb[0, 0:1].fill_(135), sb[0, 1:2].fill_(9)),
    "extreme scales of zero blocks": lambda a, b, sa, sb: (a[0].fill_(0), sa[0].fill_(0), b[:32].fill_(0), sb[0].fill_(250)),
}


@pytest.mark.parametrize("change", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("shape", [(1, 64, 256), (20, 100, 512), (40, 100, 512), (100, 300, 512), (300, 256, 640)], ids=str)
def test_extreme_scales_and_nan_are_exact(shape: tuple[int, int, int], change) -> None:
    a, b, a_scale, b_scale = (t.view(torch.uint8) for t in cases.gemm_operands(*shape, seed=1))
    change(a, b, a_scale, b_scale)
    operands = [cuda(t) for t in (a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn), a_scale, b_scale)]
    wanted = reference.mxfp8_raw(*operands)
    result = mori_ops.mxfp8_raw(*operands, out_dtype=torch.float32)
    assert torch.equal(result.isnan(), wanted.isnan())
    finite = wanted.float().isfinite()
    assert cases.relative_l2(torch.where(finite, result, 0), torch.where(finite, wanted, 0)) <= 1e-5


@pytest.mark.parametrize("m", [1, 40])
def test_long_sums_are_right(m: int) -> None:
    k = 4096
    a = torch.full((m, k), 0x38, dtype=torch.uint8, device="cuda")
    a[:, 0] = 0x7E
    b, one = a[:1].repeat(64, 1), torch.full((m, k // 32), 127, dtype=torch.uint8, device="cuda")
    result = mori_ops.mxfp8_raw(a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn), one, one[:1].repeat(2, 1), out_dtype=torch.float32)
    assert (result == 448 * 448 + 4095).all()


def test_misaligned_operands_give_right_results() -> None:
    a, b, a_scale, b_scale = cases.gemm_operands(40, 64, 256, seed=3)
    shifted = [torch.cat([t.new_empty(1).view(torch.uint8), t.view(torch.uint8).flatten()]).cuda()[1:].view(t.shape).view(t.dtype) for t in (a, b)]
    check(mori_ops.mxfp8_raw(*shifted, a_scale.cuda(), b_scale.cuda()), reference.mxfp8_raw(a, b, a_scale, b_scale))


@pytest.mark.parametrize("m", [1, 16, 20])
def test_raw_scales_at_odd_addresses_give_the_same_bits(m: int) -> None:
    a, b, a_scale, b_scale = (cuda(t) for t in cases.gemm_operands(m, 100, 512, seed=4))
    scales = a_scale.view(torch.uint8), b_scale.view(torch.uint8)
    shifted = [torch.cat([t.new_empty(1), t.flatten()])[1:].view(t.shape) for t in scales]
    assert torch.equal(mori_ops.mxfp8_raw(a, b, *shifted), mori_ops.mxfp8_raw(a, b, a_scale, b_scale))


@pytest.mark.parametrize("m", [40, 150])
def test_sums_that_overflow_on_the_way_are_right(m: int) -> None:
    """Two blocks whose products, beyond float32 in every column, cancel in one token."""
    a, b, a_scale, b_scale = (cuda(t.view(torch.uint8)) for t in cases.gemm_operands(m, 200, 512, seed=m))
    token = m // 2
    b[:, :32] = b[:, :32] & 0x7F | a[token, :32] & 0x80  # no cancelling inside a block
    a[token, 32:64], b[:, 32:64] = a[token, :32] ^ 0x80, b[:, :32]
    a_scale[token, :2], b_scale[:, :2] = 246, 131
    rest = [a[token : token + 1, 64:], b[:, 64:], a_scale[token : token + 1, 2:], b_scale[:, 2:]]
    wanted = reference.mxfp8_raw(*(t.contiguous().view(torch.float8_e4m3fn) if i < 2 else t.contiguous() for i, t in enumerate(rest)))
    for dtype in cases.DTYPES:
        result = mori_ops.mxfp8_raw(a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn), a_scale, b_scale, out_dtype=dtype)
        check(result[token], wanted[0])


# The last two are several tiles for each multiprocessor.
TILES = (
    ("64x64", 60, 1000),
    ("64x96", 90, 8448),
    ("64x128", 100, 8448),
    ("128x96", 190, 8448),
    ("128x128", 200, 8448),
    ("128x176", 520, 5000),
    ("128x192", 570, 5000),
    ("128x224", 670, 5000),
    ("128x256", 760, 5000),
    ("128x128", 128, 40000),
    ("128x256", 2300, 5000),
)


@pytest.mark.parametrize("tile, m, n", TILES)
def test_every_tile_of_the_gemm(tile: str, m: int, n: int) -> None:
    """Repeatable, with a NaN code, an out-of-range scale and an infinite token among the operands; quantising on the way or before."""
    k = 416
    assert mori_ops.route("mxfp8_raw", m=m, n=n, k=k, device="cuda").kernel == tile
    x = torch.randn(m, k, device="cuda") * torch.exp2(torch.randint(-8, 8, (m, 1), device="cuda"))
    _, b, _, b_scale = (cuda(t) for t in cases.gemm_operands(1, n, k, seed=m))
    x[m // 2, 5], x[m // 3] = torch.inf, x[m // 3] * 2.0**125
    for row, column in ((n // 3, 7), (n // 5, 200), (n // 7, 400)):
        b.view(torch.uint8)[row, column] = 0xFF
    b_scale.view(torch.uint8)[n // 64, 3], b_scale.view(torch.uint8)[n // 96, 6] = 136, 5
    a, a_scale = mori_ops.mxfp8_quantize(x)
    wanted = reference.mxfp8_raw(a, b, a_scale, b_scale)
    for dtype in cases.DTYPES:
        result = mori_ops.mxfp8_raw(a, b, a_scale, b_scale, out_dtype=dtype)
        assert torch.equal(result.isnan(), wanted.isnan())
        finite = wanted.abs() < 1e4
        check(torch.where(finite, result, 0), torch.where(finite, wanted, 0))
        assert cases.same_bits(result, mori_ops.mxfp8_raw(a, b, a_scale, b_scale, out_dtype=dtype))
        assert cases.same_bits(result, mori_ops.mxfp8_linear(x, b, b_scale, out_dtype=dtype))
    for dtype in (torch.bfloat16, torch.float16):
        half = x.clamp(-6e4, 6e4).to(dtype)
        quantised = mori_ops.mxfp8_quantize(half)
        assert cases.same_bits(mori_ops.mxfp8_linear(half, b, b_scale), mori_ops.mxfp8_raw(quantised[0], b, quantised[1], b_scale, out_dtype=dtype))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("k", [10240, 1280, 96])
def test_gr_down_rows_do_not_depend_on_the_window(k: int, norm: bool) -> None:
    x, w = torch.randn(8, k, device="cuda"), mori_ops.q8_0_quantize(torch.randn(40, k, device="cuda"))
    options = {"norm_weight": torch.rand(k, device="cuda") + 0.5, "hc": 4} if norm and k % 4 == 0 else {}
    whole = mori_ops.gr_down(x, w, **options)
    check(whole, reference.gr_down(x, w, **options))
    for ntok in range(1, 8):
        assert torch.equal(mori_ops.gr_down(x[:ntok], w, **options), whole[:ntok])


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("ntok", [9, 20, 33, 64, 100, 600])
def test_gr_down_of_many_tokens(ntok: int, norm: bool, dtype: torch.dtype) -> None:
    n, k = cases.GR_N, cases.GR_K
    x = cases.blocks_of_any_size(ntok, k, device="cuda").to(dtype)
    w = mori_ops.q8_0_quantize(torch.randn(n, k, device="cuda"))
    options = {"norm_weight": (torch.rand(k, device="cuda") + 0.5).to(dtype), "hc": cases.GR_HC} if norm else {}
    whole = mori_ops.gr_down(x, w, **options)
    check(whole, reference.gr_down(x, w, **options))
    fewer = ntok - 1 if ntok > 9 and ntok != 33 else ntok  # stays in the route
    assert torch.equal(mori_ops.gr_down(x[:fewer], w, **options), whole[:fewer])


@pytest.mark.parametrize("op", CUDA_OPS)
def test_capture_and_replay(op: str) -> None:
    """The first call of a fresh shape inside a capture, then a replay over changed inputs."""
    args = map_tensors(cuda, arguments(op, 37, torch.bfloat16, seed=1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(op, args)
    changed = map_tensors(cuda, arguments(op, 37, torch.bfloat16, seed=3))
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            value.copy_(changed[name])
    graph.replay()
    for result, again in zip(captured, as_tuple(call(op, args)), strict=True):
        assert cases.same_bits(result, again)


def test_work_goes_to_the_current_stream() -> None:
    _, b, _, b_scale = (cuda(t) for t in cases.gemm_operands(1, 64, 256))
    stream = torch.cuda.Stream()
    for i in range(20):
        x = torch.zeros(4, 256, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            x.fill_(i + 1)
            late = mori_ops.mxfp8_linear(x, b, b_scale)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(late, mori_ops.mxfp8_linear(torch.full_like(x, i + 1), b, b_scale))


def test_mixed_devices_are_refused() -> None:
    a, b, a_scale, b_scale = cases.gemm_operands(2, 64, 64)
    with pytest.raises(ValueError, match="b must be on the same device as a"):
        mori_ops.mxfp8_raw(a.cuda(), b, a_scale.cuda(), b_scale.cuda())
