"""The CUDA kernels compile for sm_90a without a GPU and keep their values in registers (the table: make cuda-report)."""

from __future__ import annotations

import pytest

from tests import cuda_report


FEW_BYTES = 16  # of a thread, stores and loads: an address kept for the end of a kernel, nothing inside a loop of products
DELIVERY_BYTES = 112  # the GEMM that delivers to other ranks: where its tiles go; the products keep 232 registers busy


@pytest.mark.skipif(cuda_report.nvcc() is None, reason="no nvcc")
def test_kernels_compile_and_do_not_spill() -> None:
    kernels = cuda_report.report()
    print("\n" + cuda_report.table(kernels))
    assert kernels
    allowed = {"gemm<Config<256, 2, 1>, true, true>": DELIVERY_BYTES}
    assert not [k for k in kernels if k.spilled_bytes > allowed.get(k.name, FEW_BYTES)], "kernels that spill registers"
