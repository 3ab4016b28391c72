// MXFP8 quantise, dequantise and scale packing on HIP (scalars: common/mx.h; layouts: mxfp8.h). All bound by memory.
//
//   rows     a lane takes 8 consecutive values (16 bytes of bf16), a quad of lanes a block of 32: amax by two DPP moves, codes
//            stored as 8 bytes. Waves stride over a flat run of blocks, so that any number of rows is one launch.
//   weight   a workgroup of 4 waves takes 32 rows x 512 columns: a wave is 8 rows, a lane 8 columns; amax over the LDS.
#include <algorithm>

#include "../common/gfx950.h"
#include "../common/mx.h"
#include "mxfp8_gfx950.h"

namespace mori::mxfp8 {
namespace {

using namespace gfx950;

constexpr int kBlock = 32;
constexpr int kPer = 8;  // values of a lane
constexpr int kThreads = 256, kWaves = kThreads / kWave;
constexpr int64_t kMaxGrid = 256 * 8;  // workgroups that fill the device; the rest by striding

MORI_DEVICE int64_t first_item() { return static_cast<int64_t>(block_id()) * kThreads + thread_id(); }

// Eight values as fp32; 16-byte loads where the address allows.
template <class T>
MORI_DEVICE void load8(float (&v)[kPer], const T* p, bool aligned) {
  T raw[kPer] __attribute__((aligned(16)));
  if (aligned) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(raw) / 16); ++i) reinterpret_cast<i32x4*>(raw)[i] = reinterpret_cast<const i32x4*>(p)[i];
  } else {
#pragma unroll
    for (int i = 0; i < kPer; ++i) raw[i] = p[i];
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) v[i] = static_cast<float>(raw[i]);
}

MORI_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

MORI_DEVICE uint32_t amax_bits(const float (&v)[kPer]) {
  uint32_t amax = 0;
#pragma unroll
  for (float value : v) amax = larger(amax, mx::bits_of(value) & mx::kMagnitudeBits);
  return amax;
}

// The largest of a quad of lanes.
MORI_DEVICE uint32_t quad_max(uint32_t value) {
  constexpr int kSwapNeighbours = 0xb1, kSwapPairs = 0x4e;  // quad_perm [1, 0, 3, 2] and [2, 3, 0, 1]
  value = larger(value, __builtin_amdgcn_update_dpp(0u, value, kSwapNeighbours, 0xf, 0xf, true));
  return larger(value, __builtin_amdgcn_update_dpp(0u, value, kSwapPairs, 0xf, 0xf, true));
}

MORI_DEVICE uint8_t block_scale(uint32_t amax, bool rceil) { return rceil ? mx::block_scale_rceil(amax) : mx::block_scale_floor(amax); }

MORI_DEVICE uint64_t encode8(const float (&v)[kPer], uint8_t scale) {
  uint64_t word = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const uint32_t bits = mx::bits_of(v[i]);
    const uint32_t code = (bits >> 24 & 0x80) | mx::encode_e4m3(mx::scaled_magnitude(bits & mx::kMagnitudeBits, scale));
    word |= static_cast<uint64_t>(scale == mx::kNanScale ? mx::kNanCode : code) << 8 * i;
  }
  return word;
}

MORI_DEVICE void store8(uint8_t* p, uint64_t word, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint64_t*>(p) = word;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) p[i] = static_cast<uint8_t>(word >> 8 * i);
}

// `aligned`: x to 16 bytes and codes to 8.
template <class T>
__global__ void __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads)))
quantize_rows(const T* x, int64_t blocks, int64_t stride, bool rceil, bool aligned, uint8_t* codes, uint8_t* scale) {
  const int64_t parts = blocks * (kBlock / kPer);  // whole quads
  for (int64_t part = first_item(); part < parts; part += stride) {
    float v[kPer];
    load8(v, x + part * kPer, aligned);
    const uint8_t byte = block_scale(quad_max(amax_bits(v)), rceil);
    store8(codes + part * kPer, encode8(v, byte), aligned);
    if (part % 4 == 0) scale[part / 4] = byte;
  }
}

template <class T>
__global__ void __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads)))
quantize_weight(const T* w, int64_t n, int64_t k, bool rceil, bool aligned, uint8_t* codes, uint8_t* scale) {
  constexpr int kRowsPerWave = kBlock / kWaves, kColumns = kWave * kPer;
  __shared__ uint32_t shared_amax[kWaves][kWave];
  const int wave = wave_id(), lane = lane_id();
  const int64_t chunks = (k + kColumns - 1) / kColumns, strip = block_id() / chunks, column = block_id() % chunks * kColumns + lane * kPer;
  float v[kRowsPerWave][kPer] = {};
  uint32_t amax = 0;
#pragma unroll
  for (int r = 0; r < kRowsPerWave; ++r) {
    const int64_t row = strip * kBlock + wave * kRowsPerWave + r;
    if (row < n && column < k) load8(v[r], w + row * k + column, aligned);
    amax = larger(amax, amax_bits(v[r]));
  }
  shared_amax[wave][lane] = amax;
  read_done_barrier();
#pragma unroll
  for (int i = 0; i < kWaves; ++i) amax = larger(amax, shared_amax[i][lane]);
  const uint8_t byte = block_scale(quad_max(amax), rceil);
  if (column >= k) return;
#pragma unroll
  for (int r = 0; r < kRowsPerWave; ++r) {
    const int64_t row = strip * kBlock + wave * kRowsPerWave + r;
    if (row < n) store8(codes + row * k + column, encode8(v[r], byte), aligned);
  }
  if (wave == 0 && lane % 4 == 0) scale[strip * (k / kBlock) + column / kBlock] = byte;
}

