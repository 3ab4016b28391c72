// y[t, n] = sum_k W[n, k] * xn[t, k] for the 1..8 tokens of a verify window, W in Q8_0, on Metal (see gr.h for the contract).
//
//   defined   X, X4: type of x; NORM 0 or 1, Norm, Norm4: type of norm_weight; KS, SIMDGROUPS, ROWS, ROLLED: the family member
//   member    <SIMDGROUPS>_<KS>[_r<ROWS>]: KS simdgroups share the K of a row, each has its run of K and ROWS rows; SIMDGROUPS / KS
//             such sets in a threadgroup. A unit is one Q8_0 block; lane l takes the units l, l + 32, .. of its simdgroup's run
//   kernel    gr_down_<tokens>, tokens 1..8; grid (ceil(N / rows of a threadgroup), blocks of tokens)
//   bits      a lane adds its units in order, simd_sum the lanes, then the simdgroups in order of K: the same for all members of
//             one KS and for any number of tokens
//   NORM      y = sum over runs of r * (run of W . (x * norm_weight)), r = 1 / sqrt(mean(x^2) + eps) of the run's group: one pass
//             over x. Needs whole runs inside a group: hc divides KS and KS divides the units; gr_norm.metal serves what does not fit
//
// Bound by the latency of a simdgroup's few units: weights from memory, x from the cache (K 10240: three units a lane, the last
// by half the lanes). Times are the public report's, Apple M5, 324 x 10240: 4_4_r2 keeps the token loop rolled (ROLLED), -4.4%
// at 4 tokens; with KS 8 that loses 2..6%. Tried there and lost: tokens inside j, 4 rows, larger threadgroups, staged x.
#include "rms.metal"

struct Block {  // of Q8_0: no more than 2-byte alignment
  half d;
  packed_char4 q[8];
};
static_assert(sizeof(Block) == 34, "Q8_0 blocks are packed");

struct Shape {
  long rows, units, hc;  // N, K / 32, groups of the norm
};

constant constexpr int SETS = SIMDGROUPS / KS;
constant constexpr int THREADS = 32 * SIMDGROUPS;

struct Unit {  // of ROWS rows, in registers
  float d[ROWS];
  char4 q[ROWS][8];
};

// One token's x over one unit: adds to the dot products of the rows and to the sum of squares.
inline void add_token(thread const Unit& unit, device const X4* x, device const Norm4* norm, thread float* sums, int stride, thread float& squares) {
  float4 dots[ROWS];
  float4 square = float4(0.0f);
  for (int r = 0; r < ROWS; ++r) dots[r] = float4(0.0f);
  for (int j = 0; j < 8; ++j) {
    float4 value = float4(x[j]);
    if (NORM) {
      square = fma(value, value, square);
      value *= float4(norm[j]);
    }
    for (int r = 0; r < ROWS; ++r) dots[r] = fma(float4(unit.q[r][j]), value, dots[r]);
  }
  if (NORM) squares += sum(square);
  for (int r = 0; r < ROWS; ++r) sums[r * stride] = fma(unit.d[r], sum(dots[r]), sums[r * stride]);
}

