// gemm_ar's argument checks. The operator itself is put together in mori_ops/distributed.py, which checks before the ranks
// talk to each other, so that a refused call leaves no half-finished collective behind.
#include "../mxfp8/mxfp8.h"

namespace mori::gemm_ar {
namespace {

constexpr const char* kOp = "gemm_ar";
constexpr std::initializer_list<ScalarType> kFloats = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};

void check(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, std::string quant, std::optional<Tensor> bias, std::string wire,
           std::optional<ScalarType> out_dtype, std::optional<Tensor> out) {
  const mxfp8::GemmShape shape = mxfp8::check_gemm(kOp, mxfp8::parse_quant(kOp, quant), a, b, a_scale, b_scale, bias);
  MORI_CHECK(wire == "bf16" || wire == "fp8", kOp, ": wire must be 'bf16' or 'fp8', got '", wire, "'");
  if (out) {
    check_out(kOp, "out", *out, shape.out_sizes, kFloats, {&a, &b, &a_scale, &b_scale, bias ? &*bias : nullptr});
  } else {
    check_out_dtype(kOp, out_dtype, ScalarType::BFloat16);
  }
}

}  // namespace
}  // namespace mori::gemm_ar

STABLE_TORCH_LIBRARY_IMPL(mori, CompositeExplicitAutograd, m) { m.impl("_gemm_ar_check", TORCH_BOX(&mori::gemm_ar::check)); }
