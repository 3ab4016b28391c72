// Thin device wrappers for CDNA (gfx950, and gfx942 where it has the instruction): lanes, buffers, LDS DMA, waits, barriers, MFMA.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include <hip/hip_runtime_api.h>

#define MORI_DEVICE __device__ __attribute__((always_inline)) inline

// What needs gfx950's instructions is compiled for it alone (kernels that use it have no body elsewhere and are not launched
// there); the host pass, which emits none, sees everything.
#if !defined(__HIP_DEVICE_COMPILE__) || defined(__gfx950__)
#define MORI_HAS_GFX950 1
#else
#define MORI_HAS_GFX950 0
#endif

namespace mori::gfx950 {

constexpr int kWave = 64;

using i32x2 = int __attribute__((ext_vector_type(2)));
using i32x4 = int __attribute__((ext_vector_type(4)));
using i32x8 = int __attribute__((ext_vector_type(8)));
using f32x4 = float __attribute__((ext_vector_type(4)));

// f(integral_constant 0) .. f(integral_constant kCount - 1): indices that the compiler may use as instruction fields.
template <class F, int... kIndex>
MORI_DEVICE void unroll(std::integer_sequence<int, kIndex...>, F f) {
  (f(std::integral_constant<int, kIndex>{}), ...);
}
template <int kCount, class F>
MORI_DEVICE void unroll(F f) {
  unroll(std::make_integer_sequence<int, kCount>{}, f);
}

// --- lanes and waves ---

MORI_DEVICE int thread_id() { return __builtin_amdgcn_workitem_id_x(); }
MORI_DEVICE int block_id() { return __builtin_amdgcn_workgroup_id_x(); }
MORI_DEVICE int block_id_y() { return __builtin_amdgcn_workgroup_id_y(); }
MORI_DEVICE int uniform(int value) { return __builtin_amdgcn_readfirstlane(value); }
MORI_DEVICE int wave_id() { return uniform(thread_id() / kWave); }
MORI_DEVICE int lane_id() { return thread_id() % kWave; }

MORI_DEVICE int read_lane(int value, int lane) { return __builtin_amdgcn_ds_bpermute(lane * 4, value); }

// Of each pair of neighbouring groups of 16 lanes: `left` of the odd group changes places with `right` of the even one.
MORI_DEVICE void swap_groups(int& left, int& right) {
#if MORI_HAS_GFX950
  const auto swapped = __builtin_amdgcn_permlane16_swap(left, right, false, false);
  left = static_cast<int>(swapped[0]);
  right = static_cast<int>(swapped[1]);
#endif
}

// --- global memory through a descriptor: a dword outside [0, bytes) reads as zero and is not written ---

using Buffer = __amdgpu_buffer_rsrc_t;

MORI_DEVICE Buffer make_buffer(const void* base, uint32_t bytes) {
  constexpr int kRaw32 = 0x00027000;
  return __builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(base), 0, bytes, kRaw32);
}
// An offset that is out of range of every buffer here, also after a few KiB were added to it.
constexpr int kOutOfRange = static_cast<int>(0x80000000u);

MORI_DEVICE int load_dword(Buffer from, int offset) { return __builtin_amdgcn_raw_buffer_load_b32(from, offset, 0, 0); }
MORI_DEVICE int load_byte(Buffer from, int offset) { return __builtin_amdgcn_raw_buffer_load_b8(from, offset, 0, 0); }
MORI_DEVICE int load_short(Buffer from, int offset) { return __builtin_amdgcn_raw_buffer_load_b16(from, offset, 0, 0); }
MORI_DEVICE i32x2 load_dwordx2(Buffer from, int offset) { return __builtin_amdgcn_raw_buffer_load_b64(from, offset, 0, 0); }
MORI_DEVICE i32x4 load_dwordx4(Buffer from, int offset) { return __builtin_amdgcn_raw_buffer_load_b128(from, offset, 0, 0); }
MORI_DEVICE void store_dwordx4(i32x4 v, Buffer to, int offset) { __builtin_amdgcn_raw_buffer_store_b128(v, to, offset, 0, 0); }
MORI_DEVICE void store_dwordx2(i32x2 v, Buffer to, int offset) { __builtin_amdgcn_raw_buffer_store_b64(v, to, offset, 0, 0); }
MORI_DEVICE void store_dword(int v, Buffer to, int offset) { __builtin_amdgcn_raw_buffer_store_b32(v, to, offset, 0, 0); }
MORI_DEVICE void store_byte(char v, Buffer to, int offset) { __builtin_amdgcn_raw_buffer_store_b8(v, to, offset, 0, 0); }
MORI_DEVICE void store_short(short v, Buffer to, int offset) { __builtin_amdgcn_raw_buffer_store_b16(v, to, offset, 0, 0); }

