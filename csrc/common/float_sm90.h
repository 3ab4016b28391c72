// The float dtypes behind a void pointer, and conversions between them and fp32 in device code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mori::sm90 {

enum class Float : int { f32, bf16, f16 };

#if defined(__CUDACC__)

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
__device__ __forceinline__ T from_float(float v) {
  if constexpr (sizeof(T) == 4) {
    return v;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(v);
  } else {
    return __float2bfloat16_rn(v);
  }
}

// Calls f with a value of the element type.
template <class F>
auto with_float(Float type, F f) {
  switch (type) {
    case Float::f32: return f(float{});
    case Float::bf16: return f(__nv_bfloat16{});
    default: return f(__half{});
  }
}

#endif

}  // namespace mori::sm90
