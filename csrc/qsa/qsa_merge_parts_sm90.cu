// Joins the parts of an item that was cut between workers of the sparse kernel, in order: out = sum_i w_i * part_i / sum_i w_i * sum_i with
// w_i = exp(maximum_i - maximum), then the gate. Bound by latency: the partial sums are requested before the weights are known.
#include "../common/launch_sm90.cuh"
#include "qsa_parts_sm90.cuh"
#include "qsa_tensor_sm90.cuh"

namespace mori::qsa {
namespace {

using namespace sm90;

// kDim / 4 threads per (boundary between workers, side, query row); a
// few rows share a CTA where there may be nothing to do.
constexpr int kMergeRows = 8;
template <int kDim>
__global__ void __launch_bounds__(kDim / 4 * kMergeRows) merge_parts(const AttnArgs args, const Plan plan) {
  wait_for_dependencies();
  launch_dependents();
  const Parts plan_parts(plan.status == nullptr ? plan.units : __ldcg(plan.units_left), plan.most_workers);
  const int boundary = blockIdx.x + 1;
  if (boundary >= plan_parts.workers) return;
  const int item = plan_parts.begin(boundary) / plan.rounds, item_begin = item * plan.rounds, previous = plan_parts.begin(boundary - 1);
  if (plan_parts.begin(boundary) == item_begin || previous > item_begin) return;  // nothing is cut here, or an earlier boundary's CTA has it
  const int parts = plan_parts.owner(item_begin + plan.rounds - 1) - boundary + 2;
  const int side_row = blockIdx.y * blockDim.y + threadIdx.y, side = side_row / kTileRows, row = side_row % kTileRows, column = threadIdx.x * 4, lane = threadIdx.x % 32;
  const int group = static_cast<int>(args.q_heads / args.kv_heads), head_tiles = (group + kTileRows - 1) / kTileRows;
  const int tile = item % plan.pairs * plan.step + side;
  if (row >= group - tile % head_tiles * kTileRows) return;
  // Only the first worker can have begun with another item.
  const int first = (((boundary - 1) * plan.step + side) * 2 + (previous < item_begin)) * kTileRows + row;
  const int stride = plan.step * 2 * kTileRows, second = (boundary * plan.step + side) * 2 * kTileRows + row;
  const auto slot = [&](int i) { return i == 0 ? first : second + (i - 1) * stride; };
  const int64_t token = plan.status == nullptr ? item / plan.pairs : __float_as_int(__ldcg(&plan.stats[first]).w);
  if (token >= args.tokens) return;

  constexpr int kBatch = 16;
  float4 part[kBatch];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (begin + i < parts) part[i] = __ldcg(reinterpret_cast<const float4*>(plan.sums + static_cast<int64_t>(slot(begin + i)) * kDim + column));
  };
  load(0);
  constexpr int kLanes = kDim / 4 < 32 ? kDim / 4 : 32;
  constexpr uint32_t kMask = kLanes == 32 ? ~0u : (1u << kLanes) - 1;  // dim 64: no status, so one row a CTA
  float top = kLowest;
  for (int i = lane; i < parts; i += kLanes) top = fmaxf(top, __ldcg(&plan.stats[slot(i)]).x);
  for (int offset = kLanes / 2; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kMask, top, offset));
  float total = 0.0f;
  float4 sum = {};
  for (int begin = 0; begin < parts; begin += kBatch) {  // a lane per part for the weights, then every thread over the parts
    float weight = 0.0f, share = 0.0f;
    if (lane < kBatch && begin + lane < parts) {
      const float4 stat = __ldcg(&plan.stats[slot(begin + lane)]);
      weight = exp2_fast((stat.x - top) * stat.z);
      share = weight * stat.y;
    }
    for (int offset = kBatch / 2; offset > 0; offset /= 2) share += __shfl_xor_sync(kMask, share, offset);
    total += __shfl_sync(kMask, share, 0);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float w = __shfl_sync(kMask, weight, i);
      if (begin + i >= parts) continue;
      sum.x = fmaf(w, part[i].x, sum.x), sum.y = fmaf(w, part[i].y, sum.y), sum.z = fmaf(w, part[i].z, sum.z), sum.w = fmaf(w, part[i].w, sum.w);
    }
    load(begin + kBatch);
  }
  const float inverse = total == 0.0f ? 0.0f : __frcp_rn(total);
  const int64_t head = static_cast<int64_t>(tile / head_tiles) * group + tile % head_tiles * kTileRows + row, at = (token * args.q_heads + head) * kDim + column;
  const char* gate = args.gate.data == nullptr || total == 0.0f ? nullptr : args.gate.data + token * args.gate.stride + head * args.gate.head_stride;
  store_pair(args, at, sum.x * inverse, sum.y * inverse, gate, column);
  store_pair(args, at + 2, sum.z * inverse, sum.w * inverse, gate, column + 2);
}

template <int kDim>
cudaError_t launch(const AttnArgs& args, const Plan& plan, cudaStream_t stream) {
  const Parts parts(plan.units, plan.most_workers);
  bool cut = plan.status != nullptr;
  for (int i = 1; i < parts.workers && !cut; ++i) cut = parts.begin(i) % plan.rounds != 0;
  if (!cut || parts.workers < 2) return cudaSuccess;
  const int rows = plan.status == nullptr ? 1 : kMergeRows;
  return launch_overlapped(merge_parts<kDim>, dim3(parts.workers - 1, plan.step * kTileRows / rows), dim3(kDim / 4, rows), 0, stream, args, plan);
}

}  // namespace

cudaError_t launch_merge_parts(const AttnArgs& args, const Plan& plan, cudaStream_t stream) {
  switch (args.dim) {
    case 64: return launch<64>(args, plan, stream);
    case 128: return launch<128>(args, plan, stream);
    default: return launch<256>(args, plan, stream);
  }
}

}  // namespace mori::qsa
