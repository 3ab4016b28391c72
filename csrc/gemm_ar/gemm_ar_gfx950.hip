// The GEMM of gemm_ar on gfx950: C = A B^T with every 64 rows stored into the memory of their owner, over xGMI for a peer's, and a
// flag there once a chunk is complete (gemm_ar_gfx950.h). The kernels are those of mxfp8/ with another epilogue.
//
//   order      the rows of a round that go to peers first, this rank's own last; all column tiles of some rows, then the next rows
//   store      16-byte pieces through the caches, no read, no atomics on data: summands stay apart, in slots by rank
//   count      of an owner's chunk, the tiles that reach into it; a tile may reach into several
// Bound by the matrix cores, or, where M N / K is large, by the links. Beside it runs collective_gfx950.hip, in the registers and the
// LDS that a 256 x 256 tile leaves free.
#include "gemm_ar_gfx950.h"

#include "../mxfp8/epilogue_gfx950.h"
#include "../mxfp8/pipeline_gfx950.h"
#include "../mxfp8/scales_gfx950.h"
#include "../mxfp8/simple_gfx950.h"
#include "signals_gfx950.h"

namespace mori::gemm_ar {
namespace {

using namespace gfx950;
using mxfp8::Form;
using mxfp8::GemmArgs;
using mxfp8::Scales;
using mxfp8::StoreC;
namespace tiled = mxfp8::tiled;
namespace simple = mxfp8::simple;

static_assert(simple::kTile == kDeliveryRows && tiled::kHalf == 2 * kDeliveryRows);

// The rows of this workgroup's tile, in the order above where spans are whole tiles; past the last row there may be none.
MORI_DEVICE int first_row(const Call& call, int index, int tile_rows) {
  const int span = call.span_rows() / tile_rows;
  if (span * tile_rows != call.span_rows()) return index * tile_rows;
  const int round = call.world * span, within = index % round;
  return (index - within + (within + (call.rank + 1) * span) % round) * tile_rows;
}

int row_tiles(const Call& call, int tile_rows) {
  const bool whole = call.span_rows() % tile_rows == 0;
  return whole ? call.rounds() * call.world * (call.span_rows() / tile_rows) : static_cast<int>((call.m + tile_rows - 1) / tile_rows);
}

// Where rows [row, row + 64) of C begin in their owner's memory.
MORI_DEVICE uint8_t* target(const Call& call, int row) {
  const Chunk chunk = call.chunk_of(row);
  const int64_t own = chunk.number * call.chunk_rows + (row - chunk.first);
  return call.slot(chunk.owner, call.rank) + own * call.n * bytes_of(call.partial_type);
}

// Says that rows [row, row + tile_rows) of a tile, one of `column_tiles`, are stored.
MORI_DEVICE void deliver(const Call& call, int row, int tile_rows, int column_tiles) {
  if (!stores_done_in_first_wave() || lane_id() != 0) return;
  const int m = static_cast<int>(call.m), end = row + tile_rows < m ? row + tile_rows : m;
  Signals* mine = call.signals(call.rank);
  while (row < end) {
    const Chunk chunk = call.chunk_of(row);
    const int first = static_cast<int>(chunk.first), past = first + static_cast<int>(call.chunk_rows), last = (past < m ? past : m) - 1;
    const int tiles = (last / tile_rows - first / tile_rows + 1) * column_tiles;
    if (count(&mine->delivered[chunk.owner][chunk.number], tiles))
      set_flag(&call.signals(chunk.owner)->arrived[call.rank][chunk.number], mine->epoch + 1);
    row = past;
  }
}

// The epilogue: StoreC, where a wave's 64 rows of each half of the tile have an owner each.
struct StoreToOwners : StoreC {
  struct Bias {};

  Buffer lower;  // of the second half

  // `args.out` is the beginning of a slot.
  MORI_DEVICE StoreToOwners(const Call& call, const GemmArgs& args, int row, int64_t n0, int columns) : StoreC(args, 0, n0, kDeliveryRows, columns) {
    const int first = row + wave_id() / 4 * kDeliveryRows;
    c = rows(call, first, n0);
    lower = rows(call, first + tiled::kHalf, n0);
  }

