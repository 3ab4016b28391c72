// The CUDA kernels of attention over selected cells, torch-free: what qsa_sm90.cpp calls. Pointers are device pointers.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "../common/float_sm90.h"

namespace mori::qsa {

using sm90::Float;

// Rows of a [T, H, D] tensor: the last dimension is dense, each row starts at a multiple of 16 bytes (scales: of their own bytes).
struct DeviceRows {
  const char* data = nullptr;
  int64_t stride = 0, head_stride = 0;  // bytes
};

enum class Kv : int { i8, f16, bf16 };

struct AttnArgs {
  DeviceRows q, k, v, k_scale, v_scale, gate;  // scales are null without int8, gate may be null
  Float q_type, gate_type, out_type;
  Kv kv_type;
  const void* ids;  // [tokens, slots], dense
  bool wide_ids;    // int64
  void* out;        // [tokens, q_heads, dim], dense, of out_type
  int64_t tokens, q_heads, kv_heads, dim, slots, cells;
  double sm_scale;
};

struct MergeArgs {
  const float *partial, *lse;  // [splits, tokens, heads, dim], [splits, tokens, heads], dense
  DeviceRows gate;             // rows of any alignment, or null
  Float gate_type, out_type;
  void* out;
  int64_t splits, tokens, heads, dim;
};

// Any arguments, in fp32 (qsa_simple_sm90.cu). `partial` and `lse` are as in MergeArgs; a split is ceil(slots / splits) slots.
cudaError_t launch_attn(const AttnArgs& args, int64_t splits, float* partial, float* lse, cudaStream_t stream);
cudaError_t launch_merge(const MergeArgs& args, cudaStream_t stream);

// Tensor cores, int8 KV: each token over its own cells (qsa_sparse_sm90.cu). `workspace` holds sparse_workspace_bytes(args) bytes.
// With a status, only the blocks of dense_tokens(args) tokens are computed that launch_dense() before it has left.
bool sparse_fits(const AttnArgs& args);
int64_t sparse_workspace_bytes(const AttnArgs& args);
cudaError_t launch_sparse(const AttnArgs& args, void* workspace, const uint8_t* status, cudaStream_t stream);

// Tensor cores, int8 KV, for arguments that fit sparse too: one launch for few tokens or few slots (qsa_cluster_sm90.cu).
bool cluster_fits(const AttnArgs& args);
cudaError_t launch_cluster(const AttnArgs& args, cudaStream_t stream);

// Tensor cores, int8 KV, for arguments that fit both (qsa_dense_sm90.cu): computes the blocks of dense_tokens(args) tokens whose cells are
// 0 .. n-1. Writes status[block * dense_status_heads(args) + i]: all 0 for a block that it has computed. It is read 16 bytes at a time.
constexpr int kMaxStatusBlocks = 1 << 15;
bool dense_fits(const AttnArgs& args);
int64_t dense_tokens(const AttnArgs& args);
int64_t dense_blocks(const AttnArgs& args);
int64_t dense_status_heads(const AttnArgs& args);
cudaError_t launch_dense(const AttnArgs& args, uint8_t* status, cudaStream_t stream);

cudaError_t launch_kv_quantize(const void* x, Float type, int8_t* codes, void* scale, int64_t groups, cudaStream_t stream);

}  // namespace mori::qsa
