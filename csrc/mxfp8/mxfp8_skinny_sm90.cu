// C = A B^T for up to 32 tokens: the weight is streamed once, so it is bound by memory bandwidth.
//
// A CTA, one per SM, owns 32, 48 or 64 weight rows; its 8 warps take chunks of 128 along K in turn. TMA brings a chunk of the weight and
// of the tokens into a warp's own ring. The first stage of the weight is requested before griddepcontrol.wait: the kernel before must
// not write the weight or its scales.
//
//   codes -> fp16 operands by cvt, exact (NaN included); C^T = B A^T by m16n8k16, the weight as the 16-row operand, so 8 tokens
//   cost what 1 does; the fp32 sum of a block of 32 times 2^(a + b - 254) is added to the result by one FMA
//   -> warps summed in order in shared memory
// A token's bits depend neither on the other tokens nor on how many they are. Scales whose product leaves fp32's range take
// a second multiplication (kCareful); what is not finite then is computed again in float64: exact for every pair of scales.
//
// Measured on an H200: boxes of 64 bytes instead of 128 stream 8192x7168 in 23.6 instead of 14.8 us with 64 KB in flight. What is requested
// after the weight waits for it: with all stages before the tokens and their scales, 16 tokens take 4 to 15% longer. Products
// (6.6 clocks) and conversions (2.4) do not overlap in a scheduler: they bound 17 and more tokens at K = 2048 and below.
// Tried and slower: two CTAs per SM, 16 warps, tokens by cp.async (32 tokens), wgmma with tokens expanded in shared memory, operands
// shifted into place, K split over clusters (st.async moves 4 bytes a clock).
#include <algorithm>

#include "../common/launch_sm90.cuh"
#include "../common/sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "scale_tables_sm90.cuh"

namespace mori::mxfp8 {
namespace {

using namespace sm90;

constexpr int kBlock = 32;
constexpr int kWarps = 8, kThreads = kWarps * 32;        // of a CTA
constexpr int kChunk = 128;                              // bytes of a row in a stage, laid out with TMA's 128-byte swizzle
constexpr int kPart = 64, kPartBlocks = kPart / kBlock;  // of a chunk: what a lane holds at a time
constexpr int kMaxStages = 8;
constexpr int kEarlyStages = 1;                          // of the weight, requested before the tokens may be
constexpr int kLongestK = 16384;                         // what the tables of scales leave room for
constexpr int kSmemLimit = 226 * 1024;

template <int kRowTiles, int kTokenTiles>
struct Config {
  static constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles;
  static constexpr int kRowsPerScale = kRowTiles % 2 ? 16 : kBlock, kScaleRows = kRows / kRowsPerScale;
  using Scales = ScaleTables<kThreads, kScaleRows, kRowsPerScale, kTokens, kLongestK>;
  static constexpr uint32_t kWeightBytes = kRows * kChunk, kStageBytes = kWeightBytes + kTokens * kChunk;
};

// Dynamic shared memory of a CTA: rings (the results of the warps when used up), then scales, then barriers.
struct Plan {
  int stages = 0;
  bool scales_in_words = false;  // raw, rows and addresses multiples of four
  uint32_t scale_pitch = 0, x_scale = 0, w_scale = 0, barriers = 0, bytes = 0;
};

struct Maps {
  CUtensorMap w, x;
};

// Four 8 x 16-byte matrices, each lane giving the address of a row; of matrix i it gets bytes 4c .. 4c+3 of row g into r[i].
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ uint32_t load_shared4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

// Four codes as fp16: bytes 0, 1 and bytes 2, 3. Both operands take their k in this order.
__device__ __forceinline__ void decode(uint32_t word, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}\n" : "=r"(low), "=r"(high) : "r"(word));
}

__device__ __forceinline__ float scale_value(int scale) { return __int_as_float(max(scale << 23, 0x00400000)); }

// 2^(a + b - 254) as one float, or as two whose product it is. A NaN scale came as infinity.
template <bool kCareful>
struct Factor {
  float first, second;
  __device__ __forceinline__ Factor(float a, float b) : first(1.f), second(a * b) {
    if constexpr (kCareful) {
      const int scale_a = __float_as_int(a) >> 23, scale_b = __float_as_int(b) >> 23, half = (scale_a + scale_b) >> 1;
      first = max(scale_a, scale_b) == mx::kNanScale ? __uint_as_float(mx::kNanBits) : scale_value(half);
      second = scale_value(scale_a + scale_b - half);
    }
  }
  __device__ __forceinline__ float add(float sum, float c) const { return fmaf(kCareful ? sum * first : sum, second, c); }
};

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// The codes of a part that a lane multiplies: of a block and row tile the rows g and g + 8 at bytes 4c, then at bytes 16 + 4c; of a
// token tile those of token g at 16 i + 4c.
template <int kRowTiles, int kTokenTiles>
struct Codes {
  uint32_t w[kPartBlocks][kRowTiles][4], x[kTokenTiles][4];

