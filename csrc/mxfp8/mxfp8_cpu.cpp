// The GEMMs of the MXFP8 family on the CPU: C[m, n] = sum_k A[m, k] B[n, k] (+ bias[n]), formats in mxfp8.h.
//
// Up to 11 tokens, and with quant="blockscale", the weight is decoded in registers: a tile of 32 or 128 rows of B, which share their
// scales, meets up to 5 tokens at a time, whose codes are decoded into L1 times both scales. From 12 tokens on, where the tokens
// amortise it, both sides are decoded into the caches, each times its own scales: A once for a band of tokens, B a few rows at a
// time. Either way the inner loop (mxfp8_cpu_kernels.h) knows no scales and no layouts and adds the same products in the same
// order: a power of two may be applied on either side, and ptpc's scale of B applies to the finished sum. Scales whose products
// round (blockscale) stay with the first way. Work is split over tiles and bands; neither the split nor M changes a result's bits.
//
// A sum whose scale product leaves [2^-68, 2^38] is computed in float64 instead (exact_dot), for that token and tile by itself. Panels
// leave such sums, extreme scales and NaN codes to compute_tile.
#include "mxfp8_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../common/cpu_isa.h"
#include "../common/keep_subnormals.h"
#include "../common/mx.h"
#include "../common/route.h"
#include "mxfp8_cpu_avx2.h"
#include "mxfp8_cpu_generic.h"
#include "mxfp8_ops.h"

