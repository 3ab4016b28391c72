// simdgroup_matrix: 8 x 8, two elements per lane. Which ones is the hardware's affair: two layouts are emulated.
#pragma once

#include "simdgroup.h"

namespace metal {
template <class T, int Rows, int Columns>
struct simdgroup_matrix;
}

namespace msl {

struct Position {
  int column, row;
};

// Per layout and lane, the positions of its two elements. kBlocks: 4 x 4 lanes hold the quarters of the matrix.
struct MatrixPositions {
  Position at[2][kSimdWidth][2];
  constexpr MatrixPositions() : at{} {
    for (int lane = 0; lane < int(kSimdWidth); lane++) {
      for (int e = 0; e < 2; e++) {
        at[int(MatrixLayout::kRows)][lane][e] = {lane % 4 * 2 + e, lane / 4};
        at[int(MatrixLayout::kBlocks)][lane][e] = {(lane / 4 & 2) * 2 + (lane & 1) * 2 + e, (lane / 4 & 4) + lane / 2 % 4};
      }
    }
  }
};
inline constexpr MatrixPositions kMatrixPositions;
inline Position matrix_position(unsigned lane, int element) {
  return kMatrixPositions.at[int(msl_runtime->behaviour.matrix_layout)][lane][element];
}

template <class T>
using Matrix = metal::simdgroup_matrix<T, 8, 8>;

// The 64 elements of a matrix whose lanes stand in `frames`, through member `which` of the frame.
template <class Frame, class T>
inline void gather(void** frames, Matrix<T>* Frame::* which, float (&values)[8][8]) {
  for (unsigned lane = 0; lane < kSimdWidth; lane++) {
    for (int e = 0; e < 2; e++) {
      const Position at = matrix_position(lane, e);
      values[at.row][at.column] = float((static_cast<Frame*>(frames[lane])->*which)->elements[e]);
    }
  }
}
template <class Frame, class T>
inline void scatter(void** frames, Matrix<T>* Frame::* which, const float (&values)[8][8]) {
  for (unsigned lane = 0; lane < kSimdWidth; lane++) {
    for (int e = 0; e < 2; e++) {
      const Position at = matrix_position(lane, e);
      (static_cast<Frame*>(frames[lane])->*which)->elements[e] = T(values[at.row][at.column]);
    }
  }
}

inline void whole_simdgroup(unsigned lanes, Site site) {
  if (lanes != kSimdWidth) msl_runtime->fail("matrix functions need all 32 lanes of a simdgroup", site.line);
}

template <class T, class Pointer>
struct MatrixMemory {
  Matrix<T>* matrix;
  Pointer memory;
  ulong stride;
  ulong2 origin;
  bool transpose;
  Site site;

