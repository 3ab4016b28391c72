// AVX2 kernels of the CPU GEMM (contract: mxfp8_cpu_kernels.h).
//
// Decoding: the bits s eeee mmm of a code, shifted right arithmetically to fp32's s........ eeee mmm and masked, are the code's
// value times 2^-120, subnormal codes included (they become fp32 subnormals, which the caller must not flush). 32 codes are loaded as 8 dwords; two 16-bit
// shifts serve four codes each, so a code costs 9/32 of an instruction and no shuffle. NaN codes come out as 480 * 2^-120
// and are found beside it, with a byte maximum.
//
// Weights are decoded in registers for the few tokens of one pass (dot); for many tokens both sides are decoded into the caches
// first (multiply), which leaves 7 loads for 12 FMAs.
#pragma once

#include "../common/cpu_isa.h"
#include "mxfp8_cpu_kernels.h"

#if MORI_X86

namespace mori::mxfp8::avx2 {

// The codes 4l + kOrder[i] of 8 dwords, times 2^-120.
template <int I>
MORI_AVX2_INLINE __m256 decode_dwords(__m256i codes) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0x87f00000));
  const __m256i upper = I < 2 ? codes : _mm256_slli_epi16(codes, 8);  // the two codes in the high bytes of their 16 bits
  const __m256i shifted = _mm256_srai_epi16(upper, 4);
  return _mm256_castsi256_ps(_mm256_and_si256(I % 2 == 0 ? shifted : _mm256_slli_epi32(shifted, 16), mask));
}

// 255 in a byte whose code is NaN (0x7f or 0xff), less elsewhere.
MORI_AVX2_INLINE __m256i nan_mark(__m256i codes) { return _mm256_or_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80))); }

MORI_AVX2_INLINE bool holds_nan(__m256i marks) {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(marks, _mm256_set1_epi8(-1))) != 0;
}

MORI_AVX2_INLINE __m256i load(const uint8_t* codes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)); }

// For the rows that follow, which hardware prefetch misses between short pieces of rows: 4x7168x2048 takes 1.75 ms instead of 3.71
// (medians of three alternating runs).
MORI_AVX2_INLINE void prefetch(const uint8_t* codes) { _mm_prefetch(reinterpret_cast<const char*>(codes), _MM_HINT_T0); }

MORI_AVX2 inline void decode(const Rows& rows, int64_t blocks, int tokens, float* a, bool* has_nan) {
  const __m256 unit = _mm256_set1_ps(0x1p120f);
  __m256i marks[kMaxTokens] = {};
  for (int64_t j = 0; j < blocks; ++j, a += 4 * tokens * kLanes) {
    for (int t = 0; t < tokens; ++t) {
      const __m256i codes = load(rows.codes + t * rows.stride + 32 * j);
      prefetch(rows.codes + (tokens + t) * rows.stride + 32 * j);
      const __m256 factor = _mm256_broadcast_ss(rows.factor + t * blocks + j);
      marks[t] = _mm256_max_epu8(marks[t], nan_mark(codes));
      float* out = a + t * kLanes;
      _mm256_store_ps(out, _mm256_mul_ps(_mm256_mul_ps(decode_dwords<0>(codes), unit), factor));
      _mm256_store_ps(out + tokens * kLanes, _mm256_mul_ps(_mm256_mul_ps(decode_dwords<1>(codes), unit), factor));
      _mm256_store_ps(out + 2 * tokens * kLanes, _mm256_mul_ps(_mm256_mul_ps(decode_dwords<2>(codes), unit), factor));
      _mm256_store_ps(out + 3 * tokens * kLanes, _mm256_mul_ps(_mm256_mul_ps(decode_dwords<3>(codes), unit), factor));
    }
  }
  for (int t = 0; t < tokens; ++t) has_nan[t] |= holds_nan(marks[t]);
}

MORI_AVX2_INLINE float sum_of_chains(__m256 chains) {
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(chains), _mm256_extractf128_ps(chains, 1));
  const __m128 half = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

template <int I, int Rows, int Tokens>
MORI_AVX2_INLINE void step(const __m256i (&codes)[Rows], const float* a, __m256 (&chains)[Rows][Tokens]) {
  a += I * Tokens * kLanes;
  if constexpr (Rows > Tokens) {  // hold the tokens in registers, one weight at a time
    __m256 value[Tokens];
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t) value[t] = _mm256_load_ps(a + t * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const __m256 weight = decode_dwords<I>(codes[r]);
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; ++t) chains[r][t] = _mm256_fmadd_ps(weight, value[t], chains[r][t]);
    }
  } else {
    __m256 weight[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) weight[r] = decode_dwords<I>(codes[r]);
#pragma GCC unroll 8
    for (int t = 0; t < Tokens; ++t) {
      __m256 value = _mm256_load_ps(a + t * kLanes);
      // Loads once while registers last: GCC folds the load into each FMA otherwise, 15% slower with 8 chains.
      if constexpr (Rows * Tokens <= 8) __asm__("" : "+x"(value));
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) chains[r][t] = _mm256_fmadd_ps(weight[r], value, chains[r][t]);
    }
  }
}

