// The wgmma forms of attention: fp16 with A in registers, and int8 with both operands in shared memory; B's columns are query rows.
#pragma once

#include "../common/wgmma_sm90.cuh"

namespace mori::qsa {

// Descriptor of a K-major tile of 128-byte rows with the 128-byte swizzle, at a 1024-byte aligned address. +2 is 32 bytes of K.
__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t smem) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// Descriptor of 8 x 8 core matrices of 16-bit values (8 rows of 16 bytes, dense) without swizzle; the bytes between neighbours along
// K (lead) and along N (stride).
__device__ __forceinline__ uint64_t core_descriptor(uint32_t smem, uint32_t lead, uint32_t stride) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | static_cast<uint64_t>(lead >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32;
}

#define MORI_D8(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define MORI_D24(d) MORI_D8("+f", d, 0), MORI_D8("+f", d, 8), MORI_D8("+f", d, 16)
#define MORI_R24 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"

// d[64 x N] += a[64 x 16] b[16 x N] in fp16, b with N contiguous: N = 2 * (floats of d).
__device__ __forceinline__ void wgmma_fp16_mn(float (&d)[8], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1, 1;"
               : MORI_D8("+f", d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_fp16_mn(float (&d)[24], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {" MORI_R24 "}, {%24, %25, %26, %27}, %28, 1, 1, 1, 1;"
               : MORI_D24(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same with K contiguous in b. `accumulate` false overwrites d.
__device__ __forceinline__ void wgmma_fp16(float (&d)[24], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\nwgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {" MORI_R24 "}, "
               "{%24, %25, %26, %27}, %28, p, 1, 1, 0;\n}\n"
               : MORI_D24(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}
// d[64 x 32] += a[64 x 32] b[32 x 32] in int8, exact, both with K contiguous. `accumulate` false overwrites d.
__device__ __forceinline__ void wgmma_s8(int (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p;\n}\n"
               : MORI_D8("+r", d, 0), MORI_D8("+r", d, 8)
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

#undef MORI_D8
#undef MORI_D24
#undef MORI_R24

}  // namespace mori::qsa
