// The words, types and vector constructors of the Metal Shading Language.
#pragma once

// The checked build has one address space: clang's checks of alignment know no other. The fast build tells them apart.
#ifdef MSL_CHECKED
#define device
#define constant const
#define threadgroup
#else
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#endif
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))

typedef signed char int8_t;
typedef unsigned char uint8_t, uchar;
typedef short int16_t;
typedef unsigned short uint16_t, ushort;
typedef int int32_t;
typedef unsigned uint32_t, uint;
typedef long int64_t, ptrdiff_t;
typedef unsigned long uint64_t, ulong, size_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#define MSL_VECTORS(T)                                      \
  typedef T T##2 __attribute__((ext_vector_type(2)));       \
  typedef T T##3 __attribute__((ext_vector_type(3)));       \
  typedef T T##4 __attribute__((ext_vector_type(4)));       \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
#undef MSL_VECTORS

constexpr half operator""h(long double value) { return half(value); }

// Conversion to bfloat, nearest even: the compiler calls it, and no library is linked.
extern "C" inline __attribute__((used, visibility("hidden"), no_sanitize("coverage", "undefined"))) bfloat __truncsfbf2(float value) {
  const uint bits = __builtin_bit_cast(uint, value);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return __builtin_bit_cast(bfloat, ushort(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

namespace msl {

template <class T, class U>
inline constexpr bool is_same = __is_same(T, U);
template <bool B, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <class T>
struct remove_address_space {
  using type = T;
};
template <class T>
struct remove_address_space<T __attribute__((address_space(1)))> {
  using type = T;
};
template <class T>
struct remove_address_space<const T __attribute__((address_space(2)))> {
  using type = const T;
};
template <class T>
struct remove_address_space<T __attribute__((address_space(3)))> {
  using type = T;
};
template <class T>
struct remove_const {
  using type = T;
};
template <class T>
struct remove_const<const T> {
  using type = T;
};
// The type of a value: no address space, no const.
template <class T>
using value_type = typename remove_const<typename remove_address_space<T>::type>::type;

// Number and type of a vector's elements; a scalar has one.
template <class V>
struct vector {
  using element = V;
  static constexpr int size = 1;
};
template <class T, int N>
struct vector<T __attribute__((ext_vector_type(N)))> {
  using element = T;
  static constexpr int size = N;
};
template <class V>
using element = typename vector<value_type<V>>::element;

template <class T>
inline constexpr bool is_float = is_same<T, float> || is_same<T, half> || is_same<T, bfloat>;
template <class T>
inline constexpr bool is_integer = __is_integral(T);
template <class V>
using if_float = typename enable_if<is_float<typename vector<V>::element>, V>::type;
template <class V>
using if_integer = typename enable_if<is_integer<typename vector<V>::element>, V>::type;
template <class V>
using if_number = typename enable_if<is_float<typename vector<V>::element> || is_integer<typename vector<V>::element>, V>::type;

template <class V, class A>
inline void append(V& v, int& filled, A value) {
  using T = typename vector<V>::element;
  if constexpr (vector<A>::size == 1) {
    v[filled++] = T(value);
  } else {
    for (int i = 0; i < vector<A>::size; i++) v[filled++] = T(value[i]);
  }
}

// float4(1.0f), float4(a.xy, b, c), float4(half4) ...
template <class V, class... A>
inline V construct(A... values) {
  constexpr int given = (0 + ... + vector<A>::size);
  if constexpr (sizeof...(A) == 0) {
    return V(0);
  } else if constexpr (given == 1) {
    return V(typename vector<V>::element(values...));
  } else {
    static_assert(given == vector<V>::size, "wrong number of elements in a vector constructor");
    V v;
    int filled = 0;
    (append(v, filled, values), ...);
    return v;
  }
}

}  // namespace msl

// Functional casts with several arguments: macros, since no class may stand behind a vector type.
#define char2(...) msl::construct<char2>(__VA_ARGS__)
#define char3(...) msl::construct<char3>(__VA_ARGS__)
#define char4(...) msl::construct<char4>(__VA_ARGS__)
#define uchar2(...) msl::construct<uchar2>(__VA_ARGS__)
#define uchar3(...) msl::construct<uchar3>(__VA_ARGS__)
#define uchar4(...) msl::construct<uchar4>(__VA_ARGS__)
#define short2(...) msl::construct<short2>(__VA_ARGS__)
#define short3(...) msl::construct<short3>(__VA_ARGS__)
#define short4(...) msl::construct<short4>(__VA_ARGS__)
#define ushort2(...) msl::construct<ushort2>(__VA_ARGS__)
#define ushort3(...) msl::construct<ushort3>(__VA_ARGS__)
#define ushort4(...) msl::construct<ushort4>(__VA_ARGS__)
#define int2(...) msl::construct<int2>(__VA_ARGS__)
#define int3(...) msl::construct<int3>(__VA_ARGS__)
#define int4(...) msl::construct<int4>(__VA_ARGS__)
#define uint2(...) msl::construct<uint2>(__VA_ARGS__)
#define uint3(...) msl::construct<uint3>(__VA_ARGS__)
#define uint4(...) msl::construct<uint4>(__VA_ARGS__)
#define long2(...) msl::construct<long2>(__VA_ARGS__)
#define long3(...) msl::construct<long3>(__VA_ARGS__)
#define long4(...) msl::construct<long4>(__VA_ARGS__)
#define ulong2(...) msl::construct<ulong2>(__VA_ARGS__)
#define ulong3(...) msl::construct<ulong3>(__VA_ARGS__)
#define ulong4(...) msl::construct<ulong4>(__VA_ARGS__)
#define half2(...) msl::construct<half2>(__VA_ARGS__)
#define half3(...) msl::construct<half3>(__VA_ARGS__)
#define half4(...) msl::construct<half4>(__VA_ARGS__)
#define bfloat2(...) msl::construct<bfloat2>(__VA_ARGS__)
#define bfloat3(...) msl::construct<bfloat3>(__VA_ARGS__)
#define bfloat4(...) msl::construct<bfloat4>(__VA_ARGS__)
#define float2(...) msl::construct<float2>(__VA_ARGS__)
#define float3(...) msl::construct<float3>(__VA_ARGS__)
#define float4(...) msl::construct<float4>(__VA_ARGS__)

namespace metal {

using msl::value_type;
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <class T, class U>
inline constexpr bool is_same_v = msl::is_same<T, U>;
template <bool B, class T, class F>
using conditional_t = typename msl::conditional<B, T, F>::type;
template <bool B, class T = void>
using enable_if_t = typename msl::enable_if<B, T>::type;
template <class T>
inline constexpr bool is_floating_point_v = msl::is_float<T>;
template <class T>
inline constexpr bool is_integral_v = msl::is_integer<T>;
template <class T>
using remove_addrspace_t = typename msl::remove_address_space<T>::type;

template <class T, size_t N>
struct array {
  T elements[N];
  constexpr thread T& operator[](size_t i) { return elements[i]; }
  constexpr const thread T& operator[](size_t i) const { return elements[i]; }
  static constexpr size_t size() { return N; }
};

template <class T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static constexpr float max() { return 0x1.fffffep127f; }
  static constexpr float lowest() { return -max(); }
  static constexpr float min() { return 0x1p-126f; }
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float quiet_NaN() { return __builtin_nanf(""); }
};
template <>
struct numeric_limits<half> {
  static constexpr half max() { return half(65504.0f); }
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half infinity() { return half(__builtin_inff()); }
};
template <>
struct numeric_limits<int> {
  static constexpr int max() { return 0x7fffffff; }
  static constexpr int min() { return -max() - 1; }
  static constexpr int lowest() { return min(); }
};

template <class To, class From>
inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different size");
  return __builtin_bit_cast(To, value);
}

}  // namespace metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define HALF_MAX half(65504.0f)
#define INT_MAX 0x7fffffff
#define INT_MIN (-INT_MAX - 1)
#define M_PI_F 3.14159274f
#define M_LOG2E_F 1.44269502f
#define M_LN2_F 0.693147182f
