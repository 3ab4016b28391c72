// C = A B^T for up to 32 tokens (16 from K = 4096 on): the weight is streamed once, so it is bound by memory bandwidth.
//
// A CTA owns 64 weight rows (32 when N is small); its 8 warps take chunks of 64 along K in turn. TMA brings
// a chunk of the weight and of the activations into a warp's own ring. The weight is requested before griddepcontrol.wait; two
// CTAs fit an SM up to 16 tokens and a K below 4096: the next kernel streams its weight while this one ends. The kernel before must
// not write the weight.
//
//   codes -> fp16 operands by cvt, exact (NaN included); C^T = B A^T by m16n8k16, the weight as the 16-row operand, so 8 tokens
//   cost what 1 does; the fp32 sum of a block of 32 times 2^(a + b - 254) is added to the result by one FMA
//   -> warps summed in order in shared memory
// A token's bits depend neither on the other tokens nor on how many they are. Scales whose product leaves fp32's range take
// a second multiplication (kCareful): exact for every pair of scales.
// Tried and slower on an H200: K split over clusters of 4 and 8 CTAs (st.async moves 4 bytes a clock; 15 clusters of 8 fit, not 16);
// operands shifted into place instead of converted, all or one per MMA; 16 warps.
#include <algorithm>

#include "../common/launch_sm90.cuh"
#include "../common/sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "scales_sm90.cuh"

