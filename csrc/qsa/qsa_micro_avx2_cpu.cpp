// AVX2 inner loops of selected attention (see qsa_micro_cpu.h).
#include "qsa_micro_cpu.h"

#if MORI_X86

#include <cstring>
#include <limits>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace mori::qsa {
namespace {

using c10::BFloat16;
using c10::Half;

// ---- 8 values of any dtype -------------------------------------------------------------------------------------------

MORI_AVX2_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
MORI_AVX2_INLINE __m256 load8(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
MORI_AVX2_INLINE __m256 load8(const BFloat16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
MORI_AVX2_INLINE __m256 load8(const int8_t* p) {
  // The bits of 2^23 + 128 + code, then minus 2^23 + 128: twice the rate of vcvtdq2ps on Zen 3.
  const __m256i codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_add_epi32(codes, _mm256_set1_epi32(0x4b000080))), _mm256_set1_ps(8388736.0f));
}

MORI_AVX2_INLINE void store8(float* p, __m256 x) { _mm256_storeu_ps(p, x); }
MORI_AVX2_INLINE void store8(Half* p, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
MORI_AVX2_INLINE void store8(BFloat16* p, __m256 x) {
  // Round to nearest even on the bits; a NaN keeps its quiet bit.
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

MORI_AVX2_INLINE float max_of(__m256 x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

MORI_AVX2_INLINE float sum_of(__m256 x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

template <class T>
MORI_AVX2 void convert(const void* source, int64_t n, float* out) {
  const T* from = static_cast<const T*>(source);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(out + i, load8(from + i));
  for (; i < n; ++i) out[i] = static_cast<float>(from[i]);
}

template <class T>
MORI_AVX2 void convert_back(const float* source, int64_t n, void* out) {
  T* to = static_cast<T*>(out);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(to + i, load8(source + i));
  for (; i < n; ++i) to[i] = static_cast<T>(source[i]);
}

void load(const void* source, ScalarType dtype, int64_t n, float* out) {
  if (dtype == ScalarType::Half) return convert<Half>(source, n, out);
  if (dtype == ScalarType::BFloat16) return convert<BFloat16>(source, n, out);
  convert<float>(source, n, out);
}

void store(const float* source, int64_t n, ScalarType dtype, void* out) {
  if (dtype == ScalarType::Half) return convert_back<Half>(source, n, out);
  if (dtype == ScalarType::BFloat16) return convert_back<BFloat16>(source, n, out);
  convert_back<float>(source, n, out);
}

MORI_AVX2 float largest(const float* x, int64_t n) {
  __m256 tops = _mm256_setzero_ps();
  for (int64_t i = 0; i < n; i += 8) tops = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), load8(x + i)), tops);
  return max_of(tops);
}

MORI_AVX2 void load_scales(const void* source, int64_t groups, float* out) {
  int64_t bits = 0;
  if (groups == 4) std::memcpy(&bits, source, 8);
  else if (groups == 2) std::memcpy(&bits, source, 4);
  else std::memcpy(&bits, source, 2);
  _mm_storeu_ps(out, _mm_cvtph_ps(_mm_cvtsi64_si128(bits)));
}

// ---- K and V panels --------------------------------------------------------------------------------------------------

// Rows a[0..8) of 8 become columns.
MORI_AVX2_INLINE void transpose8(__m256 (&a)[8]) {
  __m256 pairs[8], quads[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    a[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
}

template <class Kv>
MORI_AVX2 void k_panel(const char* const* cells, const float* scales, int64_t dim, float* panel) {
  for (int64_t half = 0; half < kPanel; half += 8) {
    const char* const* cell = cells + half;
    const float* scale = scales + half * kMaxGroups;
    for (int64_t d0 = 0; d0 < dim; d0 += 64) {
      __m256 by;
      if constexpr (std::is_same_v<Kv, int8_t>) {
        const float* s = scale + d0 / 64;
        by = _mm256_setr_ps(s[0], s[kMaxGroups], s[2 * kMaxGroups], s[3 * kMaxGroups], s[4 * kMaxGroups], s[5 * kMaxGroups], s[6 * kMaxGroups],
                            s[7 * kMaxGroups]);
      }
      for (int64_t d = d0; d < d0 + 64; d += 8) {
        __m256 block[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) block[i] = load8(reinterpret_cast<const Kv*>(cell[i]) + d);
        transpose8(block);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          if constexpr (std::is_same_v<Kv, int8_t>) block[i] = _mm256_mul_ps(block[i], by);
          store8(panel + (d + i) * kPanel + half, block[i]);
        }
      }
    }
  }
}

template <class Kv>
MORI_AVX2 void v_panel(const char* const* cells, const float* scales, int64_t n, int64_t d0, float* panel) {
  const float* scale = scales + d0 / 64;
  for (int64_t c = 0; c < n; ++c) {
    const Kv* cell = reinterpret_cast<const Kv*>(cells[c]) + d0;
    __m256 low = load8(cell), high = load8(cell + 8);
    if constexpr (std::is_same_v<Kv, int8_t>) {
      const __m256 by = _mm256_broadcast_ss(scale + c * kMaxGroups);
      low = _mm256_mul_ps(low, by);
      high = _mm256_mul_ps(high, by);
    }
    store8(panel + c * kPanel, low);
    store8(panel + c * kPanel + 8, high);
  }
}

// ---- products: a tile of Height rows times a panel, 2 x Height accumulators -------------------------------------------

// acc[row] += left[row][0 .. n) . panel[0 .. n)
template <int Height>
MORI_AVX2_INLINE void multiply(const float* left, int64_t left_stride, int64_t n, const float* panel, __m256 (&acc)[Height][2]) {
  for (int64_t i = 0; i < n; ++i) {
    const __m256 low = load8(panel + i * kPanel), high = load8(panel + i * kPanel + 8);
#pragma GCC unroll 6
    for (int r = 0; r < Height; ++r) {
      const __m256 factor = _mm256_broadcast_ss(left + r * left_stride + i);
      acc[r][0] = _mm256_fmadd_ps(factor, low, acc[r][0]);
      acc[r][1] = _mm256_fmadd_ps(factor, high, acc[r][1]);
    }
  }
}

template <int Height>
MORI_AVX2 void product(const float* left, int64_t left_stride, int64_t n, const float* panel, float* out, int64_t out_stride, bool add) {
  __m256 acc[Height][2];
#pragma GCC unroll 6
  for (int r = 0; r < Height; ++r) {
    acc[r][0] = add ? load8(out + r * out_stride) : _mm256_setzero_ps();
    acc[r][1] = add ? load8(out + r * out_stride + 8) : _mm256_setzero_ps();
  }
  multiply<Height>(left, left_stride, n, panel, acc);
#pragma GCC unroll 6
  for (int r = 0; r < Height; ++r) {
    store8(out + r * out_stride, acc[r][0]);
    store8(out + r * out_stride + 8, acc[r][1]);
  }
}

using Product = void (*)(const float*, int64_t, int64_t, const float*, float*, int64_t, bool);
constexpr Product kProducts[kTileRows] = {product<1>, product<2>, product<3>, product<4>, product<5>, product<6>};

void scores(int64_t rows, const float* q, int64_t dim, const float* panel, float* s) {
  kProducts[rows - 1](q, dim, dim, panel, s, kChunk, false);
}

void values(int64_t rows, const float* p, int64_t n, const float* panel, float* acc, int64_t dim, bool add) {
  kProducts[rows - 1](p, kChunk, n, panel, acc, dim, add);
}

// ---- softmax ---------------------------------------------------------------------------------------------------------

// exp(x) for x <= 0, 0 below -87.3 (fp32's normal range); relative error 1e-7. NaN stays NaN.
MORI_AVX2_INLINE __m256 exp8(__m256 x) {
  const __m256 lowest = _mm256_set1_ps(-87.3f);
  const __m256 tiny = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
  x = _mm256_max_ps(lowest, x);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // ln 2 in two parts, the first exact in products with n
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  // Taylor series to r^7: below 5e-9 on |r| <= ln 2 / 2
  __m256 y = _mm256_set1_ps(1.0f / 5040);
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 720));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 120));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 24));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 6));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(0.5f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(tiny, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}

// All ones in the lanes i of 8 with first + i < n.
MORI_AVX2_INLINE __m256 lanes_below(int64_t first, int64_t n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n - first)), lane));
}

