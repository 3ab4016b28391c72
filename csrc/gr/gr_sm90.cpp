// CUDA backend of the Q8_0 operators: route table, launches, registration. The kernels are in gr_down_sm90.cu and q8_0_sm90.cu.
#include "gr_sm90.h"

#include "../common/cuda.h"
#include "../common/route.h"
#include "gr_ops.h"

namespace mori::gr {
namespace {

using cuda::float_type;

constexpr Route kRoutes[] = {
    {"cluster", [](const RouteDims& d) { return d[0] <= kClusterTokens && d[2] > 0 && d[2] % 2048 == 0 && d[2] <= 10240; },
     "tensor cores, 48 rows x 8 tokens by a cluster of 8 CTAs along K; a norm needs hc = 4, else the next one"},
    {"rows", [](const RouteDims&) { return true; }, "fp32 FMAs, one warp per weight row: any K"},
};
const RegisterRoutes kRegistered("gr_down", "cuda", kRoutes);

struct Cuda {
  static void quantize(const Tensor& w, const Tensor& out, const Q8Shape& shape) {
    const int64_t blocks = shape.n * (shape.k / kBlock);
    if (blocks == 0) return;
    const Tensor in = dense(w);
    const cuda::Launch launch(w);
    cuda::check_launch("q8_0_quantize",
                       launch_q8_quantize(in.const_data_ptr(), float_type(in), static_cast<uint8_t*>(out.mutable_data_ptr()), blocks, launch.stream()));
  }

  static void dequantize(const Tensor& w, const Tensor& out, const Q8Shape& shape) {
    const int64_t blocks = shape.n * (shape.k / kBlock);
    if (blocks == 0) return;
    const Tensor in = dense(w);
    const cuda::Launch launch(w);
    cuda::check_launch("q8_0_dequantize", launch_q8_dequantize(static_cast<const uint8_t*>(in.const_data_ptr()), out.mutable_data_ptr(),
                                                               float_type(out), blocks, launch.stream()));
  }

  static void down(const Tensor& x, const Tensor& w, const std::optional<Tensor>& norm_weight, double eps, const Tensor& out, const DownShape& shape) {
    if (shape.ntok == 0 || shape.n == 0) return;
    const Tensor rows = operand(x), weight = operand(w), norm = norm_weight ? operand(*norm_weight) : rows;
    const bool copied = !same_data(weight, w) || (norm_weight && !same_data(norm, *norm_weight));
    const DownArgs args = {rows.const_data_ptr(),
                           float_type(rows),
                           static_cast<const uint8_t*>(weight.const_data_ptr()),
                           norm_weight ? norm.const_data_ptr() : nullptr,
                           float_type(norm),
                           static_cast<float*>(out.mutable_data_ptr()),
                           shape.ntok,
                           shape.n,
                           shape.k,
                           shape.hc,
                           static_cast<float>(eps),
                           copied};
    const cuda::Launch launch(x);
    cuda::check_launch("gr_down", run(args, launch.stream()));
  }

 private:
  // A dense tensor that starts at a multiple of 16 bytes.
  static Tensor operand(const Tensor& t) {
    const Tensor d = dense(t);
    return reinterpret_cast<uintptr_t>(d.const_data_ptr()) % 16 == 0 ? d : torch::stable::clone(d);
  }

  static bool same_data(const Tensor& a, const Tensor& b) { return a.const_data_ptr() == b.const_data_ptr(); }

  // The route's kernel, or the next one that serves the norm.
  static cudaError_t run(const DownArgs& args, cudaStream_t stream) {
    const bool cluster = pick_route(kRoutes, {args.ntok, args.n, args.k}) == 0 && down_fits_cluster(args);
    return cluster ? launch_down_cluster(args, stream) : launch_down_rows(args, stream);
  }
};

}  // namespace
}  // namespace mori::gr

STABLE_TORCH_LIBRARY_IMPL(mori, CUDA, m) { MORI_REGISTER_GR(m, mori::gr::Cuda); }
