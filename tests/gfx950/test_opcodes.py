"""Single instructions against numpy, and every mnemonic of the tables against the assembler."""

import re
import subprocess

import ml_dtypes
import numpy as np
import pytest

from . import assembly, interpreter
from .interpreter import CORE, Hazard, knows, run
from .toolchain import clang, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

RNG = np.random.default_rng(7)
X, Y, Z = (RNG.integers(0, 1 << 32, 64, dtype=np.uint32) for _ in range(3))
F, G, H = ((RNG.normal(size=64) * 2.0 ** RNG.integers(-9, 9, 64)).astype(np.float32) for _ in range(3))
SHIFT = RNG.integers(0, 64, 64, dtype=np.uint32)
LANE = np.arange(64)


def execute(text: str, *sources: np.ndarray, lds_bytes: int = 0) -> np.ndarray:
    """Runs `text` with the sources in v1, v2, v3 and returns v4 (v0 is the lane)."""
    load = [f"s_load_dwordx2 s[{8 + 2 * i}:{9 + 2 * i}], s[0:1], {8 * i:#x}" for i in range(len(sources) + 1)] + [
        "v_lshlrev_b32 v9, 2, v0",
        "s_waitcnt lgkmcnt(0)",
    ]
    load += [f"global_load_dword v{i + 1}, v9, s[{8 + 2 * i}:{9 + 2 * i}]" for i in range(len(sources))] + [
        "s_waitcnt vmcnt(0)",
        "v_mov_b32 v4, 0",
    ]
    out = np.zeros(64, np.uint32)
    at = 8 + 2 * len(sources)
    kernel = assembly.parse("\n".join([*load, text, f"global_store_dword v9, v4, s[{at}:{at + 1}]", "s_endpgm"]))["main"]
    run(kernel, 1, 64, *(s.view(np.uint32) for s in sources), out, lds_bytes=lds_bytes)
    return out


