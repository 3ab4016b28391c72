// y[t, n] = sum_k W[n, k] * xn[t, k] for many tokens and a Q8_0 weight (contract: gr.h): tiles on the tensor cores.
//
// A CTA computes 192 rows x 64 tokens over a slice of K; a second kernel adds the slices in order. Steps of 64 along K:
//   3 consumer warpgroups, 64 rows each: a TMA box brings a warp's 16 rows, 256 values (272 bytes) of each at a time, which is a pitch
//     that keeps rows in different banks; int8 -> fp16 (bf16) exactly is operand A in registers; wgmma m64n64k16; a block's fp32 sum
//     times d is added to the result. The next block is decoded while the products of one run.
//   x of 16 bits without a norm: TMA brings it as it is. Else 8 producer warps make hi + lo fp16 of it (22 bits), times the norm's weight,
//     scaled by a power of two per token: for its first values, with room to grow; when it must change, consumers rescale the result.
// With the norm, a slice lies inside one hc group: producers also sum the squares, and the second kernel scales by 1/rms.
// A row's bits depend on the length of a slice, not on ntok. Rows are spread evenly over the tiles (324 = 2 x 162).
// The weights are read before griddepcontrol.wait: the previous kernel must not write them. All other loads come after it and past the L1
// cache: a workspace or an operand may be memory that was something else before.
// H200, 2026-11-30, us at 64, 256, 512, 1024 tokens: fp32 9.7, 18.1, 25.2, 43.4; bf16 8.2, 15.2, 20.9, 33.3; norm 10.8, 26.1, 28.8, 51.5.
// They were 10.2, 19.4, 25.7, 45.4; 9.3, 16.8, 21.1, 36.0; 17.5, 30.1, 31.5, 51.4 before weights were read early, boxes replaced copies that
// a warp's lanes issue one after another (47.4 at 1024 fp32 tokens with those), and slices were added by four threads a result, all loads at
// once (a loop's remainder loaded one by one). At 1024 fp32 tokens (ncu): shared memory and L1 63%, issue slots 49%, L2 46%, DRAM 24%.
// Tried and lost (the same day): clusters of 4 or 8 CTAs that add up in each other's shared memory (30 and 15 fit at once, so that 1024
// tokens took two waves), weights by 16-byte cp.async (no difference), 128 tokens of one tile, 4 producer warps, a block's products in
// flight while the one before is added (no difference), mma.sync.
// Tokens as rows of the products (128 tokens x 168 weight rows, wgmma m64n80 and n88, weights decoded to shared memory by 4 warps, slices of
// 320, 640, 1280): 61.8 us at 1024 fp32 tokens with x by loads ahead into registers, whose latency it waits for, 49.9 by cp.async into a
// ring of each warp; bf16 45.8 and 47.0. It has fewer products, but the latter 2730 wavefronts of shared memory for a step of 64 that keeps
// tensor cores busy for 1344 cycles: each product reads its weights again (672), the d of every column is loaded (672), x goes in and out
// (512), and 16-byte cp.async of rows that do not start at 128 bytes take three times the wavefronts (517). With fp16 d and weights by boxes
// it took 7.3 us at 64 bf16 tokens; a box must start at a multiple of 16 bytes (else an illegal instruction), as slices of 320 do not.
#include "gr_down_sm90.cuh"

#include "../common/launch_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "../common/wgmma_sm90.cuh"

