// What two ranks add to the GEMM that sums up their products (gemm_ar): the order of tiles, and a courier for each row group.
//
// A rank computes the peer's rows first. They stay in its own memory, from where copy engines take them to the peer chunk by chunk.
// Then come its own rows: the peer's summands have arrived meanwhile, and the epilogue adds them, in bf16 as they travel.
//   courier    one thread per row group, in a warp that the GEMM leaves idle: lends the staging memory to the consumers, for own rows
//              with the peer's summands in it; sends off what they put there; counts a chunk's parts and raises its flag
// Waits are bounded: after `timeout_ns` the call goes on with whatever there is, and its last kernel writes NaN.
#pragma once

#include <cuda_bf16.h>

#include "../common/signal_sm90.cuh"
#include "../common/sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "tiles_sm90.cuh"

namespace mori::mxfp8 {

struct PairTiles {
  Tiles peer, own;
  int peer_first, own_first, chunk;  // token tiles
  __host__ __device__ __forceinline__ int count() const { return peer.count() + own.count(); }
  __device__ __forceinline__ bool is_own(int t) const { return t >= peer.count(); }
  __device__ __forceinline__ int2 at(int t) const {
    const bool mine = is_own(t);
    const int2 tile = mine ? own.at(t - peer.count(), chunk) : peer.at(t, chunk);
    return {tile.x + (mine ? own_first : peer_first), tile.y};
  }
};

struct PairMaps {
  CUtensorMap partial, addend, sum, out;
};

// Barriers of a row group's courier: `lent` to the consumers, `filled` by their four warps.
struct Lending {
  uint32_t lent, filled;
  __device__ __forceinline__ Lending(uint32_t barriers, int row_group) : lent(barriers + 16 * row_group), filled(lent + 8) {}
  __device__ __forceinline__ void init() const {
    sm90::mbarrier_init(lent, 1);
    sm90::mbarrier_init(filled, 4);
  }
};

template <class C>
__device__ void carry_tiles(const Pair& pair, const PairMaps& maps, const PairTiles& tiles, uint32_t base, int row_group) {
  using namespace sm90;
  const Lending lending(base + C::kLendingOffset, row_group);
  const uint32_t staged = base + C::kPartOffset + row_group * C::kPartBytes;
  const uint32_t epoch = *pair.epoch + 1;
  const Waiter wait = {pair.failed, pair.failure, epoch, pair.timeout_ns};
  uint32_t parity = 0;
  for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x, parity ^= 1) {
    const int2 tile = tiles.at(t);
    const bool own = tiles.is_own(t);
    const int column = tile.y * C::kRows + row_group * kGroupRows, row = (tile.x - (own ? tiles.own_first : tiles.peer_first)) * C::kTokens;
    const int chunk = row / (tiles.chunk * C::kTokens);
    if (own) {
      wait(pair.arrived + chunk, pair.peer, Signal::arrived);
      fence_async_global();  // the flag was read by an ordinary load, what it stands for is read by the copy engine of the SM
      mbarrier_arrive_expect(lending.lent, C::kPartBytes);
      tma_load(staged, &maps.addend, lending.lent, column, row);
    } else {
      mbarrier_arrive(lending.lent);
    }
    mbarrier_wait(lending.filled, parity);
    if (own) {
      tma_store(&maps.sum, staged, column, row);
      tma_store(&maps.out, staged, column, tile.x * C::kTokens);
    } else {
      tma_store(&maps.partial, staged, column, row);
    }
    tma_store_commit();
    tma_store_wait();
    const Tiles& part = own ? tiles.own : tiles.peer;
    const uint32_t all = min(tiles.chunk, part.token_tiles - chunk * tiles.chunk) * part.row_tiles * C::kRowGroups;
    if (count_to(pair.counters[own] + chunk, all)) store_release(pair.finished[own] + chunk, epoch);
  }
}

__device__ __forceinline__ void load_matrix_transposed(uint32_t smem, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem) : "memory");
}

// The sum of two rounded summands, and the bias, rounded: in fp32.
__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b, bool biased, float bias) {
  float low = __uint_as_float(a << 16) + __uint_as_float(b << 16), high = __uint_as_float(a & 0xffff0000u) + __uint_as_float(b & 0xffff0000u);
  if (biased) low += bias, high += bias;
  return sm90::pack_bf162(low, high);
}

}  // namespace mori::mxfp8
