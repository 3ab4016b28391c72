// The functional and the .out form of each MXFP8 operator around a backend's run functions: checks, allocation, call.
// A backend is a struct of static functions:
//   quantize(x, rounding, codes, scale)           1x32 blocks          quantize_weight(w, rounding, codes, scale)  32x32 blocks
//   dequantize(shape, codes, scale, out)          pack_a(shape, scale, out), pack_b(shape, scale, out)
//   gemm(shape, quant, a, b, a_scale, b_scale, bias, out)
//   linear(shape, x, b, b_scale, bias, rounding, out)
#pragma once

#include "mxfp8.h"

namespace mori::mxfp8 {

using Bias = std::optional<Tensor>;

template <class Backend>
struct Ops {
  static constexpr auto kCodes = ScalarType::Float8_e4m3fn;
  static constexpr auto kScale = ScalarType::Float8_e8m0fnu;

  using Quantize = void(const Tensor& x, Rounding rounding, const Tensor& codes, const Tensor& scale);

  static std::tuple<Tensor, Tensor> quantize_new(const char* op, const QuantizeShape& shape, const Tensor& x, const std::string& rounding, Quantize* run) {
    const Rounding mode = parse_rounding(op, rounding);
    Tensor codes = torch::stable::new_empty(x, shape.code_sizes, kCodes), scale = torch::stable::new_empty(x, shape.scale_sizes, kScale);
    run(x, mode, codes, scale);
    return {codes, scale};
  }

  static void quantize_into(const char* op, const QuantizeShape& shape, const Tensor& x, const std::string& rounding, const Tensor& codes,
                            const Tensor& scale, Quantize* run) {
    const Rounding mode = parse_rounding(op, rounding);
    check_out(op, "codes", codes, shape.code_sizes, {kCodes}, {&x});
    check_out(op, "scale", scale, shape.scale_sizes, {kScale, ScalarType::Byte}, {&x, &codes});
    run(x, mode, codes, scale);
  }

  static std::tuple<Tensor, Tensor> quantize(const Tensor& x, std::string rounding) {
    return quantize_new("mxfp8_quantize", check_quantize(x), x, rounding, Backend::quantize);
  }
  static void quantize_out(const Tensor& x, std::string rounding, const Tensor& codes, const Tensor& scale) {
    quantize_into("mxfp8_quantize", check_quantize(x), x, rounding, codes, scale, Backend::quantize);
  }
  static std::tuple<Tensor, Tensor> quantize_weight(const Tensor& w, std::string rounding) {
    return quantize_new("mxfp8_quantize_weight", check_quantize_weight(w), w, rounding, Backend::quantize_weight);
  }
  static void quantize_weight_out(const Tensor& w, std::string rounding, const Tensor& codes, const Tensor& scale) {
    quantize_into("mxfp8_quantize_weight", check_quantize_weight(w), w, rounding, codes, scale, Backend::quantize_weight);
  }

  static Tensor dequantize(const Tensor& codes, const Tensor& scale, std::optional<ScalarType> out_dtype) {
    const DequantizeShape shape = check_dequantize(codes, scale);
    Tensor out = torch::stable::new_empty(codes, sizes_of(codes), check_out_dtype("mxfp8_dequantize", out_dtype, ScalarType::BFloat16));
    Backend::dequantize(shape, codes, scale, out);
    return out;
  }

  static void dequantize_out(const Tensor& codes, const Tensor& scale, const Tensor& out) {
    const DequantizeShape shape = check_dequantize(codes, scale);
    check_float_out("mxfp8_dequantize", out, sizes_of(codes), {&codes, &scale});
    Backend::dequantize(shape, codes, scale, out);
  }

  static Tensor pack_a(const Tensor& scale) { return pack_new(check_pack_a(scale), scale, Backend::pack_a); }
  static void pack_a_out(const Tensor& scale, const Tensor& out) { pack_into("mxfp8_pack_a_scale", check_pack_a(scale), scale, out, Backend::pack_a); }
  static Tensor pack_b(const Tensor& scale) { return pack_new(check_pack_b(scale), scale, Backend::pack_b); }
  static void pack_b_out(const Tensor& scale, const Tensor& out) { pack_into("mxfp8_pack_b_scale", check_pack_b(scale), scale, out, Backend::pack_b); }

  static Tensor gemm(const char* op, Quant quant, const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, const Bias& bias,
                     std::optional<ScalarType> out_dtype) {
    const GemmShape shape = check_gemm(op, quant, a, b, a_scale, b_scale, bias);
    Tensor out = torch::stable::new_empty(a, shape.out_sizes, check_out_dtype(op, out_dtype, ScalarType::BFloat16));
    Backend::gemm(shape, quant, a, b, a_scale, b_scale, bias, out);
    return out;
  }

  static void gemm_out(const char* op, Quant quant, const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                       const Bias& bias, const Tensor& out) {
    const GemmShape shape = check_gemm(op, quant, a, b, a_scale, b_scale, bias);
    check_float_out(op, out, shape.out_sizes, {&a, &b, &a_scale, &b_scale, bias ? &*bias : nullptr});
    Backend::gemm(shape, quant, a, b, a_scale, b_scale, bias, out);
  }

