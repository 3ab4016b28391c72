// y[t, n] = sum_k W[n, k] * xn[t, k] for a Q8_0 weight, in one launch (contract: gr.h): verify windows of 1 to 8 tokens, and any K.
//
// cluster: tensor cores. A cluster of 8 CTAs owns 48 weight rows and splits K; each of the 10 warps of a CTA owns two pairs of blocks
//   (a pair is 68 bytes of a row). m16n8k16 takes 8 tokens at one price, so 1 token costs what 8 do; more go 8 by 8, each group with its own
//   clusters, which read the weights again.
//     A = codes, int8 -> fp16 exactly; B = x as hi + lo fp16 (22 bits; bf16 and fp16 need no lo) after a power of two per token and warp
//     block sum * d -> warps summed in order in shared memory -> CTAs summed in order, 6 rows by each, where st.async brings them
//   Every token's column is computed alike: a row's bits do not depend on ntok. With the norm, a CTA's slice of K lies inside one hc
//   group and it also sums the squares: each group's result is scaled by 1/rms at the end.
//   The weights (and the norm's) are read and decoded before griddepcontrol.wait, so they overlap the previous kernel, which must
//   not write them: 56 CTAs of one per SM leave room for the next launch to do the same. What is left is latency: x from L2, a chain of
//   products, sums across warps and CTAs; launched alone (5.5 us, H200; 3.6 when it only fetches weights and x), the weights' way from
//   memory to 56 SMs too. Copies issued by all warps, and barriers of 16 rows, so that decoding starts before the last have come: 2.56 us
//   for 1 token, 3.12 for 8, alone 5.5 (one warp, one barrier: 2.90, 3.23, 6.06); with the norm they lost (8 tokens 4.08, else 3.84).
//   Tried and lost (2026-11-30): 16, 32 or 64 rows (x from L2, or SMs with two CTAs), one owner for all rows, every warp's sums straight to
//   the owner, 20 warps, one chain for hi and lo, the next launch later than at the start, x requested before the last 16 rows are decoded
//   (1 token 2.70, alone 5.43) or the last 32 (3.13), groups of 8 tokens one after another in a CTA that keeps the decoded weights (7.4 us
//   at 32 tokens instead of 9.2 by tiles, but slower with a norm).
// rows: one warp per weight row, any K, one token after another; plain fp32.
#include "gr_down_sm90.cuh"

#include "../common/launch_sm90.cuh"
#include "../common/tma_sm90.cuh"

namespace mori::gr {
namespace {

using namespace sm90;

constexpr int kTokens = 8;  // columns of an MMA
constexpr int kRowTiles = 3, kRows = 16 * kRowTiles;
constexpr int kSplits = 8;  // CTAs of a cluster, along K
constexpr int kWarps = 10, kThreads = kWarps * 32;
constexpr int kPairs = 2, kBlocks = 2 * kPairs;  // of a warp
constexpr int kStepK = 4 * kSplits * kPairK;     // 2048: a CTA's part of a row starts and ends at multiples of 16 bytes
constexpr int kMaxK = kSplits * kWarps * kPairs * kPairK;                   // 10240
constexpr int kPitch = kWarps * kPairs * kPairBytes;  // of a staged row: 8 rows x 4 words fall into different banks
constexpr int kVectors = kRows * kTokens / 4, kOwned = kVectors / kSplits;  // float4 of a CTA's sums, and of its share of the results
constexpr int kHc = 4, kGroupSplits = kSplits / kHc;                        // the norm's groups

// Shared memory of a CTA. `part` and `squares` are written by all CTAs of the cluster.
struct Shared {
  uint8_t weights[kRows][kPitch];
  float4 warp_sum[kWarps][kVectors];
  float4 warp_squares[kWarps][kTokens / 4];
  float4 part[kSplits][kOwned];
  float4 squares[kSplits][kTokens / 4];
  uint64_t loaded[kRowTiles], landed;  // the weights, of 16 rows each (with the norm, of all); the other CTAs' sums
};

// 16 rows of a pair, kPitch bytes apart, as A fragments: two MMAs per block, and the d of rows g and g + 8.
struct PairRows {
  uint32_t a[2][2][4];
  float d[2][2];

