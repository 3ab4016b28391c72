// C = A B^T on the tensor cores for many tokens: exact, at the speed of a bf16 GEMM, with half its weight bytes.
//
// C^T = B A^T by wgmma m64nNk16, bf16 operands: the weight (B) is the register operand, decoded from e4m3 in flight with its scale
// folded in (decode_sm90.cuh); the tokens (A) are a bf16 workspace that `expand_tokens` writes first. fp8 wgmma is not used: its
// sums keep about 14 bits, and with exact promotion it is no faster.
//   tile       128 weight rows (2 consumer warpgroups of 64) x 64, 128, 192 or 256 tokens, 64 along K per stage
//   producer   one thread: TMA of both operands into a ring of stages, full / empty mbarriers; another warp: the stage's 8 scales
//   consumer   16 codes of a row and stage by ld.shared.v4 -> A fragments in registers, double-buffered over two stages
//   K order    within each 64: lane c of a quad owns bytes 16 c .. 16 c + 15 of a weight row, so it needs one scale per stage; the
//              workspace holds the tokens in that order
//   epilogue   bias, rounding, stmatrix.trans into a swizzled tile, TMA store; direct stores for fp32 or odd N
// K is padded to 128 with zeros (TMA fills the weight's). Persistent, one CTA per SM, tiles ordered for L2 reuse.
// A weight scale outside the exact range of bf16, or such a token row (the workspace marks it), is rare: its warpgroup then
// overwrites its tile with exact sums.
#include <algorithm>

#include "../common/sm90.cuh"
#include "../common/tma_sm90.cuh"
#include "../common/wgmma_sm90.cuh"
#include "decode_sm90.cuh"
#include "scales_sm90.cuh"

