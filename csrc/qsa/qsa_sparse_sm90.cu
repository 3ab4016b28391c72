// qsa_flash for int8 KV on tensor cores: every token over its own cells (contract: qsa.h).
//
// A warpgroup walks the slots of one token and one tile of up to 16 query heads of a KV head, 64 slots a round:
//   S^T = K Q^T   m64n32k32 int8, cells in M: the codes are multiplied as they lie in shared memory; a q row becomes 15-bit integers
//                 q * 2^(14 - e), two int8 digits = two columns; each 64-dim group's exact sum meets its K scale in fp32
//   P = 2^(S - m) the running maximum m moves only when a score passes it by 2^4; P times the V scale, in fp16
//   O^T = V^T P^T m64n16k16 fp16, dims in M: V codes are transposed by ldmatrix and converted in registers
// V scales are divided by a power of two per group that follows their running maximum, so that any fp16 scale fits.
// The list of (token, tile, round) is cut into equal parts, one for each CTA (two warpgroups: two tiles of a token) or, with an odd
// number of tiles, one for each warpgroup; tokens cut between parts meet in a workspace, in order: deterministic.
// An empty slot or an id past the cells reads nothing: its codes and scales are zeros, its probability exactly 0.
// K of the next round is requested after Q K, V of the next round once the codes of this one are in registers, before P V.
// Bound by issue slots (810 instructions a warp and round, 53 % of the slots) and by the latency of gathers from the L2: 855 us at T 1984
// over 30,000 cells, where copies alone take 520 (H200). Lost: mma.sync (255 registers, stalls); biased V codes with a second product
// for the bias (spills, 60 % slower); V requested after P V (7 % slower).
#include "../common/launch_sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "qsa_tensor_sm90.cuh"
#include "qsa_wgmma_sm90.cuh"

