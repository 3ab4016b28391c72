// C = A B^T on the tensor cores for many tokens: exact, at the speed of a bf16 GEMM, with half its weight bytes.
//
// C^T = B A^T by wgmma m64nNk16, bf16 operands: the weight (B) is the register operand, decoded from e4m3 in flight with its scale
// folded in (decode_sm90.cuh); the tokens (A) are a bf16 workspace (tokens_sm90.cuh). fp8 wgmma is not used: its sums keep about
// 14 bits, and with exact promotion it is no faster.
//   tile       64 weight rows per row group x 64 to 256 tokens, 64 along K per stage
//   producers  threads of their own for TMA of the tokens and of the weights, full / empty mbarriers; a warp for the stages' scales
//   consumer   a warpgroup: 16 codes of a row and stage by ld.shared.v4 -> A fragments, double-buffered over two stages; with one K group a
//              tile's last products run while the next tile's first codes are decoded
//   few tokens up to 128 tokens each operand has a ring of its own, that of the weights as deep as fits: they stream in while the kernel
//              before still expands tokens. Tiles of 64 rows, so that there are enough, halve K between two warpgroups (K groups, which take
//              pairs of stages in turn), those of 128 rows among four, which hide decoding where two do not. K groups
//              exchange their sums
//   K order    within each 64: lane c of a quad owns bytes 16 c .. 16 c + 15 of a weight row, so it needs one scale per stage
//   epilogue   bias, rounding, stmatrix.trans into a swizzled tile, TMA store; direct stores for fp32 or odd N
// Persistent, one CTA per SM, tiles ordered for L2 reuse. What bf16 operands cannot hold (a scale out of range) and NaN codes make
// their row or token NaN, and sums may overflow; whatever is not finite is computed again from the codes at the end, in tiles from the
// first such one on, so results are exact for all inputs. The workspace has whole tiles of tokens: TMA boxes that reach beyond a matrix
// are slow (33 tokens of 8192x7168: 33.4 us, without 26.1).
// What bounds few tokens: by the times of tiles a warpgroup decodes a stage in about 550 cycles and multiplies it in 2 per token, one after
// the other though issued to overlap: while wgmma runs, one other warp of a scheduler gets an integer, conversion or bf16x2 instruction issued
// every 4.3 cycles, however independent (FP32 ones more often, at 0.9 cycles of wgmma each), and a stage takes about 130. Profiled (ncu,
// 7168x2048) at 64 and 128 tokens the tensor cores are 25 and 39% busy, issue slots 45 and 37%, L2 a third (it merges the CTAs' reads of tokens).
// Around the loop (clocks in the fp16 form below, 256 tokens): CTAs start 1.3 us after the expanding ones, as these leave (beside 227 KB of shared
// memory there is no room); first products at 3.3 to 3.8; a K group waits 0.9 to 1 for the other's sums, 0.6 to finish, 0.5 for the store to be read.
// Tried and lost on an H200 (us at 7168x2048 unless said otherwise):
//   tokens     expanded during the products, by idle warps or by 4 or 8 CTAs of their own (681 with 8, 655 by the kernel before,
//              16384x7168x2048); by the consumers, to stay in shared memory (64 tokens: 14.4, 10.4 by the kernel before) or by a cluster of
//              four for itself through L2 (14.6, 10.5); multicast to clusters of 2 or 4 (0 to +0.9 at 64 to 256 tokens, 0 to -7% beyond;
//              arrivals at another CTA's barrier must not say release.cluster, which fences the GPU: +30 to 50%)
//   one kernel for few tokens, codes by TMA, both operands decoded to fp16 by cvt times 2^(scale - the largest of its row), the tokens by
//              warpgroups of their own: 64 tokens 8.9, 8192x1280 6.7, 5120x2048 8.8, 8192x7168 27.0 (two kernels 10.3, 8.3, 9.6, 25.9), 128
//              tokens 14.3, 9.9, 14.3, 41.5 (11.8, 9.7, 11.4, 29.8). Not used: 128 tokens gave other bits from run to run, reason not found.
//              128 rows in clusters of two CTAs that share K: 9.1, 8192x7168 22.4 at 64 tokens, about 2 of both spent on exchanging sums.
//              The kernel before costs 0.5 to 1.2: its GEMM alone takes 9.5, 7.8, 9.0, 25.0 (64 tokens), 10.9, 8.9, 10.5, 28.6 (128).
//              No wgmma may be in flight where paths meet: a conditional wait let the sums be copied too early, without a warning
//   K          divided over a cluster of two CTAs (128 tokens: 12.5, 11.9 by K groups; 8192x7168: 30.6, 30.1)
//   tile       256 rows x 128 tokens of four warpgroups (512 tokens: 28.2, 25.0); two warpgroups for 128x128 (8192x7168, 256 tokens:
//              55.7, four 49.0); four K groups for 64 rows (128 tokens: 12.6, 11.9). About even: 64 rows x 256 tokens by two K groups (256
//              tokens: 16.9, 128x128 17.1; 8192x7168: 48.3, 50.0)
//   decoding   to fp16, by one conversion of two codes, NaN included, scales relative to the largest of a token, of 32 rows (77 instead of
//              about 130 instructions a stage; the loop of 128x128 then takes 516 to 550 cycles per 64 of K, wgmma alone 512): gains for
//              128x128 (256 tokens: 16.7, 17.0; 8192x7168: 46.8, 49.6) and 128x96 (5120x2048, 256 tokens: 14.5, 15.1), but the first factors
//              wait for the largest scales, and sums are multiplied at the end: 128 tokens 12.1, 11.9; 512: 26.0, 25.1; 8192x1280, 512
//              tokens: 19.2, 18.7; without either (timed only, not exact) 128x128 takes 15.7, bf16 17.1 beside it. With slots of 128 along K
//              for the weights no better; with K groups that take halves of these 128x96 loses (15.3)
//   overlap    a k16 step decoded behind each product of the stage before (0 to +4%: the assembler gathers the steps behind the second
//              product); an early trigger for the kernel after (-0.2 to +0.3) or before, with larger CTAs (-0.3 to -1), with weights
//              prefetched into L2 too (-2 to -7%)
#include <algorithm>
#include <limits>
#include <type_traits>

