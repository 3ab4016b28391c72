// Reduce, gather and signals of gemm_ar on P2P memory; the protocol stands in gemm_ar_sm90.h.
//
//   overlapped  blocks draw tickets for pieces of 16 rows: half of them first to reduce (own slots are local memory, which peers have
//               written), half first to gather (reads of peers' sums over NVLink). kReservedProcessors blocks run beside the
//               GEMM; when it is through, its processors help with the rest
//   one-shot    behind the GEMM: every block reads its rows from everyone's slot
// fp32 sums in rank order, bias, one rounding; on the fp8 wire a warp has a row: |max| first, then codes and their values.
// No wait is endless: after `timeout_ns` the rank that is missing is written to host memory and the rest of the output is NaN.
#include "gemm_ar_sm90.h"

#include <algorithm>

#include <cuda_fp8.h>

namespace mori::gemm_ar {
namespace {

using namespace sm90;

constexpr int kThreads = 256;
constexpr float kE4m3Max = 448.f, kTiny = 1.17549435e-38f;  // a zero row must not divide by zero

// ---- signals ----

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory"); }
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

enum Signal : uint32_t { kArrived, kReduced, kDone };

struct Waiter {
  const Call& call;
  uint32_t epoch;
  uint64_t deadline;

  __device__ __forceinline__ bool operator()(const uint32_t* flag, int of, Signal signal) const {
    Signals* mine = call.signals(call.rank);
    while (static_cast<int32_t>(load_acquire(flag) - epoch) < 0) {
      if (*reinterpret_cast<volatile uint32_t*>(&mine->failed) != 0) return false;
      if (nanoseconds() > deadline) {
        if (atomicExch(&mine->failed, 1) == 0) {
          call.failure->signal = signal;
          call.failure->epoch = epoch;
          __threadfence_system();
          *reinterpret_cast<volatile uint32_t*>(&call.failure->rank_plus_one) = of + 1;
        }
        return false;
      }
    }
    return true;
  }

  // For the whole block: chunk `number` of this rank has every rank's summand.
  __device__ __forceinline__ bool all_arrived(int64_t number) const {
    const int of = threadIdx.x;
    return __syncthreads_and(of >= call.world || (*this)(&call.signals(call.rank)->arrived[of][number], of, kArrived)) != 0;
  }
  __device__ __forceinline__ bool reduced(int of, int64_t number) const {
    return __syncthreads_and(threadIdx.x != 0 || (*this)(&call.signals(call.rank)->reduced[of][number], of, kReduced)) != 0;
  }
};

// Counts what the whole block has done; true in one thread of the block that makes it `all`, which sees what the others did.
__device__ __forceinline__ bool is_last(uint32_t* counter, uint32_t all) {
  __syncthreads();
  if (threadIdx.x != 0) return false;
  __threadfence();
  if (atomicAdd(counter, 1) != all - 1) return false;
  *counter = 0;
  __threadfence_system();
  return true;
}

// The next ticket, for the whole block.
__device__ __forceinline__ int64_t draw(uint32_t* ticket) {
  __shared__ uint32_t drawn;
  __syncthreads();
  if (threadIdx.x == 0) drawn = atomicAdd(ticket, 1);
  __syncthreads();
  return drawn;
}

// ---- W neighbouring values (1, or 8 where everything is aligned) ----

template <class T, int W>
struct alignas(W * sizeof(T) > 16 ? 16 : W * sizeof(T)) Pack {
  T value[W];
};

// Past L1: peers write what is read here while the kernel runs.
template <class T, int W>
__device__ __forceinline__ Pack<T, W> load(const T* at) {
  Pack<T, W> pack;
  if constexpr (W * sizeof(T) == 16) {
    *reinterpret_cast<uint4*>(&pack) = __ldcg(reinterpret_cast<const uint4*>(at));
  } else if constexpr (W * sizeof(T) == 32) {
    reinterpret_cast<uint4*>(&pack)[0] = __ldcg(reinterpret_cast<const uint4*>(at));
    reinterpret_cast<uint4*>(&pack)[1] = __ldcg(reinterpret_cast<const uint4*>(at) + 1);
  } else if constexpr (W * sizeof(T) == 8) {
    *reinterpret_cast<uint2*>(&pack) = __ldcg(reinterpret_cast<const uint2*>(at));
  } else if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<uint32_t*>(&pack) = __ldcg(reinterpret_cast<const uint32_t*>(at));
  } else if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<unsigned short*>(&pack) = __ldcg(reinterpret_cast<const unsigned short*>(at));
  } else {
    *reinterpret_cast<unsigned char*>(&pack) = __ldcg(reinterpret_cast<const unsigned char*>(at));
  }
  return pack;
}

