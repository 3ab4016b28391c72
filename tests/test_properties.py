"""What holds for random shapes, strides and dtypes, and for random refused inputs (hypothesis)."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import cases
from tests.samples import (
    EXACT, LAYOUTS, OPS, Arguments, arguments, assert_same_bits, call, call_out, expected, operator, out_arguments, poisoned_like,
    tensors,
)  # fmt: skip

bounded = settings(max_examples=20, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
every_op = pytest.mark.parametrize("op", OPS)

@st.composite
def samples(draw, op: str, min_rows: int = 0) -> Arguments:
    """Arguments of `op` with random sizes; optional tensors may be missing, equivalent dtypes are exchanged."""
    kv_heads = draw(st.integers(1, 2))
    args = arguments(
        op,
        draw(st.integers(min_rows, 40)),
        draw(st.sampled_from(cases.DTYPES)),
        seed=draw(st.integers(0, 999)),
        n=draw(st.integers(8, 140)),
        k=32 * draw(st.integers(1, 12)),
        kv_heads=kv_heads,
        q_heads=kv_heads * draw(st.sampled_from((1, 2, 5, 12))),
        dim=draw(st.sampled_from((64, 128, 256))),
        cells=draw(st.integers(1, 80)),
        slots=draw(st.integers(1, 60)),
        hc=draw(st.sampled_from((1, 2, 4, 8))),
    )
    for name in ("bias", "gate", "norm_weight"):
        if name in args and draw(st.booleans()):
            del args[name]
    for name, value in tensors(args).items():
        if value.dtype == torch.float8_e8m0fnu and draw(st.booleans()):
            args[name] = value.view(torch.uint8)
    if "ids" in args and draw(st.booleans()):
        args["ids"] = args["ids"].long()
    if "k_scale" in args and draw(st.booleans()):
        dtype = draw(st.sampled_from((torch.float16, torch.bfloat16)))
        args = {**args, "k": (args["k"] / 50).to(dtype), "v": (args["v"] / 50).to(dtype), "k_scale": None, "v_scale": None}
    return args


def tolerance(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding: a few outputs may all meet it, unlike many, which RELATIVE_L2 is for."""
    return max(cases.RELATIVE_L2[dtype], torch.finfo(dtype).eps / 2)


@every_op
def test_results_are_the_references(op):
    @bounded
    @given(samples(op))
    def check(args: Arguments) -> None:
        results = call(op, args)
        for result, exact in zip(results, expected(op, args), strict=True):
            if op in EXACT:
                assert cases.same_bits(result, exact)
            else:
                finite = exact.isfinite()  # the log-sum-exp of no cells is -inf
                assert torch.equal(result[~finite].double(), exact[~finite])
                cases.assert_close(result[finite], exact[finite], tolerance(result.dtype))
        assert_same_bits(call(op, args), results)

    check()


@every_op
def test_results_do_not_depend_on_strides(op):
    @bounded
    @given(samples(op, min_rows=1), st.data())
    def check(args: Arguments, data: st.DataObject) -> None:
        for name, value in tensors(args).items():
            args[name] = LAYOUTS[data.draw(st.sampled_from(tuple(LAYOUTS)), label=name)](value)
        copies = {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in args.items()}
        assert_same_bits(call(op, args), call(op, copies))
        assert_same_bits(call_out(op, args), call(op, copies))

    check()


# --- refused inputs ---------------------------------------------------------------------------------------------------


def assert_refused(op: str, args: Arguments, bad: Arguments, names: list[str]) -> None:
    """Both overloads raise a ValueError that names one of `names`, and `out` is left alone."""
    pattern = rf"{op}: (.*\b)?({'|'.join(names)})\b"
    results = call(op, args)
    given_out, outs = out_arguments(op, {**args, **bad}, results)
    for function in (lambda: call(op, {**args, **bad}), lambda: operator(op, "out")(**given_out)):
        with pytest.raises(ValueError) as error:
            function()
        assert re.match(pattern, str(error.value)), f"{pattern!r} is not in {str(error.value)!r}"
    for out in outs:
        assert_same_bits((out,), (poisoned_like(out),))


@every_op
def test_a_wrong_dtype_is_refused_by_name(op):
    @bounded
    @given(samples(op, min_rows=1), st.data())
    def check(args: Arguments, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(tuple(tensors(args))))
        dtype = data.draw(st.sampled_from((torch.float64, torch.int16, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.bool)))
        if name in ("k", "v"):
            args = {**args, "k_scale": None, "v_scale": None, "k": args["k"].half(), "v": args["v"].half()}
        wrong = torch.zeros(args[name].shape, dtype=dtype)
        assert_refused(op, args, {name: wrong}, [name])
        with pytest.raises(ValueError, match=f"{name} must be .*, got {str(dtype).removeprefix('torch.')} "):
            call(op, {**args, name: wrong})

    check()


# Sizes that the other arguments do not determine, or not always: another N fits a partial block, another M the padding of
# packed scales, more query heads a single KV head.
FREE = {
    "x": (0,), "w": (0,), "codes": (0,), "a": (0,), "b": (0,), "q": (1,), "ids": (1,), "partial": (3,),
}  # fmt: skip