namespace mori::mxfp8 {
namespace {

using namespace sm90;

constexpr int kStageK = 64;
constexpr int kPadK = 2 * kStageK;      // the main loop takes two stages per turn
constexpr int kWarpgroups = 2;          // consumers
constexpr int kGroupRows = 64;          // weight rows of a warpgroup
constexpr int kRows = kWarpgroups * kGroupRows;
constexpr int kThreads = (kWarpgroups + 1) * 128;
constexpr int kStageScales = kRows / 32 * (kStageK / 32);  // weight scales of a stage
constexpr int kStoreTile = 64 * 64 * 2;  // bytes of a staged 64 x 64 tile of C
constexpr int kSmemLimit = 227 * 1024;
constexpr int kL2Group = 8;             // token tiles that go together over all weight rows

template <int kTokensPerTile>
struct Config {
  static constexpr int kTokens = kTokensPerTile;
  static constexpr int kXBytes = kTokens * kStageK * 2, kWBytes = kRows * kStageK, kStageBytes = kXBytes + kWBytes;
  static constexpr int kStoreTiles = std::min(kTokens / 64, 2);  // staged at a time per warpgroup
  static constexpr int kStoreBytes = kWarpgroups * kStoreTiles * kStoreTile;
  static constexpr int kAlign = 1024, kBarrierBytes = 512;  // barriers and scales
  static constexpr int kStages = std::min(8, (kSmemLimit - kAlign - kBarrierBytes - kStoreBytes) / kStageBytes);
  // Offsets from a 1024-byte aligned base.
  static constexpr int kWOffset = kStages * kXBytes, kStoreOffset = kWOffset + kStages * kWBytes, kBarrierOffset = kStoreOffset + kStoreBytes;
  static constexpr int kSmem = kAlign + kBarrierOffset + kBarrierBytes;
  static constexpr int kScaleOffset = kBarrierOffset + 2 * 8 * kStages;
  static_assert(kStages >= 3 && (2 * 8 + kStageScales) * kStages <= kBarrierBytes && kSmem <= kSmemLimit);
};

// ---- tokens: e4m3 with 1x32 scales -> bf16 in the operand's K order, and a mark per token whose scales bf16 cannot hold ----

struct Workspace {
  uint4* x;             // bf16 [m, padded k]
  uint8_t* is_extreme;  // [m]
};

__host__ __device__ int64_t padded_k(int64_t k) { return (k + kPadK - 1) / kPadK * kPadK; }

Workspace split_workspace(void* base, int64_t m, int64_t k) {
  return {static_cast<uint4*>(base), static_cast<uint8_t*>(base) + m * padded_k(k) * 2};
}

// One CTA per token; a thread expands one k16 step: word `step` of each of the four 16-byte runs of a group of 64 codes.
__global__ void __launch_bounds__(128) expand_tokens(const GemmArgs args, const ByteScales scales, const Workspace workspace) {
  constexpr uint32_t kFirst = 10, kLast = 246;  // scales whose every product with a code is a normal bf16
  const int64_t m = blockIdx.x, columns = padded_k(args.k);
  const uint8_t* row = args.a + m * args.k;
  uint4* out = workspace.x + m * columns / 8;
  bool extreme = false;
  for (int64_t i = threadIdx.x; i < columns / 16; i += blockDim.x) {
    const int64_t group = i / 4 * kStageK, step = i % 4;
    uint32_t low[4], high[4];
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      const int64_t k = group + 16 * run;
      const bool inside = k < args.k;
      const uint32_t word = inside ? __ldg(reinterpret_cast<const uint32_t*>(row + k) + step) : 0;
      const uint32_t scale = inside ? scales.a_byte(m, k / 32) : 127, magnitudes = word & 0x7f7f7f7fu;
      const bool nan = scale == mx::kNanScale || ((magnitudes + 0x01010101u) & 0x80808080u) != 0;
      extreme |= magnitudes != 0 && !nan && scale - kFirst > kLast - kFirst;
      const uint32_t one = nan ? 0x7fc0u : min(max(scale, kFirst), kLast) << 7;
      const uint32_t factor = one | one << 16;
      constexpr uint32_t kUnit = 0x7b807b80;  // 2^120
      low[run] = multiply_bf16x2(multiply_bf16x2(spread_codes(word << 8), kUnit), factor);
      high[run] = multiply_bf16x2(multiply_bf16x2(spread_codes(word), kUnit), factor);
    }
    out[2 * i] = make_uint4(low[0], low[1], low[2], low[3]);
    out[2 * i + 1] = make_uint4(high[0], high[1], high[2], high[3]);
  }
  const bool any = __syncthreads_or(extreme) != 0;
  if (threadIdx.x == 0) workspace.is_extreme[m] = any;
}

// ---- GEMM ----

struct Maps {
  CUtensorMap x, w, c;
};

// Position of the t-th tile: `kL2Group` token tiles run over all weight rows before the next ones.
struct Tiles {
  int token_tiles, row_tiles;
  __device__ __forceinline__ int count() const { return token_tiles * row_tiles; }
  __device__ __forceinline__ int2 at(int t) const {  // x: token tile, y: row tile
    const int per_group = kL2Group * row_tiles, group = t / per_group, rest = t - group * per_group;
    const int members = min(kL2Group, token_tiles - group * kL2Group);
    return {group * kL2Group + rest % members, rest / members};
  }
};

__device__ __forceinline__ void barrier_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
__device__ __forceinline__ bool barrier_or(int id, bool value) {
  uint32_t any;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 q, %2, 0;\nbarrier.cta.red.or.pred p, %1, 128, q;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(any)
               : "r"(id), "r"(static_cast<uint32_t>(value))
               : "memory");
  return any != 0;
}

__device__ __forceinline__ void load_codes(uint32_t (&codes)[4], uint32_t smem) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(codes[0]), "=r"(codes[1]), "=r"(codes[2]), "=r"(codes[3]) : "r"(smem));
}

__device__ __forceinline__ uint32_t load_shared_byte(uint32_t smem) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(smem));
  return value;
}
__device__ __forceinline__ void store_shared_byte(uint32_t smem, uint8_t value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(smem), "r"(static_cast<uint32_t>(value)) : "memory");
}

