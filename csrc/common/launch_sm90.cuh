// Launching kernels that may start while the previous one of their stream still runs (programmatic dependent launch).
#pragma once

#include <cuda_runtime.h>

namespace mori::sm90 {

// The kernel calls wait_for_dependencies() before it reads what an earlier kernel may write, and before its first global write;
// a kernel that calls launch_dependents() lets the next one start early. Dynamic shared memory may exceed 48 KB.
// `cluster` CTAs along x form a cluster; 0 where the kernel says so itself, or has none.
template <class... Parameters, class... Arguments>
cudaError_t launch_overlapped_clusters(void (*kernel)(Parameters...), unsigned cluster, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                                       const Arguments&... arguments) {
  if (cluster > 8) {  // more than every GPU is bound to allow
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 0 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}
template <class... Parameters, class... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  return launch_overlapped_clusters(kernel, 0, grid, block, shared_bytes, stream, arguments...);
}

// Multiprocessors of the current device.
inline cudaError_t processors(int* count) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace mori::sm90
