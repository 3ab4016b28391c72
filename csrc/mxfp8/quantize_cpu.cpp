// mxfp8_quantize and mxfp8_quantize_weight on the CPU.
//
//   scale = block_scale(max |x| of the block), code = round(x / scale) to e4m3, nearest even (common/mx.h)
//   A block holding NaN or an infinity gets scale 255 and codes 0x7f; an all-zero block scale 0 and codes 0x00 (0x80 for -0.0).
//
// Two passes over a chunk that stays in the L1 or L2 cache: `amax` per block, then `encode` with the scales known. Rows of 1x32
// blocks are one flat run of blocks; a strip of 32 rows shares its scales for 32x32 blocks. Bound by memory bandwidth.
#include <algorithm>
#include <type_traits>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../common/cpu_isa.h"
#include "../common/mx.h"
#include "mxfp8_cpu.h"

namespace mori::mxfp8 {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kChunk = 64;          // blocks between the two passes: at most 8 KiB of input
constexpr int64_t kGrainBlocks = 1024;  // least work for a thread
// Up to this scale a block may hold fp32 subnormals that are worth a code: at 2^-116 the largest is below 2^-10.
constexpr uint8_t kLastSubnormalScale = 10;
// The bf16 kernel multiplies by 2^-8 / scale, an fp32 normal up to this scale.
constexpr uint8_t kLastHalfScale = 245;

// ---- One ISA = a pair of kernels over `blocks` consecutive blocks of 32.

template <class T>
struct Kernels {
  // Raises amax[i], fp32 bits, to the largest magnitude of block i.
  void (*amax)(const T* x, int64_t blocks, uint32_t* amax);
  void (*encode)(const T* x, int64_t blocks, const uint8_t* scales, uint8_t* codes);
};

uint32_t fp32_bits(float x) { return mx::bits_of(x); }
uint32_t fp32_bits(BFloat16 x) { return static_cast<uint32_t>(x.x) << 16; }
uint32_t fp32_bits(Half x) { return mx::bits_of(static_cast<float>(x)); }

template <class T>
void amax_generic(const T* x, int64_t blocks, uint32_t* amax) {
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t i = 0; i < kBlock; ++i) amax[b] = std::max(amax[b], fp32_bits(x[b * kBlock + i]) & mx::kMagnitudeBits);
}

template <class T>
void encode_generic(const T* x, int64_t blocks, const uint8_t* scales, uint8_t* codes) {
  for (int64_t b = 0; b < blocks; ++b, x += kBlock, codes += kBlock) {
    if (scales[b] == mx::kNanScale) {
      std::fill_n(codes, kBlock, mx::kNanCode);
      continue;
    }
    for (int64_t i = 0; i < kBlock; ++i) {
      const uint32_t bits = fp32_bits(x[i]);
      const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
      codes[i] = sign | mx::encode_e4m3(mx::scaled_magnitude(bits & mx::kMagnitudeBits, scales[b]));
    }
  }
}

#if MORI_X86
MORI_AVX2_INLINE __m256i load8(const float* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
MORI_AVX2_INLINE __m256i load8(const BFloat16* x) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16);
}
MORI_AVX2_INLINE __m256i load8(const Half* x) {
  return _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}

MORI_AVX2_INLINE __m256i load16(const BFloat16* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }

template <class T>
MORI_AVX2_INLINE uint32_t block_amax_avx2(const T* x) {
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) top = _mm256_max_epi32(top, _mm256_and_si256(load8(x + 8 * i), _mm256_set1_epi32(mx::kMagnitudeBits)));
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}

MORI_AVX2_INLINE uint32_t block_amax_avx2(const BFloat16* x) {
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  const __m256i low = _mm256_and_si256(load16(x), magnitude), high = _mm256_and_si256(load16(x + 16), magnitude);
  const __m256i top = _mm256_max_epu16(low, high);
  const __m128i m = _mm_max_epu16(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  // The one horizontal instruction there is takes the minimum: of the complements.
  const __m128i complement = _mm_minpos_epu16(_mm_xor_si128(m, _mm_set1_epi32(-1)));
  return (0xffffu - static_cast<uint16_t>(_mm_cvtsi128_si32(complement))) << 16;
}

template <class T>
MORI_AVX2 void amax_avx2(const T* x, int64_t blocks, uint32_t* amax) {
  for (int64_t b = 0; b < blocks; ++b) amax[b] = std::max(amax[b], block_amax_avx2(x + b * kBlock));
}

// mx::scaled_magnitude and mx::encode_e4m3 eight at a time; the codes come with 1128 = 141 << 3 still to be taken off.
template <bool with_subnormals>
MORI_AVX2_INLINE __m256i encode8(__m256i bits, __m256 inverse, __m256 subnormal_inverse) {
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(mx::kMagnitudeBits));
  __m256 y = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), inverse);
  if (with_subnormals) {
    const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(mx::kMinNormalBits), magnitude);
    y = _mm256_blendv_ps(y, _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), subnormal_inverse), _mm256_castsi256_ps(is_subnormal));
  }
  const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(y), _mm256_set1_epi32(mx::kInfBits));
  const __m256i anchor = _mm256_add_epi32(_mm256_max_epi32(exponent, _mm256_set1_epi32(121 << 23)), _mm256_set1_epi32(20 << 23));
  const __m256i sum = _mm256_castps_si256(_mm256_add_ps(y, _mm256_castsi256_ps(anchor)));
  return _mm256_add_epi32(_mm256_sub_epi32(sum, anchor), _mm256_srli_epi32(anchor, 20));
}

