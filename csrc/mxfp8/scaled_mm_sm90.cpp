#include "scaled_mm_sm90.h"

#include <array>

#include "../common/cuda.h"

namespace mori::mxfp8 {
namespace {

constexpr int64_t kRowsOfBlocks = 4;  // cuBLASLt wants M a multiple of it for blockscale

Tensor view_of(const void* data, const Sizes& sizes, const Sizes& strides, ScalarType type, const Tensor& like) {
  return torch::stable::from_blob(const_cast<void*>(data), sizes, strides, like.device(), type);
}

void scaled_mm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, const std::optional<Tensor>& bias, const Tensor& out) {
  using torch::stable::detail::from;
  std::array<StableIValue, 9> stack = {from(a), from(b), from(a_scale), from(b_scale), from(bias), from(std::nullopt), from(std::nullopt), from(false), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_scaled_mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // takes the returned reference
}

bool is_on(const void* pointer, const Tensor& like) {
  cudaPointerAttributes attributes;
  cuda::check_launch("scaled_gemm", cudaPointerGetAttributes(&attributes, pointer));
  return attributes.device == like.get_device_index();
}

// a with rows added, of whatever the memory holds: a row of C depends on its own row of A alone.
Tensor padded(const Tensor& a, int64_t rows) {
  Tensor more = torch::stable::new_empty(a, Sizes{rows, a.size(1)});
  Tensor filled = torch::stable::narrow(more, 0, 0, a.size(0));
  torch::stable::copy_(filled, a);
  return more;
}

}  // namespace

bool scaled_mm_fits(const GemmArgs& args) {
  return args.out_type == Float::bf16 && (args.bias == nullptr || args.bias_type == Float::bf16) && args.n % kScaledMmColumns == 0 && args.k > 0 &&
         aligned16(args.a) && aligned16(args.b) && aligned16(args.out);
}

void run_scaled_mm(const GemmArgs& args, Quant quant, const Tensor& like, cudaStream_t stream) {
  const auto [m, n, k] = std::array{args.m, args.n, args.k};
  const int64_t rows = quant == Quant::blockscale ? ceil_div(m, kRowsOfBlocks) * kRowsOfBlocks : m;
  const bool direct = rows == m && is_on(args.out, like);  // a tensor cannot lie in another device's memory, where gemm_ar may want C
  const Tensor out = direct ? view_of(args.out, {m, n}, {n, 1}, ScalarType::BFloat16, like) : torch::stable::new_empty(like, Sizes{rows, n}, ScalarType::BFloat16);
  const Tensor given = view_of(args.a, {m, k}, {k, 1}, ScalarType::Float8_e4m3fn, like), b = view_of(args.b, {k, n}, {1, k}, ScalarType::Float8_e4m3fn, like);
  const std::optional<Tensor> bias = args.bias ? std::optional(view_of(args.bias, {n}, {1}, ScalarType::BFloat16, like)) : std::nullopt;
  if (quant == Quant::ptpc) {
    const Tensor a_scale = view_of(args.a_scale, {m, 1}, {1, 1}, ScalarType::Float, like), b_scale = view_of(args.b_scale, {1, n}, {n, 1}, ScalarType::Float, like);
    scaled_mm(given, b, a_scale, b_scale, bias, out);
  } else {
    const int64_t blocks = ceil_div(k, kBlockscale);
    const Tensor a_scale = torch::stable::new_empty(like, Sizes{blocks, rows}, ScalarType::Float), b_scale = torch::stable::new_empty(like, Sizes{blocks, n}, ScalarType::Float);
    cuda::check_launch("scaled_gemm", launch_block_scales(static_cast<const float*>(args.a_scale), m, rows, static_cast<const float*>(args.b_scale), n, blocks,
                                                          static_cast<float*>(a_scale.mutable_data_ptr()), static_cast<float*>(b_scale.mutable_data_ptr()), stream));
    scaled_mm(rows == m ? given : padded(given, rows), b, torch::stable::transpose(a_scale, 0, 1), b_scale, bias, out);
  }
  if (!direct) cuda::check_launch("scaled_gemm", cudaMemcpyAsync(args.out, out.const_data_ptr(), m * n * 2, cudaMemcpyDefault, stream));
}

}  // namespace mori::mxfp8
