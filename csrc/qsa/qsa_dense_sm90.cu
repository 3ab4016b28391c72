// qsa_flash for int8 KV, D 256, where the tokens' cells are simply 0 .. n-1, as in the first prompt of a sequence: dense attention.
//
// A CTA owns up to 128 query rows of one KV head: the group's heads of a few neighbouring tokens, which share every cell; while
// multiprocessors are idle, the blocks of the longest rows are halved. It first reads its tokens' ids. If each row is 0 .. n-1 and then
// empty, it computes them; if not, or if a scale is too large for fp16 codes or not finite, it leaves the tokens to the sparse kernel that
// follows, through `status`. No host sync, graph-safe.
// Three warpgroups over tiles of 64 cells, two stages:
//   a producer brings the codes and writes them as fp16, times their scales (one rounding of 2^-11), into swizzled shared memory
//   two consumers of 64 rows: S = Q K^T (wgmma m64n64k16), P = 2^(S - m), O += P V (m64n256k16, P in registers, V read transposed);
//   the scores of a tile are multiplied while the values of the one before are, and weighed meanwhile; the consumers take turns.
// The proxy fence is the consumers': it waits for a thread's loads, and the producer has some on their way.
// Bound by shared memory: a tile moves 320 KB, 2560 cycles where its products need 2048, and takes about 3200 (H200, as all figures here:
// 2026-11-30, microseconds at T 1984 / 512). Start and end of a CTA take as long as three tiles.
// Lost: codes converted in registers as the products' first operand, for 48 query rows (every row converts them again: 298); codes by way
// of registers instead of shared memory (137 / 24.8 against 131 / 23.8: as many bytes, waited for at once); two producers (148 / 28.8
// against 153 / 29.1 as it was then, not worth 512 threads); the fence in the producer (134 / 24.1); consumers that do not take turns
// (135 / 24.2); exponentials kept before the wait for the products (134 / 24.0); ids guessed at first and read at the end (131 / 23.8);
// 64 rows in every CTA (205 / 30.9 against 153 / 29.1); ids of the next wave brought to the L2 (182 against 158).
// Where T 1984 tokens select, four waves of CTAs look and leave: 4.5 us from the first look to the sparse kernel's first CTA, 1 at T 512.
// Lost: one CTA a multiprocessor that looks at all its blocks at once and then loops over them (1.6 us less there; where the blocks are
// prefixes in a larger pool after all, 188 against 136, with spills).
#include <algorithm>

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
  alignas(1024) Block q[kGroups][kRows];  // and the output at the end
  alignas(1024) Block k[kStages][kGroups][kCells], v[kStages][kGroups][kCells];
  uint4 codes[2][kPieces][kProducers];  // of K and V on their way: each producer thread's own
  int exponent[kRows];  // of the query rows in fp16
  int cells[kRows];  // n of each token, -1 when its row is no prefix
  uint64_t k_full[kStages], v_full[kStages], k_empty[kStages], v_empty[kStages];
  int bad;  // a scale does not allow fp16 products
};
static_assert(sizeof(Shared) + 1024 <= 227 * 1024, "shared memory of a multiprocessor");

// What a CTA computes: a block of tokens for a KV head, or one half of it.
struct Rows {
  uint32_t group;
  int kv_head, block, tokens;
  int64_t first_token;
  bool whole;
  int half;

  __device__ __forceinline__ Rows(const AttnArgs& args, int split) {  // the last `split` blocks are halved
    const uint32_t kv_heads = static_cast<uint32_t>(args.kv_heads);
    group = static_cast<uint32_t>(args.q_heads) / kv_heads;
    const int per_block = kRows / group, place = blockIdx.x / kv_heads, last = gridDim.x / kv_heads - split - 1;
    kv_head = blockIdx.x % kv_heads;
    whole = place >= 2 * split;
    half = whole ? 0 : place % 2;
    block = last - (whole ? place - split : place / 2);  // the longest rows first
    first_token = static_cast<int64_t>(block) * per_block + half * (per_block / 2);
    tokens = static_cast<int>(max(int64_t{0}, min(static_cast<int64_t>(whole ? per_block : per_block / 2), args.tokens - first_token)));
  }
};

// A lane's share of 32 * kLoads ids of a row, -1 for what is no id.
struct Ids {
  static constexpr int kLoads = 32;
  int id[kLoads];