#include "../common/launch_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "../common/wgmma_sm90.cuh"
#include "stages_sm90.cuh"

namespace mori::mxfp8 {
namespace {

using namespace sm90;

// ---- GEMM ----

struct Maps {
  CUtensorMap x, w, c;
};

// The larger magnitudes of two pairs of bf16, NaN if one is; and whether a pair holds an infinity or NaN.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
__device__ __forceinline__ float larger(float a, float b) {
  float most;
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}
__device__ __forceinline__ bool not_finite(uint32_t pair) { return (pair & 0x7f80) == 0x7f80 || (pair >> 16 & 0x7f80) == 0x7f80; }

// Computes what is not finite in a part of C again, element by element. All threads of the warpgroup come.
template <class C>
__device__ __forceinline__ void repair_part(const GemmArgs& args, const ByteScales& scales, int64_t m0, int64_t n0, int thread) {
  const int barrier_id = thread / 128 + 1;
  if (thread % 128 == 0) tma_store_wait();
  barrier_sync<128>(barrier_id);
  for (int i = thread % 128; i < kGroupRows * C::kPartTokens; i += 128) {
    const int64_t n = n0 + i % kGroupRows, m = m0 + i / kGroupRows;
    if (m < args.m && n < args.n && stored_not_finite(args, m, n)) store_c(args, m, n, exact_element(args, scales, m, n));
  }
  barrier_sync<128>(barrier_id);
}

// kStaged: C leaves through shared memory and TMA, else by direct stores.
template <class C, bool kStaged>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm(const __grid_constant__ Maps maps, const __grid_constant__ GemmArgs args, const __grid_constant__ ByteScales scales,
         const __grid_constant__ Tiles tiles) {
  extern __shared__ uint8_t smem[];
  const uint32_t base = (smem_address(smem) + C::kAlign - 1) / C::kAlign * C::kAlign;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
  const int stages = static_cast<int>(padded_k(args.k)) / kStageK;
  constexpr uint32_t kEmpty = 8 * C::kStages, kWEmpty = 8 * C::kWStages;  // from a slot's full to its empty barrier
  const uint32_t full = base + C::kBarrierOffset, full_w = base + C::kWBarrierOffset;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(full + 8 * i, C::kTwoRings ? 1 : 2);  // the copies and the scales
      mbarrier_init(full + kEmpty + 8 * i, C::kRowGroups * 4);
    }
    if constexpr (C::kTwoRings) {
      for (int i = 0; i < C::kWStages; ++i) {
        mbarrier_init(full_w + 8 * i, 2);
        mbarrier_init(full_w + kWEmpty + 8 * i, C::kRowGroups * 4);
      }
    }
    if constexpr (C::kKGroups > 1) mbarrier_init(base + C::kSumsReadOffset, C::kConsumers * 4);
    mbarrier_init_fence();
  } else if (threadIdx.x == C::kConsumers * 128) {
    prefetch_tensor_map(&maps.w);
    prefetch_tensor_map(&maps.x);
  }
  __syncthreads();

