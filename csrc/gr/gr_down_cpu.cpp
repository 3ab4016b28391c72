// gr_down on the CPU: y[t, n] = sum_k W[n, k] * xn[t, k], W Q8_0, everything in fp32 (see gr.h for the contract).
//
// One order of operations for every route, so a row's bits depend neither on ntok nor on its place nor on the threads:
// K goes in chunks of 512; inside a chunk 8 lanes each sum their k = lane (mod 8) in order, one fused multiply-add per
// (d * q, exact) * x; the lanes are added as a tree; the chunk sums are added in order.
//
//   stream  few tokens: codes are decoded in registers, R rows x T tokens of accumulators, weights read once.
//   panel   more tokens: 6 rows x 512 are decoded into L1 once and serve up to 128 tokens, 3 rows x 4 tokens at a time.
//
// The kernel family (variant) is Metal's: here every name runs this one kernel.
// Bounds: weight reads and decoding at 1..2 tokens, fused multiply-adds from there on.
#include <algorithm>
#include <memory>

#include <torch/headeronly/util/BFloat16.h>

#include "../common/cpu_isa.h"
#include "../common/route.h"
#include "gr.h"

namespace mori::gr {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kChunk = 512;         // K per partial sum
constexpr int64_t kStreamTokens = 4;    // most tokens of the stream route
constexpr int64_t kPanelRows = 6;       // decoded at a time: 12 KB of L1
constexpr int64_t kTileRows = 3;        // rows x tokens of a panel tile: 12 accumulators
constexpr int64_t kTileTokens = 4;
constexpr int64_t kTokenBlock = 128;    // tokens that share a decoded panel: a chunk of them is 256 KB of L2
constexpr int64_t kMaxTile = 12;        // sums a tile returns

constexpr Route kRoutes[] = {
    {"stream", [](const RouteDims& d) { return d[0] <= kStreamTokens; }, "codes decoded in registers: one pass over the weights"},
    {"panel", nullptr, "six rows decoded into L1 serve all tokens"},
};
const RegisterRoutes kRegistered("gr_down", "cpu", kRoutes);

// Rows of `codes` and of x that a tile works on.
struct Operands {
  const uint8_t* w;  // first row of the tile
  int64_t w_stride;  // bytes from row to row
  int64_t rows;      // rows left: a tile reads its last row again beyond them
  const float* x;    // first token
  int64_t x_stride;  // values from token to token
  int64_t k;

  const uint8_t* row(int64_t r) const { return w + std::min(r, rows - 1) * w_stride; }
};

struct PanelOperands {
  const float* w;  // decoded [rows][kChunk]
  const float* x;
  int64_t x_stride;
  int64_t k;       // at most kChunk
};

// A kernel set per instruction set. Tiles write sums[r * T + t].
struct Kernels {
  int64_t stream_rows[kStreamTokens];  // rows per tile for 1.. tokens
  void (*stream[kStreamTokens])(const Operands&, float* sums);
  void (*panel[kTileTokens])(const PanelOperands&, float* sums);
  void (*decode)(const uint8_t* row, int64_t blocks, float* out);
  void (*load_row)(ScalarType dtype, const void* in, float* out, int64_t k);
  void (*norm_row)(float* x, const float* weight, int64_t k, int64_t hc, double eps);
};

// ---- portable ----

constexpr int64_t kLanes = 8;

float lane_sum(const float* a) { return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])); }

void decode_portable(const uint8_t* row, int64_t blocks, float* out) {
  for (int64_t b = 0; b < blocks; ++b, row += kBlockBytes) {
    const float d = q8_0::block_scale(row);
    for (int64_t i = 0; i < kBlock; ++i) *out++ = d * q8_0::block_code(row, i);
  }
}

template <int R, int T>
void panel_portable(const PanelOperands& in, float* sums) {
  float acc[R * T][kLanes] = {};
  for (int64_t k = 0; k < in.k; k += kLanes)
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t)
        for (int64_t i = 0; i < kLanes; ++i) acc[r * T + t][i] += in.w[r * kChunk + k + i] * in.x[t * in.x_stride + k + i];
  for (int i = 0; i < R * T; ++i) sums[i] = lane_sum(acc[i]);
}

