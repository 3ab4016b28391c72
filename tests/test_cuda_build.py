"""The CUDA kernels compile for sm_90a without a GPU and keep their values in registers (the table: make cuda-report)."""

from __future__ import annotations

import pytest

from tests import cuda_report


FEW_BYTES = 40  # of a thread, stores and loads: what is kept for the end of a tile or kernel, nothing inside a loop of products
PAIR_BYTES = 80  # the GEMM that adds up the products of two ranks: the same, for what its tiles and sums need
SKINNY_BYTES = 56  # its largest sums: two addresses are read back in each stage


@pytest.mark.skipif(cuda_report.nvcc() is None, reason="no nvcc")
def test_kernels_compile_and_do_not_spill() -> None:
    kernels = cuda_report.report()
    print("\n" + cuda_report.table(kernels))
    assert kernels
    allowed = {"gemm_pair<PairConfig>": PAIR_BYTES, "skinny<7, 48>": SKINNY_BYTES}
    assert not [k for k in kernels if k.spilled_bytes > allowed.get(k.name, FEW_BYTES)], "kernels that spill registers"
