// Which instruction set the CPU kernels use, chosen at run time. MORI_CPU_ISA=generic|avx2 overrides it (tests run both).
#pragma once

#include <cstdlib>
#include <cstring>

#include "check.h"

#if defined(__x86_64__) || defined(_M_X64)
#define MORI_X86 1
#include <immintrin.h>
// On every function that uses these intrinsics. A lambda does not inherit it: keep lambdas out of such functions.
#define MORI_AVX2 __attribute__((target("avx2,fma,f16c")))
#define MORI_AVX2_INLINE __attribute__((target("avx2,fma,f16c"), always_inline)) inline
#else
#define MORI_X86 0
#endif

namespace mori {

enum class CpuIsa { generic, avx2 };

inline CpuIsa cpu_isa() {
#if MORI_X86
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  constexpr bool has_avx2 = false;
#endif
  // Read at each call: a variable looked up once would make the portable kernels untestable in one process.
  const char* wanted = std::getenv("MORI_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return has_avx2 ? CpuIsa::avx2 : CpuIsa::generic;
  if (std::strcmp(wanted, "generic") == 0) return CpuIsa::generic;
  MORI_CHECK(std::strcmp(wanted, "avx2") == 0, "MORI_CPU_ISA must be 'generic' or 'avx2', got '", wanted, "'");
  MORI_CHECK(has_avx2, "MORI_CPU_ISA=avx2, but this processor lacks AVX2, FMA or F16C");
  return CpuIsa::avx2;
}

}  // namespace mori
