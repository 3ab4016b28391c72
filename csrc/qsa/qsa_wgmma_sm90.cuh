// The wgmma forms of attention: fp16 with A in registers, and int8 with both operands in shared memory; B's columns are query rows.
#pragma once

#include "../common/wgmma_sm90.cuh"

namespace mori::qsa {

// Descriptor of a K-major tile of 128-byte rows with the 128-byte swizzle, at a 1024-byte aligned address. +2 is 32 bytes of K.
__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t smem) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// The low word of the same for a tile whose rows of 128 bytes run along N: `lead` bytes between neighbouring blocks of 64 columns. +128 is
// 16 of K. The high word is kDescriptorHigh.
__device__ __forceinline__ uint32_t swizzled_mn_descriptor_low(uint32_t smem, uint32_t lead) { return (smem & 0x3ffff) >> 4 | lead >> 4 << 16; }
// Descriptor of 8 x 8 core matrices of 16-bit values (8 rows of 16 bytes, dense) without swizzle; the bytes between neighbours along
// K (lead) and along N (stride).
__device__ __forceinline__ uint64_t core_descriptor(uint32_t smem, uint32_t lead, uint32_t stride) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | static_cast<uint64_t>(lead >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32;
}

#define MORI_D8(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define MORI_D32(d, i) MORI_D8("+f", d, i), MORI_D8("+f", d, i + 8), MORI_D8("+f", d, i + 16), MORI_D8("+f", d, i + 24)
#define MORI_R32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MORI_R64 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MORI_R96 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MORI_R128 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d[64 x N] += a[64 x 16] b[16 x N] in fp16, b with N contiguous: N = 2 * (floats of d).
__device__ __forceinline__ void wgmma_fp16_mn(float (&d)[8], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1, 1;"
               : MORI_D8("+f", d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// Descriptors by their low words: the other one is a constant, so that they take half of the registers.
__device__ __forceinline__ void wgmma_fp16_mn(float (&d)[128], const uint32_t (&a)[4], uint32_t b_low) {
  asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%132, %133};\n"
               "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" MORI_R32 ", " MORI_R64 ", " MORI_R96 ", " MORI_R128 "}, "
               "{%128, %129, %130, %131}, b, 1, 1, 1, 1;\n}\n"
               : MORI_D32(d, 0), MORI_D32(d, 32), MORI_D32(d, 64), MORI_D32(d, 96)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "n"(sm90::kDescriptorHigh));
}
// d[64 x 64] += a[64 x 16] b[16 x 64] in fp16, both in shared memory with K contiguous. `accumulate` false overwrites d.
__device__ __forceinline__ void wgmma_fp16_shared(float (&d)[32], uint32_t a_low, uint32_t b_low, bool accumulate) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {%32, %35};\nmov.b64 b, {%33, %35};\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" MORI_R32 "}, a, b, p, 1, 1, 0, 0;\n}\n"
               : MORI_D32(d, 0)
               : "r"(a_low), "r"(b_low), "r"(static_cast<int>(accumulate)), "n"(sm90::kDescriptorHigh));
}
// d[64 x N] += a[64 x 32] b[32 x N] in int8, exact, both with K contiguous: N = 2 * (ints of d). `accumulate` false overwrites d.
__device__ __forceinline__ void wgmma_s8(int (&d)[12], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %14, 0;\nwgmma.mma_async.sync.aligned.m64n24k32.s32.s8.s8 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, %12, %13, p;\n}\n"
               : MORI_D8("+r", d, 0), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11])
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
__device__ __forceinline__ void wgmma_s8(int (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p;\n}\n"
               : MORI_D8("+r", d, 0), MORI_D8("+r", d, 8)
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

#undef MORI_D8
#undef MORI_D32
#undef MORI_R32
#undef MORI_R64
#undef MORI_R96
#undef MORI_R128

}  // namespace mori::qsa
