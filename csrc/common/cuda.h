// Host side of the CUDA backend over the stable ABI: the tensor's device and its current stream, launch errors.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "check.h"
#include "float_sm90.h"

// Weak: a library with CUDA kernels must also load beside a CPU-only torch, whose libtorch lacks this symbol.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace mori::cuda {

// Makes the tensor's device current for a launch and holds its current stream.
class Launch {
 public:
  explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    MORI_CHECK(&aoti_torch_get_current_cuda_stream != nullptr, "mori_ops: this PyTorch has no CUDA support");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

inline sm90::Float float_type(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return sm90::Float::f32;
    case ScalarType::BFloat16: return sm90::Float::bf16;
    default: return sm90::Float::f16;
  }
}

inline void check_launch(const char* op, cudaError_t error) {
  if (error != cudaSuccess) fail<std::runtime_error>(op, ": CUDA launch failed: ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

}  // namespace mori::cuda
