// Contract of the Q8_0 projection for verify windows ("down" half of the gated residual read), the same for every backend.
//
//   Q8_0 (ggml): blocks of 32 along K, fp16 d then 32 int8, 34 bytes; w uint8 [N, K/32 * 34]; value = d * q
//   y[t, n] = sum_k W[n, k] * xn[t, k], fp32;  x [ntok, K] fp32/bf16/fp16
//   xn = x, or with norm_weight [K]: per group of K/hc values RMS-normalised (x * rsqrt(mean(x^2) + eps)) times norm_weight
//   quantise: d = fp16(max|w| / 127), q = rint(w / (max|w| / 127)), ties away from zero, as ggml's reference does
//   A row's bits do not depend on ntok.
#pragma once

#include "../common/check.h"

namespace mori::gr {

constexpr int64_t kBlock = 32;
constexpr int64_t kBlockBytes = 34;

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
