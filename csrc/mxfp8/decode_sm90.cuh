// e4m3 codes to bf16 operands of the tensor cores, exactly, with the block's scale folded in.
//
// A code's bits s eeee mmm moved to bf16's s ....eeee mmm.... are its value times 2^-120, subnormal codes included; one bf16
// multiplication by 2^(scale - 127 + 120) gives value * scale. That is exact while the result is a normal bf16 number and the
// multiplier exists: scales kFirstScale..kLastScale. A NaN code becomes a number here: the caller looks for it in `most`.
#pragma once

#include <cstdint>

#include "../common/mx.h"

namespace mori::mxfp8 {

constexpr uint32_t kFirstScale = 10;   // the least nonzero code, 2^-9, times 2^(10 - 127) is 2^-126
constexpr uint32_t kLastScale = 134;   // 2^(134 - 127 + 120) is the largest power of two

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Two codes in the high bytes of a word's halves, without their scale.
__device__ __forceinline__ uint32_t spread_codes(uint32_t word) { return (word & 0x80008000u) | ((word & 0x7f007f00u) >> 4); }

// Four codes times a multiplier as two operand words: bytes 0 and 2 (low), 1 and 3 (high). `most` keeps the largest magnitudes.
struct Decoded {
  uint32_t low, high;
};
__device__ __forceinline__ Decoded decode4(uint32_t word, uint32_t multiplier, uint32_t& most) {
  constexpr uint32_t kField = 0x07f007f0, kSign = 0x80008000;
  const uint32_t low = word << 4 & kField, high = word >> 4 & kField;
  most = __vimax3_u16x2(most, low, high);
  return {multiply_bf16x2(low | (word << 8 & kSign), multiplier), multiply_bf16x2(high | (word & kSign), multiplier)};
}
__device__ __forceinline__ bool holds_nan(uint32_t most) { return (most & 0xffff) == 0x07f0 || most >> 16 == 0x07f0; }

}  // namespace mori::mxfp8
