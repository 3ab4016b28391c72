"""The operators as citizens of torch: tracing, export, AOTInductor, inference mode, devices, routes.

What users reported about compilation, autocast and autograd is in tests/test_public_reports.py (I*, P*).
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import mori_ops
from mori_ops import _registrations
from mori_ops.routes import DIMENSIONS
from tests import cases
from tests.samples import (
    LAYOUTS, OPS, Arguments, Call, arguments, assert_same_bits, call, call_out, map_tensors, operator, out_arguments, tensors,
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def metadata(results: tuple[Tensor, ...]) -> list[tuple]:
    return [(t.shape, t.stride(), t.dtype, t.storage_offset()) for t in results]


# --- tracing ----------------------------------------------------------------------------------------------------------


def test_every_operator_has_a_sample():
    assert set(OPS) == set(_registrations.OPS)


def opcheck(overload, args: Arguments) -> None:
    """torch.library.opcheck. torch 2.13 cannot compare float8 arguments before and after a call (its test_schema);
    test_inputs_are_not_written_and_results_have_their_own_memory does that for every operator."""
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(t.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) for t in tensors(args).values()):
        utils.append("test_schema")
    torch.library.opcheck(overload, (), args, test_utils=utils)


@pytest.mark.parametrize("layout", ("contiguous", "transposed", "sliced"))
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, layout):
    opcheck(operator(op), map_tensors(LAYOUTS[layout], arguments(op)))


@pytest.mark.parametrize("op", OPS)
def test_opcheck_of_one_row(op):
    opcheck(operator(op), arguments(op, rows=1))


@pytest.mark.parametrize("op", OPS)
def test_opcheck_of_the_out_overload(op):
    opcheck(operator(op, "out"), out_arguments(op, arguments(op), call(op, arguments(op)))[0])


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_not_written_and_results_have_their_own_memory(op):
    args = arguments(op)
    before = map_tensors(torch.clone, args)
    results = call(op, args) + call_out(op, args)
    assert_same_bits(tuple(tensors(args).values()), tuple(tensors(before).values()))
    storages = [t.untyped_storage().data_ptr() for t in (*tensors(args).values(), *results)]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("op", OPS)
def test_fake_and_meta_results_are_described_like_the_real_ones(op):
    for i, (rows, layout) in enumerate(itertools.product((0, 1, 2, 5, 64, 65), LAYOUTS)):
        dtype = cases.DTYPES[i % len(cases.DTYPES)]
        args = map_tensors(LAYOUTS[layout], arguments(op, rows, dtype, seed=i))
        real = call(op, args)
        with FakeTensorMode() as mode:
            fake = call(op, map_tensors(mode.from_tensor, args))
        meta = call(op, map_tensors(lambda t: t.to("meta"), args))
        assert metadata(fake) == metadata(real), (rows, dtype, layout)
        assert metadata(meta) == metadata(real), (rows, dtype, layout)
        assert {t.device.type for t in fake} == {"cpu"} and {t.device.type for t in meta} == {"meta"}


@pytest.mark.parametrize("leading", ((), (2, 3), (2, 0, 3), (1, 1, 2, 1)))
@pytest.mark.parametrize(
    "op", ("mxfp8_quantize", "mxfp8_dequantize", "mxfp8_pack_a_scale", "mxfp8_raw", "mxfp8_linear", "kv_quantize")
)
def test_fake_results_have_the_leading_dimensions_of_the_real_ones(op, leading):
    args = arguments(op, torch.Size(leading).numel())
    for name in {"x", "codes", "scale", "a", "a_scale"} & set(args):
        args[name] = args[name].unflatten(0, leading) if leading else args[name][0]
    with FakeTensorMode() as mode:
        fake = call(op, map_tensors(mode.from_tensor, args))
    assert metadata(fake) == metadata(call(op, args))


@pytest.mark.parametrize("op", OPS)
def test_the_out_overload_writes_the_functional_result(op):
    for rows in (0, 1, 5, 33):
        args = arguments(op, rows)
        assert_same_bits(call_out(op, args), call(op, args))


# --- torch.export, AOTInductor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_exports_and_runs(op):
    args, other = arguments(op), arguments(op, seed=4)
    program = torch.export.export(Call(op, args), (tensors(args),))
    assert any(node.target == operator(op) for node in program.graph.nodes)
    assert_same_bits(program.module()(tensors(other)), call(op, other))


class Layer(torch.nn.Module):
    """A GEMM, an attention and a Q8_0 projection that share their number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.ParameterDict({name: frozen(arguments("mxfp8_linear")[name]) for name in ("b", "b_scale", "bias")})
        self.down = torch.nn.ParameterDict({name: frozen(arguments("gr_down")[name]) for name in ("w", "norm_weight")})

    def forward(self, x: Tensor, residual: Tensor, attention: dict) -> tuple[Tensor, Tensor, Tensor]:
        linear = mori_ops.mxfp8_linear(x, self.linear["b"], self.linear["b_scale"], bias=self.linear["bias"])
        down = mori_ops.gr_down(residual, self.down["w"], norm_weight=self.down["norm_weight"], hc=3)
        return linear, mori_ops.qsa_flash(**attention), down


