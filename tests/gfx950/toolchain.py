"""From HIP and Triton sources to gfx950 assembly, without ROCm and without a GPU. Results are cached by content in build/gfx950."""

import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import rocm
from .assembly import Kernel, parse
from .interpreter import CACHE, compiler

FLAGS = "-x hip --cuda-device-only -nogpuinc -nogpulib -O3 -std=c++17 -gline-tables-only -D__HIP_PLATFORM_AMD__".split()


def missing() -> str | None:
    """Why the gfx950 tests cannot run here, or None."""
    for package, what in (("ziglang", "clang"), ("triton", "HIP headers and a second compiler")):
        if importlib.util.find_spec(package) is None:
            return f"needs {package} ({what}): pip install 'mori_ops[test]'"
    return None if compiler() else "needs a C++ compiler"


@functools.cache
def clang() -> tuple[str, ...]:
    """The pinned compiler: other clang versions schedule and wait differently."""
    return (sys.executable, "-m", "ziglang", "clang")


@functools.cache
def _version() -> str:
    return subprocess.run(
        [sys.executable, "-m", "ziglang", "version"], check=True, capture_output=True, text=True
    ).stdout.strip()


def _clang(arguments: list[str], text: str) -> str:
    done = subprocess.run([*clang(), *arguments, "-o", "-", "-"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return done.stdout


def compile_hip(source: str | Path, *, defines: dict[str, object] | None = None, arch: str = "gfx950") -> dict[str, Kernel]:
    """Kernels of a .hip file by symbol."""
    source = Path(source)
    includes = ["-isystem", str(rocm.resources() / "include"), "-isystem", str(rocm.headers()), f"-I{source.parent}"]
    options = [*FLAGS, f"--offload-arch={arch}", *includes, *(f"-D{k}={v}" for k, v in (defines or {}).items())]
    text = f'#line 1 "{source}"\n{source.read_text()}'
    expanded = _clang([*options, "-E"], text)
    key = hashlib.sha256("\0".join((_version(), arch, *FLAGS, expanded)).encode()).hexdigest()[:24]
    return parse(_cached(key, lambda: _clang([*options, "-S"], text)))


def only(kernels: dict[str, Kernel], contains: str = "") -> Kernel:
    """The one kernel whose symbol contains this text."""
    found = [k for name, k in kernels.items() if contains in name]
    if len(found) != 1:
        raise LookupError(f"{len(found)} kernels match {contains!r} among {sorted(kernels)}")
    return found[0]


def _cached(key: str, make) -> str:
    path = CACHE / f"{key}.s"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(make())
        scratch.rename(path)
    return path.read_text()


@dataclass(frozen=True)
class TritonGemm:
    """Triton's own scaled-dot GEMM: C[M, N] bf16 = A[M, K] B[N, K]^T, e4m3 with 1x32 e8m0 scales, M and N whole tiles."""

    block_m: int = 256
    block_n: int = 256
    block_k: int = 128
    stages: int = 2
    warps: int = 8
    matrix: int = 16  # rows of the MFMA: 16x16x128 or 32x32x64


def compile_triton(gemm: TritonGemm) -> tuple[Kernel, int]:
    """The kernel and its LDS bytes. Its arguments: A, B, A scales, B scales, C, M, N, K; grid (N / block_n, M / block_m)."""
    import triton

    from . import triton_gemm

    source = Path(triton_gemm.__file__).read_text()
    key = "triton-" + hashlib.sha256("\0".join((triton.__version__, repr(gemm), source)).encode()).hexdigest()[:24]
    text = _cached(key, lambda: triton_gemm.assembly(gemm))
    first, _, body = text.partition("\n")
    return only(parse(body)), int(first)