  __device__ __forceinline__ void request(const AttnArgs& args, int64_t at, int left, int lane) {
    if (args.wide_ids) {
      const int2* from = static_cast<const int2*>(args.ids) + at + lane;
      asm volatile("" : "+l"(from));
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int2 wide = i * 32 + lane < left ? __ldg(from + i * 32) : make_int2(0, -1);
        id[i] = wide.y == 0 ? wide.x : -1;
      }
    } else {
      const int* from = static_cast<const int*>(args.ids) + at + lane;
      asm volatile("" : "+l"(from));  // one address, the loads' offsets are constants
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        id[i] = -1;
        if (i * 32 + lane < left) asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(id[i]) : "l"(from + i * 32));
      }
    }
  }
};

// False where a row's first slot shows already that it is no prefix: cheap, for prompts that select.
__device__ __forceinline__ bool may_be_prefixes(const AttnArgs& args, const Rows& rows, int lane) {
  bool possible = true;
#pragma unroll 1
  for (int token = lane; token < rows.tokens; token += 32) possible &= cell_of(args, rows.first_token + token, 0) <= 0;
  return __all_sync(~0u, possible);
}

// The number of cells of each token if its row is 0 .. n-1 and then empty, else -1. A warp a token.
__device__ __forceinline__ void classify(Shared& s, const AttnArgs& args, const Rows& rows, int warp, int lane) {
  constexpr int kWarps = kThreads / 32, kStep = 32 * Ids::kLoads;
  const int slots = static_cast<int>(args.slots);
  const uint32_t cells = static_cast<uint32_t>(args.cells);
#pragma unroll 1
  for (int token = warp; token < rows.tokens; token += kWarps) {
    int count = 0, past = 0;  // cells, and the slot after the last of them
    bool prefix = true;
#pragma unroll 1
    for (int start = 0; start < slots && __all_sync(~0u, prefix); start += kStep) {
      Ids ids;
      ids.request(args, (rows.first_token + token) * args.slots + start, slots - start, lane);
#pragma unroll
      for (int i = 0; i < Ids::kLoads; ++i) {
        const int slot = start + lane + i * 32;
        if (static_cast<uint32_t>(ids.id[i]) >= cells) continue;
        prefix &= ids.id[i] == slot;
        past = slot + 1;
        ++count;
      }
    }
    prefix = __all_sync(~0u, prefix);
    count = __reduce_add_sync(~0u, count), past = __reduce_max_sync(~0u, past);
    if (lane == 0) s.cells[token] = prefix && count == past ? count : -1;
  }
}

// Q rows, first as they are, where they will lie in fp16: 8 consumer threads a row, 32 dims each.
struct Queries {
  static constexpr int kStep = kConsumers / 8;

  static __device__ __forceinline__ uint32_t place(Shared& s, int n, int part, int j) {
    return smem_address(&s.q[part / 2][n][((part % 2 * 4 + j) ^ (n & 7)) * 8]);
  }
  static __device__ __forceinline__ void request(Shared& s, const AttnArgs& args, int thread, const Rows& rows, int sides) {
    const int part = thread % 8;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      if (i * kStep >= sides * (kRows / 2)) break;
      const uint32_t n = thread / 8 + i * kStep;
      const int token = n / rows.group;
      const bool valid = token < rows.tokens;
      const int64_t head = static_cast<int64_t>(rows.kv_head) * rows.group + n % rows.group;
      const char* row = args.q.data + (valid ? (rows.first_token + token) * args.q.stride + head * args.q.head_stride : 0) + part * 64;
#pragma unroll
      for (int j = 0; j < 4; ++j) cp_async<16>(place(s, n, part, j), row + j * 16, valid);
    }
    cp_async_commit();
  }

  // In fp16, each row times a power of two that brings its largest value into [2^7, 2^8) (a subnormal one below that: exact as well).
  template <bool kHalf>
  static __device__ __forceinline__ void convert(Shared& s, const AttnArgs& args, int thread, int sides) {
    const int part = thread % 8;
#pragma unroll 1
    for (int first = thread / 8; first < sides * (kRows / 2); first += 2 * kStep) {
      uint4 raw[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) raw[i][j] = load_shared16(place(s, first + i * kStep, part, j));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int n = first + i * kStep;
        uint32_t most = 0;  // bits of the largest magnitude
#pragma unroll
        for (const uint4& x : raw[i])
          most = __vmaxu2(most, __vmaxu2(__vmaxu2(x.x & 0x7fff7fffu, x.y & 0x7fff7fffu), __vmaxu2(x.z & 0x7fff7fffu, x.w & 0x7fff7fffu)));
        for (int offset = 1; offset < 8; offset *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, offset));
        most = max(most & 0xffffu, most >> 16);
        const int exponent = static_cast<int>(max(most >> (kHalf ? 10 : 7), 1u)) - (kHalf ? 14 : 126), up = 8 - exponent;
        // Two steps: 2^133 is no fp32 number.
        const float half = args.sm_scale < 0 ? -power_of_two(up / 2) : power_of_two(up / 2), rest = power_of_two(up - up / 2);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t word[4] = {raw[i][j].x, raw[i][j].y, raw[i][j].z, raw[i][j].w};
          uint32_t pair[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float2 value = kHalf ? unpack_half2(word[k]) : unpack_bf162(word[k]);
            pair[k] = pack_half2(value.x * half * rest, value.y * half * rest);
          }
          store_shared16(place(s, n, part, j), pair[0], pair[1], pair[2], pair[3]);
        }
        if (part == 0) s.exponent[n] = most < (kHalf ? 0x7c00u : 0x7f80u) ? exponent - 8 : kNotFinite;
      }
    }
  }
};

