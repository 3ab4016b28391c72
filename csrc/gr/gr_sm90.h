// The CUDA kernels of the Q8_0 family, torch-free: what gr_sm90.cpp calls. Pointers are device pointers, dense and row-major.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "../common/float_sm90.h"

namespace mori::gr {

using sm90::Float;

struct DownArgs {
  const void* x;  // [ntok, k] of x_type
  Float x_type;
  const uint8_t* w;         // Q8_0 [n, k / 32 * 34]
  const void* norm_weight;  // [k] of norm_type, or null
  Float norm_type;
  float* y;  // [ntok, n]
  int64_t ntok, n, k;
  int64_t hc;  // groups of the norm
  float eps;
  bool copied;  // w or norm_weight come from the launch before, so that they must not be read ahead of it
};

// Pointers start at multiples of 16. Whether a tensor-core kernel serves these arguments; the last one serves all.
bool down_fits_cluster(const DownArgs& args);
cudaError_t launch_down_cluster(const DownArgs& args, cudaStream_t stream);
cudaError_t launch_down_rows(const DownArgs& args, cudaStream_t stream);

// gr_tiles_sm90.cu: slices of at most `units` times 256 along K. `workspace` holds down_tiles_workspace_bytes.
bool down_fits_tiles(const DownArgs& args);
int64_t down_tiles_workspace_bytes(const DownArgs& args, int units);
cudaError_t launch_down_tiles(const DownArgs& args, int units, void* workspace, cudaStream_t stream);

cudaError_t launch_q8_quantize(const void* w, Float type, uint8_t* out, int64_t blocks, cudaStream_t stream);
cudaError_t launch_q8_dequantize(const uint8_t* w, void* out, Float type, int64_t blocks, cudaStream_t stream);

}  // namespace mori::gr
