// Q8_0 quantise and dequantise on the CPU (see gr.h for the contract), one row per step, bound by memory.
#include <torch/headeronly/util/BFloat16.h>

#include "gr_cpu.h"

namespace mori::gr {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kGrain = 16384;  // values per task below which a second thread costs more than it saves

int64_t rows_per_task(int64_t k) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, k)); }

template <class In>
void quantize_rows(const Tensor& w, uint8_t* out, const Q8Shape& shape) {
  const In* in = static_cast<const In*>(w.const_data_ptr());
  torch::stable::parallel_for(0, shape.n, rows_per_task(shape.k), [&](int64_t begin, int64_t end) {
    float values[kBlock];
    for (int64_t b = begin * (shape.k / kBlock); b < end * (shape.k / kBlock); ++b) {
      for (int64_t i = 0; i < kBlock; ++i) values[i] = static_cast<float>(in[b * kBlock + i]);
      q8_0::quantize_block(values, out + b * kBlockBytes);
    }
  });
}

template <class Out>
void dequantize_rows(const uint8_t* in, const Tensor& w, const Q8Shape& shape) {
  Out* out = static_cast<Out*>(w.mutable_data_ptr());
  torch::stable::parallel_for(0, shape.n, rows_per_task(shape.k), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin * (shape.k / kBlock); b < end * (shape.k / kBlock); ++b) {
      const uint8_t* block = in + b * kBlockBytes;
      const float d = q8_0::block_scale(block);
      for (int64_t i = 0; i < kBlock; ++i) out[b * kBlock + i] = static_cast<Out>(d * q8_0::block_code(block, i));
    }
  });
}

}  // namespace

void Cpu::quantize(const Tensor& w, const Tensor& out, const Q8Shape& shape) {
  const Tensor in = dense(w);
  uint8_t* bytes = static_cast<uint8_t*>(out.mutable_data_ptr());
  if (in.scalar_type() == ScalarType::Float) return quantize_rows<float>(in, bytes, shape);
  if (in.scalar_type() == ScalarType::BFloat16) return quantize_rows<BFloat16>(in, bytes, shape);
  quantize_rows<Half>(in, bytes, shape);
}

void Cpu::dequantize(const Tensor& w, const Tensor& out, const Q8Shape& shape) {
  const Tensor in = dense(w);
  const uint8_t* bytes = static_cast<const uint8_t*>(in.const_data_ptr());
  if (out.scalar_type() == ScalarType::Float) return dequantize_rows<float>(bytes, out, shape);
  if (out.scalar_type() == ScalarType::BFloat16) return dequantize_rows<BFloat16>(bytes, out, shape);
  dequantize_rows<Half>(bytes, out, shape);
}

}  // namespace mori::gr
