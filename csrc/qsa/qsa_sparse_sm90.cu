// qsa_flash for int8 KV on tensor cores: every token over its own cells (contract: qsa.h).
//
// A warpgroup walks the slots of one token and one tile of up to 16 query heads of a KV head, 64 slots a round:
//   S^T = K Q^T   m64n32k32 int8 (n24 for up to 12 query heads), cells in M: the codes are multiplied as they lie in shared memory; a q row
//                 becomes 15-bit integers q * 2^(14 - e), two int8 digits = two columns; each 64-dim group's exact sum meets its K scale
//                 in fp32
//   P = 2^(S - m) the running maximum m moves only when a score passes it by 2^4; P times the V scale, in fp16
//   O^T = V^T P^T m64n16k16 fp16, dims in M: V codes are transposed by ldmatrix and converted in registers
// V scales are divided by a power of two per group that follows their running maximum, so that any fp16 scale fits.
// The list of (token, tile, round) is cut into equal parts, one for each CTA (two warpgroups: two tiles of a token) or, with an odd
// number of tiles, one for each warpgroup; tokens cut between parts meet in a workspace, in order: deterministic.
// An empty slot or an id past the cells reads nothing: its codes and scales are zeros, its probability exactly 0.
// K of the next round is requested after Q K, V of the next round once the codes of this one are in registers, before P V; ids a round
// before they are looked at. q comes before the first cells, which fill the memory's queues; one proxy fence a round is for P and for K.
// Bound by issue slots (57 % of them used) and the latency of gathers from the L2 (copies alone: 520 us at T 1984, H200). The first cells
// are there 4 to 7 us after the kernel may start; a token that ends costs 5 us. Of the two CTAs of a multiprocessor one is served first: at
// T 1984 those that come first are done after 676 us, the others after 735.
// Lost: mma.sync (255 registers, stalls); biased V codes with a second product for the bias (spills, 60 % slower); V requested after P V
// (7 % slower); masks of empty slots in every round; ids compared where they are loaded (12 % slower). On 2026-11-30, us at T 96 / 512 /
// 1984 against 53.0 / 213.8 / 764.5: the stores at a token's end unrolled (55.1 / 220.5 / 777.5); q of the next token brought to the L2
// half a round before (53.4 / 216.3 / 772.7), and with that a fence for P and one for K (53.2 / 218.6 / 782.4). Against the kernel before
// all that, 57.0 / 221.5 / 776: the last tenth of the list in small parts for whoever is free (-- / 254 / 836; a loop that can do so, with
// none of them, 59.8 / 238 / 833); parts joined by the worker that comes last instead of a launch (66.0 / 226.5 / 774.5), which would save
// 1.3 us of a first prompt of 512 tokens; a start on the guess that the dense kernel does nothing (1.1 us less, for a second plan of the
// work); cp.async that prefetches 128 or 256 bytes (57.0 / 221.9 / --).
#include "../common/launch_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "qsa_parts_sm90.cuh"
#include "qsa_tensor_sm90.cuh"
#include "qsa_wgmma_sm90.cuh"

