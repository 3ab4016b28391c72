// gr_down on the CPU: y[t, n] = sum_k W[n, k] * xn[t, k], W Q8_0, everything in fp32 (see gr.h for the contract).
//
// One order of operations whatever the route, so a row's bits depend neither on ntok nor on its place nor on the threads:
// K goes in chunks of 512; inside a chunk 8 lanes each sum their k = lane (mod 8) in order, one fused multiply-add of
// d * q (exact) and x a step; the lanes are added as a tree; the chunk sums are added in order.
//
//   xn      fp32, [chunk][token][kStride]: a chunk of all tokens lies together, and no two tokens share a cache bank
//   stream  up to 4 tokens: codes are decoded in registers, rows x tokens accumulators. As much of K at a time as keeps its x in
//           L1, over all rows of a thread
//   panel   more tokens: 6 rows x 512 are decoded into L1 once and serve up to 128 tokens, 3 rows x 4 tokens at a time
// Both prefetch the next rows' codes, whose distance no hardware prefetcher follows (at 8 tokens 1.05 against 0.96 of int8pack).
//
// The kernel family (variant) is Metal's: here every name runs this one kernel.
// Bounds: decoding (about 1.4 cycles per 8 codes) at 1..3 tokens, fused multiply-adds from there on.
// Lost: in-lane byte shuffles or interleaving with a magic exponent instead of vpmovsxbd; x left in rows (bank conflicts).
#include <algorithm>

#include <torch/headeronly/util/BFloat16.h>

#include "../common/cpu_isa.h"
#include "../common/route.h"
#include "gr_cpu.h"
#include "gr_ops.h"

namespace mori::gr {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kLanes = 8;
constexpr int64_t kChunk = 512;               // K per partial sum
constexpr int64_t kStride = kChunk + 16;      // floats from one row of a chunk to the next
constexpr int64_t kStreamTokens = 4;          // most tokens of the stream route
constexpr int64_t kStreamBytes = 20480;       // of x in L1, beside the codes
constexpr int64_t kPanelRows = 6;             // decoded at a time: 12 KB of L1
constexpr int64_t kTileRows = 3;              // rows x tokens of a panel tile: 12 accumulators
constexpr int64_t kTileTokens = 4;
constexpr int64_t kTokenBlock = 128;          // tokens that share a decoded panel: a chunk of them is 256 KB of L2
constexpr int64_t kMaxTile = 12;              // most sums of a tile

constexpr Route kRoutes[] = {
    {"stream", [](const RouteDims& d) { return d[0] <= kStreamTokens; }, "codes decoded in registers; from 5 tokens a panel is as fast (bench/results/cpu_gr_down.json)"},
    {"panel", nullptr, "six rows decoded into L1 serve all tokens"},
};
const RegisterRoutes kRegistered("gr_down", "cpu", kRoutes);

// Rows of codes that a stream tile reads.
struct Codes {
  const uint8_t* w;  // first row of the tile
  int64_t stride;    // bytes from row to row
  int64_t rows;      // rows left: beyond them a tile reads the last one again

  const uint8_t* row(int64_t r) const { return w + std::min(r, rows - 1) * stride; }
};

// The kernels of one instruction set. A tile of R rows and T tokens has sums[t * R + r]; the stream kernel adds to them.
struct Kernels {
  int64_t stream_rows[kStreamTokens];  // R for T = 1..4
  void (*stream[kStreamTokens])(const Codes&, const float* x, int64_t x_chunk, int64_t k, float* sums);  // x_chunk: from chunk to chunk
  void (*panel[kTileTokens])(const float* w, const float* x, int64_t chunk, float* sums);  // R = kTileRows, T = 1..4
  void (*decode)(const uint8_t* row, int64_t blocks, int64_t ahead, float* out);  // prefetches `ahead` bytes further
  void (*load)(ScalarType dtype, const void* in, float* out, int64_t count);
  void (*norm)(float* x, const float* weight, int64_t k, int64_t hc, double eps);
};

int64_t chunk_at(int64_t k, int64_t begin) { return std::min(kChunk, k - begin); }

int64_t code_offset(int64_t k) { return k / kBlock * kBlockBytes; }

// ---- portable ----

float lane_sum(const float* a) { return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])); }

void decode_portable(const uint8_t* row, int64_t blocks, int64_t, float* out) {
  for (int64_t b = 0; b < blocks; ++b, row += kBlockBytes) {
    const float d = q8_0::block_scale(row);
    for (int64_t i = 0; i < kBlock; ++i) *out++ = d * q8_0::block_code(row, i);
  }
}

