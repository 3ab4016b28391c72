// MXFP8 quantise, dequantise and scale packing on CUDA (scalars: common/mx.h; layouts: mxfp8.h). All bound by memory.
//
//   rows     a thread takes 8 consecutive values (16 bytes of bf16), 4 lanes a block of 32: amax by two shuffles, codes stored
//            as 8 bytes. A CTA takes a flat run of blocks, so that any number of rows is one launch.
//   weight   a CTA of 8 warps takes 32 rows x 256 columns: a warp is 4 rows, a lane 8 columns; amax over the CTA in shared memory.
#include <algorithm>

#include "../common/launch_sm90.cuh"
#include "../common/sm90.cuh"
#include "mxfp8_sm90.h"
#include "quantize_sm90.cuh"

namespace mori::mxfp8 {
namespace {

using namespace sm90;

constexpr int kBlock = 32;
constexpr int kThreads = 256;
constexpr int kParts = 4;  // of a thread, all requested before the first is used; 1 where the GPU would not be full
constexpr int64_t kManyParts = 132 * 4 * kThreads;
constexpr int kMaxGrid = 132 * 16;

__device__ __forceinline__ void store8(uint8_t* p, uint2 word, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint2*>(p) = word;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) p[i] = static_cast<uint8_t>((i < 4 ? word.x : word.y) >> 8 * (i % 4));
}

// `aligned`: x to 16 bytes and codes to 8. `overlap`: the next kernel may start now.
template <class T, int kPartsOfThread>
__global__ void __launch_bounds__(kThreads) quantize_rows(const T* __restrict__ x, int64_t blocks, bool rceil, bool aligned, bool overlap, uint8_t* __restrict__ codes,
                                                          uint8_t* __restrict__ scale) {
  if (overlap) launch_dependents();
  wait_for_dependencies();
  const int64_t parts = blocks * (kBlock / kPer), first = static_cast<int64_t>(blockIdx.x) * kPartsOfThread * kThreads + threadIdx.x;
  Values<T> values[kPartsOfThread] = {};
#pragma unroll
  for (int i = 0; i < kPartsOfThread; ++i)
    if (first + i * kThreads < parts) values[i].load(x + (first + i * kThreads) * kPer, aligned);
#pragma unroll
  for (int i = 0; i < kPartsOfThread; ++i) {
    const int64_t part = first + i * kThreads;
    float v[kPer];
    values[i].to_floats(v);
    const uint8_t byte = block_scale(max_of_block(amax_bits(v)), rceil);
    if (part >= parts) continue;
    store8(codes + part * kPer, encode8(v, byte), aligned);
    if (part % 4 == 0) scale[part / 4] = byte;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) quantize_weight(const T* __restrict__ w, int64_t n, int64_t k, bool rceil, bool aligned,
                                                            uint8_t* __restrict__ codes, uint8_t* __restrict__ scale) {
  constexpr int kWarps = kThreads / 32, kRowsPerWarp = kBlock / kWarps, kColumns = 32 * kPer;
  __shared__ uint32_t shared_amax[kWarps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t chunks = (k + kColumns - 1) / kColumns, strip = blockIdx.x / chunks, column = blockIdx.x % chunks * kColumns + lane * kPer;
  float v[kRowsPerWarp][kPer] = {};
  uint32_t amax = 0;
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    const int64_t row = strip * kBlock + warp * kRowsPerWarp + r;
    if (row < n && column < k) load8(v[r], w + row * k + column, aligned);
    amax = max(amax, amax_bits(v[r]));
  }
  shared_amax[warp][lane] = amax;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) amax = max(amax, shared_amax[i][lane]);
  const uint8_t byte = block_scale(max_of_block(amax), rceil);
  if (column >= k) return;
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    const int64_t row = strip * kBlock + warp * kRowsPerWarp + r;
    if (row < n) store8(codes + row * k + column, encode8(v[r], byte), aligned);
  }
  if (warp == 0 && lane % 4 == 0) scale[strip * (k / kBlock) + column / kBlock] = byte;
}

