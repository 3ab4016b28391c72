// Kernel selection that can be read: one table per operator and backend, the first row whose `takes` holds is used.
// The launcher and mori_ops.route() ask the same table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace mori {

// The dimensions a table decides on, in the order that mori_ops/routes.py names for the operator.
using RouteDims = std::array<int64_t, 6>;

struct Route {
  const char* kernel;                   // short name of the kernel
  bool (*takes)(const RouteDims& dims); // whether it serves this shape
  const char* why;                      // reason, with the measurement (or the row of bench/results) behind a threshold
};

// The index of the first row that takes `dims`; the last row of a table takes everything.
template <size_t Rows>
constexpr size_t pick_route(const Route (&table)[Rows], const RouteDims& dims) {
  for (size_t i = 0; i + 1 < Rows; ++i)
    if (table[i].takes(dims)) return i;
  return Rows - 1;
}

// Makes a table readable from Python. `op` and `device` ("cpu", "cuda", "mps") must outlive the program.
struct RegisterRoutes {
  template <size_t Rows>
  RegisterRoutes(const char* op, const char* device, const Route (&table)[Rows]) { add(op, device, table, Rows); }
  static void add(const char* op, const char* device, const Route* table, size_t rows);
};

}  // namespace mori
