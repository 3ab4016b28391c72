// Contract of attention over per-token selected cells (Qwen sparse attention), the same for every backend.
//
//   q [T, Hq, D] fp32/bf16/fp16        k, v [cells, Hkv, D] int8 with fp16 scales [cells, Hkv, D/64], or fp16/bf16 without
//   ids [T, S] int32/int64: cells of each token; negative = empty, anywhere in the row; a duplicate counts each time
//   out[t, h] = sigmoid(gate[t, h]) * sum_s p_s * v[ids[t, s], h / g],  p = softmax_s(q[t, h] . k[ids[t, s], h / g] * sm_scale),  g = Hq / Hkv
//   A token without a cell gives exact 0. Nothing in a cell that is not selected reaches the output.
//   split form: attn gives per split i the normalised partial [splits, T, Hq, D] fp32 and its log-sum-exp [splits, T, Hq] fp32
//   (natural log; -inf and partial 0 for a split without a cell); merge gives sum_i exp(lse_i - lse) * partial_i, then the gate.
#pragma once

#include "../common/check.h"

namespace mori::qsa {

constexpr int64_t kScaleGroup = 64;  // values per KV scale

struct AttnShape {
  int64_t tokens, q_heads, kv_heads, dim, slots, cells;  // T, Hq, Hkv, D, S
  bool int8_kv;
  double sm_scale;
};

// gate [T, Hq, D] of a float dtype, or a tensor that broadcasts to it by expand().
AttnShape check_attn(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, const std::optional<Tensor>& k_scale,
                     const std::optional<Tensor>& v_scale, const std::optional<Tensor>& gate, std::optional<double> sm_scale);

struct MergeShape {
  int64_t splits, tokens, heads, dim;
};

MergeShape check_merge(const Tensor& partial, const Tensor& lse, const std::optional<Tensor>& gate);

struct KvQuantizeShape {
  int64_t groups;  // of 64 values
  Sizes code_sizes, scale_sizes;
};

KvQuantizeShape check_kv_quantize(const Tensor& x);  // x [.., D], D a multiple of 64

}  // namespace mori::qsa