namespace mori::mxfp8 {
namespace {

constexpr float kLeastSide = 0x1p-34f, kMostSide = 0x1p19f;    // of one scale: two of them give a product in the range below
constexpr float kLeastScale = 0x1p-68f, kMostScale = 0x1p38f;  // of a product of two scales in the fast kernels
constexpr int64_t kBandTokens = 256;                           // tokens of one work item
constexpr int64_t kPanelsFrom = 12;                            // tokens from which decoded panels win
constexpr int64_t kGrainProducts = 1 << 16;                    // a smaller share is not worth a thread
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Problem {
  int64_t m, n, k;
  const uint8_t* a;
  const uint8_t* b;
  std::vector<float> bias;  // [n] or empty
  int64_t blocks() const { return k / kBlock; }
};

// ---- scale layouts: fp32 values for a row of A or a group of kGroup rows of B, and a block of 32 along K ----

struct RawScales {
  static constexpr bool kPanels = true;
  static constexpr int64_t kGroup = kBlock;
  const uint8_t *a_bytes, *b_bytes;
  int64_t blocks;
  float a(int64_t m, int64_t j) const { return mx::decode_e8m0(a_bytes[m * blocks + j]); }
  float b(int64_t g, int64_t j) const { return mx::decode_e8m0(b_bytes[g * blocks + j]); }
  float column(int64_t) const { return 1; }
};

struct PackedScales {
  static constexpr bool kPanels = true;
  static constexpr int64_t kGroup = kBlock;
  const uint8_t* a_bytes;
  const int32_t* b_dwords;
  int64_t a_stride, b_stride;  // dwords per block
  float a(int64_t m, int64_t j) const {
    const int64_t dword = j * a_stride + m / kPackRows * 16 + m % 16;
    return mx::decode_e8m0(a_bytes[dword * 4 + m % kPackRows / 16]);
  }
  float b(int64_t g, int64_t j) const { return mx::decode_e8m0(static_cast<uint8_t>(b_dwords[j * b_stride + g])); }
  float column(int64_t) const { return 1; }
};

struct PtpcScales {
  static constexpr bool kPanels = true;
  static constexpr int64_t kGroup = kMaxTileRows;  // any: the scales of B apply to the finished sums
  const float *a_rows, *b_rows;
  float a(int64_t m, int64_t) const { return a_rows[m]; }
  float b(int64_t, int64_t) const { return 1; }
  float column(int64_t n) const { return b_rows[n]; }
};

struct BlockScales {
  static constexpr bool kPanels = false;  // products of its scales round
  static constexpr int64_t kGroup = kBlockscale;
  const float *a_blocks, *b_blocks;
  int64_t stride;
  float a(int64_t m, int64_t j) const { return a_blocks[m * stride + j / (kBlockscale / kBlock)]; }
  float b(int64_t g, int64_t j) const { return b_blocks[g * stride + j / (kBlockscale / kBlock)]; }
  float column(int64_t) const { return 1; }
};

bool all_zero(const uint8_t* codes, int64_t rows, int64_t stride) {
  uint8_t magnitude = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < kBlock; ++i) magnitude |= codes[r * stride + i] & 0x7f;
  return magnitude == 0;
}

// The scale of a block, or 0 for a block of zero codes with an extreme scale: quantisers differ in what they give such blocks
// (ours byte 0), and it must not cost the slow path.
float useful_scale(float scale, const uint8_t* codes, int64_t rows, int64_t stride) {
  const float magnitude = std::fabs(scale);
  if ((magnitude >= kLeastSide && magnitude <= kMostSide) || !std::isfinite(scale)) return scale;
  return all_zero(codes, rows, stride) ? 0 : scale;
}

// ---- compute ----

struct Tile {
  int64_t row, rows;      // of B
  int64_t token, tokens;  // of A
};

enum class Sum : uint8_t { fast, wide, nan };  // what a token's sums over one tile are: the kernel's, float64's, or NaN

// One element of C without bias in float64: each value is decoded times its scale, so Inf and NaN scales act on zeros too.
template <class Scales>
float exact_dot(const Problem& p, const Scales& scales, int64_t m, int64_t n) {
  const uint8_t *a = p.a + m * p.k, *b = p.b + n * p.k;
  const float* table = generic::e4m3_table().data();
  const double column = scales.column(n);
  double sum = 0;
  for (int64_t j = 0; j < p.blocks(); ++j) {
    const double a_scale = scales.a(m, j), b_scale = scales.b(n / Scales::kGroup, j) * column;
    for (int64_t i = j * kBlock; i < (j + 1) * kBlock; ++i) sum += table[a[i]] * a_scale * (table[b[i]] * b_scale);
  }
  return static_cast<float>(sum);
}

// factor[j] = unit * scale of token m's block first + j * b_scale[j]
template <class Scales>
Sum combine_scales(const Problem& p, const Scales& scales, int64_t m, int64_t first, int64_t blocks, const float* b_scale, float unit, float* factor) {
  int outside = 0;  // no branch: this loop runs once per token and tile
  for (int64_t j = 0; j < blocks; ++j) {
    const float product = scales.a(m, first + j) * b_scale[j];
    factor[j] = product * unit;
    outside |= !(std::fabs(product) >= kLeastScale) | !(std::fabs(product) <= kMostScale);
  }
  if (!outside) return Sum::fast;
  Sum need = Sum::fast;
  for (int64_t j = 0; j < blocks; ++j) {
    const float a_scale = scales.a(m, first + j), product = std::fabs(a_scale * b_scale[j]);
    if (product >= kLeastScale && product <= kMostScale) continue;
    if (std::isnan(a_scale) || std::isnan(b_scale[j])) return Sum::nan;
    factor[j] = 0;
    const double useful = useful_scale(a_scale, p.a + m * p.k + (first + j) * kBlock, 1, p.k);
    if (!(useful * b_scale[j] == 0)) need = Sum::wide;  // 0 * Inf is NaN: wide
  }
  return need;
}

// Makes a token's finished sums its line of C.
template <class Scales>
void finish(const Problem& p, const Scales& scales, const Tile& tile, int64_t t, float factor, Sum need, bool has_nan, const uint8_t* row_is_nan, float* line) {
  for (int64_t r = 0; r < tile.rows; ++r) line[r] = line[r] * factor * scales.column(tile.row + r);
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float column = scales.column(tile.row + r);
    const bool wide = need == Sum::wide || (!std::isnormal(column) && column != 0);
    if (wide) line[r] = exact_dot(p, scales, tile.token + t, tile.row + r);
    if (need == Sum::nan || has_nan || row_is_nan[r]) line[r] = kNan;
  }
  if (p.bias.empty()) return;
  for (int64_t r = 0; r < tile.rows; ++r) line[r] += p.bias[tile.row + r];
}

