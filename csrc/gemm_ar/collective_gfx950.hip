// Reduce and gather of gemm_ar on gfx950 (gemm_ar_gfx950.h), beside the GEMM that delivers.
//
//   pieces     workgroups draw tickets for pieces of 16 rows: all of them for peers' chunks to gather, every other one, the first
//              included, before that for own chunks to reduce; so no workgroup waits for one that comes later
//   reduce     fp32 sums in rank order, bias, one rounding, from slots in this device's own memory
//   gather     reads of the owners' sums over xGMI
//   one-shot   behind the GEMM: every workgroup reads its rows from everyone's slot
// On the fp8 wire a wave has a row: |max| first, then codes and their values. Bound by the links. A wave takes at most 80
// registers, what two waves of the widest GEMM tile leave of a SIMD's 512, so that it runs beside them on the same unit.
// No wait is endless: after `timeout` the rank that is missing is written to host memory and the rest of the output is NaN.
#include <algorithm>

#include "../common/gfx950.h"
#include "../common/mx.h"
#include "pack_gfx950.h"
#include "signals_gfx950.h"

#pragma clang fp contract(off)  // every kernel must round alike

namespace mori::gemm_ar {
namespace {

using namespace gfx950;

constexpr int kThreads = 256;
constexpr int kGroups = 128;  // workgroups: one for every other compute unit
constexpr int kWaves = 6;     // that a SIMD could hold: what gives each 80 registers
constexpr float kE4m3Max = 448.f, kTiny = 0x1p-126f;  // a zero row must not divide by zero

// --- waiting ---

enum Signal : uint32_t { kArrived, kReduced, kDone };

struct Waiter {
  const Call& call;
  uint32_t epoch;
  uint64_t deadline;

  MORI_DEVICE bool operator()(const uint32_t* flag, int of, Signal signal) const {
    uint32_t* failed = &call.signals(call.rank)->failed;
    while (static_cast<int32_t>(load_flag(flag) - epoch) < 0) {
      if (load_flag(failed) != 0) return false;
      if (__builtin_amdgcn_s_memrealtime() > deadline) {
        if (__hip_atomic_exchange(failed, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM) == 0) {
          call.failure->signal = signal;
          call.failure->epoch = epoch;
          set_flag(&call.failure->rank_plus_one, of + 1);
        }
        return false;
      }
      __builtin_amdgcn_s_sleep(1);
    }
    return true;
  }

  // For the whole workgroup: this rank's chunk `number` has every rank's summand; the rank `of` has reduced its chunk.
  MORI_DEVICE bool all_arrived(int number) const {
    return for_all([&](int lane) { return lane >= call.world || (*this)(&call.signals(call.rank)->arrived[lane][number], lane, kArrived); });
  }
  MORI_DEVICE bool reduced(int of, int number) const {
    return for_all([&](int lane) { return lane != 0 || (*this)(&call.signals(call.rank)->reduced[of][number], of, kReduced); });
  }