namespace mori::gr {
namespace {

using namespace sm90;

constexpr int kTileRows = 192, kTileTokens = 64, kSums = kTileTokens / 2;
constexpr int kConsumers = 12, kProducers = 8;  // warps
constexpr int kStepK = kPairK, kUnitSteps = 4, kUnitK = kUnitSteps * kStepK, kUnitBytes = kUnitSteps * kPairBytes;  // a unit of the weights
constexpr int kUnitStages = 2;
constexpr int kFirstExponent = 9;                                 // the least one whose scale and its inverse are normal numbers
constexpr int kRoom = 7;                                          // powers of two that a token's values may grow by before they are rescaled

template <class Element, bool kHasNorm>
struct Config {
  using X = Element;
  static constexpr bool kNorm = kHasNorm, kRaw = sizeof(X) == 2 && !kNorm, kBf16 = kRaw && std::is_same_v<X, __nv_bfloat16>;
  static constexpr int kPlanes = kRaw ? 1 : 2;
  static constexpr int kStages = kRaw ? 8 : 4, kStageUnits = kStages / kUnitSteps;  // of x
  static constexpr int kThreads = (kConsumers + (kRaw ? 4 : kProducers)) * 32;
  static constexpr int kConsumerRegisters = kRaw ? 152 : 104, kProducerRegisters = kRaw ? 40 : 80;  // of a thread; 128 or 96 each at the launch
};

template <class C>
struct Shared {
  uint8_t x[C::kStages][C::kPlanes][kTileTokens][128];  // [hi, lo]: rows of 64 values, in the 128-byte swizzle
  uint8_t weights[kConsumers][kUnitStages][16][kUnitBytes];
  float ratio[C::kStages][kTileTokens];   // what the tokens' results are multiplied by before this step
  uint8_t grown[C::kStages][kProducers];  // whether a warp's ratios are not all 1
  float scale[kTileTokens];               // of the finished results
  uint64_t full[C::kStages], empty[C::kStages], weights_full[kConsumers][kUnitStages];
};

struct SumArgs {
  DownArgs down;
  float* partial;  // [slices][ntok][pitch]
  float* squares;  // [slices][ntok]
  int64_t pitch;
};
struct TileArgs {
  CUtensorMap x, w;
  SumArgs sums;
  int slice_units, tile_rows;
  uint32_t upper;  // bytes above the codes; from here, or it would be moved into a register again for each use
};

// Where a CTA's part of the work lies.
struct Place {
  int64_t token0, row0;
  int rows, first, units;  // first and units: of K

  __device__ __forceinline__ explicit Place(const TileArgs& tile)
      : token0(static_cast<int64_t>(blockIdx.y) * kTileTokens), row0(static_cast<int64_t>(blockIdx.z) * tile.tile_rows),
        rows(static_cast<int>(min(tile.sums.down.n - row0, static_cast<int64_t>(tile.tile_rows)))), first(blockIdx.x * tile.slice_units),
        units(min(tile.slice_units, static_cast<int>(tile.sums.down.k / kUnitK) - first)) {}
};

// The ring of x in turns of a unit's steps: step s of unit u has stage turn * kUnitSteps + s.
template <class C>
struct Turn {
  int turn = 0;
  uint32_t parity;
  __device__ __forceinline__ explicit Turn(uint32_t first_parity) : parity(first_parity) {}
  __device__ __forceinline__ void advance() {
    if (++turn == C::kStageUnits) turn = 0, parity ^= 1;
  }
};

template <class C>
__device__ __forceinline__ void produce_raw(Shared<C>& s, const TileArgs& tile, const Place& place) {
  Turn<C> turn(1);
  for (int u = 0; u < place.units; ++u, turn.advance())
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) {
      const int ring = turn.turn * kUnitSteps + step;
      const uint32_t full = smem_address(&s.full[ring]);
      mbarrier_wait(smem_address(&s.empty[ring]), turn.parity);
      mbarrier_arrive_expect(full, sizeof(s.x[ring]));
      tma_load(smem_address(s.x[ring]), &tile.x, full, (place.first + u) * kUnitK + step * kStepK, static_cast<int>(place.token0));
    }
}

template <class T>
__device__ __forceinline__ void load_floats(float (&v)[4], const void* p, int64_t i) {
  Values<T, 4> values;
  values.load(static_cast<const T*>(p) + i);
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = values[j];
}
__device__ __forceinline__ void load_floats(float (&v)[4], const void* p, Float type, int64_t i) {
  switch (type) {
    case Float::f32: return load_floats<float>(v, p, i);
    case Float::bf16: return load_floats<__nv_bfloat16>(v, p, i);
    default: return load_floats<__half>(v, p, i);
  }
}

// A token's 64 values are spread over 8 lanes, 4 of each block. A warp writes rows 0, 4, 1, 5, then 2, 6, 3, 7 of its 8 tokens at once: the
// rows of half a warp fall into different banks. Tokens past the end repeat the last one.
template <class C>
__device__ __forceinline__ void produce(Shared<C>& s, const TileArgs& tile, const Place& place) {
  using X = typename C::X;
  const DownArgs& args = tile.sums.down;
  const int warp = threadIdx.x / 32 - kConsumers, lane = threadIdx.x % 32, word = lane % 8;
  constexpr int kTokens = 2, kAhead = C::kNorm ? 1 : 2;                     // of a thread; steps loaded ahead, as registers allow
  const int base = warp * 8 + lane / 8 % 2 * 4 + lane / 16;  // the first token; + 2 the other
  const int64_t k0 = static_cast<int64_t>(place.first) * kUnitK + word * 4;
  const X* row[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) row[t] = static_cast<const X*>(args.x) + min(place.token0 + base + 2 * t, args.ntok - 1) * args.k + k0;
  Values<X, 4> ahead[kAhead][kTokens][2];
  float norm[2][4];
  const auto load = [&](Values<X, 4>(&values)[2], const X* from) {
#pragma unroll
    for (int b = 0; b < 2; ++b) values[b].load(from + b * kBlock);
  };
  const auto load_norm = [&](int64_t k) {
#pragma unroll
    for (int b = 0; b < (C::kNorm ? 2 : 0); ++b) load_floats(norm[b], args.norm_weight, args.norm_type, k0 + k + b * kBlock);
  };
  int exponent[kTokens];
  float squares[kTokens] = {};
  load_norm(0);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    exponent[t] = kFirstExponent;
#pragma unroll
    for (int p = 0; p < kAhead; ++p) load(ahead[p][t], row[t] + p * kStepK);
  }
  uint32_t at[2];  // of a block's 8 bytes in the swizzled rows
#pragma unroll
  for (int b = 0; b < 2; ++b) at[b] = base * 128 + ((b * 4 + word / 2) ^ base % 8) * 16 + word % 2 * 8;
  Turn<C> turn(1);
  for (int u = 0; u < place.units; ++u, turn.advance()) {
    const bool more = u + 1 < place.units;
    const int wrap = more ? 0 : -kUnitK;  // no further than the slice
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) {
      const int ring = turn.turn * kUnitSteps + step, p = step % kAhead;
      mbarrier_wait(smem_address(&s.empty[ring]), turn.parity);
      float v[kTokens][2][4], amax[kTokens], ratio[kTokens];
      bool grown = false;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        amax[t] = 0.f, ratio[t] = 1.f;
#pragma unroll
        for (int b = 0; b < 2; ++b)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            v[t][b][j] = ahead[p][t][b][j];
            if constexpr (C::kNorm) {
              squares[t] = fmaf(v[t][b][j], v[t][b][j], squares[t]);
              v[t][b][j] *= norm[b][j];
            }
            amax[t] = fmaxf(amax[t], fabsf(v[t][b][j]));
          }
        load(ahead[p][t], row[t] + (step + kAhead < kUnitSteps ? 0 : wrap) + (step + kAhead) * kStepK);
        grown |= static_cast<int>(__float_as_uint(amax[t]) >> 23) >= exponent[t] + kRoom;
      }
      grown = __any_sync(~0u, grown);
      if (grown) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
