// qsa_flash for int8 KV, D 256, where tokens are few or their slots are: one launch, latency first (contract: qsa.h).
//
// A cluster of up to 16 CTAs serves one token and one tile of up to 16 query heads of a KV head; each CTA takes an equal run of at most
// 144 slots, each of its 9 warps 16 of them:
//   S^T = K Q^T   mma m16n8k32 int8, cells in M, codes as they are; a q row becomes 15-bit integers q * 2^(14 - e) in two int8 digits;
//                 each 64-dim group's exact sum meets its K scale in fp32
//   P = 2^(S - m) with the CTA's maximum m, times the V scale over a power of two of its group, in fp16: any fp16 scale fits
//   O^T = V^T P^T mma m16n8k16 fp16, dims in M: 32 dims a warp, over all cells of the CTA
// Each CTA owns an equal share of the dims: the others send theirs with st.async, and it joins them in the order of the slots, so that the
// result is deterministic; a CTA without others stores its rows at once (96 tokens of 96 slots: 9.6 -> 7.7 us, H200). An empty slot or an
// id past the cells reads nothing: zeros, with a probability of exactly 0.
// Bound by latency: ids, then the cells they name, then the exchange. Clusters of 16 find seven groups of multiprocessors that hold one (of
// 18 or 16; the eighth group has 8): of T 4's eight, two share one and end at 10.4 us, the others at 7.7 (H200, 2026-11-30). Lost: two
// tiles in a CTA, so that none do (11.8 against 11.4 us; T 8 22.5 against 18.6; T 1 7.6 against 7.5).
#include "../common/launch_sm90.cuh"
#include "qsa_tensor_sm90.cuh"

namespace mori::qsa {
namespace {

using namespace sm90;

constexpr int kDim = 256, kGroups = kDim / 64;
constexpr int kRows = 16;  // query rows of a tile
constexpr int kWarpCells = 16, kWarps = 9, kThreads = 32 * kWarps;
constexpr int kCells = kWarpCells * kWarps;  // slots of a CTA
constexpr int kValueWarps = kDim / 32;
constexpr int kMostParts = 16;      // CTAs of a cluster
constexpr float kProbabilityBits = 12.0f;  // P carries 2^12, the scaled P stays below 2^13

struct Shared {
  union {
    alignas(128) uint8_t k[kCells][kDim];            // 16-byte chunk ^ 4 (row & 1)
    alignas(128) __half p[kGroups][2][kCells][8];    // [group][rows 8 h ..][cell][row]
  };
  alignas(128) uint8_t v[kCells][kDim];              // 16-byte chunk ^ (row & 7)
  alignas(128) uint8_t q[2][kRows][kDim];            // high and low digits, 16-byte chunk ^ 4 (row & 1)
  float4 sums[kDim / 2 * kRows / 2];                 // [part][own pair of dims][pair of rows]: (dim, row), (dim, row + 1), (dim + 1, row) ..
  float2 stats[kMostParts][kRows];                   // of each part: maximum, sum
  alignas(16) __half k_scale[kCells][kGroups], v_scale[kCells][kGroups];
  float most[kWarps][kRows], sum[kWarps][kRows];     // of each warp
  uint2 most_scale[kWarps];                          // of each group, fp16 bits
  float factor[kRows], total[kRows];
  float weight[kMostParts][kRows];                   // of each part
  uint64_t landed;
};
static_assert(2 * (sizeof(Shared) + 128 + 1024) <= 228 * 1024, "two CTAs in a multiprocessor");

__device__ __forceinline__ void mma_s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Requests a warp's 16 cells with their scales, K first: four cells at a time, 8 lanes side by side on 128 bytes.
__device__ __forceinline__ void copy(Shared& s, const AttnArgs& args, int kv_head, int warp, int lane, int id, uint32_t valid) {
  const int chunk = lane % 8, first = lane / 8, row = warp * kWarpCells + first;
  uint32_t cell[4];
  bool has[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) cell[i] = __shfl_sync(~0u, max(id, 0), first + 4 * i), has[i] = valid >> (first + 4 * i) & 1;
  const auto request = [&](const DeviceRows& codes, const DeviceRows& scales, uint32_t to, int flip, __half (&scale_to)[kCells][kGroups]) {
    const char* from = codes.data + kv_head * codes.head_stride + chunk * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const char* source = offset_by(from, cell[i], static_cast<uint32_t>(codes.stride));
      cp_async<16>((to ^ i % 2 * flip) + i * 4 * kDim, source, has[i]);
      cp_async<16>((to ^ i % 2 * flip) + i * 4 * kDim + 128, source + 128, has[i]);
    }
    if (lane < kWarpCells)
      cp_async<2 * kGroups>(smem_address(scale_to[warp * kWarpCells + lane]),
                            offset_by(scales.data + kv_head * scales.head_stride, max(id, 0), static_cast<uint32_t>(scales.stride)), id >= 0);
    cp_async_commit();
  };
  request(args.k, args.k_scale, smem_address(&s.k[row][(chunk ^ (first & 1) << 2) * 16]), 0, s.k_scale);
  request(args.v, args.v_scale, smem_address(&s.v[row][(chunk ^ first) * 16]), 64, s.v_scale);
}

// The tile's q rows: 16 threads a row, 16 dims each.
struct Queries {
  uint4 raw[4];  // 16-bit values: two of them

