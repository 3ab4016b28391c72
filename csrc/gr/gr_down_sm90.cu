// y[t, n] = sum_k W[n, k] * xn[t, k] for up to 8 tokens and a Q8_0 weight, in one launch (contract: gr.h).
//
// Two kernels.
//  cluster: tensor cores. A cluster of 8 CTAs owns 16 weight rows and splits K; each of the 10 warps of a CTA owns two pairs
//    of blocks (a pair is 68 bytes of a row) per pass. m16n8k16 takes 8 tokens at one price, so 1 token costs what 8 do.
//      A = 16 rows of codes, int8 -> fp16 exactly; B = x as hi + lo fp16 after a power of two per (token, block): 22 bits
//      block sum * (d * 2^e) in fp32 -> warps summed in order in shared memory -> CTAs summed in order in the leader,
//      which they reach by st.async. Every token's column is computed alike: a row's bits do not depend on ntok.
//    With the norm, a CTA also sums the squares of its K slice, which lies inside one hc group; the leader scales each
//    group's partial by 1/rms: the norm costs no second pass over x.
//    Phases: copy weights (before griddepcontrol.wait, so they overlap the previous kernel; that kernel must not write W)
//      -> load x, split -> products -> reduce. Bound by latency: 3.5 MB are 0.8 us of bandwidth, a launch 1.5-2.
//  rows: one warp per weight row, any K and any alignment, one token after another; plain fp32.
#include "gr_sm90.h"

#include "../common/launch_sm90.cuh"
#include "../common/sm90.cuh"

namespace mori::gr {
namespace {

using namespace sm90;

constexpr int kBlock = 32, kBlockBytes = 34;
constexpr int kTokens = 8;             // columns of an MMA
constexpr int kRows = 16;              // weight rows of a cluster
constexpr int kSplits = 8;             // CTAs of a cluster, along K
constexpr int kWarps = 10;             // of a CTA, along K
constexpr int kPairs = 2;              // pairs of blocks of a warp in one pass
constexpr int kPairBytes = 2 * kBlockBytes;
constexpr int kPairK = 2 * kBlock;
constexpr int kCopyBytes = 8;          // rows and pairs start at multiples of 8 when K is a multiple of 128
constexpr int kChunkBytes = kPairs * kPairBytes;
constexpr int kPitch = 160;            // of a staged row: 136 bytes, padded so that 8 rows fall into different banks
constexpr int kPassPairs = kSplits * kWarps * kPairs;  // 160: all of K = 10240 in one pass

// Shared memory of a CTA. `part` and `squares` are written by all CTAs of the cluster, into the leader's.
struct Shared {
  uint8_t weights[kWarps][kRows][kPitch];
  float warp_sum[kWarps][kRows * kTokens];
  float warp_squares[kWarps][kTokens];
  float part[kSplits][kRows * kTokens];
  float squares[kSplits][kTokens];
  float inverse_rms[kSplits][kTokens];
  uint64_t landed;
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");
static_assert(kChunkBytes % kCopyBytes == 0 && kPitch >= kChunkBytes && kPitch % 16 == 0);

// Eight consecutive values. `p` is 16-byte aligned (K is a multiple of 128 and the tensor's base is checked).
template <class T>
__device__ __forceinline__ void load8(float (&out)[8], const T* p) {
  alignas(16) T raw[8];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(raw) / 16); ++i) reinterpret_cast<uint4*>(raw)[i] = __ldg(reinterpret_cast<const uint4*>(p) + i);
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = to_float(raw[i]);
}

// x of one block for this lane's token (lane / 4) and 8 of its 32 k, as the B fragments of two MMAs.
struct SplitBlock {
  uint32_t high[2][2], low[2][2];
  float scale0, scale1;  // powers of two of tokens 2c and 2c + 1, the columns of this lane's results
};

__device__ __forceinline__ SplitBlock split_block(const float (&v)[8], int c) {
  float amax = 0.f;
#pragma unroll
  for (float value : v) amax = fmaxf(amax, fabsf(value));
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
  // The block's maximum is scaled into [2^10, 2^11): sums of 16 products stay far from fp16's end, residuals from its start.
  const uint32_t exponent = max(__float_as_uint(amax) >> 23, 11u);
  const float up = __uint_as_float((264u - exponent) << 23), down = __uint_as_float((exponent - 10u) << 23);
  SplitBlock s;
  s.scale0 = __shfl_sync(~0u, down, c * 8);
  s.scale1 = __shfl_sync(~0u, down, c * 8 + 4);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float a[4] = {v[4 * j] * up, v[4 * j + 2] * up, v[4 * j + 1] * up, v[4 * j + 3] * up};  // the order of int8_*_to_half2
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s.high[j][h] = pack_half2(a[2 * h], a[2 * h + 1]);
      const float2 kept = unpack_half2(s.high[j][h]);
      s.low[j][h] = pack_half2(a[2 * h] - kept.x, a[2 * h + 1] - kept.y);
    }
  }
  return s;
}