  __device__ __forceinline__ void load(const uint8_t* rows, int g, int c) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* w = reinterpret_cast<const uint32_t*>(rows + (g + 8 * h) * kPitch);
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

// A lane's 8 values of a block: B fragments of two MMAs, in the order of int8_low_to_half2 and int8_high_to_half2.
struct Split8 {
  uint32_t high[2][2], low[2][2];

  __device__ __forceinline__ Split8(const float (&v)[8], float up) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float v0 = v[4 * j + h] * up, v1 = v[4 * j + h + 2] * up;
        high[j][h] = pack_half2(v0, v1);
        const float2 kept = unpack_half2(high[j][h]);
        low[j][h] = pack_half2(v0 - kept.x, v1 - kept.y);
      }
  }
};

// A block's values of this lane: 4 of each half, so that four lanes read whole sectors.
template <class T>
struct Values8 {
  Values<T, 4> half[2];

  __device__ __forceinline__ void load(const T* p) { half[0].load(p), half[1].load(p + kBlock / 2); }
  __device__ __forceinline__ float operator[](int i) const { return half[i / 4][i % 4]; }
};

// kCount float4, `stride` apart, in order.
template <int kCount>
__device__ __forceinline__ float4 sum_of(const float4* first, int stride) {
  float4 total = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float4 v = first[i * stride];
    total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
  }
  return total;
}

template <class X, class Norm, bool kNorm>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kSplits, 1, 1) down_cluster(const DownArgs args) {
  extern __shared__ __align__(16) uint8_t smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem);
  constexpr bool kLow = kNorm || sizeof(X) == 4;
  constexpr int kEarlyTiles = kNorm ? 2 : kRowTiles;  // decoded before the wait, as registers allow
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int split = blockIdx.x % kSplits, split_pairs = static_cast<int>(args.k / kPairK) / kSplits, pair0 = split * split_pairs;
  const bool active = warp * kPairs < split_pairs;  // warps past the end of a short K multiply zeros
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / kSplits) * kRows, token0 = static_cast<int64_t>(blockIdx.y) * kTokens;
  const int tokens = static_cast<int>(min(args.ntok - token0, static_cast<int64_t>(kTokens)));
  const int64_t k = static_cast<int64_t>(pair0 + (active ? warp * kPairs : 0)) * kPairK + c * 4;
  const uint32_t loaded = smem_address(s.loaded), landed = smem_address(&s.landed);

  launch_dependents();
  if (args.copied) wait_for_dependencies();
  const int64_t row_bytes = args.k / kBlock * kBlockBytes;
  const uint32_t bytes = split_pairs * kPairBytes;
  const auto load_row = [&](int row, uint32_t barrier) {
    const uint8_t* source = args.w + min(row0 + row, args.n - 1) * row_bytes + static_cast<int64_t>(pair0) * kPairBytes;
    bulk_load(smem_address(s.weights[row]), source, bytes, barrier);
  };
  // A warp issues its lanes' copies one after another, so all warps share them; with the norm, whose weights they load meanwhile, one does.
  if constexpr (kNorm) {
    if (warp == 0) {
      if (lane == 0) {
        mbarrier_init(loaded, 1);
        mbarrier_init(landed, 1);
        mbarrier_init_fence();
      }
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive_expect(loaded, kRows * bytes);
        mbarrier_arrive_expect(landed, sizeof(s.part) + sizeof(s.squares));
      }
      __syncwarp();
      for (int row = lane; row < kRows; row += 32) load_row(row, loaded);
    }
    __syncthreads();
  } else {
    if (threadIdx.x == 0) {
      for (int m = 0; m < kRowTiles; ++m) mbarrier_init(loaded + m * 8, 1);
      mbarrier_init(landed, 1);
      mbarrier_init_fence();
      for (int m = 0; m < kRowTiles; ++m) mbarrier_arrive_expect(loaded + m * 8, 16 * bytes);
      mbarrier_arrive_expect(landed, sizeof(s.part));
    }
    __syncthreads();
    if (const int row = lane * kWarps + warp; row < kRows) load_row(row, loaded + row / 16 * 8);
    __syncwarp();
  }
  cluster_arrive_relaxed();
  Values8<Norm> norm[kBlocks];
