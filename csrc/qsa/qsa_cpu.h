// The CPU backend of the attention operators; each function stands in the *_cpu.cpp file of its operator.
#pragma once

#include "attend_cpu.h"

namespace mori::qsa {

struct Cpu {
  static void quantize(const KvQuantizeShape& shape, const Tensor& x, const Tensor& codes, const Tensor& scale);
  static void flash(const AttnTensors& inputs, const MaybeTensor& gate, const Tensor& out);
  static void attn(const AttnTensors& inputs, const Tensor& partial, const Tensor& lse);
  static void merge(const MergeShape& shape, const Tensor& partial, const Tensor& lse, const MaybeTensor& gate, const Tensor& out);
};

}  // namespace mori::qsa