namespace mori::qsa {
namespace {

using namespace sm90;

constexpr int kRows = 16;     // query rows of a tile
constexpr int kCells = 64;    // slots of a round
constexpr int kWarpCells = 16;
constexpr int kThreads = 256; // two warpgroups
constexpr int kGroup = 64;    // values per KV scale
constexpr float kScaleSlack = 32.0f;  // V scales over their power of two; P <= 2^(5 + 4 + 5)

template <int kDim>
struct Layout {
  static constexpr int kGroups = kDim / kGroup;
  static constexpr int kBlocks = kDim > 128 ? kDim / 128 : 1;  // a cell's codes lie in blocks of 128 bytes (dim 64 leaves half empty)
  static constexpr int kTile = kCells * 128;                   // bytes of 64 cells of a block, 128-byte swizzle
  static constexpr int kScaleBytes = kGroups * 2;
  static constexpr int kK = 0, kV = kK + kBlocks * kTile, kQ = kV + kBlocks * kTile, kQBlock = 2 * kRows * 128;
  static constexpr int kP = kQ + kBlocks * kQBlock, kPGroup = kCells * kRows * 2;
  static constexpr int kKScale = kP + kGroups * kPGroup, kVScale = kKScale + kCells * kScaleBytes;
  static constexpr int kExchange = kVScale + kCells * kScaleBytes;  // floats [4 warps][16 rows] and [4 warps][4 groups]
  static constexpr int kFactor = kExchange + 4 * kRows * 4 + 4 * 4 * 4;
  static constexpr int kBytes = (kFactor + kRows * 4 + 1023) / 1024 * 1024;  // of a warpgroup
};
static_assert(4 * Layout<256>::kBytes + 2 * 2048 <= 227 * 1024, "two CTAs of two warpgroups in a multiprocessor");

struct Plan {
  int64_t rounds;          // of an item: a token and `step` tiles of query rows
  int pairs, step;         // items of a token; tiles that a CTA serves side by side, 1 or 2
  int64_t units, workers;  // items * rounds, cut into parts for so many workers
  float* sums;             // [workers * step][2][16][dim]: what a worker left of the first and of the last item of its part
  float4* stats;           // [workers * step][2][16]: maximum, sum, score factor, token
  // Blocks of `block` tokens that the dense kernel has not done, or null: then the units are those of the blocks left.
  const uint8_t* status;
  int blocks, block, status_heads;
  int64_t* units_left;
};
static_assert(kMaxStatusBlocks / 8 <= Layout<128>::kGroups * Layout<128>::kPGroup, "their bits lie where P will be");

__host__ __device__ inline int64_t part_begin(int64_t units, int64_t workers, int64_t worker) { return worker * units / workers; }

__device__ __forceinline__ bool is_left(const Plan& plan, int block) {
  bool left = false;
  for (int h = 0; h < plan.status_heads; ++h) left |= __ldcg(plan.status + static_cast<int64_t>(block) * plan.status_heads + h) != 0;
  return left;
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
template <int kDim>
struct Warpgroup {
  using L = Layout<kDim>;
  static constexpr int kGroups = L::kGroups;
  static constexpr int kChunks = kDim / 16;           // 16-byte pieces of a cell
  static constexpr int kCopies = kWarpCells * kChunks / 32;  // of a lane, per tile of K or V

  const AttnArgs& args;
  char* base;
  uint32_t smem;
  int thread, warp, lane, r, c, barrier;

  __device__ __forceinline__ float* exchange() const { return reinterpret_cast<float*>(base + L::kExchange); }

  // Each chunk-wide group of lanes copies its own kCopies cells and holds their ids first; a lane's id is that of this cell.
  __device__ __forceinline__ int own_cell() const { return (lane / kChunks * kCopies + lane % kChunks) % kWarpCells; }
  // Whether a cell of this warp is there, given the ballot over the lanes.
  __device__ __forceinline__ bool has(uint32_t valid, int cell) const { return valid >> (cell / kCopies * kChunks + cell % kCopies) & 1; }

  // Requests the codes and scales of this warp's 16 cells.
  __device__ __forceinline__ void copy(int tile, int scale_tile, const DeviceRows& codes, const DeviceRows& scales, int kv_head, int id, uint32_t valid) const {
    const int chunk = lane % kChunks, first = lane / kChunks * kCopies;
    const uint32_t safe = max(id, 0), target = smem + tile + chunk / 8 * L::kTile + (warp * kWarpCells + first) * 128 + (((chunk ^ first) & 7) << 4);
    const char* source = offset_by(codes.data + chunk * 16, kv_head, static_cast<uint32_t>(codes.head_stride));
    const uint32_t stride = static_cast<uint32_t>(codes.stride);
    if (valid == ~0u) {
#pragma unroll
      for (int j = 0; j < kCopies; ++j)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((target ^ (j << 4)) + j * 128),
                     "l"(offset_by(source, __shfl_sync(~0u, safe, j, kChunks), stride))
                     : "memory");
    } else {
#pragma unroll 1
      for (int j = 0; j < kCopies; ++j)
        cp_async<16>((target ^ (j << 4)) + j * 128, offset_by(source, __shfl_sync(~0u, safe, j, kChunks), stride), has(valid, first + j));
    }
    if (chunk < kCopies) {
      const int at = scale_tile + (warp * kWarpCells + own_cell()) * L::kScaleBytes;
      const char* scale = offset_by(offset_by(scales.data, kv_head, static_cast<uint32_t>(scales.head_stride)), safe, static_cast<uint32_t>(scales.stride));
      if constexpr (L::kScaleBytes >= 4) cp_async<L::kScaleBytes>(smem + at, scale, id >= 0);
      else *reinterpret_cast<uint16_t*>(base + at) = id >= 0 ? __ldg(reinterpret_cast<const uint16_t*>(scale)) : 0;
    }
    cp_async_commit();
  }

  // The digits of a token's q rows: 8 threads a row, each kDim / 8 dims. Their score factors go to shared memory.
  __device__ __forceinline__ void store_q(int64_t token, int64_t head, int rows) const {
    const int row = thread / 8, part = thread % 8;
    const char* q = args.q.data + token * args.q.stride + (head + row) * args.q.head_stride;
    const bool real = row < rows && token < args.tokens;
    float value[kGroups][8] = {}, top = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
      if (real) load8(value[i], q, args.q_type, part * (kDim / 8) + i * 8);
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (float v : value[i]) top = fmaxf(top, fabsf(v));
    for (int offset = 1; offset < 8; offset *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    const int exponent = exponent_of(top), up = 14 - exponent;
    // Two steps: 2^163 is no fp32 number.
    const float half = ldexpf(args.sm_scale < 0 ? -1.0f : 1.0f, up / 2), rest = ldexpf(1.0f, up - up / 2);
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
      char* target = base + L::kQ + dim / 128 * L::kQBlock + row * 128 + (((dim / 16 ^ row) & 7) << 4) + dim % 16;
      *reinterpret_cast<uint2*>(target) = make_uint2(high[0], high[1]);
      *reinterpret_cast<uint2*>(target + kRows * 128) = make_uint2(low[0], low[1]);
    }
    // A q row that is not finite has no digits: its factor makes every score NaN.
    if (part == 0) reinterpret_cast<float*>(base + L::kFactor)[row] = isfinite(top) ? score_factor(args.sm_scale, exponent - 14) : __int_as_float(0x7fc00000);
  }
};

// Scores of this lane's two cells (rows r and r + 8 of its warp) and four q rows (2c, 2c + 1, 8 + 2c, 9 + 2c): [i] is cell (i >> 1) & 1.
template <int kDim>
__device__ __forceinline__ void scores(const Warpgroup<kDim>& w, float (&score)[8]) {
  using L = Layout<kDim>;
  const uint64_t k = swizzled_descriptor(w.smem + L::kK), q = swizzled_descriptor(w.smem + L::kQ);
  int sum[2][16];
  const auto multiply = [&](int g) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 2; ++j)
      wgmma_s8(sum[g & 1], k + (g / 2 * L::kTile + g % 2 * 64 + j * 32) / 16, q + (g / 2 * L::kQBlock + g % 2 * 64 + j * 32) / 16, j > 0);
    wgmma_commit();
  };
  multiply(0);
  if constexpr (L::kGroups > 1) multiply(1);
  __half scale[2][L::kGroups];
#pragma unroll
  for (int h = 0; h < 2; ++h) load_scales(scale[h], w.base + L::kKScale + (w.warp * kWarpCells + w.r + 8 * h) * L::kScaleBytes);
#pragma unroll
  for (int g = 0; g < L::kGroups; ++g) {
    if (g + 1 < L::kGroups) wgmma_wait<1>();
    else wgmma_wait<0>();
    const float a = __half2float(scale[0][g]), b = __half2float(scale[1][g]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float exact = static_cast<float>(sum[g & 1][i] * 256 + sum[g & 1][8 + i]);
      score[i] = g == 0 ? ((i & 2) ? b : a) * exact : fmaf((i & 2) ? b : a, exact, score[i]);
    }
    if (g + 2 < L::kGroups) multiply(g + 2);
  }
}

