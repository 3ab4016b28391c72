// Attention over selected cells for any arguments, in fp32 (contract: qsa.h): what the tensor-core kernels do not serve, the split
// form, and the merge of partial results.
//
//  attend: a CTA owns 8 query rows of one KV head of one token and one split of its slots. It walks the slots in chunks of 32:
//    decode K to fp32 in shared memory -> scores (a lane per cell, two rows per warp) -> online softmax -> decode V over K ->
//    add P V (a thread per pair of dims). An empty slot reads nothing: its row is zero, its probability exactly 0.
//    Each q row is scaled by a power of two into [0.5, 1) and the factor returns inside the exponent: no q overflows.
//  merge: one warp per row, out = sum_i exp(lse_i - max lse) * partial_i / sum_i exp(lse_i - max lse), then the gate.
#include "qsa_io_sm90.cuh"

namespace mori::qsa {
namespace {

using namespace sm90;

constexpr int kThreads = 128;
constexpr int kRows = 8;     // query rows of a CTA: two per warp
constexpr int kChunk = 32;   // slots per step: one per lane
constexpr int kGroup = 64;   // values per KV scale
constexpr float kLn2 = 0.6931471805599453f;

template <int kDim>
struct Shared {
  static constexpr int kPitch = kDim + 4;  // floats of a decoded row: 16-byte loads of 8 rows fall into different banks
  float q[kRows][kDim];
  float tile[kChunk][kPitch];  // K, then V
  float p[kChunk][kRows];
  float factor[kRows], correction[kRows];
  int64_t cell[kChunk];
};

// 16 bytes of a KV row as floats.
template <Kv kKv>
__device__ __forceinline__ void decode(const uint4 raw, float scale, float (&out)[kKv == Kv::i8 ? 16 : 8]) {
  const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kKv == Kv::i8) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[4 * i + j] = static_cast<float>(static_cast<int8_t>(word[i] >> (8 * j))) * scale;
    } else if constexpr (kKv == Kv::f16) {
      const float2 pair = unpack_half2(word[i]);
      out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
    } else {
      out[2 * i] = __uint_as_float(word[i] << 16), out[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
  }
}

template <int kDim, Kv kKv>
__device__ __forceinline__ void load_tile(Shared<kDim>& s, const DeviceRows& rows, const DeviceRows& scales, int64_t kv_head) {
  constexpr int kValues = kKv == Kv::i8 ? 16 : 8, kVectors = kDim / kValues;
  for (int i = threadIdx.x; i < kChunk * kVectors; i += kThreads) {
    const int row = i / kVectors, column = i % kVectors * kValues;
    const int64_t cell = s.cell[row];
    float value[kValues] = {};
    if (cell >= 0) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(rows.data + cell * rows.stride + kv_head * rows.head_stride) + i % kVectors);
      float scale = 1.0f;
      if constexpr (kKv == Kv::i8)
        scale = __half2float(__ldg(reinterpret_cast<const __half*>(scales.data + cell * scales.stride + kv_head * scales.head_stride) + column / kGroup));
      decode<kKv>(raw, scale, value);
    }
#pragma unroll
    for (int j = 0; j < kValues; j += 4)
      *reinterpret_cast<float4*>(&s.tile[row][column + j]) = make_float4(value[j], value[j + 1], value[j + 2], value[j + 3]);
  }
}

// q of the CTA's rows in [0.5, 1) and their score factors; rows past the group are zero.
template <int kDim>
__device__ __forceinline__ void load_q(Shared<kDim>& s, const AttnArgs& args, int64_t token, int64_t head, int rows, int warp, int lane) {
  for (int row = 2 * warp; row < 2 * warp + 2; ++row) {
    float value[kDim / 32], top = 0.0f;
    const char* q = args.q.data + token * args.q.stride + (head + row) * args.q.head_stride;
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      value[i] = row < rows ? load_float(q, args.q_type, i * 32 + lane) : 0.0f;
      top = fmaxf(top, fabsf(value[i]));
    }
    for (int offset = 16; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    const int exponent = exponent_of(top);
    // Two steps: 2^149 is no fp32 number.
    const float half = ldexpf(args.sm_scale < 0 ? -1.0f : 1.0f, -exponent / 2), rest = ldexpf(1.0f, -exponent - (-exponent / 2));
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) s.q[row][i * 32 + lane] = value[i] * half * rest;
    if (lane == 0) s.factor[row] = score_factor(args.sm_scale, exponent);
  }
}

