"""Builds mori_ops._C, one abi3 library over LibTorch's stable ABI, against the torch that is installed.

MORI_BACKENDS=auto|cpu|cuda|hip (comma separated) says which device backends go in; the CPU is always there. `auto` adds
CUDA or HIP when torch was built for it and its compiler is found. A file's suffix names its backend: *_sm90.cu and
*_sm90.cpp CUDA, *_gfx950.hip and *_gfx950.cpp HIP, any other .cpp the host and the CPU. MAX_JOBS limits the compilers
that run at a time. CMakeLists.txt follows the same rules.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
TORCH_TARGET = "0x020b000000000000"  # 2.11: the first stable ABI that knows float8_e8m0fnu
BACKENDS = ("auto", "cpu", "cuda", "hip")
JOB_BYTES = 2 << 30  # what one compiler may need


def sources(*suffixes: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for s in suffixes for p in (ROOT / "csrc").rglob(f"*{s}"))


def refuse(message: str):
    raise SystemExit(f"mori_ops: {message}")


def requested_backends() -> set[str]:
    wanted = {b.strip() for b in os.environ.get("MORI_BACKENDS", "auto").split(",")}
    if unknown := wanted - set(BACKENDS):
        refuse(f"MORI_BACKENDS must be one or more of {', '.join(BACKENDS)}, got {', '.join(map(repr, sorted(unknown)))}")
    if {"cuda", "hip"} <= wanted:
        refuse("MORI_BACKENDS=cuda,hip: one torch serves one of them, choose one")
    return wanted


@dataclass
class DeviceBuild:
    name: str
    files: list[str]
    flags: list[str]
    libraries: list[str]
    library_dirs: list[str] = field(default_factory=list)
    include_dirs: list[str] = field(default_factory=list)


def cuda_toolkit(detected: str | None) -> str | None:
    """A CUDA toolkit with compiler and headers. torch's guess follows `which nvcc`, which a wrapper script misleads."""
    for root in (os.environ.get("CUDA_HOME"), detected, "/usr/local/cuda"):
        if root and Path(root, "include", "cuda_runtime.h").is_file() and Path(root, "bin", "nvcc").is_file():
            return root
    return None


