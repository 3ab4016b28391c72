// Neighbouring values of any type, moved by the widest accesses of a buffer.
#pragma once

#include "../common/gfx950.h"

namespace mori::gemm_ar {

using namespace gfx950;

// W neighbouring values: 1, or 8 where everything is aligned.
template <class T, int W>
struct alignas(W * sizeof(T) > 16 ? 16 : W * sizeof(T)) Pack {
  T value[W];
};

struct Halves {
  i32x4 low, high;
};

// `at` in values. Outside of the buffer: zeros.
template <int W, class T>
MORI_DEVICE Pack<T, W> load(Buffer from, int at) {
  constexpr int kBytes = W * sizeof(T);
  at *= static_cast<int>(sizeof(T));
  if constexpr (kBytes == 32) {
    return __builtin_bit_cast(Pack<T, W>, (Halves{load_dwordx4(from, at), load_dwordx4(from, at + 16)}));
  } else if constexpr (kBytes == 16) {
    return __builtin_bit_cast(Pack<T, W>, load_dwordx4(from, at));
  } else if constexpr (kBytes == 8) {
    return __builtin_bit_cast(Pack<T, W>, load_dwordx2(from, at));
  } else if constexpr (kBytes == 4) {
    return __builtin_bit_cast(Pack<T, W>, load_dword(from, at));
  } else if constexpr (kBytes == 2) {
    return __builtin_bit_cast(Pack<T, W>, static_cast<short>(load_short(from, at)));
  } else {
    return {static_cast<T>(load_byte(from, at))};
  }
}

// Outside of the buffer: nothing.
template <int W, class T>
MORI_DEVICE void store(const Pack<T, W>& pack, Buffer to, int at) {
  constexpr int kBytes = W * sizeof(T);
  at *= static_cast<int>(sizeof(T));
  if constexpr (kBytes == 32) {
    const auto halves = __builtin_bit_cast(Halves, pack);
    store_dwordx4(halves.low, to, at);
    store_dwordx4(halves.high, to, at + 16);
  } else if constexpr (kBytes == 16) {
    store_dwordx4(__builtin_bit_cast(i32x4, pack), to, at);
  } else if constexpr (kBytes == 8) {
    store_dwordx2(__builtin_bit_cast(i32x2, pack), to, at);
  } else if constexpr (kBytes == 4) {
    store_dword(__builtin_bit_cast(int, pack), to, at);
  } else if constexpr (kBytes == 2) {
    store_short(__builtin_bit_cast(short, pack), to, at);
  } else {
    store_byte(static_cast<char>(pack.value[0]), to, at);
  }
}

}  // namespace mori::gemm_ar