namespace mori::qsa {
namespace {

using namespace sm90;

constexpr int kCells = 64;    // slots of a round
constexpr int kWarpCells = 16;
constexpr int kThreads = 256; // two warpgroups
constexpr int kGroup = 64;    // values per KV scale
constexpr float kScaleSlack = 32.0f;  // V scales over their power of two; P <= 2^(5 + 4 + 5)

// Which query rows and cells the values of a lane (r, c) stand for, in tiles of up to 16 or of up to 12 query rows. A product has two
// columns per row, one a digit: [8 rows high][8 high][8 low][8 low], or [8 high][8 low][high and low of 4 rows, in turn].
template <int kRows>
struct Columns {
  static_assert(kRows == 12 || kRows == 16);
  static constexpr int kOwn = kRows / 4, kValues = kRows / 2;  // query rows of a lane, times its two cells (rows r and r + 8 of a product)
  static __device__ __forceinline__ int row(int i, int c) { return i < 2 ? 2 * c + i : kRows == 16 ? 8 + 2 * c + i - 2 : 8 + c; }
  static __device__ __forceinline__ constexpr int own(int v) { return v < 4 ? v & 1 : kRows == 16 ? 2 + (v & 1) : 2; }
  static __device__ __forceinline__ constexpr int cell(int v) { return kRows == 16 || v < 4 ? v >> 1 & 1 : v - 4; }
  static __device__ __forceinline__ constexpr int value(int i, int cell) { return i < 2 ? i + 2 * cell : kRows == 16 ? i + 2 + 2 * cell : 4 + cell; }
  static __device__ __forceinline__ constexpr int high(int v) { return kRows == 16 || v < 4 ? v : 2 * v; }  // place in a product's registers
  static __device__ __forceinline__ constexpr int low(int v) { return kRows == 16 ? 8 + v : v < 4 ? 4 + v : 2 * v + 1; }
  static __device__ __forceinline__ int high_column(int row) { return kRows == 16 || row < 8 ? row : 2 * row; }
  static __device__ __forceinline__ int low_column(int row) { return kRows == 16 ? 16 + row : row < 8 ? 8 + row : 2 * row + 1; }
};

template <int kDim, int kRows>
struct Layout {
  static constexpr int kGroups = kDim / kGroup;
  static constexpr int kBlocks = kDim > 128 ? kDim / 128 : 1;  // a cell's codes lie in blocks of 128 bytes (dim 64 leaves half empty)
  static constexpr int kTile = kCells * 128;                   // bytes of 64 cells of a block, 128-byte swizzle
  static constexpr int kScaleBytes = kGroups * 2;
  static constexpr int kK = 0, kV = kK + kBlocks * kTile, kQ = kV + kBlocks * kTile, kQBlock = 2 * kRows * 128;
  static constexpr int kP = kQ + kBlocks * kQBlock, kPGroup = kCells * kTileRows * 2;
  static constexpr int kKScale = kP + kGroups * kPGroup, kVScale = kKScale + kCells * kScaleBytes;
  static constexpr int kExchange = kVScale + kCells * kScaleBytes;  // floats [4 warps][16 rows] and [4 warps][4 groups]
  static constexpr int kFactor = kExchange + 4 * kTileRows * 4 + 4 * 4 * 4;
  static constexpr int kBytes = (kFactor + kTileRows * 4 + 1023) / 1024 * 1024;  // of a warpgroup
};
static_assert(4 * Layout<256, 16>::kBytes + 2 * 2048 <= 227 * 1024, "two CTAs of two warpgroups in a multiprocessor");

static_assert(kMaxStatusBlocks / 8 <= Layout<256, 12>::kGroups * Layout<256, 12>::kPGroup, "their bits lie where P will be");

__device__ __forceinline__ bool is_left(const Plan& plan, int block) {
  bool left = false;
  for (int h = 0; h < plan.status_heads; ++h) left |= __ldcg(plan.status + static_cast<int64_t>(block) * plan.status_heads + h) != 0;
  return left;
}

// Whether any is, the same in all warps: at once, for it may be all that there is to do.
__device__ __forceinline__ bool any_left(const Plan& plan) {
  uint32_t bits = 0;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < (plan.blocks * plan.status_heads + 15) / 16; i += 32) {
    const uint4 all = __ldcg(reinterpret_cast<const uint4*>(plan.status) + i);
    bits |= all.x | all.y | all.z | all.w;
  }
  return __any_sync(~0u, bits != 0);
}

__device__ __forceinline__ void warpgroup_sync(int id) { asm volatile("barrier.cta.sync %0, 128;" ::"r"(id) : "memory"); }
__device__ __forceinline__ bool warpgroup_any(int id, bool value) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.cta.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}\n"
               : "=r"(any)
               : "r"(static_cast<uint32_t>(value)), "r"(id)
               : "memory");
  return any;
}
// One warpgroup's share of the kernel.
template <int kDim, int kRows>
struct Warpgroup {
  using L = Layout<kDim, kRows>;
  static constexpr int kGroups = L::kGroups;
  // Lanes side by side on a block of 128 bytes of a cell, cells at a time: a lane's copies differ by constants in shared memory.
  static constexpr int kLaneChunks = kDim / 16 < 8 ? kDim / 16 : 8, kLaneCells = 32 / kLaneChunks;

  const AttnArgs& args;
  char* base;
  uint32_t smem;
  int thread, warp, lane, r, c, barrier;

  __device__ __forceinline__ float* exchange() const { return reinterpret_cast<float*>(base + L::kExchange); }
  static __device__ __forceinline__ bool has(uint32_t valid, int cell) { return valid >> cell & 1; }

  // Requests the codes and scales of this warp's 16 cells; lanes hold the id of cell lane % 16, `valid` is its ballot.
  __device__ __forceinline__ void copy(int tile, int scale_tile, const DeviceRows& codes, const DeviceRows& scales, int kv_head, int id, uint32_t valid) const {
    const int chunk = lane % kLaneChunks, first = lane / kLaneChunks;
    const uint32_t safe = max(id, 0), target = smem + tile + (warp * kWarpCells + first) * 128 + (((chunk ^ first) & 7) << 4);
    const char* source = offset_by(codes.data + chunk * 16, kv_head, static_cast<uint32_t>(codes.head_stride));
    const uint32_t stride = opaque(static_cast<uint32_t>(codes.stride));  // in a register of its own: one multiply-add per address
    const auto at = [&](int i) { return (target ^ ((i * kLaneCells & 7) << 4)) + i * kLaneCells * 128; };
    if (valid == ~0u) {
#pragma unroll
      for (int i = 0; i < kWarpCells / kLaneCells; ++i) {
        const char* from = offset_by(source, __shfl_sync(~0u, safe, first + i * kLaneCells), stride);
#pragma unroll
        for (int b = 0; b < L::kBlocks; ++b) cp_async<16>(at(i) + b * L::kTile, from + b * 128);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kWarpCells / kLaneCells; ++i) {
        const char* from = offset_by(source, __shfl_sync(~0u, safe, first + i * kLaneCells), stride);
#pragma unroll
        for (int b = 0; b < L::kBlocks; ++b) cp_async<16>(at(i) + b * L::kTile, from + b * 128, has(valid, first + i * kLaneCells));
      }
    }
    if (lane < kWarpCells) {
      const int to = scale_tile + (warp * kWarpCells + lane) * L::kScaleBytes;
      const char* scale = offset_by(offset_by(scales.data, kv_head, static_cast<uint32_t>(scales.head_stride)), safe, static_cast<uint32_t>(scales.stride));
      if constexpr (L::kScaleBytes >= 4) cp_async<L::kScaleBytes>(smem + to, scale, id >= 0);
      else *reinterpret_cast<uint16_t*>(base + to) = id >= 0 ? __ldg(reinterpret_cast<const uint16_t*>(scale)) : 0;
    }
    cp_async_commit();
  }

