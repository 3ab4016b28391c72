// CUDA backend of the Q8_0 operators: route table, launches, registration. The kernels are in gr_down_sm90.cu and q8_0_sm90.cu.
#include "gr_sm90.h"

#include "../common/cuda.h"
#include "../common/route.h"
#include "gr_ops.h"

namespace mori::gr {
namespace {

using cuda::float_type;

constexpr Route kRoutes[] = {
    {"cluster", [](const RouteDims& d) { return d[2] % 128 == 0; },
     "tensor cores, 16 rows by a cluster of 8 CTAs along K; K a multiple of 128, aligned operands, and with the norm K = 10240"},
    {"rows", [](const RouteDims&) { return true; }, "one warp per weight row: any K and alignment"},
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
    const Tensor rows = dense(x), weight = dense(w), norm = norm_weight ? dense(*norm_weight) : rows;
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
                           static_cast<float>(eps)};
    const cuda::Launch launch(x);
    const bool cluster = pick_route(kRoutes, {shape.ntok, shape.n, shape.k}) == 0 && down_fits_cluster(args);
    cuda::check_launch("gr_down", cluster ? launch_down_cluster(args, launch.stream()) : launch_down_rows(args, launch.stream()));
  }
};

}  // namespace
}  // namespace mori::gr

STABLE_TORCH_LIBRARY_IMPL(mori, CUDA, m) { MORI_REGISTER_GR(m, mori::gr::Cuda); }