template <int R, int T>
void stream_portable(const Operands& in, float* sums) {
  float panel[R * kChunk], partial[R * T];
  std::fill(sums, sums + R * T, 0.0f);
  for (int64_t k = 0; k < in.k; k += kChunk) {
    const int64_t chunk = std::min(kChunk, in.k - k);
    for (int r = 0; r < R; ++r) decode_portable(in.row(r) + k / kBlock * kBlockBytes, chunk / kBlock, panel + r * kChunk);
    panel_portable<R, T>({panel, in.x + k, in.x_stride, chunk}, partial);
    for (int i = 0; i < R * T; ++i) sums[i] += partial[i];
  }
}

template <class In>
void convert_row(const void* in, float* out, int64_t k) {
  for (int64_t i = 0; i < k; ++i) out[i] = static_cast<float>(static_cast<const In*>(in)[i]);
}

void load_row_portable(ScalarType dtype, const void* in, float* out, int64_t k) {
  if (dtype == ScalarType::Float) return convert_row<float>(in, out, k);
  if (dtype == ScalarType::BFloat16) return convert_row<BFloat16>(in, out, k);
  convert_row<Half>(in, out, k);
}

// Squares are summed in double: an fp32 x may be as large as it likes.
inline __attribute__((always_inline)) void norm_row(float* x, const float* weight, int64_t k, int64_t hc, double eps) {
  const int64_t group = k / hc;
  for (int64_t g = 0; g < k; g += group) {
    double lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= group; i += kLanes)
      for (int64_t j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(x[g + i + j]) * x[g + i + j];
    double sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    for (; i < group; ++i) sum += static_cast<double>(x[g + i]) * x[g + i];
    const float r = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(group) + eps));
    for (i = g; i < g + group; ++i) x[i] = x[i] * r * weight[i];
  }
}

void norm_row_portable(float* x, const float* weight, int64_t k, int64_t hc, double eps) { norm_row(x, weight, k, hc, eps); }

constexpr Kernels kPortable = {{1, 1, 1, 1},
                               {stream_portable<1, 1>, stream_portable<1, 2>, stream_portable<1, 3>, stream_portable<1, 4>},
                               {panel_portable<3, 1>, panel_portable<3, 2>, panel_portable<3, 3>, panel_portable<3, 4>},
                               decode_portable, load_row_portable, norm_row_portable};

// ---- AVX2 ----

#if MORI_X86
MORI_AVX2_INLINE __m256 scale_of(const uint8_t* block) {
  uint16_t d;
  std::memcpy(&d, block, sizeof(d));
  return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(d)));
}

MORI_AVX2_INLINE __m256 codes_of(const uint8_t* codes) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes))));
}

// The same tree as lane_sum, for four accumulators at once.
MORI_AVX2_INLINE __m128 lane_sums(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

template <int Count>
MORI_AVX2_INLINE void store_lane_sums(const __m256* acc, float* sums) {
  const __m256 zero = _mm256_setzero_ps();
  for (int i = 0; i < Count; i += 4) {
    const __m128 four = lane_sums(acc[i], i + 1 < Count ? acc[i + 1] : zero, i + 2 < Count ? acc[i + 2] : zero, i + 3 < Count ? acc[i + 3] : zero);
    _mm_storeu_ps(sums + i, four);
  }
}

template <int R, int T>
MORI_AVX2 void stream_avx2(const Operands& in, float* sums) {
  alignas(16) float partial[kMaxTile];
  const uint8_t* row[R];
  for (int r = 0; r < R; ++r) row[r] = in.row(r);
  std::fill(sums, sums + R * T, 0.0f);
  for (int64_t begin = 0; begin < in.k; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, in.k);
    __m256 acc[R * T];
    for (int i = 0; i < R * T; ++i) acc[i] = _mm256_setzero_ps();
    for (int64_t k = begin; k < end; k += kBlock) {
      const int64_t offset = k / kBlock * kBlockBytes;
      for (int r = 0; r < R; ++r) {
        const __m256 d = scale_of(row[r] + offset);
        for (int i = 0; i < kBlock; i += kLanes) {
          const __m256 w = _mm256_mul_ps(codes_of(row[r] + offset + 2 + i), d);
          for (int t = 0; t < T; ++t)
            acc[r * T + t] = _mm256_fmadd_ps(w, _mm256_loadu_ps(in.x + t * in.x_stride + k + i), acc[r * T + t]);
        }
      }
    }
    store_lane_sums<R * T>(acc, partial);
    for (int i = 0; i < R * T; ++i) sums[i] += partial[i];
  }
}

