// qsa_flash on the CPU: the engine of attend_cpu.cpp, then the gate and one rounding to the output's dtype.
// A token without a cell gives exact 0 whatever its gate holds, NaN included.
#include <cstring>

#include "qsa_cpu.h"

namespace mori::qsa {

void Cpu::flash(const AttnTensors& tensors, const MaybeTensor& gate_tensor, const Tensor& out) {
  const Inputs in(tensors);
  const AttnShape& s = in.shape;
  const Plan plan = make_plan("qsa_flash", in, 0, s.slots);
  const Micro& micro = pick_micro(in.k.dtype());
  std::optional<Rows> gate;
  if (gate_tensor) gate.emplace(*gate_tensor);
  const ScalarType out_dtype = out.scalar_type();
  const int64_t row_bytes = s.dim * out.element_size();
  char* result = static_cast<char*>(out.mutable_data_ptr());
  attend(in, plan, micro, [&](int64_t token, int64_t head, float* acc, float denominator, float) {
    char* row = result + (token * s.q_heads + head) * row_bytes;
    if (denominator == 0) {
      std::memset(row, 0, row_bytes);
      return;
    }
    float gate_row[256];
    if (gate) micro.load(gate->at(token, head), gate->dtype(), s.dim, gate_row);
    micro.finish(acc, denominator, gate ? gate_row : nullptr, s.dim);
    micro.store(acc, s.dim, out_dtype, row);
  });
}

}  // namespace mori::qsa

STABLE_TORCH_LIBRARY_IMPL(mori, CPU, m) { MORI_REGISTER_QSA(m, mori::qsa::Cpu); }
