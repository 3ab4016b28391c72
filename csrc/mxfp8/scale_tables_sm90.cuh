// The scales of a CTA's weight rows and tokens as bf16 in shared memory, [block of K][...], for the few-token GEMM.
//
//   tokens   of a block: [g = 0..7][tile of 16 tokens] words, a word being the scales of tokens 16 tile + g and 16 tile + g + 8:
//            what a lane of m16n8 products needs is one load
//   rows     of a block: a scale for every kRowsPerScale weight rows
// A thread takes four blocks at a time. Requests are apart from stores: the scales of the weight are requested before the weight, behind
// which they would queue, and stored while those of the tokens are on their way. A NaN scale is stored as infinity; each store says
// whether a scale lies where a product of two could leave 2^-149 .. 2^127.
#pragma once

#include "scales_sm90.cuh"

namespace mori::mxfp8 {

// Scales of four blocks on their way: a word where they are raw and aligned, else four bytes.
union FourScales {
  uint32_t word, bytes[4];
};

// A CTA of kThreadCount threads, K up to kLongestK. Of one group of packed tokens: at most 64.
template <int kThreadCount, int kRowCount, int kRowsPerScale, int kTokenTiles, int kLongestK>
struct ScaleTables {
  static constexpr int kPairs = 8 * kTokenTiles, kMostFours = kLongestK / 128;
  static constexpr int kRowRequests = (kRowCount * kMostFours + kThreadCount - 1) / kThreadCount;
  static constexpr int kPairRequests = (kPairs * kMostFours + kThreadCount - 1) / kThreadCount;
  static constexpr uint32_t kPairBytes = 4 * kPairs, kRowBytes = 2 * (kRowCount > 2 ? 8 : kRowCount);  // of a block
  static constexpr uint32_t kOnes = 0x7f7f7f7f;
  static constexpr uint32_t kLeast = 0x00400040;  // 2^-127, a subnormal, twice

  struct Rows {
    FourScales scales[kRowRequests];
  };
  struct Pairs {
    FourScales low[kPairRequests], high[kPairRequests];
  };

  const ByteScales& scales;
  int m;
  int64_t n;
  bool by_words;  // raw, rows and addresses multiples of four
  int fours;      // of blocks that the tables hold: what lies past K is 1
  uint8_t* smem;

  __device__ __forceinline__ void request_rows(Rows& rows, int64_t row0) const {
#pragma unroll
    for (int i = 0; i < kRowRequests; ++i) {
      const int item = i * kThreadCount + threadIdx.x, u = item / kRowCount;
      if (u >= fours) break;
      const int64_t row = row0 + item % kRowCount * kRowsPerScale;
      request(rows.scales[i], scales.b_at(row, 4 * u), scales.packed ? scales.row_blocks * 4 : 1, u, row < n);
    }
  }
  __device__ __forceinline__ void request_pairs(Pairs& pairs) const {
#pragma unroll
    for (int i = 0; i < kPairRequests; ++i) {
      const int item = i * kThreadCount + threadIdx.x, u = item / kPairs;
      if (u >= fours) break;
      const int token = item % kTokenTiles * 16 + item % kPairs / kTokenTiles;
      const int step = scales.packed ? 64 : 1;
      const uint8_t* p = scales.a + (scales.packed ? token % 16 * 4 + token / 16 : token * static_cast<int>(scales.blocks)) + 4 * u * step;
      request(pairs.low[i], p, step, u, token < m);
      request(pairs.high[i], p + (scales.packed ? 32 : 8 * static_cast<int>(scales.blocks)), step, u, token + 8 < m);
    }
  }

  __device__ __forceinline__ bool store_rows(uint32_t table, const Rows& rows) const {
    uint32_t least = kOnes, most = 0;
#pragma unroll
    for (int i = 0; i < kRowRequests; ++i) {
      const int item = i * kThreadCount + threadIdx.x, u = item / kRowCount;
      if (u >= fours) break;
      const uint32_t word = arrived(rows.scales[i]);
      uint8_t* p = smem + table + 4 * u * kRowBytes + item % kRowCount * 2;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint32_t scale = bf16_pair(word, word, q);
        least = __vminu2(least, scale), most = __vmaxu2(most, scale);
        *reinterpret_cast<uint16_t*>(p + q * kRowBytes) = static_cast<uint16_t>(scale);
      }
    }
    return least < twice(0x69) || most > twice(0xbe);  // both halves are the same
  }
  // A zero block of tokens has scale 0.
  __device__ __forceinline__ bool store_pairs(uint32_t table, const Pairs& pairs) const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kPairRequests; ++i) {
      const int item = i * kThreadCount + threadIdx.x, u = item / kPairs;
      if (u >= fours) break;
      const uint32_t low = arrived(pairs.low[i]), high = arrived(pairs.high[i]);
      uint8_t* p = smem + table + 4 * u * kPairBytes + item % kPairs * 4;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint32_t pair = bf16_pair(low, high, q);
        most = __vmaxu2(most, pair);
        *reinterpret_cast<uint32_t*>(p + q * kPairBytes) = pair;
      }
    }
    return __vmaxu2(most, twice(0xbf)) != twice(0xbf);
  }

 private:
  static __device__ constexpr uint32_t twice(uint32_t scale) { return scale << 7 | scale << 23; }
  // Scale q of each word as bf16.
  static __device__ __forceinline__ uint32_t bf16_pair(uint32_t low, uint32_t high, int q) {
    return __vmaxu2(__byte_perm(low, high, q * 0x11 | (q + 4) * 0x1100) >> 1 & 0x7f807f80, kLeast);
  }
  __device__ __forceinline__ void request(FourScales& four, const uint8_t* p, int64_t step, int u, bool exists) const {
    const int count = exists ? static_cast<int>(scales.blocks) - 4 * u : 0;
    if (by_words) {
      four.word = count > 0 ? *reinterpret_cast<const uint32_t*>(p) : kOnes;
    } else {
#pragma unroll
      for (int q = 0; q < 4; ++q) four.bytes[q] = q < count ? p[q * step] : 127;
    }
  }
  __device__ __forceinline__ uint32_t arrived(const FourScales& four) const {
    return by_words ? four.word : four.bytes[0] | four.bytes[1] << 8 | four.bytes[2] << 16 | four.bytes[3] << 24;
  }
};

}  // namespace mori::mxfp8