#pragma unroll
          for (int offset = 1; offset < 8; offset *= 2) amax[t] = fmaxf(amax[t], __shfl_xor_sync(~0u, amax[t], offset));
          const int now = static_cast<int>(__float_as_uint(amax[t]) >> 23);
          if (now >= exponent[t] + kRoom) ratio[t] = __int_as_float(max(127 + exponent[t] - now, 0) << 23), exponent[t] = now;
        }
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        s.ratio[ring][base + 2 * t] = ratio[t];
        const float up = __int_as_float((262 - exponent[t]) << 23);  // the largest value comes into [2^8, 2^9) and may grow to 2^15
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          uint2 high, low;
          const auto split = [&](float v0, float v1, uint32_t& h, uint32_t& l) {
            v0 *= up, v1 *= up;
            h = pack_half2(v0, v1);
            const float2 kept = unpack_half2(h);
            l = pack_half2(v0 - kept.x, v1 - kept.y);
          };
          split(v[t][b][0], v[t][b][1], high.x, low.x);
          split(v[t][b][2], v[t][b][3], high.y, low.y);
          uint8_t* to = s.x[ring][0][0] + (at[b] ^ t * 32) + t * 256;
          *reinterpret_cast<uint2*>(to) = high;
          *reinterpret_cast<uint2*>(to + sizeof(s.x[0][0])) = low;
        }
      }
      if (step + 1 < kUnitSteps || more) load_norm(static_cast<int64_t>(u) * kUnitK + (step + 1) * kStepK);
      if (lane == 0) s.grown[ring][warp] = grown;
      if (step + 1 == kUnitSteps && !more)