template <int R, int T>
void panel_portable(const float* w, const float* x, int64_t chunk, float* sums) {
  float acc[R * T][kLanes] = {};
  for (int64_t k = 0; k < chunk; k += kLanes)
    for (int i = 0; i < R * T; ++i)
      for (int64_t lane = 0; lane < kLanes; ++lane) acc[i][lane] += w[i % R * kStride + k + lane] * x[i / R * kStride + k + lane];
  for (int i = 0; i < R * T; ++i) sums[i] = lane_sum(acc[i]);
}

template <int R, int T>
void stream_portable(const Codes& codes, const float* x, int64_t x_chunk, int64_t k, float* sums) {
  float panel[R * kStride], partial[R * T];
  for (int64_t begin = 0; begin < k; begin += kChunk, x += x_chunk) {
    for (int r = 0; r < R; ++r) decode_portable(codes.row(r) + code_offset(begin), chunk_at(k, begin) / kBlock, 0, panel + r * kStride);
    panel_portable<R, T>(panel, x, chunk_at(k, begin), partial);
    for (int i = 0; i < R * T; ++i) sums[i] += partial[i];
  }
}

template <class In>
void convert(const void* in, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(static_cast<const In*>(in)[i]);
}

void load_portable(ScalarType dtype, const void* in, float* out, int64_t count) {
  if (dtype == ScalarType::Float) return convert<float>(in, out, count);
  if (dtype == ScalarType::BFloat16) return convert<BFloat16>(in, out, count);
  convert<Half>(in, out, count);
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

void norm_portable(float* x, const float* weight, int64_t k, int64_t hc, double eps) { norm_row(x, weight, k, hc, eps); }

constexpr Kernels kPortable = {
    {2, 2, 2, 2},
    {stream_portable<2, 1>, stream_portable<2, 2>, stream_portable<2, 3>, stream_portable<2, 4>},
    {panel_portable<3, 1>, panel_portable<3, 2>, panel_portable<3, 3>, panel_portable<3, 4>},
    decode_portable, load_portable, norm_portable};

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
#pragma GCC unroll 4
  for (int i = 0; i < Count; i += 4) {
    const __m128 four = lane_sums(acc[i], i + 1 < Count ? acc[i + 1] : zero, i + 2 < Count ? acc[i + 2] : zero, i + 3 < Count ? acc[i + 3] : zero);
    _mm_storeu_ps(sums + i, four);
  }
}

// Accumulators live in registers only if every loop over them is a single one that is unrolled early.
template <int Count>
MORI_AVX2_INLINE void clear(__m256* acc) {
#pragma GCC unroll 12
  for (int i = 0; i < Count; ++i) acc[i] = _mm256_setzero_ps();
}

template <int R, int T>
MORI_AVX2_INLINE void multiply_add(const __m256* w, const float* x, __m256* acc) {
#pragma GCC unroll 12
  for (int i = 0; i < R * T; ++i) acc[i] = _mm256_fmadd_ps(w[i % R], _mm256_loadu_ps(x + i / R * kStride), acc[i]);
}

template <int R, int T>
MORI_AVX2 void stream_avx2(const Codes& codes, const float* x, int64_t x_chunk, int64_t k, float* sums) {
  float partial[kMaxTile];
  const uint8_t* row[R];
  for (int r = 0; r < R; ++r) row[r] = codes.row(r);
  for (int64_t begin = 0; begin < k; begin += kChunk, x += x_chunk) {
    const int64_t chunk = chunk_at(k, begin);
    __m256 acc[R * T], d[R], w[R];
    clear<R * T>(acc);
    for (int64_t j = 0; j < chunk; j += kBlock) {
      const int64_t offset = code_offset(begin + j);
      for (int r = 0; r < R; ++r) {
        _mm_prefetch(reinterpret_cast<const char*>(row[r] + R * codes.stride + offset), _MM_HINT_T0);
        d[r] = scale_of(row[r] + offset);
      }
      for (int i = 0; i < kBlock; i += kLanes) {
        for (int r = 0; r < R; ++r) w[r] = _mm256_mul_ps(codes_of(row[r] + offset + 2 + i), d[r]);
        multiply_add<R, T>(w, x + j + i, acc);
      }
    }
    store_lane_sums<R * T>(acc, partial);
    for (int i = 0; i < R * T; ++i) sums[i] += partial[i];
  }
}

template <int R, int T>
MORI_AVX2 void panel_avx2(const float* w, const float* x, int64_t chunk, float* sums) {
  __m256 acc[R * T], row[R];
  clear<R * T>(acc);
  for (int64_t j = 0; j < chunk; j += kLanes) {
    for (int r = 0; r < R; ++r) row[r] = _mm256_loadu_ps(w + r * kStride + j);
    multiply_add<R, T>(row, x + j, acc);
  }
  store_lane_sums<R * T>(acc, sums);
}

