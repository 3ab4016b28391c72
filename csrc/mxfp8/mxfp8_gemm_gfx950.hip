// C = A B^T for MXFP8 operands on gfx950, any M and N, in tiles: the kernels around pipeline_gfx950.h, and what they take.
#include "epilogue_gfx950.h"
#include "mxfp8_gfx950.h"
#include "pipeline_gfx950.h"
#include "scales_gfx950.h"

namespace mori::mxfp8 {
namespace {

using namespace tiled;

template <int kColumnHalves, template <int> class ScaleSource>
__global__ void __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads), amdgpu_waves_per_eu(2, 2))) gemm(const GemmArgs args) {
#if MORI_HAS_GFX950
  using L = Layout<kColumnHalves>;
  __shared__ __attribute__((aligned(16))) uint8_t lds[L::kScales + ScaleSource<kColumnHalves>::kLdsBytes];
  const int64_t m0 = static_cast<int64_t>(block_id_y()) * kRows, n0 = static_cast<int64_t>(block_id()) * L::kColumns;
  Gemm<kColumnHalves, ScaleSource, StoreC> pipeline(args, lds_address(lds), m0, n0);
  pipeline.run(StoreC(args, m0, n0, kRows, L::kColumns));
#endif
}

template <int kColumnHalves, template <int> class ScaleSource>
hipError_t launch(const GemmArgs& args, hipStream_t stream) {
  constexpr int64_t kColumns = Layout<kColumnHalves>::kColumns;
  const dim3 grid(static_cast<unsigned>((args.n + kColumns - 1) / kColumns), static_cast<unsigned>((args.m + kRows - 1) / kRows));
  gemm<kColumnHalves, ScaleSource><<<grid, kThreads, 0, stream>>>(args);
  return hipGetLastError();
}

bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

}  // namespace

// 32-bit offsets: within 256 rows of the operands and of C, and within packed scales.
bool gemm_fits(const GemmArgs& args, Scales scales) {
  constexpr int64_t kMost = INT64_C(1) << 30, kMostTiles = 65535;
  if (!aligned(args.a, 16) || !aligned(args.b, 16) || kRows * args.k > kMost || kRows * 4 * args.n > kMost || args.m > kMostTiles * kRows) return false;
  if (scales == Scales::raw) return args.k % kStep == 0 && aligned(args.a_scale, 4) && aligned(args.b_scale, 4);
  return scales == Scales::packed && (args.m + 320) * (args.k / 32 + 8) < kMost && (args.n / 32 + 9) * (args.k / 32 + 8) * 4 < kMost;
}

hipError_t launch_gemm(const GemmArgs& args, Scales scales, Tile tile, hipStream_t stream) {
  if (tile == Tile::wide) return scales == Scales::packed ? launch<2, PackedScales>(args, stream) : launch<2, RawScales>(args, stream);
  return scales == Scales::packed ? launch<1, PackedScales>(args, stream) : launch<1, RawScales>(args, stream);
}

}  // namespace mori::mxfp8