// The V codes that this warp multiplies: dims 64 g + 16 warp .. of all cells of the round, transposed.
template <int kDim>
__device__ __forceinline__ void load_values(const Warpgroup<kDim>& w, uint4 (&raw)[Layout<kDim>::kGroups][2]) {
  using L = Layout<kDim>;
  const uint32_t v = w.smem + L::kV + w.lane * 128 + (((w.warp ^ w.lane) & 7) << 4);
#pragma unroll
  for (int g = 0; g < L::kGroups; ++g)
#pragma unroll
    for (int h = 0; h < 2; ++h) raw[g][h] = load_matrix_transposed((v ^ (g % 2 * 64)) + g / 2 * L::kTile + h * 32 * 128);
}

// out += V^T P^T of the round; out[g] holds dims 64 g + 16 warp + 2 r (+ 1) of the four q rows.
template <int kDim>
__device__ __forceinline__ void add_values(const Warpgroup<kDim>& w, const uint4 (&raw)[Layout<kDim>::kGroups][2], float (&out)[Layout<kDim>::kGroups][8],
                                           uint32_t mask) {
  using L = Layout<kDim>;
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

__device__ __forceinline__ int row_of(int i, int c) { return (i & 1) + (i >> 1) * 8 + 2 * c; }   // of a lane's four q rows
__device__ __forceinline__ int slot_of(int i) { return (i & 1) + (i >> 1) * 4; }                // its place in score[8] and out[g][8]

template <int kDim>
__global__ void __launch_bounds__(kThreads, 2) sparse(const AttnArgs args, const Plan plan) {
  using L = Layout<kDim>;
  extern __shared__ char shared[];
  wait_for_dependencies();
  launch_dependents();
  const int warp8 = __shfl_sync(~0u, threadIdx.x / 32, 0), side = warp8 / 4;  // uniform: descriptors stay in uniform registers
  char* base = shared + (-smem_address(shared) & 1023) + side * L::kBytes;  // keeps the address space: no generic loads
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const Warpgroup<kDim> w = {args, base, smem_address(base), thread, warp8 % 4, lane, lane / 4, lane % 4, 1 + side};
  const int64_t worker = plan.step == 2 ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * 2 + side;
  int64_t units = plan.units;
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
    units = static_cast<int64_t>(__reduce_add_sync(~0u, count)) * plan.block * plan.pairs * plan.rounds;
    if (blockIdx.x == 0 && threadIdx.x == 0) *plan.units_left = units;
  }
  const int64_t workers = min(plan.workers, units);
  if (workers == 0) return;
  const int64_t begin = part_begin(units, workers, min(worker, workers - 1));
  const int count = static_cast<int>(part_begin(units, workers, worker + 1) - begin);  // rounds of this part
  const int rounds = static_cast<int>(plan.rounds), group = static_cast<int>(args.q_heads / args.kv_heads);
  const int pairs = plan.pairs, head_tiles = (group + kRows - 1) / kRows;
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
    const int tile = p.pair * plan.step + (plan.step == 2 ? side : 0), in_group = tile % head_tiles * kRows;
    return Heads{tile / head_tiles, tile / head_tiles * group + in_group, min(kRows, group - in_group)};
  };
  const int64_t item = begin / rounds;
  Place now = {static_cast<int>(item / pairs), static_cast<int>(item % pairs), static_cast<int>(begin % rounds)};
  if (plan.status != nullptr) {  // from the rank among the tokens left to the token
    int rest = now.token / plan.block, word = 0;
    while (rest >= __popc(left_bits[word])) rest -= __popc(left_bits[word++]);
    now.token = (word * 32 + __fns(left_bits[word], 0, rest + 1)) * plan.block + now.token % plan.block;
    __syncthreads();
  }
  if (worker >= workers) return;
  Heads heads = heads_of(now);
  const auto id_at = [&](const Place& p) {  // of this lane's cell
    const int slot = p.round * kCells + w.warp * kWarpCells + w.own_cell();
    return slot < args.slots && p.token < args.tokens ? static_cast<int>(cell_of(args, p.token, slot)) : -1;
  };

  float out[L::kGroups][8], top[4], sum[4], factor[4];
  uint32_t scale_down[(L::kGroups + 1) / 2];  // fp16 pairs: 2^-E of each group
  const auto start_item = [&] {
#pragma unroll
    for (int g = 0; g < L::kGroups; ++g)
#pragma unroll
      for (float& value : out[g]) value = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      top[i] = kLowest, sum[i] = 0.0f;
      factor[i] = reinterpret_cast<const float*>(base + L::kFactor)[row_of(i, w.c)];
    }