#pragma unroll
  for (int b = 0; b < (kNorm ? kBlocks : 0); ++b) norm[b].load(static_cast<const Norm*>(args.norm_weight) + k + b * kBlock);
  PairRows rows[kRowTiles][kPairs];
  const auto decode = [&](int m, int p) { rows[m][p].load(&s.weights[m * 16][(warp * kPairs + p) * kPairBytes], g, c); };
#pragma unroll
  for (int m = 0; m < kEarlyTiles; ++m) {
    if (m == 0 || !kNorm) mbarrier_wait(loaded + m * 8, 0);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) decode(m, p);
  }
  cluster_wait();  // every CTA has started: its shared memory may be written
  wait_for_dependencies();

  Values8<X> raw[kBlocks] = {};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
    if (g < tokens && active) raw[b].load(static_cast<const X*>(args.x) + (token0 + g) * args.k + k + b * kBlock);
  float v[kBlocks][8], amax = 0.f, squares = 0.f;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float block_squares = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[b][i] = raw[b][i];
      if constexpr (kNorm) {
        block_squares = fmaf(v[b][i], v[b][i], block_squares);
        v[b][i] *= norm[b][i];
      }
      amax = fmaxf(amax, fabsf(v[b][i]));
    }
    squares += block_squares;
  }
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
  // The largest value is scaled into [2^10, 2^11): sums of 16 products stay far from fp16's end, residuals from its start.
  const uint32_t exponent = max(__float_as_uint(amax) >> 23, 11u);
  const float up = __uint_as_float((264u - exponent) << 23), down = __uint_as_float((exponent - 10u) << 23);
  const float scale[2] = {__shfl_sync(~0u, down, c * 8), __shfl_sync(~0u, down, c * 8 + 4)};  // of tokens 2c and 2c + 1
  float sum[kRowTiles][4] = {};
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const Split8 xs[2] = {Split8(v[2 * p], up), Split8(v[2 * p + 1], up)};
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if (m >= kEarlyTiles) decode(m, p);
      const PairRows& w = rows[m][p];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        float high[4], low[4];
        mma_m16n8k16_fp16_first(high, w.a[b][0], xs[b].high[0][0], xs[b].high[0][1]);
        if (kLow) mma_m16n8k16_fp16_first(low, w.a[b][0], xs[b].low[0][0], xs[b].low[0][1]);
        mma_m16n8k16_fp16(high, w.a[b][1], xs[b].high[1][0], xs[b].high[1][1]);
        if (kLow) mma_m16n8k16_fp16(low, w.a[b][1], xs[b].low[1][0], xs[b].low[1][1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][i] = fmaf(kLow ? high[i] + low[i] : high[i], w.d[b][i / 2], sum[m][i]);
      }
    }
  }

  // Warps of the CTA, in order; each float4 goes to its owner.
  float* mine = reinterpret_cast<float*>(s.warp_sum[warp]) + g * kTokens + 2 * c;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float2*>(mine + (m * 16 + h * 8) * kTokens) =
          active ? float2{sum[m][2 * h] * scale[0], sum[m][2 * h + 1] * scale[1]} : float2{};
  if constexpr (kNorm) {
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    if (c == 0) reinterpret_cast<float*>(s.warp_squares[warp])[g] = squares;
  }
  __syncthreads();
  const int i = threadIdx.x;
  constexpr int kSquares = kNorm ? kSplits * kTokens / 4 : 0;  // to every CTA
  static_assert(kVectors + kSquares <= kThreads);
  if (i < kVectors) {
    const int owner = i / kOwned;
    st_async(cluster_address(smem_address(&s.part[split][i % kOwned]), owner), sum_of<kWarps>(&s.warp_sum[0][i], kVectors), cluster_address(landed, owner));
  } else if (i < kVectors + kSquares) {
    const int owner = (i - kVectors) / (kTokens / 4), half = i % (kTokens / 4);
    st_async(cluster_address(smem_address(&s.squares[split][half]), owner), sum_of<kWarps>(&s.warp_squares[0][half], kTokens / 4),
             cluster_address(landed, owner));
  }

  // CTAs of the cluster, in order, in the owner of these rows.
  if (i >= (kOwned * 4 + 31) / 32 * 32) return;
  mbarrier_wait_cluster(landed, 0);
  const int token = i % kTokens;
  const int64_t row = row0 + split * (kOwned * 4 / kTokens) + i / kTokens;
  if (i >= kOwned * 4 || row >= args.n || token >= tokens) return;
  const float* part = reinterpret_cast<const float*>(s.part) + i;
  float y = 0.f;
  if constexpr (kNorm) {
    float group_sum[kHc] = {}, group_squares[kHc] = {};
#pragma unroll
    for (int q = 0; q < kSplits; ++q) {
      group_sum[q / kGroupSplits] += part[q * kOwned * 4];
      group_squares[q / kGroupSplits] += reinterpret_cast<const float*>(s.squares[q])[token];
    }
    y = normed_sum<kHc>(group_sum, group_squares, static_cast<const X*>(args.x) + (token0 + token) * args.k, args.k / kHc, args.eps);
  } else {
#pragma unroll
    for (int q = 0; q < kSplits; ++q) y += part[q * kOwned * 4];
  }
  args.y[(token0 + token) * args.n + row] = y;
}

