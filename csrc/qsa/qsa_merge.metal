// The second half of the split form on Metal (see qsa.h for the contract): out = sum_i exp(lse_i - lse) * partial_i, then the gate.
// Types: Gate, Out; GATED 0 or 1. One thread per value: x is the place in the head, y the row (token, head). Bound by memory.
#include "../common/common.metal"

struct Shape {
  long splits, rows, dim, heads;
  long gate_token, gate_head;  // strides
};

[[kernel]] void qsa_merge(device const float* partial [[buffer(0)]], device const float* lse [[buffer(1)]], device const Gate* gate [[buffer(2)]],
                          device Out* out [[buffer(3)]], constant Shape& shape [[buffer(4)]], uint2 thread_position [[thread_position_in_grid]]) {
  const long row = thread_position.y, e = thread_position.x;
  float top = -INFINITY;
  for (long i = 0; i < shape.splits; ++i) top = max(top, lse[i * shape.rows + row]);
  float weights = 0.0f, total = 0.0f;
  for (long i = 0; i < shape.splits; ++i) {
    const float log_sum = lse[i * shape.rows + row];
    if (log_sum == -INFINITY) continue;  // no cell: its partial is 0
    const float weight = exp(log_sum - top);
    weights += weight;
    total = fma(weight, partial[(i * shape.rows + row) * shape.dim + e], total);
  }
  float value = 0.0f;  // without a cell, whatever the gate holds
  if (weights != 0.0f) {
    value = total / weights;
    if (GATED) value *= sigmoid(float(gate[row / shape.heads * shape.gate_token + row % shape.heads * shape.gate_head + e]));
  }
  out[row * shape.dim + e] = Out(value);
}
