// qsa_flash for int8 KV, D 256, where the tokens' cells are simply 0 .. n-1, as in the first prompt of a sequence: dense attention.
//
//  count_prefixes: one warp per token reads its ids: n where the row is 0 .. n-1 and then empty, else -1.
//  dense: a CTA of two warpgroups owns 48 query rows of one KV head: the group's heads of a few neighbouring tokens, which share every
//    cell. Tokens that are no prefix, and scales too large for fp16 codes or not finite, are left to the sparse kernel that follows,
//    through `status`: no host sync, graph-safe. Tiles of 128 cells, two stages of cp.async:
//      S^T = K Q^T   (warpgroup w scores cells 64 w ..)    wgmma m64n48k16 fp16, codes converted and scaled in registers
//      O^T = V^T P^T (warpgroup w owns dims 128 w ..)      (one rounding of 2^-11)
//    Bound by latency, then issue slots. Lost: 24 rows with two CTAs a multiprocessor (the conversions serve half as many rows), four
//    warpgroups with single buffers (all wait for each copy).
#include "../common/launch_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "qsa_tensor_sm90.cuh"
#include "qsa_wgmma_sm90.cuh"

namespace mori::qsa {
namespace {

using namespace sm90;

constexpr int kDim = 256, kGroups = kDim / 64;
constexpr int kRows = 48;  // query rows of a CTA: columns of the products
constexpr int kBlocks = kRows / 8;
constexpr int kThreads = 256, kWarps = 8;
constexpr int kCells = 128;  // of a tile
constexpr int kOwn = 2;      // 64-dim groups of a warpgroup in P V
constexpr uint32_t kLargestScale = 0x6000;  // fp16 bits of 512: 127 times it is a finite fp16

struct Stage {
  uint8_t k[kCells][kDim];  // 16-byte chunk ^ 4 (row & 1)
  uint8_t v[kCells][kDim];  // 16-byte chunk ^ (row & 7)
  __half scale[2][kCells][kGroups];  // K, V
};
struct Shared {
  alignas(128) Stage stage[2];
  alignas(128) __half q[kDim / 16][2][kBlocks][8][8];    // [k16][k half][n block][n][k], dims permuted within 64 like the K words
  alignas(128) __half p[kCells / 16][2][kBlocks][8][8];  // [k16][k half][n block][k][n]
  float most[kWarps][kRows];  // per warp: maxima, then sums
  float factor[kRows];
  int limit[kRows];  // cells of each query row
};
static_assert(sizeof(Shared) + 128 <= 227 * 1024, "shared memory of a multiprocessor");

template <class Id>
__global__ void __launch_bounds__(256) count_prefixes(const AttnArgs args, int* __restrict__ counts) {
  constexpr int kLoads = 16;
  wait_for_dependencies();
  launch_dependents();
  const int lane = threadIdx.x % 32, slots = static_cast<int>(args.slots);
  const int64_t token = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (token >= args.tokens) return;
  const Id* row = static_cast<const Id*>(args.ids) + token * args.slots;
  int count = 0, past = 0;  // cells, and the slot after the last of them
  bool prefix = true;
  for (int start = 0; start < slots && __all_sync(~0u, prefix); start += 32 * kLoads) {
    Id id[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) id[i] = start + i * 32 + lane < slots ? __ldg(row + start + i * 32 + lane) : -1;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int slot = start + i * 32 + lane;
      if (id[i] < 0 || id[i] >= args.cells) continue;
      prefix &= id[i] == slot;
      past = slot + 1;
      ++count;
    }
  }
  prefix = __all_sync(~0u, prefix);
  count = __reduce_add_sync(~0u, count), past = __reduce_max_sync(~0u, past);
  if (lane == 0) counts[token] = prefix && count == past ? count : -1;
}

// Q rows in fp16, each times a power of two that brings its largest value into [2^7, 2^8): 8 threads a row, 32 dims each.
__device__ __forceinline__ void load_q(Shared& s, const AttnArgs& args, const int* counts, int64_t first_token, int tokens, int group, int kv_head) {
  for (int n = threadIdx.x / 8; n < kRows; n += kThreads / 8) {  // whole warps
    const int part = threadIdx.x % 8, token = n / group;
    const bool real = token < tokens;
    const char* row = args.q.data + (first_token + token) * args.q.stride + (static_cast<int64_t>(kv_head) * group + n % group) * args.q.head_stride;
    float value[4][8] = {}, top = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (real) load8(value[i], row, args.q_type, part * 32 + i * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (float v : value[i]) top = fmaxf(top, fabsf(v));
    for (int offset = 1; offset < 8; offset *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    const int exponent = exponent_of(top), up = 8 - exponent;
    const float half = ldexpf(args.sm_scale < 0 ? -1.0f : 1.0f, up / 2), rest = ldexpf(1.0f, up - up / 2);  // 2^157 is no fp32 number
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const int dim = part * 32 + i * 8 + j, step = dim / 64 * 4 + dim / 4 % 4, column = dim / 16 % 4 * 2;
        const float* v = &value[i][j];
        *reinterpret_cast<uint32_t*>(&s.q[step][0][n / 8][n % 8][column]) = pack_half2(v[0] * half * rest, v[2] * half * rest);
        *reinterpret_cast<uint32_t*>(&s.q[step][1][n / 8][n % 8][column]) = pack_half2(v[1] * half * rest, v[3] * half * rest);
      }
    if (part == 0) s.limit[n] = real ? __ldcg(counts + first_token + token) : 0;
    if (part == 0) s.factor[n] = isfinite(top) ? score_factor(args.sm_scale, exponent - 8) : __int_as_float(0x7fc00000);
  }
}

// Requests a tile of K and V; cells past the longest row are zeros.
__device__ __forceinline__ void copy(Stage& stage, const AttnArgs& args, int kv_head, int tile, int cells) {
  constexpr int kChunks = kDim / 16, kStep = kThreads / kChunks;  // rows at a time: a multiple of 8
  const int chunk = threadIdx.x % kChunks, row = threadIdx.x / kChunks, left = cells - tile * kCells;
  const int64_t first = static_cast<int64_t>(tile) * kCells;
  const char* k = args.k.data + kv_head * args.k.head_stride + first * args.k.stride + chunk * 16;
  const char* v = args.v.data + kv_head * args.v.head_stride + first * args.v.stride + chunk * 16;
  const uint32_t k_to = smem_address(&stage.k[row][(chunk ^ (row & 1) << 2) * 16]), v_to = smem_address(&stage.v[row][(chunk ^ (row & 7)) * 16]);
#pragma unroll
  for (int j = 0; j < kCells / kStep; ++j) {
    const int at = j * kStep + row;
    cp_async<16>(k_to + j * kStep * kDim, offset_by(k, at, static_cast<uint32_t>(args.k.stride)), at < left);
    cp_async<16>(v_to + j * kStep * kDim, offset_by(v, at, static_cast<uint32_t>(args.v.stride)), at < left);
  }
  const int which = threadIdx.x / kCells, cell = threadIdx.x % kCells;
  const DeviceRows& scales = which == 0 ? args.k_scale : args.v_scale;
  cp_async<2 * kGroups>(smem_address(stage.scale[which][cell]),
                        scales.data + kv_head * scales.head_stride + (first + min(cell, left - 1)) * scales.stride, cell < left);
}

// Whether one of the scales that this thread copied itself does not allow fp16 products.
__device__ __forceinline__ bool too_large(const Stage& stage) {
  bool bad = false;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) bad |= (__half_as_ushort(stage.scale[threadIdx.x / kCells][threadIdx.x % kCells][g]) & 0x7fffu) > kLargestScale;
  return bad;
}

__global__ void __launch_bounds__(kThreads, 1) dense(const AttnArgs args, const int* __restrict__ counts, uint8_t* __restrict__ status) {
  extern __shared__ char raw_shared[];
  Shared& s = *reinterpret_cast<Shared*>(raw_shared + (-smem_address(raw_shared) & 127));
  wait_for_dependencies();
  launch_dependents();
  const int warp_index = __shfl_sync(~0u, threadIdx.x / 32, 0), side = warp_index / 4, warp = warp_index % 4;  // uniform
  const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const int group = static_cast<int>(args.q_heads / args.kv_heads), per_cta = kRows / group, kv_heads = static_cast<int>(args.kv_heads);
  const int kv_head = blockIdx.x % kv_heads, block = gridDim.x / kv_heads - 1 - blockIdx.x / kv_heads;  // the longest rows first
  const int64_t first_token = static_cast<int64_t>(block) * per_cta;
  const int tokens = static_cast<int>(min(static_cast<int64_t>(per_cta), args.tokens - first_token));
  const uint32_t mask = opaque(0x00ff00ffu);

  int cells = 0, fewest = 1 << 30;
  for (int t = 0; t < tokens; ++t) {
    const int count = __ldcg(counts + first_token + t);
    cells = max(cells, count);
    fewest = min(fewest, count);
  }
  bool bad = fewest < 0;
  const int tiles = bad ? 0 : (cells + kCells - 1) / kCells;
  if (tiles > 0) {
    copy(s.stage[0], args, kv_head, 0, cells);
    cp_async_commit();
    load_q(s, args, counts, first_token, tokens, group, kv_head);
    fence_async_shared();
  }

  const uint64_t q = core_descriptor(smem_address(s.q), kBlocks * 128, 128), p_tile = core_descriptor(smem_address(s.p), kBlocks * 128, 128);
  float out[kOwn][4 * kBlocks], sum[2 * kBlocks] = {}, top[2 * kBlocks];
#pragma unroll
  for (int g = 0; g < kOwn; ++g)
#pragma unroll
    for (float& value : out[g]) value = 0.0f;
#pragma unroll
  for (float& value : top) value = kLowest;

  for (int tile = 0; tile < tiles; ++tile) {
    const Stage& stage = s.stage[tile % 2];
    cp_async_wait<0>();
    bad = __syncthreads_or(too_large(stage));  // the tile has landed; all are done with the other stage and with P
    if (bad) break;
    if (tile + 1 < tiles) copy(s.stage[(tile + 1) % 2], args, kv_head, tile + 1, cells);
    cp_async_commit();

    float p[4 * kBlocks];  // scores: [4 b + i] is n = 8 b + 2 c + (i & 1), cell r + 8 (i >> 1)
    const int row = side * 64 + warp * 16 + r;
    __half k_scale[2][kGroups];
#pragma unroll
    for (int h = 0; h < 2; ++h) load_scales(k_scale[h], stage.scale[0][row + 8 * h]);
    const uint32_t row_address = smem_address(stage.k[row]) + c * 16 + (r & 1) * 64, odd = r & 1 ? -128 : 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      // Chunk g 4 + c, exchanged with its neighbour 64 bytes on in odd rows.
      const uint32_t address = row_address + g * 64 + (g & 1 ? odd : 0);
      const uint4 w0 = load_shared16(address), w1 = load_shared16(address + 8 * kDim);
      const uint32_t upper[4] = {w0.x, w0.y, w0.z, w0.w}, lower[4] = {w1.x, w1.y, w1.z, w1.w};
      const uint32_t scale0 = both_halves(k_scale[0][g]), scale1 = both_halves(k_scale[1][g]);
      uint32_t a[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        a[j][0] = multiply_half2(codes_to_half2(upper[j], mask), scale0);
        a[j][1] = multiply_half2(codes_to_half2(lower[j], mask), scale1);
        a[j][2] = multiply_half2(codes_to_half2(upper[j] >> 8, mask), scale0);
        a[j][3] = multiply_half2(codes_to_half2(lower[j] >> 8, mask), scale1);
      }
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) wgmma_fp16(p, a[j], q + (g * 4 + j) * (2 * kBlocks * 128 / 16), g + j > 0);
      wgmma_commit();
      if (g > 0) wgmma_wait<1>();
    }
    wgmma_wait<0>();

