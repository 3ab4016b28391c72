// What every Metal source here begins with. mori_ops/mps.py puts #include "..." files in place, because torch compiles a source
// as one string, and defines the types and constants that each source's comment names, behind the system's headers.
//
// Arithmetic is IEEE: no reassociation, no contraction; a fused multiply-add is written as fma. The GPU may flush fp32
// subnormals to zero, never fp16 ones.
#include <metal_stdlib>
using namespace metal;

#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)

constant constexpr float LOG2_E = 1.44269504088896340736f;
constant constexpr float LN_2 = 0.693147180559945309417f;

// 2^exponent for a normal result, -126..127.
inline float power_of_two(int exponent) { return as_type<float>(uint(exponent + 127) << 23); }

// The bits of |x|: they order as the magnitudes do, infinity and NaN last.
inline uint magnitude_bits(float x) { return as_type<uint>(x) & 0x7fffffffu; }

inline long least(long a, long b) { return a < b ? a : b; }

inline float sum(float4 v) { return (v.x + v.y) + (v.z + v.w); }

inline float sigmoid(float x) { return 1.0f / (1.0f + exp2(-LOG2_E * x)); }
inline float4 sigmoid(float4 x) { return 1.0f / (1.0f + exp2(-LOG2_E * x)); }
