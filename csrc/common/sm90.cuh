// Thin device wrappers over PTX for sm_90a: asynchronous copies, mbarriers, clusters, tensor-core products. No policy.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace mori::sm90 {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// --- asynchronous copies global -> shared ---

// Copies kBytes (4, 8 or 16); where !valid it writes zeros and reads nothing.
template <int kBytes>
__device__ __forceinline__ void cp_async(uint32_t target, const void* source, bool valid = true) {
  const int read = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(read) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(kBytes), "r"(read) : "memory");
  }
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- mbarriers and clusters ---

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for data that other CTAs of the cluster sent.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Orders no memory (a release would fence the whole GPU) but mbarriers that mbarrier_init_fence has published.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The address of the same shared variable in another CTA of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t local, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  return remote;
}
// Stores 8 or 16 bytes into another CTA; its mbarrier counts them.
__device__ __forceinline__ void st_async(uint32_t remote, float2 value, uint32_t remote_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(remote), "r"(__float_as_uint(value.x)),
               "r"(__float_as_uint(value.y)), "r"(remote_barrier)
               : "memory");
}
__device__ __forceinline__ void st_async(uint32_t remote, float4 value, uint32_t remote_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
               "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)), "r"(__float_as_uint(value.w)),
               "r"(remote_barrier)
               : "memory");
}

// --- programmatic dependent launch ---

__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// --- registers and shared memory ---

// Registers of a thread, for whole warpgroups.
template <int kCount>
__device__ __forceinline__ void registers_increase() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount)); }
template <int kCount>
__device__ __forceinline__ void registers_decrease() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount)); }

__device__ __forceinline__ uint32_t load_shared(uint32_t smem) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(smem));
  return value;
}
__device__ __forceinline__ void store_shared(uint32_t smem, uint32_t value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(value) : "memory"); }

// --- numbers ---

__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpack_half2(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }
__device__ __forceinline__ uint32_t pack_bf162(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpack_bf162(uint32_t pair) { return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)); }

// The two int8 of the low half of `word` as bf16, exact: 128 + the low 7 bits - 128 or 256. The upper half is 0, `upper` is kBf16Upper.
constexpr uint32_t kBf16Upper = 0x43434343;
__device__ __forceinline__ uint32_t int8_pair_to_bf162(uint32_t word, uint32_t upper) {
  const uint32_t low = __byte_perm(word & 0x7f7fu, upper, 0x4140), bias = __byte_perm(word & 0x8080u, upper, 0x4140);
  const __nv_bfloat162 value = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&low), *reinterpret_cast<const __nv_bfloat162*>(&bias));
  return *reinterpret_cast<const uint32_t*>(&value);
}

// Two fp16 less 1152: a code with its sign bit turned, in the low byte of 0x6400 (1024, whose ulp is 1), stands for 1152 + code.
__device__ __forceinline__ uint32_t unbias_half2(uint32_t biased) {
  const __half2 value = __hsub2(*reinterpret_cast<const __half2*>(&biased), __half2half2(__ushort_as_half(0x6480)));
  return *reinterpret_cast<const uint32_t*>(&value);
}
// The two int8 of the low half of `word` as fp16, exact. The upper half is 0, `upper` is kHalfUpper.
constexpr uint32_t kHalfUpper = 0x64646464;
__device__ __forceinline__ uint32_t int8_pair_to_half2(uint32_t word, uint32_t upper) { return unbias_half2(__byte_perm(word ^ 0x8080u, upper, 0x4140)); }
// Two of the four int8 of `word`: bytes 0 and 2 (low) or 1 and 3 (high).
__device__ __forceinline__ uint32_t int8_low_to_half2(uint32_t word) { return unbias_half2((word & 0x00ff00ffu) ^ 0x64806480u); }
__device__ __forceinline__ uint32_t int8_high_to_half2(uint32_t word) { return int8_low_to_half2(word >> 8); }

// --- tensor cores ---

// c[16x8] += a[16x16] * b[16x8], fp32 sums; the fragments of one warp.
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c[16x8] = a[16x16] * b[16x8].
__device__ __forceinline__ void mma_m16n8k16_fp16_first(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

}  // namespace mori::sm90