template <int R, int T>
MORI_AVX2 void panel_avx2(const PanelOperands& in, float* sums) {
  __m256 acc[R * T];
  for (int i = 0; i < R * T; ++i) acc[i] = _mm256_setzero_ps();
  for (int64_t k = 0; k < in.k; k += kLanes) {
    __m256 w[R];
    for (int r = 0; r < R; ++r) w[r] = _mm256_loadu_ps(in.w + r * kChunk + k);
    for (int t = 0; t < T; ++t) {
      const __m256 x = _mm256_loadu_ps(in.x + t * in.x_stride + k);
      for (int r = 0; r < R; ++r) acc[r * T + t] = _mm256_fmadd_ps(w[r], x, acc[r * T + t]);
    }
  }
  store_lane_sums<R * T>(acc, sums);
}

MORI_AVX2 void decode_avx2(const uint8_t* row, int64_t blocks, float* out) {
  for (int64_t b = 0; b < blocks; ++b, row += kBlockBytes, out += kBlock) {
    const __m256 d = scale_of(row);
    for (int i = 0; i < kBlock; i += kLanes) _mm256_storeu_ps(out + i, _mm256_mul_ps(codes_of(row + 2 + i), d));
  }
}

MORI_AVX2 void load_row_avx2(ScalarType dtype, const void* in, float* out, int64_t k) {
  if (dtype == ScalarType::Float) {
    std::copy_n(static_cast<const float*>(in), k, out);  // an empty tensor has no address
    return;
  }
  for (int64_t i = 0; i < k; i += kLanes) {  // K is a multiple of 32
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(in) + i));
    const __m256 bf16 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    _mm256_storeu_ps(out + i, dtype == ScalarType::BFloat16 ? bf16 : _mm256_cvtph_ps(bits));
  }
}

MORI_AVX2 void norm_row_avx2(float* x, const float* weight, int64_t k, int64_t hc, double eps) { norm_row(x, weight, k, hc, eps); }

constexpr Kernels kAvx2 = {{6, 4, 4, 3},
                           {stream_avx2<6, 1>, stream_avx2<4, 2>, stream_avx2<4, 3>, stream_avx2<3, 4>},
                           {panel_avx2<3, 1>, panel_avx2<3, 2>, panel_avx2<3, 3>, panel_avx2<3, 4>},
                           decode_avx2, load_row_avx2, norm_row_avx2};
#else
constexpr Kernels kAvx2 = kPortable;  // never chosen
#endif

// ---- launcher ----

// A matrix whose rows are dense; the distance between them is the caller's.
Tensor dense_rows(const Tensor& t) { return t.size(1) <= 1 || t.stride(1) == 1 ? t : torch::stable::contiguous(t); }

int64_t row_bytes(const Tensor& t) { return t.stride(0) * t.element_size(); }

// xn in fp32, [ntok, K].
std::unique_ptr<float[]> prepare(const Kernels& kernels, const Tensor& given, const std::optional<Tensor>& norm_weight, double eps, const DownShape& shape) {
  const Tensor x = dense_rows(given);
  const auto* in = static_cast<const uint8_t*>(x.const_data_ptr());
  std::unique_ptr<float[]> out(new float[shape.ntok * shape.k]), weight;
  if (norm_weight) {
    const Tensor w = dense(*norm_weight);
    weight.reset(new float[shape.k]);
    kernels.load_row(w.scalar_type(), w.const_data_ptr(), weight.get(), shape.k);
  }
  torch::stable::parallel_for(0, shape.ntok, std::max<int64_t>(1, 65536 / std::max<int64_t>(1, shape.k)), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = out.get() + t * shape.k;
      kernels.load_row(x.scalar_type(), in + t * row_bytes(x), row, shape.k);
      if (weight) kernels.norm_row(row, weight.get(), shape.k, shape.hc, eps);
    }
  });
  return out;
}

void stream(const Kernels& kernels, const float* x, const uint8_t* w, int64_t w_stride, float* y, const DownShape& shape) {
  const int64_t ntok = shape.ntok, rows = kernels.stream_rows[ntok - 1];
  const auto tile = kernels.stream[ntok - 1];
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, rows * shape.k));
  torch::stable::parallel_for(0, ceil_div(shape.n, rows), grain, [&](int64_t begin, int64_t end) {
    float sums[kMaxTile];
    for (int64_t n = begin * rows; n < std::min(end * rows, shape.n); n += rows) {
      const int64_t left = std::min(rows, shape.n - n);
      tile({w + n * w_stride, w_stride, left, x, shape.k, shape.k}, sums);
      for (int64_t r = 0; r < left; ++r)
        for (int64_t t = 0; t < ntok; ++t) y[t * shape.n + n + r] = sums[r * ntok + t];
    }
  });
}