  __device__ __forceinline__ void request(const AttnArgs& args, int token, int64_t head, int rows) {
    const int row = threadIdx.x / 16, part = threadIdx.x % 16;
#pragma unroll
    for (uint4& x : raw) x = make_uint4(0, 0, 0, 0);
    if (row >= rows) return;
    const char* q = args.q.data + token * args.q.stride + (head + row) * args.q.head_stride;
    if (args.q_type == Float::f32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[i] = load_global16(q + part * 64 + i * 16);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) raw[i] = load_global16(q + part * 32 + i * 16);
    }
  }
  __device__ __forceinline__ void decode(Float type, float (&value)[16]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (type == Float::f32) {
          value[4 * i + j] = __uint_as_float(word[j]);
        } else if (i < 2) {
          const float2 pair = type == Float::f16 ? unpack_half2(word[j]) : unpack_bf162(word[j]);
          value[8 * i + 2 * j] = pair.x, value[8 * i + 2 * j + 1] = pair.y;
        }
      }
    }
  }
};

// Their digits and score factors.
__device__ __forceinline__ void store_q(Shared& s, const AttnArgs& args, const Queries& queries) {
  const int row = threadIdx.x / 16, part = threadIdx.x % 16;
  if (row >= kRows) return;  // whole warps
  float value[16], top = 0.0f;
  queries.decode(args.q_type, value);
#pragma unroll
  for (float v : value) top = fmaxf(top, fabsf(v));
  for (int offset = 1; offset < 16; offset *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
  const int exponent = exponent_of(top), up = 14 - exponent;
  // Two steps: 2^163 is no fp32 number.
  const float half = args.sm_scale < 0 ? -power_of_two(up / 2) : power_of_two(up / 2), rest = power_of_two(up - up / 2);
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __float2int_rn(value[4 * i + j] * half * rest);
    low[i] = __byte_perm(__byte_perm(x[0], x[1], 0x0040), __byte_perm(x[2], x[3], 0x0040), 0x5410);
    high[i] = __byte_perm(__byte_perm(x[0] + 128, x[1] + 128, 0x0051), __byte_perm(x[2] + 128, x[3] + 128, 0x0051), 0x5410);
  }
  const int at = (part ^ (row & 1) << 2) * 16;
  *reinterpret_cast<uint4*>(&s.q[0][row][at]) = make_uint4(high[0], high[1], high[2], high[3]);
  *reinterpret_cast<uint4*>(&s.q[1][row][at]) = make_uint4(low[0], low[1], low[2], low[3]);
  // A q row that is not finite has no digits: its factor makes every score NaN.
  if (part == 0) s.factor[row] = isfinite(top) ? score_factor(args.sm_scale, exponent - 14) : __int_as_float(0x7fc00000);
}

