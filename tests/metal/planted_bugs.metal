// Kernels with one bug each, and their twins without it: `<name>_bug` must be found by the emulator, `<name>` must pass.
// Most take x and y, 256 floats each, and run as 2 threadgroups of 128 threads.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

#define PAIR(name)                                                                              \
  template [[host_name(#name)]] [[kernel]] decltype(name<false>) name<false>;                   \
  template [[host_name(#name "_bug")]] [[kernel]] decltype(name<true>) name<true>;

// ---- barriers ----

template <bool BUG>
[[kernel]] void threadgroup_barrier_missing(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                            uint i [[thread_position_in_grid]],
                                            uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  tile[t] = x[i];
  if (!BUG) threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = tile[127 - t];
}

template <bool BUG>
[[kernel]] void threadgroup_barrier_orders_nothing(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                                   uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  tile[t] = x[i];
  threadgroup_barrier(BUG ? mem_flags::mem_none : mem_flags::mem_threadgroup);
  y[i] = tile[127 - t];
}

// The next round overwrites what slower lanes still read.
template <bool BUG>
[[kernel]] void barrier_after_the_reads_missing(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                                uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    tile[t] = x[i] * float(round + 1);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += tile[127 - t];
    if (!BUG) threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  y[i] = sum;
}

// One lane reads what another one overwrites: no value is wrong, and whether it is the old one is a matter of luck.
template <bool BUG>
[[kernel]] void write_after_a_read(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]],
                                   uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  tile[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float first = tile[t];
  if (t == 0) first = tile[127];
  if (!BUG) threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 126) tile[127] = 0.0f;
  y[i] = first;
}

template <bool BUG>
[[kernel]] void simdgroup_barrier_missing(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                          uint i [[thread_position_in_grid]],
                                          uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  tile[t] = x[i];
  if (!BUG) simdgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = tile[t ^ 31];
}

// A simdgroup barrier orders nothing between simdgroups.
template <bool BUG>
[[kernel]] void barrier_of_the_wrong_scope(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                           uint i [[thread_position_in_grid]],
                                           uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  tile[t] = x[i];
  if (BUG)
    simdgroup_barrier(mem_flags::mem_threadgroup);
  else
    threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = tile[t ^ 64];
}

// Loads of matrices access memory as the whole simdgroup, whichever lane wrote the elements.
template <bool BUG>
[[kernel]] void barrier_before_simdgroup_load_missing(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                                      uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                                                      uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float tile[4 * 64];
  const uint at = sg * 64 + lane * 2;
  tile[at] = x[group * 128 + sg * 32 + lane];
  tile[at + 1] = 1.0f;
  if (!BUG) simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 matrix;
  simdgroup_load(matrix, tile + sg * 64, 8);
  y[group * 128 + sg * 32 + lane] = matrix.thread_elements()[0];
}

template <bool BUG>
[[kernel]] void barrier_after_simdgroup_store_missing(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                                      uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                                                      uint sg [[simdgroup_index_in_threadgroup]]) {
  threadgroup float tile[4 * 64];
  simdgroup_store(make_filled_simdgroup_matrix<float, 8, 8>(x[0]), tile + sg * 64, 8);
  if (!BUG) simdgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = tile[sg * 64 + lane];
}

// Through a buffer, lanes of a threadgroup meet at a barrier for device memory.
template <bool BUG>
[[kernel]] void barrier_of_the_wrong_memory(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                            uint i [[thread_position_in_grid]]) {
  y[i] = x[i];
  threadgroup_barrier(BUG ? mem_flags::mem_threadgroup : mem_flags::mem_device);
  const float other = y[i ^ 64];
  threadgroup_barrier(mem_flags::mem_device);
  y[i] = other;
}

// ---- divergence ----

template <bool BUG>
[[kernel]] void barrier_in_a_branch(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]],
                                    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  tile[t] = x[i];
  if (!BUG || t < 64) threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = tile[t];
}

template <bool BUG>
[[kernel]] void barrier_after_a_return(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                       uint i [[thread_position_in_grid]],
                                       uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  if (BUG && t >= 96) return;
  tile[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = tile[t];
}

template <bool BUG>
[[kernel]] void barriers_at_two_places(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                       uint i [[thread_position_in_grid]],
                                       uint t [[thread_index_in_threadgroup]]) {
  if (BUG && t < 64) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  y[i] = x[i];
}

template <bool BUG>
[[kernel]] void simd_sum_of_some_lanes(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                       uint i [[thread_position_in_grid]],
                                       uint lane [[thread_index_in_simdgroup]]) {
  float sum = 0.0f;
  if (!BUG || lane < 16) sum = simd_sum(x[i]);
  y[i] = sum;
}

// Lanes beyond the end leave before the others shuffle.
template <bool BUG>
[[kernel]] void shuffle_from_a_lane_that_returned(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                                  uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  if (BUG && lane == 31) return;
  y[i] = simd_shuffle_xor(x[i], 1);
}

template <bool BUG>
[[kernel]] void shuffle_from_a_lane_that_does_not_exist(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                                        uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  y[i] = simd_shuffle(x[i], BUG ? lane + 1 : lane ^ 1);
}

template <bool BUG>
[[kernel]] void matrix_product_in_a_branch(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                           uint i [[thread_position_in_grid]],
                                           uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 a = make_filled_simdgroup_matrix<float, 8, 8>(x[0]), sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  if (!BUG || lane < 8) simdgroup_multiply_accumulate(sum, a, a, sum);
  y[i] = sum.thread_elements()[0];
}

template <bool BUG>
[[kernel]] void simdgroup_load_from_several_places(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                                   uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 matrix;
  simdgroup_load(matrix, x + (BUG ? lane : 0u), 8);
  y[i] = matrix.thread_elements()[0];
}

// ---- memory ----

template <bool BUG>
[[kernel]] void threadgroup_memory_uninitialised(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                                 uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  if (!BUG || t != 7) tile[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = tile[t ^ 1];
}

template <bool BUG>
[[kernel]] void read_behind_a_buffer(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                     uint i [[thread_position_in_grid]]) {
  y[i] = x[BUG ? i + 1 : i];
}

template <bool BUG>
[[kernel]] void read_before_a_buffer(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                     uint i [[thread_position_in_grid]]) {
  y[i] = x[BUG ? int(i) - 1 : int(i)];
}

template <bool BUG>
[[kernel]] void write_behind_a_buffer(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                      uint i [[thread_position_in_grid]]) {
  y[BUG ? i + 1 : i] = x[i];
}

template <bool BUG>
[[kernel]] void read_behind_a_threadgroup_array(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                                uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float first[128];
  threadgroup float second[128];
  first[t] = x[i];
  second[t] = 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup const float* from = first;
  y[i] = from[BUG ? t + 1 : t] + second[t];
}

template <bool BUG>
[[kernel]] void write_behind_a_threadgroup_array(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                                 uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float first[128];
  threadgroup float second[128];
  threadgroup float* to = first;
  second[t] = 0.0f;
  to[BUG ? t + 1 : t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = second[t];
}

template <bool BUG>
[[kernel]] void output_written_by_two_threads(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                              uint i [[thread_position_in_grid]]) {
  y[BUG ? i / 2 : i] = x[i];
}

template <bool BUG>
[[kernel]] void output_written_by_two_threadgroups(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                                   uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  y[BUG ? t : i] = x[i];
}

// ---- undefined behaviour of C++ ----

// Q8_0 blocks lie on even addresses: their bytes are no char4.
template <bool BUG>
[[kernel]] void vector_load_misaligned(device const char* x [[buffer(0)]], device float* y [[buffer(1)]],
                                       uint i [[thread_position_in_grid]]) {
  char4 four;
  if (BUG)
    four = *(device const char4*)(x + 2);
  else
    four = *(device const packed_char4*)(x + 2);
  y[i] = float(four.x);
}

template <bool BUG>
[[kernel]] void local_array_overflow(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                     uint i [[thread_position_in_grid]]) {
  float values[4];
  for (uint j = 0; j < 4; ++j) values[j] = x[j];
  y[i] = values[BUG ? i % 8 : i % 4];
}

template <bool BUG>
[[kernel]] void local_variable_uninitialised(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                             uint i [[thread_position_in_grid]]) {
  float sum;
  if (!BUG) sum = 0.0f;
  y[i] = sum + x[i];
}

template <bool BUG>
[[kernel]] void signed_overflow(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  const int big = 0x40000000 + int(i);
  y[i] = x[i] + float(BUG ? big * 2 : big);
}

template <bool BUG>
[[kernel]] void division_by_zero(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i] = float(1000 / (int(i) + (BUG ? 0 : 1000)));
}

PAIR(threadgroup_barrier_missing)
PAIR(threadgroup_barrier_orders_nothing)
PAIR(barrier_after_the_reads_missing)
PAIR(write_after_a_read)
PAIR(simdgroup_barrier_missing)
PAIR(barrier_of_the_wrong_scope)
PAIR(barrier_before_simdgroup_load_missing)
PAIR(barrier_after_simdgroup_store_missing)
PAIR(barrier_of_the_wrong_memory)
PAIR(barrier_in_a_branch)
PAIR(barrier_after_a_return)
PAIR(barriers_at_two_places)
PAIR(simd_sum_of_some_lanes)
PAIR(shuffle_from_a_lane_that_returned)
PAIR(shuffle_from_a_lane_that_does_not_exist)
PAIR(matrix_product_in_a_branch)
PAIR(simdgroup_load_from_several_places)
PAIR(threadgroup_memory_uninitialised)
PAIR(read_behind_a_buffer)
PAIR(read_before_a_buffer)
PAIR(write_behind_a_buffer)
PAIR(read_behind_a_threadgroup_array)
PAIR(write_behind_a_threadgroup_array)
PAIR(output_written_by_two_threads)
PAIR(output_written_by_two_threadgroups)
PAIR(vector_load_misaligned)
PAIR(local_array_overflow)
PAIR(local_variable_uninitialised)
PAIR(signed_overflow)
PAIR(division_by_zero)
