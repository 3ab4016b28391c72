"""Hugging Face transformers models on mori ops."""

from collections.abc import Collection

from torch import nn

from mori_ops.nn import quantize_linears_


def use_mori(
    model: nn.Module,
    *,
    linears: bool = True,
    gated_residual: bool = True,
    sparse_attention: bool = True,
    skip: Collection[str] = ("lm_head",),
) -> nn.Module:
    """Switches a transformers model to mori ops, in place, and returns it.

    linears           every nn.Linear of any model becomes Mxfp8Linear (MXFP8 weights; activations quantised on the fly),
                      except where a part of its dotted name is in `skip`
    gated_residual    qwen4_exp: the residual reads become GatedResidualRead (Q8_0 weights, gr_down)
    sparse_attention  qwen4_exp: attention over selected cells runs through qsa_flash, and every KV cache that
                      transformers passes in holds int8 codes and fp16 scales

    The last two need transformers >= 5.24 and leave models of other types as they are. Call it before the first forward
    pass: a cache that is already filled holds float keys.

        model = use_mori(AutoModel.from_pretrained(path))
    """
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    if model_type.startswith("qwen4_exp") and (gated_residual or sparse_attention):
        from mori_ops.integrations import qwen4_exp

        if gated_residual:
            qwen4_exp.use_gr_down_(model)
        if sparse_attention:
            qwen4_exp.use_qsa_flash_(model)
    if linears:
        quantize_linears_(model, skip=skip)
    return model
