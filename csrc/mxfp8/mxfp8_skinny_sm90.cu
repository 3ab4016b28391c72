// C = A B^T for up to 48 tokens: the weight is streamed once, so it is bound by memory bandwidth.
//
// A CTA, one per SM, owns 32 to 64 weight rows. One warp requests stages of 256 along K by TMA: the weight in two boxes of 128 bytes a
// row, then the tokens. The others share every stage, a warp to each block of 32 (at 17 to 32 tokens two, with half of the rows each):
// what is left to do when the last byte has come is one block per warp. A few stages of the weight are requested before
// griddepcontrol.wait: the kernel before must not write the weight or its scales.
//
//   codes -> fp16 operands by cvt, exact (NaN included); C = A B^T by m16n8k16; the fp32 sum of a block of 32 times 2^(a + b - 254) is
//   added to the result by one FMA
//   -> the eight blocks of a stage summed in order in shared memory
// A token's bits depend neither on the other tokens nor on how many they are. Scales whose product leaves fp32's range take
// a second multiplication (kCareful); what is not finite then is computed again in float64: exact for every pair of scales.
//
// Measured on an H200 (2026-11-30): without products 7168x2048 takes 4.6 to 5.1 us (1 to 32 tokens) and 8192x7168 14.4 to 15.7; reading
// raw scales costs nothing measurable, packed ones 0.1 to 0.6, the tokens at most 0.2. What remains is the latency of products in few
// warps. Requesting the whole ring before the tokens: 0.3 to 1 us slower at K = 2048, where two stages are best. Boxes of 64 bytes stream
// 8192x7168 in 23.6 instead of 14.8 us.
// Tried and slower: a ring for each warp (8.2 instead of 7.0 us at 32 tokens, 7168x2048); refilling by the warps that multiply, in turn
// (24 instead of 19 at 8192x7168: each waits for all others); CTAs of two kernels on an SM (5.5 instead of 5.0; leftover SMs get two CTAs
// of one kernel); L2 prefetch of what the ring does not hold; stages of 512; tokens multicast in clusters of 2 or 4; 16 warps at up to 16
// tokens (0.1 to 0.4) or at 48 (11.6 instead of 9.9: registers); two sets of eight warps that take stages in turn, so that no token is
// decoded twice (32 tokens: 7.8 instead of 7.0, at 5120x2048 5.8 instead of 5.9; up to 8 tokens 0.1 to 0.3 faster, 16 up to 0.2 slower);
// 64 tokens (13.8 at 7168x2048, where the tiles need 10.9); loading the scales before the codes (ptxas then computes addresses in every
// stage: 21.4 instead of 18.7 at 32 tokens and 8192x7168); wgmma with tokens expanded in shared memory, operands shifted into place, K
// split over clusters.
#include <algorithm>

#include "../common/launch_sm90.cuh"
#include "../common/sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "scale_tables_sm90.cuh"