// Writes one tile's C into `c` [tokens][kMaxTileRows], bias included. b_scale: [blocks], of the tile; a: the decoded tokens.
template <class Scales>
void compute_tile(const Problem& p, const Scales& scales, const Kernels& kernels, const Tile& tile, const float* b_scale, float* a, float* c) {
  float factor[kMaxFactors];
  Sum need[kMaxTokens] = {};
  bool has_nan[kMaxTokens] = {};
  uint8_t row_is_nan[kMaxTileRows] = {};
  const int tokens = static_cast<int>(tile.tokens);
  std::fill_n(c, tokens * kMaxTileRows, 0.0f);
  for (int64_t first = 0; first < p.blocks(); first += chunk_blocks(tokens)) {
    const int64_t blocks = std::min(chunk_blocks(tokens), p.blocks() - first);
    for (int t = 0; t < tokens; ++t)
      need[t] = std::max(need[t], combine_scales(p, scales, tile.token + t, first, blocks, b_scale + first, kernels.a_factor, factor + t * blocks));
    kernels.decode({p.a + tile.token * p.k + first * kBlock, p.k, factor}, blocks, tokens, a, has_nan);
    kernels.dot({p.b + tile.row * p.k + first * kBlock, p.k, tile.rows, blocks, a, c, row_is_nan}, tokens);
  }
  for (int t = 0; t < tokens; ++t) finish(p, scales, tile, t, kernels.out_factor, need[t], has_nan[t], row_is_nan, c + t * kMaxTileRows);
}

// ---- store ----

template <class T>
void store(const float* c, const Tile& tile, int64_t n, void* out) {
  for (int64_t t = 0; t < tile.tokens; ++t) {
    T* line = static_cast<T*>(out) + (tile.token + t) * n + tile.row;
    for (int64_t r = 0; r < tile.rows; ++r) line[r] = static_cast<T>(c[t * kMaxTileRows + r]);
  }
}

void store(const float* c, const Tile& tile, int64_t n, void* out, ScalarType dtype) {
  if (dtype == ScalarType::Float) return store<float>(c, tile, n, out);
  if (dtype == ScalarType::BFloat16) return store<torch::headeronly::BFloat16>(c, tile, n, out);
  store<torch::headeronly::Half>(c, tile, n, out);
}

// ---- launch ----

const Kernels& kernels_for(CpuIsa isa) {
#if MORI_X86
  if (isa == CpuIsa::avx2) return avx2::kKernels;
#endif
  return generic::kKernels;
}

int64_t grain(int64_t item_products) { return std::max<int64_t>(1, kGrainProducts / std::max<int64_t>(1, item_products)); }

template <class Scales>
void tile_scales(const Problem& p, const Scales& scales, int64_t row, int64_t rows, std::vector<float>& b_scale) {
  for (int64_t j = 0; j < p.blocks(); ++j)
    b_scale[j] = useful_scale(scales.b(row / Scales::kGroup, j), p.b + row * p.k + j * kBlock, rows, p.k);
}

// Token groups: tiles of B times a few tokens at a time, weights decoded in registers.
template <class Scales>
void run_groups(const Problem& p, const Scales& scales, const Kernels& kernels, const Tensor& out) {
  constexpr int64_t group = Scales::kGroup;
  void* result = out.mutable_data_ptr();
  const ScalarType dtype = out.scalar_type();
  const int64_t tiles = ceil_div(p.n, group), bands = ceil_div(p.m, kBandTokens);
  torch::stable::parallel_for(0, tiles * bands, grain(group * std::min(p.m, kBandTokens) * p.k), [&](int64_t begin, int64_t end) {
    const KeepSubnormals keep;
    alignas(64) float a[kDecodedFloats];
    alignas(64) float c[kMaxTokens * kMaxTileRows];
    std::vector<float> b_scale(p.blocks());
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / bands * group, rows = std::min(group, p.n - row), first = item % bands * kBandTokens;
      tile_scales(p, scales, row, rows, b_scale);
      const int64_t band = std::min(kBandTokens, p.m - first), passes = ceil_div(band, kMaxTokens);
      for (int64_t pass = 0; pass < passes; ++pass) {
        const int64_t token = first + band * pass / passes, next = first + band * (pass + 1) / passes;
        const Tile tile = {row, rows, token, next - token};
        compute_tile(p, scales, kernels, tile, b_scale.data(), a, c);
        store(c, tile, p.n, result, dtype);
      }
    }
  });
}

// ---- panels: both sides decoded, each times its own scales ----

constexpr int64_t kSpanFloats = kSpan * kBlock;
const uint8_t kNoNan[kMaxTileRows] = {};

bool plain(float scale) { return scale == 0 || (std::fabs(scale) >= kLeastSide && std::fabs(scale) <= kMostSide); }

// A band of tokens, decoded once for every tile: [span][group][block][4][tokens of the group][kLanes].
struct DecodedBand {
  int64_t first, tokens, groups;
  std::vector<float> storage;
  std::vector<uint8_t> is_plain;  // [groups], false where a scale or a code needs compute_tile
  int64_t token(int64_t g) const { return tokens * g / groups; }
  float* at(int64_t span, int64_t g) { return aligned() + (span * tokens + token(g)) * kSpanFloats; }
  float* aligned() { return storage.data() + (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) % 64 / sizeof(float); }
};

