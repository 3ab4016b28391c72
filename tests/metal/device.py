"""Where the tests of the Metal operators run: on the `mps` device of a Mac, elsewhere in the emulator.

In the emulator the functions that mori_ops/mps.py registers for MPS tensors stand in for the CPU kernels while a test runs, so that
the public operators reach them with CPU tensors. They are the same functions; only `mps.compile_shader` and what it says about
the machine are replaced.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from mori_ops import mps
from tests.metal import emulator, toolchain

ON_A_MAC = torch.backends.mps.is_available()
DEVICE = "mps" if ON_A_MAC else "cpu"
GPUS = {"M1": (1, (14, 0)), "M5": (5, (26, 2))}  # the oldest and the newest: generation, macOS

needs_metal = pytest.mark.skipif(not ON_A_MAC and toolchain.missing() is not None, reason=str(toolchain.missing()))
emulated_only = pytest.mark.skipif(ON_A_MAC, reason="chooses what only the emulator lets one choose")


def emulated(source: str) -> emulator.ShaderLibrary:
    return emulator.compile_shader(source, metal_version=400 if mps.macos_version() >= (26,) else 310)


@pytest.fixture(scope="module", autouse=True)
def metal_operators() -> Iterator[None]:
    """torch.ops.mori.* for tensors on DEVICE are the Metal ones; in the emulator those of the oldest GPU, unless `gpu` says more."""
    if ON_A_MAC:
        yield
        return
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that this replaces kernels
        patch.setattr(mps, "compile_shader", emulated)
        generation, version = GPUS["M1"]
        patch.setattr(mps, "gpu_generation", lambda: generation)
        patch.setattr(mps, "macos_version", lambda: version)
        mps.library.cache_clear()
        library = torch.library.Library("mori", "IMPL")
        mps.register(library, "CPU", allow_override=True)
        yield
        library._destroy()
        mps.library.cache_clear()


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU that chooses its own kernels; on a Mac, its own GPU as itself and as an old one."""
    generation, version = GPUS[request.param]
    if ON_A_MAC and generation > 1:
        return request.param
    monkeypatch.setattr(mps, "gpu_generation", lambda: generation)
    monkeypatch.setattr(mps, "macos_version", lambda: version)
    return request.param


def settings(**changes: object) -> AbstractContextManager:
    """Of the emulator; a GPU is what it is."""
    return nullcontext() if ON_A_MAC else emulator.settings(**changes)


def on_device(t):
    return t.to(DEVICE) if isinstance(t, torch.Tensor) else t