namespace mori::mxfp8 {
namespace {

using namespace sm90;

constexpr int kBlock = 32;
constexpr int kBox = 128;                           // bytes of a row that TMA brings at a time, laid out with its 128-byte swizzle
constexpr int kBoxes = 2, kStageK = kBoxes * kBox;  // of a stage
constexpr int kBlocks = kStageK / kBlock;           // of a stage
constexpr int kMaxStages = 12;
constexpr int kLongestK = 16384;  // what the tables of scales leave room for
constexpr int kLongestKForMany = 4096;  // past it, more than 32 tokens go faster by the tiles of the other GEMM
constexpr uint32_t kSmemLimit = 226 * 1024, kSmemAlone = 116 * 1024;  // at least that, so that no two CTAs share a multiprocessor

// 8 * kRowTiles rows, kTokenCount tokens: 8, 16, 32 or 48. kSplit warps share a block, each with kWarpTiles of the rows or, the last, one less.
template <int kRowTiles, int kTokenCount>
struct Config {
  static constexpr int kRows = 8 * kRowTiles, kTokens = kTokenCount, kTokenTiles = (kTokens + 15) / 16;
  static constexpr int kSplit = kTokens == 32 ? 2 : 1, kWarpTiles = (kRowTiles + kSplit - 1) / kSplit;
  static constexpr bool kUneven = kRowTiles % kSplit != 0;
  static constexpr int kSums = kTokens == 8 ? 2 : 4;  // of a lane, in a 16 x 8 product
  static constexpr int kThreads = kBlocks * kSplit * 32;  // that multiply; one warp more loads
  static constexpr int kRowsPerScale = kRowTiles % 4 ? 8 : kBlock, kScaleRows = kRows / kRowsPerScale;
  using Scales = ScaleTables<kThreads, kScaleRows, kRowsPerScale, kTokenTiles, kLongestK>;
  static constexpr uint32_t kRowBox = kRows * kBox, kTokenBox = kTokens * kBox, kStageBytes = kBoxes * (kRowBox + kTokenBox);
  static constexpr int kSumPitch = kRows + (kRowTiles % 2 ? 0 : 8);  // floats; for stores without bank conflicts
  static constexpr uint32_t kSumBytes = kBlocks * kTokens * kSumPitch * 4;
  using Sums = float[kTokenTiles][kWarpTiles][kSums];  // of a lane
};

// Dynamic shared memory of a CTA: the ring (the results of the warps when used up), then scales, then barriers.
struct Plan {
  int stages = 0, ring = 0;      // of all of K, and of those how many fit
  int early = 0;                 // of the weight, requested before the tokens may be
  bool scales_in_words = false;  // raw, rows and addresses multiples of four
  bool fours = false;            // four elements of C are stored at once
  uint32_t x_scale = 0, w_scale = 0, barriers = 0, bytes = 0;
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

// One block of 32 along K: the tokens times the rows of a warp. Rows past the last one, of tokens or of the weight, are read and not used.
template <bool kCareful, class C>
__device__ __forceinline__ void multiply_block(typename C::Sums& c, uint32_t w_address, uint32_t x_address, const uint8_t* x_scale,
                                               const uint8_t* w_scale, bool last_tile) {
  // Of a token tile the codes of tokens g and g + 8 at bytes 4c and 16 + 4c, as fp16.
  uint32_t a[C::kTokenTiles][2][4], pairs[C::kTokenTiles];  // pairs: their scales
#pragma unroll
  for (int t = 0; t < C::kTokenTiles; ++t) {
    uint32_t x[4];
    load_matrices(x, x_address + t * 16 * kBox);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      decode(x[2 * s], a[t][s][0], a[t][s][2]);
      decode(x[2 * s + 1], a[t][s][1], a[t][s][3]);
    }
  }
  if constexpr (C::kTokenTiles == 2) {
    const uint2 both = *reinterpret_cast<const uint2*>(x_scale);
    pairs[0] = both.x, pairs[1] = both.y;
  } else if constexpr (C::kTokenTiles == 1) {
    pairs[0] = *reinterpret_cast<const uint32_t*>(x_scale);
  }
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < C::kWarpTiles; ++i) {
    if (i % 2 == 0) load_matrices(w, w_address + i * 8 * kBox);
    if (C::kUneven && i == C::kWarpTiles - 1 && !last_tile) break;
    uint32_t b[2][2];
#pragma unroll
    for (int s = 0; s < 2; ++s) decode(w[i % 2 * 2 + s], b[s][0], b[s][1]);
    const float row = low_bf16(reinterpret_cast<const uint16_t*>(w_scale)[i * 8 / C::kRowsPerScale]);
#pragma unroll
    for (int t = 0; t < C::kTokenTiles; ++t) {
      float sum[4];
      mma_m16n8k16_fp16_first(sum, a[t][0], b[0][0], b[0][1]);
      mma_m16n8k16_fp16(sum, a[t][1], b[1][0], b[1][1]);
      if constexpr (C::kTokenTiles > 2) pairs[t] = reinterpret_cast<const volatile uint32_t*>(x_scale)[t];  // read again: registers
      const Factor<kCareful> low(low_bf16(pairs[t]), row), high(high_bf16(pairs[t]), row);
#pragma unroll
      for (int j = 0; j < C::kSums; ++j) c[t][i][j] = (j < 2 ? low : high).add(sum[j], c[t][i][j]);
    }
  }
}

// __syncthreads() of the warps that multiply.
template <int kThreads>
__device__ __forceinline__ void sync_multipliers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Stages of kStageK along K: the boxes of the weight, then those of the tokens.
template <class C>
struct Ring {
  uint32_t data, full, empty;  // stages, and two barriers for each
  const Maps* maps;

