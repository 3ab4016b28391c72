"""Triton's own compiled scaled-dot kernel gives the right product here: it was written and scheduled by others."""

import numpy as np
import pytest

from . import mx
from .interpreter import SCHEDULES, run
from .toolchain import TritonGemm, compile_triton, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.retire}-{s.order}")
@pytest.mark.parametrize("gemm", [TritonGemm(), TritonGemm(128, 128, warps=4, matrix=32)], ids=["16x16x128", "32x32x64"])
def test_triton_scaled_dot_is_right(gemm, schedule):
    m, n, k = 256, 256, 384
    x = mx.operands(m, n, k)
    c = np.full((m, n), 0xFFFF, np.uint16)
    kernel, lds = compile_triton(gemm)
    run(
        kernel,
        (n // gemm.block_n, m // gemm.block_m),
        64 * gemm.warps,
        x.a,
        x.b,
        x.a_scale,
        x.b_scale,
        c,
        m,
        n,
        k,
        schedule=schedule,
        lds_bytes=lds,
    )
    assert mx.error(mx.from_bf16(c), x.product) < 2e-3
