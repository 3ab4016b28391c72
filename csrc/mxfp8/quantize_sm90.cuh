// Quantising runs of values of a block of 32, for the quantisers and for the GEMMs that quantise their own activations.
// The scalars and their rounding: common/mx.h. The hardware's conversion to e4m3 rounds once to nearest even and saturates, as
// mx::encode_e4m3 does, and dividing by the scale is a multiplication by a power of two, exact wherever the code depends on it.
#pragma once

#include <cstdint>

#include "../common/float_sm90.h"
#include "../common/mx.h"

namespace mori::mxfp8 {

constexpr int kPer = 8;  // values of a thread

// Eight values as they are in memory. `aligned`: to 16 bytes.
template <class T>
struct Values {
  alignas(16) T raw[kPer];

  __device__ __forceinline__ void load(const T* p, bool aligned) {
    if (aligned) {
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(raw) / 16); ++i) reinterpret_cast<uint4*>(raw)[i] = reinterpret_cast<const uint4*>(p)[i];
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) raw[i] = p[i];
    }
  }
  __device__ __forceinline__ void to_floats(float (&v)[kPer]) const {
#pragma unroll
    for (int i = 0; i < kPer; ++i) v[i] = sm90::to_float(raw[i]);
  }
};

template <class T>
__device__ __forceinline__ void load8(float (&v)[kPer], const T* p, bool aligned) {
  Values<T> values;
  values.load(p, aligned);
  values.to_floats(v);
}

__device__ __forceinline__ uint32_t amax_bits(const float (&v)[kPer]) {
  uint32_t amax = 0;
#pragma unroll
  for (float value : v) amax = max(amax, __float_as_uint(value) & mx::kMagnitudeBits);
  return amax;
}

__device__ __forceinline__ uint8_t block_scale(uint32_t amax, bool rceil) { return rceil ? mx::block_scale_rceil(amax) : mx::block_scale_floor(amax); }

// The largest of four consecutive lanes, which hold a block.
__device__ __forceinline__ uint32_t max_of_block(uint32_t amax) {
  amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
  return max(amax, __shfl_xor_sync(~0u, amax, 2));
}

// Four values / 2^(scale - 127) as a word of codes.
__device__ __forceinline__ uint32_t encode4(float4 v, uint8_t scale) {
  const float inverse = __uint_as_float(static_cast<uint32_t>(254 - scale) << 23);  // scale is at most 247 or the NaN one
  uint32_t word;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}\n"
      : "=r"(word)
      : "f"(v.x * inverse), "f"(v.y * inverse), "f"(v.z * inverse), "f"(v.w * inverse));
  return scale == mx::kNanScale ? mx::kNanCode * 0x01010101u : word;
}

__device__ __forceinline__ uint2 encode8(const float (&v)[kPer], uint8_t scale) {
  return {encode4({v[0], v[1], v[2], v[3]}, scale), encode4({v[4], v[5], v[6], v[7]}, scale)};
}

}  // namespace mori::mxfp8
