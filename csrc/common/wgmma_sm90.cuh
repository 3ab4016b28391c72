// wgmma for sm_90a: D[64 x N] += A[64 x 16] B[N x 16]^T, bf16 or fp16 operands, fp32 sums; A in registers, B in shared memory (K-major).
#pragma once

#include <cstdint>

namespace mori::sm90 {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Descriptor of a K-major tile of 128-byte rows with the 128-byte swizzle, at a 1024-byte aligned address: its low word (the
// high one is a constant). +2 is 32 bytes of K.
__device__ __forceinline__ uint32_t wgmma_descriptor_low(uint32_t smem) { return (smem & 0x3ffff) >> 4 | 1u << 16; }
constexpr uint32_t kDescriptorHigh = 64u | 1u << 30;

// The sums are the asm's first operands; behind them stand the fragments (a0..a3), the descriptor (b), the predicate (p) and the
// descriptor's high word. MORI_R: operands' names, MORI_D: operands, by the first sum and how many.
#define MORI_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MORI_D16(i) MORI_D8(i), MORI_D8(i + 8)
#define MORI_D32(i) MORI_D16(i), MORI_D16(i + 16)
#define MORI_D64(i) MORI_D32(i), MORI_D32(i + 32)
#define MORI_R0 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MORI_R32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MORI_R48 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MORI_R64 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87"
#define MORI_R88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define MORI_R96 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define MORI_R112 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MORI_WGMMA(tokens, registers, a0, a1, a2, a3, b, p, high, ...)                                                                  \
  __device__ __forceinline__ void wgmma_bf16(float (&d)[tokens / 2], const uint32_t* a, uint32_t b_low, bool accumulate) {               \
    asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nmov.b64 b, {" b ", " high "};\nsetp.ne.b32 p, " p ", 0;\n"                             \
                 "wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32.bf16.bf16 {" registers "}, {" a0 ", " a1 ", " a2 ", " a3 "}, "     \
                 "b, p, 1, 1, 0;\n}\n"                                                                                                   \
                 : __VA_ARGS__                                                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(static_cast<int>(accumulate)), "n"(kDescriptorHigh));    \
  }

// tokens = 2 * (floats of d). `accumulate` false overwrites d.
MORI_WGMMA(64, MORI_R0, "%32", "%33", "%34", "%35", "%36", "%37", "%38",
           MORI_D32(0))
MORI_WGMMA(96, MORI_R0 ", " MORI_R32, "%48", "%49", "%50", "%51", "%52", "%53", "%54",
           MORI_D32(0), MORI_D16(32))
MORI_WGMMA(128, MORI_R0 ", " MORI_R32 ", " MORI_R48, "%64", "%65", "%66", "%67", "%68", "%69", "%70",
           MORI_D64(0))
MORI_WGMMA(176, MORI_R0 ", " MORI_R32 ", " MORI_R48 ", " MORI_R64, "%88", "%89", "%90", "%91", "%92", "%93", "%94",
           MORI_D64(0), MORI_D16(64), MORI_D8(80))
MORI_WGMMA(192, MORI_R0 ", " MORI_R32 ", " MORI_R48 ", " MORI_R64 ", " MORI_R88, "%96", "%97", "%98", "%99", "%100", "%101", "%102",
           MORI_D64(0), MORI_D32(64))
MORI_WGMMA(224, MORI_R0 ", " MORI_R32 ", " MORI_R48 ", " MORI_R64 ", " MORI_R88 ", " MORI_R96, "%112", "%113", "%114", "%115", "%116", "%117", "%118",
           MORI_D64(0), MORI_D32(64), MORI_D16(96))
MORI_WGMMA(256, MORI_R0 ", " MORI_R32 ", " MORI_R48 ", " MORI_R64 ", " MORI_R88 ", " MORI_R96 ", " MORI_R112, "%128", "%129", "%130", "%131", "%132", "%133", "%134",
           MORI_D64(0), MORI_D64(64))

#undef MORI_WGMMA

__device__ __forceinline__ void wgmma_fp16(float (&d)[32], const uint32_t* a, uint32_t b, bool accumulate) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nmov.b64 b, {%36, %38};\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" MORI_R0 "}, "
               "{%32, %33, %34, %35}, b, p, 1, 1, 0;\n}\n"
               : MORI_D32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(accumulate)), "n"(kDescriptorHigh));
}

#undef MORI_D8
#undef MORI_D16
#undef MORI_D32
#undef MORI_D64
#undef MORI_R0
#undef MORI_R32
#undef MORI_R48
#undef MORI_R64
#undef MORI_R88
#undef MORI_R96
#undef MORI_R112

}  // namespace mori::sm90
