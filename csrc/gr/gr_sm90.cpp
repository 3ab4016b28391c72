// CUDA backend of the Q8_0 operators: route table, launches, registration. The kernels are in gr_down_sm90.cu, gr_tiles_sm90.cu and q8_0_sm90.cu.
#include "gr_sm90.h"

#include <iterator>

#include "../common/cuda.h"
#include "../common/route.h"
#include "gr_ops.h"

namespace mori::gr {
namespace {

using cuda::float_type;

// Rows of the route table, and how many times 256 values of K a slice has in those of the tiles.
enum DownRoute : size_t { kCluster, kFirstTiles };
constexpr int kTileUnits[] = {1, 2, 3, 5, 10};

constexpr bool tiles_take(const RouteDims& d, int64_t most_tokens) { return d[0] <= most_tokens && d[2] > 0 && d[2] % 256 == 0; }

// Thresholds: us on an H200, 324 x 10240, 2026-11-30.
constexpr Route kRoutes[] = {
    {"cluster", [](const RouteDims& d) { return d[0] <= 24 && d[2] > 0 && d[2] % 2048 == 0 && d[2] <= 10240; },
     "tensor cores, 48 rows x 8 tokens by a cluster of 8 CTAs along K; a norm needs hc = 4, else tiles; 8.4 at 24 tokens, tiles 9.1"},
    {"tiles_256", [](const RouteDims& d) { return tiles_take(d, 64); },
     "tensor cores, 192 rows x 64 tokens, slices of 256 along K added by a second kernel; a norm needs groups of whole 256, else rows"},
    {"tiles_512", [](const RouteDims& d) { return tiles_take(d, 128); }, "the same, slices of 512: 13.5 at 128 tokens, 17.0 by slices of 256"},
    {"tiles_768", [](const RouteDims& d) { return tiles_take(d, 320); }, "the same, slices of 768: 18.1 at 256 tokens, 24.0 by slices of 512"},
    {"tiles_1280", [](const RouteDims& d) { return tiles_take(d, 640); }, "the same, slices of 1280: one wave of CTAs at 512 tokens"},
    {"tiles_2560", [](const RouteDims& d) { return tiles_take(d, 64 * 65535); }, "the same, slices of 2560: one wave of CTAs at 1024 tokens"},
    {"rows", [](const RouteDims&) { return true; }, "fp32 FMAs, one warp per weight row: any K"},
};
static_assert(std::size(kRoutes) == kFirstTiles + std::size(kTileUnits) + 1);
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
    cuda::check_launch("gr_down", run(args, x, launch.stream()));
  }

 private:
  // A dense tensor that starts at a multiple of 16 bytes.
  static Tensor operand(const Tensor& t) {
    const Tensor d = dense(t);
    return reinterpret_cast<uintptr_t>(d.const_data_ptr()) % 16 == 0 ? d : torch::stable::clone(d);
  }

  static bool same_data(const Tensor& a, const Tensor& b) { return a.const_data_ptr() == b.const_data_ptr(); }

  // The route's kernel, or the next one that serves the norm.
  static cudaError_t run(const DownArgs& args, const Tensor& like, cudaStream_t stream) {
    const size_t route = pick_route(kRoutes, {args.ntok, args.n, args.k});
    if (route == kCluster && down_fits_cluster(args)) return launch_down_cluster(args, stream);
    if (route + 1 < std::size(kRoutes) && down_fits_tiles(args)) {
      const int units = kTileUnits[route == kCluster ? 0 : route - kFirstTiles];
      const Tensor workspace = torch::stable::new_empty(like, Sizes{down_tiles_workspace_bytes(args, units)}, ScalarType::Byte);
      return launch_down_tiles(args, units, workspace.mutable_data_ptr(), stream);
    }
    return launch_down_rows(args, stream);
  }
};

}  // namespace
}  // namespace mori::gr

STABLE_TORCH_LIBRARY_IMPL(mori, CUDA, m) { MORI_REGISTER_GR(m, mori::gr::Cuda); }
