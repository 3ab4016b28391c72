// kv_quantize: per 64 values scale = fp16(max |x| / 127), code = clamp(rint(x / scale), -127, 127), all in fp32; a scale that is 0 or
// not finite gives codes 0 (contract: qsa.h). One warp per group, two values a lane: bound by memory.
#include "../common/sm90.cuh"
#include "qsa_sm90.h"

namespace mori::qsa {
namespace {

using namespace sm90;

constexpr int kGroup = 64, kWarps = 8;

__device__ __forceinline__ int code_of(float x, float scale) { return max(-127, min(127, __float2int_rn(__fdiv_rn(x, scale)))); }

template <class In>
__global__ void __launch_bounds__(kWarps * 32) kv_quantize(const In* __restrict__ x, char2* __restrict__ codes, __half* __restrict__ scales, int64_t groups) {
  const int lane = threadIdx.x % 32;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (group >= groups) return;
  const float a = to_float(x[group * kGroup + 2 * lane]), b = to_float(x[group * kGroup + 2 * lane + 1]);
  // Magnitudes order as integers, NaN above infinity.
  const uint32_t top = __reduce_max_sync(~0u, max(__float_as_uint(a) & 0x7fffffffu, __float_as_uint(b) & 0x7fffffffu));
  const __half scale = __float2half_rn(__fdiv_rn(__uint_as_float(top), 127.0f));
  const float step = __half2float(scale);
  const bool divides = step > 0 && isfinite(step);
  codes[group * (kGroup / 2) + lane] = divides ? make_char2(code_of(a, step), code_of(b, step)) : make_char2(0, 0);
  if (lane == 0) scales[group] = scale;
}

}  // namespace

cudaError_t launch_kv_quantize(const void* x, Float type, int8_t* codes, void* scale, int64_t groups, cudaStream_t stream) {
  return with_float(type, [&](auto element) {
    kv_quantize<<<static_cast<unsigned>((groups + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(
        static_cast<const decltype(element)*>(x), reinterpret_cast<char2*>(codes), static_cast<__half*>(scale), groups);
    return cudaGetLastError();
  });
}

}  // namespace mori::qsa
