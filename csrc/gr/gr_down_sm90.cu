// y[t, n] = sum_k W[n, k] * xn[t, k] for any number of tokens and a Q8_0 weight, in one launch (contract: gr.h).
//
// Two kernels.
//  cluster: tensor cores. A cluster of 8 CTAs owns 16 weight rows (32 with more than 8 tokens) and splits K; each of the 10 warps of a CTA
//    owns two pairs of blocks (a pair is 68 bytes of a row) per pass. m16n8k16 takes 8 tokens at one price.
//      A = 16 rows of codes, int8 -> fp16 exactly; B = x as hi + lo fp16 after a power of two per (token, block): 22 bits
//      block sum * (d * 2^e) in fp32 -> warps summed in order in shared memory -> CTAs summed in order in
//      the owner of these 8 tokens, which they reach by st.async. Every column is computed alike: a row's bits do not depend on
//      ntok, nor on how many rows a cluster owns.
//    More than 8 tokens: the decoded weight stays in registers while a CTA goes through up to 64 tokens, and each CTA of the
//    cluster sums 8 of them. With the norm, a CTA also sums the squares of its K slice, which lies inside one hc group; the owner
//    scales each group's partial by 1/rms: the norm costs no second pass over x.
//    The weights (and the norm's) are read before griddepcontrol.wait, so they overlap the previous kernel, which must not write
//    them. Bound by latency: 3.5 MB are 0.8 us of bandwidth, a launch 1.5-2.
//  rows: one warp per weight row, any K and any alignment, one token after another; plain fp32.
#include "gr_down_sm90.cuh"

#include "../common/launch_sm90.cuh"

namespace mori::gr {
namespace {

using namespace sm90;

constexpr int kTokens = 8;             // columns of an MMA
constexpr int kSplits = 8;             // CTAs of a cluster, along K
constexpr int kWarps = 10;             // of a CTA, along K
constexpr int kThreads = kWarps * 32;
constexpr int kPairs = 2;              // pairs of blocks of a warp in one pass
constexpr int kBlocks = 2 * kPairs;
constexpr int kCopyBytes = 8;          // rows and pairs start at multiples of 8 when K is a multiple of 128
constexpr int kChunkBytes = kPairs * kPairBytes;
constexpr int kPitch = 160;            // of a staged row: 136 bytes, padded so that 8 rows fall into different banks
constexpr int kPassPairs = kSplits * kWarps * kPairs;  // 160: all of K = 10240 in one pass
static_assert(kChunkBytes % kCopyBytes == 0 && kPitch >= kChunkBytes && kPitch % 16 == 0);

// Shared memory of a CTA. `part` and `squares` are written by all CTAs of the cluster, into the owner's.
template <int kRows, int kBuffers>
struct Shared {
  uint8_t weights[kWarps][kRows][kPitch];
  float warp_sum[kBuffers][kWarps][kRows * kTokens];
  float warp_squares[kBuffers][kWarps][kTokens];
  float part[kSplits][kRows * kTokens];
  float squares[kSplits][kTokens];
  float inverse_rms[kSplits][kTokens];
  uint64_t landed;
};

// x of one block for this lane's token (lane / 4), with the powers of two of tokens 2c and 2c + 1, the columns of its results.
struct SplitBlock {
  Split8 x;
  float scale0, scale1;

