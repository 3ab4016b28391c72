// The GEMM of simple_gfx950.h as a kernel.
#include "simple_gfx950.h"

namespace mori::mxfp8 {
namespace {

using namespace simple;

template <class Scales>
__global__ void __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads))) simple_gemm(const GemmArgs args, const Scales scales) {
  const int64_t column_tiles = (args.n + kTile - 1) / kTile;
  multiply(args, scales, block_id() / column_tiles * kTile, block_id() % column_tiles * kTile);
}

}  // namespace

hipError_t launch_simple(const GemmArgs& args, Scales scales, hipStream_t stream) {
  return with_scales(args, scales, [&](const auto& kernel_scales) {
    const int64_t tiles = (args.m + kTile - 1) / kTile * ((args.n + kTile - 1) / kTile);
    simple_gemm<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(args, kernel_scales);
    return hipGetLastError();
  });
}

}  // namespace mori::mxfp8
