// CUDA backend of the MXFP8 operators: route table, launches, registration. The kernels are in the *_sm90.cu files beside it.
#include "mxfp8_sm90.h"

#include "../common/cuda.h"
#include "../common/route.h"
#include "gemm_sm90.h"
#include "mxfp8_ops.h"
#include "scaled_mm_sm90.h"

namespace mori::mxfp8 {
namespace {

using cuda::float_type;

template <GemmTile kTile>
bool takes(const RouteDims& d) {
  return gemm_tile(d[0], d[1], d[2]) == kTile;
}

// The names give weight rows x tokens of a tile. Misaligned operands take fp32 FMAs instead.
constexpr Route kRoutes[] = {
    {"skinny", [](const RouteDims& d) { return skinny_takes(d[0], d[2]); }, "up to 32 tokens, to K = 4096 up to 48: streams the weight once, bound by memory"},
    {"64x64", takes<GemmTile::rows64_tokens64>, "bf16 wgmma on operands decoded exactly from e4m3; the tile whose waves over 132 SMs take least time"},
    {"64x96", takes<GemmTile::rows64_tokens96>, "the same"},
    {"64x128", takes<GemmTile::rows64_tokens128>, "the same"},
    {"128x96", takes<GemmTile::rows128_tokens96>, "the same"},
    {"128x128", takes<GemmTile::rows128_tokens128>, "the same"},
    {"128x176", takes<GemmTile::rows128_tokens176>, "the same"},
    {"128x192", takes<GemmTile::rows128_tokens192>, "the same"},
    {"128x224", takes<GemmTile::rows128_tokens224>, "the same"},
    {"128x256", [](const RouteDims&) { return true; }, "the same; every large shape"},
};
constexpr Route kScaledRoutes[] = {
    {"torch._scaled_mm", [](const RouteDims& d) { return d[1] % kScaledMmColumns == 0; },
     "ptpc and blockscale to bf16, bias too, aligned operands: fp8 tensor cores; mxfp8 and mxfp8_raw take the routes of their own operators"},
    {"fp32 fma", [](const RouteDims&) { return true; }, "ptpc and blockscale otherwise: exact, slow"},
};
const RegisterRoutes kRegistered[] = {
    {"mxfp8", "cuda", kRoutes}, {"mxfp8_raw", "cuda", kRoutes}, {"mxfp8_linear", "cuda", kRoutes}, {"scaled_gemm", "cuda", kScaledRoutes}};

const uint8_t* bytes(const Tensor& t) { return static_cast<const uint8_t*>(t.const_data_ptr()); }
uint8_t* mutable_bytes(const Tensor& t) { return static_cast<uint8_t*>(t.mutable_data_ptr()); }

GemmArgs gemm_args(const GemmShape& shape, const uint8_t* a, const uint8_t* b, const void* a_scale, const void* b_scale, const Tensor* bias, const Tensor& out) {
  return {a, b, a_scale, b_scale, bias ? bias->const_data_ptr() : nullptr, bias ? float_type(*bias) : Float::f32, out.mutable_data_ptr(), float_type(out),
          shape.m, shape.n, shape.k, false};
}

cudaError_t launch_mx(const GemmArgs& args, const Tensor& like, cudaStream_t stream) {
  const bool skinny = pick_route(kRoutes, {args.m, args.n, args.k}) == 0;
  if (skinny && skinny_fits(args)) return launch_skinny(args, stream);
  if (skinny || !gemm_fits(args)) return launch_simple(args, stream);
  const Tensor workspace = torch::stable::new_empty(like, Sizes{gemm_workspace_bytes(args.m, args.k)}, ScalarType::Byte);
  return launch_gemm(args, gemm_tile(args.m, args.n, args.k), workspace.mutable_data_ptr(), stream);
}

}  // namespace

void launch_scaled(GemmArgs args, Quant quant, const Tensor& like, cudaStream_t stream) {
  args.packed = quant == Quant::mxfp8;
  switch (quant) {
    case Quant::mxfp8:
    case Quant::mxfp8_raw: return cuda::check_launch("mxfp8", launch_mx(args, like, stream));
    case Quant::ptpc:
    case Quant::blockscale:
      if (scaled_mm_fits(args)) return run_scaled_mm(args, quant, like, stream);
      return cuda::check_launch("scaled_gemm", launch_simple_fp32_scales(args, quant == Quant::ptpc ? Fp32Scales::ptpc : Fp32Scales::blockscale, stream));
  }
}

bool pair_fits(const GemmArgs& args, Quant quant) {
  return (quant == Quant::mxfp8 || quant == Quant::mxfp8_raw) && gemm_fits(args) && args.out_type == Float::bf16 && args.n % 8 == 0;
}

void launch_pair(GemmArgs args, Quant quant, const Pair& pair, const Tensor& like, cudaStream_t stream) {
  args.packed = quant == Quant::mxfp8;
  const Tensor workspace = torch::stable::new_empty(like, Sizes{gemm_workspace_bytes(args.m, args.k)}, ScalarType::Byte);
  cuda::check_launch("gemm_ar", launch_gemm(args, pair, workspace.mutable_data_ptr(), stream));
}

namespace {

struct Cuda {
  static void quantize(const Tensor& x, Rounding rounding, const Tensor& codes, const Tensor& scale) { quantize(x, rounding, false, codes, scale); }