template <bool with_subnormals, class T>
MORI_AVX2_INLINE void encode_block_avx2(const T* x, uint8_t scale, uint8_t* codes) {
  const __m256 inverse = _mm256_castsi256_ps(_mm256_set1_epi32((254 - scale) << 23));
  const __m256 subnormal_inverse = _mm256_castsi256_ps(_mm256_set1_epi32((105 - scale) << 23));
  __m256i bits[4], code[4];
  for (int i = 0; i < 4; ++i) {
    bits[i] = load8(x + 8 * i);
    code[i] = encode8<with_subnormals>(bits[i], inverse, subnormal_inverse);
  }
  const __m256i excess = _mm256_set1_epi16(141 << 3);
  const __m256i low = _mm256_sub_epi16(_mm256_packs_epi32(code[0], code[1]), excess);
  const __m256i high = _mm256_sub_epi16(_mm256_packs_epi32(code[2], code[3]), excess);
  const __m256i magnitude = _mm256_min_epu8(_mm256_packus_epi16(low, high), _mm256_set1_epi8(mx::kMaxCode));
  // Saturating packs keep the sign bit.
  const __m256i sign = _mm256_packs_epi16(_mm256_packs_epi32(bits[0], bits[1]), _mm256_packs_epi32(bits[2], bits[3]));
  const __m256i packed = _mm256_or_si256(magnitude, _mm256_and_si256(sign, _mm256_set1_epi8(static_cast<char>(0x80))));
  // The packs work within 128-bit halves: put the groups of four back in order.
  const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), ordered);
}

// fp16(x * 2^-8 / scale), eight of them: its exponent field and top three mantissa bits are the e4m3 code, subnormals included.
// A bf16 has 8 significant bits, so that only quotients below 2^-9 are inexact there; the factor 1 + 2^-13 in `inverse` moves
// those just above e4m3's tie at 2^-10 to the right side of it, and is too small to change any other.
MORI_AVX2_INLINE __m128i scaled_half(__m256i bits, __m256 inverse) {
  return _mm256_cvtps_ph(_mm256_mul_ps(_mm256_castsi256_ps(bits), inverse), _MM_FROUND_TO_NEAREST_INT);
}

// h + 63 + (bit 7 of h): bits 7.. are then h rounded to nearest even there.
MORI_AVX2_INLINE __m256i round_at_bit7(__m256i h) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(h, 7), _mm256_set1_epi16(1));
  return _mm256_add_epi16(_mm256_add_epi16(h, _mm256_set1_epi16(63)), odd);
}

// bf16: elements of even and of odd position apart, so that their codes meet in the bytes of one 16-bit lane.
MORI_AVX2_INLINE void encode_block_half(const BFloat16* x, uint8_t scale, uint8_t* codes) {
  const __m256 inverse = _mm256_castsi256_ps(_mm256_set1_epi32((246 - scale) << 23 | 1 << 10));
  const __m256i odd_bits = _mm256_set1_epi32(static_cast<int>(0xffff0000u)), odd_byte = _mm256_set1_epi16(static_cast<short>(0xff00));
  const __m256i low = load16(x), high = load16(x + 16);
  const __m256i even = _mm256_set_m128i(scaled_half(_mm256_slli_epi32(high, 16), inverse), scaled_half(_mm256_slli_epi32(low, 16), inverse));
  const __m256i odd = _mm256_set_m128i(scaled_half(_mm256_and_si256(high, odd_bits), inverse), scaled_half(_mm256_and_si256(low, odd_bits), inverse));
  const __m256i rounded = _mm256_blendv_epi8(_mm256_srli_epi16(round_at_bit7(even), 7), _mm256_slli_epi16(round_at_bit7(odd), 1), odd_byte);
  const __m256i magnitude = _mm256_min_epu8(rounded, _mm256_set1_epi8(mx::kMaxCode));
  const __m256i sign = _mm256_and_si256(_mm256_blendv_epi8(_mm256_srli_epi16(even, 8), odd, odd_byte), _mm256_set1_epi8(static_cast<char>(0x80)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_or_si256(magnitude, sign));
}

// Loads and arithmetic would otherwise take turns: `amax` waits for memory, then `encode` leaves it idle. Without it: 1.4x the time.
template <class T>
MORI_AVX2_INLINE void prefetch_next_chunk(const T* x) {
  const char* next = reinterpret_cast<const char*>(x + kChunk * kBlock);
  for (size_t byte = 0; byte < kBlock * sizeof(T); byte += 64) _mm_prefetch(next + byte, _MM_HINT_T0);
}

template <class T>
MORI_AVX2 void encode_avx2(const T* x, int64_t blocks, const uint8_t* scales, uint8_t* codes) {
  for (int64_t b = 0; b < blocks; ++b, x += kBlock, codes += kBlock) {
    prefetch_next_chunk(x);
    if (scales[b] == mx::kNanScale) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_set1_epi8(mx::kNanCode));
    } else if (scales[b] <= kLastSubnormalScale) {
      encode_block_avx2<true>(x, scales[b], codes);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      if (scales[b] <= kLastHalfScale) encode_block_half(x, scales[b], codes);
      else encode_block_avx2<false>(x, scales[b], codes);
    } else {
      encode_block_avx2<false>(x, scales[b], codes);
    }
  }
}
#endif