  __device__ __forceinline__ void set(const float (&v)[8], int c) {
    const Power power = power_for(max_of_quad(amax8(v)));
    scale0 = __shfl_sync(~0u, power.down, c * 8);
    scale1 = __shfl_sync(~0u, power.down, c * 8 + 4);
    x = split8(v, power.up);
  }
};

// sum += 16 rows of a block times 8 tokens.
__device__ __forceinline__ void multiply_block(float (&sum)[4], const uint32_t (&rows)[2][4], const float (&d)[2], const SplitBlock& block) {
  float high[4], low[4];
  mma_m16n8k16_fp16_first(high, rows[0], block.x.high[0][0], block.x.high[0][1]);
  mma_m16n8k16_fp16_first(low, rows[0], block.x.low[0][0], block.x.low[0][1]);
  mma_m16n8k16_fp16(high, rows[1], block.x.high[1][0], block.x.high[1][1]);
  mma_m16n8k16_fp16(low, rows[1], block.x.low[1][0], block.x.low[1][1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = fmaf(high[i] + low[i], d[i / 2] * (i % 2 ? block.scale1 : block.scale0), sum[i]);
}

template <int kRows>
__device__ __forceinline__ void copy_weights(uint8_t (&staged)[kRows][kPitch], const DownArgs& args, int row0, int first_pair, int pairs, int lane) {
  constexpr int kCopies = kChunkBytes / kCopyBytes;
  const int64_t row_bytes = args.k / kBlock * kBlockBytes, column0 = static_cast<int64_t>(first_pair) * kPairBytes;
  const int valid = max(0, min(kPairs, pairs - first_pair)) * kPairBytes;
  const uint8_t* source = args.w + (valid ? column0 : 0);
#pragma unroll 3
  for (int i = lane; i < kRows * kCopies; i += 32) {
    const int row = i / kCopies, offset = i % kCopies * kCopyBytes;
    cp_async<kCopyBytes>(smem_address(&staged[row][offset]), source + min(static_cast<int64_t>(row0 + row), args.n - 1) * row_bytes + (offset < valid ? offset : 0),
                         offset < valid);
  }
  cp_async_commit();
}

// kMany: up to 64 tokens of a single pass, with the weight decoded once.
template <class X, class Norm, bool kNorm, int kRowTiles, bool kMany>
__global__ void __launch_bounds__(kThreads, kMany ? 1 : 2) __cluster_dims__(kSplits, 1, 1) down_cluster(const DownArgs args) {
  constexpr int kRows = 16 * kRowTiles, kResults = kRows * kTokens;
  constexpr bool kOnePass = kNorm || kMany;
  extern __shared__ __align__(16) uint8_t smem[];
  auto& s = *reinterpret_cast<Shared<kRows, kMany ? 2 : 1>*>(smem);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const int split = blockIdx.x % kSplits, row0 = blockIdx.x / kSplits * kRows;
  const int pairs = static_cast<int>(args.k / kPairK), slice = (split * kWarps + warp) * kPairs;
  const int64_t token0 = static_cast<int64_t>(blockIdx.y) * (kMany ? kSplits * kTokens : kTokens);
  const int tokens = static_cast<int>(min(args.ntok - token0, static_cast<int64_t>(kMany ? kSplits * kTokens : kTokens)));
  const int groups = (tokens + kTokens - 1) / kTokens;  // of 8 tokens, each summed by one CTA
  const X* x = static_cast<const X*>(args.x) + token0 * args.k;

  launch_dependents();
  copy_weights<kRows>(s.weights[warp], args, row0, slice, pairs, lane);
  if (threadIdx.x == 0) {
    mbarrier_init(smem_address(&s.landed), 1);
    mbarrier_arrive_expect(smem_address(&s.landed), kSplits * (sizeof(s.part[0]) + (kNorm ? sizeof(s.squares[0]) : 0)));
    mbarrier_init_fence();
  }
  __syncwarp();
  cluster_arrive_relaxed();
  const Norm* norm_weight = static_cast<const Norm*>(args.norm_weight) + static_cast<int64_t>(slice) * kPairK + c * 8;
  Values<Norm> norm[kBlocks];
#pragma unroll
  for (int b = 0; b < (kNorm && !kMany ? kBlocks : 0); ++b) norm[b].load(norm_weight + b * kBlock);
  PairRows decoded[kMany ? kRowTiles : 1][kMany ? kPairs : 1];
  if constexpr (kMany) {
    cp_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int p = 0; p < kPairs; ++p) decoded[i][p].template load<kPitch>(&s.weights[warp][i * 16][p * kPairBytes], r, c);
  }
  wait_for_dependencies();

  for (int group = 0; group < groups; ++group) {
    float sum[kRowTiles][4] = {}, squares = 0.f;
    for (int first = 0; first < (kOnePass ? 1 : pairs); first += kPassPairs) {
      if (first > 0) {
        __syncwarp();  // the previous pass has been read
        copy_weights<kRows>(s.weights[warp], args, row0, first + slice, pairs, lane);
      }
      Values<X> raw[kBlocks] = {};
      const int token = group * kTokens + r, k0 = (first + slice) * kPairK + c * 8;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        if (token < tokens && (kNorm || k0 + b * kBlock < args.k)) raw[b].load(x + token * args.k + k0 + b * kBlock);
      SplitBlock block[kBlocks];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (kNorm && kMany) norm[b].load(norm_weight + b * kBlock);
        float v[8], block_squares = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          v[i] = raw[b][i];
          if constexpr (kNorm) {
            block_squares = fmaf(v[i], v[i], block_squares);
            v[i] *= norm[b][i];
          }
        }
        squares += block_squares;
        block[b].set(v, c);
      }
      if (!kMany) {
        cp_async_wait<0>();
        __syncwarp();
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          PairRows& rows = decoded[kMany ? i : 0][kMany ? p : 0];
          if (!kMany) rows.template load<kPitch>(&s.weights[warp][i * 16][p * kPairBytes], r, c);
          multiply_block(sum[i], rows.a[0], rows.d[0], block[2 * p]);
          multiply_block(sum[i], rows.a[1], rows.d[1], block[2 * p + 1]);
        }
    }

    // Warps of the CTA, in order.
    const int buffer = kMany ? group % 2 : 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float* mine = s.warp_sum[buffer][warp] + i * 16 * kTokens + r * kTokens + 2 * c;
      *reinterpret_cast<float2*>(mine) = {sum[i][0], sum[i][1]};
      *reinterpret_cast<float2*>(mine + 8 * kTokens) = {sum[i][2], sum[i][3]};
    }
    if constexpr (kNorm) {
      squares += __shfl_xor_sync(~0u, squares, 1);
      squares += __shfl_xor_sync(~0u, squares, 2);
      if (c == 0) s.warp_squares[buffer][warp][r] = squares;
    }
    __syncthreads();
    if (group == 0) cluster_wait();  // every CTA has started: its shared memory may be written