  // overlap: the GEMM that follows may start and stream its weight meanwhile.
  static void quantize(const Tensor& x, Rounding rounding, bool overlap, const Tensor& codes, const Tensor& scale) {
    if (x.numel() == 0) return;
    const Tensor in = dense(x);
    const cuda::Launch launch(x);
    const int64_t k = x.size(-1);
    cuda::check_launch("mxfp8_quantize", launch_quantize(in.const_data_ptr(), float_type(in), x.numel() / k, k, rounding == Rounding::rceil, overlap,
                                                         mutable_bytes(codes), mutable_bytes(scale), launch.stream()));
  }

  static void quantize_weight(const Tensor& w, Rounding rounding, const Tensor& codes, const Tensor& scale) {
    if (w.numel() == 0) return;
    const Tensor in = dense(w);
    const cuda::Launch launch(w);
    cuda::check_launch("mxfp8_quantize_weight", launch_quantize_weight(in.const_data_ptr(), float_type(in), w.size(0), w.size(1), rounding == Rounding::rceil,
                                                                       mutable_bytes(codes), mutable_bytes(scale), launch.stream()));
  }

  static void dequantize(const DequantizeShape& shape, const Tensor& codes, const Tensor& scale, const Tensor& out) {
    if (out.numel() == 0) return;
    const Tensor in = dense(codes), scales = dense(scale);
    const cuda::Launch launch(codes);
    cuda::check_launch("mxfp8_dequantize", launch_dequantize(bytes(in), bytes(scales), shape.rows, shape.k, shape.weight_blocks, out.mutable_data_ptr(),
                                                             float_type(out), launch.stream()));
  }

  static void pack_a(const PackShape& shape, const Tensor& scale, const Tensor& out) {
    if (out.numel() == 0) return;
    const Tensor in = dense(scale);
    const cuda::Launch launch(scale);
    cuda::check_launch("mxfp8_pack_a_scale", launch_pack_a(bytes(in), shape.rows, shape.blocks, mutable_bytes(out), launch.stream()));
  }

  static void pack_b(const PackShape& shape, const Tensor& scale, const Tensor& out) {
    if (out.numel() == 0) return;
    const Tensor in = dense(scale);
    const cuda::Launch launch(scale);
    cuda::check_launch("mxfp8_pack_b_scale", launch_pack_b(bytes(in), shape.rows, shape.blocks, static_cast<int32_t*>(out.mutable_data_ptr()), launch.stream()));
  }

  static void gemm(const GemmShape& shape, Quant quant, const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, const Bias& bias,
                   const Tensor& out) {
    if (out.numel() == 0) return;
    const Tensor codes_a = dense(a), codes_b = dense(b), scale_a = dense(a_scale), scale_b = dense(b_scale), bias_row = bias ? dense(*bias) : out;
    GemmArgs args = gemm_args(shape, bytes(codes_a), bytes(codes_b), scale_a.const_data_ptr(), scale_b.const_data_ptr(), bias ? &bias_row : nullptr, out);
    const cuda::Launch launch(a);
    launch_scaled(args, quant, a, launch.stream());
  }

  static void linear(const GemmShape& shape, const Tensor& x, const Tensor& b, const Tensor& b_scale, const Bias& bias, Rounding rounding, const Tensor& out) {
    if (out.numel() == 0) return;
    const Tensor in = dense(x), weight = dense(b), weight_scale = dense(b_scale), bias_row = bias ? dense(*bias) : out;
    GemmArgs args = gemm_args(shape, nullptr, bytes(weight), nullptr, weight_scale.const_data_ptr(), bias ? &bias_row : nullptr, out);
    args.x = in.const_data_ptr(), args.x_type = float_type(in), args.rceil = rounding == Rounding::rceil;
    const bool skinny = pick_route(kRoutes, {shape.m, shape.n, shape.k}) == 0;
    if (!skinny && gemm_fits(args)) {
      const cuda::Launch launch(x);
      return cuda::check_launch("mxfp8_linear", launch_mx(args, x, launch.stream()));
    }
    const Tensor codes = torch::stable::new_empty(x, Sizes{shape.m, shape.k}, ScalarType::Float8_e4m3fn);
    const Tensor scale = torch::stable::new_empty(x, Sizes{shape.m, shape.k / kBlock}, ScalarType::Byte);
    quantize(in, rounding, skinny, codes, scale);
    gemm(shape, Quant::mxfp8_raw, codes, b, scale, b_scale, bias, out);
  }
};

}  // namespace
}  // namespace mori::mxfp8

STABLE_TORCH_LIBRARY_IMPL(mori, CUDA, m) { MORI_REGISTER_MXFP8(m, mori::mxfp8::Cuda); }
