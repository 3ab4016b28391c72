// Signals between devices, and between the workgroups of one. Data goes by plain stores and loads; a flag orders them:
//
//   set      all waves: stores done | barrier | one wave: release at system scope (writes back the L2) | store of the flag
//   wait     one wave polls | barrier | all waves: acquire at system scope (drops what the caches hold)
#pragma once

#include "../common/gfx950.h"
#include "gemm_ar_gfx950.h"

namespace mori::gemm_ar {

MORI_DEVICE uint32_t load_flag(const uint32_t* flag) { return __hip_atomic_load(flag, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
MORI_DEVICE void set_flag(uint32_t* flag, uint32_t value) { __hip_atomic_store(flag, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM); }
MORI_DEVICE void acquire() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, ""); }

// What the waves of this workgroup have stored is visible to the first of them, which alone goes on with true.
MORI_DEVICE bool stores_done_in_first_wave() {
  gfx950::wait<0, 0>();
  gfx950::barrier();
  return gfx950::wave_id() == 0;
}

// For one lane, after that: counts something done; true if it was the last of `all`, which sees what the others did.
MORI_DEVICE bool count(uint32_t* counter, uint32_t all) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  if (__hip_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) != all - 1) return false;
  __hip_atomic_store(counter, 0u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  acquire();
  return true;
}

}  // namespace mori::gemm_ar
