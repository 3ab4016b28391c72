// Attention over selected cells on the simdgroup matrices of any Apple GPU since M1 (see qsa.h for the contract).
//
//   one threadgroup of 4 simdgroups per (token, KV head, ROWS of its query heads[, split]); ROWS 8 or 16
//   chunk of 32 slots: ids -> K to threadgroup memory as operands -> scores, 8 cells per simdgroup -> online softmax, ROWS / 4
//     rows per simdgroup -> V into K's place -> sums, DIM / 4 columns per simdgroup in registers
//   Four barriers per chunk; ids alternate between two places, so that a chunk without a cell ends after the first one.
//   SPLIT: the same over one run of slots per split, fp32 partial and log-sum-exp out: qsa_attn.
//
// Bound by the decoding of int8 cells into operands, then by the matrix products. See qsa_common.metal for what is defined, and
// for the hoisted loads: a thread has one cell of the chunk and every fourth group of 4 of its values.
#include "qsa_common.metal"

#include <metal_simdgroup_matrix>

constant constexpr int CHUNK = 32, SIMDGROUPS = 4, THREADS = 32 * SIMDGROUPS;
constant constexpr int OWN_ROWS = ROWS / SIMDGROUPS;  // of the softmax
constant constexpr int TILES = ROWS / 8, COLUMNS = DIM / 8 / SIMDGROUPS;  // of 8x8, in a simdgroup's sums
constant constexpr int LD = DIM + 8, SCORES_LD = CHUNK + 8;  // rows apart in threadgroup memory: 16 bytes off the banks

typedef simdgroup_matrix<float, 8, 8> Sums;
typedef simdgroup_matrix<Operand, 8, 8> Operands;

// A chunk of K or V as operands. cells, scales: of cell 0 in this KV head.
inline void stage(device const Cell* values, device const half* scales, long cell_stride, long scale_stride, threadgroup const int* cells,
                  threadgroup Operand4* tile, ushort thread_index) {
  const int c = thread_index / 4, part = thread_index % 4, cell = cells[c];
  tile += c * (LD / 4) + part;
#if HOISTED
  const bool present = cell >= 0;
  const long at = present ? cell : 0;
  device const Cell4* row = (device const Cell4*)(values + at * cell_stride) + part;
  float scale[DIM / 64];
  for (int g = 0; g < DIM / 64; ++g) {
    const float of_cell = scale_of(scales, at * scale_stride + g);
    scale[g] = present ? of_cell : 0.0f;
  }
#pragma clang loop unroll(full)
  for (int i = 0; i < DIM / 16; ++i) tile[4 * i] = operand(row[4 * i], scale[i / 4]);
#else
  for (int i = 0; i < DIM / 16; ++i) {
    Operand4 value = Operand4(0.0f);
    if (cell >= 0) value = operand(*((device const Cell4*)(values + cell * cell_stride) + part + 4 * i), scale_of(scales, cell * scale_stride + i / 4));
    tile[4 * i] = value;
  }
#endif
}

