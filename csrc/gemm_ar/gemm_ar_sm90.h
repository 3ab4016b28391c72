// gemm_ar over P2P memory: the symmetric workspace, its signals, and the kernels that work on it. Torch-free.
//
// Every rank has one workspace of the same layout, mapped into every other rank's address space. A call has an epoch e, a counter that
// no call resets; flags are stamped with it. Rows are cut into spans, dealt out to the ranks in turn, and a span into `span_chunks`
// chunks; an owner counts its chunks. Three algorithms:
//
//   pair       two ranks, one GEMM (mxfp8/pair_sm90.cuh). It leaves the peer's rows in slot `rank` at home and says delivered = e; a
//              copy engine takes each chunk to slot `rank` of the peer, then arrived = e there. It waits for arrived >= e of the peer
//              before it adds the peer's rows to its own, keeps the result in `sums` and says reduced = e to the peer, whose copy
//              engine fetches the chunk into its output.
//   one_shot   every block pushes its part of this rank's summand into everyone's inbox, says pushed = e there, waits for everyone's
//              pushed >= e and adds up. Inboxes alternate between two sets, by the parity of e.
//   spans      launch by launch the GEMM writes its summand of a span into slot r of the owner, then arrived = e there; the owner
//              waits for all, adds up in rank order, rounds, keeps the rows in `sums` and says reduced = e to all, who read the sums
//              into their outputs.
//
// No call waits for the others' end, and yet nothing is overwritten too early. Who has finished e has something of e from every rank,
// so every rank has finished e - 1, its reads of inboxes included. A slot is written by a rank that has finished its last call that
// used slots: it had the results of all rows from their owners, who had read their slots. Sums are written when all ranks' summands
// of e are there: they had finished their last call, and with it their reads of the earlier sums.
// Signals are released and acquired at system scope, by one thread for all. tests/test_protocol.py checks the protocol's states.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "../common/failure_sm90.h"
#include "../common/float_sm90.h"

namespace mori::gemm_ar {

using sm90::Failure;
using sm90::Float;

constexpr int kMaxWorld = 16;
constexpr int kMaxChunks = 64;  // of one owner
constexpr int kReservedProcessors = 8;  // for reduce and gather during the GEMM
constexpr int kMaxBlocks = 512;           // of one_shot
constexpr int kPieceRows = 16;           // rows that a block takes at a time; chunks are multiples of it

struct Signals {
  // Written by other ranks, [of rank][owner's number of the chunk], [of rank][block].
  uint32_t arrived[kMaxWorld][kMaxChunks];
  uint32_t reduced[kMaxWorld][kMaxChunks];
  uint32_t pushed[kMaxWorld][kMaxBlocks];
  // This rank's own.
  uint32_t epoch;                  // of the last finished call
  uint32_t failed;                 // a wait ran out of time
  uint32_t delivered[kMaxChunks];  // flags: a chunk for the peer is ready,
  uint32_t summed[kMaxChunks];     // one of own rows is (fp8 wire)
  uint32_t parts[2][kMaxChunks];   // tiles of a chunk that are through; the last one resets it
  uint32_t reduced_pieces[kMaxChunks];    // of a chunk; the block that finishes the last one resets it
  uint32_t reduce_ticket, gather_ticket;  // the next piece; reset by the last block of a call, as is
  uint32_t finished_blocks;
};
constexpr int64_t kSignalBytes = 64 * 1024;
static_assert(sizeof(Signals) + kMaxWorld * 4 <= kSignalBytes);  // the last words are for the first test of the memory

// A row on the fp8 wire: its codes, then its scale.
constexpr int kWireTail = 8;
__host__ __device__ constexpr int64_t wire_bytes(int64_t n) { return (n + 7) / 8 * 8 + kWireTail; }

struct Call {
  int rank, world;
  uint8_t* workspace[kMaxWorld];  // of each rank, as this one sees it
  int64_t slot_bytes, sums_offset, codes_offset, codes_bytes, inbox_offset, inbox_bytes;
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
  __host__ __device__ uint8_t* inbox(int at, int of, uint32_t epoch) const { return workspace[at] + inbox_offset + (epoch % 2 * world + of) * inbox_bytes; }
  __host__ __device__ uint8_t* codes(int of) const { return workspace[of] + codes_offset; }
  __host__ __device__ uint8_t* fetched() const { return codes(rank) + codes_bytes; }
  __host__ __device__ int64_t span_rows() const { return span_chunks * chunk_rows; }
  __host__ __device__ int64_t rounds() const { return (m + world * span_rows() - 1) / (world * span_rows()); }  // spans of rank 0
  // First row of a chunk in the output; m or more: there is none. In slots and sums it is number * chunk_rows.
  __host__ __device__ int64_t first_row(int of, int64_t number) const {
    return (number / span_chunks * world + of) * span_rows() + number % span_chunks * chunk_rows;
  }
};

// spans: says, after what stands before it on the stream, that this rank's summand of the owner's span of that round is there.
cudaError_t launch_signal(const Call& call, int owner, int64_t round, cudaStream_t stream);
// Reduce, gather and done: two launches share the work, one beside the GEMM, on the processors that it leaves free, and one behind it.
enum class Place { beside, behind };
cudaError_t launch_spans(Call call, Place place, cudaStream_t stream);

cudaError_t launch_one_shot(const Call& call, cudaStream_t stream);

// Before the first pair: a kernel that is loaded by its first launch can wait for all that runs, and the GEMM waits for these.
cudaError_t load_pair_kernels();
// pair, between the copies on a stream: says that chunk `arrived` is at the peer (-1: nothing to say), then waits for a chunk that
// this rank has delivered or the peer has reduced (-1: for nothing).
struct Step {
  int arrived = -1, delivered = -1, summed = -1, reduced = -1;
};
cudaError_t launch_step(const Call& call, const Step& step, cudaStream_t stream);
// fp8 wire: an own chunk from `sums` to `codes` (and the output), which tells the peer; a fetched one to the output.
cudaError_t launch_encode(const Call& call, int chunk, cudaStream_t stream);
cudaError_t launch_decode(const Call& call, int chunk, cudaStream_t stream);
// The end of a call, behind everything else; a failed one gets NaN.
cudaError_t launch_end(const Call& call, cudaStream_t stream);

}  // namespace mori::gemm_ar
