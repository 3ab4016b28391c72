// The HIP kernels of the MXFP8 family, torch-free: what mxfp8_gfx950.cpp calls. Device pointers, dense and row-major.
#pragma once

#include <cstdint>

#include <hip/hip_runtime_api.h>

#include "../common/float_gfx950.h"

namespace mori::mxfp8 {

using gfx950::Float;

// --- quantize_gfx950.hip ---

hipError_t launch_quantize(const void* x, Float type, int64_t rows, int64_t k, bool rceil, uint8_t* codes, uint8_t* scale, hipStream_t stream);
hipError_t launch_quantize_weight(const void* w, Float type, int64_t n, int64_t k, bool rceil, uint8_t* codes, uint8_t* scale, hipStream_t stream);
hipError_t launch_dequantize(const uint8_t* codes, const uint8_t* scale, int64_t rows, int64_t k, bool weight_blocks, void* out, Float type,
                             hipStream_t stream);
hipError_t launch_pack_a(const uint8_t* scale, int64_t rows, int64_t blocks, uint8_t* out, hipStream_t stream);
hipError_t launch_pack_b(const uint8_t* scale, int64_t row_blocks, int64_t blocks, int32_t* out, hipStream_t stream);

// --- GEMMs ---

struct GemmArgs {
  const uint8_t* a;  // e4m3 [m, k]
  const uint8_t* b;  // e4m3 [n, k]
  const void* a_scale;
  const void* b_scale;
  const void* bias;  // [n] of bias_type, or null
  Float bias_type;
  void* out;  // [m, n] of out_type
  Float out_type;
  int64_t m, n, k;
};

enum class Scales : int { packed, raw, ptpc, blockscale };
enum class Form : int { skinny, narrow, wide, simple };  // the kernels below

// mxfp8_simple_gfx950.hip: bf16 MFMA on decoded operands, scales applied outside: every shape, alignment and scale kind.
hipError_t launch_simple(const GemmArgs& args, Scales scales, hipStream_t stream);

// mxfp8_skinny_gfx950.hip (gfx950 only): m <= kSkinnyTokens.
constexpr int64_t kSkinnyTokens = 32;
bool skinny_fits(const GemmArgs& args);
hipError_t launch_skinny(const GemmArgs& args, Scales scales, hipStream_t stream);

// mxfp8_gemm_gfx950.hip (gfx950 only): scaled MFMA.
enum class Tile : int { narrow, wide };  // 256 x 128, 256 x 256
bool gemm_fits(const GemmArgs& args, Scales scales);
hipError_t launch_gemm(const GemmArgs& args, Scales scales, Tile tile, hipStream_t stream);

}  // namespace mori::mxfp8
