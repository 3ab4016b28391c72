// The pipeline of C = A B^T for MXFP8 operands on gfx950, between a source of scales and an epilogue: scaled MFMA (e4m3 x e4m3, e8m0
// scales as operands) fed from the LDS.
//
//   tile      256 x 256 or 256 x 128, K in steps of 128; 8 waves as 2 x 4, each with two halves of 64 rows x one or two of 32
//             columns: 4 x 2 MFMAs of 16 x 16 x 128 per phase, 64 or 128 accumulators
//   LDS       2 stages (wide) or 3 (narrow) of half tiles, 128 rows x 128 bytes, filled by DMA. The 16-byte chunks of a row are
//             permuted by the DMA's per-lane source offsets, so that reads are free of bank conflicts (chunk_swizzle).
//   phase     LDS reads and DMA of the next tiles | read_done_barrier | 8 MFMAs | barrier. Waves 4-7 run one barrier behind: on
//             each SIMD one wave feeds the matrix core while the other one reads. A half tile is refilled in the phase after the
//             one that read it; all DMA is covered by one counted wait per step.
//   tail      the last steps drain every copy before the barrier that precedes their first read of it.
//   scales    packed: global loads one step ahead; raw: DMA to LDS in chunks of four steps (scales_gfx950.h).
//   edges     rows outside A and B and K outside a row are masked to zero by the buffer descriptors.
// Never run on hardware. Ranked by the cycle model of tests/gfx950/: b0 read with a0 in one phase (12, 4, 8, 0 reads) took 6 to 8%
// more cycles. A second set of row fragments, read a phase ahead, would need two waits per step or copies landing in two phases.
#pragma once

#include "../common/gfx950.h"
#include "mxfp8_gfx950.h"

namespace mori::mxfp8::tiled {

using namespace gfx950;

constexpr int kThreads = 512;
constexpr int kRows = 256;  // of a tile
constexpr int kStep = 128;  // K of a step: bytes of a row in LDS
constexpr int kHalf = 128;  // rows of a half tile
constexpr int kHalfBytes = kHalf * kStep;
constexpr int kChunk = 16;                            // bytes a lane copies or reads at a time
constexpr int kCopyRows = kThreads * kChunk / kStep;  // rows that one DMA of all waves fills
constexpr int kCopies = kHalf / kCopyRows;            // DMAs per half tile
static_assert(kCopies == 2);

template <int kColumnHalves>
struct Layout {
  static constexpr int kColumns = kColumnHalves * kHalf;
  static constexpr int kStages = kColumnHalves == 2 ? 2 : 3;
  // Half tiles of a stage: a0, b0, [b1,] a1, then the scales behind all stages.
  static constexpr int kB0 = kHalfBytes, kB1 = 2 * kHalfBytes, kA1 = (1 + kColumnHalves) * kHalfBytes;
  static constexpr int kStageBytes = (2 + kColumnHalves) * kHalfBytes;
  static constexpr int kScales = kStages * kStageBytes;
  // Copies that may be in flight when tile k + 1 must be complete: of the last tile requested all but a1, and the one before.
  static constexpr int kInFlight = (1 + kColumnHalves + (kStages - 2) * (2 + kColumnHalves)) * kCopies;
};

// Chunk c of row r lies at chunk c ^ chunk_swizzle(r). Without conflicts whether the LDS serves 8 or 16 lanes at a time (32 or 64
// banks), and whether those are consecutive lanes or CDNA's groups (0-3, 12-15, 20-27, ...).
MORI_DEVICE int chunk_swizzle(int row) { return (row & 7) ^ (row & 8 ? 5 : 0); }

struct Fragment {
  i32x4 low, high;  // K = 16 g .. and 64 + 16 g ..
  MORI_DEVICE i32x8 operand() const { return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7); }
};

template <int kColumnHalves, template <int> class ScaleSource, class Epilogue>
struct Gemm {
  using L = Layout<kColumnHalves>;
  using Scale = ScaleSource<kColumnHalves>;

  Buffer a, b;
  Lds lds;
  Lds copy_to;       // stage 0, this wave's share
  int copy_from[4];  // offsets of this lane's four chunks: rows 0, 64, 128, 192 of the tile
  int past_end;      // kOutOfRange where this lane's chunk lies past K in the last step
  int read_a, read_b;
  int stage = 0, previous_stage = (L::kStages - 1) * L::kStageBytes;  // LDS offsets
  int steps;
  Scale scale;
  Fragment a_rows[4], b_columns[kColumnHalves][2];
  f32x4 c[2][kColumnHalves][4][2] = {};

