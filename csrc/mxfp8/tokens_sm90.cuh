// The tokens of a GEMM as the tensor cores' operand: bf16 with the scales folded in, in the K order that the weights' fragments want.
//
// Sources: e4m3 codes with 1x32 scales, or floats that are quantised on the way (the codes never reach memory). Bound by memory.
// Tried: idle warps of the GEMM that expand later tiles' tokens meanwhile. They slow the consumers as much as this kernel takes.
//   K order    within each 64: the k16 step s takes word s of each of the four 16-byte runs, low and high code pairs apart
//   K is padded to 128 with zeros. A block that bf16 cannot hold exactly, or that holds a NaN, becomes NaN in this workspace: the
//   GEMM computes every NaN of its result again from the source.
#pragma once

#include <type_traits>

#include "../common/launch_sm90.cuh"
#include "../common/sm90.cuh"
#include "decode_sm90.cuh"
#include "quantize_sm90.cuh"
#include "scales_sm90.cuh"

namespace mori::mxfp8 {

constexpr int kStageK = 64;         // K of one step of the GEMM's pipeline
constexpr int kPadK = 2 * kStageK;  // its main loop takes two stages per turn

__host__ __device__ inline int64_t padded_k(int64_t k) { return (k + kPadK - 1) / kPadK * kPadK; }

// ---- what a thread expands: 4 codes of each of the four 16-byte runs of a group of 64 ----

// They become two 16-byte pieces of the group's 8, from bytes 0 and 2 and from bytes 1 and 3 of the words. A k16 step is two pieces.
struct Step {
  uint32_t word[4];
  uint32_t scale[2];  // of the first and the last two words
};

__device__ __forceinline__ void store_step(uint4* first, uint4* second, const Step& step) {
  constexpr uint32_t kFirst = 10, kLast = 246;  // scales whose every product with a code is a normal bf16
  constexpr uint32_t kUnit = 0x7b807b80;        // 2^120
  uint32_t low[4], high[4];
#pragma unroll
  for (int run = 0; run < 4; ++run) {
    const uint32_t word = step.word[run], scale = step.scale[run / 2], magnitudes = word & 0x7f7f7f7fu;
    const bool nan = scale == mx::kNanScale || ((magnitudes + 0x01010101u) & 0x80808080u) != 0;
    const bool extreme = magnitudes != 0 && scale - kFirst > kLast - kFirst;
    const uint32_t one = nan || extreme ? 0x7fc0u : min(max(scale, kFirst), kLast) << 7;
    const uint32_t factor = one | one << 16;
    low[run] = multiply_bf16x2(multiply_bf16x2(spread_codes(word << 8), kUnit), factor);
    high[run] = multiply_bf16x2(multiply_bf16x2(spread_codes(word), kUnit), factor);
  }
  *first = make_uint4(low[0], low[1], low[2], low[3]);
  *second = make_uint4(high[0], high[1], high[2], high[3]);
}

template <class T>
__device__ __forceinline__ float4 load4(const void* x, int64_t at) {
  alignas(4 * sizeof(T)) T v[4];
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<uint4*>(v) = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(x) + at));
  } else {
    *reinterpret_cast<uint2*>(v) = __ldg(reinterpret_cast<const uint2*>(static_cast<const T*>(x) + at));
  }
  return {sm90::to_float(v[0]), sm90::to_float(v[1]), sm90::to_float(v[2]), sm90::to_float(v[3])};
}

__device__ __forceinline__ uint32_t amax_bits(float4 v) {
  const uint32_t x = __float_as_uint(v.x), y = __float_as_uint(v.y), z = __float_as_uint(v.z), w = __float_as_uint(v.w);
  return max(max(x & mx::kMagnitudeBits, y & mx::kMagnitudeBits), max(z & mx::kMagnitudeBits, w & mx::kMagnitudeBits));
}

// The group of the i-th thread and its place among the group's four.
struct StepAt {
  int64_t m, group;  // token, first column of the group
  int lane;
  __device__ __forceinline__ StepAt(uint32_t i, uint32_t groups) : lane(static_cast<int>(i % 4)) {
    const uint32_t row = i / 4 / groups;
    m = row, group = static_cast<int64_t>(i / 4 - row * groups) * kStageK;
  }
};

// A thread reads one run and trades bytes with the other three: it stores pieces `lane` and `lane` + 4, so that a warp's stores are
// without gaps. Whole warps must come.
__device__ __forceinline__ Step load_step(const GemmArgs& args, const ByteScales& scales, const StepAt& at) {
  const bool inside = at.m < args.m;
  const uint8_t* row = args.a + at.m * args.k;
  const uint4 run = inside && at.group + 16 * at.lane < args.k ? __ldg(reinterpret_cast<const uint4*>(row + at.group) + at.lane) : uint4{};
  const uint32_t words[4] = {run.x, run.y, run.z, run.w};
  Step step;
#pragma unroll
  for (int i = 0; i < 4; ++i) step.word[i] = __byte_perm(words[i / 2], words[i / 2 + 2], i % 2 == 0 ? 0x6240 : 0x7351);  // for thread i
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t got = __shfl_xor_sync(~0u, at.lane & bit ? step.word[i] : step.word[i | bit], bit);
      (at.lane & bit ? step.word[i] : step.word[i | bit]) = got;
    }
  }
