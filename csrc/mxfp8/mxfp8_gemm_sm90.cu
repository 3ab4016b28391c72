// C = A B^T on the tensor cores for many tokens: exact, at the speed of a bf16 GEMM, with half its weight bytes.
//
// C^T = B A^T by wgmma m64nNk16, bf16 operands: the weight (B) is the register operand, decoded from e4m3 in flight with its scale
// folded in (decode_sm90.cuh); the tokens (A) are a bf16 workspace (tokens_sm90.cuh). fp8 wgmma is not used: its sums keep about
// 14 bits, and with exact promotion it is no faster.
//   tile       64 weight rows per row group x 64, 128, 192 or 256 tokens, 64 along K per stage
//   producer   one thread: TMA of both operands into a ring of stages, full / empty mbarriers; another warp: the stage's scales
//   consumer   two warpgroups: 16 codes of a row and stage by ld.shared.v4 -> A fragments, double-buffered over two stages; a tile's
//              last products run while the next tile's first codes are decoded
//   few tokens K groups: the warpgroups take turns along K on the same 64 rows, and their sums are added in order
//   K order    within each 64: lane c of a quad owns bytes 16 c .. 16 c + 15 of a weight row, so it needs one scale per stage
//   epilogue   bias, rounding, stmatrix.trans into a swizzled tile, TMA store; direct stores for fp32 or odd N
// Persistent, one CTA per SM, tiles ordered for L2 reuse. What bf16 operands cannot hold (a scale out of range) and NaN codes make
// their row or token NaN; every NaN of a finished tile is then computed again from the codes, so results are exact for all inputs.
// Tried and lost: tokens expanded by idle warps during the products (they slow the consumers by what the kernel before costs), codes
// loaded one stage earlier (registers, -3%), three and four K groups (spills, or a ring too short for its turns), 16 stages of 64 tokens.
#include <algorithm>
#include <limits>

#include "../common/launch_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "../common/wgmma_sm90.cuh"
#include "tokens_sm90.cuh"

namespace mori::mxfp8 {
namespace {

using namespace sm90;

constexpr int kGroupRows = 64;  // weight rows of a warpgroup
constexpr int kSmemLimit = 227 * 1024;
constexpr int kL2Group = 8;  // token tiles that go together over all weight rows

template <int kTokensPerTile, int kRowGroupsPerTile, int kKGroupsPerTile>
struct Config {
  static constexpr int kTokens = kTokensPerTile, kRowGroups = kRowGroupsPerTile, kKGroups = kKGroupsPerTile;
  static constexpr int kConsumers = kRowGroups * kKGroups, kRows = kRowGroups * kGroupRows;
  static_assert(kConsumers == 2);  // what the registers are divided for
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kXBytes = kTokens * kStageK * 2, kWBytes = kRows * kStageK, kStageBytes = kXBytes + kWBytes;
  static constexpr int kStageScales = kRows / 32 * (kStageK / 32);  // weight scales of a stage
  static constexpr int kStoreBytes = kRows * kTokens * 2;
  static constexpr int kSumBytes = (kKGroups - 1) * kGroupRows * kTokens * 4;  // sums of the other K groups
  static constexpr int kAlign = 1024, kBarrierBytes = 1024;                    // barriers and scales
  static constexpr int kFit = (kSmemLimit - kAlign - kBarrierBytes - kStoreBytes - kSumBytes) / kStageBytes;
  static constexpr int kStages = std::min(8, kFit / 2 * 2);
  // Offsets from a 1024-byte aligned base.
  static constexpr int kWOffset = kStages * kXBytes, kStoreOffset = kWOffset + kStages * kWBytes, kSumOffset = kStoreOffset + kStoreBytes;
  static constexpr int kBarrierOffset = kSumOffset + kSumBytes, kScaleOffset = kBarrierOffset + 2 * 8 * kStages;
  static constexpr int kSmem = kAlign + kBarrierOffset + kBarrierBytes;
  static_assert(kFit >= 4 && (2 * 8 + 4 * kStageScales) * kStages <= kBarrierBytes && kSmem <= kSmemLimit);
};

// ---- GEMM ----

struct Maps {
  CUtensorMap x, w, c;
};

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
struct DeliveryMaps {
  CUtensorMap c[Delivery::kMaxWorld];
};
struct Nothing {};

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
__device__ __forceinline__ uint32_t load_shared(uint32_t smem) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(smem));
  return value;
}
__device__ __forceinline__ void store_shared(uint32_t smem, uint32_t value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(value) : "memory"); }

