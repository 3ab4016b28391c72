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
#include "stages_sm90.cuh"

namespace mori::mxfp8 {
namespace {

using namespace sm90;

// The tile of mxfp8_gemm_sm90.cu, whose places of tiles are not used, and the couriers' barriers.
struct PairConfig : Config<kPairRows, 2, 1> {
  static constexpr int kLendingOffset = kScaleOffset + 4 * kStageScales * kStages;
  static_assert(kLendingOffset % 8 == 0 && kLendingOffset + 16 * kRowGroups <= kBarrierOffset + kBarrierBytes);
};

// ---- GEMM ----

struct Maps {
  CUtensorMap x, w;
};

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
    registers_decrease<40>();
    if (warp == 0) {
      if (lane == 0) produce_operands<C>(&maps.x, &maps.w, tiles, base, stages);
    } else if (warp == 1) {
      produce_scales<C, false>(args, scales, tiles, base, stages, lane);
    } else if (lane == 0) {
      wait_for_dependencies();
      carry_tiles<C>(pair, pair_maps, tiles, base, warp - 2);
    }
    return;
  }

  registers_increase<232>();
  const uint32_t x_descriptor = wgmma_descriptor_low(base), full = base + C::kBarrierOffset;
  const Source source = source_of<C>(base, threadIdx.x);
  constexpr uint32_t kEmpty = 8 * C::kStages;  // from a slot's full to its empty barrier
  float sum[C::kTokens / 2] = {};
  uint32_t most[2] = {};  // the largest fields of row g's and g + 8's codes in the tile, as two 16-bit lanes
  uint32_t least_factor = ~0u;

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
  Ring<C::kStages> ring(0);
  uint32_t a0[16], a1[16];
  Codes codes;
  mbarrier_wait(full + 8 * ring.slot, ring.parity);
  load_stage<C>(source, ring.slot, codes);
  decode_stage(codes, a0, most, least_factor);

  for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x) {
    const int2 tile = tiles.at(t);
    uint32_t suspect = 0;  // bits 0, 1: row g, g + 8 holds a NaN code; bit 2: a scale that bf16 does not have
#pragma unroll 1
    for (int s = 0; s < stages; s += 2) {
      const uint32_t slot = ring.slot;
      multiply_stage(slot, a0, s > 0);
      mbarrier_wait(full + 8 * slot + 8, ring.parity);
      load_stage<C>(source, slot + 1, codes);
      decode_stage(codes, a1, most, least_factor);
      multiply_stage(slot + 1, a1, true);
      wgmma_wait<1>();
      release(slot);
      // The next pair's first stage: of this tile or, so that its products can start at once, of the next one.
      const bool last = s + 2 >= stages;
      if (last) {
        suspect = holds_nan(most[0]) | holds_nan(most[1]) << 1 | (least_factor == 0) << 2;
        most[0] = most[1] = 0, least_factor = ~0u;
      }
      ring.advance(2);
      if (!last || t + gridDim.x < tiles.count()) {
        mbarrier_wait(full + 8 * ring.slot, ring.parity);
        load_stage<C>(source, ring.slot, codes);
        decode_stage(codes, a0, most, least_factor);
      }
      wgmma_wait<0>();
      release(slot + 1);
    }

    const int thread = thread_index(), warp = thread / 32 % 4, lane = thread % 32, g = lane / 4, c = lane % 4, row_group = thread / 128 % C::kRowGroups;
    const int barrier_id = row_group + 1;
    const int64_t m0 = static_cast<int64_t>(tile.x) * C::kTokens, n0 = static_cast<int64_t>(tile.y) * C::kRows + row_group * kGroupRows;
    // A code that is NaN, or whose scale bf16 does not have, shows in every sum of its row, whatever lane of the quad saw it.
    float poison[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bool bad = suspect >> half & 1;
      if (suspect & 4) bad |= extreme_codes(args, scales, n0 + warp * 16 + g + half * 8, c);
      const uint32_t quad = __ballot_sync(~0u, bad) >> (lane & ~3) & 15;
      poison[half] = quad != 0 ? __uint_as_float(mx::kNanBits) : 0.f;
    }
    const int64_t row0 = n0 + warp * 16 + g;  // of this lane, and row0 + 8
    const float bias[2] = {row0 < args.n ? bias_at(args, row0) : 0.f, row0 + 8 < args.n ? bias_at(args, row0 + 8) : 0.f};
    bool repair = poison[0] != poison[0] || poison[1] != poison[1];
    if (repair) {
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) sum[i] += poison[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < C::kTokens / 2; ++i) repair |= !isfinite(sum[i]);
    const uint32_t staged = base + C::kPartOffset + row_group * C::kPartBytes;
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
      uint32_t r[4] = {pack2<false>(p[0], p[1]), pack2<false>(p[2], p[3]), pack2<false>(p[4], p[5]), pack2<false>(p[6], p[7])};
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
  if (const cudaError_t error = launch_expand(args, args.m, static_cast<uint4*>(workspace), stream); error != cudaSuccess) return error;
  return launch_overlapped(gemm_pair<C>, std::min(ctas - args.reserved_processors, tiles.count()), C::kThreads, C::kSmem, stream, maps, args, ByteScales(args), tiles,
                           pair, pair_maps);
}

}  // namespace

cudaError_t launch_gemm(const GemmArgs& args, const Pair& pair, void* workspace, cudaStream_t stream) {
  return launch_paired<PairConfig>(args, pair, workspace, stream);
}

}  // namespace mori::mxfp8