template <class T, int W>
__device__ __forceinline__ void store(T* at, const Pack<T, W>& pack) {
  *reinterpret_cast<Pack<T, W>*>(at) = pack;
}

// ---- rows ----

// The rows that a block works on, and where they stand. `summand(s)` is rank s's.
template <class Partial, class Out>
struct Rows {
  const Call& call;
  int64_t first, count;       // in the output
  int64_t own;                // first row of this chunk in the owner's slots and sums
  int block, blocks;          // this block's share

  __device__ __forceinline__ const Partial* summand(int s) const {
    return reinterpret_cast<const Partial*>(call.slot(call.one_shot ? s : call.rank, s)) + own * call.n;
  }
  __device__ __forceinline__ Out* out() const { return static_cast<Out*>(call.out) + first * call.n; }
  __device__ __forceinline__ int64_t thread() const { return static_cast<int64_t>(block) * kThreads + threadIdx.x; }
  __device__ __forceinline__ int64_t threads() const { return static_cast<int64_t>(blocks) * kThreads; }
};

template <int W, class Partial, class Out>
__device__ __forceinline__ void add_bias(const Rows<Partial, Out>& rows, int64_t at, float (&sum)[W]) {
  if (rows.call.bias == nullptr) return;
  const int64_t column = at % rows.call.n;
#pragma unroll
  for (int i = 0; i < W; ++i) {
    switch (rows.call.bias_type) {
      case Float::f32: sum[i] += static_cast<const float*>(rows.call.bias)[column + i]; break;
      case Float::bf16: sum[i] += to_float(static_cast<const __nv_bfloat16*>(rows.call.bias)[column + i]); break;
      default: sum[i] += to_float(static_cast<const __half*>(rows.call.bias)[column + i]);
    }
  }
}

// The finished sums of W values at U places, `stride` apart; places past `end` repeat the last one.
template <int W, int U, class Partial, class Out>
__device__ __forceinline__ void sums_at(const Rows<Partial, Out>& rows, const int64_t (&at)[U], float (&sum)[U][W]) {
  for (int s = 0; s < rows.call.world; ++s) {
    const Partial* summand = rows.summand(s);
    Pack<Partial, W> pack[U];
#pragma unroll
    for (int u = 0; u < U; ++u) pack[u] = load<Partial, W>(summand + at[u]);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int i = 0; i < W; ++i) sum[u][i] = s == 0 ? to_float(pack[u].value[i]) : sum[u][i] + to_float(pack[u].value[i]);
  }
#pragma unroll
  for (int u = 0; u < U; ++u) add_bias<W>(rows, at[u], sum[u]);
}

// Sums to the output, and to `keep` for the others.
template <int W, class Partial, class Out>
__device__ void reduce_plain(const Rows<Partial, Out>& rows, Out* keep) {
  constexpr int U = W == 1 ? 1 : 8 / sizeof(Partial);  // loads in flight of each thread and summand
  const int64_t end = rows.count * rows.call.n, step = rows.threads() * W;
  Out* out = rows.out();
  for (int64_t first = rows.thread() * W; first < end; first += U * step) {
    int64_t at[U];
#pragma unroll
    for (int u = 0; u < U; ++u) at[u] = first + u * step < end ? first + u * step : first;
    float sum[U][W];
    sums_at<W, U>(rows, at, sum);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      Pack<Out, W> pack;
#pragma unroll
      for (int i = 0; i < W; ++i) pack.value[i] = from_float<Out>(sum[u][i]);
      store(out + at[u], pack);
      if (keep != nullptr) store(keep + at[u], pack);
    }
  }
}

__device__ __forceinline__ uint8_t encode_e4m3(float v) { return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3); }
__device__ __forceinline__ float decode_e4m3(uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }

