// What a kernel says that has waited for another device in vain.
#pragma once

#include <cstdint>

namespace mori::sm90 {

enum class Signal : uint32_t { arrived = 0, reduced = 1, delivered = 3 };  // SIGNALS in mori_ops/symmetric.py, where 2 is of AMD's kernels

// In pinned host memory: rank + 1 of the missing one (0: all is well), what did not come from it, and in which call.
struct Failure {
  uint32_t rank_plus_one, signal, epoch;
};

}  // namespace mori::sm90
