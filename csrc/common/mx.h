// OCP microscaling (MX) scalars: e4m3 elements, e8m0 block scales. Plain C++, usable on the host and in device code.
//
//   e4m3   1 sign, 4 exponent (bias 7), 3 mantissa bits; largest value 448 (0x7e), NaN 0x7f and 0xff, no infinity
//   e8m0   2^(byte - 127), byte 255 is NaN; byte 0, 2^-127, is an fp32 subnormal
//
// Every function is exact, also where the caller's thread or compiler flushes fp32 subnormals to zero: a subnormal is only ever
// handled as an integer. Format: OCP Microscaling Formats (MX) v1.0.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define MORI_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MORI_HOST_DEVICE inline
#endif

namespace mori::mx {

constexpr uint8_t kNanScale = 255;
constexpr uint8_t kNanCode = 0x7f;
constexpr uint8_t kMaxCode = 0x7e;              // 448
constexpr uint32_t kInfBits = 0x7f800000;       // fp32: infinity, and every NaN is above it
constexpr uint32_t kNanBits = 0x7fc00000;
constexpr uint32_t kMagnitudeBits = 0x7fffffff;
constexpr uint32_t kMinNormalBits = 0x00800000;

MORI_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

MORI_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

MORI_HOST_DEVICE float decode_e4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24, exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 0x7f) == kNanCode) return float_of(kNanBits);
  const uint32_t magnitude = exponent ? (exponent + 120) << 23 | mantissa << 20 : bits_of(static_cast<float>(mantissa) * 0x1p-9f);
  return float_of(sign | magnitude);
}

MORI_HOST_DEVICE float decode_e8m0(uint8_t scale) {
  if (scale == kNanScale) return float_of(kNanBits);
  return float_of(scale ? static_cast<uint32_t>(scale) << 23 : 0x00400000u);
}

// The fp32 bits of decode_e4m3(code) * decode_e8m0(scale); infinity beyond fp32.
MORI_HOST_DEVICE uint32_t dequantized_bits(uint8_t code, uint8_t scale) {
  if (scale == kNanScale || (code & 0x7f) == kNanCode) return kNanBits;
  const uint32_t bits = bits_of(decode_e4m3(code)), sign = bits & 0x80000000u, magnitude = bits & kMagnitudeBits;
  if (magnitude == 0) return sign;
  const int exponent = static_cast<int>(magnitude >> 23) + scale - 127;  // biased exponent of the product
  const uint32_t mantissa = magnitude & 0x007fffff;
  if (exponent >= 255) return sign | kInfBits;
  if (exponent >= 1) return sign | static_cast<uint32_t>(exponent) << 23 | mantissa;
  return sign | (mantissa | kMinNormalBits) >> (1 - exponent);  // at least 2^-136: no bit is lost
}

// Scale of a block whose largest magnitude has these fp32 bits. rceil: the smallest power of two with amax / scale <= 448.
MORI_HOST_DEVICE uint8_t block_scale_rceil(uint32_t amax_bits) {
  if (amax_bits >= kInfBits) return kNanScale;
  const int scale = static_cast<int>((amax_bits + 0x001fffff) >> 23) - 8;  // one more when the significand exceeds 1.75
  return static_cast<uint8_t>(scale > 0 ? scale : 0);
}

// floor: the OCP formula 2^(floor(log2 amax) - 8); amax / scale may reach 512, and codes saturate.
MORI_HOST_DEVICE uint8_t block_scale_floor(uint32_t amax_bits) {
  if (amax_bits >= kInfBits) return kNanScale;
  const int scale = static_cast<int>(amax_bits >> 23) - 8;
  return static_cast<uint8_t>(scale > 0 ? scale : 0);
}

// |x| / 2^(scale - 127) from the bits of |x|, for a scale that block_scale_* chose (at most 247). Exact wherever it matters to
// encode_e4m3: what underflows is far below half its smallest step.
MORI_HOST_DEVICE float scaled_magnitude(uint32_t magnitude, uint8_t scale) {
  const float inverse = float_of(static_cast<uint32_t>(254 - scale) << 23);
  // A subnormal is its bits times 2^-149; above scale 104 the quotient is as good as 0.
  const float subnormal_inverse = float_of(static_cast<uint32_t>(scale < 105 ? 105 - scale : 0) << 23);
  return magnitude < kMinNormalBits ? static_cast<float>(static_cast<int32_t>(magnitude)) * subnormal_inverse : float_of(magnitude) * inverse;
}

// e4m3 code of a magnitude, rounded once to nearest even, saturating at 448.
MORI_HOST_DEVICE uint8_t encode_e4m3(float magnitude) {
  const float y = magnitude < 448.0f ? magnitude : 448.0f;
  // Adding 2^(20 + e) leaves fp32 exactly three bits below 2^e: the sum's low bits count steps of 2^(e - 3).
  const uint32_t exponent = bits_of(y) & kInfBits, least = 121u << 23;  // e >= -6: below lie e4m3's subnormals
  const uint32_t anchor = (exponent > least ? exponent : least) + (20u << 23);
  const uint32_t steps = bits_of(y + float_of(anchor)) - anchor;
  return static_cast<uint8_t>(steps + (anchor >> 20) - (141u << 3));
}

}  // namespace mori::mx