// The same through the fp8 wire: what the others decode stands in the output too. One warp per row.
template <int W, class Partial, class Out>
__device__ void reduce_fp8(const Rows<Partial, Out>& rows, uint8_t* keep, float* keep_scale) {
  const int64_t n = rows.call.n;
  const int lane = threadIdx.x % 32;
  for (int64_t row = rows.thread() / 32; row < rows.count; row += rows.threads() / 32) {
    uint32_t largest = 0;  // of the magnitudes' bits: Inf and NaN win
    for (int64_t column = lane * W; column < n; column += 32 * W) {
      float sum[1][W];
      sums_at<W, 1>(rows, {row * n + column}, sum);
#pragma unroll
      for (int i = 0; i < W; ++i) largest = max(largest, __float_as_uint(sum[0][i]) & 0x7fffffffu);
    }
    largest = __reduce_max_sync(~0u, largest);
    float scale = __uint_as_float(largest) / kE4m3Max;
    if (scale < kTiny) scale = kTiny;
    if (keep != nullptr && lane == 0) keep_scale[row] = scale;
    for (int64_t column = lane * W; column < n; column += 32 * W) {
      float sum[1][W];
      sums_at<W, 1>(rows, {row * n + column}, sum);
      Pack<uint8_t, W> codes;
      Pack<Out, W> pack;
#pragma unroll
      for (int i = 0; i < W; ++i) {
        codes.value[i] = encode_e4m3(sum[0][i] / scale);
        pack.value[i] = from_float<Out>(decode_e4m3(codes.value[i]) * scale);
      }
      if (keep != nullptr) store(keep + row * n + column, codes);
      store(rows.out() + row * n + column, pack);
    }
  }
}

template <int W, class Partial, class Out>
__device__ void gather_plain(const Rows<Partial, Out>& rows, const Out* kept) {
  constexpr int U = W == 1 ? 1 : 16 / sizeof(Out);
  const int64_t end = rows.count * rows.call.n, step = rows.threads() * W;
  Out* out = rows.out();
  for (int64_t first = rows.thread() * W; first < end; first += U * step) {
    Pack<Out, W> pack[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (first + u * step < end) pack[u] = load<Out, W>(kept + first + u * step);
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (first + u * step < end) store(out + first + u * step, pack[u]);
  }
}

template <int W, class Partial, class Out>
__device__ void gather_fp8(const Rows<Partial, Out>& rows, const uint8_t* kept, const float* kept_scale) {
  constexpr int U = W == 1 ? 1 : 4;
  const int64_t n = rows.call.n, step = 32 * W;
  const int lane = threadIdx.x % 32;
  for (int64_t row = rows.thread() / 32; row < rows.count; row += rows.threads() / 32) {
    const float scale = __ldcg(kept_scale + row);
    const uint8_t* from = kept + row * n;
    Out* to = rows.out() + row * n;
    for (int64_t first = lane * W; first < n; first += U * step) {
      Pack<uint8_t, W> codes[U];
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (first + u * step < n) codes[u] = load<uint8_t, W>(from + first + u * step);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        Pack<Out, W> pack;
#pragma unroll
        for (int i = 0; i < W; ++i) pack.value[i] = from_float<Out>(decode_e4m3(codes[u].value[i]) * scale);
        if (first + u * step < n) store(to + first + u * step, pack);
      }
    }
  }
}

template <class Partial, class Out>
__device__ void fill_nan(const Rows<Partial, Out>& rows) {
  for (int64_t i = rows.thread(); i < rows.count * rows.call.n; i += rows.threads()) rows.out()[i] = from_float<Out>(__uint_as_float(0x7fc00000u));
}

// ---- kernels ----

// The piece-th piece of rank `of`'s rows; its count is 0 or less where there is none.
template <class Partial, class Out>
__device__ __forceinline__ Rows<Partial, Out> piece_rows(const Call& call, int of, int64_t piece) {
  const int64_t own = piece * kPieceRows, first = call.first_row(of, own / call.chunk_rows) + own % call.chunk_rows;
  return {call, first, min(int64_t{kPieceRows}, call.m - first), own, 0, 1};
}

template <class Partial, class Out, int W>
__device__ void reduce_piece(const Call& call, const Waiter& wait, int64_t piece) {
  const auto rows = piece_rows<Partial, Out>(call, call.rank, piece);
  if (rows.count <= 0) return;
  const int64_t number = rows.own / call.chunk_rows, at = rows.own * call.n;
  if (!wait.all_arrived(number)) return fill_nan(rows);
  if (call.fp8_wire) {
    reduce_fp8<W>(rows, call.sums(call.rank) + at, call.scales(call.rank) + rows.own);
  } else {
    reduce_plain<W>(rows, reinterpret_cast<Out*>(call.sums(call.rank)) + at);
  }
  const int64_t chunk = min(call.chunk_rows, call.m - call.first_row(call.rank, number));
  if (is_last(&call.signals(call.rank)->reduced_pieces[number], static_cast<uint32_t>((chunk + kPieceRows - 1) / kPieceRows)))
    for (int s = 0; s < call.world; ++s) store_release(&call.signals(s)->reduced[call.rank][number], wait.epoch);
}

