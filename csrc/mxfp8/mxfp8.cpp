// The MXFP8 family's argument checks (see mxfp8.h for the formats).
#include "mxfp8.h"

namespace mori::mxfp8 {
namespace {

constexpr auto kE4m3 = ScalarType::Float8_e4m3fn;
constexpr std::initializer_list<ScalarType> kScaleBytes = {ScalarType::Float8_e8m0fnu, ScalarType::Byte};
constexpr std::initializer_list<ScalarType> kFloats = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};

Sizes with_last(Sizes sizes, int64_t last) {
  sizes.back() = last;
  return sizes;
}

int64_t rows_of(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  return rows;
}

void check_k(const char* op, const char* name, const Tensor& t) {
  MORI_CHECK(t.size(-1) % kBlock == 0, op, ": K, the last dimension of ", name, ", must be a multiple of ", kBlock, ", got ", describe(t));
}

void check_bias(const char* op, const std::optional<Tensor>& bias, int64_t n, const Tensor& a) {
  if (!bias) return;
  check_dtype(op, "bias", *bias, kFloats);
  check_sizes(op, "bias", *bias, {n}, "N");
  check_same_device(op, "bias", *bias, "a", a);
}

// B and its scale, shared by the GEMMs and by mxfp8_linear.
void check_b(const char* op, const Tensor& b, const Tensor& first, const char* first_name) {
  check_dtype(op, "b", b, {kE4m3});
  MORI_CHECK(b.dim() == 2, op, ": b must be [N, K], got ", describe(b));
  MORI_CHECK(b.size(1) == first.size(-1), op, ": b must have the K of ", first_name, ", ", first.size(-1), ", got ", describe(b));
  check_same_device(op, "b", b, first_name, first);
}

}  // namespace

Quant parse_quant(const char* op, const std::string& quant) {
  if (quant == "ptpc") return Quant::ptpc;
  if (quant == "blockscale") return Quant::blockscale;
  if (quant == "mxfp8") return Quant::mxfp8;
  if (quant == "mxfp8_raw") return Quant::mxfp8_raw;
  fail(op, ": quant must be 'ptpc', 'blockscale', 'mxfp8' or 'mxfp8_raw', got '", quant, "'");
}

Rounding parse_rounding(const char* op, const std::string& rounding) {
  if (rounding == "rceil") return Rounding::rceil;
  if (rounding == "floor") return Rounding::floor;
  fail(op, ": rounding must be 'rceil' or 'floor', got '", rounding, "'");
}

GemmShape check_gemm(const char* op, Quant quant, const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                     const std::optional<Tensor>& bias) {
  check_dtype(op, "a", a, {kE4m3});
  MORI_CHECK(a.dim() >= 1, op, ": a must be [.., K], got ", describe(a));
  check_k(op, "a", a);
  check_b(op, b, a, "a");
  const int64_t m = rows_of(a), n = b.size(0), k = b.size(1), blocks = k / kBlock;
  switch (quant) {
    case Quant::mxfp8_raw:
      check_dtype(op, "a_scale", a_scale, kScaleBytes);
      check_dtype(op, "b_scale", b_scale, kScaleBytes);
      check_sizes(op, "a_scale", a_scale, with_last(sizes_of(a), blocks), "a's leading dimensions, K/32");
      check_sizes(op, "b_scale", b_scale, {ceil_div(n, kBlock), blocks}, "ceil(N/32), K/32");
      break;
    case Quant::mxfp8:
      check_dtype(op, "a_scale", a_scale, {ScalarType::Int});
      check_dtype(op, "b_scale", b_scale, {ScalarType::Int});
      check_sizes(op, "a_scale", a_scale, {ceil_div(m, kPackRows) * (kPackRows / 4) * blocks}, "packed: ceil64(M) * K/128, see mxfp8_pack_a_scale");
      check_sizes(op, "b_scale", b_scale, {blocks * ceil_div(n, kBlock)}, "packed: K/32 * ceil(N/32), see mxfp8_pack_b_scale");
      break;
    case Quant::ptpc:
      check_dtype(op, "a_scale", a_scale, {ScalarType::Float});
      check_dtype(op, "b_scale", b_scale, {ScalarType::Float});
      check_sizes(op, "a_scale", a_scale, Sizes(a.sizes().begin(), a.sizes().end() - 1), "a's leading dimensions");
      check_sizes(op, "b_scale", b_scale, {n}, "N");
      break;
    case Quant::blockscale:
      check_dtype(op, "a_scale", a_scale, {ScalarType::Float});
      check_dtype(op, "b_scale", b_scale, {ScalarType::Float});
      check_sizes(op, "a_scale", a_scale, with_last(sizes_of(a), ceil_div(k, kBlockscale)), "a's leading dimensions, ceil(K/128)");
      check_sizes(op, "b_scale", b_scale, {ceil_div(n, kBlockscale), ceil_div(k, kBlockscale)}, "ceil(N/128), ceil(K/128)");
      break;
  }
  check_same_device(op, "a_scale", a_scale, "a", a);
  check_same_device(op, "b_scale", b_scale, "a", a);
  check_bias(op, bias, n, a);
  return {m, n, k, with_last(sizes_of(a), n)};
}

