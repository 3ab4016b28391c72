// Scalar and per-lane instructions, one table row each: name, signature, meaning.
// Signature: results '=' sources. u 32 bits, f fp32, h fp16 in the low half, s 16-bit integer, q 64 bits, d fp64, m one bit per
// lane. A row reads x.a, x.b, x.c (raw bits; |x| and -x are applied for f, h, d) and x.carry (SCC, or the lane's bit of an 'm'
// source); it writes x.r and, for SCC or an 'm' result, x.flag. x.old is the previous content of the destination.
#pragma once
#include <cmath>
#include <cstring>

#include "program.h"

namespace gfx950 {

struct Alu {
  u64 a, b, c, old, r;
  bool carry, flag;
  const Inst* in;
};
struct AluOp {
  const char *name, *sig;
  void (*run)(Alu&);
};

inline float f32(u64 x) {
  float f;
  u32 y = u32(x);
  std::memcpy(&f, &y, 4);
  return f;
}
inline u64 bits(float f) {
  u32 y;
  std::memcpy(&y, &f, 4);
  return y;
}
inline double f64(u64 x) {
  double f;
  std::memcpy(&f, &x, 8);
  return f;
}
inline u64 bits(double f) {
  u64 y;
  std::memcpy(&y, &f, 8);
  return y;
}
inline i64 sx(u64 x) { return i32(u32(x)); }
inline i64 s16(u64 x) { return int16_t(u16(x)); }

// Rounds to nearest even to a format with `mant` mantissa bits and exponent bias `bias`; `top` is the largest finite code.
inline u32 round_to(float x, int mant, int bias, u32 top, u32 nan, u32 over, int sign_at) {
  const u32 sign = (std::signbit(x) ? 1u : 0u) << sign_at;
  if (std::isnan(x)) return sign | nan;
  if (std::isinf(x)) return sign | over;
  int e;
  const double m = std::frexp(std::fabs(double(x)), &e);  // m in [0.5, 1)
  if (m == 0) return sign;
  const int exponent = std::max(e - 1, 1 - bias);
  const double scaled = std::nearbyint(std::ldexp(std::fabs(double(x)), mant - exponent));
  const u32 code = u32(i64(scaled) + (i64(exponent + bias - 1) << mant));
  return sign | (code > top ? over : code);
}
inline u32 to_bf16(float x) {
  if (std::isnan(x)) return (u32(bits(x)) >> 16) | 0x40;
  const u32 u = u32(bits(x));
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
inline u32 to_f16(float x) { return round_to(x, 10, 15, 0x7bff, 0x7e00, 0x7c00, 15); }
inline u32 to_e4m3(float x) { return round_to(x, 3, 7, 0x7e, 0x7f, 0x7f, 7); }  // FP16_OVFL = 0: overflow is NaN
inline u32 to_e5m2(float x) { return round_to(x, 2, 15, 0x7b, 0x7e, 0x7c, 7); }
inline float from_small(u32 v, int mant, int bias, int sign_at, bool has_inf) {
  const u32 sign = v >> sign_at & 1, mag = v & ((1u << sign_at) - 1), m = mag & ((1u << mant) - 1);
  const int e = int(mag >> mant), emax = (1 << (sign_at - mant)) - 1;
  float x;
  if (e == emax && has_inf) x = m ? NAN : INFINITY;
  else if (e == emax && m == (1u << mant) - 1 && !has_inf) x = NAN;
  else x = e ? std::ldexp(float(m + (1u << mant)), e - bias - mant) : std::ldexp(float(m), 1 - bias - mant);
  return sign ? -x : x;
}
inline float from_f16(u64 v) { return from_small(u32(v & 0xffff), 10, 15, 15, true); }
inline float from_e4m3(u32 v) { return from_small(v & 0xff, 3, 7, 7, false); }
inline float from_e5m2(u32 v) { return from_small(v & 0xff, 2, 15, 7, true); }
inline float from_bf16(u64 v) { return f32((v & 0xffff) << 16); }

inline u64 perm_bytes(u64 hi, u64 lo, u64 select) {  // v_perm_b32: bytes 0..3 of lo, 4..7 of hi
  u64 r = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 s = select >> (8 * i) & 0xff;
    const u64 both = (hi << 32) | (lo & 0xffffffff);
    u64 byte = s < 8 ? both >> (8 * s) & 0xff : s == 12 ? 0 : 0xff;
    if (s >= 8 && s < 12) byte = (both >> (16 * (s - 8) + 15) & 1) ? 0xff : 0;
    r |= byte << (8 * i);
  }
  return r;
}
inline u64 truth(u64 table, u64 a, u64 b, u64 c) {
  u64 r = 0;
  for (int i = 0; i < 8; ++i)
    if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}
inline u64 reverse(u64 x) {
  u64 r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}
inline u64 find_high(u64 x) { return u32(x) ? u64(__builtin_clz(u32(x))) : 0xffffffffu; }
inline u64 find_low(u64 x, int n) {
  for (int i = 0; i < n; ++i)
    if (x >> i & 1) return u64(i);
  return 0xffffffffu;
}
inline i64 clamp_int(double x, double lo, double hi) { return std::isnan(x) ? 0 : i64(std::fmin(std::fmax(x, lo), hi)); }
inline u64 bfe(u64 x, u64 at, u64 n, bool sign) {
  at &= 31, n &= 31;
  if (!n) return 0;
  const u64 v = (x & 0xffffffff) >> at & ((1ull << n) - 1);
  return sign && at + n <= 32 && (v >> (n - 1) & 1) ? v | ~((1ull << n) - 1) : v;
}
inline u64 bfe64(u64 x, u64 at, u64 n, bool sign) {
  if (!n) return 0;
  x = n >= 64 ? x >> at : x >> at & ((1ull << n) - 1);
  return sign && n < 64 && x >> (n - 1) & 1 ? x | ~0ull << n : x;
}
// A 16-bit result goes to the half of the destination that the op_sel bit after the sources' names; the other half keeps its
// content.
inline u64 half(const Alu& x, u64 v) {
  const bool high = x.in->mod[kOpSel] >> (x.in->mod[kOperands] - 1) & 1;
  return high ? (x.old & 0xffff) | (v & 0xffff) << 16 : (x.old & 0xffff0000) | (v & 0xffff);
}

#define ROW(name, sig, expr)              \
  {name, sig, [](Alu& x) {                \
     const u64 a = x.a, b = x.b, c = x.c; \
     (void)a, (void)b, (void)c;           \
     x.r = u64(expr);                     \
   }}
#define FLT(name, sig, expr)                               \
  {name, sig, [](Alu& x) {                                 \
     const float a = f32(x.a), b = f32(x.b), c = f32(x.c); \
     (void)a, (void)b, (void)c;                            \
     x.r = bits(float(expr));                              \
   }}
#define SCC(name, sig, expr)     \
  {name, sig, [](Alu& x) {       \
     const u64 a = x.a, b = x.b; \
     (void)a, (void)b;           \
     x.r = u64(expr);            \
     x.flag = x.r != 0;          \
   }}
#define SCC32(name, expr)        \
  {name, "u=uu", [](Alu& x) {    \
     const u64 a = x.a, b = x.b; \
     (void)a, (void)b;           \
     x.r = u32(expr);            \
     x.flag = x.r != 0;          \
   }}
#define FLAG(name, sig, expr, cond)       \
  {name, sig, [](Alu& x) {                \
     const u64 a = x.a, b = x.b, c = x.c; \
     (void)a, (void)b, (void)c;           \
     x.r = u64(expr);                     \
     x.flag = (cond);                     \
   }}
#define CMP6(prefix, type, sig, get)                                                      \
  {prefix "_lt_" type, sig, [](Alu& x) { x.flag = get(x.a) < get(x.b); }},                \
  {prefix "_gt_" type, sig, [](Alu& x) { x.flag = get(x.a) > get(x.b); }},                \
  {prefix "_le_" type, sig, [](Alu& x) { x.flag = get(x.a) <= get(x.b); }},               \
  {prefix "_ge_" type, sig, [](Alu& x) { x.flag = get(x.a) >= get(x.b); }},               \
  {prefix "_eq_" type, sig, [](Alu& x) { x.flag = get(x.a) == get(x.b); }}
#define CMPI(prefix, type, ne, sig, get) \
  CMP6(prefix, type, sig, get), {prefix "_" ne "_" type, sig, [](Alu& x) { x.flag = get(x.a) != get(x.b); }}
#define CMPF(prefix, type, sig, get)                                                                                       \
  CMP6(prefix, type, sig, get),                                                                                            \
  {prefix "_lg_" type, sig, [](Alu& x) { x.flag = get(x.a) < get(x.b) || get(x.a) > get(x.b); }},                          \
  {prefix "_neq_" type, sig, [](Alu& x) { x.flag = get(x.a) != get(x.b); }},                                               \
  {prefix "_nlt_" type, sig, [](Alu& x) { x.flag = !(get(x.a) < get(x.b)); }},                                             \
  {prefix "_ngt_" type, sig, [](Alu& x) { x.flag = !(get(x.a) > get(x.b)); }},                                             \
  {prefix "_nle_" type, sig, [](Alu& x) { x.flag = !(get(x.a) <= get(x.b)); }},                                            \
  {prefix "_nge_" type, sig, [](Alu& x) { x.flag = !(get(x.a) >= get(x.b)); }},                                            \
  {prefix "_nlg_" type, sig, [](Alu& x) { x.flag = !(get(x.a) < get(x.b) || get(x.a) > get(x.b)); }},                      \
  {prefix "_o_" type, sig, [](Alu& x) { x.flag = !std::isnan(get(x.a)) && !std::isnan(get(x.b)); }},                       \
  {prefix "_u_" type, sig, [](Alu& x) { x.flag = std::isnan(get(x.a)) || std::isnan(get(x.b)); }}

}  // namespace gfx950