    if (tile * kCells + kCells > fewest) {
      const int cell = tile * kCells + row;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int2 limit = *reinterpret_cast<const int2*>(&s.limit[8 * b + 2 * c]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (cell + (i & 2) * 4 >= (i & 1 ? limit.y : limit.x)) p[4 * b + i] = -INFINITY;
      }
    }
    // Writes P; gives the sums of this lane's two cells and whether a score passes its row's maximum by too much.
    float row_sum[2 * kBlocks];
    const auto store_p = [&] {
      bool passes = false;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const float2 factor = *reinterpret_cast<const float2*>(&s.factor[8 * b + 2 * c]);
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float exponent = fmaf(p[4 * b + i] - top[2 * b + (i & 1)], i & 1 ? factor.y : factor.x, kShift);
          passes |= exponent > kShift + kSlack;
          e[i] = exp2_fast(exponent);
        }
        row_sum[2 * b] = e[0] + e[2], row_sum[2 * b + 1] = e[1] + e[3];
        *reinterpret_cast<uint32_t*>(&s.p[side * 4 + warp][0][b][r][2 * c]) = pack_half2(e[0], e[1]);
        *reinterpret_cast<uint32_t*>(&s.p[side * 4 + warp][1][b][r][2 * c]) = pack_half2(e[2], e[3]);
      }
      fence_async_shared();
      return passes;
    };
    if (__syncthreads_or(store_p())) {  // rare: move the maxima, write P again
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        float x = fmaxf(p[i / 2 * 4 + (i & 1)], p[i / 2 * 4 + (i & 1) + 2]);
        for (int offset = 4; offset < 32; offset *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
        if (r == 0) s.most[warp_index][i / 2 * 8 + 2 * c + (i & 1)] = x;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        const int n = i / 2 * 8 + 2 * c + (i & 1), at = i / 2 * 4 + (i & 1);
        float x = top[i];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) x = fmaxf(x, s.most[w][n]);
        const float shrink = exp2_fast((top[i] - x) * s.factor[n]);
        top[i] = x;
        sum[i] *= shrink;
#pragma unroll
        for (int g = 0; g < kOwn; ++g) out[g][at] *= shrink, out[g][at + 2] *= shrink;
      }
      store_p();
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) sum[i] += row_sum[i];

