// Q8_0 quantise and dequantise on Metal (see gr.h for the contract). Types: X (a float type).
// Bound by memory. A block whose d is an fp32 subnormal (far below the least fp16 d) may get codes 0: it reads back as 0 anyway.
#include "../common/common.metal"

constant constexpr long BLOCK = 32, BLOCK_BYTES = 34;
constant constexpr ushort NAN_D = 0x7e00;

// One simdgroup per block, one value per lane.
[[kernel]] void q8_0_quantize(device const X* w [[buffer(0)]], device uchar* out [[buffer(1)]], uint2 thread_position [[thread_position_in_grid]]) {
  const long block = thread_position.y, lane = thread_position.x;
  const float value = float(w[block * BLOCK + lane]);
  const float largest = as_type<float>(simd_max(magnitude_bits(value)));
  const bool finite = isfinite(largest);
  const float d = largest / 127.0f;
  const float reciprocal = 1.0f / d;
  const float inverse = finite && isfinite(reciprocal) ? reciprocal : 0.0f;
  const float doubled = 2.0f * ((finite ? fabs(value) : 0.0f) * inverse);
  const int magnitude = (int(doubled) + 1) / 2;  // half away from zero
  device uchar* bytes = out + block * BLOCK_BYTES;
  bytes[2 + lane] = uchar(value < 0.0f ? -magnitude : magnitude);
  if (lane == 0) *(device ushort*)bytes = finite ? as_type<ushort>(half(d)) : NAN_D;
}

// One value per thread: x is the place in the block, y the block.
[[kernel]] void q8_0_dequantize(device const uchar* w [[buffer(0)]], device X* out [[buffer(1)]], uint2 thread_position [[thread_position_in_grid]]) {
  const long block = thread_position.y, i = thread_position.x;
  device const uchar* bytes = w + block * BLOCK_BYTES;
  out[block * BLOCK + i] = X(float(*(device const half*)bytes) * float(char(bytes[2 + i])));
}
