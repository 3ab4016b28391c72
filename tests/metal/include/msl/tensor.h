// tensor views of memory, execution scopes and cooperative tensors of Metal 4: rank 2, as matmul2d takes them.
#pragma once

#include "matrix.h"

namespace metal {

constexpr size_t dynamic_extent = ~size_t(0);

template <size_t Simdgroups>
struct execution_simdgroups {
  static constexpr size_t simdgroups = Simdgroups;
};
using execution_simdgroup = execution_simdgroups<1>;

template <class Index, size_t Columns, size_t Rows>
struct extents {
  int columns = Columns == dynamic_extent ? 0 : int(Columns), rows = Rows == dynamic_extent ? 0 : int(Rows);
  constexpr extents() = default;
  constexpr extents(Index columns_, Index rows_) : columns(columns_), rows(rows_) {}
};
template <class Index, size_t Rank>
using dextents = typename msl::enable_if<Rank == 2, extents<Index, dynamic_extent, dynamic_extent>>::type;

struct tensor_inline {};

// T carries its address space. Strides are in elements; the first extent is contiguous unless they say otherwise.
template <class T, class Extents, class Kind = tensor_inline>
struct tensor {
  static_assert(msl::is_same<Kind, tensor_inline>, "torch.mps can bind no tensor: build tensor_inline from a pointer");
#ifndef MSL_CHECKED
  static_assert(!msl::is_same<T, typename msl::remove_address_space<T>::type>, "tensor<T>: T lacks its address space");
#endif
  using element_type = msl::value_type<T>;
  T* memory;
  int columns, rows;
  long column_stride, row_stride;

  tensor(T* memory_, Extents e) : tensor(memory_, e, array<int, 2>{{1, e.columns}}) {}
  tensor(T* memory_, Extents e, array<int, 2> strides)
      : memory(memory_), columns(e.columns), rows(e.rows), column_stride(strides.elements[0]), row_stride(strides.elements[1]) {}

  template <size_t Columns, size_t Rows>
  tensor<T, extents<int, Columns, Rows>> slice(int column, int row) const {
    tensor<T, extents<int, Columns, Rows>> part(memory + row * row_stride + column * column_stride, {});
    part.columns = Columns == dynamic_extent ? columns - column : int(Columns);
    part.rows = Rows == dynamic_extent ? rows - row : int(Rows);
    part.column_stride = column_stride;
    part.row_stride = row_stride;
    if (column < 0 || row < 0 || column + part.columns > columns || row + part.rows > rows)
      msl_runtime->fail("tensor slice outside its tensor", 0);
    return part;
  }
  auto slice(int column, int row) const { return slice<dynamic_extent, dynamic_extent>(column, row); }

  T* address(int column, int row) const {
    if (column < 0 || row < 0 || column >= columns || row >= rows) msl_runtime->fail("tensor element outside its extents", 0);
    return memory + row * row_stride + column * column_stride;
  }
};

enum class CooperativeRole { left, right, destination };

// Elements of a Columns x Rows matrix spread over the threads of a scope. Nothing but get_multidimensional_index tells which:
// the emulator has several layouts, one with slots that hold no element. `RunsAlongRows`: the axis that kBlocks keeps in runs.
// `Operands`: a type that stands for the element types of the product that it was made for.
template <class T, int Columns, int Rows, int Threads, CooperativeRole Role, bool RunsAlongRows, class Operands>
struct cooperative_tensor {
  using element_type = T;
  static constexpr int kElements = Columns * Rows, kPerThread = (kElements + Threads - 1) / Threads, kDead = 3;
  T slots[kPerThread + kDead];

  static int thread_index() {
    const msl::Lane& lane = *msl_runtime->lane;
    return Threads == int(msl::kSimdWidth) ? lane.index_in_simdgroup : lane.index_in_threadgroup;
  }
  static msl::Position from_index(int index) { return {index % Columns, index / Columns}; }
  static constexpr msl::Position kNone{-1, -1};