 private:
  template <class Condition>
  MORI_DEVICE bool for_all(Condition condition) const {
    __shared__ int all;
    if (wave_id() == 0) {
      const bool mine = condition(lane_id());
      if (const bool everyone = __builtin_amdgcn_ballot_w64(!mine) == 0; lane_id() == 0) all = everyone;
    }
    read_done_barrier();
    acquire();
    return all;
  }
};

// The next ticket, for the whole workgroup.
MORI_DEVICE int draw(uint32_t* ticket) {
  __shared__ uint32_t drawn;
  read_done_barrier();
  if (thread_id() == 0) drawn = __hip_atomic_fetch_add(ticket, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  read_done_barrier();
  return uniform(static_cast<int>(drawn));
}

MORI_DEVICE bool is_last(uint32_t* counter, uint32_t all) { return stores_done_in_first_wave() && lane_id() == 0 && count(counter, all); }

// --- rows ---

// The rows that a workgroup works on, and where they stand.
struct Rows {
  const Call& call;
  int64_t first;        // in the output
  int count;
  int64_t own;          // first row in the owner's slots and sums
  int thread, threads;  // this thread among those that share the rows

  // `count` rows of T from row `row` of what begins at `base`.
  template <class T>
  MORI_DEVICE Buffer of(const void* base, int64_t row) const {
    return make_buffer(static_cast<const T*>(base) + row * call.n, static_cast<uint32_t>(count) * static_cast<uint32_t>(call.n) * sizeof(T));
  }
  template <class Partial>
  MORI_DEVICE Buffer summand(int s) const {
    return of<Partial>(call.slot(call.one_shot ? s : call.rank, s), own);
  }
  template <class Out>
  MORI_DEVICE Buffer out() const {
    return of<Out>(call.out, first);
  }
  template <class T>
  MORI_DEVICE Buffer sums(int rank) const {
    return of<T>(call.sums(rank), own);
  }
  MORI_DEVICE int end() const { return count * static_cast<int>(call.n); }
};

template <int W>
MORI_DEVICE void add_bias(const Call& call, int column, float (&sum)[W]) {
#pragma unroll
  for (int i = 0; i < W; ++i) {
    switch (call.bias_type) {
      case Float::f32: sum[i] += static_cast<const float*>(call.bias)[column + i]; break;
      case Float::bf16: sum[i] += static_cast<float>(static_cast<const __bf16*>(call.bias)[column + i]); break;
      default: sum[i] += static_cast<float>(static_cast<const _Float16*>(call.bias)[column + i]);
    }
  }
}

// The finished sums of W values at U places, `step` apart.
template <class Partial, int W, int U>
MORI_DEVICE void sums_at(const Rows& rows, int at, int step, float (&sum)[U][W]) {
  for (int s = 0; s < rows.call.world; ++s) {
    const Buffer summand = rows.summand<Partial>(s);
    Pack<Partial, W> pack[U];
#pragma unroll
    for (int u = 0; u < U; ++u) pack[u] = load<W, Partial>(summand, at + u * step);
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int i = 0; i < W; ++i) sum[u][i] = s == 0 ? static_cast<float>(pack[u].value[i]) : sum[u][i] + static_cast<float>(pack[u].value[i]);
  }
  if (rows.call.bias == nullptr) return;
#pragma unroll
  for (int u = 0; u < U; ++u) {
    add_bias<W>(rows.call, (at + u * step) % static_cast<int>(rows.call.n), sum[u]);
    pin_memory_order();  // one after the other: they would take as many registers as the sums
  }
}

// Sums to the output, and to `keep` for the others.
template <class Partial, class Out, int W>
MORI_DEVICE void reduce_plain(const Rows& rows, Buffer keep) {
  constexpr int U = W == 1 ? 1 : 2;  // loads in flight of each thread and summand
  const Buffer out = rows.out<Out>();
  const int end = rows.end(), step = rows.threads * W;
  for (int at = rows.thread * W; at < end; at += U * step) {
    float sum[U][W];
    sums_at<Partial>(rows, at, step, sum);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      Pack<Out, W> pack;
#pragma unroll
      for (int i = 0; i < W; ++i) pack.value[i] = static_cast<Out>(sum[u][i]);
      store(pack, out, at + u * step);
      store(pack, keep, at + u * step);
    }
  }
}

MORI_DEVICE uint8_t encode(float value) {
  const uint32_t bits = mx::bits_of(value);
  return (bits >> 24 & 0x80) | mx::encode_e4m3(mx::float_of(bits & mx::kMagnitudeBits));
}

// The same through the fp8 wire: what the others decode stands in the output too. A row that holds Inf or NaN becomes NaN.
template <class Partial, class Out, int W>
MORI_DEVICE void reduce_fp8(const Rows& rows, Buffer keep, Buffer keep_scale) {
  const Buffer out = rows.out<Out>();
  const int n = static_cast<int>(rows.call.n), lane = lane_id();
  for (int row = uniform(rows.thread / kWave); row < rows.count; row += rows.threads / kWave) {
    const int end = (row + 1) * n;
    uint32_t largest = 0;
    float scale = 1.f, inverse = 1.f;
#pragma nounroll
    for (int pass = 0; pass < 2; ++pass) {
      for (int at = row * n + lane * W; at < end; at += kWave * W) {
        float sum[1][W];
        sums_at<Partial>(rows, at, 0, sum);
        if (pass == 0) {
#pragma unroll
          for (int i = 0; i < W; ++i) largest = std::max(largest, mx::bits_of(sum[0][i]) & mx::kMagnitudeBits);
          continue;
        }
        Pack<uint8_t, W> codes;
        Pack<Out, W> pack;
#pragma unroll
        for (int i = 0; i < W; ++i) {
          codes.value[i] = encode(sum[0][i] * inverse);
          pack.value[i] = static_cast<Out>(mx::decode_e4m3(codes.value[i]) * scale);
        }
        store(codes, keep, at);
        store(pack, out, at);
      }
      if (pass == 1) break;
#pragma unroll
      for (int step = kWave / 2; step > 0; step /= 2) largest = std::max(largest, static_cast<uint32_t>(read_lane(static_cast<int>(largest), lane ^ step)));
      scale = mx::float_of(largest) * (1 / kE4m3Max);
      if (scale < kTiny) scale = kTiny;
      if (largest >= mx::kInfBits) scale = mx::float_of(mx::kNanBits);
      inverse = __builtin_amdgcn_rcpf(scale);
      if (lane == 0) store(Pack<float, 1>{scale}, keep_scale, row);
    }
  }
}

template <class Out, int W>
MORI_DEVICE void gather_plain(const Rows& rows, Buffer kept) {
  constexpr int U = W == 1 ? 1 : 8 / sizeof(Out);
  const Buffer out = rows.out<Out>();
  const int end = rows.end(), step = rows.threads * W;
  for (int at = rows.thread * W; at < end; at += U * step) {
    Pack<Out, W> pack[U];
#pragma unroll
    for (int u = 0; u < U; ++u) pack[u] = load<W, Out>(kept, at + u * step);
#pragma unroll
    for (int u = 0; u < U; ++u) store(pack[u], out, at + u * step);
  }
}

template <class Out, int W>
MORI_DEVICE void gather_fp8(const Rows& rows, Buffer kept, Buffer kept_scale) {
  const Buffer out = rows.out<Out>();
  const int n = static_cast<int>(rows.call.n);
  for (int row = rows.thread / kWave; row < rows.count; row += rows.threads / kWave) {
    const float scale = load<1, float>(kept_scale, row).value[0];
    for (int at = row * n + lane_id() * W; at < (row + 1) * n; at += kWave * W) {
      const Pack<uint8_t, W> codes = load<W, uint8_t>(kept, at);
      Pack<Out, W> pack;
#pragma unroll
      for (int i = 0; i < W; ++i) pack.value[i] = static_cast<Out>(mx::decode_e4m3(codes.value[i]) * scale);
      store(pack, out, at);
    }
  }
}

template <class Out>
MORI_DEVICE void fill_nan(const Rows& rows) {
  const Buffer out = rows.out<Out>();
  for (int at = rows.thread; at < rows.end(); at += rows.threads) store(Pack<Out, 1>{static_cast<Out>(mx::float_of(mx::kNanBits))}, out, at);
}

// --- the kernels ---

// The piece-th piece of rank `of`'s rows; its count is 0 or less where there is none.
MORI_DEVICE Rows piece_rows(const Call& call, int of, int piece) {
  const int own = piece * kPieceRows, rows = static_cast<int>(call.chunk_rows);
  const int64_t first = call.first_row(of, own / rows) + own % rows, left = call.m - first;
  int thread = thread_id();
  asm volatile("" : "+v"(thread));  // or the compiler keeps what depends on it, the bias above all, from piece to piece
  return {call, first, static_cast<int>(left < kPieceRows ? left : kPieceRows), own, thread, kThreads};
}

MORI_DEVICE Buffer scales_of(const Rows& rows, int rank) {
  return make_buffer(rows.call.scales(rank) + rows.own, static_cast<uint32_t>(rows.count) * sizeof(float));
}

// The kernel's first argument, read anew: kept from piece to piece, what follows from it would not fit into the scalar registers.
MORI_DEVICE const Call& call_again() {
  using Constant = const __attribute__((address_space(4))) Call*;
  auto call = (Constant)__builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(call));
  return *(const Call*)call;
}

