// y[t, n] = sum_k W[n, k] * xn[t, k] for many tokens and a Q8_0 weight (contract: gr.h): tiles on the tensor cores.
//
// A CTA computes 192 rows x 64 tokens over a slice of K; a second kernel adds the slices in order. Steps of 64 along K:
//   3 consumer warpgroups, 64 rows each: a warp copies the 68 bytes of its 16 rows by cp.async, 4 steps ahead; int8 -> fp16 exactly
//     is operand A in registers; wgmma m64n64k16; a block's fp32 sum times d is added to the result
//   8 producer warps: x, loaded ahead, as hi + lo fp16 (22 bits; bf16 and fp16 need no lo) is operand B in shared memory.
//     A token's values are scaled by a power of two for the largest one so far; when that grows, consumers rescale the result.
// With the norm, a slice lies inside one hc group: producers also sum the squares, and the second kernel scales by 1/rms.
// A row's bits depend on the length of a slice, not on ntok. Bound by shared memory at 1024 tokens: its pipe is 85% busy (ncu, H200,
// 2026-11-30), half of that with the scattered 4-byte writes of cp.async; issue slots are 58% busy. Tried and lost: mma.sync.
#include "gr_down_sm90.cuh"

#include "../common/launch_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "../common/wgmma_sm90.cuh"

namespace mori::gr {
namespace {

using namespace sm90;

constexpr int kTileTokens = 64, kTileRows = 192;
constexpr int kConsumers = 12, kProducers = 8, kThreads = (kConsumers + kProducers) * 32;  // warps
constexpr int kConsumerRegisters = 112, kProducerRegisters = 72;  // of a thread; 96 each at the launch
constexpr int kStages = 4;                                        // of x
constexpr int kCopies = 4;                                        // of a consumer warp's weights
constexpr int kPitch = 80;  // of a staged row of 68 bytes: 8 rows x 4 lanes fall into different banks
constexpr int kUnits = kTileTokens / (kProducers * 4);  // tokens of a producer thread

struct Stage {
  uint8_t x[2][kTileTokens][128];  // [hi, lo]: rows of 64 fp16, in the 128-byte swizzle
};
struct Shared {
  Stage stage[kStages];
  uint8_t weights[kConsumers][kCopies][16][kPitch];
  float ratio[kStages][kTileTokens];   // what the tokens' results are multiplied by before this step
  uint8_t grown[kStages][8];           // whether a warp's ratios are not all 1
  float scale[kTileTokens];            // of the finished results
  uint64_t full[kStages], empty[kStages];
};

template <int kCount>
__device__ __forceinline__ void registers_increase() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount)); }
template <int kCount>
__device__ __forceinline__ void registers_decrease() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount)); }

struct TileArgs {
  DownArgs down;
  float* partial;  // [slices][ntok][n]
  float* squares;  // [slices][ntok]
  int slice_pairs;
};

// A token's 64 values are spread over 8 lanes: 4 of each block, those of one word of codes. A warp writes rows 0, 1, 4, 5 or 2, 3, 6, 7 of
// 8 tokens at once, which fall into different banks. Rows and steps past the end repeat the last one.
template <class X, class Norm, bool kNorm, bool kLow>
__device__ __forceinline__ void produce(Shared& s, const TileArgs& tile, int64_t token0, int first, int pairs) {
  const DownArgs& args = tile.down;
  const int warp = threadIdx.x / 32 - kConsumers, lane = threadIdx.x % 32, word = lane % 8;
  const int row4 = (lane / 8 & 1) + lane / 16 * 4, token_base = warp * kUnits * 4 + row4;  // token of unit u: + u / 2 * 8 + u % 2 * 2
  constexpr int kLoads = kNorm ? 1 : 2;  // steps ahead, as registers allow
  const int64_t k0 = static_cast<int64_t>(first) * kPairK + word * 4;
  const X* row[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) row[u] = static_cast<const X*>(args.x) + min(token0 + token_base + u / 2 * 8 + u % 2 * 2, args.ntok - 1) * args.k + k0;
  const Norm* norm = static_cast<const Norm*>(args.norm_weight) + k0;
  Values<X, 4> ahead[kLoads][kUnits][2];
  Values<Norm, 4> norm_ahead[2];
  auto load = [&](Values<X, 4>(&values)[2], int u, int i) {
#pragma unroll
    for (int b = 0; b < 2; ++b) values[b].load(row[u] + min(i, pairs - 1) * kPairK + b * kBlock);
  };
  auto load_norm = [&](int i) {
#pragma unroll
    for (int b = 0; b < (kNorm ? 2 : 0); ++b) norm_ahead[b].load(norm + min(i, pairs - 1) * kPairK + b * kBlock);
  };
  int exponent[kUnits];
  float squares[kUnits] = {};
  load_norm(0);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    exponent[u] = 11;
#pragma unroll
    for (int p = 0; p < kLoads; ++p) load(ahead[p][u], u, p);
  }
  uint32_t at[4];  // of [block][half] in the swizzled rows of even units; odd ones are 2 rows further
