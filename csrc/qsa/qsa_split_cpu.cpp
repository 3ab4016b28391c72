// The split form on the CPU: qsa_attn runs the engine of attend_cpu.cpp on each of `splits` contiguous ranges of the slots,
// qsa_merge joins the ranges: out = sum_i exp(lse_i - max lse) * partial_i / sum_i exp(lse_i - max lse), then the gate.
#include <algorithm>
#include <cmath>
#include <limits>

#include "qsa_cpu.h"

namespace mori::qsa {

void Cpu::attn(const AttnTensors& tensors, const Tensor& partial, const Tensor& lse) {
  const Inputs in(tensors);
  const AttnShape& s = in.shape;
  const int64_t splits = partial.size(0), length = ceil_div(s.slots, splits);
  std::vector<Plan> plans;
  for (int64_t i = 0; i < splits; ++i)
    plans.push_back(make_plan("qsa_attn", in, std::min(i * length, s.slots), std::min((i + 1) * length, s.slots)));
  const Micro& micro = pick_micro(in.k.dtype());
  const int64_t rows = s.tokens * s.q_heads;
  float* sums = static_cast<float*>(partial.mutable_data_ptr());
  float* logs = static_cast<float*>(lse.mutable_data_ptr());
  for (int64_t i = 0; i < splits; ++i)
    attend(in, plans[i], micro, [&](int64_t token, int64_t head, float* acc, float denominator, float row_lse) {
      const int64_t row = i * rows + token * s.q_heads + head;
      logs[row] = row_lse;
      if (denominator == 0) {
        std::fill_n(sums + row * s.dim, s.dim, 0.0f);
        return;
      }
      micro.finish(acc, denominator, nullptr, s.dim);
      std::copy_n(acc, s.dim, sums + row * s.dim);
    });
}

void Cpu::merge(const MergeShape& s, const Tensor& partial_any, const Tensor& lse_any, const MaybeTensor& gate_tensor, const Tensor& out) {
  const Tensor partial = dense(partial_any), lse = dense(lse_any);
  std::optional<Rows> gate;
  if (gate_tensor) gate.emplace(*gate_tensor);
  const Micro& micro = pick_micro(ScalarType::Char);
  const float* sums = static_cast<const float*>(partial.const_data_ptr());
  const float* logs = static_cast<const float*>(lse.const_data_ptr());
  const int64_t rows = s.tokens * s.heads;
  const ScalarType out_dtype = out.scalar_type();
  const int64_t row_bytes = s.dim * out.element_size();
  char* result = static_cast<char*>(out.mutable_data_ptr());
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(torch::stable::get_num_threads(), rows / 16));
  std::vector<float> buffers(workers * 2 * s.dim);
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    float* acc = buffers.data() + begin * 2 * s.dim;
    float* gate_row = acc + s.dim;
    for (int64_t row = rows * begin / workers; row < rows * end / workers; ++row) {
      float top = -std::numeric_limits<float>::infinity();
      for (int64_t i = 0; i < s.splits; ++i) top = std::max(top, logs[i * rows + row]);
      float weights = 0;
      std::fill_n(acc, s.dim, 0.0f);
      for (int64_t i = 0; i < s.splits; ++i) {
        const float log = logs[i * rows + row];
        if (log == -std::numeric_limits<float>::infinity()) continue;
        const float weight = std::exp(log - top);
        weights += weight;
        micro.fold(acc, sums + (i * rows + row) * s.dim, 1.0f, weight, s.dim);
      }
      char* target = result + row * row_bytes;
      if (weights == 0) {
        std::fill_n(target, row_bytes, 0);
        continue;
      }
      if (gate) micro.load(gate->at(row / s.heads, row % s.heads), gate->dtype(), s.dim, gate_row);
      micro.finish(acc, weights, gate ? gate_row : nullptr, s.dim);
      micro.store(acc, s.dim, out_dtype, target);
    }
  });
}

}  // namespace mori::qsa
