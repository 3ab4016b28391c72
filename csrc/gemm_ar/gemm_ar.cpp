// gemm_ar's argument checks and its table of algorithms. The operator itself is put together in mori_ops/distributed.py, which
// checks before the ranks talk to each other, so that a refused call leaves no half-finished collective behind.
#include "../common/route.h"
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

// Partial sums that each rank receives in one_shot.
constexpr int64_t received_bytes(const RouteDims& d) { return d[0] * d[1] * d[2] * int64_t{sizeof(float)}; }

// Threshold: gloo on one host, N = 7168, best of 60, ms one_shot / bands, 2026-11-29. 2 ranks: 0.41 / 0.87 at M = 1,
// 0.87 / 1.1 at 8 (448 KiB), 1.6 / 1.8 at 32. 4 ranks: 0.95 / 3.1 at M = 1, 2.0 / 3.0 at 4 (448 KiB), 6.5 / 5.0 at 16.
constexpr Route kRoutes[] = {
    {"plain", [](const RouteDims& d) { return d[0] == 1; }, "one rank: scaled_gemm"},
    {"one_shot", [](const RouteDims& d) { return received_bytes(d) <= 512 * 1024; }, "up to 512 KiB of partial sums: one exchange"},
    {"bands", nullptr, "reduce-scatter and gather by bands of rows during the GEMM: about two copies of the result per rank; same bits as one_shot"},
};
const RegisterRoutes kRegistered("gemm_ar", "cpu", kRoutes);

}  // namespace
}  // namespace mori::gemm_ar

STABLE_TORCH_LIBRARY_IMPL(mori, CompositeExplicitAutograd, m) { m.impl("_gemm_ar_check", TORCH_BOX(&mori::gemm_ar::check)); }