#pragma unroll
  for (int j = 0; j < 4; ++j) at[j] = token_base * 128 + (((j / 2 * 4 + word / 4 * 2 + j % 2) ^ row4) * 16 + word % 4 * 4);
  for (int i0 = 0; i0 < pairs; i0 += kLoads) {
#pragma unroll
    for (int p = 0; p < kLoads; ++p) {
      const int i = i0 + p, ring = i % kStages;
      if (i >= pairs) break;
      uint8_t* high = s.stage[ring].x[0][0];
      mbarrier_wait(smem_address(&s.empty[ring]), i / kStages % 2 ^ 1);
      bool grown = false;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const int token = token_base + u / 2 * 8 + u % 2 * 2;
        float v[2][4], amax = 0.f;
#pragma unroll
        for (int b = 0; b < 2; ++b)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            v[b][j] = ahead[p][u][b][j];
            if constexpr (kNorm) {
              squares[u] = fmaf(v[b][j], v[b][j], squares[u]);
              v[b][j] *= norm_ahead[b][j];
            }
            amax = fmaxf(amax, fabsf(v[b][j]));
          }
        load(ahead[p][u], u, i + kLoads);
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
        const int old = exponent[u];
        exponent[u] = max(static_cast<int>(__float_as_uint(amax) >> 23), old);
        grown |= exponent[u] != old;
        s.ratio[ring][token] = __int_as_float(max(127 + old - exponent[u], 0) << 23);
        const float up = __int_as_float((264 - exponent[u]) << 23);
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // the order of int8_low_to_half2, int8_high_to_half2
          const float v0 = v[j / 2][j % 2] * up, v1 = v[j / 2][j % 2 + 2] * up;
          uint8_t* to = high + (u % 2 ? at[j] ^ 32 : at[j]) + u / 2 * 1024 + u % 2 * 256;
          const uint32_t packed = pack_half2(v0, v1);
          *reinterpret_cast<uint32_t*>(to) = packed;
          if constexpr (kLow) {
            const float2 kept = unpack_half2(packed);
            *reinterpret_cast<uint32_t*>(to + sizeof(s.stage[0].x[0])) = pack_half2(v0 - kept.x, v1 - kept.y);
          }
        }
      }
      load_norm(i + 1);
      grown = __any_sync(~0u, grown);
      if (lane == 0) s.grown[ring][warp] = grown;
      if (i == pairs - 1)
#pragma unroll
        for (int u = 0; u < kUnits; ++u) s.scale[token_base + u / 2 * 8 + u % 2 * 2] = __int_as_float((exponent[u] - 10) << 23);
      fence_async_shared();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem_address(&s.full[ring]));
    }
  }
  if constexpr (kNorm) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float total = squares[u];
      for (int offset = 1; offset < 8; offset *= 2) total += __shfl_xor_sync(~0u, total, offset);
      const int64_t token = token0 + token_base + u / 2 * 8 + u % 2 * 2;
      if (word == 0 && token < args.ntok && blockIdx.z == 0) tile.squares[blockIdx.x * args.ntok + token] = total;
    }
  }
}

// The 16 rows of a warp, some steps ahead. 8 lanes copy words 0..15 of a row, and the last words go together.
struct Copy {
  const uint8_t* source[5];
  uint32_t target[2];

  __device__ __forceinline__ Copy(Shared& s, const DownArgs& args, int64_t row0, int first, int warp, int lane) {
    const int64_t row_bytes = args.k / kBlock * kBlockBytes, column = static_cast<int64_t>(first) * kPairBytes;
#pragma unroll
    for (int j = 0; j < 5; ++j)
      source[j] = args.w + min(row0 + (j < 4 ? j * 4 + lane / 8 : lane % 16), args.n - 1) * row_bytes + column + (j < 4 ? lane % 8 * 4 : 64);
    target[0] = smem_address(&s.weights[warp][0][lane / 8][lane % 8 * 4]);
    target[1] = smem_address(&s.weights[warp][0][lane % 16][64]);
  }

