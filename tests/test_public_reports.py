"""Failures that users of libraries like this one reported in public, as tests of the right answer, named after the block.

Letters: N numerics, Q sparse attention, S shapes and layouts, I torch integration, P performance. Elsewhere: what concerns the
quantiser alone (N1, N3, N4, N8, N9, I12) in test_quantize.py, torch.distributed (D) in test_gemm_ar.py, installation (B) in
test_install.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mori_ops
from mori_ops import reference
from tests import cases
from tests.samples import OPS, Call, arguments, assert_same_bits, call, tensors

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
BF16, F32 = torch.bfloat16, torch.float32
GEMM_QUANTS = pytest.mark.parametrize("quant", cases.QUANTS)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape).to(E4M3)


def unit_operands(m: int, n: int, k: int, quant: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operands of ones with scales of one."""
    a, b, a_scale, b_scale = cases.gemm_operands(m, n, k, quant)
    if quant == "mxfp8":
        unit = torch.full((m, k // 32), 127, dtype=torch.uint8), torch.full((-(-n // 32), k // 32), 127, dtype=torch.uint8)
        return ones(m, k), ones(n, k), reference.mxfp8_pack_a_scale(unit[0]), reference.mxfp8_pack_b_scale(unit[1])
    return ones(m, k), ones(n, k), torch.ones(a_scale.shape).to(a_scale.dtype), torch.ones(b_scale.shape).to(b_scale.dtype)


# --- N: numerics ------------------------------------------------------------------------------------------------------


def test_N5_zero_blocks_stay_zero():
    w = torch.zeros(256, 256)
    w[0, 0] = 1.0
    for codes, scale in (mori_ops.mxfp8_quantize_weight(w), mori_ops.mxfp8_quantize(w)):
        assert torch.equal(mori_ops.mxfp8_dequantize(codes, scale, out_dtype=F32), w)
    w_bytes = mori_ops.q8_0_quantize(w)
    assert torch.equal(mori_ops.q8_0_dequantize(w_bytes), reference.q8_0_dequantize(w_bytes).float())
    codes, scale = mori_ops.kv_quantize(w)
    assert scale.isfinite().all() and codes[1:].count_nonzero() == 0


@GEMM_QUANTS
def test_N5_a_zero_activation_gives_exact_zeros(quant):
    a, b, a_scale, b_scale = cases.gemm_operands(9, 40, 160, quant)
    result = mori_ops.scaled_gemm(torch.zeros_like(a), b, a_scale, b_scale, quant, out_dtype=F32)
    assert result.count_nonzero() == 0


def test_N7_uint8_scales_are_exponents():
    codes, scale = ones(1, 32), torch.tensor([[122]], dtype=torch.uint8)
    assert (mori_ops.mxfp8_dequantize(codes, scale) == 0.03125).all()
    product = mori_ops.mxfp8_raw(codes, codes, scale, scale, out_dtype=F32)
    assert product.item() == 32 * 0.03125**2
    assert_same_bits((product,), (mori_ops.mxfp8_raw(codes, codes, scale.view(E8M0), scale.view(E8M0), out_dtype=F32),))


@GEMM_QUANTS
def test_N10_only_the_codes_7f_and_ff_are_nan_in_a_product(quant):
    m, n, k = 256, 1, 32
    _, b, a_scale, b_scale = unit_operands(m, n, k, quant)
    a = torch.zeros(m, k, dtype=torch.uint8)
    a[:, 7] = torch.arange(256)
    result = mori_ops.scaled_gemm(a.view(E4M3), b, a_scale, b_scale, quant, out_dtype=F32).flatten()
    torch.testing.assert_close(result.double(), reference.e4m3_value(a[:, 7].contiguous()), rtol=0, atol=0, equal_nan=True)
    assert result.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_N12_fp32_scales_are_not_truncated_to_powers_of_two():
    k = 128
    for quant, a_scale, b_scale in (
        ("blockscale", torch.full((2, 1), 1.5), torch.full((1, 1), 1.25)),
        ("ptpc", torch.full((2,), 1.5), torch.full((3,), 1.25)),
    ):
        assert (mori_ops.scaled_gemm(ones(2, k), ones(3, k), a_scale, b_scale, quant, out_dtype=F32) == 240.0).all()


def test_N12_fp32_scales_offered_to_mxfp8_are_refused_and_the_next_call_works():
    a, b, a_scale, b_scale = unit_operands(2, 3, 64, "mxfp8_raw")
    with pytest.raises(ValueError, match="a_scale must be float8_e8m0fnu or uint8, got float32"):
        mori_ops.mxfp8_raw(a, b, torch.ones(2, 2), b_scale)
    with pytest.raises(ValueError, match="b_scale must be float8_e8m0fnu or uint8, got float32"):
        mori_ops.mxfp8_raw(a, b, a_scale, torch.ones(1, 2))
    assert (mori_ops.mxfp8_raw(a, b, a_scale, b_scale) == 64).all()


def q8_bytes(d: Tensor, q: int, rows: int, k: int) -> Tensor:
    """Q8_0 rows whose blocks all have the fp16 scale `d` (a one-element tensor) and the code `q`."""
    one_block = torch.cat((d.view(torch.uint8), torch.full((32,), q, dtype=torch.int8).view(torch.uint8)))
    return one_block.repeat(rows, k // 32)


@pytest.mark.parametrize("dtype", (BF16, F32))
@pytest.mark.parametrize("ntok", range(1, 10))
def test_N13_large_activations_and_extreme_blocks_stay_exact(ntok, dtype):
    x, k = torch.full((ntok, 256), 99840.0, dtype=dtype), 256
    power = lambda exponent: torch.tensor([2.0**exponent], dtype=torch.float16)  # noqa: E731
    zero = torch.zeros(1, dtype=torch.float16)
    for d, q, value in ((power(-10), 1, 24960.0), (power(-10), -128, -3194880.0), (zero, 127, 0.0), (power(-24), 1, 1.5234375)):
        assert (mori_ops.gr_down(x, q8_bytes(d, q, 5, k)) == value).all()


def test_N14_a_row_does_not_change_with_the_batch_it_sits_in():
    n, k, rows = 48, 512, 64
    a, b, a_scale, b_scale = cases.gemm_operands(rows, n, k)
    exact = reference.mxfp8_raw(a[:1], b, a_scale[:1], b_scale)
    by_kernel: dict[str, Tensor] = {}
    for m in (1, 2, 4, 5, 8, 9, 16, 17, 64):
        for position in (0, m - 1):
            order = torch.arange(m).roll(position)  # row 0 stands at `position`
            batch = a.view(torch.uint8)[order].view(E4M3), a_scale.view(torch.uint8)[order].view(E8M0)
            row = mori_ops.mxfp8_raw(batch[0], b, batch[1], b_scale)[position]
            kernel = mori_ops.route("mxfp8_raw", m=m, n=n, k=k).kernel
            assert torch.equal(by_kernel.setdefault(kernel, row), row), (m, position, kernel)
            assert ((row.double() - exact[0]).abs() <= 2 * 2.0**-8 * exact[0].abs()).all()


def test_N14_a_token_of_a_verify_window_does_not_change_with_the_window():
    args = arguments("gr_down", rows=64, dtype=F32, n=20, k=960)
    alone = mori_ops.gr_down(**{**args, "x": args["x"][:1]})
    for ntok in (2, 4, 5, 8, 9, 16, 17, 64):
        for position in (0, ntok - 1):
            x = args["x"][torch.arange(ntok).roll(position)]
            assert torch.equal(mori_ops.gr_down(**{**args, "x": x})[position], alone[0])


# --- Q: sparse attention ----------------------------------------------------------------------------------------------


def flash_case(tokens: int, slots: int, cells: int, *, q_heads: int = 4, kv_heads: int = 2, dim: int = 64, seed: int = 0) -> dict:
    return arguments("qsa_flash", tokens, F32, seed, slots=slots, cells=cells, q_heads=q_heads, kv_heads=kv_heads, dim=dim)


def test_Q2_a_token_without_cells_gives_exact_zeros():
    args = flash_case(5, 9, 37)
    whole = mori_ops.qsa_flash(**args)
    args["ids"][2] = -1
    for _ in range(3):
        torch.full_like(whole, math.nan)  # freed at once: the allocator's next block of this size is poison
        result = mori_ops.qsa_flash(**args)
        assert result[2].count_nonzero() == 0
        assert torch.equal(result[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])
    for tokens in (1, 5):
        args = flash_case(tokens, 9, 37)
        args["ids"].fill_(-1)
        assert mori_ops.qsa_flash(**args).count_nonzero() == 0
        args.pop("gate")
        partial, lse = mori_ops.qsa_attn(**args, splits=3)
        assert partial.count_nonzero() == 0 and (lse == -math.inf).all()
        assert mori_ops.qsa_merge(partial, lse).count_nonzero() == 0


def test_Q4_duplicates_count_as_often_as_they_stand():
    k = v = torch.arange(10.0, dtype=torch.float16)[:, None, None].expand(10, 1, 64) / 4
    result = mori_ops.qsa_flash(torch.zeros(1, 12, 64), k, v, torch.tensor([[5, 5, 9]]))
    torch.testing.assert_close(result, torch.full((1, 12, 64), (2 * 5 + 9) / 12))
    same = mori_ops.qsa_flash(torch.randn(256, 12, 64), k + 1, v + 1, torch.zeros(256, 3, dtype=torch.int64))
    torch.testing.assert_close(same, torch.ones(256, 12, 64))


@pytest.mark.parametrize(("tokens", "slots"), ((1, 2051), (63, 1), (64, 63), (65, 64), (127, 65), (257, 65), (3, 2051)))
def test_Q5_every_token_count_and_selection_length_is_right(tokens, slots):
    args = flash_case(tokens, slots, 2500, q_heads=6, kv_heads=1)
    counts = torch.randint(0, slots + 1, (tokens, 1), generator=torch.Generator().manual_seed(tokens))
    args["ids"] = torch.where(torch.arange(slots) < counts, args["ids"], -(2**30))  # stale lanes past the count
    cases.assert_close(mori_ops.qsa_flash(**args), reference.qsa_flash(**args))


def test_Q6_twelve_query_heads_per_kv_head_and_dim_256():
    args = flash_case(3, 7, 20, q_heads=24, dim=256)
    heads = torch.tensor([1.0, 2.0]).half()[:, None]
    v = heads * torch.where(torch.arange(256) < 128, 1.0, 3.0).half()
    args.update(k=torch.randn(20, 2, 256).half(), v=v.expand(20, 2, 256), k_scale=None, v_scale=None, gate=torch.full((3, 24, 256), 40.0))
    args["ids"] = args["ids"].clamp(min=0)
    torch.testing.assert_close(mori_ops.qsa_flash(**args), v.float().repeat_interleave(12, 0).expand(3, 24, 256))
    with pytest.raises(ValueError, match="Hq of q must be a multiple of Hkv of k, got Hq 25 and Hkv 2"):
        mori_ops.qsa_flash(torch.zeros(3, 25, 256), args["k"], args["v"], args["ids"])


def test_Q8_cells_past_two_gibibytes_are_read_at_64_bit_offsets():
    cells, near = 4_194_304 + 128, flash_case(2, 2, 2, dim=256)
    pool = torch.empty(2, cells, 2, 256, dtype=torch.int8)  # 4 GiB of address space, two cells of it touched
    scales = torch.zeros(2, cells, 2, 4, dtype=torch.float16)
    pool[0, -2:], pool[1, -2:], scales[0, -2:], scales[1, -2:] = near["k"], near["v"], near["k_scale"], near["v_scale"]
    near["ids"] = torch.tensor([[1, 0], [-2, 1]])
    far = {**near, "k": pool[0], "v": pool[1], "k_scale": scales[0], "v_scale": scales[1]}
    far["ids"] = torch.where(near["ids"] < 0, -2, near["ids"] + cells - 2)
    assert torch.equal(mori_ops.qsa_flash(**far), mori_ops.qsa_flash(**near))


def test_Q8_a_strided_pool_is_read_in_place():
    args = flash_case(4, 9, 2066)
    stride = 1_039_680
    pool = torch.empty_strided((2066, 2, 64), (stride, 64, 1), dtype=torch.int8)  # 2 GiB of address space
    used = args["ids"].clamp(min=0).unique().long()
    pool[used] = args["k"][used]
    assert torch.equal(mori_ops.qsa_flash(**{**args, "k": pool}), mori_ops.qsa_flash(**args))


@pytest.mark.parametrize("beyond", (37, 38, 2**30))
def test_Q8_an_id_past_the_last_cell_raises(beyond, monkeypatch):
    monkeypatch.setenv("MORI_CHECK_IDS", "1")  # the CPU needs none
    args = flash_case(4, 9, 37)
    args["ids"][3, 4] = beyond
    with pytest.raises(IndexError, match=rf"ids.*{beyond}.*37"):
        mori_ops.qsa_flash(**args)
    args["ids"][3, 4] = -2
    assert mori_ops.qsa_flash(**args).isfinite().all()


# --- S: shapes and layouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", (65_535, 65_536, 131_073))
def test_S2_more_rows_than_a_16_bit_grid(rows):
    x = torch.randn(rows, 1).to(BF16).expand(rows, 128)
    codes, scale = mori_ops.mxfp8_quantize(x)
    last_codes, last_scale = reference.mxfp8_quantize(x[-3:])
    assert_same_bits((codes[-3:], scale[-3:]), (last_codes, last_scale))
    b, b_scale = ones(1, 128), torch.full((1, 4), 127, dtype=torch.uint8)
    product = mori_ops.mxfp8_raw(codes, b, scale, b_scale)
    cases.assert_close(product[-3:], reference.mxfp8_raw(last_codes, b, last_scale, b_scale))


@pytest.mark.parametrize("op", OPS)
def test_S3_no_rows_then_a_normal_call(op):
    args = arguments(op, rows=5)
    results = call(op, args)
    empty = call(op, arguments(op, rows=0))
    for result, none in zip(results, empty, strict=True):
        assert none.dtype == result.dtype and none.numel() == 0 and none.dim() == result.dim()
    assert_same_bits(call(op, args), results)


@GEMM_QUANTS
@pytest.mark.parametrize(("m", "n", "k"), ((0, 5, 64), (3, 0, 64), (0, 0, 64)))
def test_S3_empty_products(m, n, k, quant):
    result = mori_ops.scaled_gemm(*cases.gemm_operands(m, n, k, quant), quant)
    assert result.shape == (m, n) and result.dtype == BF16


@GEMM_QUANTS
def test_S5_one_block_of_k_with_a_bias(quant):
    operands = unit_operands(128, 128, 32, quant)
    assert (mori_ops.scaled_gemm(*operands, quant, bias=torch.full((128,), 7.0)) == 39).all()


@GEMM_QUANTS
def test_S5_k_1408_and_scales_one_too_few(quant):
    a, b, a_scale, b_scale = cases.gemm_operands(5, 70, 1408, quant)
    result = mori_ops.scaled_gemm(a, b, a_scale, b_scale, quant)
    cases.assert_close(result, reference.scaled_gemm(a, b, a_scale, b_scale, quant))
    for name, short in (("a_scale", (a_scale[..., :-1], b_scale)), ("a_scale", (a_scale[:-1], b_scale)),
                        ("b_scale", (a_scale, b_scale[..., :-1])), ("b_scale", (a_scale, b_scale[:-1]))):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} must have shape"):
            mori_ops.scaled_gemm(a, b, *short, quant)


S7_VIEWS = {
    "transposed": lambda base: base[:128, :96].t(),
    "every other column": lambda base: base[:, ::2],
    "every other row": lambda base: base[::2],
    "a window of columns": lambda base: base[:, 32:160],
    "a misaligned start": lambda base: base[:, 1:129],
    "a slice along T": lambda base: base.view(4, 48, 192)[:, 3:17],
}


@pytest.mark.parametrize("view", S7_VIEWS)
def test_S7_views_give_the_bits_of_their_copies(view):
    x = S7_VIEWS[view](torch.randn(192, 192, generator=torch.Generator().manual_seed(0)).to(BF16))
    assert_same_bits(mori_ops.mxfp8_quantize(x), mori_ops.mxfp8_quantize(x.contiguous()))
    _, b, _, b_scale = cases.gemm_operands(1, 40, x.shape[-1])
    linear = mori_ops.mxfp8_linear(x, b, b_scale)
    assert_same_bits((linear,), (mori_ops.mxfp8_linear(x.contiguous(), b, b_scale),))
    assert linear.is_contiguous()


def test_S9_expanded_inputs_give_the_bits_of_their_copies():
    row = torch.randn(1, 96).to(BF16)
    _, b, _, b_scale = cases.gemm_operands(1, 40, 96)
    expanded_x = row.expand(8, 96)
    assert_same_bits((mori_ops.mxfp8_linear(expanded_x, b, b_scale),), (mori_ops.mxfp8_linear(expanded_x.contiguous(), b, b_scale),))
    a, b, _, b_scale = cases.gemm_operands(8, 40, 96, "ptpc")
    a_scale = torch.tensor(0.003).expand(8)
    assert_same_bits(
        (mori_ops.scaled_gemm(a, b, a_scale, b_scale, "ptpc"),), (mori_ops.scaled_gemm(a, b, a_scale.contiguous(), b_scale, "ptpc"),)
    )
    args = flash_case(5, 9, 37)
    gate = args["gate"][:, :1].expand(5, 4, 64)
    assert_same_bits((mori_ops.qsa_flash(**{**args, "gate": gate}),), (mori_ops.qsa_flash(**{**args, "gate": gate.contiguous()}),))


@GEMM_QUANTS
@pytest.mark.parametrize(("n", "k"), ((40, 64), (40, 192), (40, 576), (768, 64), (1, 64), (33, 64), (2112, 64)))
def test_S10_shards_smaller_than_a_block(n, k, quant):
    operands = cases.gemm_operands(3, n, k, quant)
    cases.assert_close(mori_ops.scaled_gemm(*operands, quant, out_dtype=F32), reference.scaled_gemm(*operands, quant))


def test_S10_a_partial_weight_block_is_scaled_by_its_own_rows():
    w = torch.cat((torch.full((32, 64), 1000.0), torch.full((8, 64), 0.5)))
    codes, scale = mori_ops.mxfp8_quantize_weight(w)
    assert scale.view(torch.uint8)[1].tolist() == [118, 118]  # 0.5 / 2^-9 = 256
    assert torch.equal(mori_ops.mxfp8_dequantize(codes, scale, out_dtype=F32)[32:], w[32:])
    with pytest.raises(ValueError, match="K, the last dimension of w, must be a multiple of 32, got float32 .40, 48."):
        mori_ops.mxfp8_quantize_weight(torch.zeros(40, 48))


# --- I: torch integration (fakes, opcheck, meta, export: test_torch_integration.py) ------------------------------------


class CountGraphs:
    """A torch.compile backend that runs the traced graph as it is and counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: torch.fx.GraphModule, example_inputs: list[Tensor]):
        self.graphs += 1
        return module.forward


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COPIED = ("mxfp8_raw", "qsa_flash", "gr_down")


def test_I1_views_and_copies_of_compiled_results(fresh_compiler):
    """All operators in one graph, whose generated code asserts each result's size and strides. Every copied result is one more
    C++ kernel, seconds of compilation: three of them stand for all."""
    modules = {op: Call(op, arguments(op)) for op in OPS}

    def everything(inputs: dict[str, dict[str, Tensor]]) -> tuple[Tensor, ...]:
        results = {op: modules[op](inputs[op]) for op in OPS}
        views = [result.unsqueeze(0).expand(2, *result.shape) for op in OPS for result in results[op]]
        return (*views, *(results[op][0].unsqueeze(1).expand(-1, 2, *results[op][0].shape[1:]).contiguous() for op in COPIED))

    compiled = torch.compile(everything, fullgraph=True, dynamic=True)
    for rows in (5, 66):
        inputs = {op: tensors(arguments(op, rows)) for op in OPS}
        assert_same_bits(compiled(inputs), everything(inputs))


def quantize_with_byte_scales(x: Tensor) -> tuple[Tensor, ...]:
    codes, scale = mori_ops.mxfp8_quantize(x)
    byte = scale.view(torch.uint8)
    value = mori_ops.mxfp8_dequantize(codes, byte)
    return codes, scale, byte, byte.view(-1, 1), byte[1:], torch.cat((byte, byte[:1])), codes[:, 32:], value


def quantize_into_byte_scales(x: Tensor) -> tuple[Tensor, ...]:
    """For Inductor's C++ code, which in torch 2.13 has no type for e8m0: such a tensor can go from operator to operator and be
    returned, but not be viewed as uint8. Scales as bytes come from the .out overload."""
    codes, byte = torch.empty(x.shape, dtype=E4M3), torch.empty(x.shape[0], x.shape[1] // 32, dtype=torch.uint8)
    torch.ops.mori.mxfp8_quantize.out(x, codes=codes, scale=byte)
    own_codes, scale = mori_ops.mxfp8_quantize(x)
    value = mori_ops.mxfp8_dequantize(own_codes, scale)
    return codes, scale, byte, byte.view(-1, 1), byte[1:], torch.cat((byte, byte[:1])), own_codes[:, 32:], value


@pytest.mark.parametrize(("function", "backend"), ((quantize_with_byte_scales, "aot_eager"), (quantize_into_byte_scales, "inductor")))
def test_I2_compiled_quantisation_gives_scales_as_e8m0_and_as_bytes(function, backend, fresh_compiler):
    x = torch.randn(6, 64)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert_same_bits(compiled(x), quantize_with_byte_scales(x))


def test_I3_a_weight_used_under_inference_mode_first_compiles_and_is_never_stale(fresh_compiler):
    args = arguments("mxfp8_linear", dtype=F32)
    layer = lambda x, b: mori_ops.mxfp8_linear(x, b, args["b_scale"])  # noqa: E731
    with torch.inference_mode():
        first = layer(args["x"], args["b"]).clone()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(args["x"], args["b"]), first)
    with torch.no_grad():
        assert torch.equal(compiled(args["x"].clone().requires_grad_(), args["b"]), first)
    args["b"].view(torch.uint8).copy_(cases.random_codes(*args["b"].shape, generator=torch.Generator().manual_seed(9)).view(torch.uint8))
    changed = layer(args["x"], args["b"].clone())
    assert not torch.equal(changed, first)
    assert torch.equal(layer(args["x"], args["b"]), changed) and torch.equal(compiled(args["x"], args["b"]), changed)


@pytest.mark.cpu
def test_I9_autocast_decides_the_dtype_of_a_linear_layer(fresh_compiler):
    _, b, _, b_scale = cases.gemm_operands(1, 40, 96)
    x = torch.randn(5, 96)
    for dtype in cases.DTYPES:
        assert mori_ops.mxfp8_linear(x.to(dtype), b, b_scale).dtype == dtype
    plain = mori_ops.mxfp8_linear(x, b, b_scale, out_dtype=BF16)
    compiled = torch.compile(mori_ops.mxfp8_linear, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=BF16):
        for function in (mori_ops.mxfp8_linear, torch.ops.mori.mxfp8_linear, compiled):
            assert_same_bits((function(x, b, b_scale),), (plain,))  # x is quantised from fp32
            assert function(x, b, b_scale, out_dtype=F32).dtype == F32
        with torch.autocast("cpu", enabled=False):
            assert mori_ops.mxfp8_linear(x, b, b_scale).dtype == F32
    with torch.autocast("cpu", dtype=torch.float16):
        assert mori_ops.mxfp8_linear(x, b, b_scale).dtype == torch.float16


@pytest.mark.parametrize("op", ("mxfp8_linear", "qsa_flash", "qsa_merge", "gr_down"))
def test_I11_results_are_not_detached_silently(op):
    args = arguments(op, dtype=F32)
    args[next(iter(tensors(args)))].requires_grad_()
    (result,) = call(op, args)
    assert result.requires_grad
    with pytest.warns(UserWarning, match=rf"mori::{op}.*autograd"):
        result.sum().backward()


# --- P: performance, as far as it can be counted ----------------------------------------------------------------------


def test_P2_no_compilation_at_a_new_number_of_rows(fresh_compiler):
    compiled = torch.compile(mori_ops.mxfp8_linear, backend="eager", fullgraph=True, dynamic=True)
    _, b, _, b_scale = cases.gemm_operands(1, 1, 32)
    x = torch.randn(8192, 32).to(BF16)
    for rows in (1, 7, 4096):
        compiled(x[:rows], b, b_scale)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in torch.randint(1, 8193, (200,), generator=torch.Generator().manual_seed(0)).tolist():
            assert compiled(x[:rows], b, b_scale).shape == (rows, 1)


@pytest.mark.parametrize("op", OPS)
def test_P3_at_most_two_graphs_for_all_row_counts(op, fresh_compiler):
    backend, module = CountGraphs(), Call(op, arguments(op))
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for rows in (1, 2, 3, 8, 9, 64, 4096):
        args = arguments(op, rows)
        assert_same_bits(compiled(tensors(args)), call(op, args))
    assert backend.graphs <= 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (1, 5, 4095):
            compiled(tensors(arguments(op, rows)))
    compiled(tensors(arguments(op, rows=0)))
