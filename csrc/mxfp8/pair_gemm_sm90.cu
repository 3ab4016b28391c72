// The GEMM of two ranks that add up their products (pair_sm90.cuh): C = A B^T for many tokens, the rows of the peer first, then this
// rank's own, to which the peer's products are added as they are stored.
//
// The products are those of mxfp8_gemm_sm90.cu (see there): 128 weight rows x 256 tokens, one K group, the same decoding, NaN where bf16
// operands cannot hold a number. Here these are computed again while the tile stands in shared memory, before the sum is made.
// Persistent; a few processors stay free for the kernels between the copies.
#include <algorithm>

#include "../common/launch_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "../common/wgmma_sm90.cuh"
#include "pair_sm90.cuh"
#include "tokens_sm90.cuh"

namespace mori::mxfp8 {
namespace {

using namespace sm90;

template <int kTokensPerTile, int kRowGroupsPerTile, int kKGroupsPerTile>
struct PairConfig {
  static constexpr int kTokens = kTokensPerTile, kRowGroups = kRowGroupsPerTile, kKGroups = kKGroupsPerTile;
  static constexpr int kConsumers = kRowGroups * kKGroups, kRows = kRowGroups * kGroupRows;
  static_assert(kConsumers == 2);  // what the registers are divided for
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kXBytes = kTokens * kStageK * 2, kWBytes = kRows * kStageK, kStageBytes = kXBytes + kWBytes;
  static constexpr int kStageScales = kRows / 32 * (kStageK / 32);  // weight scales of a stage
  static constexpr int kStoreBytes = kRows * kTokens * 2, kGroupStoreBytes = kStoreBytes / kRowGroups;
  static constexpr int kSumBytes = (kKGroups - 1) * kGroupRows * kTokens * 4;  // sums of the other K groups
  static constexpr int kAlign = 1024, kBarrierBytes = 1024;                    // barriers and scales
  static constexpr int kFit = (kSmemLimit - kAlign - kBarrierBytes - kStoreBytes - kSumBytes) / kStageBytes;
  static constexpr int kStages = std::min(8, kFit / 2 * 2);
  // Offsets from a 1024-byte aligned base.
  static constexpr int kWOffset = kStages * kXBytes, kStoreOffset = kWOffset + kStages * kWBytes, kSumOffset = kStoreOffset + kStoreBytes;
  static constexpr int kBarrierOffset = kSumOffset + kSumBytes, kScaleOffset = kBarrierOffset + 2 * 8 * kStages;
  static constexpr int kLendingOffset = kScaleOffset + 4 * kStageScales * kStages;  // the couriers' barriers
  static constexpr int kSmem = kAlign + kBarrierOffset + kBarrierBytes;
  static_assert(kFit >= 4 && kLendingOffset % 8 == 0 && kLendingOffset + 16 * kRowGroups <= kBarrierOffset + kBarrierBytes && kSmem <= kSmemLimit);
};

// ---- GEMM ----

struct Maps {
  CUtensorMap x, w;
};

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

// The own summands of a staged tile that are not finite, from the codes; then the peer's are added, where own_first >= 0 (the first own token).
template <class C>
__device__ __noinline__ void repair_staged(const GemmArgs& args, const ByteScales& scales, const Pair& pair, uint32_t staged, int64_t m0, int64_t n0,
                                           int64_t own_first) {
  for (int i = thread_index() % 128; i < kGroupRows * C::kTokens; i += 128) {
    const int row = i % kGroupRows, token = i / kGroupRows;
    const int64_t n = n0 + row, m = m0 + token;
    if (m >= args.m || n >= args.n) continue;
    const uint32_t at = staged + token * 128 + ((row / 8 ^ (token & 7)) << 4) + row % 8 * 2;
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(at));
    __nv_bfloat16 value = __ushort_as_bfloat16(bits);
    if (!isfinite(to_float(value))) value = from_float<__nv_bfloat16>(static_cast<float>(exact_element(args, scales, m, n)));
    if (own_first >= 0) {
      float sum = to_float(value) + to_float(static_cast<const __nv_bfloat16*>(pair.addend)[(m - own_first) * args.n + n]);
      if (args.bias != nullptr) sum += bias_at(args, n);
      value = from_float<__nv_bfloat16>(sum);
    }
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(__bfloat16_as_ushort(value)) : "memory");
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm_pair(const __grid_constant__ Maps maps, const __grid_constant__ GemmArgs args, const __grid_constant__ ByteScales scales,
              const __grid_constant__ PairTiles tiles, const __grid_constant__ Pair pair, const __grid_constant__ PairMaps pair_maps) {
  extern __shared__ uint8_t smem[];
  const uint32_t base = (smem_address(smem) + C::kAlign - 1) / C::kAlign * C::kAlign;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
  const int stages = static_cast<int>(padded_k(args.k)) / kStageK;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(base + C::kBarrierOffset + 8 * i, 2);  // the copies and the scales
      mbarrier_init(base + C::kBarrierOffset + 8 * (C::kStages + i), C::kRowGroups * 4);
    }
    for (int i = 0; i < C::kRowGroups; ++i) Lending(base + C::kLendingOffset, i).init();
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == C::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      if (lane == 0) produce_operands<C>(maps, tiles, base, stages);
    } else if (warp == 1) {
      produce_scales<C>(args, scales, tiles, base, stages, lane);
    } else if (lane == 0) {
      wait_for_dependencies();
      carry_tiles<C>(pair, pair_maps, tiles, base, warp - 2);
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
    const int64_t row0 = n0 + warp * 16 + g;  // of this lane, and row0 + 8
    const float bias[2] = {row0 < args.n ? bias_at(args, row0) : 0.f, row0 + 8 < args.n ? bias_at(args, row0 + 8) : 0.f};
    const float add[2] = {poison[0], poison[1]};
    bool repair = add[0] != add[0] || add[1] != add[1];
    if (repair) {
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) sum[i] += add[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < C::kTokens / 2; ++i) repair |= !isfinite(sum[i]);
    const uint32_t staged = base + C::kStoreOffset + row_group * C::kGroupStoreBytes;
    // 16 tokens: four 8x8 matrices (rows 0-7, 8-15) x (tokens 0-7, 8-15), stored transposed.
    const auto matrix_smem = [&](int j) {
      const int matrix = lane / 8, token = j * 16 + lane % 8 + matrix / 2 * 8;
      const uint32_t block = warp * 2 + matrix % 2;
      return staged + token * 128 + ((block ^ (token & 7)) << 4);
    };
    repair = barrier_or(barrier_id, repair);
    const Lending lending(base + C::kLendingOffset, row_group);
    const bool own = tiles.is_own(t), add_peer = own && !repair, biased = args.bias != nullptr;
    mbarrier_wait(lending.lent, (t - blockIdx.x) / gridDim.x & 1);
#pragma unroll
    for (int j = 0; j < C::kTokens / 16; ++j) {
      const float* p = sum + j * 8;
      uint32_t r[4] = {pack2(p[0], p[1], false), pack2(p[2], p[3], false), pack2(p[4], p[5], false), pack2(p[6], p[7], false)};
      if (add_peer) {
        uint32_t peer[4];
        load_matrix_transposed(matrix_smem(j), peer);
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = add_pairs(r[i], peer[i], biased, bias[i % 2]);
      }
      store_matrix_transposed(matrix_smem(j), r[0], r[1], r[2], r[3]);
    }
    if (repair) {
      barrier_sync<128>(barrier_id);
      repair_staged<C>(args, scales, pair, staged, m0, n0, own ? static_cast<int64_t>(tiles.own_first) * C::kTokens : -1);
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(lending.filled);
  }
}

// ---- launch ----

cudaError_t processors(int* count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

template <class C>
cudaError_t launch_paired(const GemmArgs& args, const Pair& pair, void* workspace, cudaStream_t stream) {
  const int64_t columns = padded_k(args.k);
  const int tokens = static_cast<int>((args.m + C::kTokens - 1) / C::kTokens), rows = static_cast<int>((args.n + C::kRows - 1) / C::kRows);
  const int span = static_cast<int>(pair.span_rows / C::kTokens), first[2] = {0, span}, count[2] = {span, tokens - span};
  const PairTiles tiles = {{count[pair.peer], rows}, {count[pair.rank], rows}, first[pair.peer], first[pair.rank], static_cast<int>(pair.chunk_rows / C::kTokens)};
  const auto c_map = [&](CUtensorMap* map, const void* base, int64_t m) {
    return make_tensor_map(map, base, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, m, args.n, C::kTokens, kGroupRows, CU_TENSOR_MAP_SWIZZLE_128B);
  };
  Maps maps;
  PairMaps pair_maps;
  bool ok = make_tensor_map(&maps.x, workspace, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, args.m, columns, C::kTokens, kStageK, CU_TENSOR_MAP_SWIZZLE_128B);
  ok &= make_tensor_map(&maps.w, args.b, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.n, args.k, C::kRows, kStageK, CU_TENSOR_MAP_SWIZZLE_NONE);
  ok &= c_map(&pair_maps.partial, pair.partial, pair.span_rows) && c_map(&pair_maps.addend, pair.addend, pair.span_rows);
  ok &= c_map(&pair_maps.sum, pair.sum, pair.span_rows) && c_map(&pair_maps.out, pair.out, args.m);
  if (!ok) return cudaErrorInvalidValue;
  int ctas = 0;
  if (const cudaError_t error = processors(&ctas); error != cudaSuccess) return error;
  if (const cudaError_t error = launch_expand(args, static_cast<uint4*>(workspace), stream); error != cudaSuccess) return error;
  return launch_overlapped(gemm_pair<C>, std::min(ctas - args.reserved_processors, tiles.count()), C::kThreads, C::kSmem, stream, maps, args, ByteScales(args), tiles,
                           pair, pair_maps);
}

}  // namespace

cudaError_t launch_gemm(const GemmArgs& args, const Pair& pair, void* workspace, cudaStream_t stream) {
  static_assert(PairConfig<256, 2, 1>::kTokens == kPairRows);
  return launch_paired<PairConfig<256, 2, 1>>(args, pair, workspace, stream);
}

}  // namespace mori::mxfp8