__device__ __forceinline__ uint32_t pack2(float low, float high, bool half) {
  if (half) return pack_half2(low, high);
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The consumer's view of the ring.
template <class C>
struct Ring {
  uint32_t full, empty;
  int stage = 0;
  uint32_t phase;
  __device__ __forceinline__ Ring(uint32_t barriers, uint32_t first_phase) : full(barriers), empty(barriers + 8 * C::kStages), phase(first_phase) {}
  __device__ __forceinline__ void advance() {
    if (++stage == C::kStages) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ uint32_t full_barrier() const { return full + 8 * stage; }
  __device__ __forceinline__ uint32_t empty_barrier(int s) const { return empty + 8 * s; }
};

// kStaged: C leaves through shared memory and TMA, else by direct stores.
template <class C, bool kStaged>
__global__ void __launch_bounds__(kThreads, 1) gemm(const __grid_constant__ Maps maps, const GemmArgs args, const ByteScales scales, const uint8_t* __restrict__ token_is_extreme,
                                                    const Tiles tiles) {
  extern __shared__ uint8_t smem[];
  const uint32_t base = (smem_address(smem) + C::kAlign - 1) / C::kAlign * C::kAlign;
  const uint32_t x_smem = base, w_smem = base + C::kWOffset, store_smem = base + C::kStoreOffset, barriers = base + C::kBarrierOffset, scale_smem = base + C::kScaleOffset;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  const int stages = static_cast<int>(padded_k(args.k)) / kStageK;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(barriers + 8 * i, 2);  // the copies and the scales
      mbarrier_init(barriers + 8 * (C::kStages + i), kWarpgroups * 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == kWarpgroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0 && threadIdx.x % 32 == 0) {
      Ring<C> ring(barriers, 1);
      for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x) {
        const int2 tile = tiles.at(t);
        for (int s = 0; s < stages; ++s, ring.advance()) {
          mbarrier_wait(ring.empty_barrier(ring.stage), ring.phase);
          mbarrier_arrive_expect(ring.full_barrier(), C::kStageBytes);
          tma_load(w_smem + ring.stage * C::kWBytes, &maps.w, ring.full_barrier(), s * kStageK, tile.y * kRows);
          tma_load(x_smem + ring.stage * C::kXBytes, &maps.x, ring.full_barrier(), s * kStageK, tile.x * C::kTokens);
        }
      }
    } else if (warp == 1) {
      // A lane holds one of the 8 scales of one of four consecutive stages, so that a load's latency is paid once in four.
      Ring<C> ring(barriers, 1);
      const int lane = threadIdx.x % 32, scale = lane % kStageScales;
      for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x) {
        const int64_t n = static_cast<int64_t>(tiles.at(t).y) * kRows + scale / 2 * 32;
        const auto load = [&](int s) {
          const int64_t block = 2 * (s + lane / kStageScales) + scale % 2;
          return n < args.n && block < scales.blocks ? scales.b_byte(n, block) : uint8_t{127};
        };
        uint8_t next = load(0);
        for (int s = 0; s < stages; s += 4) {
          const uint8_t now = next;
          next = load(s + 4);
          for (int i = 0; i < 4 && s + i < stages; ++i, ring.advance()) {
            mbarrier_wait(ring.empty_barrier(ring.stage), ring.phase);
            if (lane / kStageScales == i) store_shared_byte(scale_smem + ring.stage * kStageScales + scale, now);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(ring.full_barrier());
          }
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int warp = threadIdx.x / 32 % 4, g = lane / 4, c = lane % 4;
  const int barrier_id = warpgroup + 1;
  const bool leader = threadIdx.x % 128 == 0;
  const uint64_t x_descriptor = wgmma_descriptor(x_smem);
  const uint32_t my_codes = w_smem + warpgroup * kGroupRows * kStageK + (warp * 16 + g) * kStageK + c * 16;
  const uint32_t my_scale = scale_smem + (warpgroup * 2 + warp / 2) * 2 + c / 2;  // a warp's 16 rows lie in one block of 32
  Ring<C> ring(barriers, 0);
  float sum[C::kTokens / 2] = {};
  bool extreme = false;

  // Both rows' 16 codes of a stage as the A fragments of its four k16 steps.
  const auto decode_stage = [&](int stage, uint32_t (&a)[16]) {
    const uint32_t scale = load_shared_byte(my_scale + stage * kStageScales);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t codes[4];
      load_codes(codes, my_codes + stage * C::kWBytes + half * 8 * kStageK);
      const Multiplier multiplier = multiplier_for(codes, scale);
      extreme |= multiplier.extreme;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        a[4 * j + half] = decode_low(codes[j], multiplier.bf16x2);
        a[4 * j + 2 + half] = decode_high(codes[j], multiplier.bf16x2);
      }
    }
  };
  const auto multiply_stage = [&](int stage, const uint32_t (&a)[16], bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma_bf16(sum, a + 4 * j, x_descriptor + static_cast<uint64_t>(stage * (C::kXBytes >> 4) + 2 * j), j > 0 || accumulate);
    wgmma_commit();
  };
  const auto release = [&](int stage) {
    if (lane == 0) mbarrier_arrive(ring.empty_barrier(stage));
  };

  for (int t = blockIdx.x; t < tiles.count(); t += gridDim.x) {
    const int2 tile = tiles.at(t);
    const int64_t m0 = static_cast<int64_t>(tile.x) * C::kTokens, n0 = static_cast<int64_t>(tile.y) * kRows + warpgroup * kGroupRows;
    extreme = false;

    uint32_t a0[16], a1[16];
    mbarrier_wait(ring.full_barrier(), ring.phase);
    decode_stage(ring.stage, a0);
#pragma unroll 1
    for (int s = 0; s < stages; s += 2) {
      const int first = ring.stage;
      multiply_stage(first, a0, s > 0);
      ring.advance();
      const int second = ring.stage;
      mbarrier_wait(ring.full_barrier(), ring.phase);
      decode_stage(second, a1);
      multiply_stage(second, a1, true);
      wgmma_wait<1>();
      release(first);
      ring.advance();
      if (s + 2 < stages) {
        mbarrier_wait(ring.full_barrier(), ring.phase);
        decode_stage(ring.stage, a0);
      }
      wgmma_wait<0>();
      release(second);
    }

    const int64_t row0 = n0 + warp * 16 + g;  // of this lane, and row0 + 8
    if constexpr (!kStaged) {
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) {
        const int64_t m = m0 + i / 4 * 8 + c * 2 + i % 2, n = row0 + i / 2 % 2 * 8;
        if (m < args.m && n < args.n) store_c(args, m, n, sum[i]);
      }
    } else {
      const float bias0 = row0 < args.n ? bias_at(args, row0) : 0.f, bias1 = row0 + 8 < args.n ? bias_at(args, row0 + 8) : 0.f;
      const bool half = args.out_type == Float::f16;
      const uint32_t staged = store_smem + warpgroup * C::kStoreTiles * kStoreTile;
#pragma unroll
      for (int q = 0; q < C::kTokens / 64; ++q) {
        const int slot = q % C::kStoreTiles;
        if (slot == 0) {
          if (leader) tma_store_wait_read();
          barrier_sync(barrier_id);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // 16 tokens: four 8x8 matrices (rows 0-7, 8-15) x (tokens 0-7, 8-15), stored transposed
          const float* p = sum + (q * 64 + j * 16) / 2;
          const int matrix = lane / 8, token = j * 16 + lane % 8 + matrix / 2 * 8;
          const uint32_t block = warp * 2 + matrix % 2;
          store_matrix_transposed(staged + slot * kStoreTile + token * 128 + ((block ^ (token & 7)) << 4), pack2(p[0] + bias0, p[1] + bias0, half),
                                  pack2(p[2] + bias1, p[3] + bias1, half), pack2(p[4] + bias0, p[5] + bias0, half), pack2(p[6] + bias1, p[7] + bias1, half));
        }
        if (slot == C::kStoreTiles - 1 || q == C::kTokens / 64 - 1) {
          fence_async_shared();
          barrier_sync(barrier_id);
          if (leader) {
#pragma unroll
            for (int z = q - slot; z <= q; ++z)
              tma_store(&maps.c, staged + z % C::kStoreTiles * kStoreTile, static_cast<int>(n0), static_cast<int>(m0) + z * 64);
            tma_store_commit();
          }
        }
      }
    }

    for (int i = threadIdx.x % 128; i < C::kTokens; i += 128) extreme |= m0 + i < args.m && token_is_extreme[m0 + i] != 0;
    if (barrier_or(barrier_id, extreme)) {
      if (leader) tma_store_wait();
      barrier_sync(barrier_id);
      for (int i = threadIdx.x % 128; i < kGroupRows * C::kTokens; i += 128) {
        const int64_t n = n0 + i % kGroupRows, m = m0 + i / kGroupRows;
        if (m < args.m && n < args.n) store_c(args, m, n, exact_dot(args, scales, m, n));
      }
    }
  }
  if (leader) tma_store_wait();
}