// One of K and V as a producer thread brings it: 16 of every 64 codes of two cells of each tile.
struct Source {
  static constexpr int kOwn = 2, kOwnStep = kProducers / 4;  // cells of a thread
  const char *codes, *scales;
  uint32_t stride, scale_stride;
  uint32_t staged;  // this thread's first piece on its way
  uint2 scale[kOwn];  // of the tile on its way, fp16

  __device__ __forceinline__ Source(Shared& s, const DeviceRows& rows, const DeviceRows& scale_rows, int kv_head, int thread, int which)
      : codes(rows.data + kv_head * rows.head_stride + thread % 4 * 16),
        scales(scale_rows.data + kv_head * scale_rows.head_stride),
        stride(static_cast<uint32_t>(rows.stride)),
        scale_stride(static_cast<uint32_t>(scale_rows.stride)),
        staged(smem_address(&s.codes[which][0][thread])) {}

  // Only what is below a limit is read; the rest are zeros.
  __device__ __forceinline__ void request_scales(int thread, int tile, int limit) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int cell = tile * kCells + i * kOwnStep + thread / 4;
      scale[i] = cell < limit ? __ldg(reinterpret_cast<const uint2*>(offset_by(scales, cell, scale_stride))) : make_uint2(0, 0);
    }
  }
  __device__ __forceinline__ void request(int thread, int tile, int limit) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int cell = tile * kCells + i / 4 * kOwnStep + thread / 4;
      cp_async<16>(staged + i * kProducers * 16, offset_by(codes, cell, stride) + i % 4 * 64, cell < limit);
    }
    cp_async_commit();
    request_scales(thread, tile, limit);
  }
  // The first tile was requested before the number of cells was known.
  __device__ __forceinline__ void clear_from(int thread, int limit) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (i * kOwnStep + thread / 4 >= limit) scale[i] = make_uint2(0, 0);
  }

  // Writes this thread's part of a tile. The eight lanes of a store have two neighbouring cells: no two of them meet in a bank.
  __device__ __forceinline__ void expand(int thread, uint32_t target) const {
    const uint32_t row = target + thread / 4 * sizeof(Block), chunk = 2 * (thread % 4) ^ (thread / 4 & 7);
    constexpr int kAhead = 4;
    uint4 raw[kPieces];
    const auto load = [&](int i) { raw[i] = load_shared16(staged + i * kProducers * 16); };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i + kAhead < kPieces) load(i + kAhead);
      const uint32_t word[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w}, pair = i % 4 < 2 ? scale[i / 4].x : scale[i / 4].y;
      const uint32_t factor = __byte_perm(pair, pair, i % 2 == 0 ? 0x1010 : 0x3232);
      uint32_t value[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) codes_in_order(word[j], value[2 * j], value[2 * j + 1]);
#pragma unroll
      for (uint32_t& x : value) x = multiply_half2(x, factor);
      const uint32_t to = row + i / 4 * (kOwnStep * sizeof(Block)) + i % 4 * (kCells * sizeof(Block));
      store_shared16(to + chunk * 16, value[0], value[1], value[2], value[3]);
      store_shared16(to + (chunk ^ 1) * 16, value[4], value[5], value[6], value[7]);
    }
  }

  __device__ __forceinline__ bool too_large() const {
    uint32_t most = 0;
#pragma unroll
    for (const uint2& pair : scale) most = __vmaxu2(most, __vmaxu2(pair.x & 0x7fff7fffu, pair.y & 0x7fff7fffu));
    return max(most & 0xffffu, most >> 16) > kLargestScale;
  }
};