  // A token's q rows as they are: 8 threads a row, each kDim / 8 dims.
  struct RawQ {
    uint4 piece[2 * kGroups];  // 16-bit values: half of them
  };
  __device__ __forceinline__ const char* own_q(int64_t token, int64_t head) const {
    const int own = static_cast<int>(opaque(thread));  // opaque: no address of this is kept through the loop
    return args.q.data + token * args.q.stride + (head + own / 8) * args.q.head_stride + own % 8 * (kDim / 8) * (args.q_type == Float::f32 ? 4 : 2);
  }
  __device__ __forceinline__ void request_q(RawQ& raw, int64_t token, int64_t head, int rows) const {
    const char* q = own_q(token, head);
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i)
      raw.piece[i] = thread / 8 < rows && (i < kGroups || args.q_type == Float::f32) ? load_global16(q + i * 16) : make_uint4(0, 0, 0, 0);
  }

  // Their digits. Their score factors go to shared memory.
  __device__ __forceinline__ void store_q(const RawQ& raw) const {
    const int own = static_cast<int>(opaque(thread)), row = own / 8, part = own % 8;
    if (row >= kRows) return;  // whole warps
    float value[kGroups][8], top = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const auto word = [&](int at) {
          const uint4& piece = raw.piece[at / 4];
          return at % 4 == 0 ? piece.x : at % 4 == 1 ? piece.y : at % 4 == 2 ? piece.z : piece.w;
        };
        float2 pair = make_float2(__uint_as_float(word(i * 8 + j)), __uint_as_float(word(i * 8 + j + 1)));
        if (args.q_type == Float::f16) pair = unpack_half2(word(i * 4 + j / 2));
        if (args.q_type == Float::bf16) pair = unpack_bf162(word(i * 4 + j / 2));
        value[i][j] = pair.x, value[i][j + 1] = pair.y;
        top = fmaxf(top, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
    for (int offset = 1; offset < 8; offset *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    const int exponent = exponent_of(top), up = 14 - exponent;
    // Two steps: 2^163 is no fp32 number.
    const float half = args.sm_scale < 0 ? -power_of_two(up / 2) : power_of_two(up / 2), rest = power_of_two(up - up / 2);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int dim = part * (kDim / 8) + i * 8;
      uint32_t high[2] = {}, low[2] = {};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int x = __float2int_rn(value[i][j] * half * rest), h = (x + 128) >> 8;
        high[j / 4] |= static_cast<uint32_t>(h & 255) << (j % 4 * 8);
        low[j / 4] |= static_cast<uint32_t>(x & 255) << (j % 4 * 8);
      }
      const auto target = [&](int column) {
        return reinterpret_cast<uint2*>(base + L::kQ + dim / 128 * L::kQBlock + column * 128 + (((dim / 16 ^ column) & 7) << 4) + dim % 16);
      };
      *target(Columns<kRows>::high_column(row)) = make_uint2(high[0], high[1]);
      *target(Columns<kRows>::low_column(row)) = make_uint2(low[0], low[1]);
    }
    // A q row that is not finite has no digits: its factor makes every score NaN.
    if (part == 0) reinterpret_cast<float*>(base + L::kFactor)[row] = isfinite(top) ? score_factor(args.sm_scale, exponent - 14) : __int_as_float(0x7fc00000);
  }
};

// Scores of this lane's cells and query rows.
template <int kDim, int kRows>
__device__ __forceinline__ void scores(const Warpgroup<kDim, kRows>& w, float (&score)[Columns<kRows>::kValues]) {
  using L = Layout<kDim, kRows>;
  using C = Columns<kRows>;
  const uint64_t k = swizzled_descriptor(w.smem + L::kK), q = swizzled_descriptor(w.smem + L::kQ);
  int sum[2][kRows];
  const auto multiply = [&](int g) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 2; ++j)
      wgmma_s8(sum[g & 1], k + (g / 2 * L::kTile + g % 2 * 64 + j * 32) / 16, q + (g / 2 * L::kQBlock + g % 2 * 64 + j * 32) / 16, j > 0);
    wgmma_commit();
  };
  multiply(0);
  if constexpr (L::kGroups > 1) multiply(1);
  __half k_scale[2][L::kGroups];
