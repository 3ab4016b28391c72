// qsa_flash for int8 KV, D 256, where the tokens' cells are simply 0 .. n-1, as in the first prompt of a sequence: dense attention.
//
// A CTA owns up to 128 query rows of one KV head: the group's heads of a few neighbouring tokens, which share every cell. It first reads
// its tokens' ids. If each row is 0 .. n-1 and then empty, it computes them; if not, or if a scale is too large for fp16 codes or not
// finite, it leaves the tokens to the sparse kernel that follows, through `status`. No host sync, graph-safe.
// Three warpgroups over tiles of 64 cells, two stages:
//   a producer brings the codes and writes them as fp16, times their scales (one rounding of 2^-11), into swizzled shared memory
//   two consumers of 64 rows: S = Q K^T (wgmma m64n64k16), P = 2^(S - m), O += P V (m64n256k16, P in registers, V read transposed);
//   the scores of a tile are multiplied while the values of the one before are, and weighed meanwhile.
// A tile moves 320 KB through shared memory, 2560 cycles where its products need 2048, and takes about 4000 (H200). Lost: codes converted in
// registers as the products' first operand, for 48 query rows (every row converts them again: 298 us at T 1984, now 180).
#include "../common/launch_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "qsa_tensor_sm90.cuh"
#include "qsa_wgmma_sm90.cuh"

namespace mori::qsa {
namespace {

using namespace sm90;

constexpr int kDim = 256, kGroups = kDim / 64;
constexpr int kRows = 128;  // query rows of a CTA
constexpr int kCells = 64;  // of a tile
constexpr int kStages = 2;
constexpr int kThreads = 384, kProducers = 128, kConsumers = kThreads - kProducers;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // of a thread; at launch 168
constexpr int kPieces = kCells * kDim / 16 / kProducers;  // of 16 codes, of a producer thread and tile of K or V
constexpr int kNotFinite = 1 << 30;
constexpr uint32_t kLargestScale = 0x6000;  // fp16 bits of 512: 127 times it is a finite fp16

using Block = __half[64];  // a row of 128 bytes: 64 dims, 16-byte chunk ^ (row & 7)

struct Shared {
  alignas(1024) Block q[kGroups][kRows];
  alignas(1024) Block k[kStages][kGroups][kCells], v[kStages][kGroups][kCells];
  uint4 codes[2][kPieces][kProducers];  // of K and V on their way: each producer thread's own
  int exponent[kRows];  // of the query rows in fp16
  int cells[kRows];  // n of each token, -1 when its row is no prefix
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  int bad;  // a scale does not allow fp16 products
};
static_assert(sizeof(Shared) + 1024 <= 227 * 1024, "shared memory of a multiprocessor");

// False where a row's first slot shows already that it is no prefix: cheap, for prompts that select.
template <class Id>
__device__ __forceinline__ bool may_be_prefixes(const AttnArgs& args, int64_t first_token, int tokens) {
  bool possible = true;
#pragma unroll 1
  for (int token = threadIdx.x % 32; token < tokens; token += 32) {
    const Id id = __ldg(static_cast<const Id*>(args.ids) + (first_token + token) * args.slots);
    possible &= id <= 0 || id >= args.cells;
  }
  return __all_sync(~0u, possible);
}

// The number of cells of each token if its row is 0 .. n-1 and then empty, else -1. A warp a token.
template <class Id>
__device__ __forceinline__ void classify(Shared& s, const AttnArgs& args, int64_t first_token, int tokens) {
  constexpr int kLoads = 16;
  const int lane = threadIdx.x % 32, slots = static_cast<int>(args.slots);
  for (int token = threadIdx.x / 32; token < tokens; token += kThreads / 32) {
    const Id* row = static_cast<const Id*>(args.ids) + (first_token + token) * args.slots;
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
    if (lane == 0) s.cells[token] = prefix && count == past ? count : -1;
  }
}

// Q rows on their way: 8 consumer threads a row, 32 dims each.
struct Queries {
  static constexpr int kStep = kConsumers / 8;
  uint4 raw[kRows / kStep][4];

