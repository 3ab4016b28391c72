// Every operator's schema, once. Kernels register themselves at the end of their backend's file.
// `out_dtype=None` and `sm_scale=None` stand for the defaults written in mori_ops/ops.py. `_<op>_check` is an operator's argument check
// alone, for the operators whose launcher is in Python (mori_ops/distributed.py, mori_ops/mps.py).
#include "common/check.h"

STABLE_TORCH_LIBRARY(mori, m) {
  // MXFP8 quantisation (csrc/mxfp8/quantize_*)
  m.def("mxfp8_quantize(Tensor x, *, str rounding=\"rceil\") -> (Tensor, Tensor)");
  m.def("mxfp8_quantize.out(Tensor x, *, str rounding=\"rceil\", Tensor(a!) codes, Tensor(b!) scale) -> ()");
  m.def("mxfp8_quantize_weight(Tensor w, *, str rounding=\"rceil\") -> (Tensor, Tensor)");
  m.def("mxfp8_quantize_weight.out(Tensor w, *, str rounding=\"rceil\", Tensor(a!) codes, Tensor(b!) scale) -> ()");
  m.def("mxfp8_dequantize(Tensor codes, Tensor scale, *, ScalarType? out_dtype=None) -> Tensor");
  m.def("mxfp8_dequantize.out(Tensor codes, Tensor scale, *, Tensor(a!) out) -> ()");
  m.def("mxfp8_pack_a_scale(Tensor scale) -> Tensor");
  m.def("mxfp8_pack_a_scale.out(Tensor scale, *, Tensor(a!) out) -> ()");
  m.def("mxfp8_pack_b_scale(Tensor scale) -> Tensor");
  m.def("mxfp8_pack_b_scale.out(Tensor scale, *, Tensor(a!) out) -> ()");

  // GEMMs (csrc/mxfp8/mxfp8_*)
  m.def("mxfp8(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, *, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor");
  m.def("mxfp8.out(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, *, Tensor? bias=None, Tensor(a!) out) -> ()");
  m.def("mxfp8_raw(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, *, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor");
  m.def("mxfp8_raw.out(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, *, Tensor? bias=None, Tensor(a!) out) -> ()");
  m.def("mxfp8_linear(Tensor x, Tensor b, Tensor b_scale, *, Tensor? bias=None, str rounding=\"rceil\", ScalarType? out_dtype=None) -> Tensor");
  m.def("mxfp8_linear.out(Tensor x, Tensor b, Tensor b_scale, *, Tensor? bias=None, str rounding=\"rceil\", Tensor(a!) out) -> ()");
  m.def("scaled_gemm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, str quant, *, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor");
  m.def("scaled_gemm.out(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, str quant, *, Tensor? bias=None, Tensor(a!) out) -> ()");

  // GEMM with a tensor-parallel all-reduce (mori_ops/distributed.py)
  m.def("gemm_ar(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, str quant, str group_name, *, Tensor? bias=None, ScalarType? out_dtype=None, str wire=\"bf16\") -> Tensor");
  m.def("gemm_ar.out(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, str quant, str group_name, *, Tensor? bias=None, str wire=\"bf16\", Tensor(a!) out) -> ()");
  m.def("_gemm_ar_check(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, str quant, Tensor? bias, str wire, ScalarType? out_dtype, Tensor? out) -> ()");
  m.def("_gemm_ar_prepare(Tensor like) -> ()");
  m.def("_gemm_ar_symmetric(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, str quant, Tensor? bias, str wire, str algorithm, int chunk_rows, int span_chunks, int rank, int[] workspaces, int[] layout, int failure, float timeout, int[] side_streams, *, Tensor(a!) out) -> ()");

  // Attention over selected cells (csrc/qsa/*)
  m.def("kv_quantize(Tensor x) -> (Tensor, Tensor)");
  m.def("kv_quantize.out(Tensor x, *, Tensor(a!) codes, Tensor(b!) scale) -> ()");
  m.def("qsa_flash(Tensor q, Tensor k, Tensor v, Tensor ids, *, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? gate=None, float? sm_scale=None, ScalarType? out_dtype=None) -> Tensor");
  m.def("qsa_flash.out(Tensor q, Tensor k, Tensor v, Tensor ids, *, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? gate=None, float? sm_scale=None, Tensor(a!) out) -> ()");
  m.def("qsa_attn(Tensor q, Tensor k, Tensor v, Tensor ids, *, Tensor? k_scale=None, Tensor? v_scale=None, float? sm_scale=None, int splits=4) -> (Tensor, Tensor)");
  m.def("qsa_attn.out(Tensor q, Tensor k, Tensor v, Tensor ids, *, Tensor? k_scale=None, Tensor? v_scale=None, float? sm_scale=None, Tensor(a!) partial, Tensor(b!) lse) -> ()");
  m.def("qsa_merge(Tensor partial, Tensor lse, *, Tensor? gate=None, ScalarType? out_dtype=None) -> Tensor");
  m.def("qsa_merge.out(Tensor partial, Tensor lse, *, Tensor? gate=None, Tensor(a!) out) -> ()");

  m.def("_kv_quantize_check(Tensor x, Tensor? codes, Tensor? scale) -> ()");
  m.def("_qsa_flash_check(Tensor q, Tensor k, Tensor v, Tensor ids, Tensor? k_scale, Tensor? v_scale, Tensor? gate, float? sm_scale, ScalarType? out_dtype, Tensor? out) -> ()");
  m.def("_qsa_attn_check(Tensor q, Tensor k, Tensor v, Tensor ids, Tensor? k_scale, Tensor? v_scale, float? sm_scale, int splits, Tensor? partial, Tensor? lse) -> ()");
  m.def("_qsa_merge_check(Tensor partial, Tensor lse, Tensor? gate, ScalarType? out_dtype, Tensor? out) -> ()");

  // Q8_0 projection for verify windows (csrc/gr/*)
  m.def("q8_0_quantize(Tensor w) -> Tensor");
  m.def("q8_0_quantize.out(Tensor w, *, Tensor(a!) out) -> ()");
  m.def("q8_0_dequantize(Tensor w, *, ScalarType? out_dtype=None) -> Tensor");
  m.def("q8_0_dequantize.out(Tensor w, *, Tensor(a!) out) -> ()");
  m.def("gr_down(Tensor x, Tensor w, *, Tensor? norm_weight=None, float eps=1e-6, int hc=4, str variant=\"auto\") -> Tensor");
  m.def("gr_down.out(Tensor x, Tensor w, *, Tensor? norm_weight=None, float eps=1e-6, int hc=4, str variant=\"auto\", Tensor(a!) out) -> ()");
  m.def("_q8_0_quantize_check(Tensor w, Tensor? out) -> ()");
  m.def("_q8_0_dequantize_check(Tensor w, ScalarType? out_dtype, Tensor? out) -> ()");
  m.def("_gr_down_check(Tensor x, Tensor w, Tensor? norm_weight, float eps, int hc, str variant, Tensor? out) -> ()");

  // About the library itself (csrc/common/route.cpp)
  m.def("build_info() -> str");
  m.def("_route(str op, str device, int[] dims) -> str");
}