#pragma unroll
    for (uint32_t& pair : scale_down) pair = 0x78007800u;  // 2^15
  };

  Place next = now;
  advance(next);
  int id = id_at(now);
  uint32_t valid = __ballot_sync(~0u, id >= 0);
  w.copy(L::kK, L::kKScale, args.k, args.k_scale, heads.kv, id, valid);
  w.copy(L::kV, L::kVScale, args.v, args.v_scale, heads.kv, id, valid);
  w.store_q(now.token, heads.first, heads.rows);
  id = count > 1 ? id_at(next) : -1;
  cp_async_wait<1>();
  fence_async_shared();
  warpgroup_sync(w.barrier);
  start_item();
  int item_start = 0;
  for (int done = 0; done < count; ++done) {
    float score[8], p[8];
    scores(w, score);
    __syncwarp();  // the lanes have read the scales; the products of the whole warpgroup are complete: K and Q are free
    const uint32_t next_valid = __ballot_sync(~0u, id >= 0);
    const bool complete = next.round == 0, last = done + 1 == count, item_ends = complete || last;
    const Heads next_heads = complete ? heads_of(next) : heads;
    w.copy(L::kK, L::kKScale, args.k, args.k_scale, next_heads.kv, id, next_valid);
    bool move = false;  // a maximum, or a group's power of two
    const auto weigh = [&] {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = (i & 1) + (i >> 2) * 2;
        p[i] = fmaf(score[i] - top[row], factor[row], kShift);
      }
      if (valid != ~0u) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (!w.has(valid, w.r + ((i & 2) ? 8 : 0))) p[i] = -INFINITY;
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
    float row_sum[4];
    const auto store_p = [&] {
#pragma unroll
      for (float& x : p) x = exp2_fast(x);
#pragma unroll
      for (int i = 0; i < 4; ++i) row_sum[i] = p[slot_of(i)] + p[slot_of(i) + 2];
      const uint32_t half[4] = {pack_half2(p[0], p[1]), pack_half2(p[4], p[5]), pack_half2(p[2], p[3]), pack_half2(p[6], p[7])};
      char* target = base + L::kP + w.warp * 512 + w.r * 16 + w.c * 4;  // [group][warp][8 cells][8 rows of P][cell][row]
#pragma unroll
      for (int g = 0; g < L::kGroups; ++g)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t pair = multiply_half2(scale[h][g / 2], scale_down[g / 2]), both = __byte_perm(pair, pair, g % 2 ? 0x3232 : 0x1010);
          if ((g & 1) == 0 || L::kGroups == 1) {
            const __half2 size = __habs2(*reinterpret_cast<const __half2*>(&pair));
            move |= __half2float(__hmax(__low2half(size), __high2half(size))) > kScaleSlack;
          }
          *reinterpret_cast<uint32_t*>(target + g * L::kPGroup + h * 256) = multiply_half2(half[2 * h], both);
          *reinterpret_cast<uint32_t*>(target + g * L::kPGroup + h * 256 + 128) = multiply_half2(half[2 * h + 1], both);
        }
      fence_async_shared();
    };
    store_p();
    if (warpgroup_any(w.barrier, move)) {  // rare: move the maxima and the powers of two, write P again
      float* most = w.exchange();
      uint32_t* most_scale = reinterpret_cast<uint32_t*>(most + 4 * kRows);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = slot_of(i);
        float x = fmaxf(w.has(valid, w.r) ? score[s] : kLowest, w.has(valid, w.r + 8) ? score[s + 2] : kLowest);
        for (int offset = 4; offset < 32; offset *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
        if (w.r == 0) most[w.warp * kRows + row_of(i, w.c)] = x;
      }
#pragma unroll
      for (int g = 0; g < L::kGroups; ++g) {
        const uint32_t size = max(scale[0][g / 2] >> (g % 2 * 16) & 0x7fffu, scale[1][g / 2] >> (g % 2 * 16) & 0x7fffu);
        const uint32_t largest = __reduce_max_sync(~0u, size);
        if (lane == 0) most_scale[w.warp * 4 + g] = largest;
      }
      warpgroup_sync(w.barrier);
      float shrink[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* m = most + row_of(i, w.c);
        const float x = fmaxf(fmaxf(fmaxf(m[0], m[kRows]), fmaxf(m[2 * kRows], m[3 * kRows])), top[i]);
        shrink[i] = exp2_fast((top[i] - x) * factor[i]);
        top[i] = x;
        sum[i] *= shrink[i];
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
        for (int i = 0; i < 4; ++i) out[g][slot_of(i)] *= shrink[i] * step, out[g][slot_of(i) + 2] *= shrink[i] * step;
      }
      weigh();
      store_p();
      warpgroup_sync(w.barrier);
    }
    // All have written P, V has landed.
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += row_sum[i];
    uint4 raw[L::kGroups][2];
    load_values(w, raw);
    warpgroup_sync(w.barrier);  // all have read V
    w.copy(L::kV, L::kVScale, args.v, args.v_scale, next_heads.kv, id, next_valid);
    add_values(w, raw, out, mask);

    if (item_ends) {
      const bool whole = complete && done + 1 - item_start == rounds;
      float* part = w.exchange();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        for (int offset = 4; offset < 32; offset *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], offset);
        if (w.r == 0) part[w.warp * kRows + row_of(i, w.c)] = sum[i];
      }
      warpgroup_sync(w.barrier);
      const int64_t slot = (worker * plan.step + (plan.step == 2 ? side : 0)) * 2 + (item_start == 0 ? 0 : 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row_of(i, w.c), s = slot_of(i);
        if (row >= heads.rows) continue;
        const float total = (part[row] + part[kRows + row]) + (part[2 * kRows + row] + part[3 * kRows + row]);
        const float inverse = total == 0.0f ? 0.0f : __frcp_rn(total);
        const int64_t head = heads.first + row;
        const char* gate = args.gate.data == nullptr || total == 0.0f ? nullptr : args.gate.data + now.token * args.gate.stride + head * args.gate.head_stride;
#pragma unroll
        for (int g = 0; g < L::kGroups; ++g) {
          const int dim = g * 64 + w.warp * 16 + 2 * w.r;
          const float up = 1.0f / __half2float(__ushort_as_half(static_cast<uint16_t>(scale_down[g / 2] >> (g % 2 * 16))));
          const float x = out[g][s] * up, y = out[g][s + 2] * up;
          if (!whole) *reinterpret_cast<float2*>(plan.sums + (slot * kRows + row) * kDim + dim) = make_float2(x, y);
          else if (now.token < args.tokens)
            store_pair(args, (static_cast<int64_t>(now.token) * args.q_heads + head) * kDim + dim, x * inverse, y * inverse, gate, dim);
        }
        if (!whole && w.warp == 0 && w.r == 0) plan.stats[slot * kRows + row] = make_float4(top[i], total, factor[i], __int_as_float(now.token));
      }
      if (!last) w.store_q(next.token, next_heads.first, next_heads.rows);
      item_start = done + 1;
    }
    cp_async_wait<1>();
    fence_async_shared();
    warpgroup_sync(w.barrier);  // K has landed, Q is written, P may be overwritten
    if (item_ends && !last) start_item();
    valid = next_valid;
    now = next;
    advance(next);
    id = done + 2 < count ? id_at(next) : -1;
    heads = next_heads;
  }
  cp_async_wait<0>();
}

