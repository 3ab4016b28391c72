// Portable C++ kernels of the CPU GEMM (contract: mxfp8_cpu_kernels.h). Codes are decoded through a table of 256 floats, in
// which NaN codes are NaN and need no flag.
#pragma once

#include <array>

#include "../common/mx.h"
#include "mxfp8_cpu_kernels.h"

namespace mori::mxfp8::generic {

using Block = float[4][kLanes];

inline const std::array<float, 256>& e4m3_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values{};
    for (int code = 0; code < 256; ++code) values[code] = mx::decode_e4m3(static_cast<uint8_t>(code));
    return values;
  }();
  return table;
}

inline void decode_block(const float* table, const uint8_t* codes, Block& out) {
  for (int i = 0; i < 4; ++i)
    for (int lane = 0; lane < kLanes; ++lane) out[i][lane] = table[codes[4 * lane + kOrder[i]]];
}

inline void decode(const Rows& rows, int64_t blocks, int tokens, float* a, bool*) {
  const float* table = e4m3_table().data();
  for (int64_t j = 0; j < blocks; ++j, a += 4 * tokens * kLanes)
    for (int t = 0; t < tokens; ++t) {
      Block block;
      decode_block(table, rows.codes + t * rows.stride + 32 * j, block);
      for (int i = 0; i < 4; ++i)
        for (int lane = 0; lane < kLanes; ++lane) a[(i * tokens + t) * kLanes + lane] = block[i][lane] * rows.factor[t * blocks + j];
    }
}

inline float sum_of_chains(const float (&c)[kLanes]) {
  return ((c[0] + c[4]) + (c[2] + c[6])) + ((c[1] + c[5]) + (c[3] + c[7]));
}

inline void dot(const Pass& pass, int tokens) {
  const float* table = e4m3_table().data();
  for (int64_t first = 0; first < pass.blocks; first += kSpan) {
    const int64_t last = first + kSpan < pass.blocks ? first + kSpan : pass.blocks;
    for (int64_t r = 0; r < pass.rows; ++r) {
      float chains[kMaxTokens][kLanes] = {};
      for (int64_t j = first; j < last; ++j) {
        Block weight;
        decode_block(table, pass.b + r * pass.row_stride + 32 * j, weight);
        const float* a = pass.a + j * 4 * tokens * kLanes;
        for (int i = 0; i < 4; ++i)
          for (int t = 0; t < tokens; ++t, a += kLanes)
            for (int lane = 0; lane < kLanes; ++lane) chains[t][lane] += weight[i][lane] * a[lane];
      }
      for (int t = 0; t < tokens; ++t) pass.total[t * kMaxTileRows + r] += sum_of_chains(chains[t]);
    }
  }
}

inline void multiply(const float* b, int rows, const float* a, int tokens, int64_t blocks, float* total) {
  float chains[kPanelTokens][kPanelRows][kLanes] = {};
  for (int64_t i = 0; i < 4 * blocks; ++i, b += rows * kLanes, a += tokens * kLanes)
    for (int t = 0; t < tokens; ++t)
      for (int r = 0; r < rows; ++r)
        for (int lane = 0; lane < kLanes; ++lane) chains[t][r][lane] += b[r * kLanes + lane] * a[t * kLanes + lane];
  for (int t = 0; t < tokens; ++t)
    for (int r = 0; r < rows; ++r) total[t * kMaxTileRows + r] += sum_of_chains(chains[t][r]);
}

constexpr Kernels kKernels = {1.0f, 1.0f, decode, dot, multiply};

}  // namespace mori::mxfp8::generic