@pytest.mark.parametrize("op", [op for op in OPS if "pack" not in op])  # a packer takes scales of any size
def test_a_wrong_size_is_refused_by_name(op):
    @bounded
    @given(samples(op, min_rows=1), st.data())
    def check(args: Arguments, data: st.DataObject) -> None:
        determined = [(name, d) for name, t in tensors(args).items() for d in range(t.dim()) if d not in FREE.get(name, ())]
        name, dim = data.draw(st.sampled_from(determined))
        shape = list(args[name].shape)
        shape[dim] += 1
        assert_refused(op, args, {name: torch.zeros(shape, dtype=args[name].dtype)}, list(tensors(args)))

    check()


@every_op
def test_a_tensor_on_another_device_is_refused_by_name(op):
    """A meta tensor, such as a weight that was never loaded, reaches the fake kernel, not the real one."""
    args = arguments(op)
    first, *others = tensors(args)
    for name in others:
        assert_refused(op, args, {name: args[name].to("meta")}, [f"{name} must be on the same device as {first}"])


@every_op
def test_a_wrong_number_of_dimensions_is_refused_by_name(op):
    args = arguments(op)
    for name, value in tensors(args).items():
        if value.dim() != 2 or name not in ("x", "codes", "scale", "a"):  # those take any leading dimensions
            assert_refused(op, args, {name: value[None]}, list(tensors(args)))
        assert_refused(op, args, {name: value.new_zeros(())}, list(tensors(args)))


@every_op
def test_a_wrong_out_is_refused_by_name(op):
    args = arguments(op)
    given_out, outs = out_arguments(op, args, call(op, args))
    for name in [name for name in given_out if name not in args]:
        good = given_out[name]
        wide = torch.full((*good.shape[:-1], 2 * good.shape[-1]), 7).to(torch.uint8).to(good.dtype)
        for wrong, message in (
            (good.to(torch.float64), "must be .*, got float64"),
            (good[..., :-1].contiguous(), "must have shape"),
            (wide[..., ::2], "must be contiguous"),
        ):
            before = wrong.clone()
            with pytest.raises(ValueError, match=f"{op}: {name} {message}"):
                operator(op, "out")(**{**given_out, name: wrong})
            assert cases.same_bits(wrong, before)
    for out in outs:
        assert_same_bits((out,), (poisoned_like(out),))


@every_op
def test_an_out_that_shares_memory_with_an_input_is_refused(op):
    args = arguments(op)
    results = call(op, args)
    given_out, _ = out_arguments(op, args, results)
    out = next(name for name in given_out if name not in args)
    for name, value in tensors(args).items():
        room = max(value.nbytes, given_out[out].nbytes)
        shared = torch.zeros(room + (-room) % 8, dtype=torch.uint8)
        source = shared[: value.nbytes].view(value.dtype).view(value.shape)
        source.copy_(value)
        target = shared[: given_out[out].nbytes].view(given_out[out].dtype).view(given_out[out].shape)
        with pytest.raises(ValueError, match=f"{op}: {out} must not share memory with an input"):
            operator(op, "out")(**{**given_out, name: source, out: target})
        assert_same_bits((source,), (value,))


@pytest.mark.parametrize(
    ("op", "name", "value"),
    (
        ("mxfp8_quantize", "rounding", "ceil"), ("mxfp8_quantize_weight", "rounding", ""), ("mxfp8_linear", "rounding", "even"),
        ("mxfp8_dequantize", "out_dtype", torch.int8), ("mxfp8", "out_dtype", torch.float64), ("mxfp8_raw", "out_dtype", torch.int32),
        ("mxfp8_linear", "out_dtype", torch.float8_e4m3fn), ("scaled_gemm", "out_dtype", torch.bool),
        ("scaled_gemm", "quant", "int8"), ("gemm_ar", "quant", "mxfp4"), ("gemm_ar", "wire", "fp16"), ("gemm_ar", "group_name", "nobody"),
        ("qsa_flash", "sm_scale", float("nan")), ("qsa_flash", "out_dtype", torch.int8), ("qsa_attn", "splits", 0),
        ("qsa_attn", "sm_scale", float("inf")), ("qsa_merge", "out_dtype", torch.float64), ("q8_0_dequantize", "out_dtype", torch.int8),
        ("gr_down", "variant", "2_2"), ("gr_down", "eps", -1.0), ("gr_down", "hc", 0), ("gr_down", "hc", 5),
    ),
)  # fmt: skip
def test_a_wrong_option_is_refused_by_name(op, name, value):
    with pytest.raises(ValueError, match=rf"{op}: {name} must"):
        call(op, {**arguments(op), name: value})


@pytest.mark.parametrize("op", ("qsa_flash", "qsa_attn"))
def test_kv_scales_come_with_int8_and_only_then(op):
    args = arguments(op)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(ValueError, match=f"{op}: {name} is required when k and v are int8"):
            call(op, {**args, name: None})
        floats = {**args, "k": args["k"].half(), "v": args["v"].half(), "k_scale": None, "v_scale": None}
        with pytest.raises(ValueError, match=f"{op}: {name} must be None when k and v are floating point"):
            call(op, {**floats, name: args[name]})
