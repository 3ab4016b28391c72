// The vector instructions, lane by lane.
#pragma once
#include "alu.h"

namespace gfx950 {

inline i64 q64(u64 x) { return i64(x); }
inline float h16(u64 x) { return from_f16(x); }
inline u64 pk(u64 lo, u64 hi) { return (lo & 0xffff) | (hi & 0xffff) << 16; }
inline float med3(float a, float b, float c) { return std::fmax(std::fmin(a, b), std::fmin(std::fmax(a, b), c)); }

inline const AluOp kValu[] = {
    // moves, bits
    ROW("v_mov_b32", "u=u", a), ROW("v_mov_b64", "q=q", a), ROW("v_accvgpr_read_b32", "u=u", a), ROW("v_accvgpr_write_b32", "u=u", a),
    ROW("v_accvgpr_mov_b32", "u=u", a), ROW("v_not_b32", "u=u", ~a), ROW("v_bfrev_b32", "u=u", reverse(a)),
    ROW("v_ffbh_u32", "u=u", find_high(a)), ROW("v_ffbl_b32", "u=u", find_low(a, 32)), ROW("v_bcnt_u32_b32", "u=uu", __builtin_popcount(u32(a)) + b),
    ROW("v_and_b32", "u=uu", a & b), ROW("v_or_b32", "u=uu", a | b), ROW("v_xor_b32", "u=uu", a ^ b), ROW("v_xnor_b32", "u=uu", ~(a ^ b)),
    ROW("v_and_or_b32", "u=uuu", (a & b) | c), ROW("v_or3_b32", "u=uuu", a | b | c), ROW("v_xad_u32", "u=uuu", (a ^ b) + c),
    ROW("v_bfi_b32", "u=uuu", (a & b) | (~a & c)), ROW("v_bfm_b32", "u=uu", ((1ull << (a & 31)) - 1) << (b & 31)),
    ROW("v_bfe_u32", "u=uuu", bfe(a, b, c, false)), ROW("v_bfe_i32", "u=uuu", bfe(a, b, c, true)),
    ROW("v_bitop3_b32", "u=uuu", truth(u64(x.in->mod[kBitop3]), a, b, c)), ROW("v_perm_b32", "u=uuu", perm_bytes(a, b, c)),
    ROW("v_alignbit_b32", "u=uuu", ((a << 32) | b) >> (c & 31)), ROW("v_alignbyte_b32", "u=uuu", ((a << 32) | b) >> (8 * (c & 3))),
    ROW("v_lshlrev_b32", "u=uu", b << (a & 31)), ROW("v_lshrrev_b32", "u=uu", b >> (a & 31)), ROW("v_ashrrev_i32", "u=uu", sx(b) >> (a & 31)),
    ROW("v_lshlrev_b64", "q=uq", b << (a & 63)), ROW("v_lshrrev_b64", "q=uq", b >> (a & 63)), ROW("v_ashrrev_i64", "q=uq", i64(b) >> (a & 63)),
    ROW("v_lshlrev_b16", "s=ss", (b & 0xffff) << (a & 15)), ROW("v_lshrrev_b16", "s=ss", (b & 0xffff) >> (a & 15)),
    ROW("v_ashrrev_i16", "s=ss", s16(b) >> (a & 15)),
    ROW("v_lshl_or_b32", "u=uuu", (a << (b & 31)) | c), ROW("v_lshl_add_u32", "u=uuu", (a << (b & 31)) + c),
    ROW("v_lshl_add_u64", "q=quq", (a << (b & 7)) + c), ROW("v_add_lshl_u32", "u=uuu", (a + b) << (c & 31)),
    // integers
    ROW("v_add_u32", "u=uu", a + b), ROW("v_sub_u32", "u=uu", a - b), ROW("v_subrev_u32", "u=uu", b - a), ROW("v_add3_u32", "u=uuu", a + b + c),
    ROW("v_add_i32", "u=uu", a + b), ROW("v_sub_i32", "u=uu", a - b),
    ROW("v_add_u16", "s=ss", a + b), ROW("v_sub_u16", "s=ss", a - b), ROW("v_subrev_u16", "s=ss", b - a), ROW("v_mul_lo_u16", "s=ss", (a & 0xffff) * (b & 0xffff)),
    ROW("v_mad_u16", "s=sss", a * b + c), ROW("v_min_u16", "s=ss", u16(a) < u16(b) ? a : b), ROW("v_max_u16", "s=ss", u16(a) > u16(b) ? a : b),
    ROW("v_min_i16", "s=ss", s16(a) < s16(b) ? a : b), ROW("v_max_i16", "s=ss", s16(a) > s16(b) ? a : b),
    FLAG("v_add_co_u32", "um=uu", a + b, (a + b) >> 32), FLAG("v_sub_co_u32", "um=uu", a - b, b > a), FLAG("v_subrev_co_u32", "um=uu", b - a, a > b),
    FLAG("v_addc_co_u32", "um=uum", a + b + x.carry, (a + b + x.carry) >> 32), FLAG("v_subb_co_u32", "um=uum", a - b - x.carry, b + x.carry > a),
    FLAG("v_subbrev_co_u32", "um=uum", b - a - x.carry, a + x.carry > b),
    ROW("v_mul_lo_u32", "u=uu", a * b), ROW("v_mul_hi_u32", "u=uu", (a * b) >> 32), ROW("v_mul_hi_i32", "u=uu", (sx(a) * sx(b)) >> 32),
    ROW("v_mul_u32_u24", "u=uu", (a & 0xffffff) * (b & 0xffffff)), ROW("v_mul_hi_u32_u24", "u=uu", ((a & 0xffffff) * (b & 0xffffff)) >> 32),
    ROW("v_mul_i32_i24", "u=uu", (sx(a << 8) >> 8) * (sx(b << 8) >> 8)),
    ROW("v_mad_u32_u24", "u=uuu", (a & 0xffffff) * (b & 0xffffff) + c), ROW("v_mad_i32_i24", "u=uuu", (sx(a << 8) >> 8) * (sx(b << 8) >> 8) + i64(c)),
    FLAG("v_mad_u64_u32", "qm=uuq", a * b + c, a * b + c < c), FLAG("v_mad_i64_i32", "qm=uuq", u64(sx(a) * sx(b)) + c, false),
    ROW("v_min_u32", "u=uu", a < b ? a : b), ROW("v_max_u32", "u=uu", a > b ? a : b), ROW("v_min_i32", "u=uu", sx(a) < sx(b) ? a : b),
    ROW("v_max_i32", "u=uu", sx(a) > sx(b) ? a : b), ROW("v_min3_u32", "u=uuu", std::min(a, std::min(b, c))), ROW("v_max3_u32", "u=uuu", std::max(a, std::max(b, c))),
    ROW("v_min3_i32", "u=uuu", std::min(sx(a), std::min(sx(b), sx(c)))), ROW("v_max3_i32", "u=uuu", std::max(sx(a), std::max(sx(b), sx(c)))),
    ROW("v_med3_i32", "u=uuu", std::max(std::min(sx(a), sx(b)), std::min(std::max(sx(a), sx(b)), sx(c)))),
    ROW("v_med3_u32", "u=uuu", std::max(std::min(a, b), std::min(std::max(a, b), c))),
    ROW("v_cndmask_b32", "u=uum", x.carry ? b : a),
    // fp32
    FLT("v_add_f32", "f=ff", a + b), FLT("v_sub_f32", "f=ff", a - b), FLT("v_subrev_f32", "f=ff", b - a), FLT("v_mul_f32", "f=ff", a * b),
    FLT("v_fma_f32", "f=fff", std::fma(a, b, c)), FLT("v_fmac_f32", "f=ff", std::fma(a, b, f32(x.old))), FLT("v_max_f32", "f=ff", std::fmax(a, b)),
    FLT("v_fmamk_f32", "f=fff", std::fma(a, b, c)), FLT("v_fmaak_f32", "f=fff", std::fma(a, b, c)),
    FLT("v_min_f32", "f=ff", std::fmin(a, b)), FLT("v_max3_f32", "f=fff", std::fmax(a, std::fmax(b, c))), FLT("v_min3_f32", "f=fff", std::fmin(a, std::fmin(b, c))),
    FLT("v_maximum3_f32", "f=fff", std::isnan(a) || std::isnan(b) || std::isnan(c) ? NAN : std::fmax(a, std::fmax(b, c))),
    FLT("v_minimum3_f32", "f=fff", std::isnan(a) || std::isnan(b) || std::isnan(c) ? NAN : std::fmin(a, std::fmin(b, c))),
    FLT("v_med3_f32", "f=fff", med3(a, b, c)), FLT("v_rcp_f32", "f=f", 1.0f / a), FLT("v_rcp_iflag_f32", "f=f", 1.0f / a), FLT("v_sqrt_f32", "f=f", std::sqrt(a)),
    FLT("v_rsq_f32", "f=f", 1.0 / std::sqrt(double(a))), FLT("v_exp_f32", "f=f", std::exp2(double(a))), FLT("v_log_f32", "f=f", std::log2(double(a))),
    FLT("v_rndne_f32", "f=f", std::nearbyint(a)), FLT("v_floor_f32", "f=f", std::floor(a)), FLT("v_ceil_f32", "f=f", std::ceil(a)), FLT("v_trunc_f32", "f=f", std::trunc(a)),
    FLT("v_fract_f32", "f=f", a - std::floor(a)),
    ROW("v_ldexp_f32", "f=fu", bits(float(std::ldexp(f32(a), int(sx(b)))))),
    ROW("v_frexp_exp_i32_f32", "u=f", [&] { int e = 0; if (std::isfinite(f32(a))) std::frexp(f32(a), &e); return i64(e); }()),
    ROW("v_frexp_mant_f32", "f=f", [&] { int e; return bits(float(std::frexp(f32(a), &e))); }()),
    {"v_cmp_class_f32", "m=fu", [](Alu& x) {
       const float v = f32(x.a);
       const bool neg = std::signbit(v);
       const int kind = std::isnan(v) ? (x.a >> 22 & 1 ? 1 : 0) : std::isinf(v) ? (neg ? 2 : 9) : v == 0 ? (neg ? 5 : 6)
                        : std::fpclassify(v) == FP_SUBNORMAL ? (neg ? 4 : 7) : (neg ? 3 : 8);
       x.flag = x.b >> kind & 1;
     }},
    // fp16, fp64
    ROW("v_add_f16", "h=hh", to_f16(h16(a) + h16(b))), ROW("v_sub_f16", "h=hh", to_f16(h16(a) - h16(b))), ROW("v_mul_f16", "h=hh", to_f16(h16(a) * h16(b))),
    ROW("v_fma_f16", "h=hhh", to_f16(float(double(h16(a)) * h16(b) + h16(c)))),
    ROW("v_max_f16", "h=hh", to_f16(std::fmax(h16(a), h16(b)))), ROW("v_min_f16", "h=hh", to_f16(std::fmin(h16(a), h16(b)))),
    ROW("v_add_f64", "d=dd", bits(f64(a) + f64(b))), ROW("v_mul_f64", "d=dd", bits(f64(a) * f64(b))), ROW("v_fma_f64", "d=ddd", bits(std::fma(f64(a), f64(b), f64(c)))),
    // conversions
    ROW("v_cvt_f32_u32", "f=u", bits(float(u32(a)))), ROW("v_cvt_f32_i32", "f=u", bits(float(i32(u32(a))))),
    ROW("v_cvt_u32_f32", "u=f", clamp_int(f32(a), 0, 4294967295.0)), ROW("v_cvt_i32_f32", "u=f", clamp_int(f32(a), -2147483648.0, 2147483647.0)),
    ROW("v_cvt_f32_ubyte0", "f=u", bits(float(a & 0xff))), ROW("v_cvt_f32_ubyte1", "f=u", bits(float(a >> 8 & 0xff))),
    ROW("v_cvt_f32_ubyte2", "f=u", bits(float(a >> 16 & 0xff))), ROW("v_cvt_f32_ubyte3", "f=u", bits(float(a >> 24 & 0xff))),
    ROW("v_cvt_f16_f32", "h=f", to_f16(f32(a))), ROW("v_cvt_f32_f16", "f=h", bits(h16(a))), ROW("v_cvt_f64_f32", "d=f", bits(double(f32(a)))), ROW("v_cvt_f32_f64", "f=d", bits(float(f64(a)))),
    ROW("v_cvt_pk_bf16_f32", "u=ff", pk(to_bf16(f32(a)), to_bf16(f32(b)))), ROW("v_cvt_pk_f16_f32", "u=ff", pk(to_f16(f32(a)), to_f16(f32(b)))),
    ROW("v_cvt_pk_fp8_f32", "u=ff", half(x, to_e4m3(f32(a)) | to_e4m3(f32(b)) << 8)), ROW("v_cvt_pk_bf8_f32", "u=ff", half(x, to_e5m2(f32(a)) | to_e5m2(f32(b)) << 8)),
    ROW("v_cvt_f32_fp8", "f=u", bits(from_e4m3(u32(a)))), ROW("v_cvt_f32_bf8", "f=u", bits(from_e5m2(u32(a)))),
    ROW("v_cvt_pk_f32_fp8", "q=u", bits(from_e4m3(u32(a))) | bits(from_e4m3(u32(a >> 8))) << 32),
    ROW("v_cvt_pk_u8_f32", "u=fuu", (c & ~(0xffull << (8 * (b & 3)))) | u64(clamp_int(std::nearbyint(f32(a)), 0, 255)) << (8 * (b & 3))),
    ROW("v_pack_b32_f16", "u=hh", pk(a, b)),
    // comparisons
    CMPI("v_cmp", "i32", "ne", "m=uu", sx), CMPI("v_cmp", "u32", "ne", "m=uu", u32), CMPI("v_cmp", "i64", "ne", "m=qq", q64), CMPI("v_cmp", "u64", "ne", "m=qq", u64),
    CMPI("v_cmp", "i16", "ne", "m=ss", s16), CMPI("v_cmp", "u16", "ne", "m=ss", u16), CMPF("v_cmp", "f32", "m=ff", f32), CMPF("v_cmp", "f16", "m=hh", h16),
    CMPF("v_cmp", "f64", "m=dd", f64),
    CMPI("v_cmpx", "i32", "ne", "m=uu", sx), CMPI("v_cmpx", "u32", "ne", "m=uu", u32), CMPF("v_cmpx", "f32", "m=ff", f32),
};

}  // namespace gfx950
