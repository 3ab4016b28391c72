// MXFP8 quantisation on the CPU for other CPU kernels.
#pragma once

#include "mxfp8.h"

namespace mori::mxfp8 {

// x [rows, K] (any leading dimensions) fp32, bf16 or fp16, contiguous, K a multiple of 32 -> e4m3 codes [rows, K] and e8m0
// bytes [rows, K/32]. Multi-threaded; the bits that mxfp8_quantize returns.
void quantize_rows_cpu(const Tensor& x, Rounding rounding, uint8_t* codes, uint8_t* scales);

}  // namespace mori::mxfp8