// ---- launch ----

bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <int kTokens, bool kStaged>
cudaError_t launch(const GemmArgs& args, const Workspace& workspace, cudaStream_t stream) {
  using C = Config<kTokens>;
  static const cudaError_t prepared = cudaFuncSetAttribute(gemm<C, kStaged>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSmem);
  if (prepared != cudaSuccess) return prepared;
  Maps maps;
  const int64_t columns = padded_k(args.k);
  bool ok = make_tensor_map(&maps.x, workspace.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, args.m, columns, kTokens, kStageK, CU_TENSOR_MAP_SWIZZLE_128B);
  ok &= make_tensor_map(&maps.w, args.b, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.n, args.k, kRows, kStageK, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (kStaged)
    ok &= make_tensor_map(&maps.c, args.out, args.out_type == Float::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, args.m, args.n, 64, 64,
                          CU_TENSOR_MAP_SWIZZLE_128B);
  if (!ok) return cudaErrorInvalidValue;
  const Tiles tiles = {static_cast<int>((args.m + kTokens - 1) / kTokens), static_cast<int>((args.n + kRows - 1) / kRows)};
  int device = 0, processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device); error != cudaSuccess) return error;
  const int grid = std::min(processors, tiles.token_tiles * tiles.row_tiles);
  gemm<C, kStaged><<<grid, kThreads, C::kSmem, stream>>>(maps, args, ByteScales(args), workspace.is_extreme, tiles);
  return cudaGetLastError();
}

