// gemm_ar over P2P memory on gfx950: the symmetric workspace, its signals, and the kernels that work on it. Torch-free.
//
// Every rank has one workspace of the same layout, mapped into every other rank's address space. Rows are cut into spans, dealt out
// to the ranks in turn, and a span into `span_chunks` chunks; an owner counts its chunks. One call, with epoch e (a counter that
// no call resets):
//
//   deliver    rank r's GEMM stores its summand of a chunk into slot r of the owner's workspace; the workgroup that stores the last
//              part sets the owner's arrived[r][chunk] = e
//   reduce     the owner waits for arrived[s][chunk] >= e of all s, adds up its slots in rank order, rounds, keeps the rows in its
//              `sums` and sets reduced[r][chunk] = e at every rank
//   gather     every rank waits for reduced[s][chunk] >= e and reads the owner's sums into its own output
//   done       when all of that is through, done[r] = e at every rank; the call ends when all ranks have said so. So a later
//              call, of whatever shape, finds slots and sums that nobody reads any more, and epochs below its own.
//
// One-shot (few rows): the summand stays in slot r at home, everyone reads everyone's, nobody gathers.
// tests/test_protocol.py checks the protocol's states (`spans` and `pull` there); tests/gfx950/test_gemm_ar.py executes the kernels of two
// and four ranks against each other.
#pragma once

#include <cstdint>

#include <hip/hip_runtime_api.h>

#include "../common/float_gfx950.h"
#include "../mxfp8/mxfp8_gfx950.h"

namespace mori::gemm_ar {

using gfx950::Float;

constexpr int kMaxWorld = 16;
constexpr int kMaxChunks = 64;     // of one owner
constexpr int kPieceRows = 16;     // rows that a workgroup reduces or gathers at a time
constexpr int kDeliveryRows = 64;  // chunks are multiples of it: each wave's 64 rows of a tile go to one owner

struct Signals {
  // Written by other ranks, [of rank][owner's number of the chunk].
  uint32_t arrived[kMaxWorld][kMaxChunks];
  uint32_t reduced[kMaxWorld][kMaxChunks];
  uint32_t done[kMaxWorld];
  // This rank's own.
  uint32_t epoch;                              // of the last finished call
  uint32_t failed;                             // a wait ran out of time
  uint32_t delivered[kMaxWorld][kMaxChunks];   // tiles of an owner's chunk that this rank has stored; the last one resets it
  uint32_t reduced_pieces[kMaxChunks];         // of a chunk; the workgroup that finishes the last one resets it
  uint32_t reduce_ticket, gather_ticket;       // the next piece; reset by the last workgroup of a call, as is
  uint32_t finished_groups;
};
constexpr int64_t kSignalBytes = 64 * 1024;  // SIGNAL_BYTES of mori_ops/symmetric.py
static_assert(sizeof(Signals) + kMaxWorld * 4 <= kSignalBytes);  // the last words are for the first test of the memory

// What stands in pinned host memory when a wait ran out of time: rank + 1 of the missing one (0: all is well), and of what.
struct Failure {
  uint32_t rank_plus_one, signal, epoch;
};

// A chunk as its owner counts it, and where its rows begin in the output.
struct Chunk {
  int owner, number;
  int64_t first;
};

struct Call {
  int rank, world;
  uint8_t* workspace[kMaxWorld];  // of each rank, as this one sees it
  int64_t slot_bytes, sums_offset, scales_offset;
  int64_t m, n, chunk_rows;
  int span_chunks;
  Float partial_type, out_type, bias_type;
  const void* bias;
  void* out;
  bool fp8_wire, one_shot;
  uint64_t timeout;  // in ticks of kTicksPerSecond
  Failure* failure;

  static constexpr double kTicksPerSecond = 1e8;

  __host__ __device__ Signals* signals(int of) const { return reinterpret_cast<Signals*>(workspace[of]); }
  __host__ __device__ uint8_t* slot(int at, int of) const { return workspace[at] + kSignalBytes + of * slot_bytes; }
  __host__ __device__ uint8_t* sums(int of) const { return workspace[of] + sums_offset; }
  __host__ __device__ float* scales(int of) const { return reinterpret_cast<float*>(workspace[of] + scales_offset); }
  __host__ __device__ int span_rows() const { return span_chunks * static_cast<int>(chunk_rows); }
  __host__ __device__ int rounds() const { return static_cast<int>((m + world * span_rows() - 1) / (world * span_rows())); }  // spans of rank 0
  // First row of a chunk in the output; m or more: there is none. In slots and sums it is number * chunk_rows.
  __host__ __device__ int64_t first_row(int of, int number) const {
    return (static_cast<int64_t>(number / span_chunks) * world + of) * span_rows() + number % span_chunks * chunk_rows;
  }
  __host__ __device__ Chunk chunk_of(int row) const {
    const int span = row / span_rows(), within = row % span_rows(), rows = static_cast<int>(chunk_rows);
    return {span % world, span / world * span_chunks + within / rows, row - within % rows};
  }
};

// The whole product, delivered. `args` without bias, to the beginning of a slot, in the partial type; not the skinny form.
hipError_t launch_delivery(const Call& call, const mxfp8::GemmArgs& args, mxfp8::Scales scales, mxfp8::Form form, hipStream_t stream);

// Reduce, gather and done: beside the delivery, on another stream. One-shot: behind the GEMM.
hipError_t launch_collective(const Call& call, hipStream_t stream);

}  // namespace mori::gemm_ar