// The 8 codes of this lane in both blocks of a pair, for one row. Block 0 starts after 2 bytes of d, block 1 after 36.
struct PairCodes {
  uint32_t word[2][2];
  float d[2];
};

__device__ __forceinline__ PairCodes load_pair(const uint8_t* row, int c) {
  const uint32_t* a = reinterpret_cast<const uint32_t*>(row);
  PairCodes p;
  p.word[0][0] = __funnelshift_r(a[2 * c], a[2 * c + 1], 16);
  p.word[0][1] = __funnelshift_r(a[2 * c + 1], a[2 * c + 2], 16);
  p.word[1][0] = a[9 + 2 * c];
  p.word[1][1] = a[10 + 2 * c];
  p.d[0] = unpack_half2(a[0]).x;
  p.d[1] = unpack_half2(a[8]).y;
  return p;
}

__device__ __forceinline__ void copy_weights(Shared& s, const DownArgs& args, int row0, int first_pair, int pairs, int warp, int lane) {
  constexpr int kCopies = kChunkBytes / kCopyBytes;
  const int64_t row_bytes = args.k / kBlock * kBlockBytes;
  for (int i = lane; i < kRows * kCopies; i += 32) {
    const int row = i / kCopies, offset = i % kCopies * kCopyBytes;
    const int64_t source_row = min(static_cast<int64_t>(row0 + row), args.n - 1);
    const int64_t column = static_cast<int64_t>(first_pair) * kPairBytes + offset;
    const bool valid = column < static_cast<int64_t>(pairs) * kPairBytes;
    cp_async<kCopyBytes>(smem_address(&s.weights[warp][row][offset]), args.w + source_row * row_bytes + (valid ? column : 0), valid);
  }
  cp_async_commit();
}

