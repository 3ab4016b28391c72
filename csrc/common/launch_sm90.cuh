// Launching kernels that may start while the previous one of their stream still runs (programmatic dependent launch).
#pragma once

#include <cuda_runtime.h>

namespace mori::sm90 {

// The kernel calls wait_for_dependencies() before it reads what an earlier kernel may write, and before its first global write;
// a kernel that calls launch_dependents() lets the next one start early. Dynamic shared memory may exceed 48 KB.
template <class... Parameters, class... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace mori::sm90
