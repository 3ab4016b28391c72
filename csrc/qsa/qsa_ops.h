// The functional and the .out form of each attention operator around a backend's run functions: checks, allocation, call.
// A backend is a struct with static quantize(shape, x, codes, scale), flash(inputs, gate, out), attn(inputs, partial, lse) and
// merge(shape, partial, lse, gate, out).
#pragma once

#include <tuple>

#include "qsa.h"

namespace mori::qsa {

using MaybeTensor = std::optional<Tensor>;

// The checked arguments that qsa_flash and qsa_attn share.
struct AttnTensors {
  AttnShape shape;
  const Tensor &q, &k, &v, &ids;
  const MaybeTensor &k_scale, &v_scale;
};

template <class Backend>
struct Ops {
  using Scale = std::optional<double>;

  static std::tuple<Tensor, Tensor> quantize(const Tensor& x) {
    const KvQuantizeShape shape = check_kv_quantize(x);
    Tensor codes = torch::stable::new_empty(x, shape.code_sizes, ScalarType::Char);
    Tensor scale = torch::stable::new_empty(x, shape.scale_sizes, ScalarType::Half);
    Backend::quantize(shape, x, codes, scale);
    return {codes, scale};
  }
  static void quantize_out(const Tensor& x, const Tensor& codes, const Tensor& scale) {
    const KvQuantizeShape shape = check_kv_quantize(x);
    check_out("kv_quantize", "codes", codes, shape.code_sizes, {ScalarType::Char}, {&x});
    check_out("kv_quantize", "scale", scale, shape.scale_sizes, {ScalarType::Half}, {&x, &codes});
    Backend::quantize(shape, x, codes, scale);
  }

  static Tensor flash(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, const MaybeTensor& k_scale, const MaybeTensor& v_scale,
                      const MaybeTensor& gate, Scale sm_scale, std::optional<ScalarType> out_dtype) {
    const AttnShape shape = check_attn(kFlash, q, k, v, ids, k_scale, v_scale, gate, sm_scale);
    const Tensor out = torch::stable::new_empty(q, sizes_of(q), check_out_dtype(kFlash, out_dtype, q.scalar_type()));
    Backend::flash({shape, q, k, v, ids, k_scale, v_scale}, gate, out);
    return out;
  }
  static void flash_out(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, const MaybeTensor& k_scale, const MaybeTensor& v_scale,
                        const MaybeTensor& gate, Scale sm_scale, const Tensor& out) {
    const AttnShape shape = check_attn(kFlash, q, k, v, ids, k_scale, v_scale, gate, sm_scale);
    check_out(kFlash, "out", out, sizes_of(q), {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half},
              {&q, &k, &v, &ids, pointer(k_scale), pointer(v_scale), pointer(gate)});
    Backend::flash({shape, q, k, v, ids, k_scale, v_scale}, gate, out);
  }

  static std::tuple<Tensor, Tensor> attn(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, const MaybeTensor& k_scale,
                                         const MaybeTensor& v_scale, Scale sm_scale, int64_t splits) {
    const AttnShape shape = check_attn(kAttn, q, k, v, ids, k_scale, v_scale, std::nullopt, sm_scale);
    MORI_CHECK(splits >= 1, kAttn, ": splits must be at least 1, got ", splits);
    Tensor partial = torch::stable::new_empty(q, Sizes{splits, shape.tokens, shape.q_heads, shape.dim}, ScalarType::Float);
    Tensor lse = torch::stable::new_empty(q, Sizes{splits, shape.tokens, shape.q_heads}, ScalarType::Float);
    Backend::attn({shape, q, k, v, ids, k_scale, v_scale}, partial, lse);
    return {partial, lse};
  }
  static void attn_out(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& ids, const MaybeTensor& k_scale, const MaybeTensor& v_scale,
                       Scale sm_scale, const Tensor& partial, const Tensor& lse) {
    const AttnShape s = check_attn(kAttn, q, k, v, ids, k_scale, v_scale, std::nullopt, sm_scale);
    MORI_CHECK(partial.dim() == 4 && partial.size(0) >= 1, kAttn, ": partial must be [splits, T, Hq, D] with at least one split, got ",
               describe(partial));
    const Tensor *ks = pointer(k_scale), *vs = pointer(v_scale);
    check_out(kAttn, "partial", partial, {partial.size(0), s.tokens, s.q_heads, s.dim}, {ScalarType::Float}, {&q, &k, &v, &ids, ks, vs});
    check_out(kAttn, "lse", lse, {partial.size(0), s.tokens, s.q_heads}, {ScalarType::Float}, {&q, &k, &v, &ids, ks, vs, &partial});
    Backend::attn({s, q, k, v, ids, k_scale, v_scale}, partial, lse);
  }

  static Tensor merge(const Tensor& partial, const Tensor& lse, const MaybeTensor& gate, std::optional<ScalarType> out_dtype) {
    const MergeShape s = check_merge(partial, lse, gate);
    const Tensor out = torch::stable::new_empty(partial, Sizes{s.tokens, s.heads, s.dim}, check_out_dtype("qsa_merge", out_dtype, ScalarType::Float));
    Backend::merge(s, partial, lse, gate, out);
    return out;
  }
  static void merge_out(const Tensor& partial, const Tensor& lse, const MaybeTensor& gate, const Tensor& out) {
    const MergeShape s = check_merge(partial, lse, gate);
    check_out("qsa_merge", "out", out, {s.tokens, s.heads, s.dim}, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half},
              {&partial, &lse, pointer(gate)});
    Backend::merge(s, partial, lse, gate, out);
  }

 private:
  static constexpr const char *kFlash = "qsa_flash", *kAttn = "qsa_attn";
  static const Tensor* pointer(const MaybeTensor& t) { return t ? &*t : nullptr; }
};

}  // namespace mori::qsa

// Registers every operator of the family; goes inside a backend's STABLE_TORCH_LIBRARY_IMPL block (TORCH_BOX wants names).
#define MORI_REGISTER_QSA(m, Backend)                           \
  using MoriQsa = ::mori::qsa::Ops<Backend>;                    \
  m.impl("kv_quantize", TORCH_BOX(&MoriQsa::quantize));         \
  m.impl("kv_quantize.out", TORCH_BOX(&MoriQsa::quantize_out)); \
  m.impl("qsa_flash", TORCH_BOX(&MoriQsa::flash));              \
  m.impl("qsa_flash.out", TORCH_BOX(&MoriQsa::flash_out));      \
  m.impl("qsa_attn", TORCH_BOX(&MoriQsa::attn));                \
  m.impl("qsa_attn.out", TORCH_BOX(&MoriQsa::attn_out));        \
  m.impl("qsa_merge", TORCH_BOX(&MoriQsa::merge));              \
  m.impl("qsa_merge.out", TORCH_BOX(&MoriQsa::merge_out))