// Reads and writes s up to a multiple of 8 beyond n: the buffers have kChunk values per row.
MORI_AVX2 void softmax(float* s, int64_t n, float factor, float* max, float* sum) {
  const int64_t whole = n & ~int64_t{7};
  const __m256 lowest = _mm256_set1_ps(-std::numeric_limits<float>::infinity()), tail = lanes_below(whole, n);
  __m256 tops = whole < n ? _mm256_blendv_ps(lowest, load8(s + whole), tail) : lowest;
  for (int64_t i = 0; i < whole; i += 8) tops = _mm256_max_ps(load8(s + i), tops);
  *max = max_of(tops);
  const __m256 top = _mm256_set1_ps(*max), by = _mm256_set1_ps(factor);
  __m256 sums = _mm256_setzero_ps();
  for (int64_t i = 0; i < whole; i += 8) {
    const __m256 p = exp8(_mm256_mul_ps(_mm256_sub_ps(load8(s + i), top), by));
    store8(s + i, p);
    sums = _mm256_add_ps(sums, p);
  }
  if (whole < n) {
    const __m256 p = _mm256_and_ps(exp8(_mm256_mul_ps(_mm256_sub_ps(load8(s + whole), top), by)), tail);
    store8(s + whole, p);
    sums = _mm256_add_ps(sums, p);
  }
  *sum = sum_of(sums);
}

// ---- rows; n is a multiple of 8 for D 64, 128, 256, and any for qsa_merge ----------------------------------------------

MORI_AVX2 void fold(float* total, const float* acc, float a, float b, int64_t n) {
  const __m256 keep = _mm256_set1_ps(a), add = _mm256_set1_ps(b);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(total + i, _mm256_fmadd_ps(load8(acc + i), add, _mm256_mul_ps(load8(total + i), keep)));
  for (; i < n; ++i) total[i] = total[i] * a + acc[i] * b;
}

MORI_AVX2 void finish(float* row, float denominator, const float* gate, int64_t n) {
  const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 x = _mm256_div_ps(load8(row + i), _mm256_set1_ps(denominator));
    if (gate != nullptr) {
      const __m256 g = load8(gate + i);
      const __m256 small = exp8(_mm256_or_ps(g, sign));  // exp(-|g|) never overflows
      x = _mm256_mul_ps(x, _mm256_div_ps(_mm256_blendv_ps(one, small, g), _mm256_add_ps(one, small)));
    }
    store8(row + i, x);
  }
  if (i < n) generic_micro(ScalarType::Char).finish(row + i, denominator, gate == nullptr ? nullptr : gate + i, n - i);
}

template <class Kv>
constexpr Micro kMicro = {load, store, largest, load_scales, k_panel<Kv>, v_panel<Kv>, scores, softmax, values, fold, finish};

}  // namespace

const Micro& avx2_micro(ScalarType kv_dtype) {
  if (kv_dtype == ScalarType::Half) return kMicro<Half>;
  if (kv_dtype == ScalarType::BFloat16) return kMicro<BFloat16>;
  return kMicro<int8_t>;
}

}  // namespace mori::qsa

#endif  // MORI_X86
