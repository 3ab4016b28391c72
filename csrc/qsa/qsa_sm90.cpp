// CUDA backend of attention over selected cells: route table, operands as the kernels want them, launches, registration. The kernels
// are in the *_sm90.cu files beside it.
#include "qsa_sm90.h"

#include <algorithm>
#include <cstdlib>

#include "../common/cuda.h"
#include "../common/route.h"
#include "qsa_ops.h"

namespace mori::qsa {
namespace {

using cuda::float_type;

constexpr int64_t kFewTokens = 8;                              // a verify window
constexpr int64_t kSomeTokens = 128;                           // up to here the dense kernel fills too few processors to be worth its look at the ids
constexpr int64_t kFewSlots = 144, kMostClusterSlots = 16 * 144;  // of one CTA, of a cluster

enum FlashRoute : size_t { kCluster, kPrefix, kSparse, kSimple };
constexpr Route kRoutes[] = {
    {"cluster",
     [](const RouteDims& d) { return (d[0] <= kFewTokens || d[1] <= kFewSlots) && d[1] <= kMostClusterSlots && d[1] > 0 && d[2] > 0 && d[5] == 256; },
     "tensor cores, one launch: a cluster of CTAs for each token and tile of heads; int8 KV and a 16-bit output, else 'simple'"},
    {"prefix", [](const RouteDims& d) { return d[0] > kSomeTokens && d[1] > 0 && d[2] > 0 && d[5] == 256 && d[3] <= 128 * d[4]; },
     "tensor cores: tokens whose cells are 0 .. n-1 as dense attention, found on the device, the others as in 'sparse'; int8 KV, 16-bit q and output"},
    {"sparse", [](const RouteDims& d) { return d[1] > 0 && d[2] > 0; },
     "tensor cores, each token over its own cells, parts of a token merged; int8 KV and a 16-bit output, else 'simple'"},
    {"simple", [](const RouteDims&) { return true; }, "fp32 FMAs; fp16 and bf16 KV, fp32 output"},
};
const RegisterRoutes kRegistered("qsa_flash", "cuda", kRoutes);

// A [T, H, N] tensor by its strides where its rows are dense and start at multiples of `alignment` bytes, else a dense copy.
class RowsOf {
 public:
  RowsOf(const Tensor& t, int64_t alignment) : tensor_(t) {
    if (!fits(alignment)) tensor_ = t.is_contiguous() ? torch::stable::clone(t) : torch::stable::contiguous(t);
  }
  DeviceRows rows() const {
    return {static_cast<const char*>(tensor_.const_data_ptr()), tensor_.stride(0) * tensor_.element_size(), tensor_.stride(1) * tensor_.element_size()};
  }

 private:
  bool fits(int64_t alignment) const {
    const auto multiple = [&](int64_t i) { return tensor_.size(i) <= 1 || tensor_.stride(i) * tensor_.element_size() % alignment == 0; };
    return (tensor_.size(2) <= 1 || tensor_.stride(2) == 1) && multiple(0) && multiple(1) &&
           reinterpret_cast<uintptr_t>(tensor_.const_data_ptr()) % alignment == 0;
  }

  Tensor tensor_;
};

constexpr int64_t kAlignment = 16;

// The arguments of a launch, and the tensors that own what they point to.
struct Operands {
  RowsOf q, k, v;
  std::optional<RowsOf> k_scale, v_scale, gate;
  Tensor ids;
  AttnArgs args = {};

