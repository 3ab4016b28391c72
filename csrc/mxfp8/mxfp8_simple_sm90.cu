// C = A B^T with fp32 FMAs: every shape, alignment, scale layout and scale value. The route of last resort, bound by FMA rate.
//
// A CTA computes 64 x 64 outputs, a thread 4 x 4. Per block of 32 along K: codes decoded to fp32 in shared memory -> the block's
// sum of exact products -> times both scales -> added in float64. NaN codes and NaN scales give NaN by themselves.
#include "../common/sm90.cuh"
#include "scales_sm90.cuh"

namespace mori::mxfp8 {
namespace {

using namespace sm90;

constexpr int kBlock = 32, kTile = 64, kPer = 4, kThreads = 256;
constexpr int kPitch = kTile + 1;

struct Shared {
  float a[kBlock][kPitch], b[kBlock][kPitch];
};

__device__ __forceinline__ void load_tile(float (&tile)[kBlock][kPitch], const uint8_t* codes, int64_t row0, int64_t rows, int64_t k, int64_t k0) {
  for (int i = threadIdx.x; i < kTile * kBlock; i += kThreads) {
    const int row = i / kBlock, column = i % kBlock;
    tile[column][row] = row0 + row < rows ? mx::decode_e4m3(codes[(row0 + row) * k + k0 + column]) : 0.f;
  }
}

template <class Scales>
__global__ void __launch_bounds__(kThreads, 1) simple(const GemmArgs args, const Scales scales) {
  __shared__ Shared s;
  const int64_t row_tiles = (args.n + kTile - 1) / kTile;
  const int64_t m0 = blockIdx.x / row_tiles * kTile, n0 = blockIdx.x % row_tiles * kTile;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  double c[kPer][kPer] = {};
  for (int64_t block = 0; block < args.k / kBlock; ++block) {
    __syncthreads();
    load_tile(s.a, args.a, m0, args.m, args.k, block * kBlock);
    load_tile(s.b, args.b, n0, args.n, args.k, block * kBlock);
    __syncthreads();
    float sum[kPer][kPer] = {};
#pragma unroll 8
    for (int k = 0; k < kBlock; ++k)
#pragma unroll
      for (int i = 0; i < kPer; ++i)
#pragma unroll
        for (int j = 0; j < kPer; ++j) sum[i][j] = fmaf(s.a[k][ty + 16 * i], s.b[k][tx + 16 * j], sum[i][j]);
#pragma unroll
    for (int i = 0; i < kPer; ++i)
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const int64_t m = m0 + ty + 16 * i, n = n0 + tx + 16 * j;
        if (m >= args.m || n >= args.n) continue;
        const auto factor = scales.factor(m, n, block);
        if (factor.finite()) {
          c[i][j] += factor(sum[i][j]);
        } else {
          for (int k = 0; k < kBlock; ++k) c[i][j] += factor(s.a[k][ty + 16 * i] * s.b[k][tx + 16 * j]);
        }
      }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i)
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int64_t m = m0 + ty + 16 * i, n = n0 + tx + 16 * j;
      if (m < args.m && n < args.n) store_c(args, m, n, c[i][j]);
    }
}

template <class Scales>
cudaError_t launch(const GemmArgs& args, const Scales& scales, cudaStream_t stream) {
  const int64_t ctas = (args.m + kTile - 1) / kTile * ((args.n + kTile - 1) / kTile);
  simple<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args, scales);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_simple(const GemmArgs& args, cudaStream_t stream) { return launch(args, ByteScales(args), stream); }

cudaError_t launch_simple_fp32_scales(const GemmArgs& args, Fp32Scales kind, cudaStream_t stream) {
  return launch(args, Fp32ScalesReader(args, kind), stream);
}

}  // namespace mori::mxfp8
