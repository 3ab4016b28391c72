"""Compilers of the emulator, and the folder that keeps what they built: build/metal, by content."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "metal"

SHADER_FLAGS = (
    *("-std=c++20", "-fPIC", "-shared", "-nostdinc++", "-nostdlib", "-fno-exceptions", "-fno-rtti"),
    *("-fno-strict-aliasing", "-fsigned-char"),
    # As Metal without fast math: no contraction, half and bfloat rounded after every operation, literals are float.
    *("-ffp-contract=off", "-Xclang", "-cl-single-precision-constant"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    *("-fno-sanitize=all", "-ftrivial-auto-var-init=pattern", "-fstack-clash-protection", "-w"),
)
FAST_FLAGS = ("-O2",)
UNDEFINED = "alignment,array-bounds,signed-integer-overflow,integer-divide-by-zero,shift-base,shift-exponent,float-cast-overflow"
CHECKED_FLAGS = (
    *("-O1", "-fno-vectorize", "-fno-slp-vectorize", "-DMSL_CHECKED"),
    *("-Xclang", "-fsanitize-coverage-type=1", "-Xclang", "-fsanitize-coverage-trace-loads", "-Xclang", "-fsanitize-coverage-trace-stores"),
    *("-Xclang", f"-fsanitize={UNDEFINED}"),
)


class CompileError(Exception):
    """What the compiler said."""


def host_compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


def missing() -> str | None:
    """Why shaders cannot be compiled here, or None."""
    if importlib.util.find_spec("ziglang") is None:
        return "the emulator compiles with ziglang: pip install the test extra"
    if shutil.which(host_compiler()[0]) is None:
        return f"the emulator's runtime needs a C++ compiler, {host_compiler()[0]} is not there"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64") or os.sysconf("SC_PAGE_SIZE") != 4096:
        return "the emulator runs on Linux with 4 KB pages, on x86-64 or aarch64"
    return None


def content_hash(*parts: str | bytes | Path) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]


def build(target: Path, command: Callable[[Path], list[str]]) -> Path:
    """Runs command(temporary output) unless the target exists; several processes may do so at once."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{os.getpid()}")
        done = subprocess.run(command(temporary), text=True, capture_output=True)
        if done.returncode:
            raise CompileError(done.stderr)
        os.replace(temporary, target)
    return target


@cache
def runtime() -> ModuleType:
    """The runtime as a Python module, built with the compiler that builds extensions."""
    sources = sorted((HERE / "runtime").iterdir())
    name = "msl_runtime_" + content_hash(HERE / "include/msl/runtime.h", *sources, sys.version, torch.__version__)
    includes = [sysconfig.get_path("include"), str(Path(torch.__file__).parent / "include")]

    def command(output: Path) -> list[str]:
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-DMSL_MODULE_NAME={name}", *(f"-I{i}" for i in includes)]
        return [*host_compiler(), *flags, str(HERE / "runtime" / "runtime.cpp"), "-o", str(output), "-ldl"]

    path = build(BUILD / (name + ".so"), command)
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def zig(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ziglang", "cc", "-x", "c++", *arguments]


def defines(metal_version: int) -> list[str]:
    return [f"-D__METAL_VERSION__={metal_version}", "-D__METAL__=1", *(["-D__HAVE_TENSOR__=1"] if metal_version >= 400 else [])]


INCLUDE, KEPT_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b", re.M), re.compile(r"^[ \t]*#[ \t]*pragma msl_include\b", re.M)


def preprocess(source: str, metal_version: int) -> str:
    """Expands the source's own macros and conditions; its includes stay, and markers keep the lines."""
    name = content_hash("preprocess", source, str(metal_version), importlib.metadata.version("ziglang"))
    file = BUILD / f"{name}.metal"

    def command(output: Path) -> list[str]:
        file.write_text('#line 1 "program_source"\n' + INCLUDE.sub("#pragma msl_include", source))
        return zig("-E", "-nostdinc", "-nostdinc++", "-w", *defines(metal_version), str(file), "-o", str(output))

    return KEPT_INCLUDE.sub("#include", build(BUILD / f"{name}.ii", command).read_text())


def compile_shader(code: str, *, metal_version: int, checked: bool) -> Path:
    """A shared object of translated Metal source."""
    headers = sorted(p for p in (HERE / "include").rglob("*") if p.is_file())
    target = {"x86_64": "-march=x86_64_v3", "aarch64": "-mcpu=generic+fullfp16"}[platform.machine()]
    flags = [*SHADER_FLAGS, *(CHECKED_FLAGS if checked else FAST_FLAGS), target, *defines(metal_version)]
    name = content_hash(code, *headers, *flags, importlib.metadata.version("ziglang"))
    file = BUILD / f"{name}.cpp"

    def command(output: Path) -> list[str]:
        file.write_text(code)
        return zig(*flags, f"-I{HERE / 'include'}", str(file), "-o", str(output))

    return build(BUILD / f"{name}.so", command)
