// The CUDA kernels of the MXFP8 family, torch-free: what mxfp8_sm90.cpp calls. Device pointers, dense and row-major.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "../common/failure_sm90.h"
#include "../common/float_sm90.h"

namespace mori::mxfp8 {

using sm90::Float;

// --- quantize_sm90.cu ---

// overlap: the kernel launched next may start early; it must wait for this one before it reads codes and scale.
cudaError_t launch_quantize(const void* x, Float type, int64_t rows, int64_t k, bool rceil, bool overlap, uint8_t* codes, uint8_t* scale, cudaStream_t stream);
cudaError_t launch_quantize_weight(const void* w, Float type, int64_t n, int64_t k, bool rceil, uint8_t* codes, uint8_t* scale, cudaStream_t stream);
cudaError_t launch_dequantize(const uint8_t* codes, const uint8_t* scale, int64_t rows, int64_t k, bool weight_blocks, void* out, Float type,
                              cudaStream_t stream);
cudaError_t launch_pack_a(const uint8_t* scale, int64_t rows, int64_t blocks, uint8_t* out, cudaStream_t stream);
cudaError_t launch_pack_b(const uint8_t* scale, int64_t row_blocks, int64_t blocks, int32_t* out, cudaStream_t stream);

// block_scales_sm90.cu: fp32 scales of blockscale, `blocks` per row, as cuBLASLt reads them: A's [blocks, padded_m], B's one per row [blocks, n].
cudaError_t launch_block_scales(const float* a_scale, int64_t m, int64_t padded_m, const float* b_scale, int64_t n, int64_t blocks, float* a_out, float* b_out,
                                cudaStream_t stream);

// --- GEMMs ---

struct GemmArgs {
  const uint8_t* a;  // e4m3 [m, k]; null: the tokens are `x`, quantised on the way
  const uint8_t* b;  // e4m3 [n, k]
  const void* a_scale;
  const void* b_scale;
  const void* bias;  // [n] of bias_type, or null
  Float bias_type;
  void* out;  // [m, n] of out_type
  Float out_type;
  int64_t m, n, k;
  bool packed;  // layout of e8m0 scales
  const void* x = nullptr;  // [m, k] of x_type
  Float x_type = Float::f32;
  bool rceil = true;
  int reserved_processors = 0;  // multiprocessors that the tensor-core kernel leaves to kernels beside it
};

// gemm_ar of two ranks in one GEMM; see pair_sm90.cuh. Rows are split in two spans, one of each rank, and spans in chunks. Flags
// become *epoch + 1 when their chunk is complete. [0]: of the peer's span, [1]: of this rank's own.
struct Pair {
  static constexpr int kMaxChunks = 64;
  int rank, peer;
  int64_t span_rows, chunk_rows;  // multiples of kPairRows; span_rows < m <= 2 span_rows
  void* partial;                  // [span_rows, n] bf16: summands for the peer
  const void* addend;             // [span_rows, n]: the peer's, behind the flags `arrived`
  void* sum;                      // [span_rows, n]: own rows of the result, for the peer
  void* out;                      // [m, n]: this rank's own rows of it
  const uint32_t* arrived;        // [chunk]
  uint32_t* finished[2];          // [chunk]
  uint32_t* counters[2];          // [chunk], zero before and after
  const uint32_t* epoch;
  uint32_t* failed;
  sm90::Failure* failure;
  uint64_t timeout_ns;
};
constexpr int kPairRows = 256;

enum class Fp32Scales : int { ptpc, blockscale };

// mxfp8_simple_sm90.cu: fp32 FMA, every shape, alignment and scale, exact.
cudaError_t launch_simple(const GemmArgs& args, cudaStream_t stream);
cudaError_t launch_simple_fp32_scales(const GemmArgs& args, Fp32Scales scales, cudaStream_t stream);

inline bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// mxfp8_skinny_sm90.cu: few tokens.
bool skinny_takes(int64_t m, int64_t k);
bool skinny_fits(const GemmArgs& args);
cudaError_t launch_skinny(const GemmArgs& args, cudaStream_t stream);

// mxfp8_gemm_sm90.cu: tensor cores. `workspace` holds gemm_workspace_bytes(m, k).
enum class GemmTile : int { rows64_tokens64, rows64_tokens96, rows64_tokens128, rows128_tokens96, rows128_tokens128, rows128_tokens176, rows128_tokens192, rows128_tokens224, rows128_tokens256 };
GemmTile gemm_tile(int64_t m, int64_t n, int64_t k);  // the fastest
bool gemm_fits(const GemmArgs& args);
int64_t gemm_workspace_bytes(int64_t m, int64_t k);
cudaError_t launch_gemm(const GemmArgs& args, GemmTile tile, void* workspace, cudaStream_t stream);
// The same for two ranks (args.out is not used): bf16, n a multiple of 8, the bias added to the sum.
cudaError_t launch_gemm(const GemmArgs& args, const Pair& pair, void* workspace, cudaStream_t stream);

}  // namespace mori::mxfp8