  MORI_DEVICE Gemm(const GemmArgs& args, Lds lds, int64_t m0, int64_t n0)
      : lds(lds), steps(static_cast<int>((args.k + kStep - 1) / kStep)), scale(args, lds + L::kScales, m0, n0) {
    const int k = static_cast<int>(args.k), thread = thread_id(), lane = lane_id(), wave = wave_id();
    a = rows_buffer(args.a, m0, args.m, k);
    b = rows_buffer(args.b, n0, args.n, k);
    copy_to = lds + wave * kWave * kChunk;
    const int row = thread / (kStep / kChunk), chunk = (thread % (kStep / kChunk)) ^ chunk_swizzle(row);
#pragma unroll
    for (int i = 0; i < 4; ++i) copy_from[i] = (row + i * kCopyRows) * k + chunk * kChunk;
    past_end = chunk * kChunk < k - (steps - 1) * kStep ? 0 : kOutOfRange;
    const int r = lane % 16, g = lane / 16, at = r * kStep + (g ^ chunk_swizzle(r)) * kChunk;
    read_a = wave / 4 * 64 * kStep + at;
    read_b = wave % 4 * 32 * kStep + at;
  }

  static MORI_DEVICE Buffer rows_buffer(const uint8_t* base, int64_t row, int64_t rows, int k) {
    const int64_t left = rows - row;
    return make_buffer(base + row * k, static_cast<uint32_t>((left < kRows ? left : kRows) * k));
  }

