// The inner loops of selected attention on the CPU, one set per instruction set (qsa_micro_avx2_cpu.cpp, qsa_micro_generic_cpu.cpp).
// A row is one query head of one token; a tile is up to kTileRows rows. All sums of a row run in an order that does not depend on
// the tile it sits in, so a row's bits do not depend on the call it is computed in.
#pragma once

#include "../common/check.h"
#include "../common/cpu_isa.h"

namespace mori::qsa {

constexpr int64_t kPanel = 16;    // cells of a K panel, dimensions of a V panel: two AVX2 vectors
constexpr int64_t kTileRows = 6;  // 6 x 16 accumulators take 12 of the 16 vector registers
constexpr int64_t kChunk = 128;   // cells per softmax step: the codes of one KV head, decoded V panel and scores stay in L2
constexpr int64_t kMaxGroups = 4; // scales of a cell and head: D 256 / 64

inline void prefetch(const char* address, int64_t bytes) {
#if defined(__GNUC__)
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(address + i, 0, 2);  // into L2
#endif
}

struct Micro {
  // n values of a float dtype to fp32, and back with one rounding.
  void (*load)(const void* source, ScalarType dtype, int64_t n, float* out);
  void (*store)(const float* source, int64_t n, ScalarType dtype, void* out);
  // The largest |x[i]|; unspecified if one is NaN. n is a multiple of 8.
  float (*largest)(const float* x, int64_t n);
  // The fp16 scales of a cell, `groups` of them (1, 2 or 4); out has room for kMaxGroups.
  void (*load_scales)(const void* source, int64_t groups, float* out);
  // kPanel cells of K, decoded and transposed: panel[d][cell]. scales[cell][kMaxGroups] are read for int8 only.
  void (*k_panel)(const char* const* cells, const float* scales, int64_t dim, float* panel);
  // Dimensions d0 .. d0 + kPanel of n cells of V, decoded: panel[cell][kPanel].
  void (*v_panel)(const char* const* cells, const float* scales, int64_t n, int64_t d0, float* panel);
  // s[row][0 .. kPanel) = q[row] . panel; q has row stride dim, s has row stride kChunk.
  void (*scores)(int64_t rows, const float* q, int64_t dim, const float* panel, float* s);
  // s[i] = exp((s[i] - max) * factor) over i < n; gives max and the sum.
  void (*softmax)(float* s, int64_t n, float factor, float* max, float* sum);
  // acc[row][0 .. kPanel) (+)= p[row][0 .. n) . panel; p has row stride kChunk, acc has row stride dim.
  void (*values)(int64_t rows, const float* p, int64_t n, const float* panel, float* acc, int64_t dim, bool add);
  // total[i] = total[i] * a + acc[i] * b
  void (*fold)(float* total, const float* acc, float a, float b, int64_t n);
  // row[i] = row[i] / denominator, times sigmoid(gate[i]) unless gate is null
  void (*finish)(float* row, float denominator, const float* gate, int64_t n);
};

const Micro& generic_micro(ScalarType kv_dtype);
#if MORI_X86
const Micro& avx2_micro(ScalarType kv_dtype);
#endif

inline const Micro& pick_micro(ScalarType kv_dtype) {
#if MORI_X86
  if (cpu_isa() == CpuIsa::avx2) return avx2_micro(kv_dtype);
#endif
  return generic_micro(kv_dtype);
}

}  // namespace mori::qsa