  __device__ __forceinline__ void request(const AttnArgs& args, int thread, int64_t first_token, int tokens, int group, int kv_head) {
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      const int n = thread / 8 + i * kStep, token = n / group;
      const int64_t head = static_cast<int64_t>(kv_head) * group + n % group;
      const char* row = args.q.data + (first_token + token) * args.q.stride + head * args.q.head_stride + thread % 8 * 64;
#pragma unroll
      for (int j = 0; j < 4; ++j) raw[i][j] = token < tokens ? load_global16(row + j * 16) : make_uint4(0, 0, 0, 0);
    }
  }

  // In fp16, each row times a power of two that brings its largest value into [2^7, 2^8).
  __device__ __forceinline__ void store(Shared& s, const AttnArgs& args, int thread) const {
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      const int n = thread / 8 + i * kStep, part = thread % 8;
      float2 value[4][4];
      float top = 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t word[4] = {raw[i][j].x, raw[i][j].y, raw[i][j].z, raw[i][j].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          value[j][k] = args.q_type == Float::f16 ? unpack_half2(word[k]) : unpack_bf162(word[k]);
          top = fmaxf(top, fmaxf(fabsf(value[j][k].x), fabsf(value[j][k].y)));
        }
      }
      for (int offset = 1; offset < 8; offset *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
      const int exponent = exponent_of(top), up = 8 - exponent;
      const float half = args.sm_scale < 0 ? -power_of_two(up / 2) : power_of_two(up / 2), rest = power_of_two(up - up / 2);  // 2^157 is no fp32 number
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t pair[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) pair[k] = pack_half2(value[j][k].x * half * rest, value[j][k].y * half * rest);
        *reinterpret_cast<uint4*>(&s.q[part / 2][n][((part % 2 * 4 + j) ^ (n & 7)) * 8]) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
      }
      if (part == 0) s.exponent[n] = isfinite(top) ? exponent - 8 : kNotFinite;
    }
  }
};

// One of K and V as a producer thread brings it: half of the 16-byte pieces of one cell of each tile, every other one.
struct Source {
  const char *codes, *scales;
  uint32_t stride, scale_stride;
  uint32_t staged;  // this thread's first piece on its way
  uint2 scale;      // of the tile requested last, fp16

  __device__ __forceinline__ Source(Shared& s, const DeviceRows& rows, const DeviceRows& scale_rows, int kv_head, int thread, int which)
      : codes(rows.data + kv_head * rows.head_stride + thread % 2 * 16),
        scales(scale_rows.data + kv_head * scale_rows.head_stride),
        stride(static_cast<uint32_t>(rows.stride)),
        scale_stride(static_cast<uint32_t>(scale_rows.stride)),
        staged(smem_address(&s.codes[which][0][thread])) {}

  // Only what is below a limit is read; the rest are zeros.
  __device__ __forceinline__ void request_codes(int cell, int limit) const {
    const char* from = offset_by(codes, cell, stride);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) cp_async<16>(staged + i * kProducers * 16, from + i * 32, cell < limit);
    cp_async_commit();
  }
  __device__ __forceinline__ void request_scales(int cell, int limit) {
    scale = cell < limit ? __ldg(reinterpret_cast<const uint2*>(offset_by(scales, cell, scale_stride))) : make_uint2(0, 0);
  }

  // Writes this thread's part of a tile. Odd threads take the two pieces of a group in reverse: no two of a store's eight lanes meet in a bank.
  __device__ __forceinline__ void expand(int thread, uint32_t target) const {
    constexpr int kAhead = 4;
    const int odd = thread % 2, cell = thread / 2;
    const uint32_t row = target + cell * sizeof(Block), swap = odd * kProducers * 16;
    const uint32_t even_chunk = 6 * odd ^ cell % 8, odd_chunk = (4 - 2 * odd) ^ cell % 8;
    uint4 raw[kPieces];
    const auto load = [&](int i) { raw[i] = load_shared16(i % 2 == 0 ? staged + swap + i * kProducers * 16 : staged - swap + i * kProducers * 16); };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i + kAhead < kPieces) load(i + kAhead);
      const uint32_t word[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w}, pair = i < 4 ? scale.x : scale.y;
      const uint32_t factor = __byte_perm(pair, pair, i % 4 < 2 ? 0x1010 : 0x3232);
      uint32_t value[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) codes_in_order(word[j], value[2 * j], value[2 * j + 1]);