template <class Scales>
void decode_group(const Problem& p, const Scales& scales, const Kernels& kernels, DecodedBand& band, int64_t g) {
  const int64_t token = band.first + band.token(g), tokens = band.first + band.token(g + 1) - token;
  float factor[kPanelTokens * kSpan];
  bool has_nan[kMaxTokens] = {}, all_plain = true;
  for (int64_t first = 0; first < p.blocks(); first += kSpan) {
    const int64_t blocks = std::min(kSpan, p.blocks() - first);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t j = 0; j < blocks; ++j) {
        const float scale = useful_scale(scales.a(token + t, first + j), p.a + (token + t) * p.k + (first + j) * kBlock, 1, p.k);
        all_plain &= plain(scale);
        factor[t * blocks + j] = scale;
      }
    kernels.decode({p.a + token * p.k + first * kBlock, p.k, factor}, blocks, static_cast<int>(tokens), band.at(first / kSpan, g), has_nan);
  }
  band.is_plain[g] = all_plain && std::none_of(has_nan, has_nan + tokens, [](bool nan) { return nan; });
}

// Sums of a tile of B and every token of the band, to total [tokens][kMaxTileRows]; false where B holds NaN. The decoded rows,
// 16 KB, stay in L1 while the tokens go past.
bool multiply_tile(const Problem& p, const Kernels& kernels, DecodedBand& band, int64_t row, int64_t rows, const float* b_scale, float* total) {
  alignas(64) float panel[kPanelRows * kSpanFloats];
  float factor[kPanelRows * kSpan];
  bool has_nan[kMaxTokens] = {};
  std::fill_n(total, band.tokens * kMaxTileRows, 0.0f);
  for (int64_t first = 0; first < p.blocks(); first += kSpan) {
    const int64_t blocks = std::min(kSpan, p.blocks() - first);
    for (int r = 0; r < kPanelRows; ++r) std::copy_n(b_scale + first, blocks, factor + r * blocks);
    for (int64_t r = 0; r < rows; r += kPanelRows) {
      const int panel_rows = static_cast<int>(std::min<int64_t>(kPanelRows, rows - r));
      kernels.decode({p.b + (row + r) * p.k + first * kBlock, p.k, factor}, blocks, panel_rows, panel, has_nan);
      for (int64_t g = 0; g < band.groups; ++g) {
        const int64_t token = band.token(g), tokens = band.token(g + 1) - token;
        kernels.multiply(panel, panel_rows, band.at(first / kSpan, g), static_cast<int>(tokens), blocks, total + token * kMaxTileRows + r);
      }
    }
  }
  return std::none_of(has_nan, has_nan + kPanelRows, [](bool nan) { return nan; });
}

template <class Scales>
void run_panels(const Problem& p, const Scales& scales, const Kernels& kernels, const Tensor& out) {
  constexpr int64_t group = Scales::kGroup;
  void* result = out.mutable_data_ptr();
  const ScalarType dtype = out.scalar_type();
  const int64_t spans = ceil_div(p.blocks(), kSpan);
  DecodedBand band;
  for (band.first = 0; band.first < p.m; band.first += kBandTokens) {
    band.tokens = std::min(kBandTokens, p.m - band.first);
    band.groups = ceil_div(band.tokens, kPanelTokens);
    band.storage.resize(spans * band.tokens * kSpanFloats + 16);
    band.is_plain.resize(band.groups);
    torch::stable::parallel_for(0, band.groups, grain(kPanelTokens * p.k), [&](int64_t begin, int64_t end) {
      const KeepSubnormals keep;
      for (int64_t g = begin; g < end; ++g) decode_group(p, scales, kernels, band, g);
    });
    torch::stable::parallel_for(0, ceil_div(p.n, group), grain(group * band.tokens * p.k), [&](int64_t begin, int64_t end) {
      const KeepSubnormals keep;
      alignas(64) float a[kDecodedFloats];
      std::vector<float> total(band.tokens * kMaxTileRows), b_scale(p.blocks());
      for (int64_t row = begin * group; row < std::min(end * group, p.n); row += group) {
        const int64_t rows = std::min(group, p.n - row);
        tile_scales(p, scales, row, rows, b_scale);
        const bool plain_tile = std::all_of(b_scale.begin(), b_scale.end(), plain) && multiply_tile(p, kernels, band, row, rows, b_scale.data(), total.data());
        for (int64_t g = 0; g < band.groups; ++g) {
          const int64_t token = band.token(g);
          const Tile tile = {row, rows, band.first + token, band.token(g + 1) - token};
          float* c = total.data() + token * kMaxTileRows;
          if (plain_tile && band.is_plain[g])
            for (int64_t t = 0; t < tile.tokens; ++t) finish(p, scales, tile, t, 1, Sum::fast, false, kNoNan, c + t * kMaxTileRows);
          else
            compute_tile(p, scales, kernels, tile, b_scale.data(), a, c);
          store(c, tile, p.n, result, dtype);
        }
      }
    });
  }
}

