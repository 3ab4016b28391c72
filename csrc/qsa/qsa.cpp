// The argument checks of attention over selected cells (see qsa.h for the contract).
#include "qsa.h"

#include <cmath>

namespace mori::qsa {
namespace {

constexpr std::initializer_list<ScalarType> kFloats = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};

void check_gate(const char* op, const std::optional<Tensor>& gate, const Sizes& sizes, const Tensor& q) {
  if (!gate) return;
  check_dtype(op, "gate", *gate, kFloats);
  check_sizes(op, "gate", *gate, sizes, "T, Hq, D");
  check_same_device(op, "gate", *gate, "the inputs", q);
}

}  // namespace

AttnShape check_attn(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, const std::optional<Tensor>& k_scale,
                     const std::optional<Tensor>& v_scale, const std::optional<Tensor>& gate, std::optional<double> sm_scale) {
  check_dtype(op, "q", q, kFloats);
  MORI_CHECK(q.dim() == 3, op, ": q must be [T, Hq, D], got ", describe(q));
  check_dtype(op, "k", k, {ScalarType::Char, ScalarType::Half, ScalarType::BFloat16});
  MORI_CHECK(k.dim() == 3, op, ": k must be [cells, Hkv, D], got ", describe(k));
  const int64_t tokens = q.size(0), q_heads = q.size(1), dim = q.size(2), cells = k.size(0), kv_heads = k.size(1);
  MORI_CHECK(dim == 64 || dim == 128 || dim == 256, op, ": D, the last dimension of q, must be 64, 128 or 256, got ", describe(q));
  MORI_CHECK(k.size(2) == dim, op, ": k must have the D of q, ", dim, ", got ", describe(k));
  MORI_CHECK(kv_heads > 0 && q_heads % kv_heads == 0, op, ": Hq of q must be a multiple of Hkv of k, got Hq ", q_heads, " and Hkv ", kv_heads);
  check_dtype(op, "v", v, {k.scalar_type()});
  check_sizes(op, "v", v, sizes_of(k), "the shape of k");
  check_dtype(op, "ids", ids, {ScalarType::Int, ScalarType::Long});
  MORI_CHECK(ids.dim() == 2 && ids.size(0) == tokens, op, ": ids must be [T, S] with T = ", tokens, ", got ", describe(ids));
  check_same_device(op, "k", k, "q", q);
  check_same_device(op, "v", v, "q", q);
  check_same_device(op, "ids", ids, "q", q);
  const bool int8_kv = k.scalar_type() == ScalarType::Char;
  const std::pair<const char*, const std::optional<Tensor>&> scales[] = {{"k_scale", k_scale}, {"v_scale", v_scale}};
  for (const auto& [name, scale] : scales) {
    MORI_CHECK(scale.has_value() == int8_kv, op, ": ", name, int8_kv ? " is required when k and v are int8" : " must be None when k and v are floating point");
    if (!scale) continue;
    check_dtype(op, name, *scale, {ScalarType::Half});
    check_sizes(op, name, *scale, {cells, kv_heads, dim / kScaleGroup}, "cells, Hkv, D/64");
    check_same_device(op, name, *scale, "q", q);
  }
  check_gate(op, gate, sizes_of(q), q);
  const double scale = sm_scale.value_or(1.0 / std::sqrt(static_cast<double>(dim)));
  MORI_CHECK(std::isfinite(scale), op, ": sm_scale must be finite, got ", scale);
  return {tokens, q_heads, kv_heads, dim, ids.size(1), cells, int8_kv, scale};
}

MergeShape check_merge(const Tensor& partial, const Tensor& lse, const std::optional<Tensor>& gate) {
  constexpr const char* op = "qsa_merge";
  check_dtype(op, "partial", partial, {ScalarType::Float});
  MORI_CHECK(partial.dim() == 4 && partial.size(0) > 0, op, ": partial must be [splits, T, Hq, D] with at least one split, got ", describe(partial));
  check_dtype(op, "lse", lse, {ScalarType::Float});
  const Sizes sizes = sizes_of(partial);
  check_sizes(op, "lse", lse, {sizes[0], sizes[1], sizes[2]}, "splits, T, Hq");
  check_same_device(op, "lse", lse, "partial", partial);
  check_gate(op, gate, {sizes[1], sizes[2], sizes[3]}, partial);
  return {sizes[0], sizes[1], sizes[2], sizes[3]};
}

