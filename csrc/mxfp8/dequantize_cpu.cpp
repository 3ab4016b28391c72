// mxfp8_dequantize on the CPU: out = code * 2^(scale - 127), exact in fp32, then rounded once to the output dtype.
//
// 1x32 and 32x32 blocks differ in the row of scales that a row of codes reads. Bound by memory bandwidth. The kernels multiply
// in fp32; a block of extreme scale is composed from integers, so that fp32 subnormals are right also in a thread that flushes them.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../common/cpu_isa.h"
#include "../common/mx.h"
#include "mxfp8_cpu.h"

namespace mori::mxfp8 {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kGrain = 32768;  // least elements for a thread
// Between these scales every nonzero product, 2^-9 * scale to 448 * scale, is an fp32 normal.
constexpr uint8_t kFirstNormalScale = 10, kLastNormalScale = 246;

// ---- One row: `blocks` blocks of 32.

template <class T>
using RowKernel = void (*)(const uint8_t* codes, const uint8_t* scales, int64_t blocks, T* out);

void store(uint32_t bits, float* out) { *out = mx::float_of(bits); }
void store(uint32_t bits, Half* out) { *out = static_cast<Half>(mx::float_of(bits)); }
void store(uint32_t bits, BFloat16* out) { out->x = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16); }

bool is_normal_scale(uint8_t scale) { return scale >= kFirstNormalScale && scale <= kLastNormalScale; }

template <class T>
void dequantize_extreme_block(const uint8_t* codes, uint8_t scale, T* out) {
  for (int64_t i = 0; i < kBlock; ++i) store(mx::dequantized_bits(codes[i], scale), out + i);
}

struct DecodeTable {
  float value[256];
  DecodeTable() {
    for (int code = 0; code < 256; ++code) value[code] = mx::decode_e4m3(static_cast<uint8_t>(code));
  }
};

template <class T>
void dequantize_row_generic(const uint8_t* codes, const uint8_t* scales, int64_t blocks, T* out) {
  static const DecodeTable table;
  for (int64_t b = 0; b < blocks; ++b, codes += kBlock, out += kBlock) {
    if (!is_normal_scale(scales[b])) {
      dequantize_extreme_block(codes, scales[b], out);
      continue;
    }
    const float scale = mx::decode_e8m0(scales[b]);
    for (int64_t i = 0; i < kBlock; ++i) store(mx::bits_of(table.value[codes[i]] * scale), out + i);
  }
}

#if MORI_X86
MORI_AVX2_INLINE void store16(__m256 low, __m256 high, float* out) {
  _mm256_storeu_ps(out, low);
  _mm256_storeu_ps(out + 8, high);
}

MORI_AVX2_INLINE void store16(__m256 low, __m256 high, Half* out) {
  const __m128i first = _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT), second = _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_set_m128i(second, first));
}

// Four significant bits: the upper half of the fp32 is the bf16, with nothing to round.
MORI_AVX2_INLINE void store16(__m256 low, __m256 high, BFloat16* out) {
  const __m256i first = _mm256_srli_epi32(_mm256_castps_si256(low), 16), second = _mm256_srli_epi32(_mm256_castps_si256(high), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8));
}

// The code's bits, moved into fp16's fields, are the fp16 of value * 2^-8, subnormals included; only NaN needs a look.
MORI_AVX2_INLINE __m256i half_of_codes(const uint8_t* codes) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
  const __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0x8000)));
  const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80));
  return _mm256_blendv_epi8(_mm256_or_si256(sign, magnitude), _mm256_set1_epi16(0x7e00), is_nan);
}

template <class T>
MORI_AVX2 void dequantize_row_avx2(const uint8_t* codes, const uint8_t* scales, int64_t blocks, T* out) {
  for (int64_t b = 0; b < blocks; ++b, codes += kBlock, out += kBlock) {
    if (!is_normal_scale(scales[b])) {
      dequantize_extreme_block(codes, scales[b], out);
      continue;
    }
    const __m256 scale = _mm256_castsi256_ps(_mm256_set1_epi32((scales[b] + 8) << 23));
    for (int i = 0; i < kBlock; i += 16) {
      const __m256i half = half_of_codes(codes + i);
      const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(half)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
      store16(_mm256_mul_ps(low, scale), _mm256_mul_ps(high, scale), out + i);
    }
  }
}
#endif

template <class T>
RowKernel<T> row_kernel() {
#if MORI_X86
  if (cpu_isa() == CpuIsa::avx2) return dequantize_row_avx2<T>;
#endif
  return dequantize_row_generic<T>;
}

// ---- All rows.

template <class T>
void dequantize_rows(const DequantizeShape& shape, const uint8_t* codes, const uint8_t* scales, T* out) {
  const RowKernel<T> kernel = row_kernel<T>();
  const int64_t blocks = shape.k / kBlock, rows_per_scale = shape.weight_blocks ? kBlock : 1;
  const int64_t grain = ceil_div(kGrain, shape.k > 0 ? shape.k : 1);
  torch::stable::parallel_for(0, shape.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernel(codes + row * shape.k, scales + row / rows_per_scale * blocks, blocks, out + row * shape.k);
  });
}

}  // namespace

void Cpu::dequantize(const DequantizeShape& shape, const Tensor& codes_any, const Tensor& scale_any, const Tensor& out) {
  const Tensor codes_tensor = dense(codes_any), scale_tensor = dense(scale_any);
  const uint8_t* codes = static_cast<const uint8_t*>(codes_tensor.const_data_ptr());
  const uint8_t* scales = static_cast<const uint8_t*>(scale_tensor.const_data_ptr());
  void* data = out.mutable_data_ptr();
  switch (out.scalar_type()) {
    case ScalarType::BFloat16: return dequantize_rows(shape, codes, scales, static_cast<BFloat16*>(data));
    case ScalarType::Half: return dequantize_rows(shape, codes, scales, static_cast<Half*>(data));
    default: return dequantize_rows(shape, codes, scales, static_cast<float*>(data));
  }
}

}  // namespace mori::mxfp8