#pragma unroll
        for (int t = 0; t < kTokens; ++t) s.scale[base + 2 * t] = __int_as_float((exponent[t] - 8) << 23);
      fence_async_shared();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem_address(&s.full[ring]));
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) row[t] += kUnitK;
  }
  if constexpr (C::kNorm) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float total = squares[t];
      for (int offset = 1; offset < 8; offset *= 2) total += __shfl_xor_sync(~0u, total, offset);
      const int64_t token = place.token0 + base + 2 * t;
      if (word == 0 && token < args.ntok && blockIdx.z == 0) tile.sums.squares[blockIdx.x * args.ntok + token] = total;
    }
  }
}

// A block of rows g and g + 8: A fragments of two products, and its d.
template <bool kBf16>
struct Codes {
  uint32_t a[2][4];
  float d[2];

  __device__ __forceinline__ void load(const uint8_t* block, int c, uint32_t upper) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint8_t* p = block + h * 8 * kUnitBytes;
      d[h] = __half2float(*reinterpret_cast<const __half*>(p));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pair = *reinterpret_cast<const uint16_t*>(p + 2 + j * 8 + 2 * c);
        a[j / 2][j % 2 * 2 + h] = kBf16 ? int8_pair_to_bf162(pair, upper) : int8_pair_to_half2(pair, upper);
      }
    }
  }
};

// Adds a block's products to the sums; `x` is the descriptor of its values. While they are computed, `then` does something else.
template <class C, class Then>
__device__ __forceinline__ void multiply(float (&sum)[kSums], const Codes<C::kBf16>& codes, uint32_t x, Then then) {
  float part[kSums];
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < 2 * C::kPlanes; ++j) {
    const uint32_t operand = x + j / 2 * (kTileTokens * 8) + j % 2 * 2;
    if constexpr (C::kBf16) {
      wgmma_bf16(part, codes.a[j % 2], operand, j > 0);
    } else {
      wgmma_fp16(part, codes.a[j % 2], operand, j > 0);
    }
  }
  wgmma_commit();
  then();
  wgmma_wait<0>();
#pragma unroll
  for (int j = 0; j < kSums; ++j) sum[j] = fmaf(part[j], codes.d[j / 2 % 2], sum[j]);
}

template <class C>
__device__ __forceinline__ void consume(Shared<C>& s, const TileArgs& tile, const Place& place) {
  const DownArgs& args = tile.sums.down;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, units = place.units;
  // One lane fetches a unit of the warp's 16 rows; rows past the tile's end are computed too, but not stored.
  const auto fetch = [&](int u) {
    if (u >= units) return;
    const int stage = u % kUnitStages;
    const uint32_t full = smem_address(&s.weights_full[warp][stage]);
    if (lane == 0) {
      mbarrier_arrive_expect(full, sizeof(s.weights[warp][stage]));
      tma_load(smem_address(s.weights[warp][stage]), &tile.w, full, (place.first + u) * (kUnitBytes / 4), static_cast<int>(place.row0) + warp * 16);
    }
  };
  const auto arrived = [&](int u) { mbarrier_wait(smem_address(&s.weights_full[warp][u % kUnitStages]), u / kUnitStages % 2); };
#pragma unroll
  for (int u = 0; u < kUnitStages; ++u) fetch(u);
  const auto unit_of = [&](int u) { return s.weights[warp][u % kUnitStages][g]; };
  float sum[kSums] = {};  // [8 tokens][row g or g + 8][token 2c or 2c + 1]
  Codes<C::kBf16> codes[2];
  const uint32_t upper = tile.upper;
  arrived(0);
  codes[0].load(unit_of(0), c, upper);
  Turn<C> turn(0);
  for (int u = 0; u < units; ++u, turn.advance()) {
    const uint8_t* unit = unit_of(u);
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) {
      const int ring = turn.turn * kUnitSteps + step;
      mbarrier_wait(smem_address(&s.full[ring]), turn.parity);
      if constexpr (!C::kRaw) {
        if (*reinterpret_cast<const uint64_t*>(s.grown[ring]) != 0) {
#pragma unroll
          for (int j = 0; j < kTileTokens / 8; ++j) {
            const float2 ratio = *reinterpret_cast<const float2*>(&s.ratio[ring][8 * j + 2 * c]);
            sum[4 * j] *= ratio.x, sum[4 * j + 1] *= ratio.y, sum[4 * j + 2] *= ratio.x, sum[4 * j + 3] *= ratio.y;
          }
        }
      }
      const uint32_t x = wgmma_descriptor_low(smem_address(s.x[ring]));
      multiply<C>(sum, codes[0], x, [&] { codes[1].load(unit + step * kPairBytes + kBlockBytes, c, upper); });
      multiply<C>(sum, codes[1], x + 4, [&] {
        if (step + 1 < kUnitSteps) {
          codes[0].load(unit + (step + 1) * kPairBytes, c, upper);
        } else {
          __syncwarp();
          fetch(u + kUnitStages);  // into the unit that has been read
          if (u + 1 < units) {
            arrived(u + 1);
            codes[0].load(unit_of(u + 1), c, upper);
          }
        }
      });
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem_address(&s.empty[ring]));
    }
  }
  wait_for_dependencies();
  float* partial = tile.sums.partial + blockIdx.x * args.ntok * tile.sums.pitch;
