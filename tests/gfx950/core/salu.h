// The scalar instructions.
#pragma once
#include "alu.h"

namespace gfx950 {

inline const AluOp kSalu[] = {
    ROW("s_mov_b32", "u=u", a), ROW("s_movk_i32", "u=s", s16(a)), ROW("s_mov_b64", "q=q", a),
    ROW("s_cmov_b32", "u=u", x.carry ? a : x.old), ROW("s_brev_b32", "u=u", reverse(a)),
    FLAG("s_add_u32", "u=uu", a + b, (a + b) >> 32), FLAG("s_sub_u32", "u=uu", a - b, b > a),
    FLAG("s_add_i32", "u=uu", a + b, sx(a + b) != sx(a) + sx(b)), FLAG("s_sub_i32", "u=uu", a - b, sx(a - b) != sx(a) - sx(b)),
    FLAG("s_addc_u32", "u=uu", a + b + x.carry, (a + b + x.carry) >> 32),
    FLAG("s_subb_u32", "u=uu", a - b - x.carry, b + x.carry > a),
    FLAG("s_addk_i32", "u=s", x.old + s16(a), sx(x.old + u64(s16(a))) != sx(x.old) + s16(a)),
    ROW("s_mul_i32", "u=uu", a * b), ROW("s_mulk_i32", "u=s", x.old * u64(s16(a))),
    ROW("s_mul_hi_u32", "u=uu", (a * b) >> 32), ROW("s_mul_hi_i32", "u=uu", (sx(a) * sx(b)) >> 32),
    FLAG("s_min_i32", "u=uu", sx(a) < sx(b) ? a : b, sx(a) < sx(b)), FLAG("s_max_i32", "u=uu", sx(a) > sx(b) ? a : b, sx(a) > sx(b)),
    FLAG("s_min_u32", "u=uu", a < b ? a : b, a < b), FLAG("s_max_u32", "u=uu", a > b ? a : b, a > b),
    SCC32("s_lshl_b32", a << (b & 31)), SCC32("s_lshr_b32", a >> (b & 31)), SCC32("s_ashr_i32", sx(a) >> (b & 31)),
    SCC("s_lshl_b64", "q=qu", a << (b & 63)), SCC("s_lshr_b64", "q=qu", a >> (b & 63)),
    SCC("s_ashr_i64", "q=qu", i64(a) >> (b & 63)),
    FLAG("s_lshl1_add_u32", "u=uu", (a << 1) + b, ((a << 1) + b) >> 32), FLAG("s_lshl2_add_u32", "u=uu", (a << 2) + b, ((a << 2) + b) >> 32),
    FLAG("s_lshl3_add_u32", "u=uu", (a << 3) + b, ((a << 3) + b) >> 32), FLAG("s_lshl4_add_u32", "u=uu", (a << 4) + b, ((a << 4) + b) >> 32),
    SCC32("s_and_b32", a & b), SCC32("s_or_b32", a | b), SCC32("s_xor_b32", a ^ b), SCC32("s_andn2_b32", a & ~b), SCC32("s_orn2_b32", a | ~b),
    SCC32("s_nand_b32", ~(a & b)), SCC32("s_nor_b32", ~(a | b)), SCC32("s_xnor_b32", ~(a ^ b)),
    SCC("s_and_b64", "q=qq", a & b), SCC("s_or_b64", "q=qq", a | b), SCC("s_xor_b64", "q=qq", a ^ b), SCC("s_andn2_b64", "q=qq", a & ~b),
    SCC("s_orn2_b64", "q=qq", a | ~b), SCC("s_nand_b64", "q=qq", ~(a & b)), SCC("s_nor_b64", "q=qq", ~(a | b)), SCC("s_xnor_b64", "q=qq", ~(a ^ b)),
    FLAG("s_not_b32", "u=u", ~a, u32(~a) != 0), SCC("s_not_b64", "q=q", ~a),
    FLAG("s_abs_i32", "u=u", sx(a) < 0 ? -sx(a) : sx(a), u32(a) != 0),
    ROW("s_sext_i32_i8", "u=u", i64(int8_t(a))), ROW("s_sext_i32_i16", "u=u", s16(a)),
    ROW("s_bitset1_b32", "u=u", x.old | 1ull << (a & 31)), ROW("s_bitset0_b32", "u=u", x.old & ~(1ull << (a & 31))),
    SCC32("s_bfe_u32", bfe(a, b, b >> 16 & 127, false)), SCC32("s_bfe_i32", bfe(a, b, b >> 16 & 127, true)),
    SCC("s_bfe_i64", "q=qu", bfe64(a, b & 63, b >> 16 & 127, true)),
    SCC("s_bfe_u64", "q=qu", bfe64(a, b & 63, b >> 16 & 127, false)),
    ROW("s_bfm_b32", "u=uu", ((1ull << (a & 31)) - 1) << (b & 31)), ROW("s_bfm_b64", "q=uu", ((1ull << (a & 63)) - 1) << (b & 63)),
    FLAG("s_bcnt1_i32_b32", "u=u", __builtin_popcountll(a), a != 0), FLAG("s_bcnt1_i32_b64", "u=q", __builtin_popcountll(a), a != 0),
    ROW("s_ff1_i32_b32", "u=u", find_low(a, 32)), ROW("s_ff1_i32_b64", "u=q", find_low(a, 64)), ROW("s_flbit_i32_b32", "u=u", find_high(a)),
    ROW("s_pack_ll_b32_b16", "u=uu", (a & 0xffff) | (b & 0xffff) << 16), ROW("s_pack_lh_b32_b16", "u=uu", (a & 0xffff) | (b & 0xffff0000)),
    ROW("s_pack_hh_b32_b16", "u=uu", a >> 16 | (b & 0xffff0000)),
    ROW("s_cselect_b32", "u=uu", x.carry ? a : b), ROW("s_cselect_b64", "q=qq", x.carry ? a : b),
    CMPI("s_cmp", "i32", "lg", "=uu", sx), CMPI("s_cmp", "u32", "lg", "=uu", u32),
    CMPI("s_cmpk", "i32", "lg", "=us", sx), CMPI("s_cmpk", "u32", "lg", "=us", u16),
    {"s_cmp_eq_u64", "=qq", [](Alu& x) { x.flag = x.a == x.b; }}, {"s_cmp_lg_u64", "=qq", [](Alu& x) { x.flag = x.a != x.b; }},
    {"s_bitcmp1_b32", "=uu", [](Alu& x) { x.flag = x.a >> (x.b & 31) & 1; }}, {"s_bitcmp0_b32", "=uu", [](Alu& x) { x.flag = !(x.a >> (x.b & 31) & 1); }},
};

}  // namespace gfx950