    const uint32_t barrier = cluster_address(smem_address(&s.landed), group);
    constexpr int kVectors = kResults / 4;
    for (int i = threadIdx.x; i < kVectors + (kNorm ? kTokens / 4 : 0); i += kThreads) {
      const bool is_sum = i < kVectors;
      const float* source = is_sum ? &s.warp_sum[buffer][0][4 * i] : &s.warp_squares[buffer][0][4 * (i - kVectors)];
      const int stride = is_sum ? kResults : kTokens;
      float4 total = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 v = *reinterpret_cast<const float4*>(source + w * stride);
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
      float* target = is_sum ? &s.part[split][4 * i] : &s.squares[split][4 * (i - kVectors)];
      st_async(cluster_address(smem_address(target), group), total, barrier);
    }
  }
  if (split >= groups) return;

  // CTAs of the cluster, in order, in the owner of these 8 tokens.
  mbarrier_wait_cluster(smem_address(&s.landed), 0);
  if constexpr (kNorm) {
    const int slices = kSplits / static_cast<int>(args.hc);  // CTAs per group
    for (int i = threadIdx.x; i < kSplits * kTokens; i += kThreads) {
      const int group = i / kTokens / slices, token = i % kTokens;
      float total = 0.f;
      for (int q = 0; q < slices; ++q) total += s.squares[group * slices + q][token];
      s.inverse_rms[i / kTokens][token] = rsqrtf(total / static_cast<float>(args.k / args.hc) + args.eps);
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kResults; i += kThreads) {
    const int row = row0 + i / kTokens, token = i % kTokens;
    float y = 0.f;
#pragma unroll
    for (int q = 0; q < kSplits; ++q) y = kNorm ? fmaf(s.part[q][i], s.inverse_rms[q][token], y) : y + s.part[q][i];
    if (row < args.n && split * kTokens + token < tokens) args.y[(token0 + split * kTokens + token) * args.n + row] = y;
  }
}

// One warp per row, lanes along K, one token after another.
template <class X, class Norm, bool kNorm>
__global__ void __launch_bounds__(256) down_rows(const DownArgs args) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= args.n) return;  // whole warps
  const int64_t blocks = args.k / kBlock, group = kNorm ? args.k / args.hc : args.k;
  const uint8_t* w = args.w + row * blocks * kBlockBytes;
  for (int64_t token = 0; token < args.ntok; ++token) {
    const X* x = static_cast<const X*>(args.x) + token * args.k;
    float y = 0.f;
    for (int64_t start = 0; start < args.k; start += group) {
      float sum = 0.f, squares = 0.f;
      for (int64_t k = start + lane; k < start + group; k += 32) {
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
      y += kNorm ? sum * rsqrtf(squares / static_cast<float>(group) + args.eps) : sum;
    }
    if (lane == 0) args.y[token * args.n + row] = y;
  }
}

template <class X, class Norm, bool kNorm, int kRowTiles, bool kMany>
cudaError_t launch_cluster(const DownArgs& args, cudaStream_t stream) {
  constexpr int kRows = 16 * kRowTiles, kGroup = kMany ? kSplits * kTokens : kTokens;
  const dim3 grid(static_cast<unsigned>((args.n + kRows - 1) / kRows * kSplits), static_cast<unsigned>((args.ntok + kGroup - 1) / kGroup));
  return launch_overlapped(down_cluster<X, Norm, kNorm, kRowTiles, kMany>, grid, kThreads, sizeof(Shared<kRows, kMany ? 2 : 1>), stream, args);
}

}  // namespace

bool down_fits_cluster(const DownArgs& args) {
  if (args.k % (2 * kPairK) != 0 || !aligned(args.w, kCopyBytes) || !aligned(args.x, 16)) return false;
  if (args.norm_weight == nullptr) return true;
  // The norm wants each CTA's slice of K inside one group: a single pass that fills all slices.
  return aligned(args.norm_weight, 16) && args.k == static_cast<int64_t>(kPassPairs) * kPairK && kSplits % args.hc == 0;
}

cudaError_t launch_down_cluster(const DownArgs& args, cudaStream_t stream) {
  const bool one_pass = args.k <= static_cast<int64_t>(kPassPairs) * kPairK;
  return for_types(args, [&](auto x, auto norm, auto has_norm) {
    using X = decltype(x);
    using Norm = decltype(norm);
    if (args.ntok > kTokens && one_pass) return launch_cluster<X, Norm, decltype(has_norm)::value, 2, true>(args, stream);
    return launch_cluster<X, Norm, decltype(has_norm)::value, 1, false>(args, stream);
  });
}

cudaError_t launch_down_rows(const DownArgs& args, cudaStream_t stream) {
  return for_types(args, [&](auto x, auto norm, auto has_norm) {
    down_rows<decltype(x), decltype(norm), decltype(has_norm)::value><<<static_cast<unsigned>((args.n + 7) / 8), 256, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace mori::gr