def frozen(t: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(t, requires_grad=False)


def layer_inputs(rows: int) -> tuple:
    return arguments("mxfp8_linear", rows)["x"], arguments("gr_down", rows)["x"], arguments("qsa_flash", rows)


def exported_layer() -> torch.export.ExportedProgram:
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    x, residual, attention = layer_inputs(5)
    attention_shapes = {name: {0: tokens} if name in ("q", "ids", "gate") else None for name in attention}
    return torch.export.export(Layer(), (x, residual, attention), dynamic_shapes=({0: tokens}, {0: tokens}, attention_shapes))


def test_exports_with_a_dynamic_number_of_rows():
    program = exported_layer()
    for rows in (2, 77):
        assert_same_bits(program.module()(*layer_inputs(rows)), Layer()(*layer_inputs(rows)))


def test_aot_inductor_package_runs(tmp_path):
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0", "cpp_cache_precompile_headers": False}  # of the C++ compiler
    path = torch._inductor.aoti_compile_and_package(exported_layer(), package_path=str(tmp_path / "layer.pt2"), inductor_configs=quick)
    layer = torch._inductor.aoti_load_package(path)
    for rows in (2, 77):
        assert_same_bits(tuple(layer(*layer_inputs(rows))), Layer()(*layer_inputs(rows)))


# --- inference mode, devices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_inference_tensors_are_taken_and_given(op):
    with torch.inference_mode():
        results = call(op, arguments(op))
    assert all(result.is_inference() for result in results)
    assert_same_bits(results, call(op, arguments(op)))


@pytest.mark.parametrize("device", ("cuda", "mps"))
@pytest.mark.parametrize("op", OPS)
def test_a_device_without_a_kernel_is_explained_in_a_sentence(op, device):
    if mori_ops.kernels()[op][device]:
        pytest.skip(f"{op} has a {device} kernel here")
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _registrations.DEVICES[device]))
    args = arguments(op)
    for overload, given in (("default", args), ("out", out_arguments(op, args, call(op, args))[0])):
        with pytest.raises(NotImplementedError) as error:
            operator(op, overload).redispatch(key, **given)  # the kernel that tensors of this device reach
        assert re.fullmatch(rf"mori_ops: {op} has no {device} kernel in this build \(built: [\w,]+\)\. \S.*", str(error.value))


def test_kernels_lists_every_operator_with_a_cpu_kernel():
    table = mori_ops.kernels()
    assert set(table) == set(OPS)
    for op, devices in table.items():
        assert set(devices) == {"cpu", "cuda", "mps"}
        assert devices["cpu"], f"{op} has no CPU kernel"
    table["mxfp8"]["cpu"] = False
    assert mori_ops.kernels()["mxfp8"]["cpu"], "kernels() must hand out a copy"


# --- mori_ops.route ---------------------------------------------------------------------------------------------------

ROUTE_SIZES = {
    "m": (0, 1, 2, 4, 8, 9, 33, 64, 1024, 100_000), "n": (1, 33, 324, 7168), "k": (32, 2048, 10240),
    "t": (0, 1, 4, 96, 1984), "s": (0, 1, 2051), "cells": (1, 30_000), "hq": (24,), "hkv": (2,), "d": (64, 256),
    "ntok": (0, 1, 2, 4, 5, 8, 9, 64, 256), "world": (1, 2, 8),
}  # fmt: skip


@pytest.mark.parametrize("op", DIMENSIONS)
def test_route_names_a_kernel_and_a_reason_for_every_shape(op):
    names = DIMENSIONS[op]
    for sizes in itertools.product(*(ROUTE_SIZES[name] for name in names)):
        route = mori_ops.route(op, device="cpu", **dict(zip(names, sizes, strict=True)))
        assert route.kernel.strip() and route.why.strip(), sizes


def test_route_takes_a_torch_device():
    dims = {"m": 4, "n": 64, "k": 64}
    assert mori_ops.route("mxfp8_raw", device=torch.device("cpu"), **dims) == mori_ops.route("mxfp8_raw", **dims)


def test_route_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="op must be one of mxfp8, .*got 'matmul'"):
        mori_ops.route("matmul", m=1, n=1, k=32)
    with pytest.raises(TypeError, match="gr_down takes the dimensions ntok, n, k, got m, n, k"):
        mori_ops.route("gr_down", m=1, n=1, k=32)
    with pytest.raises(TypeError, match="got none"):
        mori_ops.route("mxfp8_raw")
    with pytest.raises(ValueError, match=r"no kernel for device 'mps' in this build \(built: "):
        mori_ops.route("mxfp8_raw", device="mps", m=1, n=1, k=32)
