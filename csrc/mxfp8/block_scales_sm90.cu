// Scales of blockscale as cuBLASLt reads them: one per row and 128 of K for both operands, rows contiguous. One launch.
#include <algorithm>

#include "mxfp8_sm90.h"

namespace mori::mxfp8 {
namespace {

constexpr int kThreads = 256, kBlockRows = 128;  // of B under one scale

__global__ void __launch_bounds__(kThreads) block_scales(const float* a_scale, int64_t m, int64_t padded_m, const float* b_scale, int64_t n, int64_t blocks, float* a_out,
                                                         float* b_out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, block = blockIdx.y;
  if (row < padded_m) a_out[block * padded_m + row] = row < m ? a_scale[row * blocks + block] : 0.f;
  if (row < n) b_out[block * n + row] = b_scale[row / kBlockRows * blocks + block];
}

}  // namespace

cudaError_t launch_block_scales(const float* a_scale, int64_t m, int64_t padded_m, const float* b_scale, int64_t n, int64_t blocks, float* a_out, float* b_out,
                                cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((std::max(padded_m, n) + kThreads - 1) / kThreads), static_cast<unsigned>(blocks));
  block_scales<<<grid, kThreads, 0, stream>>>(a_scale, m, padded_m, b_scale, n, blocks, a_out, b_out);
  return cudaGetLastError();
}

}  // namespace mori::mxfp8