// Scores of this lane's two cells (r and r + 8 of its warp) and four q rows: score[h][i] is row 8 h + 2 c + (i & 1), cell r + 8 (i >> 1).
__device__ __forceinline__ void multiply(const Shared& s, int warp, int r, int c, float (&score)[2][4]) {
  const int row = warp * kWarpCells + r, shift = (r & 1) << 2;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int at = (4 * g + c ^ shift) * 16;
    const uint4 k0 = *reinterpret_cast<const uint4*>(&s.k[row][at]), k1 = *reinterpret_cast<const uint4*>(&s.k[row + 8][at]);
    const float scale0 = __half2float(s.k_scale[row][g]), scale1 = __half2float(s.k_scale[row + 8][g]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 high = *reinterpret_cast<const uint4*>(&s.q[0][8 * h + r][at]), low = *reinterpret_cast<const uint4*>(&s.q[1][8 * h + r][at]);
      int digit[2][4] = {};
      mma_s8(digit[0], k0.x, k1.x, k0.y, k1.y, high.x, high.y);
      mma_s8(digit[1], k0.x, k1.x, k0.y, k1.y, low.x, low.y);
      mma_s8(digit[0], k0.z, k1.z, k0.w, k1.w, high.z, high.w);
      mma_s8(digit[1], k0.z, k1.z, k0.w, k1.w, low.z, low.w);
#pragma unroll
      for (int i = 0; i < 4; ++i) score[h][i] = fmaf(i < 2 ? scale0 : scale1, static_cast<float>(digit[0][i] * 256 + digit[1][i]), score[h][i]);
    }
  }
}