#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {  // 32 cells: two steps of 16
      uint4 raw[kOwn];
      uint32_t a[kOwn][2][4];
#pragma unroll
      for (int g = 0; g < kOwn; ++g)
        raw[g] = load_matrix_transposed(smem_address(&stage.v[quarter * 32 + lane][(((side * kOwn + g) * 4 + warp) ^ (lane & 7)) * 16]));
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // cells 8 j + 2 c and the next
        __half scale[2][kOwn];
#pragma unroll
        for (int h = 0; h < 2; ++h) load_scales(scale[h], stage.scale[1][quarter * 32 + j * 8 + 2 * c + h] + side * kOwn);
#pragma unroll
        for (int g = 0; g < kOwn; ++g) {  // dims 2 r and 2 r + 1
          const uint32_t word = j == 0 ? raw[g].x : j == 1 ? raw[g].y : j == 2 ? raw[g].z : raw[g].w;
          const __half2 pair = __halves2half2(scale[0][g], scale[1][g]);
          a[g][j / 2][j % 2 * 2] = multiply_half2(codes_to_half2(word, mask), *reinterpret_cast<const uint32_t*>(&pair));
          a[g][j / 2][j % 2 * 2 + 1] = multiply_half2(codes_to_half2(word >> 8, mask), *reinterpret_cast<const uint32_t*>(&pair));
        }
      }
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int g = 0; g < kOwn; ++g) wgmma_fp16_mn(out[g], a[g][step], p_tile + (quarter * 2 + step) * (2 * kBlocks * 128 / 16));
      wgmma_commit();
      if (quarter > 0) wgmma_wait<1>();
    }
    wgmma_wait<0>();
  }
  cp_async_wait<0>();
  if (threadIdx.x == 0) status[static_cast<int64_t>(block) * kv_heads + kv_head] = bad;
  if (bad) return;

  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    for (int offset = 4; offset < 32; offset *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], offset);
    if (r == 0) s.most[warp_index][i / 2 * 8 + 2 * c + (i & 1)] = sum[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int n = i / 2 * 8 + 2 * c + (i & 1), at = i / 2 * 4 + (i & 1), token = n / group;
    if (token >= tokens) continue;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += s.most[w][n];
    const bool empty = tiles == 0 || s.limit[n] == 0;
    const float inverse = empty ? 0.0f : __frcp_rn(total);
    const int64_t head = static_cast<int64_t>(kv_head) * group + n % group;
    const char* gate = args.gate.data == nullptr || empty ? nullptr : args.gate.data + (first_token + token) * args.gate.stride + head * args.gate.head_stride;
#pragma unroll
    for (int g = 0; g < kOwn; ++g) {
      const int dim = (side * kOwn + g) * 64 + warp * 16 + 2 * r;
      const float x = empty ? 0.0f : out[g][at] * inverse, y = empty ? 0.0f : out[g][at + 2] * inverse;
      store_pair(args, ((first_token + token) * args.q_heads + head) * kDim + dim, x, y, gate, dim);
    }
  }
}

