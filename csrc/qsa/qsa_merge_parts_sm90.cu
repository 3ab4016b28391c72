// Joins the parts of an item that was cut between workers of the sparse kernel, in order: out = sum_i w_i * part_i / sum_i w_i * sum_i with
// w_i = exp(maximum_i - maximum), then the gate. A warp per (boundary between workers, side, query row). Bound by latency: the first partial
// sums are requested before the weights are known.
#include "../common/launch_sm90.cuh"
#include "qsa_parts_sm90.cuh"
#include "qsa_tensor_sm90.cuh"

namespace mori::qsa {
namespace {

using namespace sm90;

constexpr int kWarps = 8;
constexpr int kBatch = 4;  // parts whose sums are on their way together

__host__ __device__ inline int rows_of_side(int group) { return group < kTileRows ? group : kTileRows; }

template <int kDim>
__global__ void __launch_bounds__(kWarps * 32) merge_parts(const AttnArgs args, const Plan plan) {
  constexpr int kPairs = kDim / 64;  // of neighbouring dims, of a lane
  wait_for_dependencies();
  launch_dependents();
  const int units = plan.status == nullptr ? plan.units : __ldcg(plan.units_left);
  if (units == 0) return;
  const Parts plan_parts(units, plan.most_workers);
  const int boundary = blockIdx.x + 1;
  if (boundary >= plan_parts.workers) return;
  const int item = plan_parts.begin(boundary) / plan.rounds, item_begin = item * plan.rounds, previous = plan_parts.begin(boundary - 1);
  if (plan_parts.begin(boundary) == item_begin || previous > item_begin) return;  // nothing is cut here, or an earlier boundary's warp has it
  const int group = static_cast<int>(args.q_heads / args.kv_heads), head_tiles = (group + kTileRows - 1) / kTileRows, side_rows = rows_of_side(group);
  const int side_row = blockIdx.y * kWarps + threadIdx.x / 32, side = side_row / side_rows, row = side_row % side_rows, lane = threadIdx.x % 32;
  const int tile = item % plan.pairs * plan.step + side;
  if (side >= plan.step || row >= group - tile % head_tiles * kTileRows) return;
  // Only the first worker can have begun with another item.
  const int first = (((boundary - 1) * plan.step + side) * 2 + (previous < item_begin)) * kTileRows + row;
  const int stride = plan.step * 2 * kTileRows, second = (boundary * plan.step + side) * 2 * kTileRows + row;
  const auto slot = [&](int i) { return i == 0 ? first : second + (i - 1) * stride; };
  const int parts = plan_parts.owner(item_begin + plan.rounds - 1) - boundary + 2;

  float2 part[kBatch][kPairs];
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
#pragma unroll
      for (int j = 0; j < kPairs; ++j)
        if (begin + i < parts) part[i][j] = __ldcg(reinterpret_cast<const float2*>(plan.sums + static_cast<int64_t>(slot(begin + i)) * kDim) + j * 32 + lane);
  };
  load(0);
  float4 stat;  // of part begin + lane
  const auto load_stat = [&](int begin) { stat = begin + lane < parts ? __ldcg(&plan.stats[slot(begin + lane)]) : make_float4(kLowest, 0.0f, 0.0f, 0.0f); };
  load_stat(0);
  const int64_t token = __shfl_sync(~0u, __float_as_int(stat.w), 0);
  float top = stat.x;
  for (int i = lane + 32; i < parts; i += 32) top = fmaxf(top, __ldcg(&plan.stats[slot(i)]).x);
  for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
  float weight = 0.0f, total = 0.0f;
  float2 sum[kPairs] = {};
  for (int begin = 0; begin < parts; begin += kBatch) {
    if (begin % 32 == 0) {
      if (begin > 0) load_stat(begin);
      weight = stat.y == 0.0f ? 0.0f : exp2_fast((stat.x - top) * stat.z);  // 0 also where the factor is NaN
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float w = __shfl_sync(~0u, weight, (begin + i) % 32), share = __shfl_sync(~0u, weight * stat.y, (begin + i) % 32);
      if (begin + i >= parts) continue;
      total += share;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) sum[j].x = fmaf(w, part[i][j].x, sum[j].x), sum[j].y = fmaf(w, part[i][j].y, sum[j].y);
    }
    load(begin + kBatch);
  }
  const float inverse = total == 0.0f ? 0.0f : __frcp_rn(total);
  const int64_t head = static_cast<int64_t>(tile / head_tiles) * group + tile % head_tiles * kTileRows + row;
  const char* gate = args.gate.data == nullptr || total == 0.0f ? nullptr : args.gate.data + token * args.gate.stride + head * args.gate.head_stride;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const int dim = j * 64 + 2 * lane;
    store_pair(args, (token * args.q_heads + head) * kDim + dim, sum[j].x * inverse, sum[j].y * inverse, gate, dim);
  }
}

template <int kDim>
cudaError_t launch(const AttnArgs& args, const Plan& plan, cudaStream_t stream) {
  const Parts parts(plan.units, plan.most_workers);
  bool cut = plan.status != nullptr;
  for (int i = 1; i < parts.workers && !cut; ++i) cut = parts.begin(i) % plan.rounds != 0;
  if (!cut || parts.workers < 2) return cudaSuccess;
  const int rows = plan.step * rows_of_side(static_cast<int>(args.q_heads / args.kv_heads));
  return launch_overlapped(merge_parts<kDim>, dim3(parts.workers - 1, (rows + kWarps - 1) / kWarps), kWarps * 32, 0, stream, args, plan);
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