def cuda_build(torch, cpp_extension, wanted: set[str]) -> DeviceBuild | None:
    toolkit = cuda_toolkit(cpp_extension.CUDA_HOME)
    if "cuda" not in wanted and not ("auto" in wanted and torch.version.cuda and toolkit):
        return None
    if toolkit is None:
        refuse("MORI_BACKENDS=cuda needs a CUDA toolkit (bin/nvcc and include/cuda_runtime.h): set CUDA_HOME to it")
    version = subprocess.run([f"{toolkit}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.\d+", version)
    if torch.version.cuda and release and release[1] != torch.version.cuda.split(".")[0]:
        refuse(f"nvcc in {toolkit} is CUDA {release[0][8:]}, torch {torch.__version__} was built with CUDA {torch.version.cuda}: "
               "set CUDA_HOME to a toolkit of torch's major version, or MORI_BACKENDS=cpu to do without")
    flags = ["-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler=-fvisibility=hidden"]
    if torch.version.cuda is None:
        cpp_extension.CUDA_HOME = toolkit  # a CPU-only torch never looks for one ...
        headers = b"".join((ROOT / name).read_bytes() for name in sources(".h", ".cuh"))
        flags.append(f"-DMORI_HEADERS={zlib.crc32(headers)}")  # ... nor tells ninja which headers a .cu includes
    return DeviceBuild("cuda", sources("_sm90.cu", "_sm90.cpp"), flags, ["cudart_static", "dl", "rt", "pthread"], [f"{toolkit}/lib64"], [f"{toolkit}/include"])


def hip_build(torch, cpp_extension, wanted: set[str]) -> DeviceBuild | None:
    homes = [home for home in (os.environ.get("ROCM_HOME"), cpp_extension.ROCM_HOME, "/opt/rocm") if home and Path(home, "bin", "hipcc").is_file()]
    if "hip" not in wanted and not ("auto" in wanted and torch.version.hip and homes):
        return None
    if not homes:
        refuse("MORI_BACKENDS=hip needs hipcc (bin/hipcc of a ROCm installation): set ROCM_HOME to it")
    home = homes[0]
    # The amdhip64 bundled with torch: a system copy would start a second HIP runtime.
    library_dir = str(Path(torch.__file__).parent / "lib") if torch.version.hip else f"{home}/lib"
    if torch.version.hip is None:  # a CPU-only torch never looks for hipcc
        cpp_extension.ROCM_HOME, cpp_extension.IS_HIP_EXTENSION = home, True
    headers = b"".join((ROOT / name).read_bytes() for name in sources(".h"))  # torch does not tell ninja which ones a .hip includes
    flags = ["--offload-arch=gfx950", "--offload-arch=gfx942", "-fvisibility=hidden", f"-DMORI_HEADERS={zlib.crc32(headers)}"]
    return DeviceBuild("hip", sources("_gfx950.hip", "_gfx950.cpp"), flags, ["amdhip64"], [library_dir], [f"{home}/include"])


def default_jobs() -> int:
    """One compiler per core that this process may use, as far as the memory it may use goes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    return max(1, min(cores, memory // JOB_BYTES))


class BuildPackage(build_py):
    """The Metal sources go along as mori_ops/metal/, to be compiled at run time; mori_ops/mps.py reads a checkout's csrc/ itself."""

    def metal_files(self) -> list[tuple[str, str]]:
        names = [] if self.editable_mode else sources(".metal")
        return [(name, str(Path(self.build_lib, "mori_ops", "metal", Path(name).relative_to("csrc")))) for name in names]

    def run(self) -> None:
        super().run()
        for name, target in self.metal_files():
            self.mkpath(os.path.dirname(target))
            self.copy_file(name, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return super().get_outputs(include_bytecode) + [target for _, target in self.metal_files()]


def extension() -> dict:
    # torch looks for ninja on PATH: the environment's own is not there when the environment was not activated.
    os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)
    try:
        import torch
        from torch.utils import cpp_extension
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise

        class NeedsTorch(build_ext):
            def run(self) -> None:
                refuse("the library is built against an installed torch: install torch >= 2.11 first")

        # Metadata and the sdist need no torch.
        return {"ext_modules": [Extension("mori_ops._C", sources=[])], "cmdclass": {"build_ext": NeedsTorch, "build_py": BuildPackage}}
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
        refuse(f"needs torch >= 2.11 (float8_e8m0fnu in the stable ABI), found torch {torch.__version__}")

    wanted = requested_backends()
    device = cuda_build(torch, cpp_extension, wanted) or hip_build(torch, cpp_extension, wanted)
    backends = "cpu" + (f",{device.name}" if device else "")
    common = [
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
        f'-DMORI_BUILT_BACKENDS="{backends}"',
        f'-DMORI_BUILT_TORCH="{torch.__version__}"',
        "-O3",
        "-std=c++17",
    ]
    host_flags = [*common, "-g0", "-fvisibility=hidden", *shlex.split(os.environ.get("CXXFLAGS", ""))]
    files = ["csrc/module.c"] + [name for name in sources(".cpp") if not name.endswith(("_sm90.cpp", "_gfx950.cpp"))]

    class BuildExtension(cpp_extension.BuildExtension):
        """torch's: ninja compiles what another source, header, flag, backend or torch asks for, and nothing else."""

        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = "build/objects"  # the same for every way to build: an editable install is incremental too

        def build_extensions(self) -> None:
            os.environ.setdefault("MAX_JOBS", str(default_jobs()))
            print(f"mori_ops: building {backends} against torch {torch.__version__}, {os.environ['MAX_JOBS']} files at a time", flush=True)
            super().build_extensions()

    # CppExtension also for .cu and .hip: CUDAExtension would run its translator over hand-written siblings.
    module = cpp_extension.CppExtension(
        "mori_ops._C",
        files + (device.files if device else []),
        libraries=device.libraries if device else [],
        library_dirs=device.library_dirs if device else [],
        include_dirs=device.include_dirs if device else [],
        # libtorch.so brings in the device library, whose stream accessor is a weak symbol here.
        extra_link_args=["-Wl,--no-as-needed", "-ltorch"] if device else [],
        extra_compile_args={"cxx": host_flags, "nvcc": [*common, *device.flags] if device else []},
        py_limited_api=True,
    )
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": BuildExtension, "build_py": BuildPackage},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extension())
