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
    lines = [
        "s_load_dwordx4 s[4:7], s[0:1], 0x0",
        "v_readfirstlane_b32 s12, v0",
        "s_lshr_b32 s12, s12, 6",
        "v_and_b32 v1, 63, v0",
        "v_lshlrev_b32 v2, 2, v0",
    ]
    lines += [
        "v_lshlrev_b32 v1, 2, v1",
        "s_xor_b32 s13, s12, 1",
        "s_lshl_b32 s13, s13, 8",
        "v_add_u32 v3, s13, v1",
        "s_lshl_b32 s14, s12, 8",
        "v_mov_b32 v5, 0",
    ]
    lines += [
        "s_waitcnt lgkmcnt(0)",
        "s_mov_b64 s[8:9], s[4:5]",
        f"s_movk_i32 s10, {512 * CHUNKS:#x}",
        "s_mov_b32 s11, 0x27000",
    ]

    def copy(t: int) -> list[str]:
        return [
            f"s_add_i32 m0, s14, {t % 2 * 512}",
            f"v_add_u32 v4, {t * 512:#x}, v2",
            "buffer_load_dword v4, s[8:11], 0 offen lds",
        ]

    lines += copy(0) + copy(1)
    for t in range(CHUNKS):
        lines += [
            f"s_waitcnt vmcnt({int(t + 1 < CHUNKS)})",
            "s_barrier",
            f"ds_read_b32 v6, v3 offset:{t % 2 * 512}",
            "s_waitcnt lgkmcnt(0)",
        ]
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


def body(text: str, block: int, *arrays: np.ndarray, schedule: Schedule = LATE, lds_bytes: int = 4096) -> None:
    """Pointers to the arrays in s[8:9], s[10:11], ...; v9 = 4 * thread."""
    load = [f"s_load_dwordx2 s[{8 + 2 * i}:{9 + 2 * i}], s[0:1], {8 * i:#x}" for i in range(len(arrays))]
    kernel = assembly.parse("\n".join([*load, "v_lshlrev_b32 v9, 2, v0", "s_waitcnt lgkmcnt(0)", text, "s_endpgm"]))["main"]
    run(kernel, 1, block, *arrays, schedule=schedule, lds_bytes=lds_bytes)


DESCRIPTOR = "s_mov_b64 s[20:21], s[8:9]\ns_movk_i32 s22, 100\ns_mov_b32 s23, 0x27000\n"
HAZARDS = {
    "lds-write-at-end": DESCRIPTOR + "s_mov_b32 m0, 0\nbuffer_load_dword v9, s[20:23], 0 offen lds",
    "lds-read-in-flight": DESCRIPTOR
    + "s_mov_b32 m0, 0\nbuffer_load_dword v9, s[20:23], 0 offen lds\nds_read_b32 v1, v9\ns_waitcnt vmcnt(0) lgkmcnt(0)",
    "lds-overwrite-pending-read": DESCRIPTOR
    + "s_mov_b32 m0, 0\nds_read_b32 v1, v9\nbuffer_load_dword v9, s[20:23], 0 offen lds\ns_waitcnt vmcnt(0) lgkmcnt(0)",
    "lds-race": "v_xor_b32 v2, 0x100, v9\nds_write_b32 v9, v0\ns_waitcnt lgkmcnt(0)\nds_read_b32 v1, v2\ns_waitcnt lgkmcnt(0)",
    "lds-write-in-flight": "v_and_b32 v2, 0xff, v9\nds_write_b32 v2, v0\ns_waitcnt lgkmcnt(0)",
    "out-of-range": "v_lshlrev_b32 v2, 6, v9\nds_read_b32 v1, v2\ns_waitcnt lgkmcnt(0)",
    "divergent-barrier": "v_readfirstlane_b32 s4, v0\ns_cmp_eq_u32 s4, 0\ns_cbranch_scc1 SKIP\ns_barrier\nSKIP:",
    "no-progress": "AGAIN:\ns_branch AGAIN",
    "register-in-flight": "ds_read_b32 v1, v9\nv_add_u32 v2, v1, v1",
}


