// Reading ids, queries and gates of any dtype, writing outputs of any dtype: the parts that the attention kernels share.
#pragma once

#include "../common/sm90.cuh"
#include "qsa_sm90.h"

namespace mori::qsa {

__device__ __forceinline__ float load_float(const char* row, Float type, int64_t i) {
  if (type == Float::f32) return reinterpret_cast<const float*>(row)[i];
  if (type == Float::bf16) return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
  return __half2float(reinterpret_cast<const __half*>(row)[i]);
}

__device__ __forceinline__ void store_float(void* out, Float type, int64_t i, float value) {
  if (type == Float::f32) static_cast<float*>(out)[i] = value;
  else if (type == Float::bf16) static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(value);
  else static_cast<__half*>(out)[i] = __float2half_rn(value);
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Two neighbouring values of an output row, times the sigmoid of the gate row's values from `dim` on.
__device__ __forceinline__ void store_pair(const AttnArgs& args, int64_t at, float x, float y, const char* gate, int dim) {
  if (gate != nullptr) x *= sigmoid(load_float(gate, args.gate_type, dim)), y *= sigmoid(load_float(gate, args.gate_type, dim + 1));
  if (args.out_type == Float::f32) reinterpret_cast<float2*>(args.out)[at / 2] = make_float2(x, y);
  else if (args.out_type == Float::bf16) reinterpret_cast<__nv_bfloat162*>(args.out)[at / 2] = __floats2bfloat162_rn(x, y);
  else reinterpret_cast<__half2*>(args.out)[at / 2] = __floats2half2_rn(x, y);
}

// The cell in slot `slot` of token `token`, or -1 for an empty slot; an id beyond the cells counts as empty.
__device__ __forceinline__ int64_t cell_of(const AttnArgs& args, int64_t token, int64_t slot) {
  const int64_t at = token * args.slots + slot;
  const int64_t id = args.wide_ids ? __ldg(static_cast<const long long*>(args.ids) + at) : __ldg(static_cast<const int*>(args.ids) + at);
  return id < args.cells ? id : -1;
}

// Four neighbouring values of an output row, as store_pair.
__device__ __forceinline__ void store_four(const AttnArgs& args, int64_t at, float4 x, const char* gate, int dim) {
  if (gate != nullptr) {
    x.x *= sigmoid(load_float(gate, args.gate_type, dim)), x.y *= sigmoid(load_float(gate, args.gate_type, dim + 1));
    x.z *= sigmoid(load_float(gate, args.gate_type, dim + 2)), x.w *= sigmoid(load_float(gate, args.gate_type, dim + 3));
  }
  if (args.out_type == Float::f32) {
    reinterpret_cast<float4*>(args.out)[at / 4] = x;
  } else if (args.out_type == Float::bf16) {
    const __nv_bfloat162 a = __floats2bfloat162_rn(x.x, x.y), b = __floats2bfloat162_rn(x.z, x.w);
    reinterpret_cast<uint2*>(args.out)[at / 4] = make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b));
  } else {
    reinterpret_cast<uint2*>(args.out)[at / 4] = make_uint2(sm90::pack_half2(x.x, x.y), sm90::pack_half2(x.z, x.w));
  }
}

// 2^exponent for exponents of normal numbers, -126 to 127.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// Brings a line into the L2, where a kernel that is still writing it will find it: allowed before wait_for_dependencies().
__device__ __forceinline__ void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// The power of two 2^e with 2^(e-1) <= top < 2^e, as its exponent; 0 for 0 and for what is not finite.
__device__ __forceinline__ int exponent_of(float top) {
  int exponent = 0;
  if (top > 0 && isfinite(top)) frexpf(top, &exponent);
  return exponent;
}

// What multiplies a score of a query row that was scaled by 2^-exponent, in units of log2: finite and not 0, so that it takes the
// -inf of an empty slot to -inf, whatever the row's magnitude.
__device__ __forceinline__ float score_factor(double sm_scale, int exponent) {
  const double factor = fabs(sm_scale) * 1.4426950408889634;
  const int high = __double2hiint(factor), power = min(max((high >> 20) - 1023 + exponent, -126), 127);  // factor's 2^.., without fp64's slow ldexp
  const float mantissa = static_cast<float>(__hiloint2double((high & 0xfffff) | 1023 << 20, __double2loint(factor)));
  return fmaxf(fminf(mantissa * power_of_two(power), 3.0e38f), 1.0e-37f);
}

}  // namespace mori::qsa