// out[t][h] += V^T P^T over `steps` times 16 cells: dims 32 warp + 16 t + 2 r (+ 1), rows 8 h + 2 c (+ 1).
__device__ __forceinline__ void add_values(const Shared& s, int warp, int lane, int steps, float (&out)[2][2][4]) {
  const uint32_t mask = opaque(0x00ff00ffu);
  const int cell = lane & 15;
  const uint32_t v = smem_address(&s.v[cell][((2 * warp + lane / 16) ^ (cell & 7)) * 16]), p = smem_address(s.p[warp / 2][lane / 16][cell]);
#pragma unroll 3
  for (int step = 0; step < steps; ++step) {
    const uint4 codes = load_matrix_transposed(v + step * kWarpCells * kDim), b = load_matrix_transposed(p + step * kWarpCells * 16);
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = codes_to_half2(i % 2 ? word[i / 2] >> 8 : word[i / 2], mask);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      mma_m16n8k16_fp16(out[t][0], a[t], b.x, b.y);
      mma_m16n8k16_fp16(out[t][1], a[t], b.z, b.w);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2) attend_cluster(const AttnArgs args, int log2_parts) {
  extern __shared__ char raw_shared[];
  Shared& s = *reinterpret_cast<Shared*>(raw_shared + (-smem_address(raw_shared) & 127));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const int group = static_cast<int>(args.q_heads / args.kv_heads), head_tiles = (group + kRows - 1) / kRows;
  const int parts = 1 << log2_parts, part = blockIdx.x % parts, token = blockIdx.x >> log2_parts, tile = blockIdx.y;
  const int log2_pairs = 7 - log2_parts, own_pairs = 1 << log2_pairs;  // pairs of dims that this CTA joins
  const int kv_head = tile / head_tiles, first_row = tile % head_tiles * kRows, rows = min(kRows, group - first_row);
  const int64_t head = static_cast<int64_t>(kv_head) * group + first_row;
  const int slots = static_cast<int>(args.slots), length = (slots + parts - 1) >> log2_parts, begin = part * length;
  const int count = max(0, min(length, slots - begin)), steps = (count + kWarpCells - 1) / kWarpCells;
  if (threadIdx.x == 0) {
    mbarrier_init(smem_address(&s.landed), 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(smem_address(&s.landed), sizeof(s.sums) + parts * sizeof(s.stats[0]));
  }
  cluster_arrive();
  const int slot = warp * kWarpCells + lane % kWarpCells;
  if (slot < count) prefetch(static_cast<const char*>(args.ids) + (token * args.slots + begin + slot) * (args.wide_ids ? 8 : 4));
  if (static_cast<int>(threadIdx.x) / 16 < rows)
    prefetch(args.q.data + token * args.q.stride + (head + threadIdx.x / 16) * args.q.head_stride + threadIdx.x % 16 * (args.q_type == Float::f32 ? 64 : 32));
  wait_for_dependencies();
  launch_dependents();

  const int id = slot < count ? static_cast<int>(cell_of(args, token, begin + slot)) : -1;
  Queries queries;
  queries.request(args, token, head, rows);
  const uint32_t valid = __ballot_sync(~0u, id >= 0);
  if (warp < steps) copy(s, args, kv_head, warp, lane, id, valid);
  store_q(s, args, queries);
  cp_async_wait<1>();
  __syncthreads();  // Q is written, this warp's K has landed

  float score[2][4] = {};
  if (warp < steps) multiply(s, warp, r, c, score);
  const bool has[2] = {(valid >> r & 1) != 0, (valid >> (r + 8) & 1) != 0};
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = fmaxf(has[0] ? score[h][i] : kLowest, has[1] ? score[h][i + 2] : kLowest);
      for (int offset = 4; offset < 32; offset *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
      if (r == 0) s.most[warp][8 * h + 2 * c + i] = x;
    }
  cp_async_wait<0>();
  __syncwarp();
  uint2 size = make_uint2(0, 0);
  if (warp < steps) size = *reinterpret_cast<const uint2*>(s.v_scale[warp * kWarpCells + lane % kWarpCells]);
  size.x &= 0x7fff7fffu, size.y &= 0x7fff7fffu;
  for (int offset = 1; offset < kWarpCells; offset *= 2)
    size.x = __vmaxu2(size.x, __shfl_xor_sync(~0u, size.x, offset)), size.y = __vmaxu2(size.y, __shfl_xor_sync(~0u, size.y, offset));
  if (lane == 0) s.most_scale[warp] = size;
  __syncthreads();  // all have read K, V has landed

  size = s.most_scale[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) size.x = __vmaxu2(size.x, s.most_scale[w].x), size.y = __vmaxu2(size.y, s.most_scale[w].y);
  int exponent[kGroups];  // of the largest V scale of each group
#pragma unroll
  for (int g = 0; g < kGroups; ++g) exponent[g] = min(static_cast<int>((g < 2 ? size.x : size.y) >> (g % 2 * 16 + 10) & 31), 30) - 15;
  float p[2][4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float2 top = make_float2(kLowest, kLowest);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 most = *reinterpret_cast<const float2*>(&s.most[w][8 * h + 2 * c]);
      top.x = fmaxf(top.x, most.x), top.y = fmaxf(top.y, most.y);
    }
    const float2 factor = *reinterpret_cast<const float2*>(&s.factor[8 * h + 2 * c]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      p[h][i] = has[i / 2] ? exp2_fast(fmaf(score[h][i] - (i & 1 ? top.y : top.x), i & 1 ? factor.y : factor.x, kProbabilityBits)) : 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = p[h][i] + p[h][i + 2];
      for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (r == 0) s.sum[warp][8 * h + 2 * c + i] = sum;
    }
  }
  if (warp < steps) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int cell = warp * kWarpCells + r + 8 * i;
        const float scale = __half2float(s.v_scale[cell][g]) * __int_as_float((127 - exponent[g]) << 23);
#pragma unroll
        for (int h = 0; h < 2; ++h) *reinterpret_cast<uint32_t*>(&s.p[g][h][cell][2 * c]) = pack_half2(p[h][2 * i] * scale, p[h][2 * i + 1] * scale);
      }
  }
  __syncthreads();  // P and the sums are written

  const uint32_t landed = smem_address(&s.landed);
  float out[2][2][4] = {};
  if (warp < kValueWarps) add_values(s, warp, lane, steps, out);
  const int g = min(warp, kValueWarps - 1) / 2;
  const float up = __int_as_float((127 + (g == 0 ? exponent[0] : g == 1 ? exponent[1] : g == 2 ? exponent[2] : exponent[3])) << 23);
  cluster_wait();  // every CTA has started: its shared memory may be written
  if (parts == 1) {  // nothing to exchange
    if (warp >= kValueWarps) return;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * h + 2 * c + i;
        float total = s.sum[0][row];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) total += s.sum[w][row];
        if (row >= rows) continue;
        const float inverse = total == 0.0f ? 0.0f : up * __frcp_rn(total);
        const bool gated = args.gate.data != nullptr && total != 0.0f;
        const char* gate = gated ? args.gate.data + token * args.gate.stride + (head + row) * args.gate.head_stride : nullptr;
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int dim = 2 * (16 * warp + 8 * t + r);
          store_pair(args, (token * args.q_heads + head + row) * kDim + dim, out[t][h][i] * inverse, out[t][h][i + 2] * inverse, gate, dim);
        }
      }
    return;
  }
  if (warp < kValueWarps) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const int pair = 16 * warp + 8 * t + r, owner = pair >> log2_pairs;
      const uint32_t target = cluster_address(smem_address(&s.sums[(part * own_pairs + pair % own_pairs) * (kRows / 2) + c]), owner);
      const uint32_t barrier = cluster_address(landed, owner);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        st_async(target + h * 4 * sizeof(float4), make_float4(out[t][h][0] * up, out[t][h][1] * up, out[t][h][2] * up, out[t][h][3] * up), barrier);
    }
  } else {
    const int row = lane % kRows;
    float top = s.most[0][row], sum = s.sum[0][row];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) top = fmaxf(top, s.most[w][row]), sum += s.sum[w][row];
    for (int owner = lane / kRows; owner < parts; owner += 32 / kRows)
      st_async(cluster_address(smem_address(&s.stats[part][row]), owner), make_float2(top, sum), cluster_address(landed, owner));
  }

  // All parts are here: their weights, then the sums, in order.
  mbarrier_wait_cluster(landed, 0);
  if (threadIdx.x < kRows * kMostParts) {
    const int row = threadIdx.x / kMostParts, j = threadIdx.x % kMostParts;
    const float2 stat = j < parts ? s.stats[j][row] : make_float2(kLowest, 0.0f);
    float top = stat.x;
    for (int offset = 1; offset < kMostParts; offset *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    const float weight = stat.y == 0.0f ? 0.0f : exp2_fast((stat.x - top) * s.factor[row]);  // 0 also where the factor is NaN
    float total = weight * stat.y;
    for (int offset = 1; offset < kMostParts; offset *= 2) total += __shfl_xor_sync(~0u, total, offset);
    s.weight[j][row] = weight;
    if (j == 0) s.total[row] = total;
  }
  __syncthreads();
  const int row_pairs = (rows + 1) / 2;
  for (int i = threadIdx.x; i < row_pairs << log2_pairs; i += kThreads) {
    const int pair = i % own_pairs, row = (i >> log2_pairs) * 2;
    float4 x = {};  // two dims of a row, two of the next
#pragma unroll 8
    for (int j = 0; j < parts; ++j) {
      const float4 sum = s.sums[((j << log2_pairs) + pair) * (kRows / 2) + row / 2];
      const float2 weight = *reinterpret_cast<const float2*>(&s.weight[j][row]);
      x.x = fmaf(weight.x, sum.x, x.x), x.y = fmaf(weight.x, sum.z, x.y), x.z = fmaf(weight.y, sum.y, x.z), x.w = fmaf(weight.y, sum.w, x.w);
    }
    const int dim = 2 * (part * own_pairs + pair);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + h >= rows) break;
      const float total = s.total[row + h], inverse = total == 0.0f ? 0.0f : __frcp_rn(total);
      const char* gate = args.gate.data == nullptr || total == 0.0f ? nullptr : args.gate.data + token * args.gate.stride + (head + row + h) * args.gate.head_stride;
      store_pair(args, (token * args.q_heads + head + row + h) * kDim + dim, (h ? x.z : x.x) * inverse, (h ? x.w : x.y) * inverse, gate, dim);
    }
  }
}

