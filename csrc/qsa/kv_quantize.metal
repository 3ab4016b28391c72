// kv_quantize on Metal (see qsa.h for the contract): per 64 values scale = fp16(max|x| / 127), code = clamp(rint(x / scale), -127,
// 127), a simdgroup per group of 64, two values per lane. Types: X (a float type). Bound by memory.
// A scale that is 0 or not finite gives codes 0; in the second case the group reads back as NaN.
#include "../common/common.metal"

constant constexpr long GROUP = 64;

[[kernel]] void kv_quantize(device const X* x [[buffer(0)]], device char* codes [[buffer(1)]], device half* scales [[buffer(2)]],
                            uint2 thread_position [[thread_position_in_grid]]) {
  const long group = thread_position.y, lane = thread_position.x;
  float values[2];
  for (int i = 0; i < 2; ++i) values[i] = float(x[group * GROUP + lane + 32 * i]);
  const uint largest = simd_max(max(magnitude_bits(values[0]), magnitude_bits(values[1])));
  const half scale = half(as_type<float>(largest) / 127.0f);
  const float step = float(scale);
  const bool divides = step > 0.0f && isfinite(step);
  for (int i = 0; i < 2; ++i) {
    codes[group * GROUP + lane + 32 * i] = divides ? char(clamp(rint(values[i] / step), -127.0f, 127.0f)) : char(0);
  }
  if (lane == 0) scales[group] = scale;
}
