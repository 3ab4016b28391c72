"""Metal 4 matmul2d in the emulator: right products in every layout, Apple's rules, and what goes wrong when a kernel breaks one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.metal import toolchain
from tests.metal.emulator import COOPERATIVE_LAYOUTS, PRODUCT_ORDERS, MetalError, ShaderLibrary, compile_shader, settings

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))

HEAD = """
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
typedef matmul2d_descriptor Shape;
"""
# y[16, 64] = sum over runs of 32 of a[16, K] b[64, K]^T: the right operand in registers, the left one in threadgroup memory.
PRODUCT = """
enum Bug { NONE, OVERWRITES, POSITIONS, DEAD_SLOTS, STALE, BEYOND, NO_BARRIER };
template <int BUG>
[[kernel]] void product(device const half* a [[buffer(0)]], device const half* b [[buffer(1)]], device float* y [[buffer(2)]],
                        constant int& k [[buffer(3)]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup half left[16 * 32];
  tensor<threadgroup half, dextents<int, 2>, tensor_inline> left_view(left, dextents<int, 2>(32, 16));
  constexpr auto accumulate = BUG == OVERWRITES ? Shape::mode::multiply : Shape::mode::multiply_accumulate;
  constexpr auto shape = Shape(16, 64, 32, false, true, false, accumulate);
  matmul2d<shape, execution_simdgroup> op;
  auto right = op.template get_right_input_cooperative_tensor<half, half, float>();
  auto sum = op.template get_destination_cooperative_tensor<decltype(left_view), decltype(right), float>();
  for (ushort i = 0; i < sum.get_capacity() && BUG != STALE; ++i) {
    if (sum.is_valid_element(i)) sum[i] = 0.0f;
  }
  for (int k0 = 0; k0 < k; k0 += 32) {
    for (int i = lane; i < 16 * 32; i += 32) left[i] = a[i / 32 * k + k0 + i % 32];
    if (BUG != NO_BARRIER) simdgroup_barrier(mem_flags::mem_threadgroup);
    for (ushort i = 0; i < right.get_capacity(); ++i) {
      if (BUG == POSITIONS) {
        if (i < 64) right[i] = b[(lane / 4 + i / 4 % 8 * 8) * k + k0 + lane % 4 * 4 + i % 4 + i / 32 * 16];
      } else if (BUG == DEAD_SLOTS || right.is_valid_element(i)) {
        const auto at = right.get_multidimensional_index(i);
        right[i] = b[at[1] * k + k0 + at[0]];
      }
    }
    auto run = left_view.slice<32, 16>(0, 0);
    op.run(run, right, sum);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (ushort i = 0; i < sum.get_capacity() + (BUG == BEYOND ? 8 : 0); ++i) {
    if (BUG != BEYOND && !sum.is_valid_element(i)) continue;
    const float value = sum[i];
    if (!sum.is_valid_element(i)) continue;
    const auto at = sum.get_multidimensional_index(i);
    y[at[1] * 64 + at[0]] = value;
  }
}
template [[host_name("product")]] [[kernel]] decltype(product<NONE>) product<NONE>;
template [[host_name("overwrites")]] [[kernel]] decltype(product<OVERWRITES>) product<OVERWRITES>;
template [[host_name("positions")]] [[kernel]] decltype(product<POSITIONS>) product<POSITIONS>;
template [[host_name("dead_slots")]] [[kernel]] decltype(product<DEAD_SLOTS>) product<DEAD_SLOTS>;
template [[host_name("stale")]] [[kernel]] decltype(product<STALE>) product<STALE>;
template [[host_name("no_barrier")]] [[kernel]] decltype(product<NO_BARRIER>) product<NO_BARRIER>;
template [[host_name("beyond")]] [[kernel]] decltype(product<BEYOND>) product<BEYOND>;

// Both inputs and the result as tensors in memory, four simdgroups, k as it comes.
[[kernel]] void whole(device half* a [[buffer(0)]], device half* b [[buffer(1)]], device float* y [[buffer(2)]],
                      constant int& k [[buffer(3)]]) {
  tensor<device half, dextents<int, 2>, tensor_inline> left(a, dextents<int, 2>(k, 16)), right(b, dextents<int, 2>(k, 64));
  tensor<device float, dextents<int, 2>, tensor_inline> result(y, dextents<int, 2>(64, 16));
  matmul2d<Shape(16, 64, static_cast<int>(dynamic_extent), false, true), execution_simdgroups<4>> op;
  auto sum = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  op.run(left, right, sum);
  sum.store(result);
}

// Left operand transposed, both inputs in registers.
[[kernel]] void transposed(device half* a [[buffer(0)]], device half* b [[buffer(1)]], device float* y [[buffer(2)]]) {
  tensor<device half, dextents<int, 2>, tensor_inline> left_view(a, dextents<int, 2>(16, 32)), right_view(b, dextents<int, 2>(16, 32));
  tensor<device float, dextents<int, 2>, tensor_inline> result(y, dextents<int, 2>(16, 16));
  matmul2d<Shape(16, 16, 32, true, false), execution_simdgroup> op;
  auto left = op.get_left_input_cooperative_tensor<half, half, float>();
  auto right = op.get_right_input_cooperative_tensor<half, half, float>();
  auto sum = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  left.load(left_view);
  right.load(right_view);
  op.run(left, right, sum);
  sum.store(result);
}
"""


@pytest.fixture(scope="module")
def library() -> ShaderLibrary:
    return compile_shader(HEAD + PRODUCT)


def run(library: ShaderLibrary, kernel: str, k: int = 64, threads: int = 32) -> tuple[Tensor, Tensor]:
    """The kernel's result, and the exact product: small integers, so that no order of additions shows."""
    generator = torch.Generator().manual_seed(k)
    a, b = (torch.randint(-8, 9, (n, k), generator=generator).half() for n in (16, 64))
    y = torch.full((16, 64), torch.nan)
    getattr(library, kernel)(a, b, y, k, threads=threads, group_size=threads)
    return y, a.float() @ b.float().T


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("layout", COOPERATIVE_LAYOUTS)
def test_products_are_right_in_every_layout(library: ShaderLibrary, layout: str, checked: bool):
    with settings(cooperative_layout=layout, checked=checked):
        for k in (32, 96):
            assert torch.equal(*run(library, "product", k))
        for k in (1, 40, 96):
            assert torch.equal(*run(library, "whole", k, threads=128))
        a, b, y = torch.randn(32, 16).half(), torch.randn(32, 16).half(), torch.empty(16, 16)
        library.transposed(a, b, y, threads=32, group_size=32)
        torch.testing.assert_close(y, a.float().T @ b.float(), rtol=1e-5, atol=1e-5)


def test_blocks_are_the_layout_that_was_reported_for_an_m5(library: ShaderLibrary):
    """A lane's 64 elements of a 64 x 32 operand: runs of 4 along the reduction, the second half 16 further, 8 across."""
    with settings(cooperative_layout="blocks"):
        assert torch.equal(*run(library, "positions"))


def test_orders_of_the_reduction_differ_in_rounding_only(library: ShaderLibrary):
    a, b, results = torch.randn(16, 64).half(), torch.randn(64, 64).half(), []
    for order in PRODUCT_ORDERS:
        with settings(product_order=order):
            results.append(torch.empty(16, 64))
            library.product(a, b, results[-1], 64, threads=32, group_size=32)
    assert not torch.equal(*results)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


# ---- planted bugs ----


def test_default_mode_forgets_the_sum(library: ShaderLibrary):
    assert torch.equal(*run(library, "overwrites", k=32))
    y, expected = run(library, "overwrites", k=64)
    assert not torch.equal(y, expected)


def test_sum_that_was_never_set_is_nan(library: ShaderLibrary):
    assert run(library, "stale")[0].isnan().all()


@pytest.mark.parametrize("layout", [x for x in COOPERATIVE_LAYOUTS if x != "blocks"])
def test_positions_taken_for_granted_give_wrong_products_elsewhere(library: ShaderLibrary, layout: str):
    with settings(cooperative_layout=layout):
        y, expected = run(library, "positions")
    assert not torch.equal(y, expected)


def test_slots_without_an_element_have_no_position(library: ShaderLibrary):
    assert torch.equal(*run(library, "dead_slots"))
    with settings(cooperative_layout="dead_slots"), pytest.raises(MetalError, match="a slot that holds no element"):
        run(library, "dead_slots")


def test_slots_end_with_the_capacity(library: ShaderLibrary):
    with pytest.raises(MetalError, match="slot beyond its capacity"):
        run(library, "beyond")


def test_operands_in_threadgroup_memory_need_a_barrier(library: ShaderLibrary):
    assert torch.equal(*run(library, "no_barrier"))
    with settings(checked=True), pytest.raises(MetalError, match="left, byte 0: a read without a barrier after the write of thread 0"):
        run(library, "no_barrier")


def test_scope_is_the_whole_threadgroup(library: ShaderLibrary):
    with pytest.raises(MetalError, match="the scope has 4 simdgroups, the threadgroup has 2"):
        run(library, "whole", threads=64)
    with pytest.raises(MetalError, match="a simdgroup is not full"):
        run(library, "product", threads=16)


# ---- rules that the compiler checks ----

RULES = {
    "with both inputs cooperative m, n and k are 16 or 32": "cooperate<16, 64, 32, half, half>()",
    "and one of them is 32": "cooperate<16, 16, 16, half, half>()",
    "at least one of m and n is a multiple of 16": "cooperate<8, 8, 32, half, half>()",
    "m and n are multiples of 8": "cooperate<16, 20, 32, half, half>()",
    "k is dynamic_extent or a multiple of 16": "cooperate<16, 32, 24, half, half>()",
    "cooperative inputs need a static k": "cooperate<16, 32, static_cast<int>(dynamic_extent), half, half>()",
    "cooperative inputs need the scope of one simdgroup": "cooperate<16, 32, 32, half, half, execution_simdgroups<2>>()",
    "this combination of operand types is not supported": "cooperate<16, 32, 32, half, char>()",
    "the cooperative tensor was made for another operation": "mix()",
    "made for another operation, operand or element types": "mix_types()",
    "no matching member function for call to 'run'": "temporary(memory)",
}
RULE_SOURCE = """
template <int M, int N, int K, typename L, typename R, typename Scope = execution_simdgroup>
void cooperate() {
  matmul2d<Shape(M, N, K), Scope> op;
  auto left = op.template get_left_input_cooperative_tensor<L, R, float>();
  auto right = op.template get_right_input_cooperative_tensor<L, R, float>();
  auto sum = op.template get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  op.run(left, right, sum);
}
template <int N = 32>
void mix() {
  matmul2d<Shape(16, N, 32), execution_simdgroup> op;
  matmul2d<Shape(32, N, 32), execution_simdgroup> other;
  auto left = op.template get_left_input_cooperative_tensor<half, half, float>();
  auto right = op.template get_right_input_cooperative_tensor<half, half, float>();
  auto sum = other.template get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  op.run(left, right, sum);
}
template <int N = 32>
void mix_types() {
  matmul2d<Shape(16, N, 32), execution_simdgroup> op;
  auto left = op.template get_left_input_cooperative_tensor<bfloat, bfloat, float>();
  auto right = op.template get_right_input_cooperative_tensor<half, half, float>();
  auto sum = op.template get_destination_cooperative_tensor<half, half, float>();
  op.run(left, right, sum);
}
template <int N = 64>
void temporary(threadgroup half* memory) {
  matmul2d<Shape(16, N, 32), execution_simdgroup> op;
  tensor<threadgroup half, dextents<int, 2>, tensor_inline> view(memory, dextents<int, 2>(32, 16));
  auto right = op.template get_right_input_cooperative_tensor<half, half, float>();
  auto sum = op.template get_destination_cooperative_tensor<decltype(view), decltype(right), float>();
  op.run(view.slice(0, 0), right, sum);
}
kernel void k(device int* x, uint i [[thread_position_in_grid]]) {
  threadgroup half memory[512];
  CALL;
}
"""


@pytest.mark.parametrize("message", RULES)
def test_illegal_products_do_not_compile(message: str):
    with pytest.raises(SyntaxError, match=message):
        compile_shader(HEAD + RULE_SOURCE.replace("CALL", RULES[message]))


def test_slices_stay_inside_their_tensor():
    source = """
kernel void k(device half* x [[buffer(0)]], constant int& column [[buffer(1)]], uint lane [[thread_index_in_simdgroup]]) {
  tensor<device half, dextents<int, 2>, tensor_inline> view(x, dextents<int, 2>(40, 16));
  auto part = view.slice<32, 16>(column, 0);
  if (lane == 0) *part.address(31, 15) = half(1.0f);
}
"""
    library, x = compile_shader(HEAD + source), torch.zeros(16, 40, dtype=torch.half)
    library.k(x, 8, threads=32)
    assert x[15, 39] == 1 and x.sum() == 1
    with pytest.raises(MetalError, match="tensor slice outside its tensor"):
        library.k(x, 9, threads=32)


def test_tensors_need_metal_4():
    with pytest.raises(SyntaxError, match="this header needs Metal 4"):
        compile_shader(HEAD, metal_version=320)
    compile_shader(f"#if __METAL_VERSION__ >= 400\n{HEAD}{PRODUCT}\n#endif\nkernel void k(device int* x) {{ x[0] = 0; }}", metal_version=320)
