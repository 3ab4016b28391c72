// qsa_flash on the CPU: the engine of attend_cpu.cpp, then the gate and one rounding to the output's dtype.
// A token without a cell gives exact 0 whatever its gate holds, NaN included.
#include <cstring>

#include "attend_cpu.h"

namespace mori::qsa {
namespace {

constexpr const char* kOp = "qsa_flash";

void run(const Inputs& in, const std::optional<Tensor>& gate_tensor, Tensor& out) {
  const AttnShape& s = in.shape;
  const Plan plan = make_plan(kOp, in, 0, s.slots);
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

Tensor qsa_flash(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                 std::optional<Tensor> gate, std::optional<double> sm_scale, std::optional<ScalarType> out_dtype) {
  const AttnShape shape = check_attn(kOp, q, k, v, ids, k_scale, v_scale, gate, sm_scale);
  const ScalarType dtype = check_out_dtype(kOp, out_dtype, q.scalar_type());
  const Inputs in(shape, q, k, v, ids, k_scale, v_scale);
  Tensor out = torch::stable::new_empty(q, sizes_of(q), dtype);
  run(in, gate, out);
  return out;
}

void qsa_flash_out(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                   std::optional<Tensor> gate, std::optional<double> sm_scale, Tensor out) {
  const AttnShape shape = check_attn(kOp, q, k, v, ids, k_scale, v_scale, gate, sm_scale);
  check_out(kOp, "out", out, sizes_of(q), {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half},
            {&q, &k, &v, &ids, k_scale ? &*k_scale : nullptr, v_scale ? &*v_scale : nullptr, gate ? &*gate : nullptr});
  run(Inputs(shape, q, k, v, ids, k_scale, v_scale), gate, out);
}

}  // namespace
}  // namespace mori::qsa

STABLE_TORCH_LIBRARY_IMPL(mori, CPU, m) {
  m.impl("qsa_flash", TORCH_BOX(&mori::qsa::qsa_flash));
  m.impl("qsa_flash.out", TORCH_BOX(&mori::qsa::qsa_flash_out));
}
