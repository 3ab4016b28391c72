// The tiles of the tensor-core GEMM: their sizes and shared memory, the ring of stages, their order.
#pragma once

#include <algorithm>

#include "mxfp8_sm90.h"
#include "tokens_sm90.cuh"

namespace mori::mxfp8 {

constexpr int kGroupRows = 64;  // weight rows of a warpgroup
constexpr int kSmemLimit = 227 * 1024;
constexpr int kL2Group = 4;  // token tiles that go together over all weight rows

template <int kTokensPerTile, int kRowGroupsPerTile, int kKGroupsPerTile>
struct Config {
  static constexpr int kTokens = kTokensPerTile, kRowGroups = kRowGroupsPerTile, kKGroups = kKGroupsPerTile;
  static constexpr int kConsumers = kRowGroups * kKGroups, kRows = kRowGroups * kGroupRows;
  static_assert(kKGroups <= 2 && (kConsumers == 2 || kConsumers == 4));  // what the registers are divided for
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kXBytes = kTokens * kStageK * 2, kWBytes = kRows * kStageK, kStageBytes = kXBytes + kWBytes;
  static constexpr int kStageScales = kRows / 32 * (kStageK / 32);  // weight scales of a stage
  // A part is what a warpgroup finishes of a tile: its share of the tokens of its row group. The other K group's sums for it come to it
  // in the ring of tokens; rounded results leave from a place of their own.
  static constexpr int kPartTokens = kTokens / kKGroups, kPartSums = kPartTokens / 2, kParts = kConsumers;
  static constexpr int kPartBytes = kGroupRows * kPartTokens * 2, kSumBytes = kPartSums * 128 * 4;
  // Up to 128 tokens each operand has a ring of its own, that of the weights as long as fits.
  static constexpr bool kTwoRings = kTokens <= 128;
  static constexpr int kAlign = 1024, kBarrierBytes = kTwoRings ? 2048 : 1024;  // barriers, scales, places
  static constexpr int kLeft = kSmemLimit - kAlign - kBarrierBytes - kParts * kPartBytes;
  static constexpr int kGranularity = 2 * kKGroups;  // a K group always finds its stages in the same slots
  static constexpr int kStages = std::min(8, (kTwoRings ? (kLeft - 8 * kWBytes) / kXBytes : kLeft / kStageBytes) / kGranularity * kGranularity);
  static constexpr int kWStages = kTwoRings ? std::min(32, (kLeft - kStages * kXBytes) / kWBytes / kGranularity * kGranularity) : kStages;
  // Offsets from a 1024-byte aligned base.
  static constexpr int kWOffset = kStages * kXBytes, kPartOffset = kWOffset + kWStages * kWBytes;
  static constexpr int kBarrierOffset = kPartOffset + kParts * kPartBytes, kWBarrierOffset = kBarrierOffset + (kTwoRings ? 16 * kStages : 0);
  static constexpr int kSumsReadOffset = kWBarrierOffset + 16 * kWStages, kPlaceOffset = kSumsReadOffset + 8;
  static constexpr int kPlaces = 32;  // positions of tiles: more than the producer can be ahead by, as a tile is at least two stages
  static constexpr int kScaleOffset = kPlaceOffset + kPlaces * 8;
  static constexpr int kSmem = kAlign + kBarrierOffset + kBarrierBytes;
  static_assert(kKGroups == 1 || kConsumers * kSumBytes <= kStages * kXBytes);
  static_assert(kStages >= 4 && kWStages >= 4 && kPlaces >= kWStages / 2 + 3 && kPartTokens % 16 == 0 && kPartBytes % 1024 == 0);
  static_assert(kScaleOffset + 4 * kStageScales * kWStages <= kBarrierOffset + kBarrierBytes && kSmem <= kSmemLimit);
};

// A position in the ring of stages. `first_parity` is what a wait sees before the first turn: 0 for full, 1 for empty barriers.
template <int kSlots>
struct Ring {
  uint32_t slot, parity;
  __device__ __forceinline__ explicit Ring(uint32_t first_parity) : slot(0), parity(first_parity) {}
  __device__ __forceinline__ void advance(uint32_t stages = 1) {  // at most kSlots
    slot += stages;
    if (slot >= kSlots) slot -= kSlots, parity ^= 1;
  }
  __device__ __forceinline__ Ring ahead(uint32_t stages) const {
    Ring ring = *this;
    ring.slot = (slot + stages) % kSlots;
    ring.parity ^= (slot + stages) / kSlots & 1;
    return ring;
  }
};

// ---- order ----

// Position of the t-th tile: some token tiles, `kL2Group` or `together`, run over all weight rows before the next ones.
struct Tiles {
  int token_tiles, row_tiles;
  __host__ __device__ __forceinline__ int count() const { return token_tiles * row_tiles; }
  __device__ __forceinline__ int2 at(int t, int together = kL2Group) const {  // x: token tile, y: row tile
    const int per_group = together * row_tiles, group = t / per_group, rest = t - group * per_group;
    const int members = min(together, token_tiles - group * together);
    return {group * together + rest % members, rest / members};
  }
};

}  // namespace mori::mxfp8
