// Calls two operators through torch's dispatcher, knowing nothing of mori_ops but their names and schemas, and checks every
// number: q8_0_quantize(w [N, K]) -> bytes, then gr_down(x [ntok, K], bytes) -> x . w^T.
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTokens = 3, kRows = 5, kDepth = 128;

template <class... Arguments>
Tensor call(const char* op, const Arguments&... arguments) {
  std::vector<StableIValue> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Small integers that differ everywhere, with 127 in each block of 32: Q8_0 holds them exactly, with a scale of 1.
Tensor integers(int64_t rows, int64_t seed) {
  Tensor t = torch::stable::empty({rows, kDepth}, ScalarType::Float);
  float* values = static_cast<float*>(t.mutable_data_ptr());
  for (int64_t i = 0; i < rows * kDepth; ++i) values[i] = i % 32 == 0 ? 127.f : static_cast<float>((i * i + seed * i + seed) % 41 - 20);
  return t;
}

int main() {
  const Tensor x = integers(kTokens, 3), w = integers(kRows, 7);
  const Tensor bytes = call("mori::q8_0_quantize", w);
  if (bytes.scalar_type() != ScalarType::Byte || bytes.size(0) != kRows || bytes.size(1) != kDepth / 32 * 34) {
    std::printf("q8_0_quantize: wrong dtype or shape\n");
    return 1;
  }
  const Tensor y = call("mori::gr_down", x, bytes, std::optional<Tensor>(), 1e-6, int64_t{4}, std::string("auto"));

  const float* xs = static_cast<const float*>(x.const_data_ptr());
  const float* ws = static_cast<const float*>(w.const_data_ptr());
  const float* ys = static_cast<const float*>(y.const_data_ptr());
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t n = 0; n < kRows; ++n) {
      float expected = 0;  // integers below 2^24: exact in any order
      for (int64_t k = 0; k < kDepth; ++k) expected += xs[t * kDepth + k] * ws[n * kDepth + k];
      if (ys[t * kRows + n] != expected) {
        std::printf("gr_down[%d, %d] = %.9g, expected %.9g\n", int(t), int(n), ys[t * kRows + n], expected);
        return 1;
      }
    }
  std::printf("q8_0_quantize and gr_down: %d values exact\n", int(kTokens * kRows));
  return 0;
}
