"""transformers models on mori ops, against transformers' own modules in float32.

The oracle is the untouched model with its residual weights rounded to Q8_0 and its KV cache to int8: then only the order of
float32 sums differs.
"""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers.models.qwen4_exp", reason="needs transformers >= 5.24")

from transformers import BertConfig, BertModel, DynamicCache, StaticCache

from mori_ops.demo.qwen4_exp import RoundedCache, round_residual_weights_, small_model
from mori_ops.integrations.qwen4_exp import QsaAttention, select_cells
from mori_ops.integrations.transformers import use_mori
from mori_ops.nn import GatedResidualRead, Mxfp8Linear

from .cases import assert_close, relative_l2

PROMPT = 88  # more than the 64 + 3 cells that a token may select


@pytest.fixture(scope="module")
def model():
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # all 0 or 1 in a fresh model, which would hide a forgotten norm weight
            parameter.data += torch.randn(parameter.shape, generator=generator) / 4
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def rounded(model):
    return round_residual_weights_(copy.deepcopy(model))


@pytest.fixture(scope="module")
def mori(model):
    return use_mori(copy.deepcopy(model), linears=False)


@pytest.fixture
def tokens(model):
    return torch.randint(model.config.vocab_size, (2, PROMPT + 4), generator=torch.Generator().manual_seed(1))


def left_padded(tokens: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    return mask


def test_use_mori_replaces_what_it_says(model):
    both = use_mori(copy.deepcopy(model))
    kinds = {type(module).__name__ for module in both.modules()}
    assert "Qwen4ExpTextGatedResidual" not in kinds and "Qwen4ExpTextAttention" not in kinds
    assert sum(isinstance(m, GatedResidualRead) for m in both.modules()) == 2 * model.config.num_hidden_layers + 1
    assert [name for name, m in both.named_modules() if type(m) is nn.Linear] == ["lm_head"]
    none = use_mori(copy.deepcopy(model), linears=False, gated_residual=False, sparse_attention=False)
    assert [type(m) for m in none.modules()] == [type(m) for m in model.modules()]


def test_every_linear_of_another_model_becomes_mxfp8():
    config = BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96)
    torch.manual_seed(2)
    bert = BertModel(config).eval().requires_grad_(False)
    tokens = torch.randint(50, (3, 11))
    expected, linears = bert(tokens).last_hidden_state, sum(type(m) is nn.Linear for m in bert.modules())
    use_mori(bert)
    assert sum(isinstance(m, Mxfp8Linear) for m in bert.modules()) == linears > 0
    assert relative_l2(bert(tokens).last_hidden_state, expected) < 0.1


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 37)])
def test_gated_residual_read_matches_transformers(rounded, mori, shape):
    x = torch.randn(*shape, rounded.config.hc_count * rounded.config.hidden_size)
    expected, result = rounded.model.layers[0].attn_hyper_connection(x), mori.model.layers[0].attn_hyper_connection(x)
    assert result[1] is x
    assert_close(result[0], expected[0])
    assert_close(result[2], expected[2])
    assert_close(mori.model.hyper_connection_mixer(x), rounded.model.hyper_connection_mixer(x))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])  # bool and additive masks
def test_selected_cells_are_those_of_transformers(model, tokens, implementation, padded):
    attention = next(m for m in model.modules() if type(m).__name__ == "Qwen4ExpTextAttention")
    calls = []
    hook = attention.indexer.register_forward_hook(lambda indexer, args, mask: calls.append((args, mask)))
    model.set_attn_implementation(implementation)
    model(tokens, attention_mask=left_padded(tokens) if padded else None)
    hook.remove()
    model.set_attn_implementation("sdpa")
    [((hidden_states, position_embeddings, attention_mask, _), expected)] = calls

    ids = select_cells(attention.indexer, hidden_states, position_embeddings, attention_mask, None)
    assert ids.dtype == torch.int32 and ids.shape[-1] == model.config.indexer_budget + 3
    used = ids >= 0
    assert (used[..., 1:] <= used[..., :-1]).all(), "empty slots come last"
    assert (ids[..., 1:] > ids[..., :-1])[used[..., 1:]].all(), "ascending"
    mask = torch.zeros(*ids.shape[:2], tokens.shape[1] + 1, dtype=torch.bool)
    mask.scatter_(-1, ids.masked_fill(~used, tokens.shape[1]).long(), True)
    assert torch.equal(mask[..., :-1], expected[:, 0])
    assert expected[:, 0, -1].sum(-1).max() < tokens.shape[1], "the case selects"