  if (warpgroup == C::kConsumers) {
    registers_decrease<C::kConsumers == 2 ? 40 : 32>();
    if (warp == 0) {
      if (lane == 0) {
        if constexpr (C::kTwoRings) {
          produce_weights<C>(&maps.w, tiles, base, stages);
        } else {
          produce_operands<C>(&maps.x, &maps.w, tiles, base, stages);
        }
      }
    } else if (warp == 1) {
      produce_scales<C, true>(args, scales, tiles, base, stages, lane);
    } else if (C::kTwoRings && warp == 2) {
      if (lane == 0) produce_tokens<C>(&maps.x, tiles, base, stages);
    }
    return;
  }

  registers_increase<C::kConsumers == 2 ? 232 : 112>();
  const int k_group = warpgroup / C::kRowGroups;
  const uint32_t x_descriptor = wgmma_descriptor_low(base);
  float sum[C::kTokens / 2] = {};
  uint32_t most[2] = {};  // the largest fields of row g's and g + 8's codes in the tile, as two 16-bit lanes
  uint32_t least_factor = ~0u;

  const auto multiply_stage = [&](uint32_t slot, const uint32_t (&a)[16], bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma_bf16(sum, a + 4 * j, x_descriptor + slot * (C::kXBytes >> 4) + 2 * j, j > 0 || accumulate);
    wgmma_commit();
  };
  const auto release = [&](uint32_t empty) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty);
  };
  uint32_t suspect;  // bits 0, 1: row g, g + 8 holds a NaN code; bit 2: a scale that bf16 does not have
  const auto look_at_codes = [&] {
    suspect = holds_nan(most[0]) | holds_nan(most[1]) << 1 | (least_factor == 0) << 2;
    most[0] = most[1] = 0, least_factor = ~0u;
  };

  // A K group takes pairs of stages in turn.
  constexpr int kPairs = 2 * C::kKGroups;
  const int first_of_group = 2 * k_group;
  Ring<C::kStages> ring = Ring<C::kStages>(0).ahead(first_of_group);
  Ring<C::kWStages> weights = Ring<C::kWStages>(0).ahead(first_of_group);
  uint32_t a0[16], a1[16];  // a1: with two consumers
  const auto decode = [&](const Source& source, uint32_t odd, uint32_t (&a)[16]) {  // odd: the pair's second stage
    Codes codes;
    mbarrier_wait(full_w + 8 * (weights.slot + odd), weights.parity);
    load_stage<C>(source, weights.slot + odd, codes);
    decode_stage(codes, a, most, least_factor);
  };
  // The pair's stage, whose codes have been read for good once its products are issued.
  const auto multiply = [&](uint32_t odd, const uint32_t (&a)[16], bool accumulate) {
    if constexpr (C::kTwoRings) mbarrier_wait(full + 8 * (ring.slot + odd), ring.parity);
    multiply_stage(ring.slot + odd, a, accumulate);
    if constexpr (C::kTwoRings) release(full_w + kWEmpty + 8 * (weights.slot + odd));
  };
  // The first stage of a tile: with one K group that of the next tile, so that its products can start at once.
  if constexpr (C::kKGroups == 1) decode(source_of<C>(base, thread_index()), 0, a0);

  const int turns = (tiles.count() - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  int first_repair = turns;  // from this turn on results are looked at again, at the end
  for (int turn = 0; turn < turns; ++turn) {
    const Source source = source_of<C>(base, thread_index());
    int s = first_of_group;
    if constexpr (C::kConsumers == 4) {
#pragma unroll 1
      for (; s < stages; s += kPairs) {
#pragma unroll
        for (uint32_t odd = 0; odd < 2; ++odd) {
          decode(source, odd, a0);
          multiply(odd, a0, odd > 0 || s > first_of_group);
          wgmma_wait<0>();
          release(full + kEmpty + 8 * (ring.slot + odd));
        }
        ring.advance(kPairs);
        weights.advance(kPairs);
      }
    } else {
      if (C::kKGroups > 1 && s < stages) decode(source, 0, a0);
#pragma unroll 1
      for (; s < stages; s += kPairs) {
        const uint32_t slot = ring.slot;
        multiply(0, a0, s > first_of_group);
        decode(source, 1, a1);
        multiply(1, a1, true);
        wgmma_wait<1>();
        release(full + kEmpty + 8 * slot);
        const bool last = s + kPairs >= stages;
        if (C::kKGroups == 1 && last) look_at_codes();  // before the next tile's codes come
        ring.advance(kPairs);
        weights.advance(kPairs);
        if (!last || (C::kKGroups == 1 && turn + 1 < turns)) decode(source, 0, a0);
        wgmma_wait<0>();
        release(full + kEmpty + 8 * slot + 8);
      }
    }
    if constexpr (C::kKGroups > 1) {
      look_at_codes();
      // This group's first pair of the next tile.
      ring = ring.ahead(2 * C::kStages + first_of_group + stages - s);
      weights = weights.ahead(2 * C::kWStages + first_of_group + stages - s);
    }

    const int thread = thread_index(), part = thread / 128, warp = thread / 32 % 4, lane = thread % 32, g = lane / 4, c = lane % 4;
    const int barrier_id = part + 1;
    const bool leader = thread % 128 == 0;
    const auto place = [&](int of_turn) { return load_place(base + C::kPlaceOffset + 8 * (static_cast<uint32_t>(of_turn) % C::kPlaces)); };
    const auto first_row = [&] { return static_cast<int64_t>(place(turn).y) * C::kRows + part % C::kRowGroups * kGroupRows; };
    // A code that is NaN, or whose scale bf16 does not have, shows in every sum of its row, whatever lane of the quad saw it.
    float poison[2] = {};
    const bool suspects = __any_sync(~0u, suspect != 0);
    if (suspects) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        bool bad = suspect >> half & 1;
        if (suspect & 4) bad |= extreme_codes(args, scales, first_row() + warp * 16 + g + half * 8, c);
        if ((__ballot_sync(~0u, bad) >> (lane & ~3) & 15) != 0) poison[half] = __uint_as_float(mx::kNanBits);
      }
    }
    // From the sums of all of K on.
    const auto finish = [&](float* results) {
      const int2 tile = place(turn);
      [[maybe_unused]] const int64_t m0 = static_cast<int64_t>(tile.x) * C::kTokens + part / C::kRowGroups * C::kPartTokens;
      const int64_t n0 = first_row();

      const int64_t row0 = n0 + warp * 16 + g;  // of this lane, and row0 + 8
      float bias[2] = {poison[0], poison[1]};
      if (args.bias != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (row0 + half * 8 < args.n) bias[half] += bias_at(args, row0 + half * 8);
      }
      bool repair = !isfinite(bias[0]) || !isfinite(bias[1]);
      if (repair || args.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < C::kPartSums; ++i) results[i] += bias[i / 2 % 2];
      }
      if constexpr (!kStaged) {
#pragma unroll
        for (int i = 0; i < C::kPartSums; ++i) {
          const int64_t m = m0 + i / 4 * 8 + c * 2 + i % 2, n = row0 + i / 2 % 2 * 8;
          repair |= !isfinite(results[i]);
          if (m < args.m && n < args.n) store_rounded(args, m, n, results[i]);
        }
        repair = barrier_or(barrier_id, repair);
      } else {
        const uint32_t staged = base + C::kPartOffset + part * C::kPartBytes;
        if (leader) tma_store_wait_read();
        barrier_sync<128>(barrier_id);
        // 16 tokens: four 8x8 matrices (rows 0-7, 8-15) x (tokens 0-7, 8-15), stored transposed.
        const uint32_t matrix = lane / 8, target = staged + (lane % 8 + matrix / 2 * 8) * 128 + ((warp * 2 + matrix % 2 ^ lane % 8) << 4);
        const auto stage_sums = [&](auto half) {
          constexpr bool kHalf = decltype(half)::value;
          uint32_t most[2] = {};
          float largest = 0.f;
#pragma unroll
          for (int j = 0; j < C::kPartTokens / 16; ++j) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              pairs[i] = pack2<kHalf>(results[j * 8 + 2 * i], results[j * 8 + 2 * i + 1]);
              if constexpr (kHalf) {
                largest = larger(larger(largest, results[j * 8 + 2 * i]), results[j * 8 + 2 * i + 1]);  // finite sums may round to infinity
              } else {
                most[i / 2] = larger(most[i / 2], pairs[i]);
              }
            }
            store_matrix_transposed(target + j * 2048, pairs[0], pairs[1], pairs[2], pairs[3]);
          }
          repair |= !isfinite(largest) || not_finite(larger(most[0], most[1]));
        };
        if (args.out_type == Float::f16) {
          stage_sums(std::true_type{});
        } else {
          stage_sums(std::false_type{});
        }
        fence_async_shared();
        repair = barrier_or(barrier_id, repair);
        if (leader) {
          tma_store(&maps.c, staged, static_cast<int>(n0), static_cast<int>(m0));
          tma_store_commit();
        }
      }

      if (repair) first_repair = min(first_repair, turn);
    };
    if constexpr (C::kKGroups == 1) {
      finish(sum);
    } else {
      // Each of two K groups gets the other one's sums of half the tokens, in the ring of tokens.
      const auto exchange = [&](auto upper) {
        constexpr int kOwn = decltype(upper)::value ? C::kPartSums : 0, kOther = C::kPartSums - kOwn;
        const auto at = [&](int of_part, int i) { return base + of_part * C::kSumBytes + (i * 128 + thread % 128) * 4; };
        const bool empty = first_of_group >= stages;
        barrier_sync<C::kConsumers * 128>(C::kConsumers + 1);  // the tokens have been read
#pragma unroll
        for (int i = 0; i < C::kPartSums; ++i) {
          const float sent = empty ? 0.f : sum[kOther + i] + poison[i / 2 % 2];
          store_shared(at(part ^ C::kRowGroups, i), __float_as_uint(sent));
        }
        barrier_sync<C::kConsumers * 128>(C::kConsumers + 1);
#pragma unroll
        for (int i = 0; i < C::kPartSums; ++i) sum[kOwn + i] = (empty ? 0.f : sum[kOwn + i]) + __uint_as_float(load_shared(at(part, i)));
        fence_async_shared();
        release(base + C::kSumsReadOffset);
        finish(sum + kOwn);
      };
      if (k_group == 0) {
        exchange(std::false_type{});
      } else {
        exchange(std::true_type{});
      }
    }
  }

  const int thread = thread_index(), part = thread / 128;
  const bool leader = thread % 128 == 0;
  if (leader) tma_store_wait_read();
  for (int turn = first_repair; turn < turns; ++turn) {
    const int2 tile = tiles.at(blockIdx.x + turn * gridDim.x);
    const int64_t m0 = static_cast<int64_t>(tile.x) * C::kTokens + part / C::kRowGroups * C::kPartTokens;
    const int64_t n0 = static_cast<int64_t>(tile.y) * C::kRows + part % C::kRowGroups * kGroupRows;
    repair_part<C>(args, scales, m0, n0, thread);
  }
}

