"""Bugs planted in the shipped kernels' own instructions are caught: by a hazard or by the numbers."""

from pathlib import Path

import numpy as np
import pytest

from . import launches, mx
from .assembly import Kernel
from .interpreter import LATE, Hazard, run
from .toolchain import compile_hip, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

LAYOUT = Path(__file__).parent / "kernels" / "layout.hip"
KERNELS = ["packed 256x256", "raw 256x256", "raw 256x128"]
K = 1280  # ten steps: main loop, tail, three scale chunks


def caught(name: str, kernel: Kernel) -> bool:
    n = launches.GEMM_KERNELS[name][1]
    x = mx.operands(256, n, K, b_rows=32)
    out = np.full((256, n), np.nan, np.float32)
    try:
        launches.gemm(name, x.a, x.b, x.a_scale, x.b_scale, out, kernel=kernel, schedule=LATE)
    except Hazard:
        return True
    return not mx.error(out, x.product) < 1e-6


@pytest.fixture(scope="module", params=KERNELS)
def shipped(request) -> tuple[str, Kernel, range]:
    kernel = launches.gemm_kernel(request.param)
    assert not caught(request.param, kernel)
    return request.param, kernel, kernel.loop()


def test_every_memory_wait_that_is_one_too_weak_is_caught(shipped):
    """From the prologue to the end of the tail: the last of them is the drain before the tail's last reads."""
    name, kernel, _ = shipped
    last = kernel.find("v_mfma_scale_f32_16x16x128_f8f6f4")[-1]
    waits = [i for i in kernel.find("s_waitcnt", "vmcnt") if i < last]
    assert len(waits) >= 3
    for i in waits:
        x = kernel.instructions[i]
        n = int(x.modifiers["vmcnt"])
        assert caught(name, kernel.replaced(i, x.text.replace(f"vmcnt({n})", f"vmcnt({n + 1})"))), f"line {x.line}: {x.text}"


def test_every_barrier_of_the_main_loop_is_needed_or_paces_the_two_wave_groups(shipped):
    """The wide tile's phase 1 reads a half tile that phase 3 refills: its two barriers keep the groups in step and order nothing alone."""
    name, kernel, loop = shipped
    barriers = [i for i in kernel.find("s_barrier") if i in loop]
    survived = [n for n, i in enumerate(barriers) if not caught(name, kernel.replaced(i, "s_nop 0"))]
    assert len(survived) <= (2 if "256x256" in name else 0), f"barriers {survived} of {len(barriers)}"


def test_a_missing_wait_for_lds_reads_before_a_barrier_is_caught(shipped):
    name, kernel, loop = shipped
    waits = [i for i in kernel.find("s_waitcnt", "lgkmcnt(0)") if i in loop and "barrier" in kernel.instructions[i + 1].opcode]
    assert waits and any(caught(name, kernel.replaced(i, "s_waitcnt lgkmcnt(1)")) for i in waits)


def test_a_stale_scale_chunk_is_caught(shipped):
    name, kernel, loop = shipped
    copies = [i for i in kernel.find("buffer_load_dword") if i in loop and kernel.instructions[i].is_copy]
    if name.startswith("packed"):
        assert not copies
        return
    assert len(copies) == 3
    assert all(caught(name, kernel.replaced(i, "s_nop 0")) for i in copies)


def layout_error(size: int, equal_scales: bool, **defines: int) -> float:
    k = 128 if size == 16 else 64
    x = mx.operands(size, size, k, scales=(127, 128) if equal_scales else (118, 132))
    c = np.full((size, size), np.nan, np.float32)
    run(compile_hip(LAYOUT, defines={"SIZE": size} | defines)["tile"], 1, 64, x.a, x.b, x.a_scale, x.b_scale, c)
    return mx.error(c, x.product)


@pytest.mark.parametrize("size", [16, 32])
def test_a_wrong_operand_layout_shows_only_with_scales_that_differ(size):
    assert layout_error(size, equal_scales=False) < 1e-6
    assert layout_error(size, equal_scales=True, CONTIGUOUS=1) < 1e-6
    assert layout_error(size, equal_scales=False, CONTIGUOUS=1) > 0.1