// The producers' part; the first tile is on its way.
__device__ __forceinline__ void produce(Shared& s, Source& k, Source& v, int tiles, int cells) {
  const int thread = threadIdx.x;
  k.clear_from(thread, cells), v.clear_from(thread, cells);
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages, round = tile / kStages, next = tile + 1, limit = next < tiles ? cells : 0;
    const auto hand_over = [&](Source& source, Block (&target)[kGroups][kCells], uint64_t& full, uint64_t& empty) {
      cp_async_wait<1>();
      if (round > 0) mbarrier_wait(smem_address(&empty), (round - 1) & 1);
      if (source.too_large()) s.bad = 1;
      source.expand(thread, smem_address(target));
      mbarrier_arrive(smem_address(&full));
      source.request(thread, next, limit);
    };
    hand_over(k, s.k[stage], s.k_full[stage], s.k_empty[stage]);
    hand_over(v, s.v[stage], s.v_full[stage], s.v_empty[stage]);
  }
}

// The consumers take turns in requesting products, so that one weighs while the other multiplies.
__device__ __forceinline__ void await_turn(int side) { asm volatile("barrier.cta.sync %0, 256;" ::"r"(4 + side) : "memory"); }
__device__ __forceinline__ void yield_turn(int side) { asm volatile("barrier.cta.arrive %0, 256;" ::"r"(5 - side) : "memory"); }

__global__ void __launch_bounds__(kThreads, 1) dense(const AttnArgs args, uint8_t* __restrict__ status, int split) {
  extern __shared__ char raw_shared[];
  Shared& s = *reinterpret_cast<Shared*>(raw_shared + (-smem_address(raw_shared) & 1023));
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x - kProducers;  // of the consumers
  const Rows rows(args, split);
  const int sides = rows.tokens * rows.group > kRows / 2 ? 2 : 1;  // consumers that have rows
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_address(&s.k_full[i]), kProducers), mbarrier_init(smem_address(&s.v_full[i]), kProducers);
      mbarrier_init(smem_address(&s.k_empty[i]), 4 * sides), mbarrier_init(smem_address(&s.v_empty[i]), 4 * sides);
    }
    mbarrier_init_fence();
    s.bad = 0;
  }
  wait_for_dependencies();
  launch_dependents();

  if (blockIdx.x == 0) {  // it is read 16 bytes at a time
    const uint32_t count = 2 * (gridDim.x - split * static_cast<uint32_t>(args.kv_heads));
    if (threadIdx.x < (-count & 15)) status[count + threadIdx.x] = 0;
  }
  const auto leave = [&](bool left) {
    if (threadIdx.x != 0) return;
    uint8_t* to = status + 2 * (static_cast<uint32_t>(rows.block) * static_cast<uint32_t>(args.kv_heads) + rows.kv_head) + rows.half;
    to[0] = left;
    if (rows.whole) to[1] = left;
  };
  if (rows.tokens == 0) return leave(false);
  Source k_source(s, args.k, args.k_scale, rows.kv_head, threadIdx.x, 0), v_source(s, args.v, args.v_scale, rows.kv_head, threadIdx.x, 1);
  const int any_warp = threadIdx.x / 32, any_lane = threadIdx.x % 32;
  // With as many slots as cells nothing has to be selected: prefixes are likely, and what they need is requested at once.
  if (args.slots < args.cells && !may_be_prefixes(args, rows, any_lane)) {  // the same in all warps
    leave(true);
    return;
  }
  if (warpgroup == 0) {
    k_source.request(threadIdx.x, 0, static_cast<int>(args.cells));
    v_source.request(threadIdx.x, 0, static_cast<int>(args.cells));
  } else {
    Queries::request(s, args, thread, rows, sides);
  }
  classify(s, args, rows, any_warp, any_lane);
  // The producers go on once all rows are counted, the consumers once Q is converted too.
  if (warpgroup == 0) {
    asm volatile("barrier.cta.arrive 7, 384;\nbarrier.cta.sync 1, 384;" ::: "memory");
  } else {
    asm volatile("barrier.cta.arrive 1, 384;" ::: "memory");
    cp_async_wait<0>();
    if (args.q_type == Float::f16) Queries::convert<true>(s, args, thread, sides);
    else Queries::convert<false>(s, args, thread, sides);
    fence_async_shared();
    asm volatile("barrier.cta.sync 7, 384;" ::: "memory");
  }
  int cells = 0, fewest = 1 << 30;