#pragma unroll
  for (int h = 0; h < 2; ++h) load_scales(k_scale[h], w.base + L::kKScale + (w.warp * kWarpCells + w.r + 8 * h) * L::kScaleBytes);
#pragma unroll
  for (int g = 0; g < L::kGroups; ++g) {
    if (g + 1 < L::kGroups) wgmma_wait<1>();
    else wgmma_wait<0>();
    const float a = __half2float(k_scale[0][g]), b = __half2float(k_scale[1][g]);
#pragma unroll
    for (int v = 0; v < C::kValues; ++v) {
      const float exact = static_cast<float>(sum[g & 1][C::high(v)] * 256 + sum[g & 1][C::low(v)]), scale = C::cell(v) ? b : a;
      score[v] = g == 0 ? scale * exact : fmaf(scale, exact, score[v]);
    }
    if (g + 2 < L::kGroups) multiply(g + 2);
  }
}

// The V codes that this warp multiplies: dims 64 g + 16 warp .. of all cells of the round, transposed.
template <int kDim, int kRows>
__device__ __forceinline__ void load_values(const Warpgroup<kDim, kRows>& w, uint4 (&raw)[kDim / kGroup][2]) {
  using L = Layout<kDim, kRows>;
  const uint32_t v = w.smem + L::kV + w.lane * 128 + (((w.warp ^ w.lane) & 7) << 4);
#pragma unroll
  for (int g = 0; g < L::kGroups; ++g)
#pragma unroll
    for (int h = 0; h < 2; ++h) raw[g][h] = load_matrix_transposed((v ^ (g % 2 * 64)) + g / 2 * L::kTile + h * 32 * 128);
}