template <class Partial, class Out, int W>
__device__ void gather_piece(const Call& call, const Waiter& wait, int64_t ticket) {
  const int64_t per_chunk = call.chunk_rows / kPieceRows, turn = ticket / per_chunk;  // a chunk of every peer in turn
  const int of = static_cast<int>((call.rank + 1 + turn % (call.world - 1)) % call.world);
  const auto rows = piece_rows<Partial, Out>(call, of, turn / (call.world - 1) * per_chunk + ticket % per_chunk);
  if (rows.count <= 0) return;
  const int64_t at = rows.own * call.n;
  if (!wait.reduced(of, rows.own / call.chunk_rows)) return fill_nan(rows);
  if (call.fp8_wire) {
    gather_fp8<W>(rows, call.sums(of) + at, call.scales(of) + rows.own);
  } else {
    gather_plain<W>(rows, reinterpret_cast<const Out*>(call.sums(of)) + at);
  }
}

template <class Partial, class Out, int W>
__global__ void __launch_bounds__(kThreads, 1) collective(const __grid_constant__ Call call) {
  Signals* mine = call.signals(call.rank);
  const Waiter wait = {call, mine->epoch + 1, nanoseconds() + call.timeout_ns};

  if (call.one_shot) {
    if (blockIdx.x == 0 && threadIdx.x < call.world) store_release(&call.signals(threadIdx.x)->arrived[call.rank][0], wait.epoch);
    const Rows<Partial, Out> rows = {call, 0, call.m, 0, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
    if (!wait.all_arrived(0)) {
      fill_nan(rows);
    } else if (call.fp8_wire) {
      reduce_fp8<W>(rows, nullptr, nullptr);
    } else {
      reduce_plain<W>(rows, static_cast<Out*>(nullptr));
    }
  } else {
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
  }

  if (is_last(&mine->finished_blocks, call.blocks)) {
    mine->reduce_ticket = mine->gather_ticket = 0;
    for (int s = 0; s < call.world; ++s) store_release(&call.signals(s)->done[call.rank], wait.epoch);
    bool ok = true;
    for (int s = 0; s < call.world; ++s) ok &= wait(&mine->done[s], s, kDone);
    if (ok) mine->epoch = wait.epoch;
  }
}

__global__ void signal_arrived(const __grid_constant__ Call call, int owner, int64_t round) {
  store_release(&call.signals(owner)->arrived[call.rank][round * call.span_chunks + threadIdx.x], call.signals(call.rank)->epoch + 1);
}

template <class Partial, class Out>
cudaError_t launch(const Call& call, int blocks, cudaStream_t stream) {
  const bool wide = call.n % 8 == 0 && reinterpret_cast<uintptr_t>(call.out) % 16 == 0;
  (wide ? collective<Partial, Out, 8> : collective<Partial, Out, 1>)<<<blocks, kThreads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_signal(const Call& call, int owner, int64_t round, cudaStream_t stream) {
  signal_arrived<<<1, call.span_chunks, 0, stream>>>(call, owner, round);
  return cudaGetLastError();
}

cudaError_t launch_collective(Call call, Place place, cudaStream_t stream) {
  constexpr int kHelpers = 124;
  int blocks = place == Place::beside ? kReservedProcessors : kHelpers;
  if (call.one_shot) blocks = static_cast<int>(std::clamp<int64_t>(call.fp8_wire ? (call.m + 7) / 8 : call.m * call.n / (8 * kThreads), 1, 128));
  call.blocks = call.one_shot ? blocks : kReservedProcessors + kHelpers;
  if (call.partial_type == Float::bf16) return launch<__nv_bfloat16, __nv_bfloat16>(call, blocks, stream);
  return call.out_type == Float::f32 ? launch<float, float>(call, blocks, stream) : launch<float, __half>(call, blocks, stream);
}

}  // namespace mori::gemm_ar
