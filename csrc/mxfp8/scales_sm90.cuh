// Reading scales in device code: one struct per layout of mxfp8.h, each giving what a block's partial sum is multiplied by.
#pragma once

#include "../common/mx.h"
#include "mxfp8_sm90.h"

namespace mori::mxfp8 {

__device__ __forceinline__ double power_of_two(int exponent) { return __hiloint2double((1023 + exponent) << 20, 0); }

// e8m0 bytes, raw or packed.
struct ByteScales {
  const uint8_t* a;
  const uint8_t* b;
  int64_t blocks;      // K / 32
  int64_t a_groups;    // ceil(M / 64)
  int64_t row_blocks;  // ceil(N / 32)
  bool packed;

  explicit ByteScales(const GemmArgs& args)
      : a(static_cast<const uint8_t*>(args.a_scale)), b(static_cast<const uint8_t*>(args.b_scale)), blocks(args.k / 32),
        a_groups((args.m + 63) / 64), row_blocks((args.n + 31) / 32), packed(args.packed) {}

  __device__ __forceinline__ const uint8_t* a_at(int64_t m, int64_t block) const {
    return a + (packed ? (block * a_groups + m / 64) * 64 + m % 16 * 4 + m % 64 / 16 : m * blocks + block);
  }
  __device__ __forceinline__ const uint8_t* b_at(int64_t n, int64_t block) const {
    return b + (packed ? (block * row_blocks + n / 32) * 4 : n / 32 * blocks + block);
  }
  __device__ __forceinline__ uint8_t a_byte(int64_t m, int64_t block) const { return *a_at(m, block); }
  __device__ __forceinline__ uint8_t b_byte(int64_t n, int64_t block) const { return *b_at(n, block); }

  // 2^(a + b - 254) in float64, which holds every exponent and its sums.
  struct Factor {
    int exponent;
    bool nan;
    __device__ __forceinline__ bool finite() const { return true; }
    __device__ __forceinline__ double operator()(double sum) const { return nan ? __uint_as_float(mx::kNanBits) : sum * power_of_two(exponent); }
  };
  __device__ __forceinline__ Factor factor(int64_t m, int64_t n, int64_t block) const {
    const int sa = a_byte(m, block), sb = b_byte(n, block);
    return {sa + sb - 254, sa == mx::kNanScale || sb == mx::kNanScale};
  }
};

// quant="blockscale" and "ptpc": fp32, `k_blocks` blocks of 32 per scale along K and `b_rows` rows of B per scale.
struct Fp32ScalesReader {
  const float* a;
  const float* b;
  int64_t columns;  // scales of a row
  int64_t k_blocks, b_rows;

  Fp32ScalesReader(const GemmArgs& args, Fp32Scales kind)
      : a(static_cast<const float*>(args.a_scale)), b(static_cast<const float*>(args.b_scale)),
        columns(kind == Fp32Scales::ptpc ? 1 : (args.k + 127) / 128), k_blocks(kind == Fp32Scales::ptpc ? INT64_MAX : 4),
        b_rows(kind == Fp32Scales::ptpc ? 1 : 128) {}

  struct Factor {
    float a, b;
    // Infinity times a sum is not the sum of infinities and NaNs that its products are.
    __device__ __forceinline__ bool finite() const { return isfinite(a) && isfinite(b); }
    __device__ __forceinline__ double operator()(double sum) const { return sum * a * b; }
  };
  __device__ __forceinline__ Factor factor(int64_t m, int64_t n, int64_t block) const {
    return {a[m * columns + block / k_blocks], b[n / b_rows * columns + block / k_blocks]};
  }
};

// One element of C without bias, block by block: exact for every scale. For the blocks that bf16 operands cannot hold.
template <class Scales>
__device__ __noinline__ double exact_dot(const GemmArgs& args, const Scales& scales, int64_t m, int64_t n) {
  const uint8_t *a = args.a + m * args.k, *b = args.b + n * args.k;
  double c = 0;
  for (int64_t block = 0; block < args.k / 32 && !isnan(c); ++block) {
    double sum = 0;
    for (int i = 0; i < 32; ++i) sum += static_cast<double>(mx::decode_e4m3(a[block * 32 + i])) * mx::decode_e4m3(b[block * 32 + i]);
    c += scales.factor(m, n, block)(sum);
  }
  return c;
}

__device__ __forceinline__ float bias_at(const GemmArgs& args, int64_t n) {
  if (args.bias == nullptr) return 0.f;
  switch (args.bias_type) {
    case Float::f32: return static_cast<const float*>(args.bias)[n];
    case Float::bf16: return sm90::to_float(static_cast<const __nv_bfloat16*>(args.bias)[n]);
    default: return sm90::to_float(static_cast<const __half*>(args.bias)[n]);
  }
}

// c rounded to the output dtype, into C[m, n].
__device__ __forceinline__ void store_rounded(const GemmArgs& args, int64_t m, int64_t n, float c) {
  const int64_t at = m * args.n + n;
  switch (args.out_type) {
    case Float::f32: static_cast<float*>(args.out)[at] = c; break;
    case Float::bf16: static_cast<__nv_bfloat16*>(args.out)[at] = __float2bfloat16_rn(c); break;
    default: static_cast<__half*>(args.out)[at] = __float2half_rn(c);
  }
}

// c plus bias, rounded.
__device__ __forceinline__ void store_c(const GemmArgs& args, int64_t m, int64_t n, float c) { store_rounded(args, m, n, c + bias_at(args, n)); }
__device__ __forceinline__ void store_c(const GemmArgs& args, int64_t m, int64_t n, double c) { store_rounded(args, m, n, static_cast<float>(c + bias_at(args, n))); }

// Past the L1 cache: the copy engine may have written it.
__device__ __forceinline__ bool stored_not_finite(const GemmArgs& args, int64_t m, int64_t n) {
  const int64_t at = m * args.n + n;
  switch (args.out_type) {
    case Float::f32: return !isfinite(__ldcg(static_cast<const float*>(args.out) + at));
    case Float::bf16: return !isfinite(__bfloat162float(__ldcg(static_cast<const __nv_bfloat16*>(args.out) + at)));
    default: return !isfinite(__half2float(__ldcg(static_cast<const __half*>(args.out) + at)));
  }
}

}  // namespace mori::mxfp8
