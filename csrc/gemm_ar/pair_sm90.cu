// What stands between the copies of gemm_ar's `pair`: signals and waits, the fp8 wire, the end. The sums are made by the GEMM
// (mxfp8/pair_sm90.cuh), the protocol stands in gemm_ar_sm90.h.
#include "rows_sm90.cuh"

namespace mori::gemm_ar {
namespace {

constexpr int kChunkBlocks = 256;  // for a chunk on the fp8 wire

__global__ void pair_step(const __grid_constant__ Call call, const Step step) {
  Signals* mine = call.signals(call.rank);
  const Waiter wait = waiter(call);
  const int peer = 1 - call.rank;
  if (step.arrived >= 0) store_release(&call.signals(peer)->arrived[call.rank][step.arrived], wait.epoch);
  if (step.delivered >= 0) wait(&mine->delivered[step.delivered], call.rank, Signal::delivered);
  if (step.summed >= 0) wait(&mine->summed[step.summed], call.rank, Signal::delivered);
  if (step.reduced >= 0) wait(&mine->reduced[peer][step.reduced], peer, Signal::reduced);
}

// A chunk of own rows to the fp8 wire. No block waits: the processors beside the GEMM are few, and the steps need them.
__global__ void __launch_bounds__(kThreads) encode_chunk(const __grid_constant__ Call call, const int chunk) {
  using T = __nv_bfloat16;
  constexpr int W = 8, U = 4, step = kThreads * W;
  Signals* mine = call.signals(call.rank);
  const int64_t n = call.n, own = chunk * call.chunk_rows, first = call.first_row(call.rank, chunk), count = min(call.chunk_rows, call.m - first);
  const T* sums = reinterpret_cast<const T*>(call.sums(call.rank)) + own * n;
  const auto read = [&](int64_t row, int64_t column, float (&v)[U][W]) {
    Pack<T, W> pack[U];
#pragma unroll
    for (int u = 0; u < U; ++u) pack[u] = load<T, W>(sums + row * n + (column + u * step < n ? column + u * step : column));
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int i = 0; i < W; ++i) v[u][i] = to_float(pack[u].value[i]);
  };
  const int64_t share = (count + gridDim.x - 1) / gridDim.x, begin = min(blockIdx.x * share, count), end = min(begin + share, count);
  encode_rows<W, U>(n, begin, end, read, static_cast<T*>(call.out) + first * n, call.codes(call.rank) + own * wire_bytes(n));
  if (is_last(&mine->reduced_pieces[chunk], gridDim.x)) store_release(&call.signals(1 - call.rank)->reduced[call.rank][chunk], mine->epoch + 1);
}

// A chunk of the peer's rows that a copy engine has fetched.
__global__ void __launch_bounds__(kThreads) decode_chunk(const __grid_constant__ Call call, const int chunk) {
  const int64_t first = call.first_row(1 - call.rank, chunk), count = min(call.chunk_rows, call.m - first);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32, warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  decode_rows<8>(call.n, warp, warps, count, call.fetched() + chunk * call.chunk_rows * wire_bytes(call.n), static_cast<__nv_bfloat16*>(call.out) + first * call.n);
}

template <class Out>
__global__ void __launch_bounds__(kThreads) end_of_call(const __grid_constant__ Call call) {
  Signals* mine = call.signals(call.rank);
  if (mine->failed != 0) {
    const int64_t elements = call.m * call.n, share = (elements + gridDim.x - 1) / gridDim.x;
    fill_nan(static_cast<Out*>(call.out), blockIdx.x * share, min((blockIdx.x + 1) * share, elements));
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) ++mine->epoch;
}

}  // namespace

cudaError_t load_pair_kernels() {
  const void* const kernels[] = {reinterpret_cast<const void*>(pair_step), reinterpret_cast<const void*>(encode_chunk), reinterpret_cast<const void*>(decode_chunk),
                                 reinterpret_cast<const void*>(end_of_call<__nv_bfloat16>)};
  cudaFuncAttributes attributes;
  for (const void* kernel : kernels)
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) return error;
  return cudaSuccess;
}

cudaError_t launch_step(const Call& call, const Step& step, cudaStream_t stream) {
  pair_step<<<1, 1, 0, stream>>>(call, step);
  return cudaGetLastError();
}

cudaError_t launch_encode(const Call& call, int chunk, cudaStream_t stream) {
  encode_chunk<<<kChunkBlocks, kThreads, 0, stream>>>(call, chunk);
  return cudaGetLastError();
}
cudaError_t launch_decode(const Call& call, int chunk, cudaStream_t stream) {
  decode_chunk<<<kChunkBlocks, kThreads, 0, stream>>>(call, chunk);
  return cudaGetLastError();
}

cudaError_t launch_end(const Call& call, cudaStream_t stream) {
  return with_types(call, [&](auto, auto out) {
    end_of_call<decltype(out)><<<132, kThreads, 0, stream>>>(call);
    return cudaGetLastError();
  });
}

}  // namespace mori::gemm_ar
