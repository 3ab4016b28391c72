// CPU backend of the MXFP8 operators: the run functions, each defined beside its kernels in the file named. Their checks, the
// functional and the .out forms are Ops<Cpu> (mxfp8_ops.h), registered at the end of mxfp8_cpu.cpp.
#pragma once

#include "mxfp8.h"

namespace mori::mxfp8 {

struct Cpu {
  // quantize_cpu.cpp
  static void quantize(const Tensor& x, Rounding rounding, const Tensor& codes, const Tensor& scale);
  static void quantize_weight(const Tensor& w, Rounding rounding, const Tensor& codes, const Tensor& scale);
  // dequantize_cpu.cpp
  static void dequantize(const DequantizeShape& shape, const Tensor& codes, const Tensor& scale, const Tensor& out);
  // pack_scale_cpu.cpp
  static void pack_a(const PackShape& shape, const Tensor& scale, const Tensor& out);
  static void pack_b(const PackShape& shape, const Tensor& scale, const Tensor& out);
  // mxfp8_cpu.cpp
  static void gemm(const GemmShape& shape, Quant quant, const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
                   const std::optional<Tensor>& bias, const Tensor& out);
  static void linear(const GemmShape& shape, const Tensor& x, const Tensor& b, const Tensor& b_scale, const std::optional<Tensor>& bias,
                     Rounding rounding, const Tensor& out);
};

}  // namespace mori::mxfp8