#pragma unroll 1
  for (int token = any_lane; token < rows.tokens; token += 32) cells = max(cells, s.cells[token]), fewest = min(fewest, s.cells[token]);
  cells = __reduce_max_sync(~0u, cells), fewest = __reduce_min_sync(~0u, fewest);
  if (fewest < 0) {
    leave(true);
    cp_async_wait<0>();
    return;
  }
  const int tiles = (cells + kCells - 1) / kCells;
  if (warpgroup == 0) {
    registers_decrease<kProducerRegisters>();
    produce(s, k_source, v_source, tiles, cells);
    cp_async_wait<0>();
    asm volatile("barrier.cta.sync 6, 128;" ::: "memory");
    leave(s.bad != 0);  // then what the consumers write is written again
    return;
  }
  registers_increase<kConsumerRegisters>();
  const int side = warpgroup - 1, warp = __shfl_sync(~0u, thread / 32 % 4, 0), lane = thread % 32, r = lane / 4, c = lane % 4;
  if (side >= sides) return;

  const int first_row = side * 64 + warp * 16 + r;  // this lane's rows: it and the eighth after it
  int limit[2];
  float factor[2], top[2] = {kLowest, kLowest}, sum[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t n = first_row + 8 * h;
    limit[h] = static_cast<int>(n / rows.group) < rows.tokens ? s.cells[n / rows.group] : 0;
    factor[h] = s.exponent[n] == kNotFinite ? __int_as_float(0x7fc00000) : score_factor(args.sm_scale, s.exponent[n]);
  }
  const uint32_t q = wgmma_descriptor_low(smem_address(s.q[0][side * 64])), k = wgmma_descriptor_low(smem_address(s.k)),
                 v = swizzled_mn_descriptor_low(smem_address(s.v), kCells * sizeof(Block));
  constexpr uint32_t kStageStep = kGroups * kCells * sizeof(Block) / 16;
  float out[kDim / 2], score[kCells / 2];  // [4 b + i]: row r + 8 (i >> 1), column 8 b + 2 c + (i & 1)
  uint32_t p[kCells / 16][4];
#pragma unroll
  for (float& x : out) x = 0.0f;

  const auto multiply_keys = [&](int tile) {
    const int stage = tile % kStages;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step)
      wgmma_fp16_shared(score, q + step / 4 * static_cast<uint32_t>(kRows * sizeof(Block) / 16) + step % 4 * 2,
                        k + stage * kStageStep + step / 4 * static_cast<uint32_t>(kCells * sizeof(Block) / 16) + step % 4 * 2, step > 0);
    wgmma_commit();
  };
  const auto add_values = [&](int tile) {
    const int stage = tile % kStages;
#pragma unroll
    for (int step = 0; step < kCells / 16; ++step) wgmma_fp16_mn(out, p[step], v + stage * kStageStep + step * static_cast<uint32_t>(sizeof(Block)));
    wgmma_commit();
  };
  // What the producers have written is there, for the tensor cores too: here the fence has no loads to wait for.
  const auto await_tiles = [&](int key_tile, int value_tile) {
    if (key_tile < tiles) mbarrier_wait(smem_address(&s.k_full[key_tile % kStages]), key_tile / kStages & 1);
    if (value_tile >= 0) mbarrier_wait(smem_address(&s.v_full[value_tile % kStages]), value_tile / kStages & 1);
    fence_async_shared();
    wgmma_fence();
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
    await_tiles(0, -1);
    multiply_keys(0);
    wgmma_wait<0>();
    release(s.k_empty[0]);
    weigh(0);
    pack();
    if (side == 1 && tiles > 1) asm volatile("barrier.cta.arrive 4, 256;" ::: "memory");  // the first turn is the other's
    for (int tile = 1; tile < tiles; ++tile) {
      if (sides == 2) await_turn(side);
      await_tiles(tile, tile - 1);
      multiply_keys(tile);
      add_values(tile - 1);
      if (sides == 2 && (side == 0 || tile + 1 < tiles)) yield_turn(side);
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
    await_tiles(tiles, tiles - 1);
    add_values(tiles - 1);
    wgmma_wait<0>();
  }

  // By way of this warp's rows of Q, so that a warp stores whole rows.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    for (int offset = 1; offset < 4; offset *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], offset);
    sum[h] = __frcp_rn(sum[h]);
  }
  const uint32_t first = side * 64 + warp * 16;
  const int64_t first_head = static_cast<int64_t>(rows.kv_head) * rows.group;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (limit[h] == 0) {
#pragma unroll
      for (int b = 0; b < kDim / 8; ++b) out[4 * b + 2 * h] = out[4 * b + 2 * h + 1] = 0.0f;
      continue;
    }
