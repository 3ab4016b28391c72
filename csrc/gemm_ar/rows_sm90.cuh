// Rows of gemm_ar's kernels on P2P memory: sums in rank order, the fp8 wire, copies; the protocol stands in gemm_ar_sm90.h.
//
// fp32 sums, bias, one rounding. On the fp8 wire a block takes a row of rounded sums: |max| first, then codes and their values.
#pragma once

#include <cuda_fp8.h>

#include "../common/signal_sm90.cuh"
#include "../common/sm90.cuh"
#include "gemm_ar_sm90.h"

namespace mori::gemm_ar {

using namespace sm90;

constexpr int kThreads = 256;
constexpr float kE4m3Max = 448.f, kTiny = 1.17549435e-38f;  // a zero row must not divide by zero

__device__ __forceinline__ Waiter waiter(const Call& call) {
  Signals* mine = call.signals(call.rank);
  return {&mine->failed, call.failure, mine->epoch + 1, call.timeout_ns};
}

// Counts what the whole block has done; true in one thread of the block that makes it `all`, which sees what the others did.
__device__ __forceinline__ bool is_last(uint32_t* counter, uint32_t all) {
  __syncthreads();
  return threadIdx.x == 0 && count_to(counter, all);
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

// Rows that a block works on, and where they stand. `summand(s)` is rank s's.
template <class Partial, class Out>
struct Rows {
  const Call& call;
  int64_t first, count;  // in the output
  int64_t own;           // first row of this chunk in the owner's slots and sums
  uint32_t epoch;

  __device__ __forceinline__ const Partial* summand(int s) const {
    const uint8_t* at = call.one_shot && s != call.rank ? call.inbox(call.rank, s, epoch) : call.slot(call.rank, s);
    return reinterpret_cast<const Partial*>(at) + own * call.n;
  }
  __device__ __forceinline__ Out* out() const { return static_cast<Out*>(call.out) + first * call.n; }
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

// Sums of the elements [begin, end) to the output, and to `keep` for the others.
template <int W, class Partial, class Out>
__device__ void reduce_plain(const Rows<Partial, Out>& rows, int64_t begin, int64_t end, Out* keep) {
  constexpr int U = W == 1 ? 1 : 8 / sizeof(Partial), step = kThreads * W;  // loads in flight of each thread and summand
  Out* out = rows.out();
  for (int64_t first = begin + threadIdx.x * W; first < end; first += U * step) {
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

__device__ __forceinline__ uint32_t block_max(uint32_t value) {
  __shared__ uint32_t of_warp[kThreads / 32];
  value = __reduce_max_sync(~0u, value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) value = max(value, of_warp[i]);
  return value;
}

// The rows [begin, end) through the fp8 wire: what the others decode stands in the output too. `read(row, column, v)` gets U times W
// values of a row, kThreads * W apart; columns past the end repeat the first.
template <int W, int U, class Out, class Read>
__device__ void encode_rows(int64_t n, int64_t begin, int64_t end, Read read, Out* out, uint8_t* keep) {
  constexpr int step = kThreads * W;
  for (int64_t row = begin; row < end; ++row) {
    float v[U][W];
    uint32_t largest = 0;  // of the magnitudes' bits: Inf and NaN win
    for (int64_t column = threadIdx.x * W; column < n; column += U * step) {
      read(row, column, v);
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int i = 0; i < W; ++i) largest = max(largest, __float_as_uint(v[u][i]) & 0x7fffffffu);
    }
    const float scale = max(__uint_as_float(block_max(largest)) / kE4m3Max, kTiny);
    if (keep != nullptr && threadIdx.x == 0) *reinterpret_cast<float*>(keep + (row + 1) * wire_bytes(n) - kWireTail) = scale;
    const bool once = n <= U * step;  // the values are still there
    for (int64_t column = threadIdx.x * W; column < n; column += U * step) {
      if (!once) read(row, column, v);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (column + u * step >= n) continue;
        Pack<uint8_t, W> codes;
        Pack<Out, W> pack;
#pragma unroll
        for (int i = 0; i < W; ++i) {
          codes.value[i] = encode_e4m3(v[u][i] / scale);
          pack.value[i] = from_float<Out>(decode_e4m3(codes.value[i]) * scale);
        }
        if (keep != nullptr) store(keep + row * wire_bytes(n) + column + u * step, codes);
        store(out + row * n + column + u * step, pack);
      }
    }
  }
}

// The rounded sums of the rows [begin, end) through the fp8 wire.
template <int W, class Partial, class Out>
__device__ void reduce_fp8(const Rows<Partial, Out>& rows, int64_t begin, int64_t end, uint8_t* keep) {
  constexpr int U = W == 1 ? 1 : 4, step = kThreads * W;
  const int64_t n = rows.call.n;
  const auto read = [&](int64_t row, int64_t column, float (&v)[U][W]) {
    int64_t at[U];
#pragma unroll
    for (int u = 0; u < U; ++u) at[u] = row * n + (column + u * step < n ? column + u * step : column);
    sums_at<W, U>(rows, at, v);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int i = 0; i < W; ++i) v[u][i] = to_float(from_float<Out>(v[u][i]));
  };
  encode_rows<W, U>(n, begin, end, read, rows.out(), keep);
}

// `count` neighbouring elements.
template <int W, class T>
__device__ void copy(T* to, const T* from, int64_t count) {
  constexpr int U = W == 1 ? 1 : 16 / sizeof(T), step = kThreads * W;
  for (int64_t first = threadIdx.x * W; first < count; first += U * step) {
    Pack<T, W> pack[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (first + u * step < count) pack[u] = load<T, W>(from + first + u * step);
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (first + u * step < count) store(to + first + u * step, pack[u]);
  }
}

// The rows first, first + step, .. below `count`, from the fp8 wire: a warp for each.
template <int W, class Out>
__device__ void decode_rows(int64_t n, int64_t first, int64_t step, int64_t count, const uint8_t* kept, Out* out) {
  constexpr int U = W == 1 ? 1 : 4, apart = 32 * W;
  const int lane = threadIdx.x % 32;
  for (int64_t row = first; row < count; row += step) {
    const uint8_t* from = kept + row * wire_bytes(n);
    const float scale = __ldcg(reinterpret_cast<const float*>(from + wire_bytes(n) - kWireTail));
    for (int64_t column = lane * W; column < n; column += U * apart) {
      Pack<uint8_t, W> codes[U];
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (column + u * apart < n) codes[u] = load<uint8_t, W>(from + column + u * apart);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        Pack<Out, W> pack;
#pragma unroll
        for (int i = 0; i < W; ++i) pack.value[i] = from_float<Out>(decode_e4m3(codes[u].value[i]) * scale);
        if (column + u * apart < n) store(out + row * n + column + u * apart, pack);
      }
    }
  }
}

template <class Out>
__device__ void fill_nan(Out* out, int64_t begin, int64_t end) {
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) out[i] = from_float<Out>(__uint_as_float(0x7fc00000u));
}

// ---- launch ----

template <class Run>
inline cudaError_t with_types(const Call& call, Run run) {
  if (call.partial_type == Float::bf16) return run(__nv_bfloat16{}, __nv_bfloat16{});
  return call.out_type == Float::f32 ? run(0.f, 0.f) : run(0.f, __half{});
}

inline bool wide(const Call& call) { return call.n % 8 == 0 && reinterpret_cast<uintptr_t>(call.out) % 16 == 0; }

}  // namespace mori::gemm_ar
