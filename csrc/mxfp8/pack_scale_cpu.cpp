// mxfp8_pack_a_scale and mxfp8_pack_b_scale on the CPU: raw scale bytes -> the packed int32 layouts of mxfp8.h.
#include <algorithm>

#include "../common/mx.h"
#include "mxfp8_cpu.h"

namespace mori::mxfp8 {
namespace {

constexpr uint8_t kPadding = 127;       // 2^0, for the rows that fill up the last group of 64
constexpr int64_t kGrainBytes = 32768;  // least scales for a thread

const uint8_t* scale_bytes(const Tensor& t) { return static_cast<const uint8_t*>(t.const_data_ptr()); }

}  // namespace

// A group of 64 rows is 16 dwords per K block; byte i of dword d is row 16 * i + d.
void Cpu::pack_a(const PackShape& shape, const Tensor& scale_any, const Tensor& out) {
  const Tensor scale = dense(scale_any);
  const uint8_t* source = scale_bytes(scale);
  uint8_t* packed = static_cast<uint8_t*>(out.mutable_data_ptr());
  const int64_t groups = ceil_div(shape.rows, kPackRows);
  torch::stable::parallel_for(0, groups, ceil_div(kGrainBytes, kPackRows * std::max<int64_t>(shape.blocks, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group)
      for (int64_t j = 0; j < shape.blocks; ++j) {
        uint8_t* to = packed + (j * groups + group) * kPackRows;
        for (int64_t r = 0; r < kPackRows; ++r) {
          const int64_t row = group * kPackRows + r;
          to[r % 16 * 4 + r / 16] = row < shape.rows ? source[row * shape.blocks + j] : kPadding;
        }
      }
  });
}

void Cpu::pack_b(const PackShape& shape, const Tensor& scale_any, const Tensor& out) {
  const Tensor scale = dense(scale_any);
  const uint8_t* source = scale_bytes(scale);
  int32_t* packed = static_cast<int32_t*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, shape.blocks, ceil_div(kGrainBytes, std::max<int64_t>(shape.rows, 1)), [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j)
      for (int64_t nb = 0; nb < shape.rows; ++nb) packed[j * shape.rows + nb] = source[nb * shape.blocks + j];
  });
}

}  // namespace mori::mxfp8
