// mxfp8_dequantize on the CPU: out = code * 2^(scale - 127), exact in fp32, then rounded once to the output dtype.
//
// 1x32 and 32x32 blocks differ in the row of scales that a row of codes reads. Bound by memory bandwidth. The fast kernels
// multiply in fp32; a block whose scale may give fp32 subnormals is composed from integers, so that it is right also in a thread
// that flushes subnormals.
#include "mxfp8.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../common/cpu_isa.h"
#include "../common/mx.h"

namespace mori::mxfp8 {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kGrain = 32768;          // least elements for a thread
constexpr uint8_t kFirstNormalScale = 10;  // from here on the smallest nonzero product, 2^-9 * scale, is an fp32 normal

// ---- One row: `blocks` blocks of 32.

template <class T>
using RowKernel = void (*)(const uint8_t* codes, const uint8_t* scales, int64_t blocks, T* out);

void store(uint32_t bits, float* out) { *out = mx::float_of(bits); }
void store(uint32_t bits, Half* out) { *out = static_cast<Half>(mx::float_of(bits)); }
void store(uint32_t bits, BFloat16* out) { out->x = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16); }

template <class T>
void dequantize_block(const uint8_t* codes, uint8_t scale, T* out) {
  for (int64_t i = 0; i < kBlock; ++i) store(mx::dequantized_bits(codes[i], scale), out + i);
}

template <class T>
void dequantize_row_generic(const uint8_t* codes, const uint8_t* scales, int64_t blocks, T* out) {
  for (int64_t b = 0; b < blocks; ++b) dequantize_block(codes + b * kBlock, scales[b], out + b * kBlock);
}

template <class T>
RowKernel<T> row_kernel() {
  return dequantize_row_generic<T>;
}

// ---- Operator.

template <class T>
void dequantize(const DequantizeShape& shape, const uint8_t* codes, const uint8_t* scales, T* out) {
  const RowKernel<T> kernel = row_kernel<T>();
  const int64_t blocks = shape.k / kBlock, rows_per_scale = shape.weight_blocks ? kBlock : 1;
  const int64_t grain = ceil_div(kGrain, shape.k > 0 ? shape.k : 1);
  torch::stable::parallel_for(0, shape.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernel(codes + row * shape.k, scales + row / rows_per_scale * blocks, blocks, out + row * shape.k);
  });
}

void run(const DequantizeShape& shape, const Tensor& codes_any, const Tensor& scale_any, const Tensor& out) {
  const Tensor codes_tensor = dense(codes_any), scale_tensor = dense(scale_any);
  const uint8_t* codes = static_cast<const uint8_t*>(codes_tensor.const_data_ptr());
  const uint8_t* scales = static_cast<const uint8_t*>(scale_tensor.const_data_ptr());
  void* data = out.mutable_data_ptr();
  switch (out.scalar_type()) {
    case ScalarType::BFloat16: return dequantize(shape, codes, scales, static_cast<BFloat16*>(data));
    case ScalarType::Half: return dequantize(shape, codes, scales, static_cast<Half*>(data));
    default: return dequantize(shape, codes, scales, static_cast<float*>(data));
  }
}

Tensor mxfp8_dequantize(const Tensor& codes, const Tensor& scale, std::optional<ScalarType> out_dtype) {
  const DequantizeShape shape = check_dequantize(codes, scale);
  const ScalarType dtype = check_out_dtype("mxfp8_dequantize", out_dtype, ScalarType::BFloat16);
  Tensor out = torch::stable::new_empty(codes, sizes_of(codes), dtype);
  run(shape, codes, scale, out);
  return out;
}

void mxfp8_dequantize_out(const Tensor& codes, const Tensor& scale, Tensor& out) {
  const DequantizeShape shape = check_dequantize(codes, scale);
  check_out("mxfp8_dequantize", "out", out, sizes_of(codes), {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float}, {&codes, &scale});
  run(shape, codes, scale, out);
}

}  // namespace
}  // namespace mori::mxfp8

STABLE_TORCH_LIBRARY_IMPL(mori, CPU, m) {
  m.impl("mxfp8_dequantize", TORCH_BOX(&mori::mxfp8::mxfp8_dequantize));
  m.impl("mxfp8_dequantize.out", TORCH_BOX(&mori::mxfp8::mxfp8_dequantize_out));
}
