// kv_quantize on the CPU: per 64 values scale = fp16(max |x| / 127), code = clamp(rint(x / scale), -127, 127), all in fp32.
// A scale of 0 gives codes 0; so does one that is not finite (a NaN or an infinity in x, or max |x| above 127 * 65504), and the
// group then reads back as NaN: an overflow is never a plausible number.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <torch/headeronly/util/Half.h>

#include "../common/cpu_isa.h"
#include "qsa_cpu.h"

namespace mori::qsa {
namespace {

// The scale of a group whose largest magnitude has these fp32 bits; a scale that is 0 or not finite is of no use to divide by.
c10::Half group_scale(uint32_t top_bits) {
  float top;
  std::memcpy(&top, &top_bits, sizeof(top));
  return top / 127.0f;
}
bool divides(float scale) { return scale > 0 && std::isfinite(scale); }

c10::Half quantize_portable(const float* x, int8_t* codes) {
  uint32_t top_bits = 0;  // the order of |x| with NaN above infinity
  for (int64_t i = 0; i < kScaleGroup; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    top_bits = std::max(top_bits, bits & 0x7fffffffu);
  }
  const c10::Half scale = group_scale(top_bits);
  const float step = scale;
  for (int64_t i = 0; i < kScaleGroup; ++i) codes[i] = divides(step) ? static_cast<int8_t>(std::clamp(std::nearbyint(x[i] / step), -127.0f, 127.0f)) : 0;
  return scale;
}

#if MORI_X86
MORI_AVX2 c10::Half quantize_avx2(const float* x, int8_t* codes) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i top = _mm256_setzero_si256();
  for (int64_t i = 0; i < kScaleGroup; i += 8) top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
  __m128i most = _mm_max_epu32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
  const c10::Half scale = group_scale(static_cast<uint32_t>(_mm_cvtsi128_si32(most)));
  if (!divides(scale)) {
    std::memset(codes, 0, kScaleGroup);
    return scale;
  }
  const __m256 step = _mm256_set1_ps(scale);
  for (int64_t i = 0; i < kScaleGroup; i += 32) {
    __m256i code[4];
    for (int j = 0; j < 4; ++j) code[j] = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(x + i + 8 * j), step));  // nearest, ties to even
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3]));
    const __m256i ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));  // packs work within 128-bit halves
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), _mm256_max_epi8(ordered, _mm256_set1_epi8(-127)));
  }
  return scale;
}
#else
constexpr auto quantize_avx2 = quantize_portable;  // never chosen
#endif

}  // namespace

void Cpu::quantize(const KvQuantizeShape& shape, const Tensor& x_any, const Tensor& codes, const Tensor& scale) {
  const Tensor x = dense(x_any);
  const Micro& micro = pick_micro(ScalarType::Char);
  const auto quantize_group = cpu_isa() == CpuIsa::avx2 ? quantize_avx2 : quantize_portable;
  const ScalarType dtype = x.scalar_type();
  const int64_t group_bytes = kScaleGroup * x.element_size();
  const char* source = static_cast<const char*>(x.const_data_ptr());
  int8_t* all_codes = static_cast<int8_t*>(codes.mutable_data_ptr());
  c10::Half* scales = static_cast<c10::Half*>(scale.mutable_data_ptr());
  torch::stable::parallel_for(0, shape.groups, 256, [&](int64_t begin, int64_t end) {
    float values[kScaleGroup];
    for (int64_t i = begin; i < end; ++i) {
      micro.load(source + i * group_bytes, dtype, kScaleGroup, values);
      scales[i] = quantize_group(values, all_codes + i * kScaleGroup);
    }
  });
}

}  // namespace mori::qsa
