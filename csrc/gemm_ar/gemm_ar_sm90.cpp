// Host side of gemm_ar on P2P memory: the order of launches, and the table of algorithms for CUDA. mori_ops/symmetric.py owns the
// memory, the side stream and the agreement between ranks.
#include "gemm_ar_sm90.h"

#include "../common/cuda.h"
#include "../common/route.h"
#include "../mxfp8/gemm_sm90.h"

namespace mori::gemm_ar {
namespace {

using mxfp8::Delivery;
using mxfp8::GemmArgs;
using mxfp8::GemmShape;
using mxfp8::Quant;

constexpr const char* kOp = "gemm_ar";

constexpr Route kRoutes[] = {
    {"plain", [](const RouteDims& d) { return d[0] == 1; }, "one rank: scaled_gemm"},
    {"one_shot", [](const RouteDims& d) { return d[0] * d[1] * d[2] <= 8 * 1024 * 1024; }, "few rows: everyone reads everyone's partial sums"},
    {"overlapped", nullptr, "the GEMM writes chunks of rows to their owners, who reduce them while it runs; everyone reads the sums"},
};
const RegisterRoutes kRegistered("gemm_ar", "cuda", kRoutes);

// Work on another stream that begins behind what this one holds, and that this one waits for in the end.
class Fork {
 public:
  Fork(cudaStream_t stream, cudaStream_t side) : stream_(stream), side_(side) { order(stream_, side_); }
  void join() { order(side_, stream_); }

 private:
  static void order(cudaStream_t first, cudaStream_t then) {
    cudaEvent_t event = nullptr;
    cuda::check_launch(kOp, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaError_t error = cudaEventRecord(event, first);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(then, event, 0);
    cudaEventDestroy(event);  // takes effect when it has been reached
    cuda::check_launch(kOp, error);
  }
  cudaStream_t stream_, side_;
};

// The operands, dense, and the GEMM of some of their rows.
class Product {
 public:
  Product(const GemmShape& shape, Quant quant, const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale, Float out_type)
      : shape_(shape), quant_(quant), a_(dense(a)), b_(dense(b)), a_scale_(dense(a_scale)), b_scale_(dense(b_scale)), out_type_(out_type) {}

  GemmArgs args() const {
    GemmArgs args = {};
    args.a = static_cast<const uint8_t*>(a_.const_data_ptr()), args.b = static_cast<const uint8_t*>(b_.const_data_ptr());
    args.a_scale = a_scale_.const_data_ptr(), args.b_scale = b_scale_.const_data_ptr();
    args.out_type = out_type_;
    args.m = shape_.m, args.n = shape_.n, args.k = shape_.k;
    return args;
  }

  // Rows [first, first + count) into `out`; `first` is a multiple of mxfp8::kPackRows.
  void multiply(int64_t first, int64_t count, void* out, int reserved_processors, cudaStream_t stream) const {
    GemmArgs part = args();
    part.a += first * shape_.k;
    part.m = count, part.out = out, part.reserved_processors = reserved_processors;
    Tensor packed = a_scale_;
    if (quant_ != Quant::mxfp8) {
      const int64_t columns = quant_ == Quant::ptpc ? 4 : quant_ == Quant::blockscale ? 4 * ceil_div(shape_.k, mxfp8::kBlockscale) : shape_.k / mxfp8::kBlock;
      part.a_scale = static_cast<const uint8_t*>(part.a_scale) + first * columns;
    } else if (count < shape_.m) {
      Tensor groups = torch::stable::view(a_scale_, {shape_.k / mxfp8::kBlock, ceil_div(shape_.m, mxfp8::kPackRows), mxfp8::kPackRows / 4});
      packed = dense(torch::stable::narrow(groups, 1, first / mxfp8::kPackRows, ceil_div(count, mxfp8::kPackRows)));
      part.a_scale = packed.const_data_ptr();
    }
    mxfp8::launch_scaled(part, quant_, a_, stream);
  }

  bool fits_delivery() const { return mxfp8::delivery_fits(args(), quant_); }
  void deliver(const Delivery& delivery, int reserved_processors, cudaStream_t stream) const {
    GemmArgs all = args();
    all.reserved_processors = reserved_processors;
    mxfp8::launch_delivery(all, quant_, delivery, a_, stream);
  }