  MORI_DEVICE Bias bias(int) const { return {}; }
  MORI_DEVICE void store(int m, int n, const f32x4 (&sums)[2], Bias) const {
    StoreC here = *this;
    here.c = m < tiled::kHalf ? c : lower;
    here.store(m % kDeliveryRows, n, sums, {});
  }

 private:
  MORI_DEVICE Buffer rows(const Call& call, int row, int64_t n0) const {
    const int left = static_cast<int>(call.m) - row, size = bytes_of(call.partial_type);
    if (left <= 0) return make_buffer(nullptr, 0);
    return make_buffer(target(call, row) + n0 * size, static_cast<uint32_t>((left < kDeliveryRows ? left : kDeliveryRows) * pitch - n0 * size));
  }
};

template <int kColumnHalves, template <int> class ScaleSource>
__global__ void __attribute__((amdgpu_flat_work_group_size(tiled::kThreads, tiled::kThreads), amdgpu_waves_per_eu(2, 2)))
deliver_tiles(const GemmArgs args, const Call call) {
#if MORI_HAS_GFX950
  using L = tiled::Layout<kColumnHalves>;
  __shared__ __attribute__((aligned(16))) uint8_t lds[L::kScales + ScaleSource<kColumnHalves>::kLdsBytes];
  const int row = first_row(call, block_id_y(), tiled::kRows);
  if (row >= args.m) return;
  const int64_t n0 = static_cast<int64_t>(block_id()) * L::kColumns;
  tiled::Gemm<kColumnHalves, ScaleSource, StoreToOwners> pipeline(args, lds_address(lds), row, n0);
  pipeline.run(StoreToOwners(call, args, row, n0, L::kColumns));
  deliver(call, row, tiled::kRows, static_cast<int>((args.n + L::kColumns - 1) / L::kColumns));
#endif
}

template <class KernelScales>
__global__ void __attribute__((amdgpu_flat_work_group_size(simple::kThreads, simple::kThreads)))
deliver_simple(const GemmArgs args, const KernelScales scales, const Call call) {
  const int column_tiles = static_cast<int>((args.n + simple::kTile - 1) / simple::kTile);
  const int row = first_row(call, block_id() / column_tiles, simple::kTile);
  if (row >= args.m) return;
  GemmArgs there = args;
  there.out = target(call, row) - row * args.n * bytes_of(call.partial_type);
  simple::multiply(there, scales, row, static_cast<int64_t>(block_id() % column_tiles) * simple::kTile);
  deliver(call, row, simple::kTile, column_tiles);
}

template <int kColumnHalves, template <int> class ScaleSource>
hipError_t launch_tiles(const Call& call, const GemmArgs& args, hipStream_t stream) {
  constexpr int64_t kColumns = tiled::Layout<kColumnHalves>::kColumns;
  const dim3 grid(static_cast<unsigned>((args.n + kColumns - 1) / kColumns), static_cast<unsigned>(row_tiles(call, tiled::kRows)));
  deliver_tiles<kColumnHalves, ScaleSource><<<grid, tiled::kThreads, 0, stream>>>(args, call);
  return hipGetLastError();
}

}  // namespace

hipError_t launch_delivery(const Call& call, const GemmArgs& args, Scales scales, Form form, hipStream_t stream) {
  const bool packed = scales == Scales::packed;
  switch (form) {
    case Form::wide: return packed ? launch_tiles<2, mxfp8::PackedScales>(call, args, stream) : launch_tiles<2, mxfp8::RawScales>(call, args, stream);
    case Form::narrow: return packed ? launch_tiles<1, mxfp8::PackedScales>(call, args, stream) : launch_tiles<1, mxfp8::RawScales>(call, args, stream);
    default:
      return simple::with_scales(args, scales, [&](const auto& kernel_scales) {
        const int64_t tiles = row_tiles(call, simple::kTile) * ((args.n + simple::kTile - 1) / simple::kTile);
        deliver_simple<<<static_cast<unsigned>(tiles), simple::kThreads, 0, stream>>>(args, kernel_scales, call);
        return hipGetLastError();
      });
  }
}

}  // namespace mori::gemm_ar
