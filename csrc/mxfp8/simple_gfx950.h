// C = A B^T with bf16 MFMA on operands decoded exactly from e4m3, scales applied outside: every shape, alignment, scale kind and
// scale value. The only GEMM on gfx942, whose fp8 MFMA has another number format; elsewhere the route of last resort.
//
// The product's place is the caller's: the kernels are in mxfp8_simple_gfx950.hip and in gemm_ar.
//
// A workgroup of four waves computes 64 x 64 outputs, a wave 16 x 64. Per block of 32 along K: codes decoded into the LDS -> two
// 16 x 16 x 16 MFMAs per output tile -> the block's sum of exact products, times both scales, added in fp32.
#pragma once

#include "../common/gfx950.h"
#include "../common/mx.h"
#include "epilogue_gfx950.h"
#include "mxfp8_gfx950.h"

namespace mori::mxfp8::simple {

using namespace gfx950;

constexpr int kBlock = 32, kTile = 64, kThreads = 256, kPer = 8;
constexpr int kPitch = kBlock + 4;  // 72 bytes: 8-byte reads of 16 rows spread over the banks
constexpr int kColumnTiles = kTile / 16;

// e8m0 bytes in the layouts of mxfp8.h.
struct ByteScales {
  const uint8_t* a;
  const uint8_t* b;
  int64_t blocks, a_groups, row_blocks;
  bool packed;

  ByteScales(const GemmArgs& args, bool packed)
      : a(static_cast<const uint8_t*>(args.a_scale)), b(static_cast<const uint8_t*>(args.b_scale)), blocks(args.k / kBlock),
        a_groups((args.m + 63) / 64), row_blocks((args.n + 31) / 32), packed(packed) {}

  MORI_DEVICE int a_at(int64_t m, int64_t block) const {
    return a[packed ? (block * a_groups + m / 64) * 64 + m % 16 * 4 + m % 64 / 16 : m * blocks + block];
  }
  MORI_DEVICE int b_at(int64_t n, int64_t block) const { return b[packed ? (block * row_blocks + n / 32) * 4 : n / 32 * blocks + block]; }
  // sum * 2^(a + b - 254): one rounding, whatever the exponents.
  static MORI_DEVICE float scaled(float sum, int a, int b) {
    return a == mx::kNanScale || b == mx::kNanScale ? mx::float_of(mx::kNanBits) : __builtin_ldexpf(sum, a + b - 254);
  }
};

// quant="blockscale" and "ptpc": fp32, one per `k_blocks` blocks along K and, of B, per `b_rows` rows.
struct FloatScales {
  const float* a;
  const float* b;
  int64_t columns, k_blocks, b_rows;

  FloatScales(const GemmArgs& args, bool ptpc)
      : a(static_cast<const float*>(args.a_scale)), b(static_cast<const float*>(args.b_scale)), columns(ptpc ? 1 : (args.k + 127) / 128),
        k_blocks(ptpc ? INT64_MAX : 128 / kBlock), b_rows(ptpc ? 1 : 128) {}

  MORI_DEVICE float a_at(int64_t m, int64_t block) const { return a[m * columns + block / k_blocks]; }
  MORI_DEVICE float b_at(int64_t n, int64_t block) const { return b[n / b_rows * columns + block / k_blocks]; }
  static MORI_DEVICE float scaled(float sum, float a, float b) { return sum * a * b; }
};

using Tile32 = short[kTile][kPitch];  // bf16 bits

// A thread decodes eight codes of a row.
MORI_DEVICE void load_tile(Tile32& tile, const uint8_t* codes, int64_t row0, int64_t rows, int64_t k, int64_t k0) {
  const int row = thread_id() / (kBlock / kPer), column = thread_id() % (kBlock / kPer) * kPer;
  const uint8_t* from = codes + (row0 + row) * k + k0 + column;
  const bool inside = row0 + row < rows;
#pragma unroll
  for (int i = 0; i < kPer; ++i) tile[row][column + i] = inside ? static_cast<short>(mx::bits_of(mx::decode_e4m3(from[i])) >> 16) : short{0};
}

// 64 x 64 outputs from (m0, n0), for the whole workgroup.
template <class Scales>
MORI_DEVICE void multiply(const GemmArgs& args, const Scales& scales, int64_t m0, int64_t n0) {
  using Operand = short __attribute__((ext_vector_type(4)));
  __shared__ Tile32 a, b;
  const int lane = lane_id(), row = wave_id() * 16 + lane % 16, group = lane / 16;
  const int64_t m = m0 + row < args.m ? m0 + row : args.m - 1;
  f32x4 c[kColumnTiles] = {};
  for (int64_t block = 0; block < args.k / kBlock; ++block) {
    read_done_barrier();
    load_tile(a, args.a, m0, args.m, args.k, block * kBlock);
    load_tile(b, args.b, n0, args.n, args.k, block * kBlock);
    read_done_barrier();
    const auto a_scale = scales.a_at(m, block);
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      f32x4 sum = {};
#pragma unroll
      for (int half = 0; half < 2; ++half)  // operands swapped: a lane gets four neighbours of a row of C
        sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(*reinterpret_cast<const Operand*>(&b[j * 16 + lane % 16][half * 16 + group * 4]),
                                                        *reinterpret_cast<const Operand*>(&a[row][half * 16 + group * 4]), sum, 0, 0, 0);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int64_t n = n0 + j * 16 + group * 4 + q;
        c[j][q] += Scales::scaled(sum[q], a_scale, scales.b_at(n < args.n ? n : args.n - 1, block));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
    for (int q = 0; q < 4; ++q) store_element(args, m0 + row, n0 + j * 16 + group * 4 + q, c[j][q]);
}

// f with the scales as a kernel takes them.
template <class F>
hipError_t with_scales(const GemmArgs& args, Scales scales, F f) {
  if (scales == Scales::packed || scales == Scales::raw) return f(ByteScales(args, scales == Scales::packed));
  return f(FloatScales(args, scales == Scales::ptpc));
}

}  // namespace mori::mxfp8::simple