  // The next step, into copy i % kCopies.
  __device__ __forceinline__ void step(int i, int pairs, int lane) {
    if (i < pairs) {
      const uint32_t copy = i % kCopies * sizeof(Shared::weights[0][0]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        cp_async<4>(target[0] + copy + j * 4 * kPitch, source[j]);
        cp_async<4>(target[0] + copy + j * 4 * kPitch + 32, source[j] + 32);
      }
      if (lane < 16) cp_async<4>(target[1] + copy, source[4]);
#pragma unroll
      for (const uint8_t*& p : source) p += kPairBytes;
    }
    cp_async_commit();
  }
};

// Rows g and g + 8 of a step: A fragments of two products per block, and their d.
struct Codes {
  uint32_t a[2][2][4];
  float d[2][2];

  __device__ __forceinline__ void load(const uint8_t (&rows)[16][kPitch], int g, int c) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* w = reinterpret_cast<const uint32_t*>(rows[g + 8 * h]);
      d[0][h] = unpack_half2(w[0]).x, d[1][h] = unpack_half2(w[8]).y;  // block 0 starts after 2 bytes of d, block 1 after 36
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t word[2] = {__funnelshift_r(w[4 * j + c], w[4 * j + c + 1], 16), w[9 + 4 * j + c]};
#pragma unroll
        for (int b = 0; b < 2; ++b) a[b][j][h] = int8_low_to_half2(word[b]), a[b][j][2 + h] = int8_high_to_half2(word[b]);
      }
    }
  }
};

template <bool kLow>
__device__ __forceinline__ void consume(Shared& s, const TileArgs& tile, Copy& copy, int64_t token0, int64_t row0, int pairs) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  float sum[kTileTokens / 2] = {};  // [8 tokens][row g or g + 8][token 2c or 2c + 1]
  for (int i = 0; i < pairs; ++i) {
    const int ring = i % kStages;
    Codes codes;
    cp_async_wait<kCopies - 2>();
    __syncwarp();
    codes.load(s.weights[warp][i % kCopies], g, c);
    copy.step(i + kCopies - 1, pairs, lane);
    mbarrier_wait(smem_address(&s.full[ring]), i / kStages % 2);
    if (*reinterpret_cast<const uint64_t*>(s.grown[ring]) != 0) {
#pragma unroll
      for (int j = 0; j < kTileTokens / 8; ++j) {
        const float2 ratio = *reinterpret_cast<const float2*>(&s.ratio[ring][8 * j + 2 * c]);
        sum[4 * j] *= ratio.x, sum[4 * j + 1] *= ratio.y, sum[4 * j + 2] *= ratio.x, sum[4 * j + 3] *= ratio.y;
      }
    }
    const uint32_t high = wgmma_descriptor_low(smem_address(s.stage[ring].x[0])), low = wgmma_descriptor_low(smem_address(s.stage[ring].x[1]));
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      float part[kTileTokens / 2];
      wgmma_fence();
      wgmma_fp16(part, codes.a[b][0], high + 4 * b, false);
      wgmma_fp16(part, codes.a[b][1], high + 4 * b + 2, true);
      if constexpr (kLow) {
        wgmma_fp16(part, codes.a[b][0], low + 4 * b, true);
        wgmma_fp16(part, codes.a[b][1], low + 4 * b + 2, true);
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < kTileTokens / 2; ++j) sum[j] = fmaf(part[j], codes.d[b][j / 2 % 2], sum[j]);
    }
    if (lane == 0) mbarrier_arrive(smem_address(&s.empty[ring]));
  }
  float* partial = tile.partial + blockIdx.x * tile.down.ntok * tile.down.n;
#pragma unroll
  for (int j = 0; j < kTileTokens / 2; ++j) {
    const int column = j / 4 * 8 + 2 * c + j % 2;
    const int64_t row = row0 + g + j / 2 % 2 * 8, token = token0 + column;
    if (row < tile.down.n && token < tile.down.ntok) partial[token * tile.down.n + row] = sum[j] * s.scale[column];
  }
}

