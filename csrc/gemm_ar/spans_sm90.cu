// Reduce and gather of gemm_ar on P2P memory for any number of ranks and any types; the protocol stands in gemm_ar_sm90.h.
//
// Blocks draw tickets for pieces of 16 rows: half of them first to reduce (own slots are local memory, which peers have written), half
// first to gather (reads of peers' sums over NVLink). kReservedProcessors blocks run beside the GEMM; when it is through, its processors
// help with the rest. Bound by the few processors beside the GEMM: two ranks take `pair` instead where they can.
// No wait is endless: after `timeout_ns` the rank that is missing is written to host memory and the rest of the output is NaN.
#include "rows_sm90.cuh"

namespace mori::gemm_ar {
namespace {

// The next ticket, for the whole block.
__device__ __forceinline__ int64_t draw(uint32_t* ticket) {
  __shared__ uint32_t drawn;
  __syncthreads();
  if (threadIdx.x == 0) drawn = atomicAdd(ticket, 1);
  __syncthreads();
  return drawn;
}

// The piece-th piece of rank `of`'s rows; its count is 0 or less where there is none.
template <class Partial, class Out>
__device__ __forceinline__ Rows<Partial, Out> piece_rows(const Call& call, int of, int64_t piece) {
  const int64_t own = piece * kPieceRows, first = call.first_row(of, own / call.chunk_rows) + own % call.chunk_rows;
  return {call, first, min(int64_t{kPieceRows}, call.m - first), own, 0};
}

template <class Partial, class Out, int W>
__device__ void reduce_piece(const Call& call, const Waiter& wait, int64_t piece) {
  const auto rows = piece_rows<Partial, Out>(call, call.rank, piece);
  if (rows.count <= 0) return;
  Signals* mine = call.signals(call.rank);
  const int64_t number = rows.own / call.chunk_rows, at = rows.own * call.n, elements = rows.count * call.n;
  const int of = threadIdx.x;
  if (!__syncthreads_and(of >= call.world || wait(&mine->arrived[of][number], of, Signal::arrived))) return fill_nan(rows.out(), 0, elements);
  if (call.fp8_wire) {
    reduce_fp8<W>(rows, 0, rows.count, call.codes(call.rank) + rows.own * wire_bytes(call.n));
  } else {
    reduce_plain<W>(rows, 0, elements, reinterpret_cast<Out*>(call.sums(call.rank)) + at);
  }
  const int64_t chunk = min(call.chunk_rows, call.m - call.first_row(call.rank, number));
  if (is_last(&mine->reduced_pieces[number], static_cast<uint32_t>((chunk + kPieceRows - 1) / kPieceRows)))
    for (int s = 0; s < call.world; ++s) store_release(&call.signals(s)->reduced[call.rank][number], wait.epoch);
}

template <class Partial, class Out, int W>
__device__ void gather_piece(const Call& call, const Waiter& wait, int64_t ticket) {
  const int64_t per_chunk = call.chunk_rows / kPieceRows, turn = ticket / per_chunk;  // a chunk of every peer in turn
  const int of = static_cast<int>((call.rank + 1 + turn % (call.world - 1)) % call.world);
  const auto rows = piece_rows<Partial, Out>(call, of, turn / (call.world - 1) * per_chunk + ticket % per_chunk);
  if (rows.count <= 0) return;
  const int64_t at = rows.own * call.n, elements = rows.count * call.n;
  const uint32_t* flag = &call.signals(call.rank)->reduced[of][rows.own / call.chunk_rows];
  if (!__syncthreads_and(threadIdx.x != 0 || wait(flag, of, Signal::reduced))) return fill_nan(rows.out(), 0, elements);
  if (call.fp8_wire) {
    decode_rows<W>(call.n, threadIdx.x / 32, kThreads / 32, rows.count, call.codes(of) + rows.own * wire_bytes(call.n), rows.out());
  } else {
    copy<W>(rows.out(), reinterpret_cast<const Out*>(call.sums(of)) + at, elements);
  }
}

template <class Partial, class Out, int W>
__global__ void __launch_bounds__(kThreads, 1) reduce_and_gather(const __grid_constant__ Call call) {
  Signals* mine = call.signals(call.rank);
  const Waiter wait = waiter(call);
  const int64_t pieces = call.rounds() * call.span_rows() / kPieceRows;  // of an owner, at most
  const auto reduce = [&] {
    for (int64_t ticket; (ticket = draw(&mine->reduce_ticket)) < pieces;) reduce_piece<Partial, Out, W>(call, wait, ticket);
  };
  const auto gather = [&] {
    for (int64_t ticket; (ticket = draw(&mine->gather_ticket)) < pieces * (call.world - 1);) gather_piece<Partial, Out, W>(call, wait, ticket);
  };
  if (blockIdx.x % 2 == 0) reduce();
  gather();
  if (blockIdx.x % 2 != 0) reduce();

  if (is_last(&mine->finished_blocks, call.blocks)) {
    mine->reduce_ticket = mine->gather_ticket = 0;
    mine->epoch = wait.epoch;
  }
}

__global__ void signal_arrived(const __grid_constant__ Call call, int owner, int64_t round) {
  store_release(&call.signals(owner)->arrived[call.rank][round * call.span_chunks + threadIdx.x], call.signals(call.rank)->epoch + 1);
}

}  // namespace

cudaError_t launch_signal(const Call& call, int owner, int64_t round, cudaStream_t stream) {
  signal_arrived<<<1, call.span_chunks, 0, stream>>>(call, owner, round);
  return cudaGetLastError();
}

cudaError_t launch_spans(Call call, Place place, cudaStream_t stream) {
  constexpr int kHelpers = 124;
  const int blocks = place == Place::beside ? kReservedProcessors : kHelpers;
  call.blocks = kReservedProcessors + kHelpers;
  return with_types(call, [&](auto partial, auto out) {
    using Partial = decltype(partial);
    using Out = decltype(out);
    (wide(call) ? reduce_and_gather<Partial, Out, 8> : reduce_and_gather<Partial, Out, 1>)<<<blocks, kThreads, 0, stream>>>(call);
    return cudaGetLastError();
  });
}

}  // namespace mori::gemm_ar
