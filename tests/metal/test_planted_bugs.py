"""Every kind of bug that the emulator claims to find is planted once (planted_bugs.metal): it is found, and its twin without it passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.metal import toolchain
from tests.metal.emulator import MATRIX_LAYOUTS, ORDERS, MetalError, ShaderLibrary, compile_shader, settings

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))

THREADS, GROUP = 256, 128


@pytest.fixture(scope="module")
def library() -> ShaderLibrary:
    return compile_shader(Path(__file__).with_name("planted_bugs.metal").read_text())


def run(library: ShaderLibrary, kernel: str) -> tuple[Tensor, Tensor]:
    is_bytes = kernel.startswith("vector_load")
    x = torch.arange(THREADS, dtype=torch.int8) if is_bytes else torch.arange(1.0, THREADS + 1)
    y = torch.full((THREADS,), torch.nan)
    getattr(library, kernel)(x, y, threads=THREADS, group_size=GROUP)
    return x, y


def reversed_in_groups(x: Tensor) -> Tensor:
    return x.view(-1, GROUP).flip(1).flatten()


def swapped(distance: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[torch.arange(THREADS) ^ distance]


# What the twin computes, and what the checked build says of the bug.
NO_BARRIER = "without a barrier|nobody wrote"
DIVERGENT = "not all lanes reach"
SEEN_WHERE_LANES_MEET = (DIVERGENT, "at different operations", "a lane that does not exist", "arguments differ")
KERNELS: dict[str, tuple[Callable[[Tensor], Tensor] | None, str]] = {
    "threadgroup_barrier_missing": (reversed_in_groups, NO_BARRIER),
    "threadgroup_barrier_orders_nothing": (reversed_in_groups, NO_BARRIER),
    "barrier_after_the_reads_missing": (lambda x: 3 * reversed_in_groups(x), "without a barrier after the (write|read) of thread"),
    "write_after_a_read": (None, "a write without a barrier after the read of thread"),
    "simdgroup_barrier_missing": (swapped(31), NO_BARRIER),
    "barrier_of_the_wrong_scope": (swapped(64), NO_BARRIER),
    "barrier_before_simdgroup_load_missing": (None, "a read without a barrier after the write"),
    "barrier_after_simdgroup_store_missing": (torch.ones_like, "a read without a barrier after the write"),
    "barrier_of_the_wrong_memory": (swapped(64), "argument 1, byte [0-9]+: a (read|write) without a barrier after the"),
    "barrier_in_a_branch": (lambda x: x, f"{DIVERGENT}.*thread 0 waits at threadgroup_barrier .*thread 64 has returned"),
    "barrier_after_a_return": (lambda x: x, f"{DIVERGENT}.*thread 0 waits at threadgroup_barrier .*thread 96 has returned"),
    "barriers_at_two_places": (lambda x: x, "at different operations: threadgroup_barrier .line .* and threadgroup_barrier"),
    "simd_sum_of_some_lanes": (lambda x: x.view(-1, 32).sum(1).repeat_interleave(32), f"{DIVERGENT}.*simd_sum"),
    "shuffle_from_a_lane_that_returned": (swapped(1), f"{DIVERGENT}.*simd_shuffle_xor"),
    "shuffle_from_a_lane_that_does_not_exist": (swapped(1), "a lane that does not exist"),
    "matrix_product_in_a_branch": (lambda x: torch.full_like(x, 8.0), f"{DIVERGENT}.*simdgroup_multiply_accumulate"),
    "simdgroup_load_from_several_places": (None, "arguments differ between the lanes"),
    "threadgroup_memory_uninitialised": (swapped(1), "tile, byte 28: a read of what nobody wrote"),
    "read_behind_a_buffer": (lambda x: x, "out-of-bounds access, 3 bytes behind argument 0"),
    "read_before_a_buffer": (None, "out-of-bounds access, 4 bytes before argument 0"),
    "write_behind_a_buffer": (lambda x: x, "out-of-bounds access, 3 bytes behind argument 1"),
    "read_behind_a_threadgroup_array": (lambda x: x, "a read behind the end of threadgroup variable first"),
    "write_behind_a_threadgroup_array": (lambda x: torch.zeros_like(x), "a write behind the end of threadgroup variable first"),
    "output_written_by_two_threads": (lambda x: x, "argument 1, byte 0: a write without a barrier after the write of thread 0"),
    "output_written_by_two_threadgroups": (lambda x: x, "argument 1, byte 0: a write to what another threadgroup writes"),
    "vector_load_misaligned": (lambda x: torch.full((THREADS,), 2.0), r"misaligned access \(line \d+\)"),
    "local_array_overflow": (lambda x: x[torch.arange(THREADS) % 4], r"array index out of bounds \(line \d+\)"),
    "signed_overflow": (None, "signed overflow in a multiplication"),
    "division_by_zero": (None, r"division by zero, or its overflow \(line \d+\)"),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_checked_build_finds_the_bug_and_passes_its_twin(library: ShaderLibrary, kernel: str):
    expected, message = KERNELS[kernel]
    with settings(checked=True):
        if kernel == "read_before_a_buffer":
            with pytest.raises(MetalError, match=message):  # the twin of reading before is reading behind's
                run(library, f"{kernel}_bug")
        else:
            x, y = run(library, kernel)
            if expected is not None:
                torch.testing.assert_close(y, expected(x), rtol=0, atol=0)
            with pytest.raises(MetalError, match=message) as error:
                run(library, f"{kernel}_bug")
            assert str(error.value).startswith(f"{kernel}_bug: ") and "[threadgroup " in str(error.value)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", [k for k, (expected, _) in KERNELS.items() if expected])
def test_twins_give_the_same_in_every_lane_order(library: ShaderLibrary, kernel: str, order: str):
    with settings(order=order, seed=3):
        x, y = run(library, kernel)
    torch.testing.assert_close(y, KERNELS[kernel][0](x), rtol=0, atol=0)


# The fast build finds what leaves traces: divergence, accesses beyond the pages of a buffer, writes beyond the end of an array.
@pytest.mark.parametrize("kernel", [k for k, (_, message) in KERNELS.items() if message.startswith(SEEN_WHERE_LANES_MEET)])
def test_fast_build_finds_divergence(library: ShaderLibrary, kernel: str):
    with pytest.raises(MetalError, match=KERNELS[kernel][1]):
        run(library, f"{kernel}_bug")


@pytest.mark.parametrize(
    "kernel, message",
    [
        ("read_behind_a_buffer", "out-of-bounds access, 0 bytes behind argument 0"),
        ("write_behind_a_buffer", "out-of-bounds access, 0 bytes behind argument 1"),
        ("write_behind_a_threadgroup_array", "a write behind the end of threadgroup variable first"),
    ],
)
def test_fast_build_finds_accesses_that_leave_their_memory(library: ShaderLibrary, kernel: str, message: str):
    with pytest.raises(MetalError, match=message):
        run(library, f"{kernel}_bug")


@pytest.mark.parametrize("kernel", ["threadgroup_memory_uninitialised", "local_variable_uninitialised"])
def test_fast_build_turns_uninitialised_values_into_nan(library: ShaderLibrary, kernel: str):
    assert not run(library, kernel)[1].isnan().any()
    assert run(library, f"{kernel}_bug")[1].isnan().any()


def test_a_failed_call_writes_nothing(library: ShaderLibrary):
    x, y = torch.ones(THREADS), torch.full((THREADS,), 7.0)
    with pytest.raises(MetalError):
        library.write_behind_a_buffer_bug(x, y, threads=THREADS, group_size=GROUP)
    assert (y == 7.0).all()


def test_matrix_layouts_show_a_kernel_that_assumes_one(library: ShaderLibrary):
    outputs = []
    for layout in MATRIX_LAYOUTS:
        with settings(matrix_layout=layout):
            outputs.append(run(library, "simdgroup_load_from_several_places")[1])  # writes elements where its lane says
    assert not torch.equal(*outputs)