  __device__ __forceinline__ void load(uint32_t stage, int part) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    const uint32_t w_address = stage + (matrix % 2 * 8 + row) * kChunk + (matrix / 2 ^ row) * 16;
    const uint32_t x_address = stage + kRowTiles * 16 * kChunk + row * kChunk + (matrix ^ row) * 16;
#pragma unroll
    for (int b = 0; b < kPartBlocks; ++b)
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) load_matrices(w[b][i], (w_address ^ (part * kPart + b * kBlock)) + i * 16 * kChunk);
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) load_matrices(x[t], (x_address ^ part * kPart) + t * 8 * kChunk);
  }
};

// One block of 32 along K: 16 * kRowTiles rows times 8 * kTokenTiles tokens.
template <bool kCareful, int kRowTiles, int kTokenTiles>
__device__ __forceinline__ void multiply_block(float (&c)[kRowTiles][kTokenTiles][4], const uint32_t (&w)[kRowTiles][4],
                                               const uint32_t (&x)[kTokenTiles][4], int block, const float (&x_scale)[kTokenTiles][2],
                                               const float (&w_scale)[Config<kRowTiles, kTokenTiles>::kScaleRows]) {
  using C = Config<kRowTiles, kTokenTiles>;
  uint32_t b[kTokenTiles][2][2];
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    decode(x[t][2 * block], b[t][0][0], b[t][0][1]);
    decode(x[t][2 * block + 1], b[t][1][0], b[t][1][1]);
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    uint32_t a[2][4];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      decode(w[i][2 * s], a[s][0], a[s][2]);
      decode(w[i][2 * s + 1], a[s][1], a[s][3]);
    }
    const float scale = w_scale[i * 16 / C::kRowsPerScale];
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
      float sum[4];
      mma_m16n8k16_fp16_first(sum, a[0], b[t][0][0], b[t][0][1]);
      mma_m16n8k16_fp16(sum, a[1], b[t][1][0], b[t][1][1]);
      const Factor<kCareful> even(x_scale[t][0], scale), odd(x_scale[t][1], scale);
      c[i][t][0] = even.add(sum[0], c[i][t][0]);
      c[i][t][1] = odd.add(sum[1], c[i][t][1]);
      c[i][t][2] = even.add(sum[2], c[i][t][2]);
      c[i][t][3] = odd.add(sum[3], c[i][t][3]);
    }
  }
}

// A warp's stages: a chunk of the weight, then the same chunk of the tokens. Chunk i of the warp is i * kWarps + warp of K.
template <class C>
struct Ring {
  uint32_t data, full;  // stages, and a barrier for each
  int stages;
  const Maps* maps;

  static __device__ __forceinline__ int column(int i) { return (i * kWarps + static_cast<int>(threadIdx.x) / 32) * kChunk; }
  __device__ __forceinline__ void load_weight(int stage, int i) const {
    mbarrier_arrive_expect(full + stage * 8, C::kStageBytes);
    tma_load(data + stage * C::kStageBytes, &maps->w, full + stage * 8, column(i), blockIdx.x * C::kRows);
  }
  __device__ __forceinline__ void load_tokens(int stage, int i) const {
    tma_load(data + stage * C::kStageBytes + C::kWeightBytes, &maps->x, full + stage * 8, column(i), 0);
  }
};