// Rows [n, n + rows) of the panel times `ntok` tokens, one chunk of K, added to y.
void add_panel(const Kernels& kernels, const float* panel, int64_t rows, const float* x, int64_t chunk, int64_t ntok, float* y, const DownShape& shape) {
  float sums[kMaxTile];
  for (int64_t t = 0; t < ntok; t += kTileTokens) {
    const int64_t tokens = std::min(kTileTokens, ntok - t);
    for (int64_t r = 0; r < rows; r += kTileRows) {
      kernels.panel[tokens - 1]({panel + r * kChunk, x + t * shape.k, shape.k, chunk}, sums);
      for (int64_t i = 0; i < std::min(kTileRows, rows - r); ++i)
        for (int64_t j = 0; j < tokens; ++j) y[(t + j) * shape.n + r + i] += sums[i * tokens + j];
    }
  }
}

void panel(const Kernels& kernels, const float* x, const uint8_t* w, int64_t w_stride, float* y, const DownShape& shape) {
  const int64_t panels = ceil_div(shape.n, kPanelRows);
  // An item is a panel of a block of tokens; a thread takes a range of them, chunk by chunk, so that x stays in its L2.
  torch::stable::parallel_for(0, ceil_div(shape.ntok, kTokenBlock) * panels, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float decoded[kPanelRows * kChunk] = {};
    while (begin < end) {
      const int64_t token = begin / panels * kTokenBlock, ntok = std::min(kTokenBlock, shape.ntok - token);
      const int64_t first = begin % panels, last = std::min(panels, first + end - begin);
      const int64_t n0 = first * kPanelRows, n1 = std::min(last * kPanelRows, shape.n);
      float* out = y + token * shape.n;
      for (int64_t t = 0; t < ntok; ++t) std::fill(out + t * shape.n + n0, out + t * shape.n + n1, 0.0f);
      for (int64_t k = 0; k < shape.k; k += kChunk) {
        const int64_t chunk = std::min(kChunk, shape.k - k);
        for (int64_t n = n0; n < n1; n += kPanelRows) {
          const int64_t rows = std::min(kPanelRows, n1 - n);
          for (int64_t r = 0; r < rows; ++r)
            kernels.decode(w + (n + r) * w_stride + k / kBlock * kBlockBytes, chunk / kBlock, decoded + r * kChunk);
          add_panel(kernels, decoded, rows, x + token * shape.k + k, chunk, ntok, out + n, shape);
        }
      }
      begin += last - first;
    }
  });
}

void run(const Tensor& x, const Tensor& w, const std::optional<Tensor>& norm_weight, double eps, const Tensor& out, const DownShape& shape) {
  if (shape.ntok == 0 || shape.n == 0) return;
  const Kernels& kernels = cpu_isa() == CpuIsa::avx2 ? kAvx2 : kPortable;
  const Tensor rows = dense_rows(w);
  const auto* codes = static_cast<const uint8_t*>(rows.const_data_ptr());
  float* y = static_cast<float*>(out.mutable_data_ptr());
  const std::unique_ptr<float[]> xn = prepare(kernels, x, norm_weight, eps, shape);
  const bool streams = pick_route(kRoutes, {shape.ntok, shape.n, shape.k}) == 0;
  (streams ? stream : panel)(kernels, xn.get(), codes, row_bytes(rows), y, shape);
}

Tensor gr_down(const Tensor& x, const Tensor& w, const std::optional<Tensor>& norm_weight, double eps, int64_t hc, std::string variant) {
  const DownShape shape = check_down(x, w, norm_weight, eps, hc, variant);
  const Tensor out = torch::stable::new_empty(x, Sizes{shape.ntok, shape.n}, ScalarType::Float);
  run(x, w, norm_weight, eps, out, shape);
  return out;
}

void gr_down_out(const Tensor& x, const Tensor& w, const std::optional<Tensor>& norm_weight, double eps, int64_t hc, std::string variant, const Tensor& out) {
  const DownShape shape = check_down(x, w, norm_weight, eps, hc, variant);
  check_out("gr_down", "out", out, {shape.ntok, shape.n}, {ScalarType::Float}, {&x, &w, norm_weight ? &*norm_weight : nullptr});
  run(x, w, norm_weight, eps, out, shape);
}

}  // namespace
}  // namespace mori::gr

STABLE_TORCH_LIBRARY_IMPL(mori, CPU, m) {
  m.impl("gr_down", TORCH_BOX(&mori::gr::gr_down));
  m.impl("gr_down.out", TORCH_BOX(&mori::gr::gr_down_out));
}