// Joins the parts of an item that was cut between workers, in order. One CTA per (boundary between workers, side, query row).
template <int kDim>
__global__ void __launch_bounds__(kDim / 4) merge_parts(const AttnArgs args, const Plan plan) {
  wait_for_dependencies();
  launch_dependents();
  const int64_t units = plan.status == nullptr ? plan.units : __ldcg(plan.units_left), workers = min(plan.workers, units), boundary = blockIdx.x + 1;
  if (boundary >= workers) return;
  const int64_t start = part_begin(units, workers, boundary), item = start / plan.rounds;
  if (start == item * plan.rounds) return;                    // nothing is cut here
  const int64_t previous = part_begin(units, workers, boundary - 1);
  if (previous > item * plan.rounds) return;                  // cut before as well: that boundary's CTA has it
  const int parts = static_cast<int>(((item + 1) * plan.rounds * workers - 1) / units - boundary + 2);
  const int side = blockIdx.y / kRows, row = blockIdx.y % kRows, column = threadIdx.x * 4, lane = threadIdx.x % 32;
  const int group = static_cast<int>(args.q_heads / args.kv_heads), head_tiles = (group + kRows - 1) / kRows;
  const int tile = static_cast<int>(item % plan.pairs) * plan.step + side;
  if (row >= group - tile % head_tiles * kRows) return;
  // Only the first worker can have begun with another item.
  const int64_t first = (((boundary - 1) * plan.step + side) * 2 + (previous < item * plan.rounds)) * kRows + row;
  const int64_t stride = static_cast<int64_t>(plan.step) * 2 * kRows, second = (boundary * plan.step + side) * 2 * kRows + row;
  const auto slot = [&](int i) { return i == 0 ? first : second + (i - 1) * stride; };
  const int64_t token = __float_as_int(__ldcg(&plan.stats[first]).w);
  if (token >= args.tokens) return;

  constexpr int kLanes = kDim / 4 < 32 ? kDim / 4 : 32;
  constexpr uint32_t kMask = kLanes == 32 ? ~0u : (1u << kLanes) - 1;
  float top = kLowest;
  for (int i = lane; i < parts; i += kLanes) top = fmaxf(top, __ldcg(&plan.stats[slot(i)]).x);
  for (int offset = kLanes / 2; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kMask, top, offset));
  float total = 0.0f;
  float4 sum = {};
  for (int chunk = 0; chunk < parts; chunk += kLanes) {  // a lane per part for the weights, then every thread over the parts
    float weight = 0.0f, share = 0.0f;
    if (chunk + lane < parts) {
      const float4 stat = __ldcg(&plan.stats[slot(chunk + lane)]);
      weight = exp2_fast((stat.x - top) * stat.z);
      share = weight * stat.y;
    }
    for (int offset = kLanes / 2; offset > 0; offset /= 2) share += __shfl_xor_sync(kMask, share, offset);
    total += share;
#pragma unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (chunk + i >= parts) break;
      const float4 part = __ldcg(reinterpret_cast<const float4*>(plan.sums + slot(chunk + i) * kDim + column));
      const float w = __shfl_sync(kMask, weight, i);
      sum.x = fmaf(w, part.x, sum.x), sum.y = fmaf(w, part.y, sum.y), sum.z = fmaf(w, part.z, sum.z), sum.w = fmaf(w, part.w, sum.w);
    }
  }
  const float inverse = total == 0.0f ? 0.0f : __frcp_rn(total);
  const int64_t head = static_cast<int64_t>(tile / head_tiles) * group + tile % head_tiles * kRows + row, at = (token * args.q_heads + head) * kDim + column;
  const char* gate = args.gate.data == nullptr || total == 0.0f ? nullptr : args.gate.data + token * args.gate.stride + head * args.gate.head_stride;
  store_pair(args, at, sum.x * inverse, sum.y * inverse, gate, column);
  store_pair(args, at + 2, sum.z * inverse, sum.w * inverse, gate, column + 2);
}

