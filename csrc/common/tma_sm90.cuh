// The bulk tensor copy engine (TMA): device copies, host tensor maps of dense row-major matrices.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_runtime.h>

namespace mori::sm90 {

// --- device ---

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nmori_wait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra mori_done;\nbra mori_wait;\nmori_done:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
__device__ __forceinline__ void tma_load(uint32_t target, const CUtensorMap* map, uint32_t barrier, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(target), "l"(map),
               "r"(barrier), "r"(column), "r"(row)
               : "memory");
}
// Consecutive bytes; both addresses and the count are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target), "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(source), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// The staged bytes have been read (may be overwritten), or the stores have landed.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Ordinary stores to shared memory, visible to the copy engine after the next barrier.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What this thread has acquired by ordinary loads, visible to the copy engine.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ void store_matrix_transposed(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}

// --- host ---

// A tile of box_rows x box_columns of a row-major [rows, columns] matrix; elements outside read as zero and are not written.
inline bool make_tensor_map(CUtensorMap* map, const void* base, CUtensorMapDataType type, int element_bytes, int64_t rows, int64_t columns, int box_rows,
                            int box_columns, CUtensorMapSwizzle swizzle) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const bool ok = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found) == cudaSuccess;
    return reinterpret_cast<Encode>(ok && found == cudaDriverEntryPointSuccess ? entry : nullptr);
  }();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(columns) * element_bytes};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}, step[2] = {1, 1};
  return encode(map, type, 2, const_cast<void*>(base), sizes, row_bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace mori::sm90
