// Where pipeline_gfx950.h gets its e8m0 scales: one struct per layout of mxfp8.h, with the same interface.
//
//   start()                                  before the first tile is requested: what the first steps need
//   load_next<kMain>(k, steps)               first in step k: words of the next one
//   copy_chunk()                             once per step of the main loop, after a barrier: a chunk that later steps need
//   read_rows<half>(), read_columns<half>()  LDS reads of this step's scales; read_next_columns() of the next step's first half
//   a_operand<i>(half), select<i>            operand of the MFMAs of rows 16 i .. of a half, and which byte of it
//   b_operand(half)                          operand of its columns, byte 0
//   advance()                                after a step
// Lane l of a wave holds the scales of row (or column) l % 16 and of K block l / 16 of a step.
#pragma once

#include "../common/gfx950.h"
#include "mxfp8_gfx950.h"

namespace mori::mxfp8 {

// Packed: a dword holds the scales of the four MFMAs of a 64-row half, and is the operand of all four. Loaded one step ahead;
// since loads and copies retire in order, on the narrow tile this also waits for copies that have a step to go.
template <int kColumnHalves>
struct PackedScales {
  static constexpr int kLdsBytes = 0;

  struct Words {
    int rows[2], columns[kColumnHalves];
  };

  gfx950::Buffer a, b;
  int at_a, at_b, stride_a, stride_b;  // of the next words to load
  Words words, next;                   // of this step and the next

  MORI_DEVICE PackedScales(const GemmArgs& args, gfx950::Lds, int64_t m0, int64_t n0) {
    const int padded = static_cast<int>((args.m + 63) / 64 * 64), row_blocks = static_cast<int>((args.n + 31) / 32);
    const int blocks = static_cast<int>(args.k / 32), lane = gfx950::lane_id(), wave = gfx950::wave_id();
    a = gfx950::make_buffer(args.a_scale, static_cast<uint32_t>(padded) * blocks);
    b = gfx950::make_buffer(args.b_scale, static_cast<uint32_t>(row_blocks) * blocks * 4);
    at_a = lane / 16 * padded + (static_cast<int>(m0) / 64 + wave / 4) * 64 + lane % 16 * 4;
    at_b = (lane / 16 * row_blocks + static_cast<int>(n0) / 32 + wave % 4) * 4;
    stride_a = 4 * padded;
    stride_b = 16 * row_blocks;
  }

  MORI_DEVICE void load() {
#pragma unroll
    for (int half = 0; half < 2; ++half) next.rows[half] = gfx950::load_dword(a, at_a + half * 128);
#pragma unroll
    for (int half = 0; half < kColumnHalves; ++half) next.columns[half] = gfx950::load_dword(b, at_b + half * 16);
    at_a += stride_a;
    at_b += stride_b;
  }

  MORI_DEVICE void start() {
    load();
    advance();
  }
  template <bool kMain>
  MORI_DEVICE void load_next(int k, int steps) {
    if (kMain || k + 1 < steps) load();
    gfx950::pin_memory_order();
  }
  MORI_DEVICE void copy_chunk() {}
  template <int kHalf>
  MORI_DEVICE void read_rows() {}
  template <int kHalf>
  MORI_DEVICE void read_columns() {}
  MORI_DEVICE void read_next_columns() {}
  template <int kIndex>
  MORI_DEVICE int a_operand(int half) const { return words.rows[half]; }
  template <int kIndex>
  static constexpr int select = kIndex;
  MORI_DEVICE int b_operand(int half) const { return words.columns[half]; }

