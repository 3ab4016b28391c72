// gemm_ar of few rows on P2P memory, behind the GEMM: every block pushes its part of the partial sums to everyone, waits for everyone's and
// adds up. Pushing needs one way over NVLink where reading takes two. Bound by latency, then by NVLink.
// After `timeout_ns` the rank that is missing is written to host memory, and the block's part is NaN.
#include <algorithm>

#include "../common/launch_sm90.cuh"
#include "rows_sm90.cuh"

namespace mori::gemm_ar {
namespace {

// For the whole block: the flags of all other ranks.
template <class Flag>
__device__ __forceinline__ bool wait_for_all(const Call& call, const Waiter& wait, Flag flag) {
  const int of = threadIdx.x;
  return __syncthreads_and(of >= call.world || of == call.rank || wait(flag(of), of, Signal::arrived)) != 0;
}

template <class Partial, class Out, int W>
__global__ void __launch_bounds__(kThreads, 2) one_shot(const __grid_constant__ Call call) {
  wait_for_dependencies();
  Signals* mine = call.signals(call.rank);
  const Waiter wait = waiter(call);
  // This block's part: whole rows on the fp8 wire, which has a scale for each.
  const int64_t unit = call.fp8_wire ? call.n : W, units = call.m * call.n / unit, share = (units + gridDim.x - 1) / gridDim.x;
  const int64_t begin = min(blockIdx.x * share, units) * unit, end = min(begin + share * unit, call.m * call.n);
  const Rows<Partial, Out> rows = {call, 0, call.m, 0, wait.epoch};
  const Partial* own = rows.summand(call.rank);
  for (int i = 1; i < call.world; ++i) {
    const int s = (call.rank + i) % call.world;
    copy<W>(reinterpret_cast<Partial*>(call.inbox(s, call.rank, wait.epoch)) + begin, own + begin, end - begin);
  }
  __syncthreads();
  if (threadIdx.x < call.world && threadIdx.x != call.rank) store_release(&call.signals(threadIdx.x)->pushed[call.rank][blockIdx.x], wait.epoch);
  // Everyone has read the epoch of the last call by now.
  if (threadIdx.x == 0 && atomicAdd(&mine->finished_blocks, 1) == gridDim.x - 1) mine->finished_blocks = 0, mine->epoch = wait.epoch;
  if (!wait_for_all(call, wait, [&](int of) { return &mine->pushed[of][blockIdx.x]; })) {
    fill_nan(rows.out(), begin, end);
  } else if (call.fp8_wire) {
    reduce_fp8<W>(rows, begin / call.n, end / call.n, nullptr);
  } else {
    reduce_plain<W>(rows, begin, end, static_cast<Out*>(nullptr));
  }
}

}  // namespace

cudaError_t launch_one_shot(const Call& call, cudaStream_t stream) {
  // Measured with 16 bytes of four places per thread (H200, N = 7168): M = 64 26 us where a block for every place takes 30, 256 42 for 49.
  constexpr int64_t kShare = 4 * 8 * kThreads;
  const int64_t wanted = call.fp8_wire ? call.m : (call.m * call.n + kShare - 1) / kShare;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kMaxBlocks));
  return with_types(call, [&](auto partial, auto out) {
    using Partial = decltype(partial);
    using Out = decltype(out);
    return launch_overlapped(wide(call) ? one_shot<Partial, Out, 8> : one_shot<Partial, Out, 1>, blocks, kThreads, 0, stream, call);
  });
}

}  // namespace mori::gemm_ar
