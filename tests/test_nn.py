"""Modules over the ops, against float64 formulas."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mori_ops
from mori_ops import reference
from mori_ops.nn import GatedResidualRead, Mxfp8Linear, quantize_linears_

from .cases import DTYPES, assert_close, relative_l2, same_bits


def random_linear(n: int, k: int, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Rows of very different size, so that a mixed-up block scale shows."""
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    linear.weight.data *= torch.exp2(torch.randint(-6, 7, (n, 1)))
    return linear.requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_the_product_of_the_quantised_operands(dtype, bias):
    torch.manual_seed(0)
    linear = random_linear(100, 96, bias=bias, dtype=dtype)
    x = torch.randn(2, 7, 96, dtype=dtype)
    codes, scale = reference.mxfp8_quantize_weight(linear.weight)
    result = Mxfp8Linear.from_linear(linear)(x)
    assert result.dtype == dtype
    assert_close(result, reference.mxfp8_linear(x, codes, scale, bias=linear.bias))


def test_linear_stays_within_mxfp8_of_the_float_layer():
    torch.manual_seed(1)
    linear, x = random_linear(130, 256), torch.randn(50, 256)
    assert relative_l2(Mxfp8Linear.from_linear(linear)(x), linear(x)) < 0.05
    assert relative_l2(Mxfp8Linear.from_linear(linear).dequantize(), linear.weight) < 0.04


def test_linear_survives_dtype_changes_copies_and_checkpoints():
    torch.manual_seed(2)
    layer, other = Mxfp8Linear.from_linear(random_linear(40, 64)), Mxfp8Linear.from_linear(random_linear(40, 64))
    weight = layer.dequantize()
    other.load_state_dict(layer.state_dict())
    for clone in (copy.deepcopy(layer).to(torch.bfloat16), copy.deepcopy(layer).half().float(), other):
        assert torch.equal(clone.dequantize(), weight)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert layer.to(torch.bfloat16)(x).dtype == torch.bfloat16


def test_rounding_reaches_weight_and_activations():
    torch.manual_seed(3)
    linear, x = random_linear(64, 64), torch.randn(5, 64)
    codes, scale = mori_ops.mxfp8_quantize_weight(linear.weight, rounding="floor")
    expected = mori_ops.mxfp8_linear(x, codes, scale, bias=linear.bias, rounding="floor")
    assert same_bits(Mxfp8Linear.from_linear(linear, rounding="floor")(x), expected)
    assert not same_bits(Mxfp8Linear.from_linear(linear)(x), expected)


def test_from_linear_refuses_what_mxfp8_cannot_hold():
    with pytest.raises(ValueError, match="multiple of 32"):
        Mxfp8Linear.from_linear(nn.Linear(40, 8))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 40))
        self.tied = self.body[0]
        self.odd = nn.Linear(40, 64)  # 40 is not a multiple of 32
        self.attention = nn.MultiheadAttention(64, 4)  # reads the weight of its own Linear subclass
        self.lm_head = nn.Linear(64, 10)


def test_quantize_linears_replaces_the_linears_it_names_and_no_other():
    model = Model()
    assert quantize_linears_(model, skip=("lm_head",)) == ["body.0", "body.2", "tied"]
    assert model.tied is model.body[0] and isinstance(model.tied, Mxfp8Linear) and isinstance(model.body[2], Mxfp8Linear)
    assert type(model.odd) is nn.Linear and type(model.lm_head) is nn.Linear
    x = torch.randn(3, 64)
    assert model.attention(x, x, x)[0].shape == (3, 64)
    assert quantize_linears_(model) == ["lm_head"]


def gated_residual(rank: int, hc: int, hidden: int, *, inject: bool, dtype: torch.dtype = torch.float32) -> tuple[GatedResidualRead, dict]:
    k = hc * hidden
    parts = {
        "down": torch.randn(rank, k) / k**0.5, "up": nn.Linear(rank, k, bias=False).requires_grad_(False),
        "norm_weight": 1 + torch.randn(k) / 4, "inject": torch.randn(hc, k) / k**0.5 if inject else None,
    }  # fmt: skip
    return GatedResidualRead(**parts, hc=hc).to(dtype), parts


def expected_read(x: torch.Tensor, down: torch.Tensor, up: nn.Linear, norm_weight: torch.Tensor, inject: torch.Tensor | None, hc: int):
    """The docstring's formula in float64, with the Q8_0 values of the weights."""
    x, q8_0 = x.double(), lambda w: reference.q8_0_dequantize(reference.q8_0_quantize(w))
    groups = x.unflatten(-1, (hc, -1))
    xn = (groups / (groups.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2) * norm_weight.double()
    gate = torch.sigmoid(F.silu(xn @ q8_0(down).T / hc) @ up.weight.double().T)
    mixed = (gate * xn).unflatten(-1, (hc, -1)).mean(-2)
    return mixed, None if inject is None else 2 * torch.sigmoid(xn @ q8_0(inject).T / hc)


@pytest.mark.parametrize("tokens", [(), (1,), (4,), (8,), (2, 33), (0,)])
@pytest.mark.parametrize("inject", [True, False])
def test_gated_residual_read_is_its_formula(tokens, inject):
    torch.manual_seed(4)
    module, parts = gated_residual(40, 4, 96, inject=inject)
    x = torch.randn(*tokens, 4 * 96) * torch.exp2(torch.randint(-4, 5, (*tokens, 1)))
    mixed, weights = module(x)
    expected_mixed, expected_weights = expected_read(x, **parts, hc=4)
    assert_close(mixed, expected_mixed)
    if inject:
        assert_close(weights, expected_weights)
    else:
        assert weights is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_residual_read_keeps_half_precision(dtype):
    torch.manual_seed(5)
    module, parts = gated_residual(32, 2, 64, inject=True, dtype=dtype)
    x = torch.randn(6, 128, dtype=dtype)
    for result, expected in zip(module(x), expected_read(x, **parts, hc=2)):
        assert result.dtype == dtype
        assert_close(result, expected, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", ["linear", "read"])
def test_modules_trace_as_one_graph(kind):
    """The eager backend checks tracing only; the ops' own tests compile them."""
    module = Mxfp8Linear.from_linear(nn.Linear(64, 48)) if kind == "linear" else gated_residual(32, 2, 32, inject=True)[0]
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (1, 2, 7):
        x = torch.randn(tokens, 64)
        torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