// ---- launch ----

template <class C, bool kStaged>
cudaError_t launch(const GemmArgs& args, void* workspace, cudaStream_t stream) {
  const int64_t columns = padded_k(args.k), padded_m = (args.m + C::kTokens - 1) / C::kTokens * C::kTokens;
  Maps maps;
  bool ok = make_tensor_map(&maps.x, workspace, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, padded_m, columns, C::kTokens, kStageK, CU_TENSOR_MAP_SWIZZLE_128B);
  ok &= make_tensor_map(&maps.w, args.b, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.n, args.k, C::kRows, kStageK, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (kStaged)
    ok &= make_tensor_map(&maps.c, args.out, args.out_type == Float::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, args.m, args.n, C::kPartTokens, 64,
                          CU_TENSOR_MAP_SWIZZLE_128B);
  if (!ok) return cudaErrorInvalidValue;
  const Tiles tiles = {static_cast<int>((args.m + C::kTokens - 1) / C::kTokens), static_cast<int>((args.n + C::kRows - 1) / C::kRows)};
  int ctas = 0;
  if (const cudaError_t error = processors(&ctas); error != cudaSuccess) return error;
  if (const cudaError_t error = launch_expand(args, padded_m, static_cast<uint4*>(workspace), stream); error != cudaSuccess) return error;
  return launch_overlapped(gemm<C, kStaged>, std::min(ctas - args.reserved_processors, tiles.count()), C::kThreads, C::kSmem, stream, maps, args, ByteScales(args), tiles);
}

template <class C>
cudaError_t launch_store(const GemmArgs& args, void* workspace, cudaStream_t stream) {
  const bool staged = args.out_type != Float::f32 && args.n % 8 == 0 && aligned16(args.out);
  return staged ? launch<C, true>(args, workspace, stream) : launch<C, false>(args, workspace, stream);
}

}  // namespace

