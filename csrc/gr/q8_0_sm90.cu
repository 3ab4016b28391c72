// Q8_0 quantise and dequantise (bytes as defined in common/q8_0.h), one warp per block of 32 values: bound by memory.
#include "gr_sm90.h"

#include "../common/sm90.cuh"

namespace mori::gr {
namespace {

constexpr int kBlock = 32, kBlockBytes = 34;
constexpr int kWarps = 8;

using namespace sm90;

template <class In>
__global__ void __launch_bounds__(kWarps * 32) quantize(const In* __restrict__ w, uint8_t* __restrict__ out, int64_t blocks) {
  const int lane = threadIdx.x % 32;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (block >= blocks) return;
  const float value = to_float(w[block * kBlock + lane]);
  // Magnitudes order as integers, NaN and Inf last.
  const float amax = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(value) & 0x7fffffffu));
  const bool finite = isfinite(amax);
  const float d = finite ? __fdiv_rn(amax, 127.0f) : __uint_as_float(0x7fc00000u);
  const float reciprocal = __frcp_rn(d);
  const float inverse = isfinite(reciprocal) ? reciprocal : 0.0f;
  const float doubled = 2.0f * (finite ? fabsf(value) * inverse : 0.0f);
  const int q = (static_cast<int>(doubled) + 1) / 2;  // half away from zero
  uint8_t* bytes = out + block * kBlockBytes;
  bytes[2 + lane] = static_cast<uint8_t>(signbit(value) ? -q : q);
  if (lane == 0) *reinterpret_cast<__half*>(bytes) = __float2half_rn(d);  // blocks start at even addresses
}

template <class Out>
__global__ void __launch_bounds__(kWarps * 32) dequantize(const uint8_t* __restrict__ w, Out* __restrict__ out, int64_t blocks) {
  const int lane = threadIdx.x % 32;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (block >= blocks) return;
  const uint8_t* bytes = w + block * kBlockBytes;
  const float d = __half2float(__ushort_as_half(static_cast<uint16_t>(bytes[0] | bytes[1] << 8)));
  out[block * kBlock + lane] = from_float<Out>(d * static_cast<float>(static_cast<int8_t>(bytes[2 + lane])));
}

unsigned grid(int64_t blocks) { return static_cast<unsigned>((blocks + kWarps - 1) / kWarps); }

}  // namespace

cudaError_t launch_q8_quantize(const void* w, Float type, uint8_t* out, int64_t blocks, cudaStream_t stream) {
  return with_float(type, [&](auto element) {
    quantize<<<grid(blocks), kWarps * 32, 0, stream>>>(static_cast<const decltype(element)*>(w), out, blocks);
    return cudaGetLastError();
  });
}

cudaError_t launch_q8_dequantize(const uint8_t* w, void* out, Float type, int64_t blocks, cudaStream_t stream) {
  return with_float(type, [&](auto element) {
    dequantize<<<grid(blocks), kWarps * 32, 0, stream>>>(w, static_cast<decltype(element)*>(out), blocks);
    return cudaGetLastError();
  });
}

}  // namespace mori::gr
