// The split form on the CPU: qsa_attn runs the engine of attend_cpu.cpp on each of `splits` contiguous ranges of the slots,
// qsa_merge joins the ranges: out = sum_i exp(lse_i - max lse) * partial_i / sum_i exp(lse_i - max lse), then the gate.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "attend_cpu.h"

namespace mori::qsa {
namespace {

constexpr const char* kAttn = "qsa_attn";
constexpr const char* kMerge = "qsa_merge";

void run_attn(const Inputs& in, Tensor& partial, Tensor& lse) {
  const AttnShape& s = in.shape;
  const int64_t splits = partial.size(0), length = ceil_div(s.slots, splits);
  std::vector<Plan> plans;
  for (int64_t i = 0; i < splits; ++i)
    plans.push_back(make_plan(kAttn, in, std::min(i * length, s.slots), std::min((i + 1) * length, s.slots)));
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

std::tuple<Tensor, Tensor> qsa_attn(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, std::optional<Tensor> k_scale,
                                    std::optional<Tensor> v_scale, std::optional<double> sm_scale, int64_t splits) {
  const AttnShape s = check_attn(kAttn, q, k, v, ids, k_scale, v_scale, std::nullopt, sm_scale);
  MORI_CHECK(splits >= 1, kAttn, ": splits must be at least 1, got ", splits);
  const Inputs in(s, q, k, v, ids, k_scale, v_scale);
  Tensor partial = torch::stable::new_empty(q, Sizes{splits, s.tokens, s.q_heads, s.dim}, ScalarType::Float);
  Tensor lse = torch::stable::new_empty(q, Sizes{splits, s.tokens, s.q_heads}, ScalarType::Float);
  run_attn(in, partial, lse);
  return {partial, lse};
}

void qsa_attn_out(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                  std::optional<double> sm_scale, Tensor partial, Tensor lse) {
  const AttnShape s = check_attn(kAttn, q, k, v, ids, k_scale, v_scale, std::nullopt, sm_scale);
  MORI_CHECK(partial.dim() == 4 && partial.size(0) >= 1, kAttn, ": partial must be [splits, T, Hq, D] with at least one split, got ",
             describe(partial));
  const Tensor* ks = k_scale ? &*k_scale : nullptr;
  const Tensor* vs = v_scale ? &*v_scale : nullptr;
  check_out(kAttn, "partial", partial, {partial.size(0), s.tokens, s.q_heads, s.dim}, {ScalarType::Float}, {&q, &k, &v, &ids, ks, vs});
  check_out(kAttn, "lse", lse, {partial.size(0), s.tokens, s.q_heads}, {ScalarType::Float}, {&q, &k, &v, &ids, ks, vs, &partial});
  run_attn(Inputs(s, q, k, v, ids, k_scale, v_scale), partial, lse);
}

void run_merge(const MergeShape& s, const Tensor& partial_any, const Tensor& lse_any, const std::optional<Tensor>& gate_tensor, Tensor& out) {
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

Tensor qsa_merge(const Tensor& partial, const Tensor& lse, std::optional<Tensor> gate, std::optional<ScalarType> out_dtype) {
  const MergeShape s = check_merge(partial, lse, gate);
  const ScalarType dtype = check_out_dtype(kMerge, out_dtype, ScalarType::Float);
  Tensor out = torch::stable::new_empty(partial, Sizes{s.tokens, s.heads, s.dim}, dtype);
  run_merge(s, partial, lse, gate, out);
  return out;
}

void qsa_merge_out(const Tensor& partial, const Tensor& lse, std::optional<Tensor> gate, Tensor out) {
  const MergeShape s = check_merge(partial, lse, gate);
  check_out(kMerge, "out", out, {s.tokens, s.heads, s.dim}, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half},
            {&partial, &lse, gate ? &*gate : nullptr});
  run_merge(s, partial, lse, gate, out);
}

}  // namespace
}  // namespace mori::qsa

STABLE_TORCH_LIBRARY_IMPL(mori, CPU, m) {
  m.impl("qsa_attn", TORCH_BOX(&mori::qsa::qsa_attn));
  m.impl("qsa_attn.out", TORCH_BOX(&mori::qsa::qsa_attn_out));
  m.impl("qsa_merge", TORCH_BOX(&mori::qsa::qsa_merge));
  m.impl("qsa_merge.out", TORCH_BOX(&mori::qsa::qsa_merge_out));
}