KvQuantizeShape check_kv_quantize(const Tensor& x) {
  constexpr const char* op = "kv_quantize";
  check_dtype(op, "x", x, kFloats);
  MORI_CHECK(x.dim() >= 1 && x.size(-1) % kScaleGroup == 0, op, ": x must be [.., D] with D a multiple of ", kScaleGroup, ", got ", describe(x));
  Sizes scale_sizes = sizes_of(x);
  scale_sizes.back() /= kScaleGroup;
  return {x.numel() / kScaleGroup, sizes_of(x), scale_sizes};
}

}  // namespace mori::qsa

// The checks alone, of the functional form or, with outputs, of the .out form: for the launchers of mori_ops/mps.py.
namespace mori::qsa {
namespace {

using MaybeTensor = std::optional<Tensor>;

const Tensor* pointer(const MaybeTensor& t) { return t ? &*t : nullptr; }

void kv_quantize(const Tensor& x, MaybeTensor codes, MaybeTensor scale) {
  const KvQuantizeShape shape = check_kv_quantize(x);
  if (codes) check_out("kv_quantize", "codes", *codes, shape.code_sizes, {ScalarType::Char}, {&x});
  if (scale) check_out("kv_quantize", "scale", *scale, shape.scale_sizes, {ScalarType::Half}, {&x, pointer(codes)});
}

void flash(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, MaybeTensor k_scale, MaybeTensor v_scale, MaybeTensor gate,
           std::optional<double> sm_scale, std::optional<ScalarType> out_dtype, MaybeTensor out) {
  constexpr const char* op = "qsa_flash";
  check_attn(op, q, k, v, ids, k_scale, v_scale, gate, sm_scale);
  check_out_dtype(op, out_dtype, q.scalar_type());
  if (out) check_out(op, "out", *out, sizes_of(q), kFloats, {&q, &k, &v, &ids, pointer(k_scale), pointer(v_scale), pointer(gate)});
}

void attn(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, MaybeTensor k_scale, MaybeTensor v_scale,
          std::optional<double> sm_scale, int64_t splits, MaybeTensor partial, MaybeTensor lse) {
  constexpr const char* op = "qsa_attn";
  const AttnShape s = check_attn(op, q, k, v, ids, k_scale, v_scale, std::nullopt, sm_scale);
  if (partial) {
    MORI_CHECK(partial->dim() == 4 && partial->size(0) >= 1, op, ": partial must be [splits, T, Hq, D] with at least one split, got ", describe(*partial));
    splits = partial->size(0);
    check_out(op, "partial", *partial, {splits, s.tokens, s.q_heads, s.dim}, {ScalarType::Float}, {&q, &k, &v, &ids, pointer(k_scale), pointer(v_scale)});
  }
  if (lse)
    check_out(op, "lse", *lse, {splits, s.tokens, s.q_heads}, {ScalarType::Float}, {&q, &k, &v, &ids, pointer(k_scale), pointer(v_scale), pointer(partial)});
  MORI_CHECK(splits >= 1, op, ": splits must be at least 1, got ", splits);
}

void merge(const Tensor& partial, const Tensor& lse, MaybeTensor gate, std::optional<ScalarType> out_dtype, MaybeTensor out) {
  constexpr const char* op = "qsa_merge";
  const MergeShape s = check_merge(partial, lse, gate);
  check_out_dtype(op, out_dtype, ScalarType::Float);
  if (out) check_out(op, "out", *out, {s.tokens, s.heads, s.dim}, kFloats, {&partial, &lse, pointer(gate)});
}

}  // namespace
}  // namespace mori::qsa

STABLE_TORCH_LIBRARY_IMPL(mori, CompositeExplicitAutograd, m) {
  m.impl("_kv_quantize_check", TORCH_BOX(&mori::qsa::kv_quantize));
  m.impl("_qsa_flash_check", TORCH_BOX(&mori::qsa::flash));
  m.impl("_qsa_attn_check", TORCH_BOX(&mori::qsa::attn));
  m.impl("_qsa_merge_check", TORCH_BOX(&mori::qsa::merge));
}
