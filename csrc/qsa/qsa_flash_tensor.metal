// Attention over selected cells on the matrix units of M5 and later (Metal 4 cooperative tensors; see qsa.h for the contract).
//
//   one threadgroup of DIM / 64 simdgroups per (token, KV head, 16 of its query heads[, split])
//   chunk of 64 slots: ids and scales -> partial scores of 64 cells, 64 dims per simdgroup -> online softmax of their sum,
//     16 / simdgroups rows each -> sums over the cells, 64 columns per simdgroup
//   K and V go from the cache into the registers of the product's right operand (16 x 64 x 32), decoded there; the left one is a
//   tensor in threadgroup memory. Every position comes from get_multidimensional_index.
//
// The hoisted loads (qsa_common.metal) need to know which elements of a lane share a cell. On an M5 a lane's 64 elements are 8
// cells x 8 dims; hoistable_* ask for just that, and any other layout takes the branch per element: same bits.
// Bound by the loads and decoding of int8 cells. Tried in the public report and lost: pointers over both runs of V, vectors of 4
// dims in V, rescaling in place without `fresh` (other bits).
#include "qsa_common.metal"

#if __METAL_VERSION__ < 400
#error "cooperative tensors need Metal 4"
#endif
#include <metal_tensor>

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

using namespace mpp::tensor_ops;

constant constexpr int ROWS = 16, CHUNK = 64, RUN = 32;  // RUN: the K of one product
constant constexpr int SIMDGROUPS = DIM / 64, THREADS = 32 * SIMDGROUPS, OWN_ROWS = ROWS / SIMDGROUPS;
constant constexpr int ELEMENTS = 64;  // of a lane in a right operand of 64 x 32

typedef tensor<threadgroup Operand, dextents<int, 2>, tensor_inline> Matrix;

// Whether the lane's elements i of a K operand are cell(i / 4 % 8), dim(i / 32) + i % 4.
template <typename Tensor>
inline bool hoistable_keys(thread Tensor& t) {
  if (t.get_capacity() != ELEMENTS) return false;
  bool regular = true;
  for (ushort i = 0; i < ELEMENTS; ++i) {
    if (!t.is_valid_element(i)) return false;
    const auto at = t.get_multidimensional_index(i), dim = t.get_multidimensional_index(i / 32 * 32), cell = t.get_multidimensional_index(i / 4 % 8 * 4);
    regular = regular && at[0] == dim[0] + i % 4 && dim[0] % 4 == 0 && at[1] == cell[1];
  }
  return regular;
}

// Whether the lane's elements i of a V operand are cell(i / 32, i % 4), dim(i / 4 % 8).
template <typename Tensor>
inline bool hoistable_values(thread Tensor& t) {
  if (t.get_capacity() != ELEMENTS) return false;
  bool regular = true;
  for (ushort i = 0; i < ELEMENTS; ++i) {
    if (!t.is_valid_element(i)) return false;
    const auto at = t.get_multidimensional_index(i), dim = t.get_multidimensional_index(i / 4 % 8 * 4), cell = t.get_multidimensional_index(i / 32 * 32 + i % 4);
    regular = regular && at[0] == dim[0] && at[1] == cell[1];
  }
  return regular;
}

// Either operand with a branch per element, in any layout. `values`: of cell 0, from the operand's first dim on.
template <typename Tensor>
inline void fill_any(thread Tensor& t, device const Cell* values, long cell_stride, threadgroup const int* cells, threadgroup const half* scales, int group) {
  for (ushort i = 0; i < t.get_capacity(); ++i) {
    if (!t.is_valid_element(i)) continue;
    const auto at = t.get_multidimensional_index(i);
    const int cell = cells[at[1]];
    Operand value = Operand(0.0f);
    if (cell >= 0) value = operand(values[cell * cell_stride + at[0]], float(scales[at[1] * SIMDGROUPS + group]));
    t[i] = value;
  }
}

