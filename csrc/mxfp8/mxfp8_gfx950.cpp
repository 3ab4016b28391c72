// HIP backend of the MXFP8 operators: route table, launches, registration. The kernels are in the *_gfx950.hip files beside it.
#include "mxfp8_gfx950.h"

#include "../common/hip.h"
#include "../common/route.h"
#include "gemm_gfx950.h"
#include "mxfp8_ops.h"

namespace mori::mxfp8 {
namespace {

using hip::float_type;

constexpr int64_t kWideTiles = 140;

enum : size_t { kSkinny, kNarrow, kWide };
constexpr Route kRoutes[] = {
    {"skinny", [](const RouteDims& d) { return d[0] <= kSkinnyTokens; }, "up to 32 tokens: streams the weight once, bound by memory"},
    {"scaled mfma 256x128", [](const RouteDims& d) { return ceil_div(d[0], 256) * ceil_div(d[1], 256) < kWideTiles; },
     "fewer than 140 tiles of 256x256 leave much of 256 compute units idle (threshold measured on MI355X by the seed's authors, not here)"},
    {"scaled mfma 256x256", [](const RouteDims&) { return true; },
     "fewest LDS reads per product; misaligned operands, fp32 scales and gfx942 take bf16 MFMA with scales outside instead"},
};
constexpr Route kScaledRoutes[] = {
    {"bf16 mfma", [](const RouteDims&) { return true; }, "ptpc and blockscale; mxfp8 and mxfp8_raw take the routes of their own operators"},
};
const RegisterRoutes kRegistered[] = {
    {"mxfp8", "cuda", kRoutes}, {"mxfp8_raw", "cuda", kRoutes}, {"mxfp8_linear", "cuda", kRoutes}, {"scaled_gemm", "cuda", kScaledRoutes}};

const uint8_t* bytes(const Tensor& t) { return static_cast<const uint8_t*>(t.const_data_ptr()); }
uint8_t* mutable_bytes(const Tensor& t) { return static_cast<uint8_t*>(t.mutable_data_ptr()); }

// Raw scales that the pipeline cannot copy by whole dwords (K % 128 != 0, or misaligned) are packed first: the same bits.
void pack_scales(Plan& plan, const Tensor& like, hipStream_t stream) {
  GemmArgs& args = plan.args;
  const int64_t blocks = args.k / kBlock, row_blocks = ceil_div(args.n, kBlock);
  const Tensor a_scale = torch::stable::new_empty(like, Sizes{ceil_div(args.m, kPackRows) * kPackRows * blocks}, ScalarType::Byte);
  const Tensor b_scale = torch::stable::new_empty(like, Sizes{row_blocks * blocks}, ScalarType::Int);
  hip::check_launch("mxfp8_pack_a_scale", launch_pack_a(static_cast<const uint8_t*>(args.a_scale), args.m, blocks, mutable_bytes(a_scale), stream));
  hip::check_launch("mxfp8_pack_b_scale",
                    launch_pack_b(static_cast<const uint8_t*>(args.b_scale), row_blocks, blocks, static_cast<int32_t*>(b_scale.mutable_data_ptr()), stream));
  args.a_scale = a_scale.const_data_ptr();
  args.b_scale = b_scale.const_data_ptr();
  plan.scales = Scales::packed;
  plan.packed = {a_scale, b_scale};
}

}  // namespace

Plan plan_gemm(const GemmArgs& args, Quant quant, bool skinny, const Tensor& like, const hip::Launch& launch) {
  if (quant == Quant::ptpc) return {args, Scales::ptpc, Form::simple, {}};
  if (quant == Quant::blockscale) return {args, Scales::blockscale, Form::simple, {}};
  Plan plan = {args, quant == Quant::mxfp8 ? Scales::packed : Scales::raw, Form::simple, {}};
  if (!launch.has_scaled_mfma()) return plan;
  const size_t route = pick_route(kRoutes, {args.m, args.n, args.k});
  if (route == kSkinny && skinny) {
    if (skinny_fits(args)) plan.form = Form::skinny;
    return plan;
  }
  const Form tile = route == kWide ? Form::wide : Form::narrow;
  if (gemm_fits(args, plan.scales)) {
    plan.form = tile;
  } else if (plan.scales == Scales::raw && gemm_fits(args, Scales::packed)) {
    pack_scales(plan, like, launch.stream());
    plan.form = tile;
  }
  return plan;
}

hipError_t launch_plan(const Plan& plan, hipStream_t stream) {
  switch (plan.form) {
    case Form::skinny: return launch_skinny(plan.args, plan.scales, stream);
    case Form::narrow: return launch_gemm(plan.args, plan.scales, Tile::narrow, stream);
    case Form::wide: return launch_gemm(plan.args, plan.scales, Tile::wide, stream);
    default: return launch_simple(plan.args, plan.scales, stream);
  }
}

namespace {

struct Hip {
  static void quantize(const Tensor& x, Rounding rounding, const Tensor& codes, const Tensor& scale) {
    if (x.numel() == 0) return;
    const Tensor in = dense(x);
    const hip::Launch launch(x);
    const int64_t k = x.size(-1);
    hip::check_launch("mxfp8_quantize", launch_quantize(in.const_data_ptr(), float_type(in), x.numel() / k, k, rounding == Rounding::rceil,
                                                        mutable_bytes(codes), mutable_bytes(scale), launch.stream()));
  }

