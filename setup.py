"""Builds mori_ops._C (one abi3 library over LibTorch's stable ABI) against the torch that is installed.

MORI_BACKENDS=auto|cpu|cuda|hip (comma separated) says which device backends go in; the CPU is always there. `auto` adds
CUDA or HIP when torch was built with it and its compiler is found. A file's suffix names its backend:
*_sm90.cu/_sm90.cpp CUDA, *_gfx950.hip/_gfx950.cpp HIP, any other .cpp the host and the CPU.
"""

import os
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
TORCH_TARGET = "0x020b000000000000"  # 2.11: the first stable ABI that knows float8_e8m0fnu
BACKENDS = ("auto", "cpu", "cuda", "hip")


def sources(*suffixes: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for s in suffixes for p in (ROOT / "csrc").rglob(f"*{s}"))


def requested_backends() -> set[str]:
    wanted = {b.strip() for b in os.environ.get("MORI_BACKENDS", "auto").split(",")}
    unknown = wanted - set(BACKENDS)
    if unknown:
        raise SystemExit(f"mori_ops: MORI_BACKENDS must be one or more of {', '.join(BACKENDS)}, got {', '.join(sorted(unknown))}")
    if {"cuda", "hip"} <= wanted:
        raise SystemExit("mori_ops: MORI_BACKENDS=cuda,hip: one torch serves one of them, choose one")
    return wanted


def cuda_root(detected: str | None) -> str | None:
    """A CUDA toolkit with compiler and headers. torch's guess follows `which nvcc`, which a wrapper script misleads."""
    for root in (os.environ.get("CUDA_HOME"), detected, "/usr/local/cuda"):
        if root and Path(root, "include", "cuda_runtime.h").is_file() and Path(root, "bin", "nvcc").is_file():
            return root
    return None


def extension() -> dict:
    try:
        import torch
        from torch.utils import cpp_extension
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return {}  # metadata and sdist need no torch
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
        raise SystemExit(f"mori_ops: needs torch >= 2.11 (float8_e8m0fnu in the stable ABI), found {torch.__version__}")

    wanted = requested_backends()
    toolkit = cuda_root(cpp_extension.CUDA_HOME)
    use_cuda = "cuda" in wanted or ("auto" in wanted and torch.version.cuda is not None and toolkit is not None)
    use_hip = "hip" in wanted or ("auto" in wanted and torch.version.hip is not None)
    backends = "cpu" + (",cuda" if use_cuda else "") + (",hip" if use_hip else "")
    print(f"mori_ops: building backends {backends} against torch {torch.__version__}")

    defines = [
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
        f'-DMORI_BUILT_BACKENDS="{backends}"',
        f'-DMORI_BUILT_TORCH="{torch.__version__}"',
    ]
    common = [*defines, "-O3", "-std=c++17"]
    device_flags: list[str] = []
    files = ["csrc/module.c"] + [s for s in sources(".cpp") if not s.endswith(("_sm90.cpp", "_gfx950.cpp"))]
    libraries: list[str] = []
    library_dirs: list[str] = []
    link_args: list[str] = []
    if use_cuda:
        if toolkit is None:
            raise SystemExit("mori_ops: MORI_BACKENDS=cuda needs a CUDA toolkit with nvcc: set CUDA_HOME")
        cpp_extension.CUDA_HOME = toolkit  # None beside a CPU-only torch
        files += sources("_sm90.cu", "_sm90.cpp")
        device_flags = [*common, "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler=-fvisibility=hidden"]
        libraries += ["cudart_static", "dl", "rt", "pthread"]
        library_dirs.append(f"{toolkit}/lib64")
    if use_hip:
        files += sources("_gfx950.hip", "_gfx950.cpp")
        device_flags = [*common, "--offload-arch=gfx950", "-fvisibility=hidden"]
        libraries.append("amdhip64")  # the one bundled with torch: a system copy would start a second HIP runtime
        library_dirs.append(str(Path(torch.__file__).parent / "lib"))
    if use_cuda or use_hip:
        # libtorch.so pulls the device library, whose stream accessor is a weak symbol here, into the symbol scope
        link_args += ["-Wl,--no-as-needed", "-ltorch"]

    class BuildExtension(cpp_extension.BuildExtension):
        """torch's, with the CUDA version check left to nvcc when torch itself has no CUDA."""

        def build_extensions(self) -> None:
            if torch.version.cuda is None:
                cpp_extension._check_cuda_version = lambda *_: None
            super().build_extensions()

    # CppExtension also for .cu and .hip: CUDAExtension would hipify over hand-written siblings.
    module = cpp_extension.CppExtension(
        "mori_ops._C",
        files,
        depends=sources(".h", ".cuh"),
        libraries=libraries,
        library_dirs=library_dirs,
        extra_link_args=link_args,
        extra_compile_args={"cxx": [*common, "-fvisibility=hidden"], "nvcc": device_flags},
        py_limited_api=True,
    )
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extension())