  __device__ __forceinline__ void load_weight(int stage, int i) const {
    mbarrier_arrive_expect(full + stage * 8, C::kStageBytes);
#pragma unroll
    for (int j = 0; j < kBoxes; ++j)
      tma_load(data + stage * C::kStageBytes + j * C::kRowBox, &maps->w, full + stage * 8, i * kStageK + j * kBox, blockIdx.x * C::kRows);
  }
  __device__ __forceinline__ void load_tokens(int stage, int i) const {
#pragma unroll
    for (int j = 0; j < kBoxes; ++j)
      tma_load(data + stage * C::kStageBytes + kBoxes * C::kRowBox + j * C::kTokenBox, &maps->x, full + stage * 8, i * kStageK + j * kBox, 0);
  }
};

// All tokens times the warp's rows, over its block of each stage.
template <bool kCareful, class C>
__device__ __forceinline__ void multiply_stages(typename C::Sums& c, const Ring<C>& ring, const Plan& plan, const uint8_t* smem, int block,
                                                int part) {
  const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
  const int box = block / (kBox / kBlock), swizzled = block % (kBox / kBlock) * kBlock;
  const uint32_t w_offset = box * C::kRowBox + (part * C::kWarpTiles * 8 + matrix / 2 * 8 + row) * kBox + ((matrix % 2 ^ row) * 16 ^ swizzled);
  const uint32_t x_offset = kBoxes * C::kRowBox + box * C::kTokenBox + (matrix % 2 * 8 + row) * kBox + ((matrix / 2 ^ row) * 16 ^ swizzled);
  const uint8_t* x_scale = smem + plan.x_scale + block * C::Scales::kPairBytes + lane / 4 * (C::Scales::kPairBytes / 8);
  const uint8_t* w_scale = smem + plan.w_scale + block * C::Scales::kRowBytes + part * C::kWarpTiles * 8 / C::kRowsPerScale * 2;
  int stage = 0, parity = 0;
  for (int i = 0; i < plan.stages; ++i) {
    const uint32_t data = ring.data + stage * C::kStageBytes;
    mbarrier_wait(ring.full + stage * 8, parity);
    multiply_block<kCareful, C>(c, data + w_offset, data + x_offset, x_scale, w_scale, part == 0);
    x_scale += kBlocks * C::Scales::kPairBytes, w_scale += kBlocks * C::Scales::kRowBytes;
    if (i + plan.ring < plan.stages) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(ring.empty + stage * 8);
    }
    if (++stage == plan.ring) stage = 0, parity ^= 1;
  }
}

// store_c of four elements of a row of C, in one store.
__device__ __forceinline__ void store_four(const GemmArgs& args, int64_t m, int64_t n, float4 c) {
  const int64_t at = m * args.n + n;
  c.x += bias_at(args, n), c.y += bias_at(args, n + 1), c.z += bias_at(args, n + 2), c.w += bias_at(args, n + 3);
  switch (args.out_type) {
    case Float::f32: *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = c; break;
    case Float::bf16: *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.out) + at) = {pack_bf162(c.x, c.y), pack_bf162(c.z, c.w)}; break;
    default: *reinterpret_cast<uint2*>(static_cast<__half*>(args.out) + at) = {pack_half2(c.x, c.y), pack_half2(c.z, c.w)};
  }
}

