// The CUDA GEMM for other families: gemm_ar runs it on rows of its operands, into memory of other devices.
#pragma once

#include "mxfp8.h"
#include "mxfp8_sm90.h"

namespace mori::mxfp8 {

// C = A B^T for any quant; `like` is a tensor of the device, for workspace. args.packed is set here.
void launch_scaled(GemmArgs args, Quant quant, const Tensor& like, cudaStream_t stream);

// The same for two ranks, in one launch.
bool pair_fits(const GemmArgs& args, Quant quant);
void launch_pair(GemmArgs args, Quant quant, const Pair& pair, const Tensor& like, cudaStream_t stream);

}  // namespace mori::mxfp8