__device__ __forceinline__ uint32_t pack2(float low, float high, bool half) {
  if (half) return pack_half2(low, high);
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// threadIdx.x, read again: what the epilogue derives from it needs no register during the main loop.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

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

template <class C, class T>
__device__ __forceinline__ void produce_operands(const Maps& maps, const T& tiles, uint32_t base, int stages) {
  const uint32_t full = base + C::kBarrierOffset, empty = full + 8 * C::kStages;
  const auto load_weight = [&](uint32_t slot, int s, int2 tile) {
    mbarrier_arrive_expect(full + 8 * slot, C::kStageBytes);
    tma_load(base + C::kWOffset + slot * C::kWBytes, &maps.w, full + 8 * slot, s * kStageK, tile.y * C::kRows);
  };
  // The first weights come while the kernel before still expands tokens.
  int early = min(stages, C::kStages);
  for (int s = 0; s < early; ++s) load_weight(s, s, tiles.at(blockIdx.x));
  wait_for_dependencies();
  Ring<C> ring(1);
  for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x) {
    const int2 tile = tiles.at(t);
    for (int s = 0; s < stages; ++s, ring.advance()) {
      if (early > 0) {
        --early;
      } else {
        mbarrier_wait(empty + 8 * ring.slot, ring.parity);
        load_weight(ring.slot, s, tile);
      }
      tma_load(base + ring.slot * C::kXBytes, &maps.x, full + 8 * ring.slot, s * kStageK, tile.x * C::kTokens);
    }
  }
}

// What a stage's codes are multiplied by, as a bf16 pair: 0 where bf16 has no such number.
__device__ __forceinline__ uint32_t multiplier(uint32_t scale) {
  const uint32_t one = scale == mx::kNanScale ? 0x7fc0 : scale - kFirstScale > kLastScale - kFirstScale ? 0 : (scale + 120) << 7;
  return one | one << 16;
}

// A lane holds one scale of one of several consecutive stages, so that a load's latency is paid once for all of them.
template <class C, class T>
__device__ __forceinline__ void produce_scales(const GemmArgs& args, const ByteScales& scales, const T& tiles, uint32_t base, int stages, int lane) {
  constexpr int kAhead = 32 / C::kStageScales;
  const uint32_t full = base + C::kBarrierOffset, empty = full + 8 * C::kStages;
  const int scale = lane % C::kStageScales, ahead = lane / C::kStageScales;
  Ring<C> ring(1);
  for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x) {
    const int64_t n = static_cast<int64_t>(tiles.at(t).y) * C::kRows + scale / 2 * 32;
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
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full + 8 * ring.slot);
      }
    }
  }
}

// Whether a weight row holds nonzero codes under a scale that bf16 does not have, in this lane's quarter of its K group's stages.
template <class C>
__device__ __noinline__ bool extreme_codes(const GemmArgs& args, const ByteScales& scales, int64_t n, int c, int first) {
  if (n >= args.n) return false;
  for (int64_t pair = first / 2; pair * kPadK < args.k; pair += C::kKGroups) {
    for (int64_t k = pair * kPadK + 16 * c; k < min((pair + 1) * kPadK, args.k); k += kStageK) {
      const uint4 codes = __ldg(reinterpret_cast<const uint4*>(args.b + n * args.k + k));
      if (multiplier(scales.b_byte(n, k / 32)) == 0 && ((codes.x | codes.y | codes.z | codes.w) & 0x7f7f7f7fu) != 0) return true;
    }
  }
  return false;
}

