// The HIP GEMM for other families: gemm_ar runs it into its own memory, or has its kernels deliver to others'.
#pragma once

#include "../common/hip.h"
#include "mxfp8.h"
#include "mxfp8_gfx950.h"

namespace mori::mxfp8 {

// Which kernel multiplies, and the scales as it takes them: packed scales live as long as this.
struct Plan {
  GemmArgs args;
  Scales scales;
  Form form;
  std::vector<Tensor> packed;
};
// `like` is a tensor of the device. `skinny`: whether that form may be chosen.
Plan plan_gemm(const GemmArgs& args, Quant quant, bool skinny, const Tensor& like, const hip::Launch& launch);
hipError_t launch_plan(const Plan& plan, hipStream_t stream);

}  // namespace mori::mxfp8
