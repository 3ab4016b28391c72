// gemm_ar over P2P memory: the symmetric workspace, its signals, and the kernels that work on it. Torch-free.
//
// Every rank has one workspace of the same layout, mapped into every other rank's address space. Rows are cut into spans, dealt out
// to the ranks in turn, and a span into `span_chunks` chunks; an owner counts its chunks. One call, with epoch e (a counter that
// no call resets):
//
//   GEMM       rank r writes its summand of a span into slot r of the owner's workspace, then sets the owner's arrived[r][chunk] = e
//   reduce     the owner waits for arrived[s][chunk] >= e of all s, adds up its slots in rank order, rounds, keeps the rows in its
//              `sums` and sets reduced[r][chunk] = e at every rank
//   gather     every rank waits for reduced[s] >= e and reads the owner's sums into its own output
//   done       when all of that is through, done[r] = e at every rank; the call ends when all ranks have said so. So a later
//              call, of whatever shape, finds slots and sums that nobody reads any more, and epochs below its own.
//
// One-shot (few rows): the summand stays in slot r at home, everyone reads everyone's, nobody gathers.
// Signals are released and acquired at system scope, by one thread for all. tests/test_protocol.py checks the protocol's states.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "../common/float_sm90.h"

namespace mori::gemm_ar {

using sm90::Float;

constexpr int kMaxWorld = 16;
constexpr int kMaxChunks = 64;  // of one owner
constexpr int kReservedProcessors = 8;  // for reduce and gather during the GEMM
constexpr int kPieceRows = 16;           // rows that a block takes at a time; chunks are multiples of it

struct Signals {
  // Written by other ranks, [of rank][owner's number of the chunk].
  uint32_t arrived[kMaxWorld][kMaxChunks];
  uint32_t reduced[kMaxWorld][kMaxChunks];
  uint32_t done[kMaxWorld];
  // This rank's own.
  uint32_t epoch;                      // of the last finished call
  uint32_t failed;                     // a wait ran out of time
  uint32_t delivered[kMaxWorld][kMaxChunks];  // parts of an owner's chunk that this rank's GEMM has written; the last one resets it
  uint32_t reduced_pieces[kMaxChunks];  // of a chunk; the block that finishes the last one resets it
  uint32_t reduce_ticket, gather_ticket;  // the next piece; reset by the last block of a call, as is
  uint32_t finished_blocks;
};
constexpr int64_t kSignalBytes = 16 * 1024;
static_assert(sizeof(Signals) + kMaxWorld * 4 <= kSignalBytes);  // the last words are for the first test of the memory

// What stands in pinned host memory when a wait ran out of time: rank + 1 of the missing one (0: all is well), and of what.
struct Failure {
  uint32_t rank_plus_one, signal, epoch;
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
  int blocks;  // of all launches of the call
  uint64_t timeout_ns;
  Failure* failure;

  __host__ __device__ Signals* signals(int of) const { return reinterpret_cast<Signals*>(workspace[of]); }
  __host__ __device__ uint8_t* slot(int at, int of) const { return workspace[at] + kSignalBytes + of * slot_bytes; }
  __host__ __device__ uint8_t* sums(int of) const { return workspace[of] + sums_offset; }
  __host__ __device__ float* scales(int of) const { return reinterpret_cast<float*>(workspace[of] + scales_offset); }
  __host__ __device__ int64_t span_rows() const { return span_chunks * chunk_rows; }
  __host__ __device__ int64_t rounds() const { return (m + world * span_rows() - 1) / (world * span_rows()); }  // spans of rank 0
  // First row of a chunk in the output; m or more: there is none. In slots and sums it is number * chunk_rows.
  __host__ __device__ int64_t first_row(int of, int64_t number) const {
    return (number / span_chunks * world + of) * span_rows() + number % span_chunks * chunk_rows;
  }
};

// Says, after what stands before it on the stream, that this rank's summand of the owner's span of that round is there.
cudaError_t launch_signal(const Call& call, int owner, int64_t round, cudaStream_t stream);
// Reduce, gather and done. For one_shot one launch behind the GEMM; else two that share the work: one beside the GEMM, on the
// processors that it leaves free, and one behind it, on those that it has left.
enum class Place { beside, behind };
cudaError_t launch_collective(Call call, Place place, cudaStream_t stream);

}  // namespace mori::gemm_ar