  static void quantize_weight(const Tensor& w, Rounding rounding, const Tensor& codes, const Tensor& scale) {
    if (w.numel() == 0) return;
    const Tensor in = dense(w);
    const hip::Launch launch(w);
    hip::check_launch("mxfp8_quantize_weight", launch_quantize_weight(in.const_data_ptr(), float_type(in), w.size(0), w.size(1), rounding == Rounding::rceil,
                                                                      mutable_bytes(codes), mutable_bytes(scale), launch.stream()));
  }

  static void dequantize(const DequantizeShape& shape, const Tensor& codes, const Tensor& scale, const Tensor& out) {
    if (out.numel() == 0) return;
    const Tensor in = dense(codes), scales = dense(scale);
    const hip::Launch launch(codes);
    hip::check_launch("mxfp8_dequantize", launch_dequantize(bytes(in), bytes(scales), shape.rows, shape.k, shape.weight_blocks, out.mutable_data_ptr(),
                                                            float_type(out), launch.stream()));
  }

  static void pack_a(const PackShape& shape, const Tensor& scale, const Tensor& out) {
    if (out.numel() == 0) return;
    const Tensor in = dense(scale);
    const hip::Launch launch(scale);
    hip::check_launch("mxfp8_pack_a_scale", launch_pack_a(bytes(in), shape.rows, shape.blocks, mutable_bytes(out), launch.stream()));
  }

  static void pack_b(const PackShape& shape, const Tensor& scale, const Tensor& out) {
    if (out.numel() == 0) return;
    const Tensor in = dense(scale);
    const hip::Launch launch(scale);
    hip::check_launch("mxfp8_pack_b_scale", launch_pack_b(bytes(in), shape.rows, shape.blocks, static_cast<int32_t*>(out.mutable_data_ptr()), launch.stream()));
  }

  static void gemm(const GemmShape& shape, Quant quant, const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, const Bias& bias,
                   const Tensor& out) {
    if (out.numel() == 0) return;
    const Tensor codes_a = dense(a), codes_b = dense(b), scale_a = dense(a_scale), scale_b = dense(b_scale), bias_row = bias ? dense(*bias) : out;
    const GemmArgs args = {bytes(codes_a),
                           bytes(codes_b),
                           scale_a.const_data_ptr(),
                           scale_b.const_data_ptr(),
                           bias ? bias_row.const_data_ptr() : nullptr,
                           float_type(bias_row),
                           out.mutable_data_ptr(),
                           float_type(out),
                           shape.m,
                           shape.n,
                           shape.k};
    const hip::Launch launch(a);
    const char* op = quant == Quant::mxfp8 ? "mxfp8" : quant == Quant::mxfp8_raw ? "mxfp8_raw" : "scaled_gemm";
    hip::check_launch(op, launch_plan(plan_gemm(args, quant, true, a, launch), launch.stream()));
  }

  static void linear(const GemmShape& shape, const Tensor& x, const Tensor& b, const Tensor& b_scale, const Bias& bias, Rounding rounding, const Tensor& out) {
    const Tensor codes = torch::stable::new_empty(x, Sizes{shape.m, shape.k}, ScalarType::Float8_e4m3fn);
    const Tensor scale = torch::stable::new_empty(x, Sizes{shape.m, shape.k / kBlock}, ScalarType::Byte);
    quantize(x, rounding, codes, scale);
    gemm(shape, Quant::mxfp8_raw, codes, b, scale, b_scale, bias, out);
  }
};

}  // namespace
}  // namespace mori::mxfp8

STABLE_TORCH_LIBRARY_IMPL(mori, CUDA, m) { MORI_REGISTER_MXFP8(m, mori::mxfp8::Hip); }