namespace mori::mxfp8 {
namespace {

using namespace sm90;

constexpr int kBlock = 32;
constexpr int kWarps = 8, kThreads = kWarps * 32;  // of a CTA
constexpr int kChunk = 64;                         // bytes of a row in a stage, laid out with TMA's 64-byte swizzle
constexpr int kChunkBlocks = kChunk / kBlock;
constexpr int kMaxStages = 8;
constexpr int64_t kLongK = 4096;                   // from here a deep ring is worth more than an overlap with the next kernel
constexpr int64_t kLongestK = 32768;               // the scales of more would not fit beside the ring
constexpr int kSmSmem = 226 * 1024;

template <int kRowTiles, int kTokenTiles>
struct Config {
  static constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles, kGroups = kRows / kBlock;
  static constexpr int kCtas = kRowTiles * kTokenTiles <= 8 ? 2 : 1;  // per SM: with more results a CTA wants more than 128 registers
  static constexpr uint32_t kWeightBytes = kRows * kChunk, kStageBytes = kWeightBytes + kTokens * kChunk;
};

// Dynamic shared memory of a CTA: rings (the results of the warps when used up), then scales, then barriers.
struct Plan {
  int stages = 0;
  uint32_t x_scale = 0, w_scale = 0, barriers = 0, bytes = 0;
};

struct Maps {
  CUtensorMap w, x;
};

// Row (or token) of a group of 8 that lane group g works on: with it the 64-byte swizzle has no bank conflicts.
__device__ __forceinline__ int swizzled_row(int g) { return (g & 1) | (g & 2) << 1 | (g & 4) >> 1; }
// Where the bytes 8c .. 8c+7 of a chunk are, in row `row` of a tile of 64-byte rows; those of the second block are at ^ 32.
__device__ __forceinline__ uint32_t swizzled_offset(int row, int c) { return row * kChunk + (c / 2 ^ row / 2 % 4) * 16 + c % 2 * 8; }

__device__ __forceinline__ uint2 load_shared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
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

// 2^(a + b - 254) as one float, or as two whose product it is.
template <bool kCareful>
struct Factor {
  float first, second;
  __device__ __forceinline__ Factor(float a, float b) : first(1.f), second(a * b) {
    if constexpr (kCareful) {
      const int exponent_a = __float_as_uint(a) >> 23, exponent_b = __float_as_uint(b) >> 23;  // the scale bytes
      const int exponent = exponent_a + exponent_b - 254, half = exponent >> 1;
      const bool nan = exponent_a == mx::kNanScale || exponent_b == mx::kNanScale;
      first = nan ? __uint_as_float(mx::kNanBits) : mx::decode_e8m0(static_cast<uint8_t>(half + 127));
      second = mx::decode_e8m0(static_cast<uint8_t>(exponent - half + 127));
    }
  }
  __device__ __forceinline__ float add(float sum, float c) const { return fmaf(kCareful ? sum * first : sum, second, c); }
};

// Outside these ranges a product of two scales may leave 2^-149 .. 2^127. A zero block of activations has scale 0.
__device__ __forceinline__ bool unusual_a(uint8_t scale) { return scale > 191 && scale != mx::kNanScale; }
__device__ __forceinline__ bool unusual_b(uint8_t scale) { return scale < 105 || (scale > 190 && scale != mx::kNanScale); }

// One block of 32 along K: 16 * kRowTiles rows times 8 * kTokenTiles tokens.
template <bool kCareful, int kRowTiles, int kTokenTiles>
__device__ __forceinline__ void multiply_block(float (&c)[kRowTiles][kTokenTiles][4], uint32_t w, uint32_t x, uint32_t x_scale, uint32_t w_scale) {
  uint32_t a[kRowTiles][2][4];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const uint2 top = load_shared8(w + i * 16 * kChunk), bottom = load_shared8(w + (i * 16 + 8) * kChunk);
    decode(top.x, a[i][0][0], a[i][0][2]);
    decode(bottom.x, a[i][0][1], a[i][0][3]);
    decode(top.y, a[i][1][0], a[i][1][2]);
    decode(bottom.y, a[i][1][1], a[i][1][3]);
  }
  float scale_b[kRowTiles / 2];
#pragma unroll
  for (int i = 0; i < kRowTiles / 2; ++i) scale_b[i] = __uint_as_float(load_shared4(w_scale + i * 4));
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    const uint2 codes = load_shared8(x + t * 8 * kChunk);
    const uint32_t scale_pair = load_shared4(x_scale + t * 8 * 2);  // of the two columns, as bf16
    const float scale_even = __uint_as_float(scale_pair << 16), scale_odd = __uint_as_float(scale_pair & 0xffff0000u);
    uint32_t b[2][2];
    decode(codes.x, b[0][0], b[0][1]);
    decode(codes.y, b[1][0], b[1][1]);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float sum[4];
      mma_m16n8k16_fp16_first(sum, a[i][0], b[0][0], b[0][1]);
      mma_m16n8k16_fp16(sum, a[i][1], b[1][0], b[1][1]);
      const Factor<kCareful> even(scale_even, scale_b[i / 2]), odd(scale_odd, scale_b[i / 2]);
      c[i][t][0] = even.add(sum[0], c[i][t][0]);
      c[i][t][1] = odd.add(sum[1], c[i][t][1]);
      c[i][t][2] = even.add(sum[2], c[i][t][2]);
      c[i][t][3] = odd.add(sum[3], c[i][t][3]);
    }
  }
}

// A warp's stages: a chunk of the weight, then the same chunk of the activations. Chunk i of the warp is i * kWarps + warp of K.
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
  __device__ __forceinline__ void load_activations(int stage, int i) const {
    tma_load(data + stage * C::kStageBytes + C::kWeightBytes, &maps->x, full + stage * 8, column(i), 0);
  }
};

// All rows of the CTA times all tokens, over the warp's chunks.
template <bool kCareful, int kRowTiles, int kTokenTiles>
__device__ __forceinline__ void multiply_chunks(float (&c)[kRowTiles][kTokenTiles][4], const Ring<Config<kRowTiles, kTokenTiles>>& ring, int chunks, int blocks,
                                                uint32_t x_scale, uint32_t w_scale) {
  using C = Config<kRowTiles, kTokenTiles>;
  const int lane = threadIdx.x % 32;
  const uint32_t offset = swizzled_offset(swizzled_row(lane / 4), lane % 4);
  int stage = 0, parity = 0, block = static_cast<int>(threadIdx.x) / 32 * kChunkBlocks;
  for (int i = 0; i < chunks; ++i, block += (kWarps - 1) * kChunkBlocks) {
    mbarrier_wait(ring.full + stage * 8, parity);
    const uint32_t w = ring.data + stage * C::kStageBytes, x = w + C::kWeightBytes;
#pragma unroll
    for (int b = 0; b < kChunkBlocks; ++b, ++block) {
      if (block < blocks)
        multiply_block<kCareful>(c, w + (offset ^ b * kBlock), x + (offset ^ b * kBlock), x_scale + block * C::kTokens * 2, w_scale + block * C::kGroups * 4);
    }
    __syncwarp();
    if (lane == 0 && i + ring.stages < chunks) {
      ring.load_weight(stage, i + ring.stages);
      ring.load_activations(stage, i + ring.stages);
    }
    if (++stage == ring.stages) stage = 0, parity ^= 1;
  }
}