int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

Plan make_plan(const AttnArgs& args, void* workspace, const uint8_t* status) {
  const int64_t group = args.q_heads / args.kv_heads, tiles = args.kv_heads * ((group + kRows - 1) / kRows);
  Plan plan = {};
  plan.rounds = (args.slots + kCells - 1) / kCells;
  plan.step = tiles % 2 == 0 ? 2 : 1;
  plan.pairs = static_cast<int>(tiles / plan.step);
  plan.units = args.tokens * plan.pairs * plan.rounds;
  const int64_t most = 2 * multiprocessors() * (plan.step == 2 ? 1 : 2);
  plan.workers = plan.units < most ? plan.units : most;
  const int64_t slots = plan.workers * plan.step * 2 * kRows;
  plan.stats = static_cast<float4*>(workspace);
  plan.sums = reinterpret_cast<float*>(plan.stats + slots);
  plan.units_left = reinterpret_cast<int64_t*>(plan.sums + slots * args.dim);
  plan.status = status;
  if (status != nullptr) {
    plan.block = static_cast<int>(dense_tokens(args));
    plan.blocks = static_cast<int>(dense_blocks(args));
    plan.status_heads = static_cast<int>(args.kv_heads);
  }
  return plan;
}

template <int kDim>
cudaError_t launch(const AttnArgs& args, const Plan& plan, cudaStream_t stream) {
  const int64_t ctas = plan.step == 2 ? plan.workers : (plan.workers + 1) / 2;
  const cudaError_t error =
      launch_overlapped(sparse<kDim>, static_cast<unsigned>(ctas), kThreads, 2 * Layout<kDim>::kBytes + 1024, stream, args, plan);
  bool cut = plan.status != nullptr;
  for (int64_t i = 1; i < plan.workers && !cut; ++i) cut = part_begin(plan.units, plan.workers, i) % plan.rounds != 0;
  if (error != cudaSuccess || !cut || plan.workers < 2) return error;
  return launch_overlapped(merge_parts<kDim>, dim3(static_cast<unsigned>(plan.workers - 1), plan.step * kRows), kDim / 4, 0, stream, args, plan);
}

}  // namespace

bool sparse_fits(const AttnArgs& args) {
  constexpr int64_t kInt = int64_t{1} << 31;
  for (const DeviceRows* rows : {&args.k, &args.v, &args.k_scale, &args.v_scale})
    if (rows->stride < 0 || rows->stride >= 2 * kInt || rows->head_stride < 0 || rows->head_stride >= 2 * kInt) return false;
  return args.kv_type == Kv::i8 && args.out_type != Float::f32 && args.slots > 0 && args.slots < kInt && args.cells > 0 && args.cells < kInt &&
         args.tokens < kInt;
}

int64_t sparse_workspace_bytes(const AttnArgs& args) {
  const Plan plan = make_plan(args, nullptr, nullptr);
  return reinterpret_cast<intptr_t>(plan.units_left) + static_cast<int64_t>(sizeof(int64_t));
}

cudaError_t launch_sparse(const AttnArgs& args, void* workspace, const uint8_t* status, cudaStream_t stream) {
  const Plan plan = make_plan(args, workspace, status);
  switch (args.dim) {
    case 64: return launch<64>(args, plan, stream);
    case 128: return launch<128>(args, plan, stream);
    default: return launch<256>(args, plan, stream);
  }
}

}  // namespace mori::qsa
