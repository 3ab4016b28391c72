"""The emulator itself: its interface is that of torch.mps, and correct kernels give right results on every GPU it can be."""

from __future__ import annotations

import pytest
import torch

from tests.metal import emulator, toolchain
from tests.metal.emulator import MetalError, compile_shader, settings

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
FULL = HEAD + "kernel void full(device float* out, constant float& val, uint idx [[thread_position_in_grid]]) { out[idx] = val; }"
ROW_SUMS = HEAD + """
[[kernel]] void row_sums(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant int& n [[buffer(2)]],
                         uint row [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float part[4];
  float sum = 0.0f;
  for (int i = tid; i < n; i += 128) sum += x[row * n + i];
  sum = simd_sum(sum);
  if (lane == 0) part[sg] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid == 0) y[row] = part[0] + part[1] + part[2] + part[3];
}
"""


def test_example_of_the_torch_documentation():
    x = torch.zeros(16)
    compile_shader(FULL).full(x, 3.14)
    assert torch.equal(x, torch.full((16,), 3.14))


@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize("checked", [False, True])
def test_reduction_through_threadgroup_memory(order: str, checked: bool):
    x, y = torch.randn(3, 1000), torch.empty(3)
    with settings(order=order, checked=checked):
        compile_shader(ROW_SUMS).row_sums(x, y, 1000, threads=(3 * 128,), group_size=(128,))
    torch.testing.assert_close(y, x.sum(1), rtol=1e-4, atol=1e-4)


def test_missing_barrier_is_found():
    lines = [line for line in ROW_SUMS.splitlines() if "threadgroup_barrier" not in line]
    with settings(checked=True), pytest.raises(MetalError, match="without a barrier|nobody wrote"):
        compile_shader("\n".join(lines)).row_sums(torch.randn(3, 1000), torch.empty(3), 1000, threads=(3 * 128,), group_size=(128,))