template <class Partial, class Out, int W, bool kFp8>
MORI_DEVICE void reduce_piece(const Waiter& wait, int piece) {
  const Call& call = call_again();
  const Rows rows = piece_rows(call, call.rank, piece);
  if (rows.count <= 0) return;
  const int number = static_cast<int>(rows.own) / static_cast<int>(call.chunk_rows);
  if (!wait.all_arrived(number)) return fill_nan<Out>(rows);
  if constexpr (kFp8) {
    reduce_fp8<Partial, Out, W>(rows, rows.sums<uint8_t>(call.rank), scales_of(rows, call.rank));
  } else {
    reduce_plain<Partial, Out, W>(rows, rows.sums<Out>(call.rank));
  }
  const int64_t left = call.m - call.first_row(call.rank, number);
  const int chunk = static_cast<int>(left < call.chunk_rows ? left : call.chunk_rows);
  if (is_last(&call.signals(call.rank)->reduced_pieces[number], (chunk + kPieceRows - 1) / kPieceRows))
    for (int s = 0; s < call.world; ++s) set_flag(&call.signals(s)->reduced[call.rank][number], wait.epoch);
}

template <class Out, int W, bool kFp8>
MORI_DEVICE void gather_piece(const Waiter& wait, int ticket) {
  const Call& call = call_again();
  const int per_chunk = static_cast<int>(call.chunk_rows) / kPieceRows, turn = ticket / per_chunk;  // a chunk of every peer in turn
  const int of = (call.rank + 1 + turn % (call.world - 1)) % call.world;
  const Rows rows = piece_rows(call, of, turn / (call.world - 1) * per_chunk + ticket % per_chunk);
  if (rows.count <= 0) return;
  if (!wait.reduced(of, static_cast<int>(rows.own) / static_cast<int>(call.chunk_rows))) return fill_nan<Out>(rows);
  if constexpr (kFp8) {
    gather_fp8<Out, W>(rows, rows.sums<uint8_t>(of), scales_of(rows, of));
  } else {
    gather_plain<Out, W>(rows, rows.sums<Out>(of));
  }
}

