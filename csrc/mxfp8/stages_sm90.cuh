// What the tensor-core GEMMs share: the producers that fill the ring of stages, and how a consumer takes a stage's codes out of it.
#pragma once

#include "../common/tma_sm90.cuh"
#include "tiles_sm90.cuh"
#include "tokens_sm90.cuh"

namespace mori::mxfp8 {

using namespace sm90;

template <int kThreads>
__device__ __forceinline__ void barrier_sync(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory"); }
__device__ __forceinline__ bool barrier_or(int id, bool value) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 q, %2, 0;\nbarrier.cta.red.or.pred p, %1, 128, q;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(any)
               : "r"(id), "r"(static_cast<uint32_t>(value))
               : "memory");
  return any != 0;
}

__device__ __forceinline__ void load_codes(uint32_t (&codes)[4], uint32_t smem) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(codes[0]), "=r"(codes[1]), "=r"(codes[2]), "=r"(codes[3]) : "r"(smem));
}

__device__ __forceinline__ void store_place(uint32_t smem, int2 place) { asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(smem), "r"(place.x), "r"(place.y) : "memory"); }
__device__ __forceinline__ int2 load_place(uint32_t smem) {
  int2 place;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(place.x), "=r"(place.y) : "r"(smem));
  return place;
}

// Two sums rounded to the output's 16-bit type.
template <bool kHalf>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  return kHalf ? pack_half2(low, high) : pack_bf162(low, high);
}

// threadIdx.x, read again: what the epilogue derives from it needs no register during the main loop.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// ---- producers ----

template <class C, class T>
__device__ __forceinline__ void produce_operands(const CUtensorMap* x, const CUtensorMap* w, const T& tiles, uint32_t base, int stages) {
  const uint32_t full = base + C::kBarrierOffset, empty = full + 8 * C::kStages;
  const auto load_weight = [&](uint32_t slot, int s, int2 tile) {
    mbarrier_arrive_expect(full + 8 * slot, C::kStageBytes);
    tma_load(base + C::kWOffset + slot * C::kWBytes, w, full + 8 * slot, s * kStageK, tile.y * C::kRows);
  };
  // The first weights come while the kernel before still expands tokens.
  int early = min(stages, C::kStages);
  for (int s = 0; s < early; ++s) load_weight(s, s, tiles.at(blockIdx.x));
  wait_for_dependencies();
  Ring<C::kStages> ring(1);
  for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x) {
    const int2 tile = tiles.at(t);
    for (int s = 0; s < stages; ++s, ring.advance()) {
      if (early > 0) {
        --early;
      } else {
        mbarrier_wait(empty + 8 * ring.slot, ring.parity);
        load_weight(ring.slot, s, tile);
      }
      tma_load(base + ring.slot * C::kXBytes, x, full + 8 * ring.slot, s * kStageK, tile.x * C::kTokens);
    }
  }
}

// The same with a ring for each operand.
template <class C, class T>
__device__ __forceinline__ void produce_weights(const CUtensorMap* w, const T& tiles, uint32_t base, int stages) {
  const uint32_t full = base + C::kWBarrierOffset, empty = full + 8 * C::kWStages;
  Ring<C::kWStages> ring(1);
  for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x) {
    const int row = tiles.at(t).y * C::kRows;
    for (int s = 0; s < stages; ++s, ring.advance()) {
      mbarrier_wait(empty + 8 * ring.slot, ring.parity);
      mbarrier_arrive_expect(full + 8 * ring.slot, C::kWBytes);
      tma_load(base + C::kWOffset + ring.slot * C::kWBytes, w, full + 8 * ring.slot, s * kStageK, row);
    }
  }
}
template <class C, class T>
__device__ __forceinline__ void produce_tokens(const CUtensorMap* x, const T& tiles, uint32_t base, int stages) {
  const uint32_t full = base + C::kBarrierOffset, empty = full + 8 * C::kStages;
  wait_for_dependencies();
  Ring<C::kStages> ring(1);
  [[maybe_unused]] uint32_t parity = 1;
  for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x) {
    const int token = tiles.at(t).x * C::kTokens;
    if constexpr (C::kKGroups > 1) mbarrier_wait(base + C::kSumsReadOffset, parity), parity ^= 1;  // the last tile's sums need the ring no longer
    for (int s = 0; s < stages; ++s, ring.advance()) {
      mbarrier_wait(empty + 8 * ring.slot, ring.parity);
      mbarrier_arrive_expect(full + 8 * ring.slot, C::kXBytes);
      tma_load(base + ring.slot * C::kXBytes, x, full + 8 * ring.slot, s * kStageK, token);
    }
  }
}