  bool operator==(const MatrixMemory& other) const {
    return memory == other.memory && stride == other.stride && origin.x == other.origin.x && origin.y == other.origin.y &&
           transpose == other.transpose;
  }
  Pointer address(Position at) const {
    const ulong column = origin.x + (transpose ? at.row : at.column), row = origin.y + (transpose ? at.column : at.row);
    return memory + row * stride + column;
  }
};

template <class Memory>
inline const Memory& uniform(void** frames, unsigned lanes) {
  const Memory& first = *static_cast<Memory*>(frames[0]);
  whole_simdgroup(lanes, first.site);
  for (unsigned lane = 1; lane < lanes; lane++) {
    if (!(*static_cast<Memory*>(frames[lane]) == first))
      msl_runtime->fail("arguments differ between the lanes of a simdgroup", first.site.line);
  }
  return first;
}

template <class T, class Pointer>
inline void load_matrix(MatrixMemory<T, Pointer> frame) {
  using Frame = MatrixMemory<T, Pointer>;
  collective(frame.site, frame, [](void** frames, unsigned lanes) MSL_UNCHECKED {
    const Frame& common = uniform<Frame>(frames, lanes);
    for (unsigned lane = 0; lane < lanes; lane++) {
      auto& elements = static_cast<Frame*>(frames[lane])->matrix->elements;
      for (int e = 0; e < 2; e++) elements[e] = load_shared(common.address(matrix_position(lane, e)));
    }
  });
}
template <class T, class Pointer>
inline void store_matrix(MatrixMemory<T, Pointer> frame) {
  using Frame = MatrixMemory<T, Pointer>;
  collective(frame.site, frame, [](void** frames, unsigned lanes) MSL_UNCHECKED {
    const Frame& common = uniform<Frame>(frames, lanes);
    for (unsigned lane = 0; lane < lanes; lane++) {
      auto& elements = static_cast<Frame*>(frames[lane])->matrix->elements;
      for (int e = 0; e < 2; e++) store_shared(common.address(matrix_position(lane, e)), T(elements[e]));
    }
  });
}

template <class D, class A, class B, class C>
struct MatrixProduct {
  Matrix<D>* d;
  Matrix<A>* a;
  Matrix<B>* b;
  Matrix<C>* c;  // null: zero
  Site site;
};

template <class D, class A, class B, class C>
inline void multiply(MatrixProduct<D, A, B, C> frame) {
  using Frame = MatrixProduct<D, A, B, C>;
  collective(frame.site, frame, [](void** frames, unsigned lanes) MSL_UNCHECKED {
    const Frame& first = *static_cast<Frame*>(frames[0]);
    whole_simdgroup(lanes, first.site);
    float a[8][8], b[8][8], sum[8][8] = {};
    gather(frames, &Frame::a, a);
    gather(frames, &Frame::b, b);
    if (first.c) gather(frames, &Frame::c, sum);
    const bool forward = msl_runtime->behaviour.product_order == ProductOrder::kForward;
    for (int i = 0; i < 8; i++)
      for (int step = 0; step < 8; step++) {
        const int k = forward ? step : 7 - step;
        for (int j = 0; j < 8; j++) sum[i][j] = __builtin_fmaf(a[i][k], b[k][j], sum[i][j]);
      }
    scatter(frames, &Frame::d, sum);
  });
}

}  // namespace msl

namespace metal {

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8 && msl::is_float<T>, "simdgroup_matrix: 8 x 8 of half, bfloat or float");
  vec<T, 2> elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (int e = 0; e < 2; e++) {
      const msl::Position at = msl::matrix_position(msl_runtime->lane->index_in_simdgroup, e);
      elements[e] = at.row == at.column ? diagonal : T(0);
    }
  }
  thread vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Rows = 8, int Columns = 8>
inline simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> matrix;
  matrix.elements = vec<T, 2>(value);
  return matrix;
}

#define MSL_MATRIX_MEMORY(space)                                                                                                   \
  template <class T>                                                                                                               \
  inline void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& matrix, const space T* source, ulong elements_per_row = 8,           \
                             ulong2 origin = ulong2(0), bool transpose = false, msl::Site site = msl::here("simdgroup_load")) {    \
    msl::load_matrix(msl::MatrixMemory<T, const space T*>{&matrix, source, elements_per_row, origin, transpose, site});            \
  }                                                                                                                                \
  template <class T>                                                                                                               \
  inline void simdgroup_store(thread simdgroup_matrix<T, 8, 8> matrix, space T* target, ulong elements_per_row = 8,                 \
                              ulong2 origin = ulong2(0), bool transpose = false, msl::Site site = msl::here("simdgroup_store")) {  \
    msl::store_matrix(msl::MatrixMemory<T, space T*>{&matrix, target, elements_per_row, origin, transpose, site});                 \
  }
MSL_MATRIX_MEMORY(device)
#ifndef MSL_CHECKED
MSL_MATRIX_MEMORY(threadgroup)
#endif
#undef MSL_MATRIX_MEMORY

template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, thread simdgroup_matrix<A, 8, 8>& a,
                                          thread simdgroup_matrix<B, 8, 8>& b, thread simdgroup_matrix<C, 8, 8>& c,
                                          msl::Site site = msl::here("simdgroup_multiply_accumulate")) {
  msl::multiply(msl::MatrixProduct<D, A, B, C>{&d, &a, &b, &c, site});
}
template <class D, class A, class B>
inline void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, thread simdgroup_matrix<A, 8, 8>& a,
                               thread simdgroup_matrix<B, 8, 8>& b, msl::Site site = msl::here("simdgroup_multiply")) {
  msl::multiply(msl::MatrixProduct<D, A, B, D>{&d, &a, &b, nullptr, site});
}

}  // namespace metal
