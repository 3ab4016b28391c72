"""transformers' qwen4_exp on mori ops: gated residual reads through gr_down, sparse attention through qsa_flash."""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

from mori_ops.nn import GatedResidualRead


class GatedResidual(GatedResidualRead):
    """GatedResidualRead with the weights and the return value of transformers' Qwen4ExpTextGatedResidual."""

    def __init__(self, module: hf.Qwen4ExpTextGatedResidual):
        inject = module.block_inject_weight
        super().__init__(
            module.input_mix_weight_down.weight,
            module.input_mix_weight_up,
            1 + module.hc_norm.weight.float(),
            inject=None if inject is None else inject.weight,
            hc=module.hc_count,
            eps=module.hc_norm.eps,
        )

    def forward(self, hyper_input: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        mixed, inject = super().forward(hyper_input)
        return mixed if inject is None else (mixed, hyper_input, inject)


def use_gr_down_(model: nn.Module) -> None:
    """Replaces, in place, every gated residual read of the model; its down and inject weights become Q8_0."""
    for name, module in list(model.named_modules()):
        if isinstance(module, hf.Qwen4ExpTextGatedResidual):
            model.set_submodule(name, GatedResidual(module))


class QsaAttention(hf.Qwen4ExpTextAttention):
    """transformers' attention layer, reading the selected cells of an int8 KV cache instead of masking a dense product.

    Any transformers cache works as it is (growing, cropping, reordering): it is handed int8 codes [B, 2, T, Hkv * D] as
    "keys" and their fp16 scales [B, 2, T, Hkv * D / 64] as "values", where index 0 of the second dimension is K and 1 is V.
    """

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        batch, tokens, _ = hidden_states.shape
        ids = select_cells(self.indexer, hidden_states, position_embeddings, attention_mask, cache)
        per_head = (batch, tokens, -1, self.head_dim)
        q, gate = self.q_proj(hidden_states).view(batch, tokens, -1, 2 * self.head_dim).chunk(2, dim=-1)
        k, v = self.k_proj(hidden_states).view(per_head), self.v_proj(hidden_states).view(per_head)
        cos, sin = (x[:, -tokens:] for x in position_embeddings)  # they cover the cached positions too
        q, k = hf.apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), cos, sin, unsqueeze_dim=2)

        codes, scale = (x.flatten(-2) for x in torch.ops.mori.kv_quantize(torch.stack([k, v], dim=1)))
        if cache is not None:
            codes, scale = cache.update(codes, scale, self.layer_idx)

        # One call for the whole batch: all sequences' K and V lie in one buffer, each V one cache length behind its K.
        length = codes.shape[2]
        codes, scale = codes.reshape(-1, *k.shape[2:]), scale.reshape(-1, k.shape[2], self.head_dim // 64)
        first = torch.arange(batch, dtype=ids.dtype, device=ids.device).view(-1, 1, 1) * (2 * length)
        out = torch.ops.mori.qsa_flash(
            q.flatten(0, 1),
            codes[:-length],
            codes[length:],
            torch.where(ids < 0, ids, ids + first).flatten(0, 1),
            k_scale=scale[:-length],
            v_scale=scale[length:],
            gate=gate.flatten(0, 1),
            sm_scale=self.scaling,
        )
        return self.o_proj(out.view(batch, tokens, -1)), None


def use_qsa_flash_(model: nn.Module) -> None:
    """Makes, in place, every sparse attention layer of the model a QsaAttention (the same parameters, another forward)."""
    for module in model.modules():
        if isinstance(module, hf.Qwen4ExpTextAttention):
            module.__class__ = QsaAttention


def select_cells(
    indexer: hf.Qwen4ExpTextQSAIndexer,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    cache: Cache | None,
) -> Tensor:
    """The cells each token attends to, int32 [B, T, S], ascending, then -1: what transformers' indexer selects, without its
    loop over tokens. S = indexer_budget + indexer_compress_ratio - 1, less while the context is shorter.

    Cells form blocks of `ratio` in the order of their sequence. A token takes the best-scoring of its complete blocks and
    its incomplete last block; equal scores are ordered as torch.topk does. attention_mask [B, 1, T, cells], bool or
    additive, must be causal up to padding.
    """
    tokens, ratio = hidden_states.shape[1], indexer.compress_ratio
    cos, sin = position_embeddings
    q, keys = indexer.index_qk_proj(hidden_states).unflatten(-1, (-1, indexer.index_head_dim)).tensor_split([indexer.index_n_heads], dim=2)
    q = hf.apply_rotary_pos_emb(indexer.q_layernorm(q), cos=cos[:, -tokens:], sin=sin[:, -tokens:], unsqueeze_dim=2)
    keys = keys.squeeze(2)
    if cache is not None:
        keys = cache.update_indexer(keys, indexer.layer_idx)

    visible = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]
    count = visible.sum(-1)  # [B, T]
    cells = sequence_order(visible, count)[:, : cos.shape[1]]  # [B, cells], cut to what a static cache has filled

    blocks = cells.shape[1] // ratio
    members = cells[:, : blocks * ratio]
    batch = torch.arange(len(cells), device=cells.device)
    pooled = keys[batch[:, None], members].unflatten(1, (blocks, ratio)).float().mean(2).to(keys.dtype)
    starts = batch[:, None], members[:, ::ratio]
    block_keys = hf.apply_rotary_pos_emb(indexer.k_layernorm(pooled).unsqueeze(2), cos=cos[starts], sin=sin[starts], unsqueeze_dim=2)
    block_keys = block_keys.squeeze(2).float().mT
    scores = sum(torch.relu(head @ block_keys) for head in q.float().unbind(2))  # [B, T, blocks]

    complete = (count // ratio).unsqueeze(-1)
    scores.masked_fill_(torch.arange(blocks, device=cells.device) >= complete, -torch.inf)
    best = scores.topk(min(indexer.block_topk, blocks), sorted=False)
    chosen = torch.cat([best.indices.masked_fill(best.values == -torch.inf, blocks + 1), complete], dim=-1).sort(-1).values
    slots = (chosen.unsqueeze(-1) * ratio + torch.arange(ratio, device=cells.device)).flatten(-2)[..., :-1]
    ids = cells[batch[:, None, None], slots.clamp(max=cells.shape[1] - 1)]
    return ids.masked_fill(slots >= count.unsqueeze(-1), -1).int()


def sequence_order(visible: Tensor, count: Tensor) -> Tensor:
    """Per sequence its cells in order, padding last, int64 [B, cells]: each token sees the first `count` [B, T] of them."""
    seen = visible.any(1)
    rank = seen.cumsum(-1)
    last = (visible * torch.arange(visible.shape[-1], device=visible.device)).amax(-1)
    if not torch.equal(rank.gather(-1, last).where(count > 0, 0), count):
        raise ValueError("attention_mask must be causal up to padding (packed sequences are not supported)")
    return (~seen).int().argsort(dim=-1, stable=True)