// All rows of the CTA times all tokens, over the warp's chunks.
template <bool kCareful, int kRowTiles, int kTokenTiles>
__device__ __forceinline__ void multiply_chunks(float (&c)[kRowTiles][kTokenTiles][4], const Ring<Config<kRowTiles, kTokenTiles>>& ring,
                                                int chunks, uint32_t x_scale, uint32_t w_scale, uint32_t pitch) {
  using C = Config<kRowTiles, kTokenTiles>;
  const int lane = threadIdx.x % 32;
  int stage = 0, parity = 0;
  for (int i = 0; i < chunks; ++i) {
    mbarrier_wait(ring.full + stage * 8, parity);
#pragma unroll
    for (int part = 0; part < kChunk / kPart; ++part) {
      Codes<kRowTiles, kTokenTiles> codes;
      codes.load(ring.data + stage * C::kStageBytes, part);
      // Scales of the part's two blocks, as pairs of bf16.
      uint32_t scale_x[kTokenTiles][2], scale_w[C::kScaleRows];
      const uint32_t at = ((i * kWarps + static_cast<int>(threadIdx.x) / 32) * (kChunk / kPart) + part) * kPartBlocks * 2;
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        scale_x[t][0] = load_shared4(x_scale + at + t * 8 * pitch);
        scale_x[t][1] = load_shared4(x_scale + at + (t * 8 + 1) * pitch);
      }
#pragma unroll
      for (int j = 0; j < C::kScaleRows; ++j) scale_w[j] = load_shared4(w_scale + at + j * pitch);
      if (part == kChunk / kPart - 1) {
        __syncwarp();
        if (lane == 0 && i + ring.stages < chunks) {
          ring.load_weight(stage, i + ring.stages);
          ring.load_tokens(stage, i + ring.stages);
        }
      }
#pragma unroll
      for (int b = 0; b < kPartBlocks; ++b) {
        float x_factor[kTokenTiles][2], w_factor[C::kScaleRows];
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
          for (int j = 0; j < 2; ++j) x_factor[t][j] = b == 0 ? low_bf16(scale_x[t][j]) : high_bf16(scale_x[t][j]);
#pragma unroll
        for (int j = 0; j < C::kScaleRows; ++j) w_factor[j] = b == 0 ? low_bf16(scale_w[j]) : high_bf16(scale_w[j]);
        multiply_block<kCareful>(c, codes.w[b], codes.x, b, x_factor, w_factor);
      }
    }
    if (++stage == ring.stages) stage = 0, parity ^= 1;
  }
}

template <int kRowTiles, int kTokenTiles>
__global__ void __launch_bounds__(kThreads, 1)
    skinny(const __grid_constant__ Maps maps, const GemmArgs args, const ByteScales scales, const Plan plan) {
  using C = Config<kRowTiles, kTokenTiles>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = smem_address(smem);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int all_chunks = static_cast<int>((args.k + kChunk - 1) / kChunk);
  const int chunks = (all_chunks - warp + kWarps - 1) / kWarps;  // of this warp
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * C::kRows;
  const Ring<C> ring = {base + warp * plan.stages * C::kStageBytes, base + plan.barriers + warp * plan.stages * 8, plan.stages, &maps};

  const int filled = min(plan.stages, chunks);
  launch_dependents();
  const typename C::Scales tables = {scales, args.m, args.n, plan.scales_in_words, smem, plan.scale_pitch};
  uint32_t w_scales[C::Scales::kRequests];
  tables.request_rows(w_scales, row0);
  if (lane == 0) {
    for (int i = 0; i < plan.stages; ++i) mbarrier_init(ring.full + i * 8, 1);
    mbarrier_init_fence();
    for (int i = 0; i < min(kEarlyStages, filled); ++i) ring.load_weight(i, i);
    if (warp == 0) prefetch_tensor_map(&maps.x);
  }
  __syncwarp();
  wait_for_dependencies();

  bool unusual = tables.stage_tokens(plan.x_scale, [&] {
    if (lane != 0) return;
    for (int i = 0; i < filled; ++i) {
      if (i >= kEarlyStages) ring.load_weight(i, i);
      ring.load_tokens(i, i);
    }
  });
  unusual |= tables.store_rows(plan.w_scale, w_scales);
  const bool careful = __syncthreads_or(unusual) != 0;

  float sum[kRowTiles][kTokenTiles][4] = {};
  if (careful)
    multiply_chunks<true>(sum, ring, chunks, base + plan.x_scale + c * 2 * plan.scale_pitch, base + plan.w_scale, plan.scale_pitch);
  else
    multiply_chunks<false>(sum, ring, chunks, base + plan.x_scale + c * 2 * plan.scale_pitch, base + plan.w_scale, plan.scale_pitch);

  // Warps in order. Each writes over its own ring.
  constexpr int kTiles = kRowTiles * kTokenTiles;
  const uint32_t warp_stride = plan.stages * C::kStageBytes;
  float4* mine = reinterpret_cast<float4*>(smem + warp * warp_stride);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t)
      mine[(i * kTokenTiles + t) * 32 + lane] = {sum[i][t][0], sum[i][t][1], sum[i][t][2], sum[i][t][3]};
  __syncthreads();
  for (int tile = warp; tile < kTiles; tile += kWarps) {
    const int64_t n = row0 + tile / kTokenTiles * 16 + g;
    const int m = tile % kTokenTiles * 8 + 2 * c;
    float total[4] = {};
#pragma unroll
    for (int q = 0; q < kWarps; ++q) {
      const float4 part = *reinterpret_cast<const float4*>(smem + q * warp_stride + (tile * 32 + lane) * sizeof(float4));
      total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
    }
    int again = 0;  // bit i: element i, which is not finite
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (m + i % 2 >= args.m || n + i / 2 * 8 >= args.n) continue;
      if (isfinite(total[i]))
        store_c(args, m + i % 2, n + i / 2 * 8, total[i]);
      else
        again |= 1 << i;
    }
    for (; again != 0; again &= again - 1) {
      const int i = __ffs(again) - 1;
      store_c(args, m + i % 2, n + i / 2 * 8, exact_dot(args, scales, m + i % 2, n + i / 2 * 8));
    }
  }
}

