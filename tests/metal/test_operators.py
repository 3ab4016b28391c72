"""What holds for every Metal operator: the reference's values or bits, the same again, .out, layouts, empty calls, a clean checker."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mori_ops import mps
from tests import cases
from tests.metal.device import DEVICE, emulated_only, gpu, metal_operators, needs_metal, on_device, settings  # noqa: F401
from tests.samples import EXACT, LAYOUTS, Arguments, arguments, call, expected, map_tensors, operator, out_arguments

pytestmark = needs_metal
OPS = tuple(name for name in mps.KERNELS if not name.endswith(".out"))
# Attention: operands of fp16 (codes times scale, weights), sums of fp32. Few values of a narrow type may be half an ulp off.
ATTENTION = {torch.float32: 6e-4, torch.float16: 8e-4, torch.bfloat16: 5e-3}


def assert_right(op: str, results: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for result, want in zip(results, wanted, strict=True):
        if op in EXACT:
            assert cases.same_bits(result.cpu(), want.to(result.dtype))
        else:
            cases.assert_close(result.cpu(), want, ATTENTION[result.dtype] if op in ("qsa_flash", "qsa_attn") else None)


def call_out(op: str, args: Arguments, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    given, outs = out_arguments(op, args, tuple(r.cpu() for r in results))
    given = map_tensors(on_device, given)
    operator(op, "out")(**given)
    return tuple(given[a.name] for a in operator(op, "out")._schema.arguments if a.alias_info is not None)


def finite_sample(op: str, rows: int, dtype: torch.dtype, seed: int) -> Arguments:
    args = arguments(op, rows, dtype, seed=seed)
    if op == "qsa_attn":
        args["ids"][:, 0] = args["ids"][:, -1] = args["ids"][:, 4] = 3  # no run without a cell: -inf is no close value
    return args


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_results_match_the_reference_and_repeat(gpu: str, op: str, dtype: torch.dtype) -> None:  # noqa: F811
    for rows in (1, 8, 33):
        args = finite_sample(op, rows, dtype, seed=rows)
        on = map_tensors(on_device, args)
        results = call(op, on)
        assert_right(op, results, expected(op, args))
        for others in (call(op, on), call_out(op, args, results)):
            assert all(cases.same_bits(a, b) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
@pytest.mark.parametrize("op", OPS)
def test_s7_s9_views_give_the_bits_of_their_dense_copies(op: str, layout: str) -> None:
    args = map_tensors(lambda t: LAYOUTS[layout](t).to(DEVICE), arguments(op, 6, torch.float16))
    results = call(op, args)
    for result, again in zip(results, call(op, map_tensors(lambda t: t.clone(memory_format=torch.contiguous_format), args)), strict=True):
        assert cases.same_bits(result, again)


def shifted(t: Tensor) -> Tensor:
    """The same values one element into their storage: dense, and off every vector."""
    storage = torch.cat([t.new_zeros(1), t.flatten()])
    return storage[1:].view(t.shape)


@pytest.mark.parametrize("op", OPS)
def test_misaligned_inputs_and_outputs_give_the_same_bits(op: str) -> None:
    args = map_tensors(on_device, arguments(op, 6, torch.float16))
    results = call(op, args)
    given, _ = out_arguments(op, map_tensors(shifted, args), tuple(r.cpu() for r in results))
    names = [a.name for a in operator(op, "out")._schema.arguments if a.alias_info is not None]
    given |= {name: shifted(on_device(given[name])) for name in names}
    operator(op, "out")(**given)
    assert all(cases.same_bits(given[name], result) for name, result in zip(names, results, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_s3_no_rows_then_some(gpu: str, op: str) -> None:  # noqa: F811
    args = finite_sample(op, 0, torch.float16, seed=0)
    for result, want in zip(call(op, map_tensors(on_device, args)), expected(op, args), strict=True):
        assert result.shape == want.shape and result.numel() == 0
    args = finite_sample(op, 2, torch.float16, seed=0)
    assert_right(op, call(op, map_tensors(on_device, args)), expected(op, args))


@emulated_only
@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("op", OPS)
def test_the_checker_finds_no_race_no_stray_access_and_no_undefined_arithmetic(gpu: str, op: str, order: str) -> None:  # noqa: F811
    args = finite_sample(op, 9, torch.float16, seed=4)
    results = call(op, args)
    with settings(checked=True, order=order):
        assert all(cases.same_bits(a, b) for a, b in zip(results, call(op, args), strict=True))


def test_s2_more_than_65535_rows() -> None:
    x = torch.randn(65537, 64, generator=torch.Generator().manual_seed(0))
    for op, name in (("kv_quantize", "x"), ("q8_0_quantize", "w")):
        results = call(op, {name: x.to(DEVICE)})
        for result, want in zip(results, expected(op, {name: x[-3:]}), strict=True):
            assert cases.same_bits(result[-3:].cpu(), want)
