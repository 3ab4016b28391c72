// What the gr_down kernels share: Q8_0 rows as A fragments of m16n8k16, x as hi + lo fp16 B fragments.
//
// int8 -> fp16 is exact. x is scaled by a power of two so that its largest value lies in [2^10, 2^11), far from fp16's ends, then
// split into hi + lo: 22 bits of it. Both operands take k in the order of int8_low_to_half2 and int8_high_to_half2.
#pragma once

#include <type_traits>

#include "../common/sm90.cuh"
#include "gr_sm90.h"

namespace mori::gr {

constexpr int kBlock = 32, kBlockBytes = 34;
constexpr int kPairBytes = 2 * kBlockBytes, kPairK = 2 * kBlock;  // two blocks start at a multiple of 4 bytes

// Eight consecutive values; the address is a multiple of 16.
template <class T>
struct Values {
  alignas(16) T raw[8];

  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(raw) / 16); ++i) reinterpret_cast<uint4*>(raw)[i] = __ldg(reinterpret_cast<const uint4*>(p) + i);
  }
  __device__ __forceinline__ float operator[](int i) const { return sm90::to_float(raw[i]); }
};

__device__ __forceinline__ float amax8(const float (&v)[8]) {
  float amax = 0.f;
#pragma unroll
  for (float value : v) amax = fmaxf(amax, fabsf(value));
  return amax;
}

// Over four consecutive lanes, which hold a block.
__device__ __forceinline__ float max_of_quad(float amax) {
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
  return fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
}

struct Power {
  float up, down;  // what x and what its products are multiplied by
};

__device__ __forceinline__ Power power_for(float amax) {
  const uint32_t exponent = max(__float_as_uint(amax) >> 23, 11u);
  return {__uint_as_float((264u - exponent) << 23), __uint_as_float((exponent - 10u) << 23)};
}

// A lane's 8 values of a block: B fragments of two MMAs.
struct Split8 {
  uint32_t high[2][2], low[2][2];
};

__device__ __forceinline__ Split8 split8(const float (&v)[8], float up) {
  Split8 s;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float a[4] = {v[4 * j] * up, v[4 * j + 2] * up, v[4 * j + 1] * up, v[4 * j + 3] * up};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s.high[j][h] = sm90::pack_half2(a[2 * h], a[2 * h + 1]);
      const float2 kept = sm90::unpack_half2(s.high[j][h]);
      s.low[j][h] = sm90::pack_half2(a[2 * h] - kept.x, a[2 * h + 1] - kept.y);
    }
  }
  return s;
}

// The 8 codes of this lane in both blocks of a pair, for one row. Block 0 starts after 2 bytes of d, block 1 after 36.
struct PairCodes {
  uint32_t word[2][2];
  float d[2];
};

__device__ __forceinline__ PairCodes load_pair(const uint8_t* row, int c) {
  const uint32_t* a = reinterpret_cast<const uint32_t*>(row);
  PairCodes p;
  p.word[0][0] = __funnelshift_r(a[2 * c], a[2 * c + 1], 16);
  p.word[0][1] = __funnelshift_r(a[2 * c + 1], a[2 * c + 2], 16);
  p.word[1][0] = a[9 + 2 * c];
  p.word[1][1] = a[10 + 2 * c];
  p.d[0] = sm90::unpack_half2(a[0]).x;
  p.d[1] = sm90::unpack_half2(a[8]).y;
  return p;
}

// 16 rows of a pair, kPitch bytes apart, as A fragments: two MMAs per block, and the d of rows g and g + 8.
struct PairRows {
  uint32_t a[2][2][4];
  float d[2][2];

  template <int kPitch>
  __device__ __forceinline__ void load(const uint8_t* rows, int g, int c) {
    const PairCodes top = load_pair(rows + g * kPitch, c), bottom = load_pair(rows + (g + 8) * kPitch, c);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      d[b][0] = top.d[b], d[b][1] = bottom.d[b];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        a[b][j][0] = sm90::int8_low_to_half2(top.word[b][j]), a[b][j][1] = sm90::int8_low_to_half2(bottom.word[b][j]);
        a[b][j][2] = sm90::int8_high_to_half2(top.word[b][j]), a[b][j][3] = sm90::int8_high_to_half2(bottom.word[b][j]);
      }
    }
  }
};

inline bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Calls launch(x element, norm element, has norm) with the types behind the void pointers.
template <class Launch>
cudaError_t for_types(const DownArgs& args, Launch launch) {
  return sm90::with_float(args.x_type, [&](auto x) {
    if (args.norm_weight == nullptr) return launch(x, float{}, std::false_type{});
    return sm90::with_float(args.norm_type, [&](auto norm) { return launch(x, norm, std::true_type{}); });
  });
}

}  // namespace mori::gr