template <int kDim, Kv kKv>
__global__ void __launch_bounds__(kThreads) attend(const AttnArgs args, int64_t splits, float* __restrict__ partial, float* __restrict__ lse) {
  __shared__ alignas(16) Shared<kDim> s;
  constexpr int kPairs = kDim / 2;                   // threads along the dims
  constexpr int kOwn = kRows * kPairs / kThreads;    // query rows of a thread in P V
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t group = args.q_heads / args.kv_heads, tiles = (group + kRows - 1) / kRows;
  const int64_t first = blockIdx.x % tiles * kRows, kv_head = blockIdx.x / tiles % args.kv_heads, item = blockIdx.x / (tiles * args.kv_heads);
  const int64_t token = item % args.tokens, split = item / args.tokens;
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), group - first));
  const int64_t head = kv_head * group + first;
  const int64_t length = (args.slots + splits - 1) / splits, begin = min(split * length, args.slots), end = min(begin + length, args.slots);
  const int pair = threadIdx.x % kPairs, own = threadIdx.x / kPairs * kOwn;

  load_q(s, args, token, head, rows, warp, lane);
  float acc[kOwn][2] = {}, top[2], sum[2] = {};
  top[0] = top[1] = -INFINITY;
  for (int64_t chunk = begin; chunk < end; chunk += kChunk) {
    __syncthreads();  // the previous V has been read
    if (threadIdx.x < kChunk) s.cell[lane] = chunk + lane < end ? cell_of(args, token, chunk + lane) : -1;
    __syncthreads();
    load_tile<kDim, kKv>(s, args.k, args.k_scale, kv_head);
    __syncthreads();

    float score[2] = {};
#pragma unroll 4
    for (int d = 0; d < kDim; d += 4) {
      const float4 key = *reinterpret_cast<const float4*>(&s.tile[lane][d]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4 q = *reinterpret_cast<const float4*>(&s.q[2 * warp + r][d]);
        score[r] = fmaf(q.x, key.x, fmaf(q.y, key.y, fmaf(q.z, key.z, fmaf(q.w, key.w, score[r]))));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * warp + r;
      if (s.cell[lane] < 0) score[r] = -INFINITY;
      float most = score[r];
      for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
      most = fmaxf(most, top[r]);
      const float factor = s.factor[row];
      // A NaN score must pass through; an empty slot must be exactly 0, also while the row has no cell yet.
      const float p = s.cell[lane] < 0 ? 0.0f : exp2f((score[r] - most) * factor);
      const float correction = sum[r] == 0.0f ? 0.0f : exp2f((top[r] - most) * factor);
      float total = p;
      for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
      sum[r] = fmaf(sum[r], correction, total);
      top[r] = most;
      s.p[lane][row] = p;
      if (lane == 0) s.correction[row] = correction;
    }
    __syncthreads();
    load_tile<kDim, kKv>(s, args.v, args.v_scale, kv_head);
    __syncthreads();

#pragma unroll
    for (int r = 0; r < kOwn; ++r) acc[r][0] *= s.correction[own + r], acc[r][1] *= s.correction[own + r];
#pragma unroll 4
    for (int cell = 0; cell < kChunk; ++cell) {
      const float2 value = *reinterpret_cast<const float2*>(&s.tile[cell][2 * pair]);
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        const float p = s.p[cell][own + r];
        acc[r][0] = fmaf(p, value.x, acc[r][0]);
        acc[r][1] = fmaf(p, value.y, acc[r][1]);
      }
    }
  }

  __syncthreads();
  const int64_t out_row = (split * args.tokens + token) * args.q_heads + head;
  for (int r = 0; r < 2; ++r) {
    const int row = 2 * warp + r;
    if (lane != 0) continue;
    s.correction[row] = sum[r];
    const double log = static_cast<double>(top[r]) * s.factor[row] * kLn2 + log2(static_cast<double>(sum[r])) * kLn2;
    if (lse != nullptr && row < rows) lse[out_row + row] = sum[r] == 0.0f ? -INFINITY : static_cast<float>(log);
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    const int row = own + r;
    if (row >= rows) continue;
    const float total = s.correction[row];
    const float inverse = total == 0.0f ? 0.0f : __frcp_rn(total);
    float value[2] = {acc[r][0] * inverse, acc[r][1] * inverse};
    const int64_t at = (out_row + row) * kDim + 2 * pair;
    if (partial != nullptr) {
      *reinterpret_cast<float2*>(partial + at) = make_float2(value[0], value[1]);
      continue;
    }
    if (args.gate.data != nullptr && total != 0.0f) {
      const char* gate = args.gate.data + token * args.gate.stride + (head + row) * args.gate.head_stride;
      value[0] *= sigmoid(load_float(gate, args.gate_type, 2 * pair));
      value[1] *= sigmoid(load_float(gate, args.gate_type, 2 * pair + 1));
    }
    store_float(args.out, args.out_type, at, value[0]);
    store_float(args.out, args.out_type, at + 1, value[1]);
  }
}