template <int TOKENS>
[[kernel]] [[max_total_threads_per_threadgroup(THREADS)]] void gr_down(
    device const Block* w [[buffer(0)]], device const X* x [[buffer(1)]], device const Norm* norm [[buffer(2)]], device float* y [[buffer(3)]],
    constant Shape& shape [[buffer(4)]], constant float& eps [[buffer(5)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]], ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float run_sums[SIMDGROUPS * ROWS * TOKENS];
  threadgroup float run_squares[KS * TOKENS];
  threadgroup float factors[KS * TOKENS];

  const int set = simdgroup / KS, run = simdgroup % KS;
  const long first_row = (long(group.x) * SETS + set) * ROWS, length = shape.units * 32;
  x += long(group.y) * TOKENS * length;
  y += long(group.y) * TOKENS * shape.rows;

  float sums[ROWS * TOKENS], squares[TOKENS];
  for (int i = 0; i < ROWS * TOKENS; ++i) sums[i] = 0.0f;
  for (int t = 0; t < TOKENS; ++t) squares[t] = 0.0f;
  const long run_units = (shape.units + KS - 1) / KS, begin = run * run_units, end = least(begin + run_units, shape.units);
  for (long u = begin + lane; u < end; u += 32) {
    Unit unit;
    for (int r = 0; r < ROWS; ++r) {
      device const Block* block = w + least(first_row + r, shape.rows - 1) * shape.units + u;
      unit.d[r] = float(block->d);
      for (int j = 0; j < 8; ++j) unit.q[r][j] = block->q[j];
    }
    device const X4* values = (device const X4*)(x + u * 32);
    device const Norm4* weights = (device const Norm4*)(norm + u * 32);
#if ROLLED
#pragma clang loop unroll(disable)
#else
#pragma clang loop unroll(full)
#endif
    for (int t = 0; t < TOKENS; ++t) add_token(unit, values + t * (length / 4), weights, sums + t, TOKENS, squares[t]);
  }

  for (int i = 0; i < ROWS * TOKENS; ++i) {
    const float total = simd_sum(sums[i]);
    if (lane == 0) run_sums[simdgroup * ROWS * TOKENS + i] = total;
  }
  if (NORM) {
    for (int t = 0; t < TOKENS; ++t) {
      const float total = simd_sum(squares[t]);
      if (lane == 0 && set == 0) run_squares[t * KS + run] = total;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (NORM && simdgroup * 32 < TOKENS * KS) {  // a thread per token and run
    const int pair = thread_index, t = pair / KS, runs = KS / int(shape.hc), first_run = pair % KS / runs * runs;
    const bool used = pair < TOKENS * KS;
    const long size = length / shape.hc;
    float total = 0.0f;
    if (used) {
      for (int i = 0; i < runs; ++i) total += run_squares[t * KS + first_run + i];
    }
    const float mean = total / float(size) + eps;
    float factor = 1.0f / sqrt(mean);
    const float scale = used ? rms_scale(mean) : 1.0f;
    for (ushort other = 0; other < 32; ++other) {  // the whole simdgroup recomputes what left the range of fp32
      const float its_scale = simd_shuffle(scale, other);
      if (its_scale == 1.0f) continue;
      const int its_pair = simdgroup * 32 + other;
      const float exact = inverse_rms(x + its_pair / KS * length + its_pair % KS / runs * size, size, eps, its_scale, lane);
      if (lane == other) factor = exact;
    }
    if (used) factors[pair] = factor;
  }
  if (NORM) threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int i = thread_index; i < SETS * ROWS * TOKENS; i += THREADS) {
    const int its_set = i / (ROWS * TOKENS), r = i / TOKENS % ROWS, t = i % TOKENS;
    const long row = (long(group.x) * SETS + its_set) * ROWS + r;
    if (row >= shape.rows) continue;
    float total = 0.0f;
    for (int k = 0; k < KS; ++k) {
      const float part = run_sums[((its_set * KS + k) * ROWS + r) * TOKENS + t];
      total += NORM ? part * factors[t * KS + k] : part;
    }
    y[t * shape.rows + row] = total;
  }
}

template [[host_name("gr_down_1")]] [[kernel]] decltype(gr_down<1>) gr_down<1>;
template [[host_name("gr_down_2")]] [[kernel]] decltype(gr_down<2>) gr_down<2>;
template [[host_name("gr_down_3")]] [[kernel]] decltype(gr_down<3>) gr_down<3>;
template [[host_name("gr_down_4")]] [[kernel]] decltype(gr_down<4>) gr_down<4>;
template [[host_name("gr_down_5")]] [[kernel]] decltype(gr_down<5>) gr_down<5>;
template [[host_name("gr_down_6")]] [[kernel]] decltype(gr_down<6>) gr_down<6>;
template [[host_name("gr_down_7")]] [[kernel]] decltype(gr_down<7>) gr_down<7>;
template [[host_name("gr_down_8")]] [[kernel]] decltype(gr_down<8>) gr_down<8>;