  Operands(const AttnTensors& in, const MaybeTensor& gate_tensor)
      : q(in.q, kAlignment), k(in.k, kAlignment), v(in.v, kAlignment), ids(dense(in.ids)) {
    const AttnShape& s = in.shape;
    const int64_t scale_bytes = s.dim / kScaleGroup * 2;
    args.q = q.rows(), args.k = k.rows(), args.v = v.rows();
    if (in.k_scale) args.k_scale = k_scale.emplace(*in.k_scale, scale_bytes).rows();
    if (in.v_scale) args.v_scale = v_scale.emplace(*in.v_scale, scale_bytes).rows();
    if (gate_tensor) args.gate = gate.emplace(*gate_tensor, kAlignment).rows(), args.gate_type = float_type(*gate_tensor);
    args.q_type = float_type(in.q);
    args.kv_type = s.int8_kv ? Kv::i8 : in.k.scalar_type() == ScalarType::Half ? Kv::f16 : Kv::bf16;
    args.ids = ids.const_data_ptr();
    args.wide_ids = ids.scalar_type() == ScalarType::Long;
    args.tokens = s.tokens, args.q_heads = s.q_heads, args.kv_heads = s.kv_heads, args.dim = s.dim, args.slots = s.slots, args.cells = s.cells;
    args.sm_scale = s.sm_scale;
  }
};

// With MORI_CHECK_IDS set: raises where an id is beyond the cells, at the price of a host sync.
void check_ids(const char* op, const AttnTensors& in, cudaStream_t stream) {
  const char* wanted = std::getenv("MORI_CHECK_IDS");
  if (wanted == nullptr || *wanted == '\0' || in.ids.numel() == 0) return;
  const Tensor most = torch::stable::amax(in.ids, {0, 1});
  int64_t wide = 0;
  int32_t narrow = 0;
  const bool is_wide = in.ids.scalar_type() == ScalarType::Long;
  void* target = is_wide ? static_cast<void*>(&wide) : &narrow;
  cudaError_t error = cudaMemcpyAsync(target, most.const_data_ptr(), most.element_size(), cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  cuda::check_launch(op, error);
  const int64_t id = is_wide ? wide : narrow;
  if (id >= in.shape.cells)
    fail<std::out_of_range>(op, ": ids holds ", id, ", but k holds ", in.shape.cells, " cells (raised because MORI_CHECK_IDS is set)");
}

Tensor scratch(const Tensor& like, const Sizes& sizes) { return torch::stable::new_empty(like, sizes, ScalarType::Float); }
float* floats(const Tensor& t) { return static_cast<float*>(t.mutable_data_ptr()); }

// The simple kernel; with too few rows to fill the GPU, its slots are split and merged.
void run_simple(const AttnArgs& args, const Tensor& like, cudaStream_t stream) {
  constexpr int64_t kCtas = 528, kSplitSlots = 64;
  const int64_t splits = std::clamp<int64_t>(kCtas / (args.tokens * args.kv_heads), 1, std::max<int64_t>(1, args.slots / kSplitSlots));
  if (splits == 1) return cuda::check_launch("qsa_flash", launch_attn(args, 1, nullptr, nullptr, stream));
  const Tensor partial = scratch(like, {splits, args.tokens, args.q_heads, args.dim}), lse = scratch(like, {splits, args.tokens, args.q_heads});
  cuda::check_launch("qsa_flash", launch_attn(args, splits, floats(partial), floats(lse), stream));
  cuda::check_launch("qsa_flash", launch_merge({floats(partial), floats(lse), args.gate, args.gate_type, args.out_type, args.out, splits, args.tokens,
                                                args.q_heads, args.dim},
                                               stream));
}

void run_tensor(const AttnArgs& args, bool try_dense, const Tensor& like, cudaStream_t stream) {
  const int64_t status_bytes = try_dense ? (dense_blocks(args) * dense_status_heads(args) + 15) / 16 * 16 : 0;
  const Tensor scratch = torch::stable::new_empty(like, Sizes{status_bytes + sparse_workspace_bytes(args)}, ScalarType::Byte);
  uint8_t* status = static_cast<uint8_t*>(scratch.mutable_data_ptr());
  if (try_dense) cuda::check_launch("qsa_flash", launch_dense(args, status, stream));
  cuda::check_launch("qsa_flash", launch_sparse(args, status + status_bytes, try_dense ? status : nullptr, stream));
}

struct Cuda {
  static void quantize(const KvQuantizeShape& shape, const Tensor& x, const Tensor& codes, const Tensor& scale) {
    if (shape.groups == 0) return;
    const Tensor in = dense(x);
    const cuda::Launch launch(x);
    cuda::check_launch("kv_quantize", launch_kv_quantize(in.const_data_ptr(), float_type(in), static_cast<int8_t*>(codes.mutable_data_ptr()),
                                                         scale.mutable_data_ptr(), shape.groups, launch.stream()));
  }

  static void flash(const AttnTensors& in, const MaybeTensor& gate, const Tensor& out) {
    if (out.numel() == 0) return;
    const cuda::Launch launch(in.q);
    check_ids("qsa_flash", in, launch.stream());
    Operands operands(in, gate);
    operands.args.out = out.mutable_data_ptr();
    operands.args.out_type = float_type(out);
    const AttnShape& s = in.shape;
    const size_t route = pick_route(kRoutes, {s.tokens, s.slots, s.cells, s.q_heads, s.kv_heads, s.dim});
    if (route == kCluster && sparse_fits(operands.args) && cluster_fits(operands.args))
      cuda::check_launch("qsa_flash", launch_cluster(operands.args, launch.stream()));
    else if (route != kSimple && sparse_fits(operands.args))
      run_tensor(operands.args, route == kPrefix && dense_fits(operands.args), in.q, launch.stream());
    else
      run_simple(operands.args, in.q, launch.stream());
  }

  static void attn(const AttnTensors& in, const Tensor& partial, const Tensor& lse) {
    if (partial.numel() == 0) return;
    const cuda::Launch launch(in.q);
    check_ids("qsa_attn", in, launch.stream());
    const Operands operands(in, std::nullopt);
    cuda::check_launch("qsa_attn", launch_attn(operands.args, partial.size(0), floats(partial), floats(lse), launch.stream()));
  }

  static void merge(const MergeShape& s, const Tensor& partial_any, const Tensor& lse_any, const MaybeTensor& gate, const Tensor& out) {
    if (out.numel() == 0) return;
    const Tensor partial = dense(partial_any), lse = dense(lse_any);
    const cuda::Launch launch(partial);
    std::optional<RowsOf> rows;
    MergeArgs args = {floats(partial), floats(lse), {}, Float::f32, float_type(out), out.mutable_data_ptr(), s.splits, s.tokens, s.heads, s.dim};
    if (gate) args.gate = rows.emplace(*gate, gate->element_size()).rows(), args.gate_type = float_type(*gate);
    cuda::check_launch("qsa_merge", launch_merge(args, launch.stream()));
  }
};

}  // namespace
}  // namespace mori::qsa

STABLE_TORCH_LIBRARY_IMPL(mori, CUDA, m) { MORI_REGISTER_QSA(m, mori::qsa::Cuda); }