// out += V^T P^T of the round; out[g] holds dims 64 g + 16 warp + 2 r (+ 1) of the four q rows.
template <int kDim, int kRows>
__device__ __forceinline__ void add_values(const Warpgroup<kDim, kRows>& w, const uint4 (&raw)[kDim / kGroup][2], float (&out)[kDim / kGroup][8], uint32_t mask) {
  using L = Layout<kDim, kRows>;
  const uint64_t p = core_descriptor(w.smem + L::kP, 256, 128);
#pragma unroll
  for (int g = 0; g < L::kGroups; ++g) {
    uint32_t a[4][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t word[4] = {raw[g][h].x, raw[g][h].y, raw[g][h].z, raw[g][h].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        a[2 * h + j / 2][j % 2 * 2] = codes_to_half2(word[j], mask);
        a[2 * h + j / 2][j % 2 * 2 + 1] = codes_to_half2(word[j] >> 8, mask);
      }
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_fp16_mn(out[g], a[step], p + (g * L::kPGroup + step * 512) / 16);
    wgmma_commit();
    if (g > 0) wgmma_wait<1>();
  }
  wgmma_wait<0>();
}

template <int kDim, int kRows>
__global__ void __launch_bounds__(kThreads, 2) sparse(const AttnArgs args, const Plan plan) {
  using L = Layout<kDim, kRows>;
  using C = Columns<kRows>;
  using RawQ = typename Warpgroup<kDim, kRows>::RawQ;
  extern __shared__ char shared[];
  wait_for_dependencies();
  launch_dependents();
  if (plan.status != nullptr && !any_left(plan)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *plan.units_left = 0;
    return;
  }
  const int warp8 = __shfl_sync(~0u, threadIdx.x / 32, 0), side = warp8 / 4;  // uniform: descriptors stay in uniform registers
  char* base = shared + (-smem_address(shared) & 1023) + side * L::kBytes;  // keeps the address space: no generic loads
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const Warpgroup<kDim, kRows> w = {args, base, smem_address(base), thread, warp8 % 4, lane, lane / 4, lane % 4, 1 + side};
  const int worker = plan.step == 2 ? blockIdx.x : blockIdx.x * 2 + side;
  int units = plan.units;
  uint32_t* left_bits = reinterpret_cast<uint32_t*>(base - side * L::kBytes + L::kP);
  const int words = (plan.blocks + 31) / 32;
  if (plan.status != nullptr) {  // the bits of the blocks left, their number
    for (int b = threadIdx.x; b < words * 32; b += kThreads) {
      const uint32_t bits = __ballot_sync(~0u, b < plan.blocks && is_left(plan, b));
      if (lane == 0) left_bits[b / 32] = bits;
    }
    __syncthreads();
    int count = 0;
    for (int i = lane; i < words; i += 32) count += __popc(left_bits[i]);
    int tokens = __reduce_add_sync(~0u, count) * plan.block;
    if (left_bits[(plan.blocks - 1) / 32] >> (plan.blocks - 1) % 32 & 1) tokens -= plan.blocks * plan.block - static_cast<int>(args.tokens);  // the last block
    units = tokens * plan.pairs * plan.rounds;
    if (blockIdx.x == 0 && threadIdx.x == 0) *plan.units_left = units;
  }
  const Parts parts(units, plan.most_workers);
  const int begin = parts.begin(min(worker, parts.workers - 1)), count = parts.begin(worker + 1) - begin;
  const int rounds = plan.rounds, group = static_cast<int>(args.q_heads / args.kv_heads);
  const int pairs = plan.pairs, head_tiles = (group + kTileRows - 1) / kTileRows;
  const uint32_t mask = opaque(0x00ff00ffu);

  // A place in the list of (token, tile or pair of tiles, round), and the heads it stands for.
  struct Place {
    int token, pair, round;
  };
  const auto advance = [&](Place& p) {
    if (++p.round < rounds) return;
    p.round = 0;
    if (++p.pair == pairs) {
      p.pair = 0, ++p.token;
      if (plan.status != nullptr && p.token % plan.block == 0)  // to the next block that is left
        while (p.token < args.tokens && !is_left(plan, p.token / plan.block)) p.token += plan.block;
    }
  };
  struct Heads {
    int kv, first, rows;
  };
  const auto heads_of = [&](const Place& p) {
    const int tile = p.pair * plan.step + (plan.step == 2 ? side : 0), in_group = tile % head_tiles * kTileRows;
    return Heads{tile / head_tiles, tile / head_tiles * group + in_group, min(kTileRows, group - in_group)};
  };
  const int item = begin / rounds;
  Place now = {item / pairs, item % pairs, begin % rounds};
  if (plan.status != nullptr) {  // from the rank among the tokens left to the token
    int rest = now.token / plan.block, word = 0;
    while (rest >= __popc(left_bits[word])) rest -= __popc(left_bits[word++]);
    now.token = (word * 32 + __fns(left_bits[word], 0, rest + 1)) * plan.block + now.token % plan.block;
    __syncthreads();
  }
  if (worker >= parts.workers) return;
  if constexpr (kRows == 12) {  // columns of P that stay zero
    for (int i = thread; i < L::kGroups * L::kPGroup / 16; i += 128) *reinterpret_cast<uint4*>(base + L::kP + i * 16) = make_uint4(0, 0, 0, 0);
  }
  Heads heads = heads_of(now);
  // The id of this lane's cell, requested a round before it is looked at: whatever reads a register that is on its way waits.
  int id_low, id_high;
  const auto request_id = [&](const Place& p) {
    const int slot = p.round * kCells + w.warp * kWarpCells + lane % kWarpCells;
    id_low = -1, id_high = 0;
    if (slot >= static_cast<int>(args.slots)) return;
    const int64_t at = p.token * args.slots + slot;
    if (args.wide_ids) {
      const int2 id = __ldg(static_cast<const int2*>(args.ids) + at);
      id_low = id.x, id_high = id.y;
    } else {
      id_low = __ldg(static_cast<const int*>(args.ids) + at);
    }
    // Rows follow each other: this is where the ids of two rounds later lie, or near it.
    prefetch(static_cast<const char*>(args.ids) + min(at + 2 * kCells, args.tokens * args.slots - 1) * (args.wide_ids ? 8 : 4));
  };
  const auto requested_id = [&] { return id_high == 0 && static_cast<uint32_t>(id_low) < static_cast<uint32_t>(args.cells) ? id_low : -1; };

  float out[L::kGroups][8];  // [g][i]: dim 64 g + 16 warp + 2 r + (i >> 1 & 1), query row 2 c + (i & 1) + (i >> 2) * 8
  float top[C::kOwn], sum[C::kOwn], factor[C::kOwn];
  uint32_t scale_down[(L::kGroups + 1) / 2];  // fp16 pairs: 2^-E of each group
  const auto start_item = [&] {
#pragma unroll
    for (int g = 0; g < L::kGroups; ++g)
#pragma unroll
      for (float& value : out[g]) value = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kOwn; ++i) {
      top[i] = kLowest, sum[i] = 0.0f;
      factor[i] = reinterpret_cast<const float*>(base + L::kFactor)[C::row(i, w.c)];
    }
#pragma unroll
    for (uint32_t& pair : scale_down) pair = 0x78007800u;  // 2^15
  };

  Place next = now;
  advance(next);
  request_id(now);
  RawQ raw_q;
  w.request_q(raw_q, now.token, heads.first, heads.rows);
  int id = requested_id();
  if (count > 1) request_id(next);
  uint32_t valid = __ballot_sync(~0u, id >= 0);
  w.copy(L::kK, L::kKScale, args.k, args.k_scale, heads.kv, id, valid);
  w.store_q(raw_q);
  w.copy(L::kV, L::kVScale, args.v, args.v_scale, heads.kv, id, valid);
  cp_async_wait<1>();
  fence_async_shared();
  warpgroup_sync(w.barrier);
  start_item();
  int item_start = 0;
  for (int done = 0; done < count; ++done) {
    float score[C::kValues], p[C::kValues];
    scores(w, score);
    id = done + 1 < count ? requested_id() : -1;
    __syncwarp();  // the lanes have read the scales; the products of the whole warpgroup are complete: K and Q are free
    const uint32_t next_valid = __ballot_sync(~0u, id >= 0);
    const bool complete = next.round == 0, last = done + 1 == count, item_ends = complete || last;
    const Heads next_heads = complete ? heads_of(next) : heads;
    w.copy(L::kK, L::kKScale, args.k, args.k_scale, next_heads.kv, id, next_valid);
    bool move = false;  // a maximum, or a group's power of two
    const auto weigh = [&] {
#pragma unroll
      for (int v = 0; v < C::kValues; ++v) p[v] = fmaf(score[v] - top[C::own(v)], factor[C::own(v)], kShift);
      if (valid != ~0u) {
#pragma unroll
        for (int v = 0; v < C::kValues; ++v)
          if (!w.has(valid, w.r + 8 * C::cell(v))) p[v] = -INFINITY;
      }
    };
    weigh();
#pragma unroll
    for (float x : p) move |= x > kShift + kSlack;

    cp_async_wait<1>();
    __syncwarp();
    uint32_t scale[2][(L::kGroups + 1) / 2];  // V scales of the two cells
    const char* scale_row = base + L::kVScale + (w.warp * kWarpCells + w.r) * L::kScaleBytes;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int g = 0; g < (L::kGroups + 1) / 2; ++g)
        scale[h][g] = kDim == 64 ? *reinterpret_cast<const uint16_t*>(scale_row + h * 8 * L::kScaleBytes)
                                 : reinterpret_cast<const uint32_t*>(scale_row + h * 8 * L::kScaleBytes)[g];
    float row_sum[C::kOwn];
    const auto store_p = [&] {
#pragma unroll
      for (float& x : p) x = exp2_fast(x);
#pragma unroll
      for (int i = 0; i < C::kOwn; ++i) row_sum[i] = p[C::value(i, 0)] + p[C::value(i, 1)];
      uint32_t half[4] = {pack_half2(p[0], p[1]), pack_half2(p[2], p[3]), pack_half2(p[4], p[5])};  // of two rows and a cell, or a row and both cells
      if constexpr (kRows == 16) half[3] = pack_half2(p[6], p[7]);
      char* target = base + L::kP + w.warp * 512 + w.r * 16 + w.c * 4;  // [group][warp][8 cells][8 rows of P][cell][row]
      uint32_t size = 0;
#pragma unroll
      for (int g = 0; g < L::kGroups; g += 2) {
        const uint32_t pair[2] = {multiply_half2(scale[0][g / 2], scale_down[g / 2]), multiply_half2(scale[1][g / 2], scale_down[g / 2])};
        size = larger_half2(size, larger_half2(pair[0] & 0x7fff7fffu, pair[1] & 0x7fff7fffu));
#pragma unroll
        for (int odd = 0; odd < (L::kGroups > 1 ? 2 : 1); ++odd) {
          char* to = target + (g + odd) * L::kPGroup;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t both = __byte_perm(pair[h], 0, odd ? 0x3232 : 0x1010);
            *reinterpret_cast<uint32_t*>(to + h * 256) = multiply_half2(half[h], both);
            if constexpr (kRows == 16) *reinterpret_cast<uint32_t*>(to + h * 256 + 128) = multiply_half2(half[2 + h], both);
          }
          if constexpr (kRows == 12) {
            const uint32_t third = multiply_half2(half[2], __byte_perm(pair[0], pair[1], odd ? 0x7632 : 0x5410));
            *reinterpret_cast<uint16_t*>(to - 2 * w.c + 128) = static_cast<uint16_t>(third);
            *reinterpret_cast<uint16_t*>(to - 2 * w.c + 256 + 128) = static_cast<uint16_t>(third >> 16);
          }
        }
      }
      move |= __half2float(__hmax(__ushort_as_half(size & 0xffff), __ushort_as_half(size >> 16))) > kScaleSlack;
      cp_async_wait<0>();  // K of the next round: one fence is for it and for P
      fence_async_shared();
    };
    store_p();
    if (warpgroup_any(w.barrier, move)) {  // rare: move the maxima and the powers of two, write P again
      float* most = w.exchange();
      uint32_t* most_scale = reinterpret_cast<uint32_t*>(most + 4 * kTileRows);
#pragma unroll
      for (int i = 0; i < C::kOwn; ++i) {
        float x = fmaxf(w.has(valid, w.r) ? score[C::value(i, 0)] : kLowest, w.has(valid, w.r + 8) ? score[C::value(i, 1)] : kLowest);
        for (int offset = 4; offset < 32; offset *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
        if (w.r == 0) most[w.warp * kTileRows + C::row(i, w.c)] = x;
      }
#pragma unroll
      for (int g = 0; g < L::kGroups; ++g) {
        const uint32_t size = max(scale[0][g / 2] >> (g % 2 * 16) & 0x7fffu, scale[1][g / 2] >> (g % 2 * 16) & 0x7fffu);
        const uint32_t largest = __reduce_max_sync(~0u, size);
        if (lane == 0) most_scale[w.warp * 4 + g] = largest;
      }
      warpgroup_sync(w.barrier);
      float shrink[4];  // of the rows of `out`
#pragma unroll
      for (int i = 0; i < C::kOwn; ++i) {
        const float* m = most + C::row(i, w.c);
        const float x = fmaxf(fmaxf(fmaxf(m[0], m[kTileRows]), fmaxf(m[2 * kTileRows], m[3 * kTileRows])), top[i]);
        shrink[i] = exp2_fast((top[i] - x) * factor[i]);
        top[i] = x;
        sum[i] *= shrink[i];
      }
      if constexpr (kRows == 12) {  // rows 8 + 2 c and 9 + 2 c are those of other lanes
        const int from = lane - w.c + 2 * w.c % 4;
        shrink[3] = __shfl_sync(~0u, shrink[2], from + 1);
        shrink[2] = __shfl_sync(~0u, shrink[2], from);
      }
#pragma unroll
      for (int g = 0; g < L::kGroups; ++g) {
        const uint32_t largest = max(max(most_scale[g], most_scale[4 + g]), max(most_scale[8 + g], most_scale[12 + g]));
        // fp16 bits: 2^-E for a maximum in [2^E, 2^(E + 1)), E in [-15, 15]; the power never grows again.
        const int exponent = min(static_cast<int>(largest >> 10), 30) - 15;
        const uint32_t wanted = exponent == 15 ? 0x0200u : static_cast<uint32_t>(15 - exponent) << 10;
        const uint32_t before = scale_down[g / 2] >> (g % 2 * 16) & 0xffffu, after = min(before, wanted);
        scale_down[g / 2] ^= (before ^ after) << (g % 2 * 16);
        const float step = __half2float(__ushort_as_half(after)) / __half2float(__ushort_as_half(before));
#pragma unroll
        for (int i = 0; i < 8; ++i) out[g][i] *= shrink[(i & 1) + (i >> 2) * 2] * step;
      }
      weigh();
      store_p();
      warpgroup_sync(w.barrier);
    }
    // All have written P, V has landed, and K of the next round.
#pragma unroll
    for (int i = 0; i < C::kOwn; ++i) sum[i] += row_sum[i];
    uint4 raw[L::kGroups][2];
    load_values(w, raw);
    warpgroup_sync(w.barrier);  // all have read V
    w.copy(L::kV, L::kVScale, args.v, args.v_scale, next_heads.kv, id, next_valid);
    add_values(w, raw, out, mask);

    if (item_ends) {
      const bool whole = complete && done + 1 - item_start == rounds;
      float* part = w.exchange();
#pragma unroll
      for (int i = 0; i < C::kOwn; ++i) {
        for (int offset = 4; offset < 32; offset *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], offset);
        if (w.r == 0) part[w.warp * kTileRows + C::row(i, w.c)] = sum[i];
      }
      warpgroup_sync(w.barrier);
      const auto total_of = [&](int row) { return (part[row] + part[kTileRows + row]) + (part[2 * kTileRows + row] + part[3 * kTileRows + row]); };
      const int own = kRows == 16 ? static_cast<int>(opaque(worker)) : worker;  // opaque: no product of it is kept through the loop
      const int64_t slot = (static_cast<int64_t>(own) * plan.step + (plan.step == 2 ? side : 0)) * 2 + (item_start == 0 ? 0 : 1);
      float total[4], inverse[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 2 * w.c + (i & 1) + (i >> 1) * 8;
        total[i] = row < heads.rows ? total_of(row) : 0.0f;
        inverse[i] = whole ? total[i] == 0.0f ? 0.0f : __frcp_rn(total[i]) : 1.0f;
      }
      const int dim0 = w.warp * 16 + 2 * w.r;
#pragma unroll 1
      for (int g = 0; g < L::kGroups; ++g) {  // not unrolled: what is seldom run is fetched from far away
        const int dim = g * 64 + dim0;
        const float up = 1.0f / __half2float(__ushort_as_half(static_cast<uint16_t>(scale_down[0])));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 2 * w.c + (i & 1) + (i >> 1) * 8, s = (i & 1) + (i >> 1) * 4;
          if (row >= heads.rows) continue;
          const int64_t head = heads.first + row;
          const float x = out[0][s] * up * inverse[i], y = out[0][s + 2] * up * inverse[i];
          if (!whole) {
            *reinterpret_cast<float2*>(plan.sums + (slot * kTileRows + row) * kDim + dim) = make_float2(x, y);
          } else {
            const bool gated = args.gate.data != nullptr && total[i] != 0.0f;
            const char* gate = gated ? args.gate.data + now.token * args.gate.stride + head * args.gate.head_stride : nullptr;
            store_pair(args, (static_cast<int64_t>(now.token) * args.q_heads + head) * kDim + dim, x, y, gate, dim);
          }
        }
#pragma unroll
        for (int k = 0; k + 1 < L::kGroups; ++k)
#pragma unroll
          for (int j = 0; j < 8; ++j) out[k][j] = out[k + 1][j];
        if constexpr (L::kGroups > 2) scale_down[0] = __funnelshift_r(scale_down[0], scale_down[1], 16), scale_down[1] >>= 16;
        else scale_down[0] >>= 16;
      }
      if (!whole && w.warp == 0 && w.r == 0) {
#pragma unroll
        for (int i = 0; i < C::kOwn; ++i) {
          const int row = C::row(i, w.c);
          if (row < heads.rows) plan.stats[slot * kTileRows + row] = make_float4(top[i], total_of(row), factor[i], __int_as_float(now.token));
        }
      }
      if (!last) {
        w.request_q(raw_q, next.token, next_heads.first, next_heads.rows);
        w.store_q(raw_q);
      }
      item_start = done + 1;
      fence_async_shared();
    }
    warpgroup_sync(w.barrier);  // Q is written, P may be overwritten
    if (item_ends && !last) start_item();
    valid = next_valid;
    now = next;
    advance(next);
    if (done + 2 < count) request_id(next);
    heads = next_heads;
  }
  cp_async_wait<0>();
}