int64_t status_bytes(const AttnArgs& args) { return (dense_blocks(args) * args.kv_heads + 15) / 16 * 16; }

}  // namespace

int64_t dense_tokens(const AttnArgs& args) { return kRows / (args.q_heads / args.kv_heads); }
int64_t dense_blocks(const AttnArgs& args) { return (args.tokens + dense_tokens(args) - 1) / dense_tokens(args); }

bool dense_fits(const AttnArgs& args) {
  return args.dim == kDim && args.q_heads / args.kv_heads <= kRows && args.q_type != Float::f32 && dense_blocks(args) <= kMaxStatusBlocks;
}

int64_t dense_workspace_bytes(const AttnArgs& args) { return status_bytes(args) + args.tokens * static_cast<int64_t>(sizeof(int)); }

cudaError_t launch_dense(const AttnArgs& args, void* workspace, cudaStream_t stream) {
  uint8_t* status = static_cast<uint8_t*>(workspace);
  int* counts = reinterpret_cast<int*>(status + status_bytes(args));
  const auto count = args.wide_ids ? count_prefixes<int64_t> : count_prefixes<int>;
  const cudaError_t error = launch_overlapped(count, static_cast<unsigned>((args.tokens + 7) / 8), 256, 0, stream, args, counts);
  if (error != cudaSuccess) return error;
  return launch_overlapped(dense, static_cast<unsigned>(dense_blocks(args) * args.kv_heads), kThreads, sizeof(Shared) + 128, stream, args, counts, status);
}

}  // namespace mori::qsa