  MORI_DEVICE void advance() {
    if constexpr (kColumnHalves == 1) gfx950::wait_vector<6>();  // the step's tile copies; on the wide tile their wait came later
    words = next;
  }
};

// Raw: chunks of four steps (16 bytes of a row) through two LDS slots, chunk c + 1 requested in step 4 c: all waves have then read
// chunk c - 1, whose slot it takes, and the wait of that step covers it. In the LDS 16 rows are a group: 2 slots x 4 steps x 16
// rows x 4 bytes, so that a step's bytes lie kStepBytes after the one before, modulo 8 steps. 16 groups of A, then 8 of B, whose
// one row of blocks stands there sixteen times. Needs K % 128 == 0 and scales aligned to dwords.
template <int kColumnHalves>
struct RawScales {
  static constexpr int kStepBytes = 64, kSlotBytes = 4 * kStepBytes, kGroupBytes = 2 * kSlotBytes;
  static constexpr int kColumnBytes = 16 * kGroupBytes, kLdsBytes = 24 * kGroupBytes;

  gfx950::Buffer a, b;
  gfx950::Lds copy_to;                       // this wave's group
  int from_rows, from_rows_1, from_columns;  // the chunk's offset is in them, inside the range check
  gfx950::Lds read_a, read_b;
  int at = 0;  // this step's bytes in a group
  int rows[4], columns[kColumnHalves];

  MORI_DEVICE RawScales(const GemmArgs& args, gfx950::Lds lds, int64_t m0, int64_t n0) {
    const int blocks = static_cast<int>(args.k / 32), lane = gfx950::lane_id(), wave = gfx950::wave_id();
    const int64_t rows_left = args.m - m0, columns_left = (args.n + 31) / 32 - n0 / 32;
    a = gfx950::make_buffer(static_cast<const uint8_t*>(args.a_scale) + m0 * blocks, static_cast<uint32_t>((rows_left < 256 ? rows_left : 256) * blocks));
    b = gfx950::make_buffer(static_cast<const uint8_t*>(args.b_scale) + n0 / 32 * blocks,
                            static_cast<uint32_t>((columns_left < 8 ? columns_left : 8) * blocks));
    copy_to = lds + wave * kGroupBytes;
    from_rows = (wave * 16 + lane % 16) * blocks + lane / 16 * 4;
    from_rows_1 = from_rows + 128 * blocks;
    from_columns = wave * blocks + lane / 16 * 4;
    const gfx950::Lds lane_at = lds + lane % 16 * 4 + lane / 16;
    read_a = lane_at + wave / 4 * 4 * kGroupBytes;
    read_b = lane_at + kColumnBytes + wave % 4 * kGroupBytes;
  }

  MORI_DEVICE void copy(int slot) {
    const gfx950::Lds to = copy_to + slot;
    gfx950::copy4_to_lds(a, to, from_rows);
    gfx950::copy4_to_lds(a, to + 8 * kGroupBytes, from_rows_1);
    gfx950::copy4_to_lds(b, to + kColumnBytes, from_columns);
    from_rows += 16;
    from_rows_1 += 16;
    from_columns += 16;
  }

  MORI_DEVICE void start() { copy(0); }
  template <bool kMain>
  MORI_DEVICE void load_next(int, int) {}
  // Five steps before the end the last chunk has been requested, inside the main loop; one past it may be, for nothing.
  MORI_DEVICE void copy_chunk() {
    if (at % kSlotBytes == 0) copy(at ^ kSlotBytes);
    gfx950::pin_memory_order();
  }
  template <int kHalf>
  MORI_DEVICE void read_rows() {
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = gfx950::lds_read<uint8_t>(read_a + at + (kHalf * 8 + i) * kGroupBytes);
  }
  template <int kHalf>
  MORI_DEVICE void read_columns() {
    columns[kHalf] = gfx950::lds_read<uint8_t>(read_b + at + kHalf * 4 * kGroupBytes);
  }
  MORI_DEVICE void read_next_columns() { columns[0] = gfx950::lds_read<uint8_t>(read_b + next()); }
  template <int kIndex>
  MORI_DEVICE int a_operand(int) const { return rows[kIndex]; }
  template <int kIndex>
  static constexpr int select = 0;
  MORI_DEVICE int b_operand(int half) const { return columns[half]; }

  MORI_DEVICE int next() const { return (at + kStepBytes) & (kGroupBytes - 1); }
  MORI_DEVICE void advance() { at = next(); }
};

}  // namespace mori::mxfp8