template <int kRowTiles, int kTokenTiles>
__global__ void __launch_bounds__(kThreads, Config<kRowTiles, kTokenTiles>::kCtas)
    skinny(const __grid_constant__ Maps maps, const GemmArgs args, const ByteScales scales, const Plan plan) {
  using C = Config<kRowTiles, kTokenTiles>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = smem_address(smem);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int blocks = static_cast<int>(args.k / kBlock), all_chunks = (blocks + kChunkBlocks - 1) / kChunkBlocks;
  const int chunks = (all_chunks - warp + kWarps - 1) / kWarps;  // of this warp
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * C::kRows;
  const Ring<C> ring = {base + warp * plan.stages * C::kStageBytes, base + plan.barriers + warp * plan.stages * 8, plan.stages, &maps};

  launch_dependents();
  if (lane == 0) {
    for (int i = 0; i < plan.stages; ++i) mbarrier_init(ring.full + i * 8, 1);
    mbarrier_init_fence();
    for (int i = 0; i < min(plan.stages, chunks); ++i) ring.load_weight(i, i);
    if (warp == 0) prefetch_tensor_map(&maps.x);
  }
  __syncwarp();

  bool unusual = false;
  float* w_scale = reinterpret_cast<float*>(smem + plan.w_scale);  // [block][group]
  for (int i = threadIdx.x; i < C::kGroups * blocks; i += kThreads) {
    const int group = i / blocks, block = i % blocks;
    const int64_t row = row0 + group * kBlock;
    const uint8_t byte = row < args.n ? scales.b_byte(row, block) : 127;
    w_scale[block * C::kGroups + group] = mx::decode_e8m0(byte);
    unusual |= unusual_b(byte);
  }
  wait_for_dependencies();

  if (lane == 0)
    for (int i = 0; i < min(plan.stages, chunks); ++i) ring.load_activations(i, i);
  uint16_t* x_scale = reinterpret_cast<uint16_t*>(smem + plan.x_scale);  // [block][column of the products], as bf16
  for (int i = threadIdx.x; i < C::kTokens * blocks; i += kThreads) {
    const int m = args.packed ? i % C::kTokens : i / blocks, block = args.packed ? i / C::kTokens : i % blocks;
    const uint8_t byte = m < args.m ? scales.a_byte(m, block) : 127;
    x_scale[block * C::kTokens + m / 8 * 8 + swizzled_row(m % 8)] = static_cast<uint16_t>(mx::bits_of(mx::decode_e8m0(byte)) >> 16);
    unusual |= unusual_a(byte);
  }
  const bool careful = __syncthreads_or(unusual) != 0;

  float sum[kRowTiles][kTokenTiles][4] = {};
  if (careful)
    multiply_chunks<true>(sum, ring, chunks, blocks, base + plan.x_scale + c * 4, base + plan.w_scale);
  else
    multiply_chunks<false>(sum, ring, chunks, blocks, base + plan.x_scale + c * 4, base + plan.w_scale);

  // Warps in order. Each writes over its own ring.
  constexpr int kTiles = kRowTiles * kTokenTiles;
  const uint32_t warp_stride = plan.stages * C::kStageBytes;
  float4* mine = reinterpret_cast<float4*>(smem + warp * warp_stride);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) mine[(i * kTokenTiles + t) * 32 + lane] = {sum[i][t][0], sum[i][t][1], sum[i][t][2], sum[i][t][3]};
  __syncthreads();
  const auto store = [&](int64_t m, int64_t n, float total) {
    if (n < args.n && m < args.m) store_c(args, m, n, total);
  };
  for (int tile = warp; tile < kTiles; tile += kWarps) {
    const int64_t n = row0 + tile / kTokenTiles * 16 + swizzled_row(g);
    const int m0 = tile % kTokenTiles * 8 + swizzled_row(2 * c), m1 = tile % kTokenTiles * 8 + swizzled_row(2 * c + 1);
    float4 total = {};
#pragma unroll
    for (int q = 0; q < kWarps; ++q) {
      const float4 part = *reinterpret_cast<const float4*>(smem + q * warp_stride + (tile * 32 + lane) * sizeof(float4));
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    store(m0, n, total.x);
    store(m1, n, total.y);
    store(m0, n + 8, total.z);
    store(m1, n + 8, total.w);
  }
}