template <class T>
Kernels<T> kernels() {
#if MORI_X86
  if (cpu_isa() == CpuIsa::avx2) return {amax_avx2<T>, encode_avx2<T>};
#endif
  return {amax_generic<T>, encode_generic<T>};
}

// ---- Blocks of either shape, on any ISA.

void block_scales(Rounding rounding, const uint32_t* amax, int64_t blocks, uint8_t* scales) {
  for (int64_t b = 0; b < blocks; ++b)
    scales[b] = rounding == Rounding::rceil ? mx::block_scale_rceil(amax[b]) : mx::block_scale_floor(amax[b]);
}

template <class T>
void quantize_rows(const T* x, int64_t blocks, Rounding rounding, uint8_t* codes, uint8_t* scales) {
  const Kernels<T> isa = kernels<T>();
  torch::stable::parallel_for(0, blocks, kGrainBlocks, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b += kChunk) {
      const int64_t count = std::min(kChunk, end - b);
      uint32_t amax[kChunk] = {};
      isa.amax(x + b * kBlock, count, amax);
      block_scales(rounding, amax, count, scales + b);
      isa.encode(x + b * kBlock, count, scales + b, codes + b * kBlock);
    }
  });
}

// w [n, k]: a task is one strip of up to 32 rows by kChunk blocks.
template <class T>
void quantize_strips(const T* w, int64_t n, int64_t k, Rounding rounding, uint8_t* codes, uint8_t* scales) {
  const Kernels<T> isa = kernels<T>();
  const int64_t blocks = k / kBlock, chunks = ceil_div(blocks, kChunk), strips = ceil_div(n, kBlock);
  torch::stable::parallel_for(0, strips * chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t strip = task / chunks, first = task % chunks * kChunk, count = std::min(kChunk, blocks - first);
      const int64_t row_begin = strip * kBlock, row_end = std::min(row_begin + kBlock, n);
      uint8_t* strip_scales = scales + strip * blocks + first;
      uint32_t amax[kChunk] = {};
      for (int64_t row = row_begin; row < row_end; ++row) isa.amax(w + row * k + first * kBlock, count, amax);
      block_scales(rounding, amax, count, strip_scales);
      for (int64_t row = row_begin; row < row_end; ++row) {
        const int64_t offset = row * k + first * kBlock;
        isa.encode(w + offset, count, strip_scales, codes + offset);
      }
    }
  });
}

// Calls f with a typed pointer to the data of a dense float tensor.
template <class F>
void with_data(const Tensor& x, const F& f) {
  const void* data = x.const_data_ptr();
  switch (x.scalar_type()) {
    case ScalarType::BFloat16: return f(static_cast<const BFloat16*>(data));
    case ScalarType::Half: return f(static_cast<const Half*>(data));
    default: return f(static_cast<const float*>(data));
  }
}

uint8_t* bytes_of(const Tensor& t) { return static_cast<uint8_t*>(t.mutable_data_ptr()); }

}  // namespace

void Cpu::quantize(const Tensor& x, Rounding rounding, const Tensor& codes, const Tensor& scale) {
  with_data(dense(x), [&](const auto* data) { quantize_rows(data, x.numel() / kBlock, rounding, bytes_of(codes), bytes_of(scale)); });
}

void Cpu::quantize_weight(const Tensor& w, Rounding rounding, const Tensor& codes, const Tensor& scale) {
  with_data(dense(w), [&](const auto* data) { quantize_strips(data, w.size(0), w.size(1), rounding, bytes_of(codes), bytes_of(scale)); });
}

}  // namespace mori::mxfp8
