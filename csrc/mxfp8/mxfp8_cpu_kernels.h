// The inner loops of the CPU GEMM as an interface: one implementation per instruction set.
//
// Both compute the same sum in the same order. The 32 products of a block go to 8 chains: chain l takes elements 4l + kOrder[0..3],
// one after the other, so that a decoder which works on dwords of four codes meets them without a shuffle. A chain is a plain
// fp32 accumulation over a span of kSpan blocks; then the 8 chains are added as a tree and the result goes onto the total.
// Nothing depends on how many rows or tokens are computed together, nor, the scales being powers of two, on which side they are applied: a row's bits are the same for every M.
#pragma once

#include <cstdint>

namespace mori::mxfp8 {

constexpr int kLanes = 8;
constexpr int kOrder[4] = {3, 1, 2, 0};
constexpr int64_t kSpan = 32;        // blocks per chain; 5 tokens of decoded activations (20 KB) then fit into L1
constexpr int kMaxTokens = 5;        // tokens per pass over the weight
constexpr int64_t kMaxTileRows = 128;
constexpr int kPanelRows = 4, kPanelTokens = 3;  // of one product of two decoded panels

// How many blocks of how many tokens are decoded ahead of a pass: whole spans, at most 24 KB of fp32.
constexpr int64_t chunk_blocks(int tokens) { return kSpan * (6 / tokens); }
constexpr int64_t kMaxFactors = 6 * kSpan, kDecodedFloats = kMaxFactors * 32;

// Rows of A to decode.
struct Rows {
  const uint8_t* codes;  // of the first token, at the chunk's first block
  int64_t stride;        // K
  const float* factor;   // [tokens][blocks]
};

struct Pass {
  const uint8_t* b;     // codes of the tile's first row, at the chunk's first block
  int64_t row_stride;   // K
  int64_t rows;         // at most kMaxTileRows
  int64_t blocks;       // of the chunk
  const float* a;       // decoded activations [block][4][tokens][kLanes]
  float* total;         // [tokens][kMaxTileRows], added to
  uint8_t* row_is_nan;  // [rows], set where a row holds a NaN code that the sum would miss
};

struct Kernels {
  // Powers of two that a kernel wants on the scales of A and on the result, to keep every number it meets a normal fp32.
  float a_factor, out_factor;
  // `blocks` blocks of each token, times their factors, to a [block][4][tokens][kLanes]; sets has_nan [tokens] where a token
  // holds a NaN code that the sum would miss.
  void (*decode)(const Rows& rows, int64_t blocks, int tokens, float* a, bool* has_nan);
  void (*dot)(const Pass& pass, int tokens);
  // The same sums over one span for rows and tokens that are both decoded: up to kPanelRows rows [block][4][rows][kLanes] and
  // up to kPanelTokens tokens; total [tokens][kMaxTileRows] is added to.
  void (*multiply)(const float* b, int rows, const float* a, int tokens, int64_t blocks, float* total);
};

}  // namespace mori::mxfp8
