// Two devices pass data through shared memory: a producer stores and raises a flag, a consumer waits for the flag and reads.
// Each macro removes one thing that makes it right.
#define __global__ __attribute__((global))
typedef unsigned u32;
typedef u32 u32x4 __attribute__((ext_vector_type(4)));

#ifdef NO_RELEASE
#define RELEASE()
#else
#define RELEASE() __builtin_amdgcn_fence(__ATOMIC_RELEASE, "")
#endif
#ifdef NO_ACQUIRE
#define ACQUIRE()
#else
#define ACQUIRE() __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "")
#endif
#ifdef AGENT_SCOPE
#define SCOPE __HIP_MEMORY_SCOPE_AGENT
#else
#define SCOPE __HIP_MEMORY_SCOPE_SYSTEM
#endif

extern "C" __global__
    __attribute__((amdgpu_flat_work_group_size(128, 128))) void producer(u32x4* window, const u32x4* data, u32* flag, u32 round) {
  const int t = __builtin_amdgcn_workitem_id_x();
  window[t] = data[t];
  RELEASE();
#ifndef NO_BARRIER
  __builtin_amdgcn_s_barrier();
#endif
  if (t == 0) __hip_atomic_store(flag, round, __ATOMIC_RELAXED, SCOPE);
}

extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(128, 128))) void consumer(u32x4* out, const u32x4* window,
                                                                                           u32* flag, u32 round) {
  const int t = __builtin_amdgcn_workitem_id_x();
  out[t] = window[t];  // an early look: leaves old lines in the caches
  if (t == 0)
    while (__hip_atomic_load(flag, __ATOMIC_RELAXED, SCOPE) != round) __builtin_amdgcn_s_sleep(1);
#ifndef NO_BARRIER
  __builtin_amdgcn_s_barrier();
#endif
  ACQUIRE();
  out[t] = window[t];
}

// Workgroups of one device add to a counter; the last one to arrive sums what all of them stored.
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(64, 64))) void last_arrival(u32* partial, u32* counter, u32* sum,
                                                                                             u32 groups) {
  const int t = __builtin_amdgcn_workitem_id_x();
  const u32 g = __builtin_amdgcn_workgroup_id_x();
  partial[g * 64 + t] = g * 1000 + t;
  u32 old = 0;
  if (t == 0) old = __hip_atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
  old = __builtin_amdgcn_readfirstlane(old);
  if (old + 1 != groups) return;
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  u32 total = 0;
  for (u32 i = 0; i < groups; ++i) total += partial[i * 64 + t];
  sum[t] = total;
}

// Ranks in a ring: each passes on what it last received and adds it up; in the end everyone has the sum of all.
// next: the next rank's window, [ranks - 1][64] vectors, and its flags.
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(64, 64))) void ring(const u32* mine, u32* window, u32* flags,
                                                                                     u32* next_window, u32* next_flags, u32* sum,
                                                                                     u32 ranks) {
  const int t = __builtin_amdgcn_workitem_id_x();
  u32 vector = mine[t], total = vector;
  for (u32 hop = 0; hop + 1 < ranks; ++hop) {
    next_window[hop * 64 + t] = vector;
    RELEASE();
    if (t == 0) {
      __hip_atomic_store(next_flags + hop, 1u, __ATOMIC_RELAXED, SCOPE);
      while (__hip_atomic_load(flags + hop, __ATOMIC_RELAXED, SCOPE) != 1u) __builtin_amdgcn_s_sleep(1);
    }
    ACQUIRE();
    vector = window[hop * 64 + t];
    total += vector;
  }
  sum[t] = total;
}

// Every lane adds its number to one of four counters by compare and swap.
extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(64, 64))) void compare_and_swap(u32* counters) {
  const u32 t = __builtin_amdgcn_workitem_id_x();
  u32* counter = counters + t % 4;
  u32 old = __hip_atomic_load(counter, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  while (
      !__hip_atomic_compare_exchange_strong(counter, &old, old + t, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)) {
  }
}
