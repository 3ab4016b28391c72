// Q8_0 (ggml): blocks of 32 values, fp16 d then 32 int8, 34 bytes, so blocks are not aligned. Value = d * q, exact in fp32.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include <torch/headeronly/util/Half.h>

namespace mori::q8_0 {

using torch::headeronly::Half;

constexpr int64_t kBlock = 32;
constexpr int64_t kBlockBytes = 34;

inline float block_scale(const uint8_t* block) {
  Half d;
  std::memcpy(&d.x, block, sizeof(d.x));
  return static_cast<float>(d);
}

inline int8_t block_code(const uint8_t* block, int64_t i) { return static_cast<int8_t>(block[2 + i]); }

// The bytes of ggml's reference quantiser: id = 1 / (amax / 127) in fp32, d stored as fp16, q rounded half away from zero.
// Where ggml leaves q undefined: a block holding NaN or Inf gets d = NaN and q = 0 (it reads back as NaN), and a block whose
// 1/d overflows (amax < 127 * 2^-128, far below the smallest fp16 d) gets zeros.
inline void quantize_block(const float* w, uint8_t* block) {
  uint32_t largest = 0;  // magnitudes order as integers, NaN and Inf last
  for (int64_t i = 0; i < kBlock; ++i) {
    uint32_t bits;
    std::memcpy(&bits, w + i, sizeof(bits));
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  float amax;
  std::memcpy(&amax, &largest, sizeof(amax));
  const float d = std::isfinite(amax) ? amax / 127.0f : NAN;
  const float reciprocal = 1.0f / d;
  const float id = std::isfinite(reciprocal) ? reciprocal : 0.0f;
  const Half stored(d);
  std::memcpy(block, &stored.x, sizeof(stored.x));
  for (int64_t i = 0; i < kBlock; ++i) {
    const float doubled = 2.0f * (std::fabs(std::isfinite(w[i]) ? w[i] : 0.0f) * id);
    const int q = (static_cast<int>(doubled) + 1) / 2;  // half away from zero, without a libm call
    block[2 + i] = static_cast<uint8_t>(std::signbit(w[i]) ? -q : q);
  }
}

}  // namespace mori::q8_0
