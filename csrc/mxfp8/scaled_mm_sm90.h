// ptpc and blockscale through torch's own fp8 GEMM (aten::_scaled_mm: cuBLASLt and CUTLASS), for bf16 results.
//
// Its tensor cores add the products of 128 along K with about 13 bits and these sums in fp32: 2.2e-4 of relative L2 error before
// the rounding to bf16, whose own is 1.7e-3. float32 and float16 results take the exact kernel of mxfp8_simple_sm90.cu.
#pragma once

#include "../common/check.h"
#include "mxfp8.h"
#include "mxfp8_sm90.h"

namespace mori::mxfp8 {

constexpr int64_t kScaledMmColumns = 16;  // N is a multiple of it

bool scaled_mm_fits(const GemmArgs& args);
void run_scaled_mm(const GemmArgs& args, Quant quant, const Tensor& like, cudaStream_t stream);  // on the current stream, `stream`

}  // namespace mori::mxfp8
