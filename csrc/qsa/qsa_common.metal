// What the two attention kernels share: the shape, cells as operands of a matrix product, the online softmax, the epilogue.
//
//   defined   Query, Id, Gate, Out: element types (with Gate4, Out4); Cell, Cell4: of K and V; Operand, Operand4: of the products,
//             fp16, or bf16 for a bf16 cache; DIM; INT8, GATED, SPLIT, HOISTED: 0 or 1
//   group     x: token, y: KV head * tiles + tile of ROWS query heads, z: split
//   HOISTED   a thread takes the row pointers and scales of its cells once per run of its products, and loads without a
//             condition: an empty slot points at cell 0 with a factor of 0, chosen before the multiply. It feeds q * 0 = +-0, and
//             x + (+-0) = x for a sum that starts at +0, so the bits are those of the form with a branch per element (HOISTED 0,
//             for tests and bench/compare.py). In a public report (Apple M5, 12 layers of 1984 tokens) 272 ms became 126.
#include "../common/common.metal"

struct Shape {
  long tokens, slots, cells, q_heads, group, tiles, run;  // group: query heads per KV head; run: slots of a split
  long q_token, q_head, k_cell, k_head, k_scale_cell, k_scale_head;  // strides, in elements
  long v_cell, v_head, v_scale_cell, v_scale_head, gate_token, gate_head;
};

// The part of the problem that one threadgroup has.
struct Place {
  long token, kv_head, split, first_head;  // first_head: of the query heads
  int heads;                               // at most the rows of a tile
  long begin, end;                         // slots
};

inline Place place_of(uint3 group, constant Shape& shape, int rows) {
  Place place;
  place.token = group.x;
  place.kv_head = group.y / shape.tiles;
  place.split = group.z;
  const long tile = group.y % shape.tiles;
  place.first_head = place.kv_head * shape.group + tile * rows;
  place.heads = int(least(rows, shape.group - tile * rows));
  place.begin = least(place.split * shape.run, shape.slots);
  place.end = least(place.begin + shape.run, shape.slots);
  return place;
}

// The cell of a slot, -1 for none: a negative id, one beyond the cells, a slot beyond the end.
inline int cell_of(device const Id* ids, long slot, long end, long cells) {
  const long id = slot < end ? long(ids[slot]) : -1;
  return id >= 0 && id < cells ? int(id) : -1;
}

// A value of the cache as an operand. `scale`: of int8 codes; else 1, or 0 for an empty slot, which selects by bits: what lies in
// cell 0 may be NaN.
#if INT8
inline Operand4 operand(Cell4 codes, float scale) { return Operand4(float4(codes) * scale); }
inline Operand operand(Cell code, float scale) { return Operand(float(code) * scale); }
#else
inline Operand4 operand(Cell4 values, float scale) { return as_type<Operand4>(as_type<ushort4>(values) & ushort(scale == 0.0f ? 0 : 0xffff)); }
inline Operand operand(Cell value, float scale) { return as_type<Operand>(ushort(as_type<ushort>(value) & ushort(scale == 0.0f ? 0 : 0xffff))); }
#endif

inline float scale_of(device const half* scales, long at) { return INT8 ? float(scales[at]) : 1.0f; }

// One query head as operands, times a power of two that brings its largest value to 0.5..1: fp16 holds no fp32 or bf16 range.
// Returns the factor that undoes it. An absent head is zeros.
inline float load_query(device const Query* q, threadgroup Operand* row, bool present, ushort lane) {
  float values[DIM / 32];
  uint largest = 0;
  for (int i = 0; i < DIM / 32; ++i) {
    values[i] = present ? float(q[lane + 32 * i]) : 0.0f;
    largest = max(largest, magnitude_bits(values[i]));
  }
  const int exponent = clamp(int(simd_max(largest) >> 23) - 126, -126, 126);
  for (int i = 0; i < DIM / 32; ++i) row[lane + 32 * i] = Operand(values[i] * power_of_two(-exponent));
  return power_of_two(exponent);
}

// One row of softmax over a chunk, N logits (base 2) per lane, -INFINITY for none. The logits become weights relative to the
// largest logit so far; returns the factor by which all that was summed up before shrinks. A NaN stays one.
template <int N>
inline float online_softmax(thread float* logits, thread float& largest, thread float& total) {
  float top = largest;
  for (int i = 0; i < N; ++i) top = max(top, logits[i]);
  top = simd_max(top);
  const float base = top == -INFINITY ? 0.0f : top;
  float part = 0.0f;
  for (int i = 0; i < N; ++i) {
    logits[i] = float(Operand(exp2(logits[i] - base)));  // as the product will see it
    part += logits[i];
  }
  const float factor = exp2(largest - base);
  largest = top;
  total = fma(total, factor, simd_sum(part));
  return factor;
}

// 1 / total; 0 stands for a row without a cell.
inline float inverse_of(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

inline float log_sum_exp(float largest, float total) { return total == 0.0f ? -INFINITY : (largest + log2(total)) * LN_2; }

// Scales the sums [heads, DIM], applies the gate and writes them; a row without a cell is exactly 0, whatever its gate holds.
inline void write_out(threadgroup const float* sums, threadgroup const float* inverses, device const Gate* gate, device Out* out, Place place,
                      constant Shape& shape, ushort thread_index, ushort threads) {
  gate += place.token * shape.gate_token + place.first_head * shape.gate_head;
  out += ((place.split * shape.tokens + place.token) * shape.q_heads + place.first_head) * DIM;
#if HOISTED
  for (int i = thread_index * 4; i < place.heads * DIM; i += threads * 4) {
    const float inverse = inverses[i / DIM];
    float4 values = float4(0.0f);
    if (inverse != 0.0f) {
      values = *(threadgroup const float4*)(sums + i) * inverse;
      if (GATED) values *= sigmoid(float4(*(device const Gate4*)(gate + i / DIM * shape.gate_head + i % DIM)));
    }
    *(device Out4*)(out + i) = Out4(values);
  }
#else
  for (int i = thread_index; i < place.heads * DIM; i += threads) {
    const float inverse = inverses[i / DIM];
    float value = 0.0f;
    if (inverse != 0.0f) {
      value = sums[i] * inverse;
      if (GATED) value *= sigmoid(float(gate[i / DIM * shape.gate_head + i % DIM]));
    }
    out[i] = Out(value);
  }
#endif
}