// Grid: slices of K, groups of 64 tokens, groups of 192 rows.
template <class X, class Norm, bool kNorm>
__global__ void __launch_bounds__(kThreads, 1) down_tiles(const TileArgs tile) {
  extern __shared__ __align__(1024) uint8_t smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem);
  constexpr bool kLow = kNorm || sizeof(X) == 4;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int64_t token0 = static_cast<int64_t>(blockIdx.y) * kTileTokens, row0 = static_cast<int64_t>(blockIdx.z) * kTileRows + warp * 16;
  const int first = blockIdx.x * tile.slice_pairs, pairs = min(tile.slice_pairs, static_cast<int>(tile.down.k / kPairK) - first);
  launch_dependents();
  if (threadIdx.x == 0)
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&s.full[i]), kProducers);
      mbarrier_init(smem_address(&s.empty[i]), kConsumers);
    }
  __syncthreads();
  if (warp >= kConsumers) {
    registers_decrease<kProducerRegisters>();
    wait_for_dependencies();
    produce<X, Norm, kNorm, kLow>(s, tile, token0, first, pairs);
  } else {
    registers_increase<kConsumerRegisters>();
    if (tile.down.copied) wait_for_dependencies();
    Copy copy(s, tile.down, row0, first, warp, lane);
#pragma unroll
    for (int i = 0; i < kCopies - 1; ++i) copy.step(i, pairs, lane);
    consume<kLow>(s, tile, copy, token0, row0, pairs);
  }
}

// Slices in order; each group's by its 1/rms.
template <class X, bool kNorm>
__global__ void __launch_bounds__(256) add_slices(const TileArgs tile, int slices) {
  launch_dependents();
  const DownArgs& args = tile.down;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x, count = args.ntok * args.n, token = i / args.n;
  wait_for_dependencies();
  if (i >= count) return;
  const int group_slices = kNorm ? slices / static_cast<int>(args.hc) : slices;
  const X* x = static_cast<const X*>(args.x) + token * args.k;
  float y = 0.f;
  for (int first = 0; first < slices; first += group_slices) {
    float sum = 0.f, squares = 0.f;
#pragma unroll 8
    for (int q = first; q < first + group_slices; ++q) {
      sum += tile.partial[q * count + i];
      if (kNorm) squares += tile.squares[q * args.ntok + token];
    }
    const int64_t size = args.k / (kNorm ? args.hc : 1);
    y += kNorm ? normed_sum<1>({sum}, {squares}, x + first / group_slices * size, size, args.eps) : sum;
  }
  args.y[i] = y;
}

// Pairs of blocks in a slice: about 128 CTAs for 324 rows of K = 10240, and whole slices in the norm's groups.
int slice_pairs_for(const DownArgs& args) {
  int pairs = args.ntok <= 128 ? 5 : args.ntok <= 256 ? 10 : args.ntok <= 512 ? 20 : 40;
  while (args.norm_weight != nullptr && args.k / args.hc % (kPairK * pairs) != 0) --pairs;
  return pairs;
}
int64_t slices_for(const DownArgs& args) { return (args.k / kPairK + slice_pairs_for(args) - 1) / slice_pairs_for(args); }

}  // namespace

bool down_fits_tiles(const DownArgs& args) { return args.k > 0 && args.k % (kPairK * (args.norm_weight ? args.hc : 1)) == 0; }

int64_t down_tiles_workspace_bytes(const DownArgs& args) { return slices_for(args) * args.ntok * (args.n + 1) * 4; }

cudaError_t launch_down_tiles(const DownArgs& args, void* workspace, cudaStream_t stream) {
  const int64_t slices = slices_for(args), count = args.ntok * args.n;
  float* partial = static_cast<float*>(workspace);
  const TileArgs tile = {args, partial, partial + slices * count, slice_pairs_for(args)};
  const dim3 grid(static_cast<unsigned>(slices), static_cast<unsigned>((args.ntok + kTileTokens - 1) / kTileTokens),
                  static_cast<unsigned>((args.n + kTileRows - 1) / kTileRows));
  return for_types(args, [&](auto x, auto norm, auto has_norm) {
    constexpr bool kNorm = decltype(has_norm)::value;
    const cudaError_t error = launch_overlapped(down_tiles<decltype(x), decltype(norm), kNorm>, grid, kThreads, sizeof(Shared), stream, tile);
    if (error != cudaSuccess) return error;
    return launch_overlapped(add_slices<decltype(x), kNorm>, dim3(static_cast<unsigned>((count + 255) / 256)), 256, 0, stream, tile, static_cast<int>(slices));
  });
}

}  // namespace mori::gr