int multiprocessors() {
  int count = 0;
  sm90::processors(&count);
  return count;
}

Plan make_plan(const AttnArgs& args, void* workspace, const uint8_t* status) {
  const int64_t group = args.q_heads / args.kv_heads, tiles = args.kv_heads * ((group + kTileRows - 1) / kTileRows);
  Plan plan = {};
  plan.rounds = static_cast<int>((args.slots + kCells - 1) / kCells);
  plan.step = tiles % 2 == 0 ? 2 : 1;
  plan.pairs = static_cast<int>(tiles / plan.step);
  plan.units = static_cast<int>(args.tokens * plan.pairs * plan.rounds);
  plan.most_workers = Parts(plan.units, 2 * multiprocessors() * (plan.step == 2 ? 1 : 2)).workers;
  const int64_t slots = static_cast<int64_t>(plan.most_workers) * plan.step * 2 * kTileRows;
  plan.stats = static_cast<float4*>(workspace);
  plan.sums = reinterpret_cast<float*>(plan.stats + slots);
  plan.units_left = reinterpret_cast<int*>(plan.sums + slots * args.dim);
  plan.status = status;
  if (status != nullptr) {
    plan.block = static_cast<int>(dense_tokens(args));
    plan.blocks = static_cast<int>(dense_blocks(args));
    plan.status_heads = static_cast<int>(dense_status_heads(args));
  }
  return plan;
}