MORI_AVX2 void decode_avx2(const uint8_t* row, int64_t blocks, int64_t ahead, float* out) {
  for (int64_t b = 0; b < blocks; ++b, row += kBlockBytes, out += kBlock) {
    const __m256 d = scale_of(row);
    _mm_prefetch(reinterpret_cast<const char*>(row + ahead), _MM_HINT_T0);
    for (int i = 0; i < kBlock; i += kLanes) _mm256_storeu_ps(out + i, _mm256_mul_ps(codes_of(row + 2 + i), d));
  }
}

MORI_AVX2 void load_avx2(ScalarType dtype, const void* in, float* out, int64_t count) {
  if (dtype == ScalarType::Float) {
    std::copy_n(static_cast<const float*>(in), count, out);  // an empty tensor has no address
    return;
  }
  for (int64_t i = 0; i < count; i += kLanes) {  // K is a multiple of 32
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(in) + i));
    const __m256 bf16 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    _mm256_storeu_ps(out + i, dtype == ScalarType::BFloat16 ? bf16 : _mm256_cvtph_ps(bits));
  }
}

MORI_AVX2 void norm_avx2(float* x, const float* weight, int64_t k, int64_t hc, double eps) { norm_row(x, weight, k, hc, eps); }

constexpr Kernels kAvx2 = {
    {4, 4, 3, 3},
    {stream_avx2<4, 1>, stream_avx2<4, 2>, stream_avx2<3, 3>, stream_avx2<3, 4>},
    {panel_avx2<3, 1>, panel_avx2<3, 2>, panel_avx2<3, 3>, panel_avx2<3, 4>},
    decode_avx2, load_avx2, norm_avx2};
#else
constexpr Kernels kAvx2 = kPortable;  // never chosen
#endif

// ---- launcher ----

// A matrix whose rows are dense; the distance between them is the caller's.
Tensor dense_rows(const Tensor& t) { return t.size(1) <= 1 || t.stride(1) == 1 ? t : torch::stable::contiguous(t); }

int64_t row_bytes(const Tensor& t) { return t.stride(0) * t.element_size(); }

// xn as the kernels read it: fp32, [chunk][token][kStride].
Tensor prepare(const Kernels& kernels, const Tensor& given, const std::optional<Tensor>& norm_weight, double eps, const DownShape& shape) {
  const int64_t ntok = shape.ntok, k = shape.k;
  const Tensor x = dense_rows(given);
  const auto* in = static_cast<const uint8_t*>(x.const_data_ptr());
  const Tensor out = torch::stable::new_empty(x, Sizes{ceil_div(k, kChunk), ntok, kStride}, ScalarType::Float);
  float* chunks = static_cast<float*>(out.mutable_data_ptr());
  const auto scatter = [&](ScalarType dtype, const uint8_t* row, int64_t bytes, int64_t token) {
    for (int64_t begin = 0; begin < k; begin += kChunk)
      kernels.load(dtype, row + begin * bytes, chunks + (begin / kChunk * ntok + token) * kStride, chunk_at(k, begin));
  };
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, k));
  if (!norm_weight) {
    torch::stable::parallel_for(0, ntok, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) scatter(x.scalar_type(), in + t * row_bytes(x), x.element_size(), t);
    });
    return out;
  }
  const Tensor weight = dense(*norm_weight);
  const Tensor scratch = torch::stable::new_empty(x, Sizes{ntok + 1, k}, ScalarType::Float);  // the weight, then the tokens
  float* weights = static_cast<float*>(scratch.mutable_data_ptr());
  kernels.load(weight.scalar_type(), weight.const_data_ptr(), weights, k);
  torch::stable::parallel_for(0, ntok, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = weights + (t + 1) * k;
      kernels.load(x.scalar_type(), in + t * row_bytes(x), row, k);
      kernels.norm(row, weights, k, shape.hc, eps);
      scatter(ScalarType::Float, reinterpret_cast<const uint8_t*>(row), sizeof(float), t);
    }
  });
  return out;
}

// Splits `left` tokens into the fewest groups of at most `most`, as even as can be: the size of the first.
int64_t token_group(int64_t left, int64_t most) { return ceil_div(left, ceil_div(left, most)); }