// kStaged: C leaves through shared memory and TMA, else by direct stores.
template <class C, bool kStaged, bool kDeliver = false>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm(const __grid_constant__ Maps maps, const __grid_constant__ GemmArgs args, const __grid_constant__ ByteScales scales,
         const __grid_constant__ std::conditional_t<kDeliver, DeliveryTiles, Tiles> tiles,
         const __grid_constant__ std::conditional_t<kDeliver, Delivery, Nothing> delivery,
         const __grid_constant__ std::conditional_t<kDeliver, DeliveryMaps, Nothing> delivery_maps) {
  extern __shared__ uint8_t smem[];
  const uint32_t base = (smem_address(smem) + C::kAlign - 1) / C::kAlign * C::kAlign;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
  const int stages = static_cast<int>(padded_k(args.k)) / kStageK;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(base + C::kBarrierOffset + 8 * i, 2);  // the copies and the scales
      mbarrier_init(base + C::kBarrierOffset + 8 * (C::kStages + i), C::kRowGroups * 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == C::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      if (lane == 0) produce_operands<C>(maps, tiles, base, stages);
    } else if (warp == 1) {
      produce_scales<C>(args, scales, tiles, base, stages, lane);
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int k_group = warpgroup / C::kRowGroups;
  // Of slot 0. A warp's 16 rows lie in one scale block.
  const uint32_t x_descriptor = wgmma_descriptor_low(base);
  const int row = warpgroup % C::kRowGroups * kGroupRows + warp * 16 + lane / 4;  // this lane's first; the other is row + 8
  const uint32_t codes_smem = base + C::kWOffset + row * kStageK + lane % 4 * 16;
  const uint32_t factor_smem = base + C::kScaleOffset + 4 * (row / 32 * 2 + lane % 4 / 2), full = base + C::kBarrierOffset;
  constexpr uint32_t kEmpty = 8 * C::kStages;  // from a slot's full to its empty barrier
  float sum[C::kTokens / 2] = {};
  uint32_t most[2] = {};  // the largest fields of row g's and g + 8's codes in the tile, as two 16-bit lanes
  bool zero_factor = false;

  // Both rows' 16 codes of a stage and what they are multiplied by.
  struct Codes {
    uint32_t words[2][4], factor;
  };
  const auto load_stage = [&](uint32_t slot, Codes& codes) {
    codes.factor = load_shared(factor_smem + slot * (4 * C::kStageScales));
    load_codes(codes.words[0], codes_smem + slot * C::kWBytes);
    load_codes(codes.words[1], codes_smem + slot * C::kWBytes + 8 * kStageK);
  };
  // As the A fragments of the stage's four k16 steps.
  const auto decode_stage = [&](const Codes& codes, uint32_t (&a)[16]) {
    zero_factor |= codes.factor == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Decoded decoded = decode4(codes.words[half][j], codes.factor, most[half]);
        a[4 * j + half] = decoded.low;
        a[4 * j + 2 + half] = decoded.high;
      }
    }
  };
  const auto multiply_stage = [&](uint32_t slot, const uint32_t (&a)[16], bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma_bf16(sum, a + 4 * j, x_descriptor + slot * (C::kXBytes >> 4) + 2 * j, j > 0 || accumulate);
    wgmma_commit();
  };
  const auto release = [&](uint32_t slot) {
    if (lane == 0) mbarrier_arrive(full + kEmpty + 8 * slot);
  };

  static_assert(C::kStages % 2 == 0);  // the second stage of a pair never wraps
  constexpr int kTurn = 2 * C::kKGroups;
  const int first = 2 * k_group;
  const bool works = C::kKGroups == 1 || first < stages;
  Ring<C> tile_ring(0), ring = tile_ring.ahead(first);
  uint32_t a0[16], a1[16];
  Codes codes;
  if (works) {
    mbarrier_wait(full + 8 * ring.slot, ring.parity);
    load_stage(ring.slot, codes);
    decode_stage(codes, a0);
  }

  for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x) {
    const int2 tile = tiles.at(t);
    uint32_t suspect = 0;  // bits 0, 1: row g, g + 8 holds a NaN code; bit 2: a scale that bf16 does not have
    if (!works) {
#pragma unroll
      for (float& value : sum) value = 0.f;
    }
#pragma unroll 1
    for (int s = first; s < stages; s += kTurn) {
      const uint32_t slot = ring.slot;
      multiply_stage(slot, a0, s > first);
      mbarrier_wait(full + 8 * slot + 8, ring.parity);
      load_stage(slot + 1, codes);
      decode_stage(codes, a1);
      multiply_stage(slot + 1, a1, true);
      wgmma_wait<1>();
      release(slot);
      // The next pair's first stage: of this tile or, so that its products can start at once, of the next one.
      const bool last = s + kTurn >= stages;
      if (last) {
        suspect = holds_nan(most[0]) | holds_nan(most[1]) << 1 | zero_factor << 2;
        most[0] = most[1] = 0, zero_factor = false;
      }
      if (C::kKGroups > 1 && last) {
        tile_ring = tile_ring.ahead(stages);
        ring = tile_ring.ahead(first);
      } else {
        ring.advance(kTurn);
      }
      if (!last || t + gridDim.x < tiles.count()) {
        mbarrier_wait(full + 8 * ring.slot, ring.parity);
        load_stage(ring.slot, codes);
        decode_stage(codes, a0);
      }
      wgmma_wait<0>();
      release(slot + 1);
    }

    const int thread = thread_index(), warp = thread / 32 % 4, lane = thread % 32, g = lane / 4, c = lane % 4, row_group = thread / 128 % C::kRowGroups;
    const int barrier_id = row_group + 1;  // of the row group's first K group
    const bool leader = thread % 128 == 0;
    const int64_t m0 = static_cast<int64_t>(tile.x) * C::kTokens, n0 = static_cast<int64_t>(tile.y) * C::kRows + row_group * kGroupRows;
    // A code that is NaN, or whose scale bf16 does not have, shows in every sum of its row, whatever lane of the quad saw it.
    float poison[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bool bad = suspect >> half & 1;
      if (suspect & 4) bad |= extreme_codes<C>(args, scales, n0 + warp * 16 + g + half * 8, c, first);
      const uint32_t quad = __ballot_sync(~0u, bad) >> (lane & ~3) & 15;
      poison[half] = quad != 0 ? __uint_as_float(mx::kNanBits) : 0.f;
    }
    if constexpr (C::kKGroups > 1) {
      const uint32_t sums = base + C::kSumOffset + thread % 128 * 4;
      const auto at = [&](int group, int i) { return sums + ((group - 1) * (C::kTokens / 2) + i) * 128 * 4; };
      if (k_group > 0) {
#pragma unroll
        for (int i = 0; i < C::kTokens / 2; ++i) store_shared(at(k_group, i), __float_as_uint(sum[i] + poison[i / 2 % 2]));
      }
      barrier_sync<C::kConsumers * 128>(C::kRowGroups + 1);
      if (k_group == 0) {
#pragma unroll
        for (int group = 1; group < C::kKGroups; ++group)
#pragma unroll
          for (int i = 0; i < C::kTokens / 2; ++i) sum[i] += __uint_as_float(load_shared(at(group, i)));
      }
      barrier_sync<C::kConsumers * 128>(C::kRowGroups + 1);
      if (k_group > 0) continue;
    }

    const int64_t row0 = n0 + warp * 16 + g;  // of this lane, and row0 + 8
    const float bias[2] = {poison[0] + (row0 < args.n ? bias_at(args, row0) : 0.f), poison[1] + (row0 + 8 < args.n ? bias_at(args, row0 + 8) : 0.f)};
    bool any_nan = bias[0] != bias[0] || bias[1] != bias[1];
    if (any_nan || args.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) sum[i] += bias[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < C::kTokens / 2; ++i) {
      // A NaN token shows in every row: one of the two is enough, unless another K group has poisoned just one.
      if (C::kKGroups > 1 || i / 2 % 2 == 0) any_nan |= isnan(sum[i]);
    }
    if constexpr (!kStaged) {
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) {
        const int64_t m = m0 + i / 4 * 8 + c * 2 + i % 2, n = row0 + i / 2 % 2 * 8;
        if (m < args.m && n < args.n) store_rounded(args, m, n, sum[i]);
      }
      any_nan = barrier_or(barrier_id, any_nan);
    } else {
      const bool half = args.out_type == Float::f16;
      const uint32_t staged = base + C::kStoreOffset + row_group * kGroupRows * C::kTokens * 2;
      if (leader) {
        if constexpr (kDeliver) {
          tma_store_wait();
        } else {
          tma_store_wait_read();
        }
      }
      barrier_sync<128>(barrier_id);
#pragma unroll
      for (int j = 0; j < C::kTokens / 16; ++j) {  // 16 tokens: four 8x8 matrices (rows 0-7, 8-15) x (tokens 0-7, 8-15), stored transposed
        const float* p = sum + j * 8;
        const int matrix = lane / 8, token = j * 16 + lane % 8 + matrix / 2 * 8;
        const uint32_t block = warp * 2 + matrix % 2;
        store_matrix_transposed(staged + token * 128 + ((block ^ (token & 7)) << 4), pack2(p[0], p[1], half), pack2(p[2], p[3], half),
                                pack2(p[4], p[5], half), pack2(p[6], p[7], half));
      }
      fence_async_shared();
      any_nan = barrier_or(barrier_id, any_nan);
      if (leader) {
        if constexpr (kDeliver) {
          const Target target = target_of<C>(delivery, tiles, tile.x);
          tma_store(&delivery_maps.c[target.owner], staged, static_cast<int>(n0), target.row);
          tma_store_commit();
          // The tile before has landed since the wait above.
          if (t != blockIdx.x) count_delivered<C>(delivery, tiles, target_of<C>(delivery, tiles, tiles.at(t - gridDim.x).x));
        } else {
          tma_store(&maps.c, staged, static_cast<int>(n0), static_cast<int>(m0));
          tma_store_commit();
        }
      }
    }

    if (any_nan) {
      if (leader) tma_store_wait();
      barrier_sync<128>(barrier_id);
      for (int i = thread % 128; i < kGroupRows * C::kTokens; i += 128) {
        const int64_t n = n0 + i % kGroupRows, m = m0 + i / kGroupRows;
        if constexpr (kDeliver) {
          const Target target = target_of<C>(delivery, tiles, tile.x);
          GemmArgs there = args;
          there.out = static_cast<__nv_bfloat16*>(delivery.out[target.owner]) + (target.row - m0) * args.n;
          if (m < args.m && n < args.n && stored_is_nan(there, m, n)) store_c(there, m, n, exact_element(args, scales, m, n));
        } else {
          if (m < args.m && n < args.n && stored_is_nan(args, m, n)) store_c(args, m, n, exact_element(args, scales, m, n));
        }
      }
      if constexpr (kDeliver) barrier_sync<128>(barrier_id);  // before the leader counts the tile
    }
  }
  if (threadIdx.x % 128 == 0 && k_group == 0) {
    tma_store_wait();
    if constexpr (kDeliver) {
      const int last = blockIdx.x + (tiles.count() - 1 - blockIdx.x) / gridDim.x * gridDim.x;
      count_delivered<C>(delivery, tiles, target_of<C>(delivery, tiles, tiles.at(last).x));
    }
  }
}