[[kernel]] [[max_total_threads_per_threadgroup(THREADS)]] void qsa_flash(
    device const Query* q [[buffer(0)]], device const Cell* k [[buffer(1)]], device const half* k_scale [[buffer(2)]],
    device const Cell* v [[buffer(3)]], device const half* v_scale [[buffer(4)]], device const Id* ids [[buffer(5)]],
    device const Gate* gate [[buffer(6)]], device Out* out [[buffer(7)]], device float* lse [[buffer(8)]], constant Shape& shape [[buffer(9)]],
    constant float& sm_scale [[buffer(10)]], uint3 group [[threadgroup_position_in_grid]], ushort thread_index [[thread_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]], ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup Operand4 queries[ROWS * LD / 4];
  threadgroup float4 memory[CHUNK * LD / 8];  // K, then V, of a chunk as operands; the sums as fp32 at the end
  threadgroup float scores[ROWS * SCORES_LD];
  threadgroup Operand weights[ROWS * SCORES_LD];
  threadgroup float factors[ROWS * 8];  // of each row, in 8 equal columns
  threadgroup float inverses[ROWS];
  threadgroup int both_cells[2 * CHUNK];
  static_assert(ROWS * DIM * sizeof(float) <= sizeof(memory), "the sums fit into the place of a chunk");
  threadgroup Operand4* tile = (threadgroup Operand4*)memory;
  threadgroup const Operand* query_rows = (threadgroup const Operand*)queries;
  threadgroup const Operand* tile_rows = (threadgroup const Operand*)memory;

  const Place place = place_of(group, shape, ROWS);
  ids += place.token * shape.slots;
  k += place.kv_head * shape.k_head;
  v += place.kv_head * shape.v_head;
  k_scale += place.kv_head * shape.k_scale_head;
  v_scale += place.kv_head * shape.v_scale_head;

  float to_logit[OWN_ROWS], largest[OWN_ROWS], total[OWN_ROWS];
  for (int i = 0; i < OWN_ROWS; ++i) {
    const int row = simdgroup * OWN_ROWS + i;
    device const Query* from = q + place.token * shape.q_token + (place.first_head + min(row, place.heads - 1)) * shape.q_head;
    to_logit[i] = sm_scale * LOG2_E * load_query(from, (threadgroup Operand*)queries + row * LD, row < place.heads, lane);
    largest[i] = -INFINITY;
    total[i] = 0.0f;
  }
  Sums sums[TILES][COLUMNS];
  for (int a = 0; a < TILES; ++a) {
    for (int b = 0; b < COLUMNS; ++b) sums[a][b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }

  int turn = 0;
  for (long start = place.begin; start < place.end; start += CHUNK, turn ^= 1) {
    threadgroup int* cells = both_cells + turn * CHUNK;
    if (thread_index < CHUNK) cells[thread_index] = cell_of(ids, start + thread_index, place.end, shape.cells);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool present = cells[lane] >= 0;
    if (!simd_any(present)) continue;  // the same answer in every simdgroup

    stage(k, k_scale, shape.k_cell, shape.k_scale_cell, cells, tile, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int a = 0; a < TILES; ++a) {
      Sums score = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      for (int e = 0; e < DIM; e += 8) {
        Operands left, right;
        simdgroup_load(left, query_rows + a * 8 * LD + e, LD);
        simdgroup_load(right, tile_rows + simdgroup * 8 * LD + e, LD, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(score, left, right, score);
      }
      simdgroup_store(score, scores + a * 8 * SCORES_LD + simdgroup * 8, SCORES_LD);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int i = 0; i < OWN_ROWS; ++i) {
      const int row = simdgroup * OWN_ROWS + i;
      float logit = present ? scores[row * SCORES_LD + lane] * to_logit[i] : -INFINITY;
      const float factor = online_softmax<1>(&logit, largest[i], total[i]);
      weights[row * SCORES_LD + lane] = Operand(logit);
      if (lane < 8) factors[row * 8 + lane] = factor;
    }
    stage(v, v_scale, shape.v_cell, shape.v_scale_cell, cells, tile, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    Operands left[TILES][CHUNK / 8];
    for (int a = 0; a < TILES; ++a) {
      Sums factor;  // element by element, as a product with a diagonal would spread a NaN; both are laid out alike
      simdgroup_load(factor, factors + a * 64, 8);
      for (int b = 0; b < COLUMNS; ++b) {
        for (int i = 0; i < 2; ++i) sums[a][b].thread_elements()[i] *= factor.thread_elements()[i];
      }
      for (int c = 0; c < CHUNK / 8; ++c) simdgroup_load(left[a][c], weights + a * 8 * SCORES_LD + c * 8, SCORES_LD);
    }
    for (int b = 0; b < COLUMNS; ++b) {
      for (int c = 0; c < CHUNK / 8; ++c) {
        Operands right;
        simdgroup_load(right, tile_rows + c * 8 * LD + (simdgroup * COLUMNS + b) * 8, LD);
        for (int a = 0; a < TILES; ++a) simdgroup_multiply_accumulate(sums[a][b], left[a][c], right, sums[a][b]);
      }
    }
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int a = 0; a < TILES; ++a) {
    for (int b = 0; b < COLUMNS; ++b) {
      simdgroup_store(sums[a][b], (threadgroup float*)memory + a * 8 * DIM + (simdgroup * COLUMNS + b) * 8, DIM);
    }
  }
  if (lane == 0) {
    for (int i = 0; i < OWN_ROWS; ++i) {
      const int row = simdgroup * OWN_ROWS + i;
      inverses[row] = inverse_of(total[i]);
      if (SPLIT && row < place.heads) {
        lse[(place.split * shape.tokens + place.token) * shape.q_heads + place.first_head + row] = log_sum_exp(largest[i], total[i]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  write_out((threadgroup const float*)memory, inverses, gate, out, place, shape, thread_index, THREADS);
}
