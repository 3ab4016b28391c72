"""mori_ops/mps.py itself: registration, routes, compiling once, the fallback from the tensor units, the limits of a device."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import mori_ops
from mori_ops import _registrations, mps
from tests import cases
from tests.metal import emulator
from tests.metal.device import DEVICE, GPUS, emulated, emulated_only, gpu, metal_operators, needs_metal, settings  # noqa: F401
from tests.samples import arguments, call

ROOT = Path(__file__).parents[2]
OPS = {name for name in mps.KERNELS if not name.endswith(".out")}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- registration and routes ----


def test_both_forms_of_every_operator_are_there() -> None:
    assert mps.KERNELS.keys() == OPS | {f"{op}.out" for op in OPS} and OPS < set(_registrations.OPS)


@pytest.mark.skipif(torch.backends.mps.is_built(), reason="this torch is built for MPS")
def test_a_torch_without_mps_does_not_load_the_backend() -> None:
    assert python("import sys, mori_ops; print('mori_ops.mps' in sys.modules, mori_ops.kernels()['qsa_flash']['mps'])").split() == ["False", "False"]
    with pytest.raises(ValueError, match="no kernel for device 'mps' in this build"):
        mori_ops.route("gr_down", device="mps", ntok=1, n=1, k=32)


def test_a_torch_with_mps_has_the_operators_of_the_readme() -> None:
    told = python("import torch; torch.backends.mps.is_built = lambda: True; import mori_ops; print(*(op for op, on in mori_ops.kernels().items() if on['mps']))")
    assert set(told.split()) == OPS
    rows = re.findall(r"^\| `(\w+)` (?:\| \S+ ){3}\| (\S+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {op for op, answer in rows if answer == "yes"} == OPS and len(rows) == len(_registrations.OPS)


def test_routes_are_the_rules_of_the_report(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    shape = {"n": cases.GR_N, "k": cases.GR_K, "device": "mps"}
    members = [mori_ops.route("gr_down", ntok=ntok, **shape).kernel for ntok in range(1, 9)]
    new = gpu == "M5" and mps.tensor_units()
    assert members == ["4_4"] * (3 if new else 4) + ["4_4_r2"] * (5 if new else 4)
    assert [mps.route("gr_down_8", ntok=ntok, n=1, k=32).kernel for ntok in range(1, 9)] == ["8_8"] * 4 + ["8_8_r2"] * 4
    dims = dict(t=1, s=2051, cells=30000, hq=24, hkv=2, d=256)
    assert mori_ops.route("qsa_flash", device="mps", **dims).kernel == ("tensor" if new else "simdgroup")
    assert all(rule.why for rules in mps.ROUTES.values() for rule in rules)
    with pytest.raises(ValueError, match="no kernel for device 'mps' in this build"):
        mori_ops.route("mxfp8_raw", device="mps", m=1, n=1, k=32)


def test_the_machine_is_read_from_what_the_system_says() -> None:
    names = {"Apple M1": 1, "Apple M5 Max": 5, "Apple M12 Ultra": 12, "AMD Radeon Pro 5500M": 0}
    assert {name: mps.generation_of(name) for name in names} == names
    versions = {"15.6.1": (15, 6, 1), "26.2": (26, 2), "16.2": (26, 2), "": ()}
    assert {text: mps.version_of(text) for text in versions} == versions


# ---- sources ----


def test_sources_are_ascii_stand_alone_and_keep_definitions_from_the_headers_of_the_system() -> None:
    for path in mps.SOURCES.rglob("*.metal"):
        lines = mps.source(str(path.relative_to(mps.SOURCES)), (("X", "half"),)).splitlines()
        assert all(line.isascii() for line in lines) and not any(line.startswith('#include "') for line in lines)
        includes = [i for i, line in enumerate(lines) if line.startswith("#include <")]
        assert includes == list(range(lines.index("#define X half"))) and lines.count("#include <metal_stdlib>") == 1


def test_sources_of_an_installed_package_are_read_from_it(tmp_path: Path) -> None:
    for name in ("mps.py", "routes.py"):
        (tmp_path / name).write_text((ROOT / "mori_ops" / name).read_text())
    (tmp_path / "metal").mkdir()
    code = f"import torch, importlib.util as u, sys; s = u.spec_from_file_location('m', {str(tmp_path / 'mps.py')!r}); m = u.module_from_spec(s); sys.modules['m'] = m; "
    assert python("import mori_ops; " + code + "s.loader.exec_module(m); print(m.SOURCES)").strip() == str(tmp_path / "metal")


# ---- compiling and launching ----


@needs_metal
def test_a_source_is_compiled_once_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_shader = mps.compile_shader
    monkeypatch.setattr(mps, "compile_shader", lambda source: compiled.append(source) or compile_shader(source))
    mps.library.cache_clear()
    for rows in (*range(1, 18), 64):
        for op in sorted(OPS):
            call(op, {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in arguments(op, rows, torch.float16).items()})
    mps.library.cache_clear()
    assert len(compiled) == len(set(compiled)) == len(OPS) + 1  # gr_down with one row and with two; its norm is the fused one of hc 3 or gr_norm


@needs_metal
@emulated_only
def test_a_device_with_small_threadgroups_is_told_so() -> None:
    args = arguments("gr_down", 2, torch.float16)
    with settings(max_threads=64), pytest.raises(RuntimeError, match="gr_down_2 needs 256 threads per threadgroup, this device allows 64"):
        call("gr_down", {**args, "norm_weight": None, "variant": "8_8"})


# ---- from the tensor units to the simdgroups ----


@pytest.fixture
def fresh_m5(monkeypatch: pytest.MonkeyPatch):
    """An M5 on which nothing has been tried yet."""
    generation, version = GPUS["M5"]
    monkeypatch.setattr(mps, "gpu_generation", lambda: generation)
    monkeypatch.setattr(mps, "macos_version", lambda: version)
    monkeypatch.setattr(mps, "_warned", [])
    mps._tensor_kernel_works.cache_clear()
    mps.library.cache_clear()
    yield monkeypatch
    mps._tensor_kernel_works.cache_clear()
    mps.library.cache_clear()


def used_kernels(monkeypatch: pytest.MonkeyPatch, op: str = "qsa_flash", **size: int) -> list[str]:
    used = []
    launch = mps._launch
    with monkeypatch.context() as patch:
        patch.setattr(mps, "_launch", lambda name, kernel, *rest: used.append(kernel) or launch(name, kernel, *rest))
        call(op, arguments(op, 3, torch.float16, **size))
    return used


@needs_metal
@emulated_only
def test_the_tensor_kernel_is_tried_once_and_then_used(fresh_m5: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert used_kernels(fresh_m5) == ["qsa_flash", "qsa_flash_tensor", "qsa_flash_tensor"]
        assert used_kernels(fresh_m5) == ["qsa_flash_tensor"]
        assert used_kernels(fresh_m5, "qsa_attn") == ["qsa_flash_tensor"]


def refuse(source: str) -> emulator.ShaderLibrary:
    if "matmul2d" in source:
        raise SyntaxError("static_assert failed in MPPTensorOpsMatMul2d.h")
    return emulated(source)


def miscompute(source: str) -> emulator.ShaderLibrary:
    return emulated(source.replace("sums[i] = fma(sums[i], factors[", "sums[i] = fma(sums[i], 1.0f + factors["))


@needs_metal
@emulated_only
@pytest.mark.parametrize("compile_shader, reason", [(refuse, "SyntaxError: static_assert failed"), (miscompute, "its result differs by")])
def test_a_system_that_fails_on_the_tensor_kernel_gets_the_other_and_one_warning(fresh_m5: pytest.MonkeyPatch, compile_shader, reason: str) -> None:
    fresh_m5.setattr(mps, "compile_shader", compile_shader)
    with pytest.warns(UserWarning) as caught:
        assert used_kernels(fresh_m5)[-1] == "qsa_flash"
        assert used_kernels(fresh_m5) == ["qsa_flash"]
        assert used_kernels(fresh_m5, dim=128)[-1] == "qsa_flash"
    assert len(caught) == 1 and re.search(f"the simdgroup one is: {reason}", str(caught[0].message))


@needs_metal
@emulated_only
def test_a_result_that_is_not_finite_is_no_success(fresh_m5: pytest.MonkeyPatch) -> None:
    fresh_m5.setattr(mps, "compile_shader", lambda source: emulated(source.replace("fresh[i] = 0.0f", "fresh[i] = NAN")))
    with pytest.warns(UserWarning, match="its result differs by nan"):
        assert used_kernels(fresh_m5)[-1] == "qsa_flash"


@needs_metal
@emulated_only
def test_older_systems_do_not_try_the_tensor_kernel(fresh_m5: pytest.MonkeyPatch) -> None:
    fresh_m5.setattr(mps, "macos_version", lambda: (26, 1))
    assert used_kernels(fresh_m5) == ["qsa_flash"]