#pragma unroll
  for (int block = 0; block < 2; ++block) step.scale[block] = inside && at.group + 32 * block < args.k ? scales.a_byte(at.m, at.group / 32 + block) : 127;
  return step;
}

// A thread encodes word `lane` of each run: a k16 step, pieces 2 `lane` and 2 `lane` + 1. Blocks' amax is shared, so whole warps must come.
template <class T>
__device__ __forceinline__ Step quantize_step(const GemmArgs& args, const StepAt& at) {
  Step step;
  float4 v[4];
#pragma unroll
  for (int run = 0; run < 4; ++run) {
    const int64_t k = at.group + 16 * run;
    v[run] = at.m < args.m && k < args.k ? load4<T>(args.x, at.m * args.k + k + 4 * at.lane) : float4{};
  }
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    step.scale[block] = block_scale(max_of_block(max(amax_bits(v[2 * block]), amax_bits(v[2 * block + 1]))), args.rceil);
#pragma unroll
    for (int run = 2 * block; run < 2 * block + 2; ++run) step.word[run] = encode4(v[run], step.scale[block]);
  }
  return step;
}

constexpr int kExpandThreads = 128;

// A thread expands 16 codes of a token. Source: float type of x, or void for codes. Rows from args.m on become zeros.
template <class Source>
__global__ void __launch_bounds__(kExpandThreads) expand_tokens(const GemmArgs args, const ByteScales scales, int64_t rows, uint4* __restrict__ out) {
  sm90::wait_for_dependencies();
  sm90::launch_dependents();  // only now: the GEMM reads weights before it waits for this kernel
  const uint32_t i = blockIdx.x * kExpandThreads + threadIdx.x, groups = static_cast<uint32_t>(padded_k(args.k) / kStageK);
  const StepAt at(i, groups);
  uint4* group = out + static_cast<int64_t>(i / 4) * 8;
  if constexpr (std::is_void_v<Source>) {
    const Step step = load_step(args, scales, at);
    if (at.m < rows) store_step(group + at.lane, group + at.lane + 4, step);
  } else {
    const Step step = quantize_step<Source>(args, at);
    if (at.m < rows) store_step(group + 2 * at.lane, group + 2 * at.lane + 1, step);
  }
}

inline cudaError_t launch_expand(const GemmArgs& args, int64_t rows, uint4* out, cudaStream_t stream) {
  const int64_t ctas = (rows * (padded_k(args.k) / 16) + kExpandThreads - 1) / kExpandThreads;
  const auto launch = [&](auto kernel) { return sm90::launch_overlapped(kernel, static_cast<unsigned>(ctas), kExpandThreads, 0, stream, args, ByteScales(args), rows, out); };
  if (args.a != nullptr) return launch(expand_tokens<void>);
  return sm90::with_float(args.x_type, [&](auto zero) { return launch(expand_tokens<decltype(zero)>); });
}

// ---- one element of C without bias from the source, exactly, whatever the scales ----

template <class T>
__device__ double exact_dot_quantized(const GemmArgs& args, const ByteScales& scales, int64_t m, int64_t n) {
  const uint8_t* b = args.b + n * args.k;
  double c = 0;
  for (int64_t block = 0; block < args.k / 32 && !isnan(c); ++block) {
    float4 v[8];
    uint32_t amax = 0;
    for (int i = 0; i < 8; ++i) {
      v[i] = load4<T>(args.x, m * args.k + block * 32 + 4 * i);
      amax = max(amax, amax_bits(v[i]));
    }
    const uint8_t sa = block_scale(amax, args.rceil), sb = scales.b_byte(n, block);
    double sum = sa == mx::kNanScale || sb == mx::kNanScale ? __uint_as_float(mx::kNanBits) : 0.f;
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = encode4(v[i], sa);
      for (int j = 0; j < 4; ++j) sum += static_cast<double>(mx::decode_e4m3(static_cast<uint8_t>(word >> 8 * j))) * mx::decode_e4m3(b[block * 32 + 4 * i + j]);
    }
    c += sum * power_of_two(sa + sb - 254);
  }
  return c;
}

__device__ __noinline__ inline double exact_element(const GemmArgs& args, const ByteScales& scales, int64_t m, int64_t n) {
  if (args.a != nullptr) return exact_dot(args, scales, m, n);
  switch (args.x_type) {
    case Float::f32: return exact_dot_quantized<float>(args, scales, m, n);
    case Float::bf16: return exact_dot_quantized<__nv_bfloat16>(args, scales, m, n);
    default: return exact_dot_quantized<__half>(args, scales, m, n);
  }
}

}  // namespace mori::mxfp8
