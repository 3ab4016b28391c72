// The functional and the .out form of each Q8_0 operator around a backend's run functions: checks, allocation, call.
// A backend is a struct with static quantize(w, out, shape), dequantize(w, out, shape) and
// down(x, w, norm_weight, eps, out, shape).
#pragma once

#include "gr.h"

namespace mori::gr {

template <class Backend>
struct Ops {
  static Sizes byte_sizes(const Q8Shape& shape) { return {shape.n, shape.k / kBlock * kBlockBytes}; }

  static Tensor quantize(const Tensor& w) {
    const Q8Shape shape = check_q8_quantize(w);
    const Tensor out = torch::stable::new_empty(w, byte_sizes(shape), ScalarType::Byte);
    Backend::quantize(w, out, shape);
    return out;
  }

  static void quantize_out(const Tensor& w, const Tensor& out) {
    const Q8Shape shape = check_q8_quantize(w);
    check_out("q8_0_quantize", "out", out, byte_sizes(shape), {ScalarType::Byte}, {&w});
    Backend::quantize(w, out, shape);
  }

  static Tensor dequantize(const Tensor& w, std::optional<ScalarType> out_dtype) {
    const Q8Shape shape = check_q8_dequantize(w);
    const ScalarType dtype = check_out_dtype("q8_0_dequantize", out_dtype, ScalarType::Float);
    const Tensor out = torch::stable::new_empty(w, Sizes{shape.n, shape.k}, dtype);
    Backend::dequantize(w, out, shape);
    return out;
  }

  static void dequantize_out(const Tensor& w, const Tensor& out) {
    const Q8Shape shape = check_q8_dequantize(w);
    check_out("q8_0_dequantize", "out", out, {shape.n, shape.k}, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}, {&w});
    Backend::dequantize(w, out, shape);
  }

  static Tensor down(const Tensor& x, const Tensor& w, const std::optional<Tensor>& norm_weight, double eps, int64_t hc, std::string variant) {
    const DownShape shape = check_down(x, w, norm_weight, eps, hc, variant);
    const Tensor out = torch::stable::new_empty(x, Sizes{shape.ntok, shape.n}, ScalarType::Float);
    Backend::down(x, w, norm_weight, eps, out, shape);
    return out;
  }

  static void down_out(const Tensor& x, const Tensor& w, const std::optional<Tensor>& norm_weight, double eps, int64_t hc, std::string variant,
                       const Tensor& out) {
    const DownShape shape = check_down(x, w, norm_weight, eps, hc, variant);
    check_out("gr_down", "out", out, {shape.ntok, shape.n}, {ScalarType::Float}, {&x, &w, norm_weight ? &*norm_weight : nullptr});
    Backend::down(x, w, norm_weight, eps, out, shape);
  }
};

}  // namespace mori::gr

// Registers every operator of the family; goes inside a backend's STABLE_TORCH_LIBRARY_IMPL block (TORCH_BOX wants names).
#define MORI_REGISTER_GR(m, Backend)                                 \
  using MoriGr = ::mori::gr::Ops<Backend>;                           \
  m.impl("q8_0_quantize", TORCH_BOX(&MoriGr::quantize));             \
  m.impl("q8_0_quantize.out", TORCH_BOX(&MoriGr::quantize_out));     \
  m.impl("q8_0_dequantize", TORCH_BOX(&MoriGr::dequantize));         \
  m.impl("q8_0_dequantize.out", TORCH_BOX(&MoriGr::dequantize_out)); \
  m.impl("gr_down", TORCH_BOX(&MoriGr::down));                       \
  m.impl("gr_down.out", TORCH_BOX(&MoriGr::down_out))