bool gemm_fits(const GemmArgs& args) { return args.k > 0 && aligned16(args.a) && aligned16(args.b) && aligned16(args.x); }

int64_t gemm_workspace_bytes(int64_t m, int64_t k) { return (m + 255) * padded_k(k) * 2; }  // whole tiles of up to 256 tokens

GemmTile gemm_tile(int64_t m, int64_t n, int64_t k) {
  // Microseconds of a wave of tiles per 64 of K, beside about one that a wave takes whatever its K: fitted to times on an H200 at 33 to
  // 4096 tokens, 7168x2048, 5120x2048, 8192x1280 and 8192x7168 (2026-11-30). The best of these tiles at all of them.
  struct Choice {
    GemmTile tile;
    int rows, tokens;
    float step;
  };
  constexpr Choice kChoices[] = {{GemmTile::rows64_tokens64, 64, 64, .185f},
                                 {GemmTile::rows64_tokens96, 64, 96, .235f},
                                 {GemmTile::rows64_tokens128, 64, 128, .26f},
                                 {GemmTile::rows128_tokens96, 128, 96, .35f},
                                 {GemmTile::rows128_tokens128, 128, 128, .4f},
                                 {GemmTile::rows128_tokens176, 128, 176, .49f},
                                 {GemmTile::rows128_tokens192, 128, 192, .505f},
                                 {GemmTile::rows128_tokens224, 128, 224, .582f},
                                 {GemmTile::rows128_tokens256, 128, 256, .65f}};
  GemmTile best = GemmTile::rows128_tokens256;
  float least = std::numeric_limits<float>::infinity();
  for (const Choice& c : kChoices) {
    const int64_t tiles = ((m + c.tokens - 1) / c.tokens) * ((n + c.rows - 1) / c.rows), waves = (tiles + 131) / 132;
    if (const float time = static_cast<float>(waves) * (1.f + c.step * static_cast<float>(k / kStageK)); time < least) least = time, best = c.tile;
  }
  return best;
}

cudaError_t launch_gemm(const GemmArgs& args, GemmTile tile, void* workspace, cudaStream_t stream) {
  switch (tile) {
    case GemmTile::rows64_tokens64: return launch_store<Config<64, 1, 2>>(args, workspace, stream);
    case GemmTile::rows64_tokens96: return launch_store<Config<96, 1, 2>>(args, workspace, stream);
    case GemmTile::rows64_tokens128: return launch_store<Config<128, 1, 2>>(args, workspace, stream);
    case GemmTile::rows128_tokens96: return launch_store<Config<96, 2, 2>>(args, workspace, stream);
    case GemmTile::rows128_tokens128: return launch_store<Config<128, 2, 2>>(args, workspace, stream);
    case GemmTile::rows128_tokens176: return launch_store<Config<176, 2, 1>>(args, workspace, stream);
    case GemmTile::rows128_tokens192: return launch_store<Config<192, 2, 1>>(args, workspace, stream);
    case GemmTile::rows128_tokens224: return launch_store<Config<224, 2, 1>>(args, workspace, stream);
    default: return launch_store<Config<256, 2, 1>>(args, workspace, stream);
  }
}

}  // namespace mori::mxfp8