#pragma unroll
      for (uint32_t& x : value) x = multiply_half2(x, factor);
      const uint32_t to = row + i / 2 * (kCells * sizeof(Block)), chunk = i % 2 == 0 ? even_chunk : odd_chunk;
      store_shared16(to + chunk * 16, value[0], value[1], value[2], value[3]);
      store_shared16(to + (chunk ^ 1) * 16, value[4], value[5], value[6], value[7]);
    }
  }

  __device__ __forceinline__ bool too_large() const {
    const uint32_t bits[4] = {scale.x & 0x7fffu, scale.x >> 16 & 0x7fffu, scale.y & 0x7fffu, scale.y >> 16 & 0x7fffu};
    return max(max(bits[0], bits[1]), max(bits[2], bits[3])) > kLargestScale;
  }
};

// The producers' part; the codes of the first tile are on their way.
__device__ __forceinline__ void produce(Shared& s, Source& k, Source& v, int tiles, int cells) {
  const int thread = threadIdx.x;
  k.request_scales(thread / 2, cells);
  v.request_scales(thread / 2, cells);
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages, round = tile / kStages, next = (tile + 1) * kCells + thread / 2, limit = tile + 1 < tiles ? cells : 0;
    const auto hand_over = [&](Source& source, Block (&target)[kGroups][kCells], uint64_t& full, uint64_t& empty) {
      cp_async_wait<1>();
      if (round > 0) mbarrier_wait(smem_address(&empty), (round - 1) & 1);
      if (source.too_large()) s.bad = 1;
      source.expand(thread, smem_address(target));
      fence_async_shared();
      mbarrier_arrive(smem_address(&full));
      source.request_codes(next, limit);
      source.request_scales(next, limit);
    };
    hand_over(k, s.k[stage], s.k_full[stage], s.k_empty[stage]);
    hand_over(v, s.v[stage], s.v_full[stage], s.v_empty[stage]);
  }
}

