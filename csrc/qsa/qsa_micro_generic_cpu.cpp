// Portable inner loops of selected attention (see qsa_micro_cpu.h).
#include <algorithm>
#include <cmath>
#include <limits>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "qsa_micro_cpu.h"

namespace mori::qsa {
namespace {

using c10::BFloat16;
using c10::Half;

template <class T>
void convert(const void* source, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<const T*>(source)[i]);
}

template <class T>
void convert_back(const float* source, int64_t n, void* out) {
  for (int64_t i = 0; i < n; ++i) static_cast<T*>(out)[i] = static_cast<T>(source[i]);
}

void load(const void* source, ScalarType dtype, int64_t n, float* out) {
  if (dtype == ScalarType::Half) return convert<Half>(source, n, out);
  if (dtype == ScalarType::BFloat16) return convert<BFloat16>(source, n, out);
  convert<float>(source, n, out);
}

void store(const float* source, int64_t n, ScalarType dtype, void* out) {
  if (dtype == ScalarType::Half) return convert_back<Half>(source, n, out);
  if (dtype == ScalarType::BFloat16) return convert_back<BFloat16>(source, n, out);
  convert_back<float>(source, n, out);
}

float largest(const float* x, int64_t n) {
  float top = 0;
  for (int64_t i = 0; i < n; ++i) top = std::max(top, std::abs(x[i]));
  return top;
}

void load_scales(const void* source, int64_t groups, float* out) { convert<Half>(source, groups, out); }

template <class Kv>
float decode(const char* cell, const float* scales, int64_t d) {
  const float value = static_cast<float>(reinterpret_cast<const Kv*>(cell)[d]);
  if constexpr (std::is_same_v<Kv, int8_t>) return value * scales[d / 64];
  return value;
}

template <class Kv>
void k_panel(const char* const* cells, const float* scales, int64_t dim, float* panel) {
  for (int64_t c = 0; c < kPanel; ++c)
    for (int64_t d = 0; d < dim; ++d) panel[d * kPanel + c] = decode<Kv>(cells[c], scales + c * kMaxGroups, d);
}

template <class Kv>
void v_panel(const char* const* cells, const float* scales, int64_t n, int64_t d0, float* panel) {
  for (int64_t c = 0; c < n; ++c)
    for (int64_t i = 0; i < kPanel; ++i) panel[c * kPanel + i] = decode<Kv>(cells[c], scales + c * kMaxGroups, d0 + i);
}

void scores(int64_t rows, const float* q, int64_t dim, const float* panel, float* s) {
  for (int64_t r = 0; r < rows; ++r) {
    float acc[kPanel] = {};
    for (int64_t d = 0; d < dim; ++d)
      for (int64_t c = 0; c < kPanel; ++c) acc[c] += q[r * dim + d] * panel[d * kPanel + c];
    std::copy(acc, acc + kPanel, s + r * kChunk);
  }
}

void softmax(float* s, int64_t n, float factor, float* max, float* sum) {
  float top = -std::numeric_limits<float>::infinity(), total = 0;
  for (int64_t i = 0; i < n; ++i) top = std::max(top, s[i]);
  for (int64_t i = 0; i < n; ++i) total += s[i] = std::exp((s[i] - top) * factor);
  *max = top;
  *sum = total;
}

void values(int64_t rows, const float* p, int64_t n, const float* panel, float* acc, int64_t dim, bool add) {
  for (int64_t r = 0; r < rows; ++r) {
    float sum[kPanel] = {};
    if (add) std::copy(acc + r * dim, acc + r * dim + kPanel, sum);
    for (int64_t c = 0; c < n; ++c)
      for (int64_t i = 0; i < kPanel; ++i) sum[i] += p[r * kChunk + c] * panel[c * kPanel + i];
    std::copy(sum, sum + kPanel, acc + r * dim);
  }
}

void fold(float* total, const float* acc, float a, float b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] = total[i] * a + acc[i] * b;
}

void finish(float* row, float denominator, const float* gate, int64_t n) {
  for (int64_t i = 0; i < n; ++i) row[i] /= denominator;
  if (gate == nullptr) return;
  for (int64_t i = 0; i < n; ++i) {
    const float small = std::exp(-std::abs(gate[i]));  // never overflows
    row[i] *= (gate[i] < 0 ? small : 1.0f) / (1.0f + small);
  }
}

template <class Kv>
constexpr Micro kMicro = {load, store, largest, load_scales, k_panel<Kv>, v_panel<Kv>, scores, softmax, values, fold, finish};

}  // namespace

const Micro& generic_micro(ScalarType kv_dtype) {
  if (kv_dtype == ScalarType::Half) return kMicro<Half>;
  if (kv_dtype == ScalarType::BFloat16) return kMicro<BFloat16>;
  return kMicro<int8_t>;
}

}  // namespace mori::qsa
