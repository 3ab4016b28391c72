"""A small random qwen4_exp model on gr_down and qsa_flash: a prompt, then a 4-token verify step over its KV cache.

Compared with the untouched model twice: as it is (what quantisation costs), and with its residual weights and its KV cache
rounded to the same Q8_0 and int8 values, where only the order of float32 sums is left to differ.
"""

import copy
import time
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import DynamicCache

from mori_ops import reference
from mori_ops.demo.report import Check, at_least, at_most
from mori_ops.integrations.transformers import use_mori

PROMPT, VERIFY = 200, 4  # tokens; each attends to 64 selected cells and up to 3 more


def small_model() -> nn.Module:
    """Four layers, three of them linear attention and one sparse; random weights."""
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    torch.manual_seed(0)
    config = Qwen4ExpTextConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=4, hc_count=4, hc_lowrank=32,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=64, indexer_budget=64, indexer_compress_ratio=4,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
        linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
    )  # fmt: skip
    return Qwen4ExpForCausalLM(config).eval()


def round_residual_weights_(model: nn.Module) -> nn.Module:
    """Gives an untouched model the residual weights that use_mori's Q8_0 holds."""
    for name, weight in model.named_parameters():
        if name.endswith(("input_mix_weight_down.weight", "block_inject_weight.weight")):
            weight.data = torch.ops.mori.q8_0_dequantize(torch.ops.mori.q8_0_quantize(weight.data), out_dtype=weight.dtype)
    return model


class RoundedCache(DynamicCache):
    """A float KV cache with the values that int8 holds."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return super().update(self._round(key_states), self._round(value_states), layer_idx)

    @staticmethod
    def _round(x: Tensor) -> Tensor:
        return reference.kv_dequantize(*torch.ops.mori.kv_quantize(x)).to(x.dtype)


def prompt_and_verify(model: nn.Module, tokens: Tensor, cache: DynamicCache) -> tuple[list[Tensor], list[float]]:
    """Logits [1, tokens, vocabulary] and seconds of the prompt and of the verify step."""
    logits, seconds = [], []
    for part in tokens.split([PROMPT, VERIFY], dim=1):
        start = time.perf_counter()
        logits.append(model(part, cache=cache, use_cache=True).logits)
        seconds.append(time.perf_counter() - start)
    return logits, seconds


def relative_l2(result: Tensor, expected: Tensor) -> float:
    return ((result - expected).norm() / expected.norm()).item()


@torch.inference_mode()
def run(console: Console) -> list[Check]:
    if find_spec("transformers.models.qwen4_exp") is None:
        console.print("left out: needs transformers >= 5.24, which needs Python >= 3.11")
        return []
    model = small_model()
    rounded = round_residual_weights_(copy.deepcopy(model))
    tokens = torch.randint(model.config.vocab_size, (1, PROMPT + VERIFY))

    mori = use_mori(copy.deepcopy(model), linears=False)

    caches = [RoundedCache(config=model.config), DynamicCache(config=model.config), DynamicCache(config=model.config)]
    with console.status("running the rounded model, the untouched one, and mori's"):
        same_values, _ = prompt_and_verify(rounded, tokens, caches[0])
        untouched, seconds = prompt_and_verify(model, tokens, caches[1])
        mori(tokens)  # the first call is not timed either
        result, mori_seconds = prompt_and_verify(mori, tokens, caches[2])

    table = Table("tokens", "untouched", "rounded", "same top", "transformers", "mori", title_justify="left")
    table.title = "Logits: relative L2 to the untouched and the rounded model; time"
    checks = []
    for i, step in enumerate(("prompt", "verify")):
        error, rounding = relative_l2(result[i], untouched[i]), relative_l2(result[i], same_values[i])
        agreement = (result[i].argmax(-1) == untouched[i].argmax(-1)).float().mean().item()
        times = (f"{t[i] * 1e3:.0f} ms" for t in (seconds, mori_seconds))
        table.add_row(f"{step} {(PROMPT, VERIFY)[i]}", f"{error:.2e}", f"{rounding:.2e}", f"{agreement:.1%}", *times)
        checks += [
            # Measured 5e-3 and 5e-5 (an int8 code that rounds the other way); with one selected cell left out, 4e-2.
            at_most(f"qwen4_exp {step}: relative L2 to untouched", error, 2e-2),
            at_most(f"qwen4_exp {step}: relative L2 to rounded", rounding, 3e-4),
            at_least(f"qwen4_exp {step}: same top token", agreement, 0.95),
        ]
    console.print(table)
    kv = [sum(layer.keys.nbytes + layer.values.nbytes for layer in c.layers if hasattr(layer, "keys")) for c in caches[1:]]
    console.print(f"KV cache of {PROMPT + VERIFY} tokens: fp32 {kv[0] / 1e3:.0f} kB, int8 {kv[1] / 1e3:.0f} kB")
    return [*checks, at_most("qwen4_exp: KV cache bytes / fp32's", kv[1] / kv[0], 0.26)]