// Same bits from each.
constexpr Route kRoutes[] = {
    {"one pass", [](const RouteDims& d) { return d[0] <= kMaxTokens; }, "up to 5 tokens: the weight is read and decoded once, in registers"},
    {"token groups", [](const RouteDims& d) { return d[0] < kPanelsFrom; }, "3 to 5 tokens at a time over a tile of the weight in L2"},
    {"panels", nullptr, "from 12 tokens both sides decoded ahead: 32x7168x2048 in 10 ms, token groups 13 ms (blockscale: token groups)"},
};
constexpr size_t kPanelsRoute = 2;
const RegisterRoutes kRegistered[] = {
    {"mxfp8", "cpu", kRoutes}, {"mxfp8_raw", "cpu", kRoutes}, {"mxfp8_linear", "cpu", kRoutes}, {"scaled_gemm", "cpu", kRoutes}};

template <class Scales>
void run(const Problem& p, const Scales& scales, const Tensor& out) {
  const Kernels& kernels = kernels_for(cpu_isa());
  if (Scales::kPanels && pick_route(kRoutes, {p.m, p.n, p.k}) == kPanelsRoute) return run_panels(p, scales, kernels, out);
  run_groups(p, scales, kernels, out);
}

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

std::vector<float> to_fp32(const Tensor& t) {
  const Tensor values = dense(t);
  const int64_t n = values.numel();
  std::vector<float> out(n);
  if (values.scalar_type() == ScalarType::Float) std::copy_n(data<float>(values), n, out.data());
  if (values.scalar_type() == ScalarType::BFloat16) std::copy_n(data<torch::headeronly::BFloat16>(values), n, out.data());
  if (values.scalar_type() == ScalarType::Half) std::copy_n(data<torch::headeronly::Half>(values), n, out.data());
  return out;
}

}  // namespace

void Cpu::gemm(const GemmShape& shape, Quant quant, const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, const Bias& bias,
               const Tensor& out) {
  const Tensor codes_a = dense(a), codes_b = dense(b), sa = dense(a_scale), sb = dense(b_scale);
  Problem p = {shape.m, shape.n, shape.k, data<uint8_t>(codes_a), data<uint8_t>(codes_b), {}};
  if (bias) p.bias = to_fp32(*bias);
  switch (quant) {
    case Quant::mxfp8_raw: return run(p, RawScales{data<uint8_t>(sa), data<uint8_t>(sb), p.blocks()}, out);
    case Quant::mxfp8:
      return run(p, PackedScales{data<uint8_t>(sa), data<int32_t>(sb), ceil_div(p.m, kPackRows) * (kPackRows / 4), ceil_div(p.n, kBlock)}, out);
    case Quant::ptpc: return run(p, PtpcScales{data<float>(sa), data<float>(sb)}, out);
    case Quant::blockscale: return run(p, BlockScales{data<float>(sa), data<float>(sb), ceil_div(p.k, kBlockscale)}, out);
  }
}

void Cpu::linear(const GemmShape& shape, const Tensor& x, const Tensor& b, const Tensor& b_scale, const Bias& bias, Rounding rounding, const Tensor& out) {
  const Tensor codes = torch::stable::new_empty(x, {shape.m, shape.k}, ScalarType::Float8_e4m3fn);
  const Tensor scale = torch::stable::new_empty(x, {shape.m, shape.k / kBlock}, ScalarType::Byte);
  quantize(x, rounding, codes, scale);
  gemm(shape, Quant::mxfp8_raw, codes, b, scale, b_scale, bias, out);
}

}  // namespace mori::mxfp8

STABLE_TORCH_LIBRARY_IMPL(mori, CPU, m) { MORI_REGISTER_MXFP8(m, mori::mxfp8::Cpu); }