// ---- launch ----

constexpr uint32_t round_up(uint32_t value, uint32_t step) { return (value + step - 1) / step * step; }

template <class C>
Plan plan_for(int64_t k) {
  const auto blocks = static_cast<uint32_t>(k / kBlock);
  const auto with_stages = [&](int stages) {
    Plan p;
    p.stages = stages;
    p.x_scale = kWarps * stages * C::kStageBytes;
    p.w_scale = p.x_scale + round_up(blocks * C::kTokens * 2, 16);
    p.barriers = p.w_scale + round_up(blocks * C::kGroups * 4, 16);
    p.bytes = p.barriers + kWarps * stages * 8;
    return p;
  };
  constexpr int kLeast = C::kRows * C::kTokens * 4 <= static_cast<int>(C::kStageBytes) ? 1 : 2;  // the results of a warp fit its ring
  const int chunks = std::max(kLeast, static_cast<int>((blocks + kChunkBlocks * kWarps - 1) / (kChunkBlocks * kWarps)));
  int stages = std::min(chunks, kMaxStages);
  while (stages > 2 && with_stages(stages).bytes > (k < kLongK ? kSmSmem / 2 : kSmSmem)) --stages;
  return with_stages(stages);
}

bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <int kRowTiles, int kTokenTiles>
cudaError_t launch(const GemmArgs& args, cudaStream_t stream) {
  using C = Config<kRowTiles, kTokenTiles>;
  Maps maps;
  if (!make_tensor_map(&maps.w, args.b, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.n, args.k, C::kRows, kChunk, CU_TENSOR_MAP_SWIZZLE_64B) ||
      !make_tensor_map(&maps.x, args.a, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.m, args.k, C::kTokens, kChunk, CU_TENSOR_MAP_SWIZZLE_64B))
    return cudaErrorInvalidValue;
  const Plan plan = plan_for<C>(args.k);
  const dim3 grid(static_cast<unsigned>((args.n + C::kRows - 1) / C::kRows));
  return launch_overlapped(skinny<kRowTiles, kTokenTiles>, grid, kThreads, plan.bytes, stream, maps, args, ByteScales(args), plan);
}

constexpr int64_t kManyRows = 6400;  // from here 64 rows per CTA occupy the GPU

}  // namespace

bool skinny_takes(int64_t m, int64_t k) { return k < kLongK ? m <= 32 : m <= 16 && k <= kLongestK; }

bool skinny_fits(const GemmArgs& args) { return aligned16(args.a) && aligned16(args.b); }

cudaError_t launch_skinny(const GemmArgs& args, cudaStream_t stream) {
  const bool wide = args.n >= kManyRows;
  if (args.m <= 8) return wide ? launch<4, 1>(args, stream) : launch<2, 1>(args, stream);
  if (args.m <= 16) return wide ? launch<4, 2>(args, stream) : launch<2, 2>(args, stream);
  return launch<4, 4>(args, stream);
}

}  // namespace mori::mxfp8