void stream(const Kernels& kernels, const float* x, const uint8_t* w, int64_t w_stride, float* y, const DownShape& shape) {
  const int64_t ntok = shape.ntok, rows = kernels.stream_rows[ntok - 1];
  const int64_t span = std::max<int64_t>(1, kStreamBytes / 4 / kStride / ntok) * kChunk;  // of K at a time
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, rows * shape.k));
  torch::stable::parallel_for(0, ceil_div(shape.n, rows), grain, [&](int64_t begin, int64_t end) {
    const int64_t n0 = begin * rows, n1 = std::min(end * rows, shape.n);
    for (int64_t t = 0; t < ntok; ++t) std::fill(y + t * shape.n + n0, y + t * shape.n + n1, 0.0f);
    float sums[kMaxTile] = {};
    for (int64_t k = 0; k < shape.k; k += span)
      for (int64_t n = n0; n < n1; n += rows) {
        const Codes codes = {w + n * w_stride + code_offset(k), w_stride, shape.n - n};
        const int64_t left = std::min(rows, shape.n - n);
        for (int64_t t = 0; t < ntok; ++t) std::copy_n(y + t * shape.n + n, left, sums + t * rows);
        kernels.stream[ntok - 1](codes, x + k / kChunk * ntok * kStride, ntok * kStride, std::min(span, shape.k - k), sums);
        for (int64_t t = 0; t < ntok; ++t) std::copy_n(sums + t * rows, left, y + t * shape.n + n);
      }
  });
}

// Adds one chunk of K to y: `rows` decoded rows times `ntok` tokens.
void add_panel(const Kernels& kernels, const float* decoded, int64_t rows, const float* x, int64_t chunk, int64_t ntok, float* y, int64_t y_stride) {
  float sums[kMaxTile];
  for (int64_t t = 0, tokens; t < ntok; t += tokens) {
    tokens = token_group(ntok - t, kTileTokens);
    for (int64_t n = 0; n < rows; n += kTileRows) {
      kernels.panel[tokens - 1](decoded + n * kStride, x + t * kStride, chunk, sums);
      for (int64_t j = 0; j < tokens; ++j)
        for (int64_t r = 0; r < std::min(kTileRows, rows - n); ++r) y[(t + j) * y_stride + n + r] += sums[j * kTileRows + r];
    }
  }
}

void panel(const Kernels& kernels, const float* x, const uint8_t* w, int64_t w_stride, float* y, const DownShape& shape) {
  const int64_t panels = ceil_div(shape.n, kPanelRows);
  // An item is one panel of one block of tokens; a thread takes its range of them chunk by chunk, so that x stays in its L2.
  torch::stable::parallel_for(0, ceil_div(shape.ntok, kTokenBlock) * panels, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float decoded[kPanelRows * kStride] = {};
    while (begin < end) {
      const int64_t token = begin / panels * kTokenBlock, ntok = std::min(kTokenBlock, shape.ntok - token);
      const int64_t first = begin % panels, last = std::min(panels, first + end - begin);
      const int64_t n0 = first * kPanelRows, n1 = std::min(last * kPanelRows, shape.n);
      float* out = y + token * shape.n;
      for (int64_t t = 0; t < ntok; ++t) std::fill(out + t * shape.n + n0, out + t * shape.n + n1, 0.0f);
      for (int64_t k = 0; k < shape.k; k += kChunk) {
        const int64_t chunk = chunk_at(shape.k, k);
        for (int64_t n = n0; n < n1; n += kPanelRows) {
          const int64_t rows = std::min(kPanelRows, n1 - n);
          for (int64_t r = 0; r < rows; ++r)
            kernels.decode(w + (n + r) * w_stride + code_offset(k), chunk / kBlock, kPanelRows * w_stride, decoded + r * kStride);
          add_panel(kernels, decoded, rows, x + (k / kChunk * shape.ntok + token) * kStride, chunk, ntok, out + n, shape.n);
        }
      }
      begin += last - first;
    }
  });
}

}  // namespace

void Cpu::down(const Tensor& x, const Tensor& w, const std::optional<Tensor>& norm_weight, double eps, const Tensor& out, const DownShape& shape) {
  const Kernels& kernels = cpu_isa() == CpuIsa::avx2 ? kAvx2 : kPortable;
  if (shape.ntok == 0 || shape.n == 0) return;
  const Tensor rows = dense_rows(w);
  const auto* codes = static_cast<const uint8_t*>(rows.const_data_ptr());
  const Tensor xn = prepare(kernels, x, norm_weight, eps, shape);
  const bool few = pick_route(kRoutes, {shape.ntok, shape.n, shape.k}) == 0;
  (few ? stream : panel)(kernels, static_cast<const float*>(xn.const_data_ptr()), codes, row_bytes(rows), static_cast<float*>(out.mutable_data_ptr()), shape);
}

}  // namespace mori::gr

STABLE_TORCH_LIBRARY_IMPL(mori, CPU, m) { MORI_REGISTER_GR(m, mori::gr::Cpu); }