// A lane decodes four codes of a block.
template <class T>
__global__ void __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads)))
dequantize(const uint8_t* codes, const uint8_t* scale, int64_t rows, int64_t k, int64_t rows_per_scale, int64_t stride, T* out) {
  const int64_t blocks = k / kBlock, count = rows * k / 4;
  for (int64_t i = first_item(); i < count; i += stride) {
    const int64_t block = i / (kBlock / 4), row = block / blocks;
    const uint8_t byte = scale[row / rows_per_scale * blocks + block % blocks];
#pragma unroll
    for (int j = 0; j < 4; ++j) out[i * 4 + j] = static_cast<T>(mx::float_of(mx::dequantized_bits(codes[i * 4 + j], byte)));
  }
}

__global__ void __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads)))
pack_a(const uint8_t* scale, int64_t rows, int64_t blocks, int64_t padded, int64_t stride, uint8_t* out) {
  constexpr uint8_t kPadding = 127;
  for (int64_t i = first_item(); i < padded * blocks; i += stride) {
    const int64_t block = i / padded, in_block = i % padded, group = in_block / 64, byte = in_block % 64;
    const int64_t row = group * 64 + byte % 4 * 16 + byte / 4;
    out[i] = row < rows ? scale[row * blocks + block] : kPadding;
  }
}

__global__ void __attribute__((amdgpu_flat_work_group_size(kThreads, kThreads)))
pack_b(const uint8_t* scale, int64_t row_blocks, int64_t blocks, int64_t stride, int32_t* out) {
  for (int64_t i = first_item(); i < row_blocks * blocks; i += stride) out[i] = scale[i % row_blocks * blocks + i / row_blocks];
}

// Workgroups for a flat run of items, and the items that all of them take at a time.
struct Flat {
  unsigned grid;
  int64_t stride;
  explicit Flat(int64_t items) : grid(static_cast<unsigned>(std::min((items + kThreads - 1) / kThreads, kMaxGrid))), stride(grid * int64_t{kThreads}) {}
};

bool aligned(const void* x, const void* codes) { return reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(codes) % 8 == 0; }

}  // namespace

hipError_t launch_quantize(const void* x, Float type, int64_t rows, int64_t k, bool rceil, uint8_t* codes, uint8_t* scale, hipStream_t stream) {
  const int64_t blocks = rows * (k / kBlock);
  const Flat flat(blocks * (kBlock / kPer));
  return with_float(type, [&](auto element) {
    using T = decltype(element);
    quantize_rows<<<flat.grid, kThreads, 0, stream>>>(static_cast<const T*>(x), blocks, flat.stride, rceil, aligned(x, codes), codes, scale);
    return hipGetLastError();
  });
}

hipError_t launch_quantize_weight(const void* w, Float type, int64_t n, int64_t k, bool rceil, uint8_t* codes, uint8_t* scale, hipStream_t stream) {
  constexpr int64_t kColumns = kWave * kPer;
  const unsigned grid = static_cast<unsigned>((k + kColumns - 1) / kColumns * ((n + kBlock - 1) / kBlock));
  return with_float(type, [&](auto element) {
    using T = decltype(element);
    quantize_weight<<<grid, kThreads, 0, stream>>>(static_cast<const T*>(w), n, k, rceil, aligned(w, codes), codes, scale);
    return hipGetLastError();
  });
}

hipError_t launch_dequantize(const uint8_t* codes, const uint8_t* scale, int64_t rows, int64_t k, bool weight_blocks, void* out, Float type,
                             hipStream_t stream) {
  const Flat flat(rows * k / 4);
  return with_float(type, [&](auto element) {
    using T = decltype(element);
    dequantize<<<flat.grid, kThreads, 0, stream>>>(codes, scale, rows, k, weight_blocks ? kBlock : 1, flat.stride, static_cast<T*>(out));
    return hipGetLastError();
  });
}

hipError_t launch_pack_a(const uint8_t* scale, int64_t rows, int64_t blocks, uint8_t* out, hipStream_t stream) {
  const int64_t padded = (rows + 63) / 64 * 64;
  const Flat flat(padded * blocks);
  pack_a<<<flat.grid, kThreads, 0, stream>>>(scale, rows, blocks, padded, flat.stride, out);
  return hipGetLastError();
}

hipError_t launch_pack_b(const uint8_t* scale, int64_t row_blocks, int64_t blocks, int32_t* out, hipStream_t stream) {
  const Flat flat(row_blocks * blocks);
  pack_b<<<flat.grid, kThreads, 0, stream>>>(scale, row_blocks, blocks, flat.stride, out);
  return hipGetLastError();
}

}  // namespace mori::mxfp8