__global__ void __launch_bounds__(kThreads, 1) dense(const AttnArgs args, uint8_t* __restrict__ status) {
  extern __shared__ char raw_shared[];
  Shared& s = *reinterpret_cast<Shared*>(raw_shared + (-smem_address(raw_shared) & 1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&s.k_full[i]), kProducers), mbarrier_init(smem_address(&s.v_full[i]), kProducers);
      mbarrier_init(smem_address(&s.k_empty[i]), kConsumers / 32), mbarrier_init(smem_address(&s.v_empty[i]), kConsumers / 32);
    }
    mbarrier_init_fence();
    s.bad = 0;
  }
  wait_for_dependencies();
  launch_dependents();
  const int group = static_cast<int>(args.q_heads / args.kv_heads), per_cta = kRows / group, kv_heads = static_cast<int>(args.kv_heads);
  const int kv_head = blockIdx.x % kv_heads, block = gridDim.x / kv_heads - 1 - blockIdx.x / kv_heads;  // the longest rows first
  const int64_t first_token = static_cast<int64_t>(block) * per_cta;
  const int tokens = static_cast<int>(min(static_cast<int64_t>(per_cta), args.tokens - first_token));

  uint8_t* left = status + static_cast<int64_t>(block) * kv_heads + kv_head;
  if (!(args.wide_ids ? may_be_prefixes<int64_t>(args, first_token, tokens) : may_be_prefixes<int>(args, first_token, tokens))) {  // the same in all warps
    if (threadIdx.x == 0) *left = 1;
    return;
  }
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x - kProducers;  // of the consumers
  Source k_source(s, args.k, args.k_scale, kv_head, threadIdx.x, 0), v_source(s, args.v, args.v_scale, kv_head, threadIdx.x, 1);
  Queries queries;
  if (warpgroup == 0) {
    k_source.request_codes(threadIdx.x / 2, static_cast<int>(args.cells));
    v_source.request_codes(threadIdx.x / 2, static_cast<int>(args.cells));
  } else {
    queries.request(args, thread, first_token, tokens, group, kv_head);
  }
  if (args.wide_ids) classify<int64_t>(s, args, first_token, tokens);
  else classify<int>(s, args, first_token, tokens);
  __syncthreads();
  int cells = 0, fewest = 1 << 30;
  for (int t = 0; t < tokens; ++t) {
    cells = max(cells, s.cells[t]);
    fewest = min(fewest, s.cells[t]);
  }
  if (fewest < 0) {
    if (threadIdx.x == 0) *left = 1;
    cp_async_wait<0>();
    return;
  }
  const int tiles = (cells + kCells - 1) / kCells;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    produce(s, k_source, v_source, tiles, cells);
    cp_async_wait<0>();
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
  const int side = warpgroup - 1, warp = __shfl_sync(~0u, thread / 32 % 4, 0), lane = thread % 32, r = lane / 4, c = lane % 4;
  queries.store(s, args, thread);
  fence_async_shared();
  asm volatile("barrier.cta.sync 1, 256;" ::: "memory");

  const int first_row = side * 64 + warp * 16 + r;  // this lane's rows: it and the eighth after it
  int limit[2];
  float factor[2], top[2] = {kLowest, kLowest}, sum[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int n = first_row + 8 * h;
    limit[h] = n / group < tokens ? s.cells[n / group] : 0;
    factor[h] = s.exponent[n] == kNotFinite ? __int_as_float(0x7fc00000) : score_factor(args.sm_scale, s.exponent[n]);
  }
  const uint64_t q = swizzled_descriptor(smem_address(s.q[0][side * 64])), k = swizzled_descriptor(smem_address(s.k)),
                 v = swizzled_mn_descriptor(smem_address(s.v), kCells * sizeof(Block));
  constexpr int kStageStep = kGroups * kCells * sizeof(Block) / 16;
  float out[kDim / 2], score[kCells / 2];  // [4 b + i]: row r + 8 (i >> 1), column 8 b + 2 c + (i & 1)
  uint32_t p[kCells / 16][4];
#pragma unroll
  for (float& x : out) x = 0.0f;

  const auto multiply_keys = [&](int tile) {
    const int stage = tile % kStages;
    mbarrier_wait(smem_address(&s.k_full[stage]), tile / kStages & 1);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step)
      wgmma_fp16_shared(score, q + step / 4 * (kRows * sizeof(Block) / 16) + step % 4 * 2,
                        k + stage * kStageStep + step / 4 * (kCells * sizeof(Block) / 16) + step % 4 * 2, step > 0);
    wgmma_commit();
  };
  const auto add_values = [&](int tile) {
    const int stage = tile % kStages;
    mbarrier_wait(smem_address(&s.v_full[stage]), tile / kStages & 1);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kCells / 16; ++step) wgmma_fp16_mn(out, p[step], v + stage * kStageStep + step * (16 * sizeof(Block) / 16));
    wgmma_commit();
  };
  const auto release = [&](uint64_t& empty) {
    if (lane == 0) mbarrier_arrive(smem_address(&empty));
  };
  // Scores become weights; whether the maxima moved, and by what the sums so far shrink.
  float shrink[2];
  const auto weigh = [&](int tile) {
    if (tile * kCells + kCells > fewest) {
#pragma unroll
      for (int i = 0; i < kCells / 2; ++i)
        if (tile * kCells + i / 4 * 8 + 2 * c + (i & 1) >= limit[i / 2 & 1]) score[i] = -INFINITY;
    }
    float most[2] = {top[0], top[1]};
#pragma unroll
    for (int i = 0; i < kCells / 2; ++i) most[i / 2 & 1] = fmaxf(most[i / 2 & 1], score[i]);
    const bool move = __any_sync(~0u, (most[0] - top[0]) * factor[0] > kSlack || (most[1] - top[1]) * factor[1] > kSlack);
    if (move) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        for (int offset = 1; offset < 4; offset *= 2) most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], offset));
        shrink[h] = exp2_fast((top[h] - most[h]) * factor[h]);
        top[h] = most[h];
        sum[h] *= shrink[h];
      }
    }