// `Rows` rows from row r on.
template <int Rows, int Tokens>
MORI_AVX2_INLINE void dot_rows(const Pass& pass, int64_t r) {
  const uint8_t* b = pass.b + r * pass.row_stride;
  const float* a = pass.a;
  __m256i marks = _mm256_setzero_si256();
  for (int64_t first = 0; first < pass.blocks; first += kSpan) {
    const int64_t last = first + kSpan < pass.blocks ? first + kSpan : pass.blocks;
    __m256 chains[Rows][Tokens];
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; ++t) chains[i][t] = _mm256_setzero_ps();
    for (int64_t j = first; j < last; ++j, a += 4 * Tokens * kLanes) {
      __m256i codes[Rows];
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        codes[i] = load(b + i * pass.row_stride + 32 * j);
        prefetch(b + (Rows + i) * pass.row_stride + 32 * j);
        marks = _mm256_max_epu8(marks, nan_mark(codes[i]));
      }
      step<0>(codes, a, chains);
      step<1>(codes, a, chains);
      step<2>(codes, a, chains);
      step<3>(codes, a, chains);
    }
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int t = 0; t < Tokens; ++t) pass.total[t * kMaxTileRows + r + i] += sum_of_chains(chains[i][t]);
  }
  if (!holds_nan(marks)) return;
  for (int i = 0; i < Rows; ++i) {
    marks = _mm256_setzero_si256();
    for (int64_t j = 0; j < pass.blocks; ++j) marks = _mm256_max_epu8(marks, nan_mark(load(b + i * pass.row_stride + 32 * j)));
    pass.row_is_nan[r + i] |= holds_nan(marks);
  }
}

template <int Rows, int Tokens>
MORI_AVX2 void dot_tokens(const Pass& pass) {
  int64_t r = 0;
  for (; r + Rows <= pass.rows; r += Rows) dot_rows<Rows, Tokens>(pass, r);
  for (; r + 2 <= pass.rows; r += 2) dot_rows<2, Tokens>(pass, r);
  if (r < pass.rows) dot_rows<1, Tokens>(pass, r);
}

// Rows at once: 6 to 10 chains cover the FMAs' latency and fit into 16 registers.
inline void dot(const Pass& pass, int tokens) {
  switch (tokens) {
    case 1: return dot_tokens<6, 1>(pass);
    case 2: return dot_tokens<4, 2>(pass);
    case 3: return dot_tokens<3, 3>(pass);
    case 4: return dot_tokens<2, 4>(pass);
    default: return dot_tokens<2, 5>(pass);
  }
}

// sum_of_chains of four at once.
MORI_AVX2_INLINE __m128 sums_of_chains(const __m256 (&chains)[4]) {
  __m128 quarter[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) quarter[r] = _mm_add_ps(_mm256_castps256_ps128(chains[r]), _mm256_extractf128_ps(chains[r], 1));
  _MM_TRANSPOSE4_PS(quarter[0], quarter[1], quarter[2], quarter[3]);
  return _mm_add_ps(_mm_add_ps(quarter[0], quarter[2]), _mm_add_ps(quarter[1], quarter[3]));
}

// 12 chains, 3 tokens and a weight fill the 16 registers.
template <int Rows, int Tokens>
MORI_AVX2 void multiply_panels(const float* b, const float* a, int64_t blocks, float* total) {
  __m256 chains[Tokens][Rows];
#pragma GCC unroll 4
  for (int t = 0; t < Tokens; ++t)
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) chains[t][r] = _mm256_setzero_ps();
  for (int64_t i = 0; i < 4 * blocks; ++i, b += Rows * kLanes, a += Tokens * kLanes) {
    __m256 value[Tokens];
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) value[t] = _mm256_load_ps(a + t * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const __m256 weight = _mm256_load_ps(b + r * kLanes);
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; ++t) chains[t][r] = _mm256_fmadd_ps(weight, value[t], chains[t][r]);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < Tokens; ++t) {
    float* line = total + t * kMaxTileRows;
    if constexpr (Rows == 4) {
      _mm_storeu_ps(line, _mm_add_ps(_mm_loadu_ps(line), sums_of_chains(chains[t])));
    } else {
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) line[r] += sum_of_chains(chains[t][r]);
    }
  }
}

template <int Rows>
void multiply_rows(const float* b, const float* a, int tokens, int64_t blocks, float* total) {
  switch (tokens) {
    case 1: return multiply_panels<Rows, 1>(b, a, blocks, total);
    case 2: return multiply_panels<Rows, 2>(b, a, blocks, total);
    default: return multiply_panels<Rows, 3>(b, a, blocks, total);
  }
}

inline void multiply(const float* b, int rows, const float* a, int tokens, int64_t blocks, float* total) {
  switch (rows) {
    case 1: return multiply_rows<1>(b, a, tokens, blocks, total);
    case 2: return multiply_rows<2>(b, a, tokens, blocks, total);
    case 3: return multiply_rows<3>(b, a, tokens, blocks, total);
    default: return multiply_rows<4>(b, a, tokens, blocks, total);
  }
}

// Decoded weights are 2^-120 too small. Half of that goes onto A and the rest onto the result.
constexpr Kernels kKernels = {0x1p80f, 0x1p40f, decode, dot, multiply};

}  // namespace mori::mxfp8::avx2

#endif