#pragma unroll
    for (int b = 0; b < kDim / 8; ++b) out[4 * b + 2 * h] *= sum[h], out[4 * b + 2 * h + 1] *= sum[h];
    if (args.gate.data == nullptr) continue;
    const uint32_t n = first + r + 8 * h;
    const int64_t token = rows.first_token + n / rows.group, q_head = first_head + n % rows.group;
    const char* gate = args.gate.data + token * args.gate.stride + q_head * args.gate.head_stride;
    const auto multiply_gate = [&](const auto& pair_of) {
#pragma unroll
      for (int b = 0; b < kDim / 8; ++b) {
        const float2 g = pair_of(8 * b + 2 * c);
        out[4 * b + 2 * h] *= sigmoid(g.x), out[4 * b + 2 * h + 1] *= sigmoid(g.y);
      }
    };
    if (args.gate_type == Float::f32) {
      multiply_gate([&](int dim) { return __ldg(reinterpret_cast<const float2*>(gate + dim * 4)); });
    } else {
      multiply_gate([&](int dim) {
        const uint32_t pair = __ldg(reinterpret_cast<const uint32_t*>(gate + dim * 2));
        return args.gate_type == Float::f16 ? unpack_half2(pair) : unpack_bf162(pair);
      });
    }
  }
  asm volatile("barrier.cta.sync %0, 128;" ::"r"(2 + side) : "memory");  // all products of this side have read Q
  const auto place = [&](int row, int chunk) { return smem_address(&s.q[chunk / 8][first + row][(chunk % 8 ^ (row & 7)) * 8]); };
  const auto stage = [&](const auto& pair_of) {
#pragma unroll
    for (int b = 0; b < kDim / 8; ++b)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        store_shared(place(r + 8 * h, b) + c * 4, pair_of(out[4 * b + 2 * h], out[4 * b + 2 * h + 1]));
  };
  if (args.out_type == Float::f16) {
    stage([](float x, float y) { return pack_half2(x, y); });
  } else {
    stage([](float x, float y) { return pack_bf162(x, y); });
  }
  __syncwarp();
  int own = first / rows.group;
  uint32_t head = first % rows.group;  // of the row, in this CTA
  char* to = static_cast<char*>(args.out) + ((rows.first_token + own) * args.q_heads + first_head + head) * (kDim * 2) + lane * 16;
  const int64_t to_next_token = (args.q_heads - rows.group) * (kDim * 2);
#pragma unroll 4
  for (int row = 0; row < 16; ++row) {
    const uint4 x = load_shared16(place(row, lane));
    if (own < rows.tokens) *reinterpret_cast<uint4*>(to) = x;
    to += kDim * 2;
    if (++head == rows.group) head = 0, ++own, to += to_next_token;
  }
}

}  // namespace

int64_t dense_tokens(const AttnArgs& args) { return kRows / (args.q_heads / args.kv_heads); }
int64_t dense_blocks(const AttnArgs& args) { return (args.tokens + dense_tokens(args) - 1) / dense_tokens(args); }
int64_t dense_status_heads(const AttnArgs& args) { return 2 * args.kv_heads; }

bool dense_fits(const AttnArgs& args) {
  return args.dim == kDim && args.q_heads / args.kv_heads <= kRows && args.q_type != Float::f32 && dense_blocks(args) <= kMaxStatusBlocks;
}

cudaError_t launch_dense(const AttnArgs& args, uint8_t* status, cudaStream_t stream) {
  int multiprocessors = 0;
  if (const cudaError_t error = processors(&multiprocessors); error != cudaSuccess) return error;
  // The blocks of the longest rows are halved while multiprocessors are idle.
  const int64_t blocks = dense_blocks(args), idle = multiprocessors / args.kv_heads - blocks;
  const bool even = dense_tokens(args) == 2 * (kRows / 2 / (args.q_heads / args.kv_heads));
  const int64_t split = even ? std::clamp<int64_t>(idle, 0, blocks) : 0;
  return launch_overlapped(dense, static_cast<unsigned>((blocks + split) * args.kv_heads), kThreads, sizeof(Shared) + 1024, stream, args, status,
                           static_cast<int>(split));
}

}  // namespace mori::qsa
