// Flags in memory that several devices share: stored with release and loaded with acquire at system scope; waits that end.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "failure_sm90.h"

namespace mori::sm90 {

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory"); }
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// Counts to `all`; true for whoever completes it, who sees what the others did before they counted.
__device__ __forceinline__ bool count_to(uint32_t* counter, uint32_t all) {
  __threadfence_system();
  if (atomicAdd(counter, 1) != all - 1) return false;
  *counter = 0;
  __threadfence_system();
  return true;
}

// Waits for flags to reach `epoch`, each time for `timeout_ns` at most; once one wait has failed, all do, at once.
struct Waiter {
  uint32_t* failed;
  Failure* failure;
  uint32_t epoch;
  uint64_t timeout_ns;

  __device__ __forceinline__ bool operator()(const uint32_t* flag, int of, Signal signal) const {
    uint64_t start = 0;
    for (uint32_t turn = 1; static_cast<int32_t>(load_acquire(flag) - epoch) < 0; ++turn) {
      if (turn % 16 != 0) continue;
      if (*reinterpret_cast<volatile uint32_t*>(failed) != 0) return false;
      if (start == 0) start = nanoseconds();
      if (nanoseconds() - start <= timeout_ns) continue;
      if (atomicExch(failed, 1) == 0) {
        failure->signal = static_cast<uint32_t>(signal);
        failure->epoch = epoch;
        __threadfence_system();
        *reinterpret_cast<volatile uint32_t*>(&failure->rank_plus_one) = of + 1;
      }
      return false;
    }
    return true;
  }
};

}  // namespace mori::sm90
