// The argument checks of the Q8_0 projection (see gr.h for the contract).
#include "gr.h"

#include <cmath>

namespace mori::gr {
namespace {

constexpr std::initializer_list<ScalarType> kFloats = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};

Q8Shape check_q8(const char* op, const Tensor& w) {
  check_dtype(op, "w", w, {ScalarType::Byte});
  MORI_CHECK(w.dim() == 2 && w.size(1) % kBlockBytes == 0, op, ": w must be Q8_0 bytes [N, K/32 * 34], got ", describe(w));
  return {w.size(0), w.size(1) / kBlockBytes * kBlock};
}

}  // namespace

DownShape check_down(const Tensor& x, const Tensor& w, const std::optional<Tensor>& norm_weight, double eps, int64_t hc, const std::string& variant) {
  constexpr const char* op = "gr_down";
  check_dtype(op, "x", x, kFloats);
  MORI_CHECK(x.dim() == 2, op, ": x must be [ntok, K], got ", describe(x));
  const Q8Shape weight = check_q8(op, w);
  MORI_CHECK(x.size(1) == weight.k, op, ": x must have the K of w, ", weight.k, ", got ", describe(x));
  check_same_device(op, "w", w, "x", x);
  const char* known[] = {"auto", "auto_8", "4_4", "4_4_r2", "8_8", "8_8_r2"};
  bool found = false;
  for (const char* name : known) found |= variant == name;
  MORI_CHECK(found, op, ": variant must be 'auto', 'auto_8', '4_4', '4_4_r2', '8_8' or '8_8_r2', got '", variant, "'");
  if (!norm_weight) return {x.size(0), weight.n, weight.k, 0};
  check_dtype(op, "norm_weight", *norm_weight, kFloats);
  check_sizes(op, "norm_weight", *norm_weight, {weight.k}, "K");
  check_same_device(op, "norm_weight", *norm_weight, "x", x);
  MORI_CHECK(hc > 0 && weight.k % hc == 0, op, ": hc must be positive and divide K = ", weight.k, ", got ", hc);
  MORI_CHECK(std::isfinite(eps) && eps >= 0, op, ": eps must be finite and not negative, got ", eps);
  return {x.size(0), weight.n, weight.k, hc};
}

Q8Shape check_q8_quantize(const Tensor& w) {
  constexpr const char* op = "q8_0_quantize";
  check_dtype(op, "w", w, kFloats);
  MORI_CHECK(w.dim() == 2 && w.size(1) % kBlock == 0, op, ": w must be [N, K] with K a multiple of ", kBlock, ", got ", describe(w));
  return {w.size(0), w.size(1)};
}

Q8Shape check_q8_dequantize(const Tensor& w) { return check_q8("q8_0_dequantize", w); }

}  // namespace mori::gr

// The checks alone, of the functional form or, with `out`, of the .out form: for the launchers of mori_ops/mps.py.
namespace mori::gr {
namespace {

constexpr std::initializer_list<ScalarType> kBytes = {ScalarType::Byte};

void quantize(const Tensor& w, std::optional<Tensor> out) {
  const Q8Shape shape = check_q8_quantize(w);
  if (out) check_out("q8_0_quantize", "out", *out, {shape.n, shape.k / kBlock * kBlockBytes}, kBytes, {&w});
}

void dequantize(const Tensor& w, std::optional<ScalarType> out_dtype, std::optional<Tensor> out) {
  const Q8Shape shape = check_q8_dequantize(w);
  check_out_dtype("q8_0_dequantize", out_dtype, ScalarType::Float);
  if (out) check_out("q8_0_dequantize", "out", *out, {shape.n, shape.k}, kFloats, {&w});
}

void down(const Tensor& x, const Tensor& w, std::optional<Tensor> norm_weight, double eps, int64_t hc, std::string variant, std::optional<Tensor> out) {
  const DownShape shape = check_down(x, w, norm_weight, eps, hc, variant);
  if (out) check_out("gr_down", "out", *out, {shape.ntok, shape.n}, {ScalarType::Float}, {&x, &w, norm_weight ? &*norm_weight : nullptr});
}

}  // namespace
}  // namespace mori::gr

STABLE_TORCH_LIBRARY_IMPL(mori, CompositeExplicitAutograd, m) {
  m.impl("_q8_0_quantize_check", TORCH_BOX(&mori::gr::quantize));
  m.impl("_q8_0_dequantize_check", TORCH_BOX(&mori::gr::dequantize));
  m.impl("_gr_down_check", TORCH_BOX(&mori::gr::down));
}