__global__ void __launch_bounds__(256) merge(const MergeArgs args) {
  const int lane = threadIdx.x % 32;
  const int64_t rows = args.tokens * args.heads, row = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  float top = -INFINITY, weights = 0.0f;
  for (int64_t i = 0; i < args.splits; ++i) top = fmaxf(top, args.lse[i * rows + row]);
  for (int64_t i = 0; i < args.splits; ++i) {
    const float log = args.lse[i * rows + row];
    weights += log == -INFINITY ? 0.0f : expf(log - top);
  }
  const float inverse = weights == 0.0f ? 0.0f : __frcp_rn(weights);
  const char* gate = args.gate.data == nullptr ? nullptr : args.gate.data + row / args.heads * args.gate.stride + row % args.heads * args.gate.head_stride;
  for (int64_t d = lane; d < args.dim; d += 32) {
    float value = 0.0f;
    for (int64_t i = 0; i < args.splits; ++i) {
      const float log = args.lse[i * rows + row];
      if (log != -INFINITY) value = fmaf(expf(log - top), args.partial[(i * rows + row) * args.dim + d], value);
    }
    value *= inverse;
    if (gate != nullptr && weights != 0.0f) value *= sigmoid(load_float(gate, args.gate_type, d));
    store_float(args.out, args.out_type, row * args.dim + d, value);
  }
}

template <int kDim, Kv kKv>
cudaError_t launch(const AttnArgs& args, int64_t splits, float* partial, float* lse, cudaStream_t stream) {
  const int64_t group = args.q_heads / args.kv_heads, tiles = (group + kRows - 1) / kRows;
  attend<kDim, kKv><<<static_cast<unsigned>(args.tokens * args.kv_heads * tiles * splits), kThreads, 0, stream>>>(args, splits, partial, lse);
  return cudaGetLastError();
}

template <Kv kKv>
cudaError_t launch_dim(const AttnArgs& args, int64_t splits, float* partial, float* lse, cudaStream_t stream) {
  switch (args.dim) {
    case 64: return launch<64, kKv>(args, splits, partial, lse, stream);
    case 128: return launch<128, kKv>(args, splits, partial, lse, stream);
    default: return launch<256, kKv>(args, splits, partial, lse, stream);
  }
}

}  // namespace

cudaError_t launch_attn(const AttnArgs& args, int64_t splits, float* partial, float* lse, cudaStream_t stream) {
  switch (args.kv_type) {
    case Kv::i8: return launch_dim<Kv::i8>(args, splits, partial, lse, stream);
    case Kv::f16: return launch_dim<Kv::f16>(args, splits, partial, lse, stream);
    default: return launch_dim<Kv::bf16>(args, splits, partial, lse, stream);
  }
}

cudaError_t launch_merge(const MergeArgs& args, cudaStream_t stream) {
  merge<<<static_cast<unsigned>((args.tokens * args.heads + 7) / 8), 256, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace mori::qsa