// What a stage's codes are multiplied by, as a bf16 pair: 0 where bf16 has no such number.
__device__ __forceinline__ uint32_t multiplier(uint32_t scale) {
  const uint32_t one = scale == mx::kNanScale ? 0x7fc0 : scale - kFirstScale > kLastScale - kFirstScale ? 0 : (scale + 120) << 7;
  return one | one << 16;
}

// A lane holds one scale of one of several consecutive stages, so that a load's latency is paid once for all of them.
// kPlaces: the place of each tile goes with its first scales.
template <class C, bool kPlaces, class T>
__device__ __forceinline__ void produce_scales(const GemmArgs& args, const ByteScales& scales, const T& tiles, uint32_t base, int stages, int lane) {
  constexpr int kAhead = 32 / C::kStageScales;
  const uint32_t full = base + C::kWBarrierOffset, empty = full + 8 * C::kWStages;
  const int scale = lane % C::kStageScales, ahead = lane / C::kStageScales;
  Ring<C::kWStages> ring(1);
  uint32_t place = 0;
  for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x, place = (place + 1) % C::kPlaces) {
    const int2 tile = tiles.at(t);
    const int64_t n = static_cast<int64_t>(tile.y) * C::kRows + scale / 2 * 32;
    const auto load = [&](int s) {
      const int64_t block = 2 * (s + ahead) + scale % 2;
      return n < args.n && block < scales.blocks ? scales.b_byte(n, block) : uint8_t{127};
    };
    uint8_t next = load(0);
    for (int s = 0; s < stages; s += kAhead) {
      const uint32_t now = multiplier(next);
      next = load(s + kAhead);
      for (int i = 0; i < kAhead && s + i < stages; ++i, ring.advance()) {
        mbarrier_wait(empty + 8 * ring.slot, ring.parity);
        if (ahead == i) store_shared(base + C::kScaleOffset + 4 * (ring.slot * C::kStageScales + scale), now);
        if (kPlaces && s + i == 0 && lane == 0) store_place(base + C::kPlaceOffset + 8 * place, tile);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full + 8 * ring.slot);
      }
    }
  }
}

// Whether a weight row holds nonzero codes under a scale that bf16 does not have, in this lane's quarter of each stage.
__device__ __noinline__ inline bool extreme_codes(const GemmArgs& args, const ByteScales& scales, int64_t n, int c) {
  if (n >= args.n) return false;
  for (int64_t k = 16 * c; k < args.k; k += kStageK) {
    const uint4 codes = __ldg(reinterpret_cast<const uint4*>(args.b + n * args.k + k));
    if (multiplier(scales.b_byte(n, k / 32)) == 0 && ((codes.x | codes.y | codes.z | codes.w) & 0x7f7f7f7fu) != 0) return true;
  }
  return false;
}

// ---- consumers ----

// Where a lane finds its codes and their scale in slot 0: those of row g = lane / 4 and row g + 8, which lie in one scale block.
struct Source {
  uint32_t codes, factor;
};
template <class C>
__device__ __forceinline__ Source source_of(uint32_t base, int thread) {
  const int row = thread / 128 % C::kRowGroups * kGroupRows + thread / 32 % 4 * 16 + thread % 32 / 4;
  return {base + C::kWOffset + row * kStageK + thread % 4 * 16, base + C::kScaleOffset + 4 * (row / 32 * 2 + thread % 4 / 2)};
}

// Both rows' 16 codes of a stage and what they are multiplied by.
struct Codes {
  uint32_t words[2][4], factor;
};
template <class C>
__device__ __forceinline__ void load_stage(const Source& source, uint32_t slot, Codes& codes) {
  codes.factor = load_shared(source.factor + slot * (4 * C::kStageScales));
  load_codes(codes.words[0], source.codes + slot * C::kWBytes);
  load_codes(codes.words[1], source.codes + slot * C::kWBytes + 8 * kStageK);
}
// As the A fragments of the stage's four k16 steps. `most`: see decode4, of both rows; least_factor: 0 if one was.
__device__ __forceinline__ void decode_stage(const Codes& codes, uint32_t (&a)[16], uint32_t (&most)[2], uint32_t& least_factor) {
  least_factor = min(least_factor, codes.factor);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Decoded decoded = decode4(codes.words[half][j], codes.factor, most[half]);
      a[4 * j + half] = decoded.low;
      a[4 * j + 2 + half] = decoded.high;
    }
  }
}

}  // namespace mori::mxfp8
