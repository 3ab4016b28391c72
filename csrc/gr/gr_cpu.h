// CPU backend of the Q8_0 operators: the run functions, each defined beside its kernels in the file named. Their checks, the
// functional and the .out forms are Ops<Cpu> (gr_ops.h), registered at the end of gr_down_cpu.cpp.
#pragma once

#include "gr.h"

namespace mori::gr {

struct Cpu {
  // q8_0_cpu.cpp
  static void quantize(const Tensor& w, const Tensor& out, const Q8Shape& shape);
  static void dequantize(const Tensor& w, const Tensor& out, const Q8Shape& shape);
  // gr_down_cpu.cpp
  static void down(const Tensor& x, const Tensor& w, const std::optional<Tensor>& norm_weight, double eps, const Tensor& out, const DownShape& shape);
};

}  // namespace mori::gr
