// kv_quantize on the CPU: per 64 values scale = fp16(max |x| / 127), code = clamp(rint(x / scale), -127, 127), all in fp32.
// A scale of 0 gives codes 0; so does one that is not finite (a NaN or an infinity in x, or max |x| above 127 * 65504), and the
// group then reads back as NaN: an overflow is never a plausible number.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include <torch/headeronly/util/Half.h>

#include "attend_cpu.h"

namespace mori::qsa {
namespace {

constexpr const char* kOp = "kv_quantize";
c10::Half quantize_group(const float* x, int8_t* codes) {
  uint32_t top_bits = 0;  // the order of |x| with NaN above infinity
  for (int64_t i = 0; i < kScaleGroup; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    top_bits = std::max(top_bits, bits & 0x7fffffffu);
  }
  float top;
  std::memcpy(&top, &top_bits, sizeof(top));
  const c10::Half scale = top / 127.0f;
  const float step = scale;
  if (!(step > 0 && std::isfinite(step))) {
    std::fill_n(codes, kScaleGroup, int8_t{0});
    return scale;
  }
  for (int64_t i = 0; i < kScaleGroup; ++i) codes[i] = static_cast<int8_t>(std::clamp(std::nearbyint(x[i] / step), -127.0f, 127.0f));
  return scale;
}

void run(const KvQuantizeShape& shape, const Tensor& x_any, Tensor& codes, Tensor& scale) {
  const Tensor x = dense(x_any);
  const Micro& micro = pick_micro(ScalarType::Char);
  const ScalarType dtype = x.scalar_type();
  const int64_t group_bytes = kScaleGroup * x.element_size();
  const char* source = static_cast<const char*>(x.const_data_ptr());
  int8_t* all_codes = static_cast<int8_t*>(codes.mutable_data_ptr());
  c10::Half* scales = static_cast<c10::Half*>(scale.mutable_data_ptr());
  torch::stable::parallel_for(0, shape.groups, 256, [&](int64_t begin, int64_t end) {
    float values[kScaleGroup];
    for (int64_t i = begin; i < end; ++i) {
      micro.load(source + i * group_bytes, dtype, kScaleGroup, values);
      scales[i] = quantize_group(values, all_codes + i * kScaleGroup);
    }
  });
}

std::tuple<Tensor, Tensor> kv_quantize(const Tensor& x) {
  const KvQuantizeShape shape = check_kv_quantize(x);
  Tensor codes = torch::stable::new_empty(x, shape.code_sizes, ScalarType::Char);
  Tensor scale = torch::stable::new_empty(x, shape.scale_sizes, ScalarType::Half);
  run(shape, x, codes, scale);
  return {codes, scale};
}

void kv_quantize_out(const Tensor& x, Tensor codes, Tensor scale) {
  const KvQuantizeShape shape = check_kv_quantize(x);
  check_out(kOp, "codes", codes, shape.code_sizes, {ScalarType::Char}, {&x});
  check_out(kOp, "scale", scale, shape.scale_sizes, {ScalarType::Half}, {&x, &codes});
  run(shape, x, codes, scale);
}

}  // namespace
}  // namespace mori::qsa

STABLE_TORCH_LIBRARY_IMPL(mori, CPU, m) {
  m.impl("kv_quantize", TORCH_BOX(&mori::qsa::kv_quantize));
  m.impl("kv_quantize.out", TORCH_BOX(&mori::qsa::kv_quantize_out));
}
