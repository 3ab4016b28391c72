// Contract of the Q8_0 projection for verify windows ("down" half of the gated residual read), the same for every backend.
//
//   Q8_0 (ggml): blocks of 32 along K, fp16 d then 32 int8, 34 bytes; w uint8 [N, K/32 * 34]; value = d * q
//   y[t, n] = sum_k W[n, k] * xn[t, k], fp32;  x [ntok, K] fp32/bf16/fp16
//   xn = x, or with norm_weight [K]: per group of K/hc values RMS-normalised (x * rsqrt(mean(x^2) + eps)) times norm_weight
//   quantise: ggml's reference bytes. s = max|w| / 127 in fp32, d = fp16(s) to nearest even, q = round(w * (1 / s)) half away from
//   zero; a zero block is all zero bytes. d above 65504 is fp16 Inf, as in ggml (the block reads back as +-Inf and NaN); a block
//   holding NaN or Inf gets d = NaN, q = 0, so that it reads back as NaN. d below 2^-25 is 0: the block reads back as 0.
//   A row's bits do not depend on ntok.
#pragma once

#include "../common/check.h"
#include "../common/q8_0.h"

namespace mori::gr {

using q8_0::kBlock;
using q8_0::kBlockBytes;

struct DownShape {
  int64_t ntok, n, k;
  int64_t hc;  // groups of the fused norm, 0 without one
};

DownShape check_down(const Tensor& x, const Tensor& w, const std::optional<Tensor>& norm_weight, double eps, int64_t hc, const std::string& variant);

struct Q8Shape {
  int64_t n, k;
};

Q8Shape check_q8_quantize(const Tensor& w);    // fp32/bf16/fp16 [N, K], K a multiple of 32
Q8Shape check_q8_dequantize(const Tensor& w);  // uint8 [N, K/32 * 34]

}  // namespace mori::gr
