// Math, integer and relational functions of metal_stdlib. half and bfloat are computed in float and rounded once.
#pragma once

#include "types.h"

namespace metal {

#define MSL_UNARY(name, builtin)         \
  template <class V>                     \
  inline msl::if_float<V> name(V x) {    \
    return builtin(x);                   \
  }
MSL_UNARY(exp, __builtin_elementwise_exp)
MSL_UNARY(exp2, __builtin_elementwise_exp2)
MSL_UNARY(log, __builtin_elementwise_log)
MSL_UNARY(log2, __builtin_elementwise_log2)
MSL_UNARY(sqrt, __builtin_elementwise_sqrt)
MSL_UNARY(sin, __builtin_elementwise_sin)
MSL_UNARY(cos, __builtin_elementwise_cos)
MSL_UNARY(tanh, __builtin_elementwise_tanh)
MSL_UNARY(floor, __builtin_elementwise_floor)
MSL_UNARY(ceil, __builtin_elementwise_ceil)
MSL_UNARY(trunc, __builtin_elementwise_trunc)
MSL_UNARY(rint, __builtin_elementwise_rint)
MSL_UNARY(round, __builtin_elementwise_round)
MSL_UNARY(fabs, __builtin_elementwise_abs)
#undef MSL_UNARY

template <class V>
inline msl::if_float<V> rsqrt(V x) {
  return V(1) / sqrt(x);
}
template <class V>
inline msl::if_number<V> abs(V x) {
  if constexpr (msl::is_float<typename msl::vector<V>::element>)
    return __builtin_elementwise_abs(x);
  else
    return x < V(0) ? V(-x) : x;
}
template <class V>
inline msl::if_float<V> fma(V a, V b, V c) {
  return __builtin_elementwise_fma(a, b, c);
}
template <class V>
inline msl::if_number<V> min(V a, V b) {
  return __builtin_elementwise_min(a, b);
}
template <class V>
inline msl::if_number<V> max(V a, V b) {
  return __builtin_elementwise_max(a, b);
}
template <class V>
inline msl::if_float<V> fmin(V a, V b) {
  return min(a, b);
}
template <class V>
inline msl::if_float<V> fmax(V a, V b) {
  return max(a, b);
}
template <class V>
inline msl::if_number<V> clamp(V x, V low, V high) {
  return min(max(x, low), high);
}
template <class V>
inline msl::if_float<V> saturate(V x) {
  return clamp(x, V(0), V(1));
}
template <class V>
inline msl::if_float<V> copysign(V magnitude, V sign) {
  return __builtin_elementwise_copysign(magnitude, sign);
}
template <class V>
inline msl::if_float<V> pow(V x, V y) {
  return __builtin_elementwise_pow(x, y);
}
template <class V>
inline msl::if_float<V> sign(V x) {
  return x > V(0) ? V(1) : x < V(0) ? V(-1) : V(0);
}
inline float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }

template <class V, class Mask>
inline msl::if_number<V> select(V if_false, V if_true, Mask mask) {
  return mask ? if_true : if_false;
}
template <class V>
inline typename msl::vector<msl::if_float<V>>::element dot(V a, V b) {
  auto sum = a[0] * b[0];
  for (int i = 1; i < msl::vector<V>::size; i++) sum = sum + a[i] * b[i];
  return sum;
}
template <class V>
inline bool any(V mask) {
  if constexpr (msl::vector<V>::size == 1) return mask;
  else return __builtin_reduce_or(mask);
}
template <class V>
inline bool all(V mask) {
  if constexpr (msl::vector<V>::size == 1) return mask;
  else return __builtin_reduce_and(mask);
}
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }

template <class T>
inline msl::if_integer<T> popcount(T x) {
  return __builtin_elementwise_popcount(x);
}
template <class T>
inline msl::if_integer<T> clz(T x) {
  using Unsigned = __make_unsigned(T);
  return x == 0 ? T(sizeof(T) * 8) : T(__builtin_clzg(Unsigned(x)));
}
template <class T>
inline msl::if_integer<T> ctz(T x) {
  using Unsigned = __make_unsigned(T);
  return x == 0 ? T(sizeof(T) * 8) : T(__builtin_ctzg(Unsigned(x)));
}

#define MSL_SAME_IN_BOTH                                                                                           \
  using metal::cos, metal::exp, metal::exp2, metal::fabs, metal::fma, metal::fmax, metal::fmin, metal::log, metal::log2, \
      metal::pow, metal::rint, metal::rsqrt, metal::sin, metal::sqrt, metal::tanh;
namespace precise {
MSL_SAME_IN_BOTH
}
namespace fast {
MSL_SAME_IN_BOTH
}
#undef MSL_SAME_IN_BOTH

}  // namespace metal
