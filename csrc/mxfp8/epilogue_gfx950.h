// What the GEMMs on gfx950 do with their sums. An epilogue is a struct with `Bias bias(n)`, once per 32 columns of a wave, and
// `store(m, n, sums, bias)`, once per 16 rows x 32 columns: lane l holds columns 4 g .. 4 g + 3 of both halves of 16, of row
// l % 16, g = l / 16. Rows and columns count from the tile's corner.
#pragma once

#include "../common/gfx950.h"
#include "mxfp8_gfx950.h"

namespace mori::mxfp8 {

// Adds the bias, rounds once to the output dtype, writes C. Where rows of C are whole 16-byte pieces they are written as such,
// neighbouring lanes sharing a row (lanes that hold a column of C each cost the memory pipeline 16 rows per store).
struct StoreC {
  struct Bias {
    gfx950::f32x4 columns[2];
  };

  const GemmArgs& args;
  gfx950::Buffer c, bias_from;
  int pitch;  // bytes
  int columns_left;
  bool pieces;

  MORI_DEVICE StoreC(const GemmArgs& args, int64_t m0, int64_t n0, int rows, int columns) : args(args) {
    const int size = gfx950::bytes_of(args.out_type);
    const int64_t rows_left = args.m - m0, left = args.n - n0;
    pitch = static_cast<int>(args.n) * size;
    columns_left = static_cast<int>(left < columns ? left : columns);
    uint8_t* corner = static_cast<uint8_t*>(args.out) + (m0 * args.n + n0) * size;
    c = gfx950::make_buffer(corner, static_cast<uint32_t>((rows_left < rows ? rows_left : rows) * pitch - n0 * size));
    const int bias_size = gfx950::bytes_of(args.bias_type);
    bias_from = gfx950::make_buffer(static_cast<const uint8_t*>(args.bias) + n0 * bias_size, args.bias ? columns_left * bias_size : 0);
    pieces = pitch % 16 == 0 && reinterpret_cast<uintptr_t>(args.out) % 16 == 0;
  }

  // Zeros without a bias and right of C: out of the buffer's range.
  MORI_DEVICE Bias bias(int n) const {
    switch (args.bias_type) {
      case gfx950::Float::f32: return bias_of<int, float>(n, gfx950::load_dword);
      case gfx950::Float::bf16: return bias_of<short, __bf16>(n, gfx950::load_short);
      default: return bias_of<short, _Float16>(n, gfx950::load_short);
    }
  }

  MORI_DEVICE void store(int m, int n, const gfx950::f32x4 (&sums)[2], const Bias& bias) const {
    const gfx950::f32x4 v[2] = {sums[0] + bias.columns[0], sums[1] + bias.columns[1]};
    switch (args.out_type) {
      case gfx950::Float::f32: return store_words(m, n, v);
      case gfx950::Float::bf16: return store_halves<__bf16>(m, n, v);
      default: return store_halves<_Float16>(m, n, v);
    }
  }

 private:
  template <class Bits, class T, class Load>
  MORI_DEVICE Bias bias_of(int n, Load load) const {
    Bias values;
    const int first = n + gfx950::lane_id() / 16 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Bits bits = static_cast<Bits>(load(bias_from, (first + i / 4 * 16 + i % 4) * static_cast<int>(sizeof(T))));
      values.columns[i / 4][i % 4] = static_cast<float>(__builtin_bit_cast(T, bits));
    }
    return values;
  }

  MORI_DEVICE int offset(int m, int n, int size) const { return n < columns_left ? m * pitch + n * size : gfx950::kOutOfRange; }

  // Lane l gets the piece of lane 16 * (l % 4) + l / 4: row l / 4, piece l % 4.
  static MORI_DEVICE gfx950::i32x4 by_rows(gfx950::i32x4 piece, int source_group) {
    const int from = source_group * 16 + gfx950::lane_id() / 4;
    gfx950::i32x4 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = gfx950::read_lane(piece[i], from);
    return v;
  }

  MORI_DEVICE void store_words(int m, int n, const gfx950::f32x4 (&v)[2]) const {
    const int lane = gfx950::lane_id();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const gfx950::i32x4 bits = __builtin_bit_cast(gfx950::i32x4, v[j]);
      if (pieces) {
        gfx950::store_dwordx4(by_rows(bits, lane % 4), c, offset(m + lane / 4, n + j * 16 + lane % 4 * 4, 4));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) gfx950::store_dword(bits[i], c, offset(m + lane % 16, n + j * 16 + lane / 16 * 4 + i, 4));
      }
    }
  }

  template <class T>
  MORI_DEVICE void store_halves(int m, int n, const gfx950::f32x4 (&v)[2]) const {
    using Four = T __attribute__((ext_vector_type(4)));
    using Pair = int __attribute__((ext_vector_type(2)));
    const int lane = gfx950::lane_id();
    const Four t[2] = {__builtin_convertvector(v[0], Four), __builtin_convertvector(v[1], Four)};
    if (pieces) {
      // Groups 0 and 2 of lanes swap with 1 and 3: they then hold pieces 0, 2, 1, 3 of eight columns.
      const Pair left = __builtin_bit_cast(Pair, t[0]), right = __builtin_bit_cast(Pair, t[1]);
      int piece[4] = {left[0], left[1], right[0], right[1]};
      gfx950::swap_groups(piece[0], piece[2]);
      gfx950::swap_groups(piece[1], piece[3]);
      gfx950::store_dwordx4(by_rows({piece[0], piece[1], piece[2], piece[3]}, lane % 2 * 2 + lane / 2 % 2), c, offset(m + lane / 4, n + lane % 4 * 8, 2));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const T value = t[i / 4][i % 4];  // clang's bit_cast of a vector's element takes element 0
        gfx950::store_short(__builtin_bit_cast(short, value), c, offset(m + lane % 16, n + i / 4 * 16 + lane / 16 * 4 + i % 4, 2));
      }
    }
  }
};

// One element of C, for kernels that hold them one by one.
MORI_DEVICE void store_element(const GemmArgs& args, int64_t m, int64_t n, float value) {
  if (m >= args.m || n >= args.n) return;
  if (args.bias != nullptr) {
    switch (args.bias_type) {
      case gfx950::Float::f32: value += static_cast<const float*>(args.bias)[n]; break;
      case gfx950::Float::bf16: value += static_cast<float>(static_cast<const __bf16*>(args.bias)[n]); break;
      default: value += static_cast<float>(static_cast<const _Float16*>(args.bias)[n]);
    }
  }
  const int64_t at = m * args.n + n;
  switch (args.out_type) {
    case gfx950::Float::f32: static_cast<float*>(args.out)[at] = value; break;
    case gfx950::Float::bf16: static_cast<__bf16*>(args.out)[at] = static_cast<__bf16>(value); break;
    default: static_cast<_Float16*>(args.out)[at] = static_cast<_Float16>(value);
  }
}

}  // namespace mori::mxfp8