#pragma unroll
  for (int j = 0; j < kSums; ++j) {
    const int column = j / 4 * 8 + 2 * c + j % 2, row = warp * 16 + g + j / 2 % 2 * 8;
    const int64_t token = place.token0 + column;
    if (row < place.rows && token < args.ntok) partial[token * tile.sums.pitch + place.row0 + row] = C::kRaw ? sum[j] : sum[j] * s.scale[column];
  }
}

// Grid: slices of K, groups of 64 tokens, groups of rows.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) down_tiles(const __grid_constant__ TileArgs tile) {
  extern __shared__ __align__(1024) uint8_t smem[];
  Shared<C>& s = *reinterpret_cast<Shared<C>*>(smem);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Place place(tile);
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(smem_address(&s.full[i]), C::kRaw ? 1 : kProducers);
      mbarrier_init(smem_address(&s.empty[i]), kConsumers);
    }
    for (int i = 0; i < kConsumers * kUnitStages; ++i) mbarrier_init(smem_address(&s.weights_full[0][i]), 1);
    mbarrier_init_fence();
    if (C::kRaw) prefetch_tensor_map(&tile.x);
    prefetch_tensor_map(&tile.w);
  }
  __syncthreads();
  if (tile.sums.down.copied) wait_for_dependencies();
  if (warp < kConsumers) {
    registers_increase<C::kConsumerRegisters>();
    consume<C>(s, tile, place);
  } else {
    registers_decrease<C::kProducerRegisters>();
    wait_for_dependencies();
    if constexpr (!C::kRaw) {
      produce<C>(s, tile, place);
    } else {
      if (warp == kConsumers && lane == 0) produce_raw<C>(s, tile, place);
    }
  }
}

// Adds the slices, 256 results by a CTA: every fourth group of slices (the norm's, each times its 1/rms; else four parts) by each quarter of
// the threads, then the quarters. Past the L1 cache, which may hold what the workspace held before.
constexpr int kAddThreads = 256, kQuarters = 4, kAhead = 10;  // slices loaded at once
template <class X, bool kNorm>
__global__ void __launch_bounds__(kAddThreads) add_slices(const SumArgs sums, int slices) {
  __shared__ float4 quarter_sum[kQuarters][kAddThreads / kQuarters];
  launch_dependents();
  const DownArgs& args = sums.down;
  const int quarter = threadIdx.x / (kAddThreads / kQuarters), i = threadIdx.x % (kAddThreads / kQuarters);
  const int64_t quads = (args.n + 3) / 4, first_quad = static_cast<int64_t>(blockIdx.x) * (kAddThreads / kQuarters), plane = args.ntok * sums.pitch;
  const int groups = kNorm ? static_cast<int>(args.hc) : kQuarters, group_slices = (slices + groups - 1) / groups;
  const int64_t token = min((first_quad + i) / quads, args.ntok - 1);
  const float* partial = sums.partial + token * sums.pitch + (first_quad + i) % quads * 4;
  float4 y = {};
  wait_for_dependencies();
  for (int group = quarter; group < groups; group += kQuarters) {
    float4 sum = {};
    float squares = 0.f;
    const int last = min(slices, (group + 1) * group_slices);
    for (int first = group * group_slices; first < last; first += kAhead) {
      float4 part[kAhead] = {};
      float part_squares[kAhead] = {};
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        if (first + q >= last) break;
        part[q] = __ldcg(reinterpret_cast<const float4*>(partial + (first + q) * plane));
        if (kNorm) part_squares[q] = __ldcg(sums.squares + (first + q) * args.ntok + token);
      }
#pragma unroll
      for (int q = 0; q < kAhead; ++q) {
        sum.x += part[q].x, sum.y += part[q].y, sum.z += part[q].z, sum.w += part[q].w;
        squares += part_squares[q];
      }
    }
    const int64_t size = args.k / groups;
    const float scale = kNorm ? inverse_rms(squares, static_cast<const X*>(args.x) + token * args.k + group * size, size, args.eps) : 1.f;
    y.x = fmaf(sum.x, scale, y.x), y.y = fmaf(sum.y, scale, y.y), y.z = fmaf(sum.z, scale, y.z), y.w = fmaf(sum.w, scale, y.w);
  }
  quarter_sum[quarter][i] = y;
  __syncthreads();
  const int64_t quad = first_quad + threadIdx.x / 4, row = quad % quads * 4 + threadIdx.x % 4;
  float total = 0.f;