// One warp per row, lanes along K, one token after another.
template <class X, class Norm, bool kNorm>
__global__ void __launch_bounds__(256) down_rows(const DownArgs args) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= args.n) return;  // whole warps
  const int64_t blocks = args.k / kBlock, size = kNorm ? args.k / args.hc : args.k;
  const uint8_t* w = args.w + row * blocks * kBlockBytes;
  for (int64_t token = 0; token < args.ntok; ++token) {
    const X* x = static_cast<const X*>(args.x) + token * args.k;
    float y = 0.f;
    for (int64_t start = 0; start < args.k; start += size) {
      float sum = 0.f, squares = 0.f;
      for (int64_t k = start + lane; k < start + size; k += 32) {
        const uint8_t* block = w + k / kBlock * kBlockBytes;
        const float d = __half2float(__ushort_as_half(static_cast<uint16_t>(block[0] | block[1] << 8)));
        float v = to_float(x[k]);
        if constexpr (kNorm) {
          squares = fmaf(v, v, squares);
          v *= to_float(static_cast<const Norm*>(args.norm_weight)[k]);
        }
        sum = fmaf(d * static_cast<float>(static_cast<int8_t>(block[2 + k % kBlock])), v, sum);
      }
      for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(~0u, sum, offset);
        squares += __shfl_xor_sync(~0u, squares, offset);
      }
      y += kNorm ? normed_sum<1>({sum}, {squares}, x + start, size, args.eps) : sum;
    }
    if (lane == 0) args.y[token * args.n + row] = y;
  }
}

// Calls launch(x element, norm element, has norm) with the types behind the void pointers.
template <class Launch>
cudaError_t for_types(const DownArgs& args, Launch launch) {
  return sm90::with_float(args.x_type, [&](auto x) {
    if (args.norm_weight == nullptr) return launch(x, float{}, std::false_type{});
    return sm90::with_float(args.norm_type, [&](auto norm) { return launch(x, norm, std::true_type{}); });
  });
}

}  // namespace

bool down_fits_cluster(const DownArgs& args) {
  return args.k % kStepK == 0 && args.k > 0 && args.k <= kMaxK && (args.norm_weight == nullptr || args.hc == kHc);
}

cudaError_t launch_down_cluster(const DownArgs& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((args.n + kRows - 1) / kRows * kSplits), static_cast<unsigned>((args.ntok + kTokens - 1) / kTokens));
  return for_types(args, [&](auto x, auto norm, auto has_norm) {
    return launch_overlapped(down_cluster<decltype(x), decltype(norm), decltype(has_norm)::value>, grid, kThreads, sizeof(Shared), stream, args);
  });
}

cudaError_t launch_down_rows(const DownArgs& args, cudaStream_t stream) {
  return for_types(args, [&](auto x, auto norm, auto has_norm) {
    down_rows<decltype(x), decltype(norm), decltype(has_norm)::value><<<static_cast<unsigned>((args.n + 7) / 8), 256, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace mori::gr
