// The CPU engine below qsa_flash and qsa_attn: softmax(q . K) . V over a range of each token's slots.
#pragma once

#include <functional>

#include "qsa_micro_cpu.h"
#include "qsa_ops.h"

namespace mori::qsa {

// A [T, H, N] tensor read by its strides; the last dimension is made dense if it is not (a copy).
class Rows {
 public:
  explicit Rows(const Tensor& t);
  const char* at(int64_t i, int64_t head) const { return data_ + i * stride_ + head * head_stride_; }
  ScalarType dtype() const { return tensor_.scalar_type(); }

 private:
  Tensor tensor_;  // owns the copy
  const char* data_;
  int64_t stride_, head_stride_;  // bytes
};

struct Inputs {
  AttnShape shape;
  Rows q, k, v;
  std::optional<Rows> k_scale, v_scale;
  Tensor ids;  // dense

  explicit Inputs(const AttnTensors& tensors);
};

// What the slots [begin, end) of every token hold: the tokens in blocks whose cells are prefixes of one list.
struct Plan {
  struct Block {
    int64_t begin, end;  // tokens
  };
  int64_t begin, end;           // slots
  std::vector<int64_t> counts;  // cells of each token
  std::vector<Block> blocks;
};

// Raises IndexError for an id >= cells.
Plan make_plan(const char* op, const Inputs& in, int64_t begin, int64_t end);

// One finished row: sum of exp(logit - max) * v in acc [D] (may be overwritten), sum of exp(logit - max), log of the sum of exp(logit).
// A row without a cell comes with denominator 0.
using RowSink = std::function<void(int64_t token, int64_t head, float* acc, float denominator, float lse)>;

// Calls `sink` once per row, from several threads.
void attend(const Inputs& in, const Plan& plan, const Micro& micro, const RowSink& sink);

}  // namespace mori::qsa