#pragma unroll
  for (int q = 0; q < kQuarters; ++q) total += reinterpret_cast<const float*>(quarter_sum[q])[threadIdx.x];
  if (quad < quads * args.ntok && row < args.n) args.y[quad / quads * args.n + row] = total;
}

// Units of a slice: at most `units`, and whole slices in the norm's groups.
int slice_units_for(const DownArgs& args, int units) {
  while (args.norm_weight != nullptr && args.k / args.hc % (kUnitK * units) != 0) --units;
  return units;
}
int64_t slices_for(const DownArgs& args, int units) {
  const int of_slice = slice_units_for(args, units);
  return (args.k / kUnitK + of_slice - 1) / of_slice;
}

int64_t pitch_of(const DownArgs& args) { return (args.n + 3) / 4 * 4; }

template <class C>
cudaError_t launch(const DownArgs& args, int units, float* partial, cudaStream_t stream) {
  const int64_t slices = slices_for(args, units), pitch = pitch_of(args), row_tiles = (args.n + kTileRows - 1) / kTileRows;
  const int tile_rows = static_cast<int>((args.n + row_tiles - 1) / row_tiles);
  const SumArgs sums = {args, partial, partial + slices * args.ntok * pitch, pitch};
  TileArgs tile = {{}, {}, sums, slice_units_for(args, units), tile_rows, C::kBf16 ? kBf16Upper : kHalfUpper};
  const CUtensorMapDataType type = C::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (C::kRaw && !make_tensor_map(&tile.x, args.x, type, 2, args.ntok, args.k, kTileTokens, kStepK, CU_TENSOR_MAP_SWIZZLE_128B)) return cudaErrorNotSupported;
  if (!make_tensor_map(&tile.w, args.w, CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, args.n, args.k / kPairK * (kPairBytes / 4), 16, kUnitBytes / 4,
                       CU_TENSOR_MAP_SWIZZLE_NONE))
    return cudaErrorNotSupported;
  const dim3 grid(static_cast<unsigned>(slices), static_cast<unsigned>((args.ntok + kTileTokens - 1) / kTileTokens), static_cast<unsigned>(row_tiles));
  const cudaError_t error = launch_overlapped(down_tiles<C>, grid, C::kThreads, sizeof(Shared<C>), stream, tile);
  if (error != cudaSuccess) return error;
  const unsigned ctas = static_cast<unsigned>((args.ntok * pitch + kAddThreads - 1) / kAddThreads);
  return launch_overlapped(add_slices<typename C::X, C::kNorm>, dim3(ctas), kAddThreads, 0, stream, sums, static_cast<int>(slices));
}

}  // namespace

bool down_fits_tiles(const DownArgs& args) { return args.k > 0 && args.k % (kUnitK * (args.norm_weight ? args.hc : 1)) == 0; }

int64_t down_tiles_workspace_bytes(const DownArgs& args, int units) { return slices_for(args, units) * args.ntok * (pitch_of(args) + 1) * 4; }

cudaError_t launch_down_tiles(const DownArgs& args, int units, void* workspace, cudaStream_t stream) {
  float* partial = static_cast<float*>(workspace);
  return with_float(args.x_type, [&](auto x) {
    return args.norm_weight == nullptr ? launch<Config<decltype(x), false>>(args, units, partial, stream)
                                       : launch<Config<decltype(x), true>>(args, units, partial, stream);
  });
}

}  // namespace mori::gr
