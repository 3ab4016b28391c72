// qsa_flash for int8 KV, D 256, where the tokens' cells are simply 0 .. n-1, as in the first prompt of a sequence: dense attention.
//
// A CTA of four warpgroups owns 48 query rows of one KV head: the group's heads of a few neighbouring tokens, which share every cell.
// It first reads its tokens' ids. If each row is 0 .. n-1 and then empty, it computes them; if not, or if a scale is too large for
// fp16 codes or not finite, it leaves the tokens to the sparse kernel that follows, through `status`. No host sync, graph-safe.
// Tiles of 256 cells: S^T = K Q^T (warpgroup w scores cells 64 w ..), O^T = V^T P^T (warpgroup w owns dims 64 w ..), both wgmma
// m64n48k16 fp16, the codes converted and scaled in registers (one rounding of 2^-11). K of the next tile arrives during the softmax
// and P V, V during Q K. Bound by latency and issue slots (50 %): 299 us at T 1984 (H200). Lost: 24 rows and two CTAs a multiprocessor
// (the conversions serve half as many rows: 530 us).
#include "../common/launch_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "qsa_tensor_sm90.cuh"
#include "qsa_wgmma_sm90.cuh"

namespace mori::qsa {
namespace {

using namespace sm90;

constexpr int kDim = 256, kGroups = kDim / 64;
constexpr int kRows = 48;      // query rows of a CTA: columns of the products
constexpr int kBlocks = kRows / 8;
constexpr int kWarpgroups = 4, kWarps = 4 * kWarpgroups, kThreads = 32 * kWarps;
constexpr int kCells = 64 * kWarpgroups;  // of a tile
constexpr uint32_t kLargestScale = 0x6000;  // fp16 bits of 512: 127 times it is a finite fp16

struct Shared {
  alignas(128) uint8_t k[kCells][kDim];   // 16-byte chunk ^ 4 (row & 1)
  alignas(128) uint8_t v[kCells][kDim];   // 16-byte chunk ^ (row & 7)
  alignas(128) __half q[kDim / 16][2][kBlocks][8][8];    // [k16][k half][n block][n][k], dims permuted within 64 like the K words
  alignas(128) __half p[kCells / 16][2][kBlocks][8][8];  // [k16][k half][n block][k][n]
  alignas(16) __half k_scale[kCells][kGroups], v_scale[kCells][kGroups];
  float most[kWarps][kRows];                  // per warp: maxima, then sums
  float factor[kRows];
  int count[kRows], past[kRows];          // of each token: cells, and the slot after the last of them
  int cells[kRows];                       // n of each token, -1 when its row is no prefix
  int limit[kRows];                       // n of each query row
};
static_assert(sizeof(Shared) + 128 <= 227 * 1024, "shared memory of a multiprocessor");

// Q rows in fp16, each times a power of two that brings its largest value into [2^7, 2^8): 8 threads a row, 32 dims each.
__device__ __forceinline__ void load_q(Shared& s, const AttnArgs& args, int64_t first_token, int tokens, int group, int kv_head) {
  const int n = threadIdx.x / 8, part = threadIdx.x % 8, token = n / group;
  if (n >= kRows) return;  // whole warps
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
  if (part == 0) s.limit[n] = real ? s.cells[token] : 0;
  if (part == 0) s.factor[n] = isfinite(top) ? score_factor(args.sm_scale, exponent - 8) : __int_as_float(0x7fc00000);
}

// The number of cells of each token if its row is 0 .. n-1 and then empty, else -1. Warps share the rows' slots; all loads of a warp's
// piece are in flight together.
template <class Id>
__device__ __forceinline__ void classify(Shared& s, const AttnArgs& args, int64_t first_token, int tokens) {
  constexpr int kLoads = 16;
  const int lane = threadIdx.x % 32, slots = static_cast<int>(args.slots);
  const int per_token = max(1, kWarps / tokens), token0 = threadIdx.x / 32 / per_token, piece0 = threadIdx.x / 32 % per_token;
  for (int token = token0; token < tokens; token += max(1, kWarps / per_token)) {
    const Id* row = static_cast<const Id*>(args.ids) + (first_token + token) * args.slots;
    int count = 0, past = 0;  // cells, and the slot after the last of them
    bool prefix = true;
    for (int start = piece0 * 32 * kLoads; start < slots && __all_sync(~0u, prefix); start += per_token * 32 * kLoads) {
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
    count = __reduce_add_sync(~0u, count), past = __reduce_max_sync(~0u, past);
    if (!__all_sync(~0u, prefix)) past = 1 << 30;  // as if cells were missing before it
    if (lane == 0) atomicAdd(&s.count[token], count), atomicMax(&s.past[token], past);
  }
}

// Requests a tile of K or V; cells past the longest row are zeros.
__device__ __forceinline__ void copy(const DeviceRows& codes, const DeviceRows& scales, int kv_head, int tile, int cells, uint8_t (&target)[kCells][kDim],
                                     __half (&scale_target)[kCells][kDim / 64], bool value) {
  constexpr int kChunks = kDim / 16, kStep = kThreads / kChunks;
  const int chunk = threadIdx.x % kChunks, row = threadIdx.x / kChunks, left = cells - tile * kCells;
  const char* source = codes.data + kv_head * codes.head_stride + chunk * 16 + static_cast<int64_t>(tile * kCells) * codes.stride;
  asm volatile("" : "+l"(source));  // one wide multiply-add per copy: the sum is not taken apart
  const uint32_t stride = static_cast<uint32_t>(codes.stride);
  const uint32_t to = smem_address(&target[row][(chunk ^ (value ? row & 7 : (row & 1) << 2)) * 16]);  // kStep is a multiple of 8
#pragma unroll
  for (int j = 0; j < kCells / kStep; ++j) {
    const uint32_t at = j * kStep + row;
    cp_async<16>(to + j * kStep * kDim, source + static_cast<uint64_t>(at) * stride, static_cast<int>(at) < left);
  }
  if (threadIdx.x < kCells)
    cp_async<kDim / 32>(smem_address(scale_target[threadIdx.x]),
                        scales.data + kv_head * scales.head_stride + static_cast<int64_t>(tile * kCells + min(static_cast<int>(threadIdx.x), left - 1)) * scales.stride,
                        static_cast<int>(threadIdx.x) < left);
  cp_async_commit();
}

// Whether one of this thread's scales, which it copied itself, does not allow fp16 products.
__device__ __forceinline__ bool too_large(const __half (&scale)[kCells][kDim / 64]) {
  bool bad = false;
  if (threadIdx.x < kCells)
#pragma unroll
    for (int g = 0; g < kDim / 64; ++g) bad |= (__half_as_ushort(scale[threadIdx.x][g]) & 0x7fffu) > kLargestScale;
  return bad;
}

__global__ void __launch_bounds__(kThreads, 1) dense(const AttnArgs args, uint8_t* __restrict__ status) {
  extern __shared__ char raw_shared[];
  Shared& s = *reinterpret_cast<Shared*>(raw_shared + (-smem_address(raw_shared) & 127));
  wait_for_dependencies();
  launch_dependents();
  const int warp_index = __shfl_sync(~0u, threadIdx.x / 32, 0), side = warp_index / 4, warp = warp_index % 4, lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const int group = static_cast<int>(args.q_heads / args.kv_heads), per_cta = kRows / group, kv_heads = static_cast<int>(args.kv_heads);
  const int kv_head = blockIdx.x % kv_heads, block = gridDim.x / kv_heads - 1 - blockIdx.x / kv_heads;  // the longest rows first
  const int first_token = block * per_cta;
  const int tokens = static_cast<int>(min(static_cast<int64_t>(per_cta), args.tokens - first_token));
  const uint32_t mask = opaque(0x00ff00ffu);

  if (threadIdx.x < kRows) s.count[threadIdx.x] = s.past[threadIdx.x] = 0;
  __syncthreads();
  if (args.wide_ids) classify<int64_t>(s, args, first_token, tokens);
  else classify<int>(s, args, first_token, tokens);
  __syncthreads();
  if (threadIdx.x < tokens) s.cells[threadIdx.x] = s.count[threadIdx.x] == s.past[threadIdx.x] ? s.count[threadIdx.x] : -1;
  __syncthreads();
  int cells = 0, fewest = 1 << 30;
  bool bad = false;
  for (int t = 0; t < tokens; ++t) {
    bad |= s.cells[t] < 0;
    cells = max(cells, s.cells[t]);
    fewest = min(fewest, s.cells[t]);
  }
  const int tiles = bad ? 0 : (cells + kCells - 1) / kCells;
  if (tiles > 0) {
    copy(args.k, args.k_scale, kv_head, 0, cells, s.k, s.k_scale, false);
    copy(args.v, args.v_scale, kv_head, 0, cells, s.v, s.v_scale, true);
    load_q(s, args, first_token, tokens, group, kv_head);
    fence_async_shared();
    cp_async_wait<1>();
    bad = __syncthreads_or(too_large(s.k_scale));
  }

  const uint64_t q = core_descriptor(smem_address(s.q), kBlocks * 128, 128), p_tile = core_descriptor(smem_address(s.p), kBlocks * 128, 128);
  float out[4 * kBlocks] = {}, sum[2 * kBlocks] = {};
  float top[2 * kBlocks];
#pragma unroll
  for (float& value : top) value = kLowest;

  for (int tile = 0; tile < tiles && !bad; ++tile) {
    float p[4 * kBlocks];  // scores: [4 b + i] is n = 8 b + 2 c + (i & 1), cell r + 8 (i >> 1)
    const int row = side * 64 + warp * 16 + r;
    const uint32_t row_address = smem_address(s.k[row]) + c * 16 + (r & 1) * 64, odd = r & 1 ? -128 : 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      // Chunk g 4 + c, exchanged with its neighbour 64 bytes on in odd rows.
      const uint32_t address = row_address + g * 64 + (g & 1 ? odd : 0);
      const uint4 w0 = load_shared16(address), w1 = load_shared16(address + 8 * kDim);
      const uint32_t upper[4] = {w0.x, w0.y, w0.z, w0.w}, lower[4] = {w1.x, w1.y, w1.z, w1.w};
      const uint32_t scale0 = both_halves(s.k_scale[row][g]), scale1 = both_halves(s.k_scale[row + 8][g]);
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
      wgmma_wait<0>();  // keeping two groups in flight spills registers
    }

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
    const bool passes = store_p();
    cp_async_wait<0>();
    const bool large = too_large(s.v_scale);
    if (__syncthreads_or(passes || large)) {  // rare: give up, or move the maxima and write P again
      bad = __syncthreads_or(large);
      if (bad) break;
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
        out[at] *= shrink, out[at + 2] *= shrink;
      }
      store_p();
      __syncthreads();
    }
    // All have read K, all have written P, V has landed.
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) sum[i] += row_sum[i];
    if (tile + 1 < tiles) copy(args.k, args.k_scale, kv_head, tile + 1, cells, s.k, s.k_scale, false);

#pragma unroll
    for (int i = 0; i < kCells / 32; ++i) {  // 32 cells: two steps of 16
      const uint4 raw = load_matrix_transposed(smem_address(&s.v[i * 32 + lane][((side * 4 + warp) ^ (lane & 7)) * 16]));
      const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};  // cells 8 j + 2 c and the next, dims 2 r and 2 r + 1
      uint32_t a[2][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const __half2 pair = __halves2half2(s.v_scale[i * 32 + j * 8 + 2 * c][side], s.v_scale[i * 32 + j * 8 + 2 * c + 1][side]);
        const uint32_t scale = *reinterpret_cast<const uint32_t*>(&pair);
        a[j / 2][j % 2 * 2] = multiply_half2(codes_to_half2(word[j], mask), scale);
        a[j / 2][j % 2 * 2 + 1] = multiply_half2(codes_to_half2(word[j] >> 8, mask), scale);
      }
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) wgmma_fp16_mn(out, a[step], p_tile + (i * 2 + step) * (2 * kBlocks * 128 / 16));
      wgmma_commit();
      if (i > 0) wgmma_wait<1>();
    }
    wgmma_wait<0>();
    cp_async_wait<0>();
    bad = __syncthreads_or(tile + 1 < tiles && too_large(s.k_scale));  // K has landed; all have read P and V
    if (tile + 1 < tiles) copy(args.v, args.v_scale, kv_head, tile + 1, cells, s.v, s.v_scale, true);
  }
  cp_async_wait<0>();
  if (threadIdx.x == 0) status[static_cast<int64_t>(block) * kv_heads + kv_head] = bad;
  if (bad) return;

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
    const bool empty = s.cells[token] == 0;
    const float inverse = empty ? 0.0f : __frcp_rn(total);
    const int64_t head = static_cast<int64_t>(kv_head) * group + n % group;
    const char* gate = args.gate.data == nullptr || empty ? nullptr : args.gate.data + (first_token + token) * args.gate.stride + head * args.gate.head_stride;
    const int dim = side * 64 + warp * 16 + 2 * r;
    store_pair(args, (static_cast<int64_t>(first_token + token) * args.q_heads + head) * kDim + dim, empty ? 0.0f : out[at] * inverse, empty ? 0.0f : out[at + 2] * inverse, gate, dim);
  }
}

}  // namespace

int64_t dense_tokens(const AttnArgs& args) { return kRows / (args.q_heads / args.kv_heads); }
int64_t dense_blocks(const AttnArgs& args) { return (args.tokens + dense_tokens(args) - 1) / dense_tokens(args); }

bool dense_fits(const AttnArgs& args) {
  return args.dim == kDim && args.q_heads / args.kv_heads <= kRows && args.q_type != Float::f32 && dense_blocks(args) <= kMaxStatusBlocks;
}

cudaError_t launch_dense(const AttnArgs& args, uint8_t* status, cudaStream_t stream) {
  return launch_overlapped(dense, static_cast<unsigned>(dense_blocks(args) * args.kv_heads), kThreads, sizeof(Shared) + 128, stream, args, status);
}

}  // namespace mori::qsa