template <int kRowTiles, int kTokenCount>
__global__ void __launch_bounds__(Config<kRowTiles, kTokenCount>::kThreads + 32, 1)
    skinny(const __grid_constant__ Maps maps, const __grid_constant__ GemmArgs args, const __grid_constant__ ByteScales scales, const Plan plan) {
  using C = Config<kRowTiles, kTokenCount>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = smem_address(smem);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * C::kRows;
  const Ring<C> ring = {base, base + plan.barriers, base + plan.barriers + plan.ring * 8, &maps};
  launch_dependents();

  if (warp == C::kThreads / 32) {
    if (lane == 0) {
      for (int i = 0; i < plan.ring; ++i) mbarrier_init(ring.full + i * 8, 1), mbarrier_init(ring.empty + i * 8, C::kThreads / 32);
      mbarrier_init_fence();
      for (int i = 0; i < plan.early; ++i) ring.load_weight(i, i);
      prefetch_tensor_map(&maps.x);
      wait_for_dependencies();
      for (int i = 0; i < plan.ring; ++i) {
        if (i >= plan.early) ring.load_weight(i, i);
        ring.load_tokens(i, i);
      }
    }
    __syncwarp();
    __syncthreads_or(0);
    if (lane != 0) return;
    int stage = 0, parity = 0;
    for (int i = plan.ring; i < plan.stages; ++i) {
      mbarrier_wait(ring.empty + stage * 8, parity);
      ring.load_weight(stage, i);
      ring.load_tokens(stage, i);
      if (++stage == plan.ring) stage = 0, parity ^= 1;
    }
    return;
  }

  const typename C::Scales tables = {scales, static_cast<int>(args.m), args.n, plan.scales_in_words, plan.stages * (kStageK / (4 * kBlock)), smem};
  typename C::Scales::Rows w_scales;
  tables.request_rows(w_scales, row0);
  wait_for_dependencies();
  typename C::Scales::Pairs x_scales;
  tables.request_pairs(x_scales);
  bool unusual = tables.store_rows(plan.w_scale, w_scales);
  unusual |= tables.store_pairs(plan.x_scale, x_scales);
  const bool careful = __syncthreads_or(unusual) != 0;

  const int block = warp % kBlocks, part = warp / kBlocks;  // of a stage, of the rows
  typename C::Sums c = {};
  if (careful)
    multiply_stages<true>(c, ring, plan, smem, block, part);
  else
    multiply_stages<false>(c, ring, plan, smem, block, part);

  // Blocks of a stage in order, over the ring.
  float* sums = reinterpret_cast<float*>(smem);  // [block][token][row]
  float* mine = sums + (block * C::kTokens + lane / 4) * C::kSumPitch + part * C::kWarpTiles * 8 + lane % 4 * 2;
  sync_multipliers<C::kThreads>();
#pragma unroll
  for (int i = 0; i < C::kWarpTiles; ++i) {
    if (C::kUneven && i == C::kWarpTiles - 1 && part != 0) break;
#pragma unroll
    for (int t = 0; t < C::kTokenTiles; ++t)
#pragma unroll
      for (int j = 0; j < C::kSums; j += 2) *reinterpret_cast<float2*>(mine + (t * 16 + j * 4) * C::kSumPitch + i * 8) = {c[t][i][j], c[t][i][j + 1]};
  }
  sync_multipliers<C::kThreads>();
  constexpr int kFours = C::kRows / 4;
  for (int item = threadIdx.x; item < static_cast<int>(args.m) * kFours; item += C::kThreads) {
    const int m = item / kFours, r = item % kFours * 4;
    float4 total = {};
#pragma unroll
    for (int q = 0; q < kBlocks; ++q) {
      const float4 part = *reinterpret_cast<const float4*>(sums + (q * C::kTokens + m) * C::kSumPitch + r);
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    const int64_t n = row0 + r;
    if (plan.fours && n < args.n && isfinite(total.x) && isfinite(total.y) && isfinite(total.z) && isfinite(total.w)) {
      store_four(args, m, n, total);
      continue;
    }
    const float elements[4] = {total.x, total.y, total.z, total.w};
    int again = 0;  // bit i: element i, which is not finite
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (n + i >= args.n) continue;
      if (isfinite(elements[i]))
        store_c(args, m, n + i, elements[i]);
      else
        again |= 1 << i;
    }
    for (; again != 0; again &= again - 1) store_c(args, m, n + __ffs(again) - 1, exact_dot(args, scales, m, n + __ffs(again) - 1));
  }
}