def f32(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def small(x, dtype) -> np.ndarray:
    return np.asarray(x).astype(dtype).view(np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16).astype(np.uint32)


S = X.view(np.int32).astype(np.int64)
T = Y.view(np.int32).astype(np.int64)
CASES = [
    ("v_add_u32 v4, v1, v2", (X, Y), X + Y),
    ("v_sub_u32 v4, v1, v2", (X, Y), X - Y),
    ("v_subrev_u32 v4, v1, v2", (X, Y), Y - X),
    ("v_lshlrev_b32 v4, v1, v2", (SHIFT, X), X << (SHIFT & 31)),
    ("v_ashrrev_i32 v4, v1, v2", (SHIFT, X), (X.view(np.int32) >> (SHIFT & 31).astype(np.int32)).view(np.uint32)),
    ("v_mul_hi_u32 v4, v1, v2", (X, Y), ((X.astype(np.uint64) * Y.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)),
    ("v_mul_hi_i32 v4, v1, v2", (X, Y), ((S * T) >> 32).astype(np.uint32)),
    ("v_mad_u64_u32 v[4:5], s[2:3], v1, v2, 5", (X, Y), X * Y + np.uint32(5)),
    ("v_mad_u64_u32 v[5:6], s[2:3], v1, v2, 5\nv_mov_b32 v4, v6",
     (X, Y), ((X.astype(np.uint64) * Y + np.uint64(5)) >> np.uint64(32)).astype(np.uint32)),
    ("v_bfe_u32 v4, v1, 5, 7", (X,), X >> 5 & 127),
    ("v_bfe_i32 v4, v1, 5, 7", (X,), (((X >> 5 & 127).astype(np.int32) ^ 64) - 64).view(np.uint32)),
    ("v_bfi_b32 v4, v1, v2, v3", (X, Y, Z), X & Y | ~X & Z),
    ("v_perm_b32 v4, v1, v2, v3", (X, Y, np.full(64, 0x0C060100, np.uint32)), (X >> 16 & 255) << 16 | Y & 0xFFFF),
    ("v_bitop3_b32 v4, v1, v2, v3 bitop3:0x78", (X, Y, Z), X ^ (Y & Z)),
    ("v_min_i32 v4, v1, v2", (X, Y), np.minimum(S, T).astype(np.uint32)),
    ("v_max_u32 v4, v1, v2", (X, Y), np.maximum(X, Y)),
    ("v_bfrev_b32 v4, v1", (X,), np.array([int(f"{v:032b}"[::-1], 2) for v in X], np.uint32)),
    ("v_ffbh_u32 v4, v1", (X,), np.array([32 - int(v).bit_length() for v in X], np.uint32)),
    ("v_add_co_u32 v5, vcc, v1, v2\nv_addc_co_u32 v4, vcc, 0, 0, vcc",
     (X, Y), (X.astype(np.uint64) + Y >> np.uint64(32)).astype(np.uint32)),
    ("v_cmp_lt_i32 vcc, v1, v2\nv_cndmask_b32 v4, v1, v2, vcc", (X, Y), np.maximum(S, T).astype(np.uint32)),
    ("v_mul_f32 v4, v1, -v2", (F, G), f32(F * -G)),
    ("v_max3_f32 v4, v1, v2, |v3|", (F, G, H), f32(np.maximum(np.maximum(F, G), abs(H)))),
    ("v_fma_f32 v4, v1, v2, v3", (F, G, H), f32(F.astype(np.float64) * G + H)),
    ("v_ldexp_f32 v4, v1, -3", (F,), f32(F / 8)),
    ("v_mul_f32 v4, 0.5, v1", (F,), f32(F / 2)),
    ("v_cvt_f32_ubyte2 v4, v1", (X,), f32(X >> 16 & 255)),
    ("v_cvt_f32_i32 v4, v1", (X,), f32(S.astype(np.float32))),
    ("v_cvt_pk_bf16_f32 v4, v1, v2", (F, G), small(F, ml_dtypes.bfloat16) | small(G, ml_dtypes.bfloat16) << 16),
    ("v_cvt_f16_f32 v4, v1", (F,), small(F, np.float16)),
    ("v_mov_b32 v4, v3\nv_fma_mixlo_f16 v4, v1, v2, 0", (F, G, X), X & 0xFFFF0000 | small(F * G, np.float16)),
    ("v_bitop3_b16 v4, v1, v2, v3 bitop3:0x78\nv_lshlrev_b32 v4, 16, v4", (X, Y, Z), (X ^ (Y & Z)) << 16),
    ("v_cvt_pk_fp8_f32 v4, v1, v2", (F, G), small(F, ml_dtypes.float8_e4m3fn) | small(G, ml_dtypes.float8_e4m3fn) << 8),
    ("v_cvt_pk_fp8_f32 v4, v1, v2 op_sel:[0,0,1]",
     (F, G), small(F, ml_dtypes.float8_e4m3fn) << 16 | small(G, ml_dtypes.float8_e4m3fn) << 24),
    ("v_cvt_pk_bf8_f32 v4, v1, v2", (F, G), small(F, ml_dtypes.float8_e5m2) | small(G, ml_dtypes.float8_e5m2) << 8),
    ("v_mov_b32_dpp v4, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", (X,), X[LANE ^ 1]),
    ("v_mov_b32_dpp v4, v1 row_ror:8 row_mask:0xf bank_mask:0xf", (X,), X[LANE ^ 8]),
    ("v_mov_b32_dpp v4, v1 row_shr:3 row_mask:0xf bank_mask:0xf bound_ctrl:1", (X,), np.where(LANE % 16 >= 3, X[LANE - 3], 0)),
    ("v_mov_b32_dpp v4, v1 row_half_mirror row_mask:0xf bank_mask:0xf", (X,), X[LANE ^ 7]),
    ("v_mov_b32_dpp v4, v1 row_bcast:15 row_mask:0xa bank_mask:0xf",
     (X,), np.where(LANE // 16 % 2 == 1, X[np.maximum(LANE // 16 * 16 - 1, 0)], 0)),
    ("v_mov_b32_sdwa v4, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2", (X,), X >> 16 & 255),
    ("v_add_u32_sdwa v4, v1, v2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_0 src1_sel:BYTE_3",
     (X, Y), ((X & 0xFFFF) + (Y >> 24) & 0xFFFF) << 16),
    ("v_mov_b32 v4, v1\nv_permlane32_swap_b32 v4, v2", (X, Y), np.where(LANE < 32, X, Y[LANE - 32])),
    ("v_mov_b32 v4, v1\nv_permlane16_swap_b32 v4, v2", (X, Y), np.where(LANE // 16 % 2 == 0, X, Y[LANE - 16])),
    ("v_xor_b32 v5, 5, v0\nv_lshlrev_b32 v5, 2, v5\nds_bpermute_b32 v4, v5, v1\ns_waitcnt lgkmcnt(0)", (X,), X[LANE ^ 5]),
    ("v_mbcnt_lo_u32_b32 v4, -1, 0\nv_mbcnt_hi_u32_b32 v4, -1, v4", (), LANE),
    ("v_readfirstlane_b32 s4, v1\ns_bfe_u32 s4, s4, 0x80008\nv_mov_b32 v4, s4", (X,), np.full(64, X[0] >> 8 & 255)),
    ("v_cmp_gt_u32 vcc, 20, v0\ns_and_saveexec_b64 s[4:5], vcc\nv_mov_b32 v4, v1\ns_mov_b64 exec, s[4:5]",
     (X,), np.where(LANE < 20, X, 0)),
    ("v_lshlrev_b32 v5, 2, v0\nds_write_b32 v5, v1\ns_waitcnt lgkmcnt(0)\nv_xor_b32 v5, 4, v5\nds_read_b32 v4, v5\ns_waitcnt lgkmcnt(0)",
     (X,), X[LANE ^ 1]),
    ("v_mov_b32 v4, v2\nv_lshlrev_b32 v5, 2, v0\nds_write_b32 v5, v1\ns_waitcnt lgkmcnt(0)\n"
     "ds_read_u8_d16_hi v4, v5 offset:1\ns_waitcnt lgkmcnt(0)",
     (X, Y),
     Y & 0xFFFF | (X >> 8 & 255) << 16),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sources", "want"), CASES, ids=[c[0].split("\n")[0].replace(" ", "_") for c in CASES])
def test_an_instruction_computes_what_numpy_does(text, sources, want):
    np.testing.assert_array_equal(execute(text, *sources, lds_bytes=256), np.asarray(want).astype(np.uint32))


def test_a_packed_fp32_instruction_takes_the_halves_that_op_sel_names():
    text = "v_mov_b32 v6, v3\nv_mov_b32 v7, v1\nv_mov_b32 v5, v2\n"
    text += "v_pk_fma_f32 v[4:5], v[6:7], v[6:7], v[6:7] op_sel:[0,1,0] op_sel_hi:[1,0,0] neg_lo:[0,0,1]\n"
    np.testing.assert_array_equal(execute(text, F, G, H), f32(H.astype(np.float64) * F - H))


def test_every_mnemonic_of_the_tables_is_one_of_the_assembler():
    """Without operands the assembler complains about operands for a mnemonic it knows, and about the instruction otherwise."""
    names = set(
        re.findall(
            r'"((?:s|v|ds)_[a-z0-9_]+|buffer_wbl2|buffer_inv)"',
            "".join((CORE / f"{f}.h").read_text() for f in ("salu", "valu", "code", "mfma")),
        )
    )
    names |= {f"v_cmp_{c}_{t}" for c in ("lt", "eq", "ne", "ge") for t in ("i32", "u32", "i64", "u16")}
    names |= {f"buffer_{n}" for n in re.findall(r'"((?:load|store)_(?!lds)[a-z0-9_]+)"', (CORE / "code.h").read_text())}
    names = sorted(n for n in names if not re.search(r"^(s_cmpk?|v_cmpx?)$", n))
    assert len(names) > 300 and all(knows(n) for n in names), [n for n in names if not knows(n)]
    text = "\n".join(names)
    done = subprocess.run(
        [*clang(), "-x", "assembler", "-target", "amdgcn-amd-amdhsa", "-mcpu=gfx950", "-c", "-o", "/dev/null", "-"],
        input=text,
        capture_output=True,
        text=True,
    )
    wrong = [
        names[int(m[1]) - 1]
        for m in re.finditer(r"<stdin>:(\d+):\d+: error: (?:invalid instruction|unknown|.*not supported)", done.stderr)
    ]
    assert not wrong, wrong


def test_a_float_register_read_too_early_names_the_register():
    with pytest.raises(Hazard, match="register-in-flight: uses v4 before the wait"):
        execute("v_lshlrev_b32 v5, 2, v0\nds_read_b32 v4, v5\nv_add_u32 v4, v4, v1", X, lds_bytes=256)


def test_lgkmcnt_promises_nothing_about_scalar_loads_unless_it_is_zero():
    with pytest.raises(Hazard, match="register-in-flight: uses s4"):
        execute("s_load_dword s4, s[0:1], 0x0\ns_load_dword s5, s[0:1], 0x4\ns_waitcnt lgkmcnt(1)\nv_mov_b32 v4, s4")


def test_the_clock_counts_executed_instructions_and_comes_with_lgkmcnt():
    ticks = "s_memrealtime s[4:5]\ns_nop 0\ns_nop 0\ns_memrealtime s[6:7]\ns_waitcnt lgkmcnt(0)\ns_sub_u32 s4, s6, s4\nv_mov_b32 v4, s4"
    assert (execute(ticks) == 3).all()
    with pytest.raises(Hazard, match="register-in-flight: uses s6"):
        execute(ticks.replace("s_waitcnt lgkmcnt(0)\n", ""))


def test_a_store_past_an_array_is_caught_and_a_descriptor_masks_it():
    descriptor = "s_mov_b64 s[20:21], s[10:11]\ns_movk_i32 s22, 100\ns_mov_b32 s23, 0x27000\n"
    out = execute(descriptor + "buffer_load_dword v4, v9, s[20:23], 0 offen\ns_waitcnt vmcnt(0)", Y, X)
    np.testing.assert_array_equal(out, np.where(LANE < 25, X, 0))
    with pytest.raises(Hazard, match="out-of-range"):
        execute("v_lshlrev_b32 v5, 3, v0\nglobal_load_dword v4, v5, s[8:9]\ns_waitcnt vmcnt(0)", X)


def test_an_unknown_modifier_is_refused():
    with pytest.raises(ValueError, match="unknown modifier frob"):
        interpreter.run(assembly.parse("v_mov_b32 v0, v1 frob:1\ns_endpgm")["main"], 1, 64)