template <int kDim, int kRows>
cudaError_t launch(const AttnArgs& args, const Plan& plan, cudaStream_t stream) {
  const Parts parts(plan.units, plan.most_workers);
  const int ctas = plan.step == 2 ? parts.workers : (parts.workers + 1) / 2;
  const cudaError_t error = launch_overlapped(sparse<kDim, kRows>, ctas, kThreads, 2 * Layout<kDim, kRows>::kBytes + 1024, stream, args, plan);
  return error == cudaSuccess ? launch_merge_parts(args, plan, stream) : error;
}

}  // namespace

bool sparse_fits(const AttnArgs& args) {
  constexpr int64_t kInt = int64_t{1} << 31;
  for (const DeviceRows* rows : {&args.k, &args.v, &args.k_scale, &args.v_scale})
    if (rows->stride < 0 || rows->stride >= 2 * kInt || rows->head_stride < 0 || rows->head_stride >= 2 * kInt) return false;
  const int64_t rounds = (args.slots + kCells - 1) / kCells, tiles = args.kv_heads * ((args.q_heads / args.kv_heads + kTileRows - 1) / kTileRows);
  return args.kv_type == Kv::i8 && args.out_type != Float::f32 && args.slots > 0 && args.slots < kInt && args.cells > 0 && args.cells < kInt &&
         args.tokens < kInt / 64 && args.tokens * tiles < kInt / rounds;  // the units are ints
}

int64_t sparse_workspace_bytes(const AttnArgs& args) {
  const Plan plan = make_plan(args, nullptr, nullptr);
  return reinterpret_cast<intptr_t>(plan.units_left) + static_cast<int64_t>(sizeof(int));
}

cudaError_t launch_sparse(const AttnArgs& args, void* workspace, const uint8_t* status, cudaStream_t stream) {
  const Plan plan = make_plan(args, workspace, status);
  switch (args.dim) {
    case 64: return launch<64, 16>(args, plan, stream);
    case 128: return launch<128, 16>(args, plan, stream);
    default: return args.q_heads / args.kv_heads <= 12 ? launch<256, 12>(args, plan, stream) : launch<256, 16>(args, plan, stream);
  }
}

}  // namespace mori::qsa