  static Tensor packed(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, Bias bias, std::optional<ScalarType> out_dtype) {
    return gemm("mxfp8", Quant::mxfp8, a, b, a_scale, b_scale, bias, out_dtype);
  }
  static void packed_out(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, Bias bias, const Tensor& out) {
    gemm_out("mxfp8", Quant::mxfp8, a, b, a_scale, b_scale, bias, out);
  }
  static Tensor raw(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, Bias bias, std::optional<ScalarType> out_dtype) {
    return gemm("mxfp8_raw", Quant::mxfp8_raw, a, b, a_scale, b_scale, bias, out_dtype);
  }
  static void raw_out(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, Bias bias, const Tensor& out) {
    gemm_out("mxfp8_raw", Quant::mxfp8_raw, a, b, a_scale, b_scale, bias, out);
  }
  static Tensor scaled(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, std::string quant, Bias bias,
                       std::optional<ScalarType> out_dtype) {
    return gemm("scaled_gemm", parse_quant("scaled_gemm", quant), a, b, a_scale, b_scale, bias, out_dtype);
  }
  static void scaled_out(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, std::string quant, Bias bias,
                         const Tensor& out) {
    gemm_out("scaled_gemm", parse_quant("scaled_gemm", quant), a, b, a_scale, b_scale, bias, out);
  }

  static Tensor linear(const Tensor& x, const Tensor& b, const Tensor& b_scale, Bias bias, std::string rounding, std::optional<ScalarType> out_dtype) {
    const GemmShape shape = check_linear(x, b, b_scale, bias);
    const Rounding mode = parse_rounding("mxfp8_linear", rounding);
    Tensor out = torch::stable::new_empty(x, shape.out_sizes, check_out_dtype("mxfp8_linear", out_dtype, x.scalar_type()));
    Backend::linear(shape, x, b, b_scale, bias, mode, out);
    return out;
  }
  static void linear_out(const Tensor& x, const Tensor& b, const Tensor& b_scale, Bias bias, std::string rounding, const Tensor& out) {
    const GemmShape shape = check_linear(x, b, b_scale, bias);
    const Rounding mode = parse_rounding("mxfp8_linear", rounding);
    check_float_out("mxfp8_linear", out, shape.out_sizes, {&x, &b, &b_scale, bias ? &*bias : nullptr});
    Backend::linear(shape, x, b, b_scale, bias, mode, out);
  }

 private:
  using Pack = void(const PackShape& shape, const Tensor& scale, const Tensor& out);

  static Tensor pack_new(const PackShape& shape, const Tensor& scale, Pack* run) {
    Tensor out = torch::stable::new_empty(scale, {shape.dwords}, ScalarType::Int);
    run(shape, scale, out);
    return out;
  }
  static void pack_into(const char* op, const PackShape& shape, const Tensor& scale, const Tensor& out, Pack* run) {
    check_out(op, "out", out, {shape.dwords}, {ScalarType::Int}, {&scale});
    run(shape, scale, out);
  }
  static void check_float_out(const char* op, const Tensor& out, const Sizes& sizes, std::initializer_list<const Tensor*> inputs) {
    check_out(op, "out", out, sizes, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float}, inputs);
  }
};

}  // namespace mori::mxfp8

// Registers every operator of the family; goes inside a backend's STABLE_TORCH_LIBRARY_IMPL block (TORCH_BOX wants names).
#define MORI_REGISTER_MXFP8(m, Backend)                                \
  using MoriMxfp8 = ::mori::mxfp8::Ops<Backend>;                       \
  m.impl("mxfp8_quantize", TORCH_BOX(&MoriMxfp8::quantize));           \
  m.impl("mxfp8_quantize.out", TORCH_BOX(&MoriMxfp8::quantize_out));   \
  m.impl("mxfp8_quantize_weight", TORCH_BOX(&MoriMxfp8::quantize_weight));          \
  m.impl("mxfp8_quantize_weight.out", TORCH_BOX(&MoriMxfp8::quantize_weight_out));  \
  m.impl("mxfp8_dequantize", TORCH_BOX(&MoriMxfp8::dequantize));       \
  m.impl("mxfp8_dequantize.out", TORCH_BOX(&MoriMxfp8::dequantize_out)); \
  m.impl("mxfp8_pack_a_scale", TORCH_BOX(&MoriMxfp8::pack_a));         \
  m.impl("mxfp8_pack_a_scale.out", TORCH_BOX(&MoriMxfp8::pack_a_out)); \
  m.impl("mxfp8_pack_b_scale", TORCH_BOX(&MoriMxfp8::pack_b));         \
  m.impl("mxfp8_pack_b_scale.out", TORCH_BOX(&MoriMxfp8::pack_b_out)); \
  m.impl("mxfp8", TORCH_BOX(&MoriMxfp8::packed));                      \
  m.impl("mxfp8.out", TORCH_BOX(&MoriMxfp8::packed_out));              \
  m.impl("mxfp8_raw", TORCH_BOX(&MoriMxfp8::raw));                     \
  m.impl("mxfp8_raw.out", TORCH_BOX(&MoriMxfp8::raw_out));             \
  m.impl("scaled_gemm", TORCH_BOX(&MoriMxfp8::scaled));                \
  m.impl("scaled_gemm.out", TORCH_BOX(&MoriMxfp8::scaled_out));        \
  m.impl("mxfp8_linear", TORCH_BOX(&MoriMxfp8::linear));               \
  m.impl("mxfp8_linear.out", TORCH_BOX(&MoriMxfp8::linear_out))