def test_packed_sequences_are_refused(mori, tokens):
    positions = torch.cat([torch.arange(40), torch.arange(PROMPT + 4 - 40)]).expand(2, -1)
    with pytest.raises(ValueError, match="packed sequences"):
        mori(tokens, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("padded", [False, True])
def test_prompt_and_verify_logits_match_transformers(rounded, mori, tokens, padded):
    mask = left_padded(tokens) if padded else torch.ones_like(tokens)
    real = mask.bool()
    caches = [RoundedCache(config=mori.config), DynamicCache(config=mori.config)]
    logits = []
    for model, cache in zip((rounded, mori), caches):
        prompt = model(tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], cache=cache, use_cache=True).logits
        verify = model(tokens[:, PROMPT:], attention_mask=mask, cache=cache, use_cache=True).logits
        logits.append(torch.cat([prompt, verify], 1)[real])
    assert_close(logits[1], logits[0], 1e-4)
    layer = mori.config.layer_types.index("indexed_attention")
    assert caches[1].layers[layer].keys.dtype == torch.int8 and caches[1].layers[layer].values.dtype == torch.float16


def test_logits_without_a_cache_are_those_with_one(mori, tokens):
    assert torch.equal(mori(tokens, use_cache=False).logits, mori(tokens, use_cache=True).logits)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_attention_layer_verifies_rejects_and_goes_on(rounded, mori, tokens, kind):
    """A prompt, four drafted tokens of which two are dropped from the cache, three more: as without the detour."""
    config = mori.config
    index = config.layer_types.index("indexed_attention")
    layers = [model.model.layers[index].self_attn for model in (rounded, mori)]
    assert isinstance(layers[1], QsaAttention)
    x, drafted = torch.randn(2, 95, config.hidden_size), torch.randn(2, 2, config.hidden_size)
    cos_sin = mori.model.rotary_emb(x, torch.arange(95).view(1, 1, -1).expand(3, 2, -1))

    def run(layer, cache, states, start):
        end = start + states.shape[1]
        cells = cache.get_mask_sizes(states.shape[1], index)[0]
        mask = (torch.arange(cells) <= torch.arange(start, end)[:, None]).expand(2, 1, -1, -1)
        return layer(states, tuple(t[:, :end] for t in cos_sin), mask, cache)[0]

    cache = StaticCache(config=config, max_cache_len=128) if kind == "static" else DynamicCache(config=config)
    result = [run(layers[1], cache, x[:, :90], 0), run(layers[1], cache, torch.cat([x[:, 90:92], drafted], 1), 90)[:, :2]]
    cache.layers[index].crop(-2)
    result.append(run(layers[1], cache, x[:, 92:], 92))
    expected = run(layers[0], RoundedCache(config=config), x, 0)
    assert_close(torch.cat(result, 1), expected, 1e-5)


def test_generate_gives_the_tokens_of_the_rounded_model(rounded, mori, tokens):
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    prompt = tokens[:, :PROMPT]
    expected = rounded.generate(prompt, cache=RoundedCache(config=mori.config), **settings)
    assert torch.equal(mori.generate(prompt, **settings), expected)


def test_half_precision_model_runs(model, tokens):
    half = use_mori(copy.deepcopy(model).to(torch.bfloat16))
    logits = half(tokens).logits
    assert logits.dtype == torch.bfloat16
    assert relative_l2(logits, model(tokens).logits) < 0.2