  // Rows kHalf * kWhich .. of A or B, K = 128 * step .., into the half tile at `to`.
  template <int kWhich>
  MORI_DEVICE void copy_half(Buffer from, int to, int step) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) copy16_to_lds(from, copy_to + to + i * kCopyRows * kStep, copy_from[kWhich * kCopies + i], step * kStep);
  }

  MORI_DEVICE void mask_copies(int mask) {
#pragma unroll
    for (int& offset : copy_from) offset |= mask;
  }

  template <int kCount, int kOffset>
  MORI_DEVICE void read(Fragment (&fragments)[kCount], int from) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      fragments[i].low = lds_read<i32x4>(lds + from + kOffset + i * 16 * kStep);
      fragments[i].high = lds_read<i32x4>(lds + (from ^ 4 * kChunk) + kOffset + i * 16 * kStep);
    }
  }

  // Both operands swapped, so that a lane gets four neighbours of one row of C.
  template <int kRows, int kColumns>
  MORI_DEVICE void multiply() {
    __builtin_amdgcn_s_setprio(1);
    unroll<4>([&](auto i) __attribute__((always_inline)) {
      unroll<2>([&](auto j) __attribute__((always_inline)) {
        f32x4& sum = c[kRows][kColumns][i][j];
        constexpr int kIndex = decltype(i)::value;
        sum = mfma_scaled<0, Scale::template select<kIndex>>(b_columns[kColumns][j].operand(), a_rows[i].operand(), sum, scale.b_operand(kColumns),
                                                             scale.template a_operand<kIndex>(kRows));
        keep_here(sum);
      });
    });
    __builtin_amdgcn_s_setprio(0);
    barrier();
  }

  MORI_DEVICE void advance() {
    const int by = stage == (L::kStages - 1) * L::kStageBytes ? -stage : L::kStageBytes;
    previous_stage = stage;
    stage += by;
    read_a += by;
    read_b += by;
  }

  // A step refills its own stage with tile k + kStages, each half in the phase after the one that read it. b0 is read a phase
  // ahead, which evens out the 16-byte reads: 8, 4, 8 and 4 per phase.
  template <bool kMain>
  MORI_DEVICE void wide_step(int k) {
    const int next = k + L::kStages;
    if (kMain && next == steps - 1) mask_copies(past_end);
    scale.template load_next<kMain>(k, steps);
    read<4, 0>(a_rows, read_a);
    scale.template read_rows<0>();
    if (kMain) copy_half<0>(b, stage + L::kB0, next);
    read_done_barrier();
    multiply<0, 0>();

    read<2, L::kB1>(b_columns[1], read_b);
    scale.template read_columns<1>();
    if (kMain) copy_half<0>(a, stage, next);
    read_done_barrier();
    multiply<0, 1>();

    read<4, L::kA1>(a_rows, read_a);
    scale.template read_rows<1>();
    if (kMain) copy_half<1>(b, stage + L::kB1, next);
    wait<kMain ? L::kInFlight : 0, 0>();
    barrier();  // tile k + 1 has landed for all
    multiply<1, 0>();

    advance();
    if (kMain) scale.copy_chunk();
    if (kMain || k + 1 < steps) {
      read<2, L::kB0>(b_columns[0], read_b);
      scale.read_next_columns();
    }
    if (kMain) copy_half<1>(a, previous_stage + L::kA1, next);
    read_done_barrier();
    multiply<1, 1>();
    scale.advance();
  }

  // The same in two phases; the refill of a1 is the next step's first.
  template <bool kMain>
  MORI_DEVICE void narrow_step(int k) {
    const int next = k + L::kStages;
    scale.template load_next<kMain>(k, steps);
    if (kMain) scale.copy_chunk();
    read<2, L::kB0>(b_columns[0], read_b);
    read<4, 0>(a_rows, read_a);
    scale.template read_rows<0>();
    scale.template read_columns<0>();
    if (kMain || next == steps) copy_half<1>(a, previous_stage + L::kA1, next - 1);
    read_done_barrier();
    multiply<0, 0>();

    if (kMain && next == steps - 1) mask_copies(past_end);
    read<4, L::kA1>(a_rows, read_a);
    scale.template read_rows<1>();
    if (kMain) {
      copy_half<0>(b, stage + L::kB0, next);
      copy_half<0>(a, stage, next);
    }
    wait<kMain ? L::kInFlight : 0, 0>();
    barrier();  // tile k + 1 has landed for all
    multiply<1, 0>();
    advance();
    scale.advance();
  }

  template <bool kMain>
  MORI_DEVICE void step(int k) {
    if constexpr (kColumnHalves == 2) {
      wide_step<kMain>(k);
    } else {
      narrow_step<kMain>(k);
    }
  }

  // Fills the stages, with zeros past the last step; tile 0 has landed once every wave has passed the first barrier.
  MORI_DEVICE void fill() {
    scale.start();
    pin_memory_order();  // older than the tiles, so that their wait covers it
#pragma unroll
    for (int tile = 0; tile < L::kStages; ++tile) {
      mask_copies(tile < steps - 1 ? 0 : tile < steps ? past_end : kOutOfRange);
      copy_half<0>(b, tile * L::kStageBytes + L::kB0, tile);
      copy_half<0>(a, tile * L::kStageBytes, tile);
      if constexpr (kColumnHalves == 2) copy_half<1>(b, tile * L::kStageBytes + L::kB1, tile);
      if (kColumnHalves == 2 || tile < L::kStages - 1) copy_half<1>(a, tile * L::kStageBytes + L::kA1, tile);
    }
    wait_vector<kColumnHalves == 2 ? 4 * kCopies : L::kInFlight>();
    barrier();
    if constexpr (kColumnHalves == 2) {
      read<2, L::kB0>(b_columns[0], read_b);
      scale.template read_columns<0>();
      read_done_barrier();
    }
  }

  MORI_DEVICE void run(const Epilogue& epilogue) {
    fill();
    const bool behind = wave_id() >= 4;
    if (behind) barrier();
    int k = 0;
    for (; k < steps - L::kStages; ++k) step<true>(k);
    for (; k < steps; ++k) step<false>(k);
    if (!behind) barrier();
    store(epilogue);
  }

  MORI_DEVICE void store(const Epilogue& epilogue) {
    const int m = wave_id() / 4 * 64, n = wave_id() % 4 * 32;
    typename Epilogue::Bias bias[kColumnHalves];
#pragma unroll
    for (int columns = 0; columns < kColumnHalves; ++columns) bias[columns] = epilogue.bias(columns * kHalf + n);
    wait_vector<0>();
#pragma unroll
    for (int columns = 0; columns < kColumnHalves; ++columns)
#pragma unroll
      for (int rows = 0; rows < 2; ++rows)
#pragma unroll
        for (int i = 0; i < 4; ++i) epilogue.store(rows * kHalf + m + i * 16, columns * kHalf + n, c[rows][columns][i], bias[columns]);
  }
};

}  // namespace mori::mxfp8::tiled
