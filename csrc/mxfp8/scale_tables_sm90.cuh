// The scales of a CTA's weight rows and tokens as bf16 in shared memory, [row][block of K], for the few-token GEMM.
//
// A unit is what one load brings: four raw scales of a row where they are aligned, else a single one. Loads are apart from stores: a
// kernel requests the scales of the weight before the weight, behind which they would queue, and stores them when the tokens' are there.
// A NaN scale is stored as infinity; each store says whether a scale lies where a product of two could leave 2^-149 .. 2^127.
#pragma once

#include "scales_sm90.cuh"

namespace mori::mxfp8 {

// Four scales as four bf16.
__device__ __forceinline__ uint2 bf16_scales(uint32_t scales) {
  constexpr uint32_t kLeast = 0x00400040;  // 2^-127, subnormal
  return {__vmaxu2(__byte_perm(scales, 0, 0x4140) << 7, kLeast), __vmaxu2(__byte_perm(scales, 0, 0x4342) << 7, kLeast)};
}

// A CTA of kThreadCount threads; kRowCount rows of kRowsPerScale weight rows each, kTokenCount tokens, K up to kLongestK.
template <int kThreadCount, int kRowCount, int kRowsPerScale, int kTokenCount, int kLongestK>
struct ScaleTables {
  static constexpr int kWarps = kThreadCount / 32, kRequests = (kRowCount * (kLongestK / 32) + kThreadCount - 1) / kThreadCount;
  static constexpr uint32_t kOnes = 0x7f7f7f7f;

  const ByteScales& scales;
  int64_t m, n;
  bool by_words;
  uint8_t* smem;
  uint32_t pitch;

  // Bytes of a table's row: as a rule not a multiple of 32, for few bank conflicts.
  static constexpr uint32_t row_bytes(int64_t k) { return static_cast<uint32_t>((k + 127) / 128 * 8 + 8); }

  __device__ __forceinline__ int blocks() const { return static_cast<int>(scales.blocks); }
  __device__ __forceinline__ int words() const { return (blocks() + 3) / 4; }
  __device__ __forceinline__ int units() const { return by_words ? words() : blocks(); }
  __device__ __forceinline__ int padded_units() const { return by_words ? words() : words() * 4; }

  __device__ __forceinline__ uint32_t load(const uint8_t* p) const { return by_words ? *reinterpret_cast<const uint32_t*>(p) : *p; }
  __device__ __forceinline__ bool store(uint32_t table, int row, int unit, uint32_t value, uint32_t least, uint32_t most) const {
    const uint2 bf16 = bf16_scales(value);
    uint8_t* p = smem + table + row * pitch;
    if (by_words) {
      *reinterpret_cast<uint2*>(p + unit * 8) = bf16;
    } else {
      *reinterpret_cast<uint16_t*>(p + unit * 2) = static_cast<uint16_t>(bf16.x);
      least &= 0xff, most |= 0xffffff00;
    }
    return (__vcmpltu4(value, least) | __vcmpgtu4(value, most)) != 0;
  }
  // A zero block of tokens has scale 0.
  __device__ __forceinline__ bool store_a(uint32_t table, int token, int unit, uint32_t value) const {
    return store(table, token, unit, value, 0, 0xbfbfbfbf);
  }
  __device__ __forceinline__ bool store_b(uint32_t table, int row, int unit, uint32_t value) const {
    return store(table, row, unit, value, 0x69696969, 0xbebebebe);
  }

  __device__ __forceinline__ void request_rows(uint32_t (&values)[kRequests], int64_t row0) const {
#pragma unroll
    for (int q = 0; q < kRequests; ++q) {
      const int i = q * kThreadCount + threadIdx.x, unit = i / kRowCount;
      const int64_t row = row0 + i % kRowCount * kRowsPerScale;
      values[q] = kOnes;
      if (unit < units() && row < n) values[q] = load(by_words ? scales.b + row / 32 * scales.blocks + unit * 4 : scales.b_at(row, unit));
    }
  }
  __device__ __forceinline__ bool store_rows(uint32_t table, const uint32_t (&values)[kRequests]) const {
    bool unusual = false;
#pragma unroll
    for (int q = 0; q < kRequests; ++q) {
      const int i = q * kThreadCount + threadIdx.x, unit = i / kRowCount;
      if (unit < padded_units()) unusual |= store_b(table, i % kRowCount, unit, values[q]);
    }
    return unusual;
  }

  __device__ __forceinline__ uint32_t raw_pair(int r, int block) const {
    return (r < m ? scales.a_byte(r, block) : 127) | (r + 16 < m ? scales.a_byte(r + 16, block) : 127) << 8;
  }

  // meanwhile(): what to do while the first scales are on their way.
  template <class Meanwhile>
  __device__ __forceinline__ bool stage_tokens(uint32_t table, Meanwhile meanwhile) const {
    bool unusual = false;
    if (by_words) {  // a warp takes whole tokens
      constexpr int kTokensOfWarp = kTokenCount / kWarps;
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      for (int first = 0; first < words(); first += 64) {
        uint32_t values[2][kTokensOfWarp];
#pragma unroll
        for (int q = 0; q < 2; ++q)
#pragma unroll
          for (int t = 0; t < kTokensOfWarp; ++t) {
            const int token = warp + t * kWarps, i = first + q * 32 + lane;
            values[q][t] = kOnes;
            if (token < m && i < words()) values[q][t] = load(scales.a + token * scales.blocks + i * 4);
          }
        if (first == 0) meanwhile();
#pragma unroll
        for (int q = 0; q < 2; ++q)
#pragma unroll
          for (int t = 0; t < kTokensOfWarp; ++t) {
            const int i = first + q * 32 + lane;
            if (i < words()) unusual |= store_a(table, warp + t * kWarps, i, values[q][t]);
          }
      }
    } else {  // a value: scales of tokens r and r + 16, in the low bytes of a packed word
      constexpr int kRowsOfWord = kTokenCount < 16 ? kTokenCount : 16, kBatch = 16;
      for (int first = 0; first < kRowsOfWord * padded_units(); first += kBatch * kThreadCount) {
        uint32_t values[kBatch];
#pragma unroll
        for (int q = 0; q < kBatch; ++q) {
          const int i = first + q * kThreadCount + threadIdx.x, r = i % kRowsOfWord, block = i / kRowsOfWord;
          values[q] = kOnes;
          if (block < units()) values[q] = scales.packed ? *reinterpret_cast<const uint32_t*>(scales.a_at(r, block)) : raw_pair(r, block);
        }
        if (first == 0) meanwhile();
#pragma unroll
        for (int q = 0; q < kBatch; ++q) {
          const int i = first + q * kThreadCount + threadIdx.x, r = i % kRowsOfWord, block = i / kRowsOfWord;
          if (block >= padded_units()) continue;
          unusual |= store_a(table, r, block, r < m ? values[q] & 255 : 127);
          if (kTokenCount > 16 && r + 16 < kTokenCount) unusual |= store_a(table, r + 16, block, r + 16 < m ? values[q] >> 8 & 255 : 127);
        }
      }
    }
    return unusual;
  }
};

}  // namespace mori::mxfp8