template <class X, class Norm, bool kNorm>
__global__ void __launch_bounds__(kWarps * 32) __cluster_dims__(kSplits, 1, 1) down_cluster(const DownArgs args) {
  __shared__ alignas(16) Shared s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const int split = blockIdx.x % kSplits, row0 = blockIdx.x / kSplits * kRows;
  const int pairs = static_cast<int>(args.k / kPairK);
  const int token0 = blockIdx.y * kTokens, tokens = min(kTokens, static_cast<int>(args.ntok) - token0);
  const int group_pairs = (split * kWarps + warp) * kPairs;
  const X* x = static_cast<const X*>(args.x) + static_cast<int64_t>(token0) * args.k;

  copy_weights(s, args, row0, group_pairs, pairs, warp, lane);
  if (threadIdx.x == 0) {
    mbarrier_init(smem_address(&s.landed), 1);
    mbarrier_arrive_expect(smem_address(&s.landed), kSplits * (sizeof(s.part[0]) + (kNorm ? sizeof(s.squares[0]) : 0)));
    mbarrier_init_fence();
  }
  cluster_arrive();
  launch_dependents();
  wait_for_dependencies();

  float sum[4] = {}, squares = 0.f;
  for (int first = 0; first < pairs; first += kPassPairs) {
    const int pair0 = first + group_pairs;
    if (first > 0) {
      __syncwarp();  // the previous pass has been read
      copy_weights(s, args, row0, pair0, pairs, warp, lane);
    }
    SplitBlock block[2 * kPairs];
#pragma unroll
    for (int b = 0; b < 2 * kPairs; ++b) {
      const int64_t k = static_cast<int64_t>(pair0) * kPairK + b * kBlock + c * 8;
      float v[8] = {};
      if (r < tokens && k < args.k) {
        load8(v, x + r * args.k + k);
        if constexpr (kNorm) {
          float weight[8];
          load8(weight, static_cast<const Norm*>(args.norm_weight) + k);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            squares = fmaf(v[i], v[i], squares);
            v[i] *= weight[i];
          }
        }
      }
      block[b] = split_block(v, c);
    }
    cp_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const PairCodes top = load_pair(&s.weights[warp][r][p * kPairBytes], c), bottom = load_pair(&s.weights[warp][r + 8][p * kPairBytes], c);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const SplitBlock& xs = block[2 * p + b];
        float high[4] = {}, low[4] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t a[4] = {int8_low_to_half2(top.word[b][j]), int8_low_to_half2(bottom.word[b][j]), int8_high_to_half2(top.word[b][j]),
                                 int8_high_to_half2(bottom.word[b][j])};
          mma_m16n8k16_fp16(high, a, xs.high[j][0], xs.high[j][1]);
          mma_m16n8k16_fp16(low, a, xs.low[j][0], xs.low[j][1]);
        }
        sum[0] = fmaf(high[0] + low[0], top.d[b] * xs.scale0, sum[0]);
        sum[1] = fmaf(high[1] + low[1], top.d[b] * xs.scale1, sum[1]);
        sum[2] = fmaf(high[2] + low[2], bottom.d[b] * xs.scale0, sum[2]);
        sum[3] = fmaf(high[3] + low[3], bottom.d[b] * xs.scale1, sum[3]);
      }
    }
  }

  // Warps of the CTA, in order.
  float* mine = s.warp_sum[warp];
  mine[r * kTokens + 2 * c] = sum[0];
  mine[r * kTokens + 2 * c + 1] = sum[1];
  mine[(r + 8) * kTokens + 2 * c] = sum[2];
  mine[(r + 8) * kTokens + 2 * c + 1] = sum[3];
  if constexpr (kNorm) {
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    if (c == 0) s.warp_squares[warp][r] = squares;
  }
  __syncthreads();
  cluster_wait();  // every CTA has started: its shared memory may be written

  const uint32_t leader_barrier = cluster_address(smem_address(&s.landed), 0);
  constexpr int kVectors = kRows * kTokens / 4;
  for (int i = threadIdx.x; i < kVectors + (kNorm ? kTokens / 4 : 0); i += kWarps * 32) {
    const bool is_sum = i < kVectors;
    const float* source = is_sum ? &s.warp_sum[0][4 * i] : &s.warp_squares[0][4 * (i - kVectors)];
    const int stride = is_sum ? kRows * kTokens : kTokens;
    float4 total = {};
    for (int w = 0; w < kWarps; ++w) {
      const float4 v = *reinterpret_cast<const float4*>(source + w * stride);
      total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
    }
    float* target = is_sum ? &s.part[split][4 * i] : &s.squares[split][4 * (i - kVectors)];
    st_async(cluster_address(smem_address(target), 0), total, leader_barrier);
  }
  if (split != 0) return;

  // CTAs of the cluster, in order, in the leader.
  mbarrier_wait_cluster(smem_address(&s.landed), 0);
  if constexpr (kNorm) {
    const int slices = kSplits / static_cast<int>(args.hc);  // CTAs per group
    for (int i = threadIdx.x; i < kSplits * kTokens; i += kWarps * 32) {
      const int group = i / kTokens / slices, token = i % kTokens;
      float total = 0.f;
      for (int q = 0; q < slices; ++q) total += s.squares[group * slices + q][token];
      s.inverse_rms[i / kTokens][token] = rsqrtf(total / static_cast<float>(args.k / args.hc) + args.eps);
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kRows * kTokens; i += kWarps * 32) {
    const int row = row0 + i / kTokens, token = i % kTokens;
    float y = 0.f;
    for (int q = 0; q < kSplits; ++q) y = kNorm ? fmaf(s.part[q][i], s.inverse_rms[q][token], y) : y + s.part[q][i];
    if (row < args.n && token < tokens) args.y[(token0 + token) * args.n + row] = y;
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

bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Calls launch(x element, norm element, has norm) with the types behind the void pointers.
template <class Launch>
cudaError_t for_types(const DownArgs& args, Launch launch) {
  return with_float(args.x_type, [&](auto x) {
    if (args.norm_weight == nullptr) return launch(x, float{}, std::false_type{});
    return with_float(args.norm_type, [&](auto norm) { return launch(x, norm, std::true_type{}); });
  });
}

}  // namespace

bool down_fits_cluster(const DownArgs& args) {
  if (args.k % (2 * kPairK) != 0 || !aligned(args.w, kCopyBytes) || !aligned(args.x, 16)) return false;
  if (args.norm_weight == nullptr) return true;
  // The norm wants each CTA's slice of K inside one group: a single pass that fills all slices.
  return aligned(args.norm_weight, 16) && args.k == static_cast<int64_t>(kPassPairs) * kPairK && kSplits % args.hc == 0;
}

cudaError_t launch_down_cluster(const DownArgs& args, cudaStream_t stream) {
  return for_types(args, [&](auto x, auto norm, auto has_norm) {
    const dim3 grid(static_cast<unsigned>((args.n + kRows - 1) / kRows * kSplits), static_cast<unsigned>((args.ntok + kTokens - 1) / kTokens));
    return launch_overlapped(down_cluster<decltype(x), decltype(norm), decltype(has_norm)::value>, grid, kWarps * 32, 0, stream, args);
  });
}

cudaError_t launch_down_rows(const DownArgs& args, cudaStream_t stream) {
  return for_types(args, [&](auto x, auto norm, auto has_norm) {
    down_rows<decltype(x), decltype(norm), decltype(has_norm)::value><<<static_cast<unsigned>((args.n + 7) / 8), 256, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace mori::gr