GemmShape check_linear(const Tensor& x, const Tensor& b, const Tensor& b_scale, const std::optional<Tensor>& bias) {
  constexpr const char* op = "mxfp8_linear";
  check_dtype(op, "x", x, kFloats);
  MORI_CHECK(x.dim() >= 1, op, ": x must be [.., K], got ", describe(x));
  check_k(op, "x", x);
  check_b(op, b, x, "x");
  const int64_t n = b.size(0), k = b.size(1);
  check_dtype(op, "b_scale", b_scale, kScaleBytes);
  check_sizes(op, "b_scale", b_scale, {ceil_div(n, kBlock), k / kBlock}, "ceil(N/32), K/32");
  check_same_device(op, "b_scale", b_scale, "x", x);
  check_bias(op, bias, n, x);
  return {rows_of(x), n, k, with_last(sizes_of(x), n)};
}

QuantizeShape check_quantize(const Tensor& x) {
  constexpr const char* op = "mxfp8_quantize";
  check_dtype(op, "x", x, kFloats);
  MORI_CHECK(x.dim() >= 1, op, ": x must be [.., K], got ", describe(x));
  check_k(op, "x", x);
  return {rows_of(x), x.size(-1), sizes_of(x), with_last(sizes_of(x), x.size(-1) / kBlock)};
}

QuantizeShape check_quantize_weight(const Tensor& w) {
  constexpr const char* op = "mxfp8_quantize_weight";
  check_dtype(op, "w", w, kFloats);
  MORI_CHECK(w.dim() == 2, op, ": w must be [N, K], got ", describe(w));
  check_k(op, "w", w);
  return {w.size(0), w.size(1), sizes_of(w), {ceil_div(w.size(0), kBlock), w.size(1) / kBlock}};
}

DequantizeShape check_dequantize(const Tensor& codes, const Tensor& scale) {
  constexpr const char* op = "mxfp8_dequantize";
  check_dtype(op, "codes", codes, {kE4m3});
  MORI_CHECK(codes.dim() >= 1, op, ": codes must be [.., K], got ", describe(codes));
  check_k(op, "codes", codes);
  check_dtype(op, "scale", scale, kScaleBytes);
  check_same_device(op, "scale", scale, "codes", codes);
  const Sizes rowwise = with_last(sizes_of(codes), codes.size(-1) / kBlock);
  if (sizes_of(scale) == rowwise) return {rows_of(codes), codes.size(-1), false};
  Sizes weight = rowwise;
  if (codes.dim() == 2) weight[0] = ceil_div(codes.size(0), kBlock);
  MORI_CHECK(codes.dim() == 2 && sizes_of(scale) == weight, op, ": scale must have shape ", to_string(rowwise), " (1x32 blocks)",
             codes.dim() == 2 ? " or " + to_string(weight) + " (32x32 blocks)" : "", ", got ", describe(scale));
  return {codes.size(0), codes.size(1), true};
}

PackShape check_pack_a(const Tensor& scale) {
  constexpr const char* op = "mxfp8_pack_a_scale";
  check_dtype(op, "scale", scale, kScaleBytes);
  MORI_CHECK(scale.dim() >= 1, op, ": scale must be [.., K/32], got ", describe(scale));
  const int64_t m = rows_of(scale), blocks = scale.size(-1);
  return {m, blocks, ceil_div(m, kPackRows) * (kPackRows / 4) * blocks};
}

PackShape check_pack_b(const Tensor& scale) {
  constexpr const char* op = "mxfp8_pack_b_scale";
  check_dtype(op, "scale", scale, kScaleBytes);
  MORI_CHECK(scale.dim() == 2, op, ": scale must be [ceil(N/32), K/32], got ", describe(scale));
  return {scale.size(0), scale.size(1), scale.size(0) * scale.size(1)};
}

}  // namespace mori::mxfp8
