// What the gr_down kernels share.
#pragma once

#include <type_traits>

#include "../common/sm90.cuh"
#include "gr_sm90.h"

namespace mori::gr {

constexpr int kBlock = 32, kBlockBytes = 34;
constexpr int kPairBytes = 2 * kBlockBytes, kPairK = 2 * kBlock;  // two blocks start at a multiple of 4 bytes

// kCount consecutive values, past the L1 cache: x may have changed since the kernel started.
template <class T, int kCount>
struct Values {
  static constexpr int kBytes = sizeof(T) * kCount, kLoad = kBytes < 16 ? 8 : 16;
  alignas(kLoad) T raw[kCount];

  __device__ __forceinline__ void load(const T* p) {
    using Load = std::conditional_t<kLoad == 16, uint4, uint2>;
#pragma unroll
    for (int i = 0; i < kBytes / kLoad; ++i) reinterpret_cast<Load*>(raw)[i] = __ldcg(reinterpret_cast<const Load*>(p) + i);
  }
  __device__ __forceinline__ float operator[](int i) const { return sm90::to_float(raw[i]); }
};

// Whether fp32 holds a sum of squares well enough for 1 / rms.
__device__ __forceinline__ bool in_range(float squares, float eps) {
  constexpr float kMost = 1e38f, kLeast = 1e-30f;
  return squares < kMost && (squares > kLeast || eps > kLeast);
}

// 1 / rms from the values themselves, for sums of squares that fp32 cannot hold.
template <class X>
__device__ __noinline__ float inverse_rms_in_double(const X* group, int64_t size, float eps) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += static_cast<double>(sm90::to_float(__ldcg(group + i))) * sm90::to_float(__ldcg(group + i));
  return static_cast<float>(rsqrt(sum / size + eps));
}

template <class X>
__device__ __forceinline__ float inverse_rms(float squares, const X* group, int64_t size, float eps) {
  return in_range(squares, eps) ? rsqrtf(squares / static_cast<float>(size) + eps) : inverse_rms_in_double(group, size, eps);
}

// The sum of a row's groups, each times its 1 / rms; `x` is the row, `size` a group's.
template <int kGroups, class X>
__device__ __forceinline__ float normed_sum(const float (&sum)[kGroups], const float (&squares)[kGroups], const X* x, int64_t size, float eps) {
  bool ordinary = true;
  float y = 0.f;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    ordinary &= in_range(squares[i], eps);
    y = fmaf(sum[i], rsqrtf(squares[i] / static_cast<float>(size) + eps), y);
  }
  if (ordinary) return y;
  y = 0.f;
  for (int i = 0; i < kGroups; ++i) y = fmaf(sum[i], inverse_rms_in_double(x + i * size, size, eps), y);
  return y;
}

}  // namespace mori::gr