 private:
  GemmShape shape_;
  Quant quant_;
  Tensor a_, b_, a_scale_, b_scale_;
  Float out_type_;
};

Delivery delivery_of(const Call& call) {
  Delivery delivery = {};
  delivery.world = call.world, delivery.rank = call.rank;
  delivery.span_rows = call.span_rows(), delivery.chunk_rows = call.chunk_rows;
  for (int owner = 0; owner < call.world; ++owner) {
    delivery.out[owner] = call.slot(owner, call.rank);
    delivery.arrived[owner] = call.signals(owner)->arrived[call.rank];
  }
  delivery.counters = call.signals(call.rank)->delivered[0];
  delivery.epoch = &call.signals(call.rank)->epoch;
  return delivery;
}

void run(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, std::string quant_name, std::optional<Tensor> bias, std::string wire, bool one_shot,
         int64_t chunk_rows, int64_t span_chunks, int64_t rank, std::vector<int64_t> workspaces, std::vector<int64_t> layout, int64_t failure, double timeout,
         int64_t side_stream, Tensor out) {
  const Quant quant = mxfp8::parse_quant(kOp, quant_name);
  const GemmShape shape = mxfp8::check_gemm(kOp, quant, a, b, a_scale, b_scale, bias);
  const int64_t world = static_cast<int64_t>(workspaces.size());
  MORI_CHECK(world <= kMaxWorld && layout.size() == 3, kOp, ": at most ", kMaxWorld, " ranks, got ", world);
  const bool bf16 = out.scalar_type() == ScalarType::BFloat16;
  const int64_t row_bytes = shape.n * (bf16 ? 2 : 4);
  const Tensor bias_row = bias ? dense(*bias) : out;

  Call call = {};
  call.rank = static_cast<int>(rank), call.world = static_cast<int>(world);
  for (int64_t s = 0; s < world; ++s) call.workspace[s] = reinterpret_cast<uint8_t*>(workspaces[s]);
  call.slot_bytes = layout[0], call.sums_offset = layout[1], call.scales_offset = layout[2];
  call.m = shape.m, call.n = shape.n, call.chunk_rows = one_shot ? shape.m : chunk_rows, call.span_chunks = one_shot ? 1 : static_cast<int>(span_chunks);
  call.partial_type = bf16 ? Float::bf16 : Float::f32, call.out_type = cuda::float_type(out), call.bias_type = cuda::float_type(bias_row);
  call.bias = bias ? bias_row.const_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  call.fp8_wire = wire == "fp8", call.one_shot = one_shot;
  call.timeout_ns = static_cast<uint64_t>(timeout * 1e9);
  call.failure = reinterpret_cast<Failure*>(failure);
  const int64_t own_chunks = one_shot ? 1 : call.rounds() * span_chunks;
  MORI_CHECK(own_chunks * call.chunk_rows * row_bytes <= call.slot_bytes && own_chunks <= kMaxChunks, kOp, ": the workspace is too small for [", shape.m, ", ",
             shape.n, "]");

  const Product product(shape, quant, a, b, a_scale, b_scale, call.partial_type);
  const cuda::Launch launch(a);
  const cudaStream_t stream = launch.stream();
  if (one_shot) {
    product.multiply(0, shape.m, call.slot(call.rank, call.rank), 0, stream);
    return cuda::check_launch(kOp, launch_collective(call, Place::behind, stream));
  }
  const auto side = reinterpret_cast<cudaStream_t>(side_stream);
  Fork fork(stream, side);
  // The collective stands behind the GEMM's first launch, which would show what is wrong.
  if (call.chunk_rows % mxfp8::kDeliveryRows == 0 && call.rounds() > 1 && product.fits_delivery()) {
    product.deliver(delivery_of(call), kReservedProcessors, stream);
    cuda::check_launch(kOp, launch_collective(call, Place::beside, side));
  } else {
    for (int64_t round = 0; round < call.rounds(); ++round) {
      for (int64_t i = 1; i <= world; ++i) {  // the peers' rows first: they have the longer way
        const int owner = static_cast<int>((rank + i) % world);
        const int64_t first = (round * world + owner) * call.span_rows();
        if (first >= shape.m) continue;
        uint8_t* target = call.slot(owner, call.rank) + round * call.span_rows() * row_bytes;
        product.multiply(first, std::min(call.span_rows(), shape.m - first), target, kReservedProcessors, stream);
        cuda::check_launch(kOp, launch_signal(call, owner, round, stream));
      }
      if (round == 0) cuda::check_launch(kOp, launch_collective(call, Place::beside, side));
    }
  }
  cuda::check_launch(kOp, launch_collective(call, Place::behind, stream));
  fork.join();
}

}  // namespace
}  // namespace mori::gemm_ar

STABLE_TORCH_LIBRARY_IMPL(mori, CUDA, m) { m.impl("_gemm_ar_symmetric", TORCH_BOX(&mori::gemm_ar::run)); }