template <class T>
__global__ void __launch_bounds__(kThreads) dequantize(const uint8_t* __restrict__ codes, const uint8_t* __restrict__ scale, int64_t rows, int64_t k,
                                                       int64_t rows_per_scale, T* __restrict__ out) {
  const int64_t blocks = k / kBlock, count = rows * k / 4, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride) {
    const int64_t block = i / (kBlock / 4), row = block / blocks;
    const uint8_t byte = scale[row / rows_per_scale * blocks + block % blocks];
#pragma unroll
    for (int j = 0; j < 4; ++j) out[i * 4 + j] = from_float<T>(__uint_as_float(mx::dequantized_bits(codes[i * 4 + j], byte)));
  }
}

__global__ void __launch_bounds__(kThreads) pack_a(const uint8_t* __restrict__ scale, int64_t rows, int64_t blocks, int64_t padded, uint8_t* __restrict__ out) {
  constexpr uint8_t kPadding = 127;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < padded * blocks; i += stride) {
    const int64_t block = i / padded, in_block = i % padded, group = in_block / 64, byte = in_block % 64;
    const int64_t row = group * 64 + byte % 4 * 16 + byte / 4;
    out[i] = row < rows ? scale[row * blocks + block] : kPadding;
  }
}

__global__ void __launch_bounds__(kThreads) pack_b(const uint8_t* __restrict__ scale, int64_t row_blocks, int64_t blocks, int32_t* __restrict__ out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < row_blocks * blocks; i += stride)
    out[i] = scale[i % row_blocks * blocks + i / row_blocks];
}

unsigned grid_for(int64_t threads) { return static_cast<unsigned>(std::min<int64_t>((threads + kThreads - 1) / kThreads, kMaxGrid)); }

bool aligned(const void* x, const void* codes) { return reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(codes) % 8 == 0; }

}  // namespace

cudaError_t launch_quantize(const void* x, Float type, int64_t rows, int64_t k, bool rceil, bool overlap, uint8_t* codes, uint8_t* scale, cudaStream_t stream) {
  const int64_t blocks = rows * (k / kBlock);
  return with_float(type, [&](auto element) {
    using T = decltype(element);
    const int64_t parts = blocks * (kBlock / kPer);
    const auto run = [&](auto kernel, int per_cta) {
      return launch_overlapped(kernel, dim3(static_cast<unsigned>((parts + per_cta - 1) / per_cta)), kThreads, 0, stream, static_cast<const T*>(x), blocks, rceil,
                               aligned(x, codes), overlap, codes, scale);
    };
    return parts < kManyParts ? run(quantize_rows<T, 1>, kThreads) : run(quantize_rows<T, kParts>, kParts * kThreads);
  });
}

cudaError_t launch_quantize_weight(const void* w, Float type, int64_t n, int64_t k, bool rceil, uint8_t* codes, uint8_t* scale, cudaStream_t stream) {
  const int64_t ctas = (n + 31) / 32 * ((k + 255) / 256);
  return with_float(type, [&](auto element) {
    using T = decltype(element);
    quantize_weight<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(static_cast<const T*>(w), n, k, rceil, aligned(w, codes), codes, scale);
    return cudaGetLastError();
  });
}

cudaError_t launch_dequantize(const uint8_t* codes, const uint8_t* scale, int64_t rows, int64_t k, bool weight_blocks, void* out, Float type,
                              cudaStream_t stream) {
  return with_float(type, [&](auto element) {
    using T = decltype(element);
    dequantize<<<grid_for(rows * k / 4), kThreads, 0, stream>>>(codes, scale, rows, k, weight_blocks ? kBlock : 1, static_cast<T*>(out));
    return cudaGetLastError();
  });
}

cudaError_t launch_pack_a(const uint8_t* scale, int64_t rows, int64_t blocks, uint8_t* out, cudaStream_t stream) {
  const int64_t padded = (rows + 63) / 64 * 64;
  pack_a<<<grid_for(padded * blocks), kThreads, 0, stream>>>(scale, rows, blocks, padded, out);
  return cudaGetLastError();
}

cudaError_t launch_pack_b(const uint8_t* scale, int64_t row_blocks, int64_t blocks, int32_t* out, cudaStream_t stream) {
  pack_b<<<grid_for(row_blocks * blocks), kThreads, 0, stream>>>(scale, row_blocks, blocks, out);
  return cudaGetLastError();
}

}  // namespace mori::mxfp8