[[kernel]] [[max_total_threads_per_threadgroup(THREADS)]] void qsa_flash_tensor(
    device const Query* q [[buffer(0)]], device const Cell* k [[buffer(1)]], device const half* k_scale [[buffer(2)]],
    device const Cell* v [[buffer(3)]], device const half* v_scale [[buffer(4)]], device const Id* ids [[buffer(5)]],
    device const Gate* gate [[buffer(6)]], device Out* out [[buffer(7)]], device float* lse [[buffer(8)]], constant Shape& shape [[buffer(9)]],
    constant float& sm_scale [[buffer(10)]], uint3 group [[threadgroup_position_in_grid]], ushort thread_index [[thread_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]], ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup Operand queries[ROWS * DIM];
  threadgroup float4 memory[SIMDGROUPS * ROWS * CHUNK / 4];  // each simdgroup's partial scores; the sums at the end
  threadgroup Operand weights[ROWS * CHUNK];
  threadgroup float factors[ROWS];
  threadgroup float inverses[ROWS];
  threadgroup int both_cells[2 * CHUNK];
  threadgroup half both_k_scales[2 * CHUNK * SIMDGROUPS];  // 0 for an empty slot
  threadgroup half both_v_scales[2 * CHUNK * SIMDGROUPS];
  static_assert(ROWS * DIM * sizeof(float) == sizeof(memory), "the sums fit into the place of the scores");
  threadgroup float* scores = (threadgroup float*)memory;

  const Place place = place_of(group, shape, ROWS);
  ids += place.token * shape.slots;
  k += place.kv_head * shape.k_head + simdgroup * 64;
  v += place.kv_head * shape.v_head + simdgroup * 64;
  k_scale += place.kv_head * shape.k_scale_head;
  v_scale += place.kv_head * shape.v_scale_head;

  float to_logit[OWN_ROWS], largest[OWN_ROWS], total[OWN_ROWS];
  for (int i = 0; i < OWN_ROWS; ++i) {
    const int row = simdgroup * OWN_ROWS + i;
    device const Query* from = q + place.token * shape.q_token + (place.first_head + min(row, place.heads - 1)) * shape.q_head;
    to_logit[i] = sm_scale * LOG2_E * load_query(from, queries + row * DIM, row < place.heads, lane);
    largest[i] = -INFINITY;
    total[i] = 0.0f;
  }

  constexpr auto score_shape = matmul2d_descriptor(ROWS, CHUNK, RUN, false, true, false, matmul2d_descriptor::mode::multiply_accumulate);
  constexpr auto sum_shape = matmul2d_descriptor(ROWS, 64, RUN, false, false, false, matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<score_shape, execution_simdgroup> score_product;
  matmul2d<sum_shape, execution_simdgroup> sum_product;
  Matrix query_matrix(queries, dextents<int, 2>(DIM, ROWS)), weight_matrix(weights, dextents<int, 2>(CHUNK, ROWS));
  typedef decltype(query_matrix.slice<RUN, ROWS>(0, 0)) Left;
  auto keys = score_product.get_right_input_cooperative_tensor<Operand, Operand, float>();
  auto values = sum_product.get_right_input_cooperative_tensor<Operand, Operand, float>();
  auto partial = score_product.get_destination_cooperative_tensor<Left, decltype(keys), float>();
  auto fresh = sum_product.get_destination_cooperative_tensor<Left, decltype(values), float>();
  auto sums = sum_product.get_destination_cooperative_tensor<Left, decltype(values), float>();
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    if (sums.is_valid_element(i)) sums[i] = 0.0f;
  }
  const bool hoist_keys = HOISTED && simd_all(hoistable_keys(keys)), hoist_values = HOISTED && simd_all(hoistable_values(values));

  int turn = 0;
  for (long start = place.begin; start < place.end; start += CHUNK, turn ^= 1) {
    threadgroup int* cells = both_cells + turn * CHUNK;
    threadgroup half* k_scales = both_k_scales + turn * CHUNK * SIMDGROUPS;
    threadgroup half* v_scales = both_v_scales + turn * CHUNK * SIMDGROUPS;
    for (int i = thread_index; i < CHUNK * SIMDGROUPS; i += THREADS) {
      const int slot = i / SIMDGROUPS, column = i % SIMDGROUPS, cell = cell_of(ids, start + slot, place.end, shape.cells);
      if (column == 0) cells[slot] = cell;
      k_scales[i] = half(cell < 0 ? 0.0f : scale_of(k_scale, cell * shape.k_scale_cell + column));
      v_scales[i] = half(cell < 0 ? 0.0f : scale_of(v_scale, cell * shape.v_scale_cell + column));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (!simd_any(cells[lane] >= 0 || cells[lane + 32] >= 0)) continue;  // the same answer in every simdgroup

    for (ushort i = 0; i < partial.get_capacity(); ++i) {
      if (partial.is_valid_element(i)) partial[i] = 0.0f;
    }
    device const Cell* rows[8];
    float row_scales[8];
    if (hoist_keys) {
      for (int c = 0; c < 8; ++c) {
        const int slot = keys.get_multidimensional_index(4 * c)[1];
        rows[c] = k + max(cells[slot], 0) * shape.k_cell;
        row_scales[c] = float(k_scales[slot * SIMDGROUPS + simdgroup]);
      }
    }
    for (int e = 0; e < 64; e += RUN) {
      if (hoist_keys) {
#pragma clang loop unroll(full)
        for (ushort i = 0; i < ELEMENTS; i += 4) {
          const int c = i / 4 % 8, dim = e + keys.get_multidimensional_index(i / 32 * 32)[0];
          const Operand4 four = operand(*(device const Cell4*)(rows[c] + dim), row_scales[c]);
          for (ushort j = 0; j < 4; ++j) keys[i + j] = four[j];
        }
      } else {
        fill_any(keys, k + e, shape.k_cell, cells, k_scales, simdgroup);
      }
      auto left = query_matrix.slice<RUN, ROWS>(simdgroup * 64 + e, 0);
      score_product.run(left, keys, partial);
    }
    for (ushort i = 0; i < partial.get_capacity(); ++i) {
      if (!partial.is_valid_element(i)) continue;
      const auto at = partial.get_multidimensional_index(i);
      scores[(simdgroup * ROWS + at[1]) * CHUNK + at[0]] = partial[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int i = 0; i < OWN_ROWS; ++i) {
      const int row = simdgroup * OWN_ROWS + i;
      float logits[CHUNK / 32];
      for (int j = 0; j < CHUNK / 32; ++j) {
        float score = 0.0f;
        for (int part = 0; part < SIMDGROUPS; ++part) score += scores[(part * ROWS + row) * CHUNK + j * 32 + lane];
        logits[j] = cells[j * 32 + lane] >= 0 ? score * to_logit[i] : -INFINITY;
      }
      const float factor = online_softmax<CHUNK / 32>(logits, largest[i], total[i]);
      for (int j = 0; j < CHUNK / 32; ++j) weights[row * CHUNK + j * 32 + lane] = Operand(logits[j]);
      if (lane == 0) factors[row] = factor;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (ushort i = 0; i < fresh.get_capacity(); ++i) {
      if (fresh.is_valid_element(i)) fresh[i] = 0.0f;
    }
    for (int first = 0; first < CHUNK; first += RUN) {
      if (hoist_values) {
        for (int c = 0; c < 8; ++c) {
          const int slot = first + values.get_multidimensional_index(c / 4 * 32 + c % 4)[1];
          rows[c] = v + max(cells[slot], 0) * shape.v_cell;
          row_scales[c] = float(v_scales[slot * SIMDGROUPS + simdgroup]);
        }
#pragma clang loop unroll(full)
        for (ushort i = 0; i < ELEMENTS; ++i) {
          const int c = i / 32 * 4 + i % 4, dim = values.get_multidimensional_index(i / 4 % 8 * 4)[0];
          values[i] = operand(rows[c][dim], row_scales[c]);
        }
      } else {
        fill_any(values, v, shape.v_cell, cells + first, v_scales + first * SIMDGROUPS, simdgroup);
      }
      auto left = weight_matrix.slice<RUN, ROWS>(first, 0);
      sum_product.run(left, values, fresh);
    }
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
      if (sums.is_valid_element(i)) sums[i] = fma(sums[i], factors[sums.get_multidimensional_index(i)[1]], fresh[i]);
    }
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    if (!sums.is_valid_element(i)) continue;
    const auto at = sums.get_multidimensional_index(i);
    scores[at[1] * DIM + simdgroup * 64 + at[0]] = sums[i];
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
  write_out(scores, inverses, gate, out, place, shape, thread_index, THREADS);
}
