// What the tensor-core attention kernels share: constants of the online softmax, conversions of codes, fragment loads.
#pragma once

#include "qsa_io_sm90.cuh"

namespace mori::qsa {

constexpr float kShift = 5.0f;     // P carries 2^5: far from fp16's subnormals
constexpr float kSlack = 4.0f;     // the running maximum may lag by 2^4
constexpr float kLowest = -1e30f;  // below any score before its factor: |code sums| < 2^32, scales < 2^16

// base + a * b in one instruction; the compiler takes the sum apart otherwise.
__device__ __forceinline__ const char* offset_by(const char* base, uint32_t a, uint32_t b) {
  uint64_t sum;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(base));
  return reinterpret_cast<const char*>(sum);
}
// Neighbouring scales of a cell in one load.
template <int kCount>
__device__ __forceinline__ void load_scales(__half (&scale)[kCount], const void* from) {
  struct alignas(2 * kCount) Packed {
    __half value[kCount];
  };
  const Packed packed = *static_cast<const Packed*>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i) scale[i] = packed.value[i];
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint32_t multiply_half2(uint32_t a, uint32_t b) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}
__device__ __forceinline__ uint32_t larger_half2(uint32_t a, uint32_t b) {
  const __half2 larger = __hmax2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&larger);
}
// (word & mask) ^ bits is one LOP3 only if the compiler cannot see the mask: an instruction has room for one constant.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ uint32_t codes_to_half2(uint32_t word, uint32_t mask) {
  uint32_t biased;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(biased) : "r"(word), "r"(mask), "n"(0x64806480));
  return sm90::unbias_half2(biased);
}
// All four codes of a word, in order.
__device__ __forceinline__ void codes_in_order(uint32_t word, uint32_t& low, uint32_t& high) {
  const uint32_t biased = word ^ 0x80808080u, a = __byte_perm(biased, sm90::kHalfUpper, 0x4140), b = __byte_perm(biased, sm90::kHalfUpper, 0x4342);
  low = sm90::unbias_half2(a), high = sm90::unbias_half2(b);
}
// Issued where it stands.
__device__ __forceinline__ uint4 load_global16(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
__device__ __forceinline__ uint4 load_shared16(uint32_t smem) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared16(uint32_t smem, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ uint4 load_matrix_transposed(uint32_t smem) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem) : "memory");
  return v;
}

}  // namespace mori::qsa