// ---- launch ----

template <class C>
Plan plan_for(int64_t k) {
  const int chunks = static_cast<int>((k + kChunk * kWarps - 1) / (kChunk * kWarps));
  const auto with_stages = [&](int stages) {
    Plan p;
    p.stages = stages, p.scale_pitch = C::Scales::row_bytes(k);
    p.x_scale = kWarps * stages * C::kStageBytes;
    p.w_scale = p.x_scale + C::kTokens * p.scale_pitch;
    p.barriers = p.w_scale + C::kScaleRows * p.scale_pitch;
    p.bytes = p.barriers + kWarps * stages * 8;
    return p;
  };
  constexpr int kLeast = C::kRows * C::kTokens * 4 <= static_cast<int>(C::kStageBytes) ? 1 : 2;  // the results of a warp fit its ring
  int stages = std::clamp(chunks, kLeast, kMaxStages);
  while (stages > kLeast && with_stages(stages).bytes > kSmemLimit) --stages;
  return with_stages(stages);
}

bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <int kRowTiles, int kTokenTiles>
cudaError_t launch(const GemmArgs& args, cudaStream_t stream) {
  using C = Config<kRowTiles, kTokenTiles>;
  Maps maps;
  if (!make_tensor_map(&maps.w, args.b, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.n, args.k, C::kRows, kChunk, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !make_tensor_map(&maps.x, args.a, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.m, args.k, C::kTokens, kChunk, CU_TENSOR_MAP_SWIZZLE_128B))
    return cudaErrorInvalidValue;
  Plan plan = plan_for<C>(args.k);
  const auto addresses = reinterpret_cast<uintptr_t>(args.a_scale) | reinterpret_cast<uintptr_t>(args.b_scale);
  plan.scales_in_words = !args.packed && args.k % 128 == 0 && addresses % 4 == 0;
  const dim3 grid(static_cast<unsigned>((args.n + C::kRows - 1) / C::kRows));
  return launch_overlapped(skinny<kRowTiles, kTokenTiles>, grid, kThreads, plan.bytes, stream, maps, args, ByteScales(args), plan);
}

template <int kTokenTiles>
cudaError_t launch(const GemmArgs& args, cudaStream_t stream) {
  // The fewest rows that a multiprocessor may get, in the fewest CTAs.
  constexpr int kProcessors = 132;
  const auto most = [&](int rows) { return ((args.n + rows - 1) / rows + kProcessors - 1) / kProcessors * rows; };
  if (most(64) <= std::min(most(48), most(32))) return launch<4, kTokenTiles>(args, stream);
  return most(48) <= most(32) ? launch<3, kTokenTiles>(args, stream) : launch<2, kTokenTiles>(args, stream);
}

}  // namespace

bool skinny_takes(int64_t m, int64_t k) { return m <= 32 && k <= kLongestK; }

bool skinny_fits(const GemmArgs& args) { return args.k > 0 && aligned16(args.a) && aligned16(args.b); }

cudaError_t launch_skinny(const GemmArgs& args, cudaStream_t stream) {
  if (args.m <= 8) return launch<1>(args, stream);
  if (args.m <= 16) return launch<2>(args, stream);
  return args.m <= 24 ? launch<3>(args, stream) : launch<4>(args, stream);
}

}  // namespace mori::mxfp8
