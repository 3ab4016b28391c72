// Host side of the HIP backend over the stable ABI: the tensor's device and its current stream, launch errors. A ROCm build of
// PyTorch calls its devices "cuda", dispatches to them under the CUDA key and names their streams likewise.
#pragma once

#include <cstring>
#include <vector>

#include <hip/hip_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "check.h"
#include "float_gfx950.h"

// Weak: a library with HIP kernels must also load beside a CPU-only torch, whose libtorch lacks this symbol.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace mori::hip {

// Of every device of the process, whether it has gfx950's scaled MFMA (gfx942 has not). Asked once.
inline const std::vector<bool>& devices() {
  static const std::vector<bool> all = [] {
    int count = 0;
    std::vector<bool> found;
    if (hipGetDeviceCount(&count) != hipSuccess) return found;
    for (int device = 0; device < count; ++device) {
      hipDeviceProp_t properties;
      found.push_back(hipGetDeviceProperties(&properties, device) == hipSuccess && std::strncmp(properties.gcnArchName, "gfx950", 6) == 0);
    }
    return found;
  }();
  return all;
}

inline void check_device() {
  if (devices().empty()) fail<std::runtime_error>("mori_ops: no HIP device (hipGetDeviceCount found none)");
  if (&aoti_torch_get_current_cuda_stream == nullptr) fail<std::runtime_error>("mori_ops: this PyTorch has no ROCm support");
}

// Makes the tensor's device current for a launch and holds its current stream.
class Launch {
 public:
  explicit Launch(const Tensor& tensor) : device_((check_device(), tensor.get_device_index())), guard_(device_) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    stream_ = static_cast<hipStream_t>(stream);
  }
  hipStream_t stream() const { return stream_; }
  bool has_scaled_mfma() const { return devices()[device_]; }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  hipStream_t stream_ = nullptr;
};

inline gfx950::Float float_type(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return gfx950::Float::f32;
    case ScalarType::BFloat16: return gfx950::Float::bf16;
    default: return gfx950::Float::f16;
  }
}

inline void check_launch(const char* op, hipError_t error) {
  if (error != hipSuccess) fail<std::runtime_error>(op, ": HIP launch failed: ", hipGetErrorName(error), ": ", hipGetErrorString(error));
}

}  // namespace mori::hip
