// Host side of gemm_ar on P2P memory of AMD GPUs: the launches of a call, and the table of algorithms. mori_ops/symmetric.py owns
// the memory, the side stream and the agreement between ranks.
#include "gemm_ar_gfx950.h"

#include "../common/hip.h"
#include "../common/route.h"
#include "../mxfp8/gemm_gfx950.h"

namespace mori::gemm_ar {
namespace {

using mxfp8::GemmShape;
using mxfp8::Quant;

constexpr const char* kOp = "gemm_ar";

// The threshold is that of the H200s; nothing was measured on AMD hardware.
constexpr Route kRoutes[] = {
    {"plain", [](const RouteDims& d) { return d[0] == 1; }, "one rank: scaled_gemm"},
    {"one_shot", [](const RouteDims& d) { return d[0] * d[1] * d[2] <= 8 * 1024 * 1024; }, "few rows: everyone reads everyone's partial sums"},
    {"overlapped", nullptr, "the GEMM stores rows at their owners, who reduce them while it runs; everyone reads the sums"},
};
const RegisterRoutes kRegistered("gemm_ar", "cuda", kRoutes);

void order(hipStream_t first, hipStream_t then) {
  hipEvent_t event = nullptr;
  hip::check_launch(kOp, hipEventCreateWithFlags(&event, hipEventDisableTiming));
  hipError_t error = hipEventRecord(event, first);
  if (error == hipSuccess) error = hipStreamWaitEvent(then, event, 0);
  static_cast<void>(hipEventDestroy(event));  // takes effect when it has been reached
  hip::check_launch(kOp, error);
}

void run(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, std::string quant_name, std::optional<Tensor> bias, std::string wire, std::string algorithm,
         int64_t chunk_rows, int64_t span_chunks, int64_t rank, std::vector<int64_t> workspaces, std::vector<int64_t> layout, int64_t failure, double timeout,
         std::vector<int64_t> side_streams, Tensor out) {
  const Quant quant = mxfp8::parse_quant(kOp, quant_name);
  const GemmShape shape = mxfp8::check_gemm(kOp, quant, a, b, a_scale, b_scale, bias);
  const int64_t world = static_cast<int64_t>(workspaces.size());
  MORI_CHECK(world <= kMaxWorld && layout.size() == 6 && !side_streams.empty(), kOp, ": at most ", kMaxWorld, " ranks, got ", world);
  const bool one_shot = algorithm == "one_shot";
  MORI_CHECK(one_shot || (chunk_rows > 0 && chunk_rows % kDeliveryRows == 0), kOp, ": chunk_rows must be a multiple of ", kDeliveryRows, ", got ", chunk_rows);
  const bool bf16 = out.scalar_type() == ScalarType::BFloat16;
  const Tensor codes_a = dense(a), codes_b = dense(b), scale_a = dense(a_scale), scale_b = dense(b_scale), bias_row = bias ? dense(*bias) : out;

  Call call = {};
  call.rank = static_cast<int>(rank), call.world = static_cast<int>(world);
  for (int64_t s = 0; s < world; ++s) call.workspace[s] = reinterpret_cast<uint8_t*>(workspaces[s]);
  call.slot_bytes = layout[0], call.sums_offset = layout[1], call.scales_offset = layout[2];  // the rest is of other algorithms
  call.m = shape.m, call.n = shape.n, call.chunk_rows = one_shot ? shape.m : chunk_rows, call.span_chunks = one_shot ? 1 : static_cast<int>(span_chunks);
  call.partial_type = bf16 ? Float::bf16 : Float::f32, call.out_type = hip::float_type(out), call.bias_type = hip::float_type(bias_row);
  call.bias = bias ? bias_row.const_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  call.fp8_wire = wire == "fp8", call.one_shot = one_shot;
  call.timeout = static_cast<uint64_t>(timeout * Call::kTicksPerSecond);
  call.failure = reinterpret_cast<Failure*>(failure);
  const int64_t own_chunks = one_shot ? 1 : call.rounds() * span_chunks;
  MORI_CHECK(own_chunks * call.chunk_rows * shape.n * gfx950::bytes_of(call.partial_type) <= call.slot_bytes && own_chunks <= kMaxChunks, kOp,
             ": the workspace is too small for [", shape.m, ", ", shape.n, "]");

  const hip::Launch launch(a);
  const hipStream_t stream = launch.stream(), side = reinterpret_cast<hipStream_t>(side_streams[0]);
  mxfp8::GemmArgs args = {};
  args.a = static_cast<const uint8_t*>(codes_a.const_data_ptr()), args.b = static_cast<const uint8_t*>(codes_b.const_data_ptr());
  args.a_scale = scale_a.const_data_ptr(), args.b_scale = scale_b.const_data_ptr();
  args.out = call.slot(call.rank, call.rank), args.out_type = call.partial_type;
  args.m = shape.m, args.n = shape.n, args.k = shape.k;
  const mxfp8::Plan plan = mxfp8::plan_gemm(args, quant, one_shot, a, launch);
  if (one_shot) {
    hip::check_launch(kOp, mxfp8::launch_plan(plan, stream));
    return hip::check_launch(kOp, launch_collective(call, stream));
  }
  order(stream, side);
  hip::check_launch(kOp, launch_delivery(call, plan.args, plan.scales, plan.form, stream));
  hip::check_launch(kOp, launch_collective(call, side));
  order(side, stream);
}

void prepare(Tensor) {}  // no kernel here waits for one that is launched later

}  // namespace
}  // namespace mori::gemm_ar

STABLE_TORCH_LIBRARY_IMPL(mori, CUDA, m) {
  m.impl("_gemm_ar_prepare", TORCH_BOX(&mori::gemm_ar::prepare));
  m.impl("_gemm_ar_symmetric", TORCH_BOX(&mori::gemm_ar::run));
}
