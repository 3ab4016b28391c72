// C = A B^T for up to 32 tokens: the weight is streamed once, so it is bound by memory bandwidth.
//
// A CTA computes 32 weight rows x all tokens; its 8 warps take chunks of 64 along K in turn and keep the next two chunks of the
// weight in flight. Codes become bf16 operands in registers (decode_sm90.cuh); C^T = B A^T by m16n8k16, the weight as the 16-row
// operand, so 8 tokens cost what 1 does. The k order inside a chunk is permuted alike for both operands: lane c of a quad owns
// bytes 16 c .. 16 c + 15 of a row. Warps are summed in order: deterministic, and a token's bits do not depend on the others.
// The weight is requested before griddepcontrol.wait, to overlap the previous kernel; that kernel must not write the weight.
#include "../common/launch_sm90.cuh"
#include "../common/sm90.cuh"
#include "decode_sm90.cuh"
#include "scales_sm90.cuh"

namespace mori::mxfp8 {
namespace {

using namespace sm90;

constexpr int kRows = 32, kWarps = 8, kChunk = 64, kFlight = 2;
constexpr int kRowTiles = kRows / 8;  // a lane holds rows g, g + 8, g + 16, g + 24 of the CTA's 32

__device__ __forceinline__ uint4 load_streaming(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// 16 codes of a row and their scale.
struct Codes {
  uint32_t word[4] = {};
  uint32_t scale = 127;
  __device__ __forceinline__ void set(uint4 v) { word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w; }
};

template <int kTokenTiles>
__global__ void __launch_bounds__(kWarps * 32, 2) skinny(const GemmArgs args, const ByteScales scales) {
  __shared__ float partial[kWarps][2 * kTokenTiles * 4 * 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int64_t n0 = static_cast<int64_t>(blockIdx.x) * kRows, chunks = (args.k + kChunk - 1) / kChunk;

  Codes w[kFlight][kRowTiles];
  const auto load_weight = [&](int slot, int64_t chunk) {
    const int64_t k = chunk * kChunk + c * 16;
    if (k >= args.k) return;  // the row ends inside the chunk: keep harmless codes, the tokens' are zero there
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) w[slot][r].set(load_streaming(args.b + min(n0 + g + 8 * r, args.n - 1) * args.k + k));
    w[slot][0].scale = scales.b_byte(n0, k / 32);  // 32 rows share one
  };
#pragma unroll
  for (int i = 0; i < kFlight; ++i) load_weight(i, warp + static_cast<int64_t>(i) * kWarps);
  launch_dependents();
  wait_for_dependencies();

  float sum[2][kTokenTiles][4] = {};
  bool extreme = false;
  for (int64_t first = warp; first < chunks; first += kFlight * kWarps) {
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int64_t chunk = first + static_cast<int64_t>(i) * kWarps;
      if (chunk >= chunks) break;  // the same for the whole warp
      const int64_t k = chunk * kChunk + c * 16;
      const bool inside = k < args.k;
      Codes x[kTokenTiles];
      uint32_t x_multiplier[kTokenTiles];
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        const int64_t m = t * 8 + g;
        if (inside && m < args.m) {
          x[t].set(__ldg(reinterpret_cast<const uint4*>(args.a + m * args.k + k)));
          x[t].scale = scales.a_byte(m, k / 32);
        }
        const Multiplier multiplier = multiplier_for(x[t].word, x[t].scale);
        x_multiplier[t] = multiplier.bf16x2;
        extreme |= multiplier.extreme;
      }
      uint32_t w_multiplier[kRowTiles];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const Multiplier multiplier = multiplier_for(w[i][r].word, inside ? w[i][0].scale : 127);
        w_multiplier[r] = inside ? multiplier.bf16x2 : 0;
        extreme |= inside && multiplier.extreme;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t b[kTokenTiles][2];
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          b[t][0] = decode_low(x[t].word[j], x_multiplier[t]);
          b[t][1] = decode_high(x[t].word[j], x_multiplier[t]);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t upper = w[i][2 * h].word[j], lower = w[i][2 * h + 1].word[j];
          const uint32_t a[4] = {decode_low(upper, w_multiplier[2 * h]), decode_low(lower, w_multiplier[2 * h + 1]),
                                 decode_high(upper, w_multiplier[2 * h]), decode_high(lower, w_multiplier[2 * h + 1])};
#pragma unroll
          for (int t = 0; t < kTokenTiles; ++t) mma_m16n8k16_bf16(sum[h][t], a, b[t][0], b[t][1]);
        }
      }
      load_weight(i, chunk + kFlight * kWarps);
    }
  }

#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
      for (int j = 0; j < 4; ++j) partial[warp][((h * kTokenTiles + t) * 4 + j) * 32 + lane] = sum[h][t][j];
  const bool exact = __syncthreads_or(extreme) != 0;
  for (int i = threadIdx.x; i < 2 * kTokenTiles * 4 * 32; i += kWarps * 32) {
    const int l = i % 32, j = i / 32 % 4, t = i / 128 % kTokenTiles, h = i / 128 / kTokenTiles;
    const int64_t n = n0 + h * 16 + l / 4 + j / 2 * 8, m = t * 8 + l % 4 * 2 + j % 2;
    if (m >= args.m || n >= args.n) continue;
    float total = 0.f;
#pragma unroll
    for (int q = 0; q < kWarps; ++q) total += partial[q][i];
    store_c(args, m, n, exact ? exact_dot(args, scales, m, n) : total);
  }
}

bool aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <int kTokenTiles>
cudaError_t launch(const GemmArgs& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((args.n + kRows - 1) / kRows));
  return launch_overlapped(skinny<kTokenTiles>, grid, kWarps * 32, 0, stream, args, ByteScales(args));
}

}  // namespace

bool skinny_fits(const GemmArgs& args) { return args.m <= kSkinnyTokens && aligned16(args.a) && aligned16(args.b); }

cudaError_t launch_skinny(const GemmArgs& args, cudaStream_t stream) {
  if (args.m <= 8) return launch<1>(args, stream);
  if (args.m <= 16) return launch<2>(args, stream);
  return launch<4>(args, stream);
}

}  // namespace mori::mxfp8