// --- LDS ---

using Lds = __attribute__((address_space(3))) uint8_t*;

template <class T>
MORI_DEVICE T lds_read(Lds at) {
  return *reinterpret_cast<__attribute__((address_space(3))) const T*>(at);
}

MORI_DEVICE Lds lds_address(void* shared) { return (Lds)shared; }

// DMA of 16 or 4 bytes per lane: lane l's bytes at `offset + uniform_offset` go to `to + l * 16` (or 4); `to` is the same for the
// whole wave. Whether the range check sees uniform_offset is not agreed on: keep `offset` alone out of range where zeros are
// wanted. The instruction's immediate offset is never used: it would move the LDS destination too.
MORI_DEVICE void copy16_to_lds(Buffer from, Lds to, int offset, int uniform_offset) {
#if MORI_HAS_GFX950
  __builtin_amdgcn_raw_ptr_buffer_load_lds(from, to, 16, offset, uniform_offset, 0, 0);
#endif
}
MORI_DEVICE void copy4_to_lds(Buffer from, Lds to, int offset) { __builtin_amdgcn_raw_ptr_buffer_load_lds(from, to, 4, offset, 0, 0, 0); }

// --- waits and barriers: memory accesses of the source stay on their side of them ---

MORI_DEVICE void pin_memory_order() {
  asm volatile("" ::: "memory");
  __builtin_amdgcn_sched_barrier(0);
}

// Keeps the computation of a value on this side of the next barrier: the compiler may move what touches no memory across.
MORI_DEVICE void keep_here(f32x4& value) { asm volatile("" : "+v"(value)); }

// At most kVector loads, stores and copies in flight (of 63), and kLds accesses of the LDS (of 15).
template <int kVector, int kLds>
MORI_DEVICE void wait() {
  static_assert(kVector >= 0 && kVector < 64 && kLds >= 0 && kLds < 16);
  constexpr int kExports = 7;
  pin_memory_order();
  __builtin_amdgcn_s_waitcnt((kVector & 15) | kExports << 4 | kLds << 8 | (kVector >> 4) << 14);
  pin_memory_order();
}
template <int kVector>
MORI_DEVICE void wait_vector() {
  wait<kVector, 15>();
}

MORI_DEVICE void barrier() {
  pin_memory_order();
  __builtin_amdgcn_s_barrier();
  pin_memory_order();
}

// After it every wave's LDS accesses are done: what was read may be overwritten, what was written read. A barrier alone does not
// wait for them.
MORI_DEVICE void read_done_barrier() {
  wait<63, 0>();
  barrier();
}

// --- matrix cores ---

// c += a b, e4m3 16 x 128 by 128 x 16, byte kSelectA of scale_a and kSelectB of scale_b being the e8m0 scales.
// Lane l: row l % 16 of a (column of b), K = 16 g .. 16 g + 15 and 64 + 16 g .. 64 + 16 g + 15 with g = l / 16; its scale is
// that of K = 32 g .. 32 g + 31. c: column l % 16, rows 4 g .. 4 g + 3.
template <int kSelectA, int kSelectB>
MORI_DEVICE f32x4 mfma_scaled(i32x8 a, i32x8 b, f32x4 c, int scale_a, int scale_b) {
#if MORI_HAS_GFX950
  constexpr int kE4m3 = 0;
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, c, kE4m3, kE4m3, kSelectA, scale_a, kSelectB, scale_b);
#else
  return c;
#endif
}

}  // namespace mori::gfx950