// ---- launch ----

bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

cudaError_t processors(int* count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

template <class C, bool kStaged>
cudaError_t launch(const GemmArgs& args, void* workspace, cudaStream_t stream) {
  const int64_t columns = padded_k(args.k);
  Maps maps;
  bool ok = make_tensor_map(&maps.x, workspace, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, args.m, columns, C::kTokens, kStageK, CU_TENSOR_MAP_SWIZZLE_128B);
  ok &= make_tensor_map(&maps.w, args.b, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.n, args.k, C::kRows, kStageK, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (kStaged)
    ok &= make_tensor_map(&maps.c, args.out, args.out_type == Float::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, args.m, args.n, C::kTokens, 64,
                          CU_TENSOR_MAP_SWIZZLE_128B);
  if (!ok) return cudaErrorInvalidValue;
  const Tiles tiles = {static_cast<int>((args.m + C::kTokens - 1) / C::kTokens), static_cast<int>((args.n + C::kRows - 1) / C::kRows)};
  int ctas = 0;
  if (const cudaError_t error = processors(&ctas); error != cudaSuccess) return error;
  if (const cudaError_t error = launch_expand(args, static_cast<uint4*>(workspace), stream); error != cudaSuccess) return error;
  return launch_overlapped(gemm<C, kStaged>, std::min(ctas - args.reserved_processors, tiles.count()), C::kThreads, C::kSmem, stream, maps, args, ByteScales(args), tiles, Nothing{},
                           Nothing{});
}

template <class C>
cudaError_t launch_delivered(const GemmArgs& args, const Delivery& delivery, void* workspace, cudaStream_t stream) {
  const int64_t columns = padded_k(args.k), rounds = (args.m + delivery.world * delivery.span_rows - 1) / (delivery.world * delivery.span_rows);
  Maps maps;
  DeliveryMaps delivery_maps;
  bool ok = make_tensor_map(&maps.x, workspace, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, args.m, columns, C::kTokens, kStageK, CU_TENSOR_MAP_SWIZZLE_128B);
  ok &= make_tensor_map(&maps.w, args.b, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.n, args.k, C::kRows, kStageK, CU_TENSOR_MAP_SWIZZLE_NONE);
  for (int owner = 0; owner < delivery.world; ++owner)
    ok &= make_tensor_map(&delivery_maps.c[owner], delivery.out[owner], CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, rounds * delivery.span_rows, args.n, C::kTokens, 64,
                          CU_TENSOR_MAP_SWIZZLE_128B);
  if (!ok) return cudaErrorInvalidValue;
  const DeliveryTiles tiles = {{static_cast<int>((args.m + C::kTokens - 1) / C::kTokens), static_cast<int>((args.n + C::kRows - 1) / C::kRows)},
                               delivery.world,
                               delivery.rank,
                               static_cast<int>(delivery.span_rows / C::kTokens)};
  int ctas = 0;
  if (const cudaError_t error = processors(&ctas); error != cudaSuccess) return error;
  if (const cudaError_t error = launch_expand(args, static_cast<uint4*>(workspace), stream); error != cudaSuccess) return error;
  return launch_overlapped(gemm<C, true, true>, std::min(ctas - args.reserved_processors, tiles.count()), C::kThreads, C::kSmem, stream, maps, args, ByteScales(args), tiles,
                           delivery, delivery_maps);
}

template <class C>
cudaError_t launch_store(const GemmArgs& args, void* workspace, cudaStream_t stream) {
  const bool staged = args.out_type != Float::f32 && args.n % 8 == 0 && aligned16(args.out);
  return staged ? launch<C, true>(args, workspace, stream) : launch<C, false>(args, workspace, stream);
}

}  // namespace

bool gemm_fits(const GemmArgs& args) { return args.k > 0 && aligned16(args.a) && aligned16(args.b) && aligned16(args.x); }

int64_t gemm_workspace_bytes(int64_t m, int64_t k) { return m * padded_k(k) * 2; }

GemmTile gemm_tile(int64_t m, int64_t n) {
  // Measured on an H200, K = 2048: microseconds that a full wave of tiles takes (bench/results/cuda_mxfp8_raw.json).
  struct Choice {
    GemmTile tile;
    int rows, tokens;
    float wave;
  };
  constexpr Choice kChoices[] = {{GemmTile::rows64_tokens64, 64, 64, 8.5f},
                                 {GemmTile::rows64_tokens128, 64, 128, 9.7f},
                                 {GemmTile::rows128_tokens128, 128, 128, 17.f},
                                 {GemmTile::rows128_tokens192, 128, 192, 21.3f},
                                 {GemmTile::rows128_tokens256, 128, 256, 26.f}};
  GemmTile best = GemmTile::rows128_tokens256;
  float least = std::numeric_limits<float>::infinity();
  for (const Choice& c : kChoices) {
    const int64_t tiles = ((m + c.tokens - 1) / c.tokens) * ((n + c.rows - 1) / c.rows), waves = (tiles + 131) / 132;
    if (const float time = static_cast<float>(waves) * c.wave; time < least) least = time, best = c.tile;
  }
  return best;
}

cudaError_t launch_gemm(const GemmArgs& args, GemmTile tile, void* workspace, cudaStream_t stream) {
  switch (tile) {
    case GemmTile::rows64_tokens64: return launch_store<Config<64, 1, 2>>(args, workspace, stream);
    case GemmTile::rows64_tokens128: return launch_store<Config<128, 1, 2>>(args, workspace, stream);
    case GemmTile::rows128_tokens128: return launch_store<Config<128, 2, 1>>(args, workspace, stream);
    case GemmTile::rows128_tokens192: return launch_store<Config<192, 2, 1>>(args, workspace, stream);
    default: return launch_store<Config<256, 2, 1>>(args, workspace, stream);
  }
}

cudaError_t launch_gemm(const GemmArgs& args, const Delivery& delivery, void* workspace, cudaStream_t stream) {
  return launch_delivered<Config<256, 2, 1>>(args, delivery, workspace, stream);
}

}  // namespace mori::mxfp8
