"""The interpreter catches what it claims to catch, on a small hand-written pipeline, and runs right what is right."""

import numpy as np
import pytest

from . import assembly
from .interpreter import LATE, SCHEDULES, Hazard, Schedule, run
from .toolchain import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

CHUNKS = 5


def pipeline() -> assembly.Kernel:
    """Two waves copy a chunk each into double-buffered LDS, read what the other wave copied, and add it up: the skeleton of the GEMM."""
    lines = ["s_load_dwordx4 s[4:7], s[0:1], 0x0", "v_readfirstlane_b32 s12, v0", "s_lshr_b32 s12, s12, 6", "v_and_b32 v1, 63, v0", "v_lshlrev_b32 v2, 2, v0"]
    lines += ["v_lshlrev_b32 v1, 2, v1", "s_xor_b32 s13, s12, 1", "s_lshl_b32 s13, s13, 8", "v_add_u32 v3, s13, v1", "s_lshl_b32 s14, s12, 8", "v_mov_b32 v5, 0"]
    lines += ["s_waitcnt lgkmcnt(0)", "s_mov_b64 s[8:9], s[4:5]", f"s_movk_i32 s10, {512 * CHUNKS:#x}", "s_mov_b32 s11, 0x27000"]

    def copy(t: int) -> list[str]:
        return [f"s_add_i32 m0, s14, {t % 2 * 512}", f"v_add_u32 v4, {t * 512:#x}, v2", "buffer_load_dword v4, s[8:11], 0 offen lds"]

    lines += copy(0) + copy(1)
    for t in range(CHUNKS):
        lines += [f"s_waitcnt vmcnt({int(t + 1 < CHUNKS)})", "s_barrier", f"ds_read_b32 v6, v3 offset:{t % 2 * 512}", "s_waitcnt lgkmcnt(0)"]
        lines += ["v_add_u32 v5, v5, v6", "s_barrier"] + (copy(t + 2) if t + 2 < CHUNKS else [])
    lines += ["global_store_dword v2, v5, s[6:7]", "s_endpgm"]
    return assembly.parse("\n".join(lines))["main"]


def go(kernel: assembly.Kernel, schedule: Schedule = LATE) -> None:
    data = np.random.default_rng(0).integers(0, 1 << 20, (CHUNKS, 2, 64), dtype=np.uint32)
    out = np.zeros((2, 64), np.uint32)
    run(kernel, 1, 128, data, out, schedule=schedule, lds_bytes=1024)
    np.testing.assert_array_equal(out, data.sum(0, dtype=np.uint32)[::-1])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.retire}-{s.order}")
def test_a_correct_pipeline_runs_under_every_schedule(schedule):
    go(pipeline(), schedule)


def plants() -> list[tuple[str, int, str]]:
    k = pipeline()
    out = [("wait one too weak", i, "s_waitcnt vmcnt(2)") for i in k.find("s_waitcnt", "vmcnt(1)")]
    out += [("tail not drained", i, "s_waitcnt vmcnt(1)") for i in k.find("s_waitcnt", "vmcnt(0)")]
    out += [("read not waited for", i, "s_nop 0") for i in k.find("s_waitcnt", "lgkmcnt(0)")]
    # Two barriers per chunk; the second orders nothing when no refill follows it (the last two chunks).
    needed = [i for n, i in enumerate(k.find("s_barrier")) if n % 2 == 0 or n // 2 < CHUNKS - 2]
    return out + [("barrier removed", i, "s_nop 0") for i in needed]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.retire}-{s.order}")
@pytest.mark.parametrize(("what", "index", "instead"), plants(), ids=lambda x: str(x).replace(" ", "_"))
def test_every_planted_bug_is_caught_under_every_schedule(what, index, instead, schedule):
    with pytest.raises(Hazard):
        go(pipeline().replaced(index, instead), schedule)


def test_an_unknown_opcode_is_an_error_that_names_its_line():
    with pytest.raises(Hazard, match=r"unknown-opcode: v_frobnicate_b32[\s\S]*assembly line 1"):
        run(assembly.parse("v_frobnicate_b32 v0, v1\ns_endpgm")["main"], 1, 64)
