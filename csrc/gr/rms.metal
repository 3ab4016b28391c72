// The root mean square of a group of x (of type X), by one simdgroup.
#include "../common/common.metal"

// 1 / sqrt(mean(x^2) + eps) over `size` values by one simdgroup; `scale` keeps the squares inside fp32.
inline float inverse_rms(device const X* x, long size, float eps, float scale, ushort lane) {
  float squares = 0.0f;
  for (long i = lane; i < size; i += 32) {
    const float value = float(x[i]) * scale;
    squares = fma(value, value, squares);
  }
  return scale / sqrt(simd_sum(squares) / float(size) + eps * scale * scale);
}

// The scale for a group whose mean square plus eps, in plain fp32, is `mean`: 1 where that is far from overflow and underflow.
inline float rms_scale(float mean) {
  if (mean >= power_of_two(-80) && mean <= power_of_two(120)) return 1.0f;
  return power_of_two(mean > 1.0f ? -64 : 64);
}
