// Contract of the MXFP8 family: formats, argument checks and shape structs, the same for every backend.
//
//   element   e4m3fn code, value = decode(code) * 2^(scale - 127); scale 255 makes its whole block NaN, scale 0 is 2^-127
//   A         [M, K], one scale per 1x32 along K            B  [N, K], one scale per 32x32 block (edge blocks partial in N)
//   raw       A scale [M, K/32], B scale [ceil(N/32), K/32], row-major bytes
//   packed    A scale int32 [Mp * K/128], Mp = ceil64(M): (m, j) is byte (m % 64) / 16 of dword j * Mp/4 + (m / 64) * 16 + m % 16
//             B scale int32 [K/32 * ceil(N/32)]: (nb, j) is the low byte of dword j * ceil(N/32) + nb
//   ptpc      fp32 scales A [M], B [N]
//   blockscale fp32 scales A [M, K/128] (1x128), B [ceil(N/128), K/128] (128x128); the last K block may be partial
//   C[m, n] = sum_k A[m, k] * B[n, k] (+ bias[n]), accumulated in fp32, rounded once to the output dtype
#pragma once

#include "../common/check.h"

namespace mori::mxfp8 {

constexpr int64_t kBlock = 32;        // elements per scale along K, and rows per scale of B
constexpr int64_t kBlockscale = 128;  // the same for quant="blockscale"
constexpr int64_t kPackRows = 64;     // rows per group of the packed A layout

enum class Quant { ptpc, blockscale, mxfp8, mxfp8_raw };
enum class Rounding { rceil, floor };

Quant parse_quant(const char* op, const std::string& quant);
Rounding parse_rounding(const char* op, const std::string& rounding);

struct GemmShape {
  int64_t m, n, k;
  Sizes out_sizes;  // a's leading dimensions, then n
};

// a [.., K] and b [N, K] float8_e4m3fn, scales as the layout says, bias fp32/bf16/fp16 [N].
GemmShape check_gemm(const char* op, Quant quant, const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                     const std::optional<Tensor>& bias);

// x [.., K] fp32/bf16/fp16, b [N, K] float8_e4m3fn, b_scale raw.
GemmShape check_linear(const Tensor& x, const Tensor& b, const Tensor& b_scale, const std::optional<Tensor>& bias);

struct QuantizeShape {
  int64_t rows, k;
  Sizes code_sizes, scale_sizes;
};

QuantizeShape check_quantize(const Tensor& x);         // x [.., K], 1x32 blocks
QuantizeShape check_quantize_weight(const Tensor& w);  // w [N, K], 32x32 blocks

struct DequantizeShape {
  int64_t rows, k;
  bool weight_blocks;  // 32x32 instead of 1x32
};

DequantizeShape check_dequantize(const Tensor& codes, const Tensor& scale);

struct PackShape {
  int64_t rows, blocks;  // of the raw scale tensor: M or ceil(N/32), and K/32
  int64_t dwords;        // of the packed one
};

PackShape check_pack_a(const Tensor& scale);  // [.., K/32]
PackShape check_pack_b(const Tensor& scale);  // [ceil(N/32), K/32]

}  // namespace mori::mxfp8