  // Runs of 4 elements, 4 lanes side by side, 8 lanes across; then further blocks across, then the next 16 along.
  static msl::Position blocks(int thread_id, int slot) {
    constexpr int along_extent = RunsAlongRows ? Rows : Columns, across_extent = RunsAlongRows ? Columns : Rows;
    if constexpr (Threads != int(msl::kSimdWidth) || along_extent % 16 != 0 || across_extent % 8 != 0) {
      return runs(thread_id, slot);
    } else {
      const int run = slot / 4, blocks_across = across_extent / 8;
      const int along = thread_id % 4 * 4 + slot % 4 + run / blocks_across * 16, across = thread_id / 4 + run % blocks_across * 8;
      return RunsAlongRows ? msl::Position{across, along} : msl::Position{along, across};
    }
  }
  static msl::Position runs(int thread_id, int slot) {
    const int index = thread_id * kPerThread + slot;
    return index < kElements ? from_index(index) : kNone;
  }
  static msl::Position position(int thread_id, int slot) {
    const bool dead_slots = msl_runtime->behaviour.cooperative_layout == msl::CooperativeLayout::kDeadSlots;
    if (slot < 0 || slot >= kPerThread + (dead_slots ? kDead : 0)) return kNone;
    int index = 0;
    switch (msl_runtime->behaviour.cooperative_layout) {
      case msl::CooperativeLayout::kBlocks:
        return blocks(thread_id, slot);
      case msl::CooperativeLayout::kRuns:
        return runs(thread_id, slot);
      case msl::CooperativeLayout::kStrided:
        index = slot * Threads + thread_id;
        break;
      case msl::CooperativeLayout::kDeadSlots:  // two in front, one in the middle; threads in reverse
        if (slot < 2 || slot == 2 + kPerThread / 2) return kNone;
        index = (slot - 2 - (slot > 2 + kPerThread / 2)) * Threads + (Threads - 1 - thread_id);
        break;
      case msl::CooperativeLayout::kTransposed: {  // column-major, the slots in another order for each role
        constexpr int step = 7;
        index = (kPerThread % step ? (slot * step + int(Role) * 3) % kPerThread : slot) * Threads + (thread_id ^ 5);
        return index < kElements ? msl::Position{index / Rows, index % Rows} : kNone;
      }
    }
    return index < kElements ? from_index(index) : kNone;
  }

  static constexpr int get_rank() { return 2; }
  ushort get_capacity() const {
    return ushort(kPerThread + (msl_runtime->behaviour.cooperative_layout == msl::CooperativeLayout::kDeadSlots ? kDead : 0));
  }
  bool is_valid_element(ushort slot) const { return position(thread_index(), slot).row >= 0; }
  array<int, 2> get_multidimensional_index(ushort slot) const {
    const msl::Position at = position(thread_index(), slot);
    if (at.row < 0) msl_runtime->fail("get_multidimensional_index of a slot that holds no element", 0);
    return {{at.column, at.row}};
  }
  thread T& operator[](ushort slot) {
    if (slot >= get_capacity()) msl_runtime->fail("cooperative tensor: slot beyond its capacity", 0);
    return slots[slot];
  }
  const thread T& operator[](ushort slot) const { return const_cast<cooperative_tensor&>(*this)[slot]; }

  template <class View>
  void load(const thread View& view) {
    for (ushort i = 0; i < get_capacity(); i++) {
      const msl::Position at = position(thread_index(), i);
      if (at.row >= 0) slots[i] = T(*view.address(at.column, at.row));
    }
  }
  template <class View>
  void store(const thread View& view) const {
    for (ushort i = 0; i < get_capacity(); i++) {
      const msl::Position at = position(thread_index(), i);
      if (at.row >= 0) *view.address(at.column, at.row) = typename View::element_type(slots[i]);
    }
  }
};

}  // namespace metal
