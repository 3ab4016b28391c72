// The tiles of the tensor-core GEMM: their sizes and shared memory, the ring of stages, their order, and delivery to the owners of rows.
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
  static_assert((kKGroups == 1 && kConsumers == 2) || ((kKGroups == 2 || kKGroups == 4) && kConsumers == 4));  // what the registers are divided for
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kXBytes = kTokens * kStageK * 2, kWBytes = kRows * kStageK, kStageBytes = kXBytes + kWBytes;
  static constexpr int kStageScales = kRows / 32 * (kStageK / 32);  // weight scales of a stage
  // A part is what a warpgroup finishes of a tile: its row group's tokens, or half of them in each of the first two K groups. Its
  // sums of other K groups come to it in shared memory, and its rounded results leave from the same place.
  static constexpr int kPartTokens = kKGroups == 1 ? kTokens : kTokens / 2, kPartSums = kPartTokens / 2;
  static constexpr int kParts = kKGroups == 1 ? kRowGroups : 2 * kRowGroups;
  static constexpr int kPartBytes = kKGroups == 1 ? kGroupRows * kTokens * 2 : (kKGroups == 2 ? kPartSums : 2 * kPartSums) * 128 * 4;
  static constexpr int kAlign = 1024, kBarrierBytes = 1024;  // barriers, scales, places
  static constexpr int kFit = (kSmemLimit - kAlign - kBarrierBytes - kParts * kPartBytes) / kStageBytes;
  static constexpr int kGranularity = std::max(2, kKGroups);  // a K group always finds its stages in the same slots
  static constexpr int kStages = std::min(kKGroups == 1 ? 8 : 12, kFit / kGranularity * kGranularity);
  // Offsets from a 1024-byte aligned base.
  static constexpr int kWOffset = kStages * kXBytes, kPartOffset = kWOffset + kStages * kWBytes;
  static constexpr int kBarrierOffset = kPartOffset + kParts * kPartBytes, kPlaceOffset = kBarrierOffset + 2 * 8 * kStages;
  static constexpr int kPlaces = 16;  // positions of tiles: more than the producer can be ahead by, as a tile is at least two stages
  static constexpr int kScaleOffset = kPlaceOffset + kPlaces * 8;
  static constexpr int kSmem = kAlign + kBarrierOffset + kBarrierBytes;
  static_assert(kFit >= 4 && kPlaces >= kStages / 2 + 3 && kPartTokens % 16 == 0 && kPartBytes % 1024 == 0);
  static_assert(kScaleOffset + 4 * kStageScales * kStages <= kBarrierOffset + kBarrierBytes && kSmem <= kSmemLimit);
};

// A position in the ring of stages. `first_parity` is what a wait sees before the first turn: 0 for full, 1 for empty barriers.
template <class C>
struct Ring {
  uint32_t slot, parity;
  __device__ __forceinline__ explicit Ring(uint32_t first_parity) : slot(0), parity(first_parity) {}
  __device__ __forceinline__ void advance(uint32_t stages = 1) {  // at most kStages
    slot += stages;
    if (slot >= C::kStages) slot -= C::kStages, parity ^= 1;
  }
  __device__ __forceinline__ Ring ahead(uint32_t stages) const {
    Ring ring = *this;
    ring.slot = (slot + stages) % C::kStages;
    ring.parity ^= (slot + stages) / C::kStages & 1;
    return ring;
  }
};

// ---- order and delivery ----

// Position of the t-th tile: `kL2Group` token tiles run over all weight rows before the next ones.
struct Tiles {
  int token_tiles, row_tiles;
  __host__ __device__ __forceinline__ int count() const { return token_tiles * row_tiles; }
  __device__ __forceinline__ int2 at(int t) const {  // x: token tile, y: row tile
    const int per_group = kL2Group * row_tiles, group = t / per_group, rest = t - group * per_group;
    const int members = min(kL2Group, token_tiles - group * kL2Group);
    return {group * kL2Group + rest % members, rest / members};
  }
};

// The same for delivery: token tiles round by round, the spans that go to peers before this rank's own.
struct DeliveryTiles : Tiles {
  int world, rank, span;  // owners, this one, token tiles of a span
  __device__ __forceinline__ int2 at(int t) const {
    int2 tile = Tiles::at(t);
    const int round = tile.x / (world * span) * world * span;
    int p = tile.x - round;
    for (int i = 1; i < world; ++i) {
      const int start = round + (rank + i) % world * span, here = max(0, min(span, token_tiles - start));
      if (p < here) return {start + p, tile.y};
      p -= here;
    }
    return {round + rank * span + p, tile.y};
  }
};

// Where the rows of a token tile go in delivery.
struct Target {
  int owner, row, chunk;
};
template <class C>
__device__ __forceinline__ Target target_of(const Delivery& delivery, const DeliveryTiles& tiles, int token_tile) {
  const int span = token_tile / tiles.span, row = (span / tiles.world * tiles.span + token_tile % tiles.span) * C::kTokens;
  return {span % tiles.world, row, row / static_cast<int>(delivery.chunk_rows)};
}

// One row group's part of a tile has landed in the owner's memory.
template <class C>
__device__ __forceinline__ void count_delivered(const Delivery& delivery, const DeliveryTiles& tiles, const Target& target) {
  const int chunk_tiles = static_cast<int>(delivery.chunk_rows) / C::kTokens, own = target.chunk * chunk_tiles;
  const int first = (own / tiles.span * tiles.world + target.owner) * tiles.span + own % tiles.span;
  const uint32_t all = min(chunk_tiles, tiles.token_tiles - first) * tiles.row_tiles * C::kRowGroups;
  uint32_t* counter = delivery.counters + target.owner * Delivery::kMaxChunks + target.chunk;
  __threadfence_system();
  if (atomicAdd(counter, 1) != all - 1) return;
  *counter = 0;
  __threadfence_system();
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(delivery.arrived[target.owner] + target.chunk), "r"(*delivery.epoch + 1) : "memory");
}

}  // namespace mori::mxfp8
