// C = A B^T for up to 32 tokens on gfx950: the weight is streamed once, so it is bound by memory bandwidth.
//
// A workgroup computes 16 weight rows x all tokens; its eight waves take steps of 128 along K in turn, two steps at a time with the
// next two in flight. Both operands of the scaled MFMA come from memory without the LDS: a lane loads just the 2 x 16 bytes of a
// row that it feeds (common/gfx950.h). The weight is the 16-row operand, the tokens the columns: no padding, rows past the last
// token read as zeros. Waves are summed in order: deterministic, and a token's bits do not depend on the others.
#include "../common/gfx950.h"
#include "epilogue_gfx950.h"
#include "mxfp8_gfx950.h"

namespace mori::mxfp8 {
namespace {

using namespace gfx950;

constexpr int kRows = 16, kTokens = 16, kWaves = 8, kStep = 128, kFlight = 2;
constexpr int kThreads = kWaves * kWave;

// e8m0 bytes of a lane's row: byte `base + block * stride` of the scale tensor.
struct LaneScales {
  Buffer from;
  int base, stride;

  MORI_DEVICE int load(int block, int blocks) const { return load_byte(from, block < blocks ? base + block * stride : kOutOfRange); }
};

MORI_DEVICE LaneScales token_scales(const GemmArgs& args, int m, bool packed) {
  const int blocks = static_cast<int>(args.k / 32);
  if (!packed) return {make_buffer(args.a_scale, static_cast<uint32_t>(args.m) * blocks), m * blocks, 1};
  return {make_buffer(args.a_scale, 64u * blocks), m % 16 * 4 + m / 16, 64};
}

MORI_DEVICE LaneScales weight_scales(const GemmArgs& args, int n, bool packed) {
  const int blocks = static_cast<int>(args.k / 32), row_blocks = static_cast<int>((args.n + 31) / 32);
  if (!packed) return {make_buffer(args.b_scale, static_cast<uint32_t>(row_blocks) * blocks), n / 32 * blocks, 1};
  return {make_buffer(args.b_scale, static_cast<uint32_t>(row_blocks) * blocks * 4), n / 32 * 4, row_blocks * 4};
}

struct Operand {
  i32x4 low, high;
  int scale;
  MORI_DEVICE i32x8 codes() const { return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7); }
};

template <int kTokenTiles>
struct Batch {
  Operand weight[kFlight], tokens[kFlight][kTokenTiles];
};

template <int kTokenTiles, bool kPacked>
__global__ void __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads))) skinny(const GemmArgs args) {
#if MORI_HAS_GFX950
  __shared__ float partial[kWaves][kTokenTiles][4][kWave];
  const int lane = lane_id(), wave = wave_id(), row = lane % 16, group = lane / 16;
  const int k = static_cast<int>(args.k), blocks = k / 32, steps = (k + kStep - 1) / kStep;
  const int n0 = block_id() * kRows;
  const int rows = static_cast<int>(args.n) - n0 < kRows ? static_cast<int>(args.n) - n0 : kRows;
  const Buffer weight = make_buffer(args.b + static_cast<int64_t>(n0) * k, static_cast<uint32_t>(rows) * k);
  const Buffer tokens = make_buffer(args.a, static_cast<uint32_t>(args.m) * k);
  const LaneScales weight_scale = weight_scales(args, n0 + row, kPacked);
  LaneScales token_scale[kTokenTiles];
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) token_scale[t] = token_scales(args, t * kTokens + row, kPacked);

  const auto load = [&](Buffer from, const LaneScales& scale, int at_row, int step) __attribute__((always_inline)) {
    const int column = step * kStep + group * 16, at = at_row * k + column;
    return Operand{load_dwordx4(from, column < k ? at : kOutOfRange), load_dwordx4(from, column + 64 < k ? at + 64 : kOutOfRange),
                   scale.load(step * 4 + group, blocks)};
  };
  const auto load_batch = [&](int first) __attribute__((always_inline)) {
    Batch<kTokenTiles> batch;
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int step = first + i * kWaves;
      batch.weight[i] = load(weight, weight_scale, row, step);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) batch.tokens[i][t] = load(tokens, token_scale[t], t * kTokens + row, step);
    }
    return batch;
  };

  f32x4 sum[kTokenTiles] = {};
  Batch<kTokenTiles> batch = load_batch(wave);
  for (int first = wave; first < steps; first += kFlight * kWaves) {
    const Batch<kTokenTiles> next = load_batch(first + kFlight * kWaves);
#pragma unroll
    for (int i = 0; i < kFlight; ++i)
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
        sum[t] = mfma_scaled<0, 0>(batch.weight[i].codes(), batch.tokens[i][t].codes(), sum[t], batch.weight[i].scale, batch.tokens[i][t].scale);
    batch = next;
  }

#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
    for (int q = 0; q < 4; ++q) partial[wave][t][q][lane] = sum[t][q];
  read_done_barrier();
  for (int i = thread_id(); i < kTokenTiles * kTokens * kRows; i += kThreads) {
    const int n = i % kRows, t = i / kRows / kTokens, m = i / kRows % kTokens;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWaves; ++w) total += partial[w][t][n % 4][n / 4 * 16 + m];
    store_element(args, t * kTokens + m, n0 + n, total);
  }
#endif
}

template <int kTokenTiles>
hipError_t launch(const GemmArgs& args, bool packed, hipStream_t stream) {
  const unsigned grid = static_cast<unsigned>((args.n + kRows - 1) / kRows);
  if (packed) {
    skinny<kTokenTiles, true><<<grid, kThreads, 0, stream>>>(args);
  } else {
    skinny<kTokenTiles, false><<<grid, kThreads, 0, stream>>>(args);
  }
  return hipGetLastError();
}

bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

// 32-bit offsets: within 32 rows of the operands and within the scales.
bool skinny_fits(const GemmArgs& args) {
  constexpr int64_t kMost = INT64_C(1) << 30;
  return args.m <= kSkinnyTokens && aligned16(args.a) && aligned16(args.b) && 64 * args.k < kMost && (args.n / 32 + 2) * (args.k / 32) * 4 < kMost;
}

hipError_t launch_skinny(const GemmArgs& args, Scales scales, hipStream_t stream) {
  const bool packed = scales == Scales::packed;
  return args.m <= kTokens ? launch<1>(args, packed, stream) : launch<2>(args, packed, stream);
}

}  // namespace mori::mxfp8