@pytest.mark.parametrize("kind", HAZARDS)
def test_each_hazard_is_named(kind):
    # Two waves touch the same bytes with both in flight, or one after the other: either name is right for a write over a write.
    names = "lds-write-in-flight|lds-race" if kind == "lds-write-in-flight" else kind
    with pytest.raises(Hazard, match=f"^({names}): "):
        body(HAZARDS[kind], 128, np.zeros(1024, np.uint32), schedule=Schedule(budget=100_000))


def test_a_barrier_under_a_lane_mask_is_refused():
    with pytest.raises(Hazard, match="divergent-barrier"):
        body("v_cmp_gt_u32 vcc, 5, v0\ns_and_saveexec_b64 s[4:5], vcc\ns_barrier", 64)


@pytest.mark.parametrize("checked", [False, True])
def test_soffset_is_inside_or_outside_the_range_check_as_the_schedule_says(checked):
    data, out = np.arange(1, 65, dtype=np.uint32), np.zeros(64, np.uint32)
    text = (
        DESCRIPTOR
        + "s_mov_b32 s24, 16\nbuffer_load_dword v1, v9, s[20:23], s24 offen\ns_waitcnt vmcnt(0)\nglobal_store_dword v9, v1, s[10:11]"
    )
    body("v_min_u32 v9, 0xec, v9\n" + text, 64, data, out, schedule=Schedule(soffset_checked=checked))
    seen = 21 if checked else 25  # of 100 bytes, 16 further on
    np.testing.assert_array_equal(out[:59], np.where(np.arange(59) < seen, data[4:63], 0))


def test_a_copy_to_lds_checks_each_dword_writes_zeros_out_of_range_and_leaves_the_slots_of_inactive_lanes():
    data, out = np.arange(1, 257, dtype=np.uint32), np.zeros(256, np.uint32)
    text = DESCRIPTOR + "v_lshlrev_b32 v8, 2, v9\ns_mov_b32 m0, 32\nv_cmp_ne_u32 vcc, 3, v0\ns_and_saveexec_b64 s[4:5], vcc\n"
    text += "buffer_load_dwordx4 v8, s[20:23], 0 offen offset:16 lds\ns_mov_b64 exec, s[4:5]\ns_waitcnt vmcnt(0)\n"
    text += "ds_read_b128 v[4:7], v8 offset:48\ns_waitcnt lgkmcnt(0)\nglobal_store_dwordx4 v8, v[4:7], s[10:11]"
    body(text, 64, data, out, schedule=Schedule(soffset_checked=False))
    want = np.where(np.arange(4, 260) < 25, np.arange(5, 261), 0).astype(np.uint32)
    want[12:16] = 0xFFFFFFFF  # lane 3: LDS keeps its poison
    np.testing.assert_array_equal(out, want)


def test_conflicts_of_lds_banks_are_counted():
    def conflicts(stride: int) -> int:
        kernel = assembly.parse(f"v_mul_lo_u32 v1, v0, {stride}\nds_read_b128 v[4:7], v1\ns_waitcnt lgkmcnt(0)\ns_endpgm")[
            "main"
        ]
        return int(run(kernel, 1, 64, lds_bytes=65536).conflict_cycles.sum())

    assert conflicts(16) == 0
    assert conflicts(32) == 4 * 1  # 16 lanes a phase on half of the 16 groups of banks
    assert conflicts(256) == 4 * 15  # all of them on one


@pytest.mark.parametrize(("scale", "want"), [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127), (255, np.nan)])
def test_every_scale_byte_counts_even_the_smallest_and_the_nan(scale, want):
    out = np.zeros(64, np.float32)
    ones = (
        "\n".join(f"v_mov_b32 v{i}, 0x38383838\nv_mov_b32 v{i + 8}, 0" for i in range(16, 24))
        + f"\nv_mov_b32 v24, 0x28\nv_mov_b32 v40, {scale}\nv_mov_b32 v41, 127\n"
    )
    mfma = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[16:23], v[24:31], 0, v40, v41 op_sel_hi:[0,0,0]\n"
    body(ones + mfma + "global_store_dword v9, v0, s[8:9]", 64, out)
    # Each lane of B has one 0.25, at the first K of its group: four products per sum, each scaled.
    np.testing.assert_array_equal(out, np.full(64, want, np.float32))