template <int kTokens>
cudaError_t launch_store(const GemmArgs& args, const Workspace& workspace, cudaStream_t stream) {
  const bool staged = args.out_type != Float::f32 && args.n % 8 == 0 && aligned16(args.out);
  return staged ? launch<kTokens, true>(args, workspace, stream) : launch<kTokens, false>(args, workspace, stream);
}

// Tokens per tile: full waves first. A tile costs its tokens plus about 24 tokens' worth of filling the pipeline and storing.
int tokens_per_tile(int64_t m, int64_t n) {
  int best = 64;
  int64_t best_cost = INT64_MAX;
  for (const int tokens : {256, 192, 128, 64}) {
    const int64_t tiles = (m + tokens - 1) / tokens * ((n + kRows - 1) / kRows), waves = (tiles + 131) / 132;
    const int64_t cost = waves * (tokens + 24);
    if (cost < best_cost) best_cost = cost, best = tokens;
  }
  return best;
}

}  // namespace

bool gemm_fits(const GemmArgs& args) { return args.k > 0 && aligned16(args.a) && aligned16(args.b); }

int64_t gemm_workspace_bytes(int64_t m, int64_t k) { return m * padded_k(k) * 2 + m; }

cudaError_t launch_gemm(const GemmArgs& args, void* base, cudaStream_t stream) {
  const Workspace workspace = split_workspace(base, args.m, args.k);
  expand_tokens<<<static_cast<unsigned>(args.m), 128, 0, stream>>>(args, ByteScales(args), workspace);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  switch (tokens_per_tile(args.m, args.n)) {
    case 256: return launch_store<256>(args, workspace, stream);
    case 192: return launch_store<192>(args, workspace, stream);
    case 128: return launch_store<128>(args, workspace, stream);
    default: return launch_store<64>(args, workspace, stream);
  }
}

}  // namespace mori::mxfp8