int64_t tiles_of(const AttnArgs& args) { return args.kv_heads * ((args.q_heads / args.kv_heads + kRows - 1) / kRows); }

// CTAs of a cluster, as a power of two: enough for the slots, and more while all CTAs run at once and have 32 slots each.
int log2_parts_of(const AttnArgs& args) {
  constexpr int64_t kCtas = 128, kFewSlots = 32;
  int log2 = 0;
  while (args.slots > int64_t{kCells} << log2 ||
         (1 << log2 < kMostParts && args.tokens * tiles_of(args) << (log2 + 1) <= kCtas && args.slots >= kFewSlots << (log2 + 1)))
    ++log2;
  return log2;
}

}  // namespace

bool cluster_fits(const AttnArgs& args) {
  return args.dim == kDim && args.slots <= kMostParts * kCells && tiles_of(args) < 1 << 16 && args.tokens < (int64_t{1} << 31) / kMostParts;
}

cudaError_t launch_cluster(const AttnArgs& args, cudaStream_t stream) {
  const int log2_parts = log2_parts_of(args);
  const dim3 grid(static_cast<unsigned>(args.tokens) << log2_parts, static_cast<unsigned>(tiles_of(args)));
  return launch_overlapped_clusters(attend_cluster, 1u << log2_parts, grid, kThreads, sizeof(Shared) + 128, stream, args, log2_parts);
}

}  // namespace mori::qsa
