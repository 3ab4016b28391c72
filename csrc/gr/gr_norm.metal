// xn = x / sqrt(mean(x^2) + eps) * norm_weight per group of K / hc values, as fp32, on Metal: what gr_down's fused norm cannot serve.
// Types: X, Norm (float types). One simdgroup per group (x) of a token (y).
#include "rms.metal"

struct Shape {
  long k, hc;
};

[[kernel]] void gr_norm(device const X* x [[buffer(0)]], device const Norm* norm [[buffer(1)]], device float* xn [[buffer(2)]],
                        constant Shape& shape [[buffer(3)]], constant float& eps [[buffer(4)]], uint2 group [[threadgroup_position_in_grid]],
                        ushort lane [[thread_index_in_simdgroup]]) {
  const long size = shape.k / shape.hc, start = group.x * size, at = group.y * shape.k + start;
  const float plain = inverse_rms(x + at, size, eps, 1.0f, lane);
  const float scale = rms_scale(1.0f / (plain * plain));
  const float factor = scale == 1.0f ? plain : inverse_rms(x + at, size, eps, scale, lane);
  for (long i = lane; i < size; i += 32) xn[at + i] = float(x[at + i]) * factor * float(norm[start + i]);
}