#pragma unroll
    for (int i = 0; i < kCells / 2; ++i) {
      score[i] = exp2_fast(fmaf(score[i] - top[i / 2 & 1], factor[i / 2 & 1], kShift));
      sum[i / 2 & 1] += score[i];
    }
    return move;
  };
  const auto pack = [&] {
#pragma unroll
    for (int i = 0; i < kCells / 4; ++i) p[i / 4][i % 4] = pack_half2(score[2 * i], score[2 * i + 1]);
  };

  if (tiles > 0) {
    multiply_keys(0);
    wgmma_wait<0>();
    release(s.k_empty[0]);
    weigh(0);
    pack();
    for (int tile = 1; tile < tiles; ++tile) {
      multiply_keys(tile);
      add_values(tile - 1);
      wgmma_wait<1>();
      release(s.k_empty[tile % kStages]);
      const bool move = weigh(tile);
      wgmma_wait<0>();
      release(s.v_empty[(tile - 1) % kStages]);
      if (move) {
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) out[i] *= shrink[i / 2 & 1];
      }
      pack();
    }
    add_values(tiles - 1);
    wgmma_wait<0>();
  }
  const bool bad = s.bad != 0;
  if (thread == 0) *left = bad;
  if (bad) return;
  // Through shared memory, where this warp's rows of Q were, 128 dims at a time: [32 dims][row][dim], 16-byte chunk ^ 2 (row & 3).
  asm volatile("barrier.cta.sync %0, 128;" ::"r"(2 + side) : "memory");
  const int first = side * 64 + warp * 16;
  const auto staged = [&](int row, int chunk) { return reinterpret_cast<float*>(s.q[chunk / 8][first + row]) + (chunk % 8 ^ (row & 3) << 1) * 4; };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    for (int offset = 1; offset < 4; offset *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], offset);
    sum[h] = __frcp_rn(sum[h]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    __syncwarp();
#pragma unroll
    for (int b = 0; b < kDim / 16; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* x = &out[half * (kDim / 4) + 4 * b + 2 * h];
        *reinterpret_cast<float2*>(staged(r + 8 * h, 2 * b + c / 2) + c % 2 * 2) = limit[h] == 0 ? float2{} : make_float2(x[0] * sum[h], x[1] * sum[h]);
      }
    __syncwarp();
    int own = first / group, head = first % group;  // of the row, in this CTA
#pragma unroll 4
    for (int row = 0; row < 16 && own < tokens; ++row) {
      const int64_t token = first_token + own, q_head = kv_head * group + head;
      const int dim = half * (kDim / 2) + lane * 4;
      const char* gate = args.gate.data == nullptr || s.cells[own] == 0 ? nullptr : args.gate.data + token * args.gate.stride + q_head * args.gate.head_stride;
      store_four(args, (token * args.q_heads + q_head) * kDim + dim, *reinterpret_cast<const float4*>(staged(row, lane)), gate, dim);
      if (++head == group) head = 0, ++own;
    }
  }
}

}  // namespace

int64_t dense_tokens(const AttnArgs& args) { return kRows / (args.q_heads / args.kv_heads); }
int64_t dense_blocks(const AttnArgs& args) { return (args.tokens + dense_tokens(args) - 1) / dense_tokens(args); }

bool dense_fits(const AttnArgs& args) {
  return args.dim == kDim && args.q_heads / args.kv_heads <= kRows && args.q_type != Float::f32 && dense_blocks(args) <= kMaxStatusBlocks;
}

cudaError_t launch_dense(const AttnArgs& args, uint8_t* status, cudaStream_t stream) {
  return launch_overlapped(dense, static_cast<unsigned>(dense_blocks(args) * args.kv_heads), kThreads, sizeof(Shared) + 1024, stream, args, status);
}

}  // namespace mori::qsa