// The end of a call: the last workgroup tells the others and waits for them.
MORI_DEVICE void finish(const Call& call, const Waiter& wait, int groups) {
  Signals* mine = call.signals(call.rank);
  if (!is_last(&mine->finished_groups, groups)) return;
  mine->reduce_ticket = mine->gather_ticket = 0;
  for (int s = 0; s < call.world; ++s) set_flag(&call.signals(s)->done[call.rank], wait.epoch);
  bool all = true;
  for (int s = 0; s < call.world; ++s) all &= wait(&mine->done[s], s, kDone);
  if (all) mine->epoch = wait.epoch;
}

MORI_DEVICE Waiter waiter(const Call& call) { return {call, call.signals(call.rank)->epoch + 1, __builtin_amdgcn_s_memrealtime() + call.timeout}; }

template <class Partial, class Out, int W, bool kFp8>
__global__ void __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads), amdgpu_waves_per_eu(kWaves))) collective(const Call call, int groups) {
  Signals* mine = call.signals(call.rank);
  const Waiter wait = waiter(call);
  const int pieces = call.rounds() * call.span_rows() / kPieceRows;  // of an owner, at most
  if (block_id() % 2 == 0)
    for (int ticket; (ticket = draw(&mine->reduce_ticket)) < pieces;) reduce_piece<Partial, Out, W, kFp8>(wait, ticket);
  for (int ticket; (ticket = draw(&mine->gather_ticket)) < pieces * (call.world - 1);) gather_piece<Out, W, kFp8>(wait, ticket);
  finish(call, wait, groups);
}

template <class Partial, class Out, int W, bool kFp8>
__global__ void __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads))) one_shot(const Call call, int groups) {
  const Waiter wait = waiter(call);
  if (block_id() == 0 && thread_id() < call.world) set_flag(&call.signals(thread_id())->arrived[call.rank][0], wait.epoch);
  const Rows rows = {call, 0, static_cast<int>(call.m), 0, block_id() * kThreads + thread_id(), groups * kThreads};
  const Buffer nowhere = make_buffer(nullptr, 0);
  if (!wait.all_arrived(0)) {
    fill_nan<Out>(rows);
  } else if constexpr (kFp8) {
    reduce_fp8<Partial, Out, W>(rows, nowhere, nowhere);
  } else {
    reduce_plain<Partial, Out, W>(rows, nowhere);
  }
  finish(call, wait, groups);
}

template <class Partial, class Out, int W, bool kFp8>
hipError_t launch(const Call& call, int groups, hipStream_t stream) {
  if (call.one_shot) {
    one_shot<Partial, Out, W, kFp8><<<groups, kThreads, 0, stream>>>(call, groups);
  } else {
    collective<Partial, Out, W, kFp8><<<groups, kThreads, 0, stream>>>(call, groups);
  }
  return hipGetLastError();
}

template <class Partial, class Out>
hipError_t launch(const Call& call, int groups, hipStream_t stream) {
  const bool aligned = call.n % 8 == 0 && reinterpret_cast<uintptr_t>(call.out) % 16 == 0;
  if (call.fp8_wire) return aligned ? launch<Partial, Out, 8, true>(call, groups, stream) : launch<Partial, Out, 1, true>(call, groups, stream);
  return aligned ? launch<Partial, Out, 8, false>(call, groups, stream) : launch<Partial, Out, 1, false>(call, groups, stream);
}

}  // namespace

hipError_t launch_collective(const Call& call, hipStream_t stream) {
  int groups = kGroups;
  if (call.one_shot) groups = static_cast<int>(std::clamp<int64_t>(call.fp8_wire ? (call.m + 3) / 4 : call.m * call.n / (8 * kThreads), 1, kGroups));
  if (call.partial_type == Float::bf16) return launch<__bf16, __bf16>(call, groups, stream);
  return call.out_type == Float::f32 ? launch<float, float>(call, groups, stream) : launch<float, _Float16>(call, groups, stream);
}

}  // namespace mori::gemm_ar