// ---- launch ----

template <class C>
Plan plan_for(int64_t k) {
  Plan p;
  p.stages = static_cast<int>((k + kStageK - 1) / kStageK);
  for (p.ring = std::min(p.stages, kMaxStages);; --p.ring) {
    p.x_scale = std::max(p.ring * C::kStageBytes, C::kSumBytes);
    p.w_scale = p.x_scale + p.stages * kBlocks * C::Scales::kPairBytes;
    p.barriers = p.w_scale + p.stages * kBlocks * C::Scales::kRowBytes;
    p.bytes = p.barriers + p.ring * 16;
    if (p.bytes <= kSmemLimit || p.ring == 1) break;
  }
  p.early = std::min(p.ring, std::max(2, std::min(p.stages / 4, p.ring / 2)));
  p.bytes = std::max(p.bytes, kSmemAlone);
  return p;
}

template <int kRowTiles, int kTokenCount>
cudaError_t launch(const GemmArgs& args, cudaStream_t stream) {
  using C = Config<kRowTiles, kTokenCount>;
  Maps maps;
  if (!make_tensor_map(&maps.w, args.b, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.n, args.k, C::kRows, kBox, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !make_tensor_map(&maps.x, args.a, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.m, args.k, C::kTokens, kBox, CU_TENSOR_MAP_SWIZZLE_128B))
    return cudaErrorInvalidValue;
  Plan plan = plan_for<C>(args.k);
  const auto addresses = reinterpret_cast<uintptr_t>(args.a_scale) | reinterpret_cast<uintptr_t>(args.b_scale);
  plan.scales_in_words = !args.packed && args.k % 128 == 0 && addresses % 4 == 0;
  plan.fours = args.n % 4 == 0 && aligned16(args.out);
  const dim3 grid(static_cast<unsigned>((args.n + C::kRows - 1) / C::kRows));
  return launch_overlapped(skinny<kRowTiles, kTokenCount>, grid, C::kThreads + 32, plan.bytes, stream, maps, args, ByteScales(args), plan);
}

// The fewest rows that a multiprocessor may get, in the fewest CTAs.
template <int kTokenCount>
cudaError_t launch(const GemmArgs& args, cudaStream_t stream) {
  constexpr int kProcessors = 132;
  int tiles = 0;
  int64_t least = INT64_MAX;
  for (int t = 8; t >= 4; --t) {
    const int64_t ctas = (args.n + 8 * t - 1) / (8 * t), most = (ctas + kProcessors - 1) / kProcessors * t;
    if (most < least) least = most, tiles = t;
  }
  switch (tiles) {
    case 8: return launch<8, kTokenCount>(args, stream);
    case 7: return launch<7, kTokenCount>(args, stream);
    case 6: return launch<6, kTokenCount>(args, stream);
    case 5: return launch<5, kTokenCount>(args, stream);
    default: return launch<4, kTokenCount>(args, stream);
  }
}

}  // namespace

bool skinny_takes(int64_t m, int64_t k) { return k <= (m <= 32 ? kLongestK : kLongestKForMany) && m <= 48; }

bool skinny_fits(const GemmArgs& args) { return args.k > 0 && aligned16(args.a) && aligned16(args.b); }

cudaError_t launch_skinny(const GemmArgs& args, cudaStream_t stream) {
  if (args.m <= 8) return launch<8>(args, stream);
  if (args.m <= 16) return launch<16>(args, stream);
  return args.m <= 32 ? launch<32>(args, stream) : launch<48>(args, stream);
}

}  // namespace mori::mxfp8
