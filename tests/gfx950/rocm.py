"""A ROCm installation as far as building goes, made of pip packages: the clang of ziglang, the HIP headers of triton.

`python -m tests.gfx950.rocm FOLDER` makes one for ROCM_HOME. Its libamdhip64 is a stand-in that knows no device: what is built
against it loads anywhere and runs nowhere.
"""

import importlib.util
import stat
import struct
import subprocess
import sys
from pathlib import Path

FATBIN_ALIGNMENT = 4096

HIPCC = """#!/bin/sh
PATH={bin}:$PATH exec {python} -m ziglang clang -x hip --target=x86_64-linux-gnu -nogpuinc -nogpulib -resource-dir {resources} "$@"
"""
LLD = """#!/bin/sh
[ "$1" = -flavor ] && shift 2
exec {python} -m ziglang ld.lld "$@"
"""
BUNDLER = """#!/bin/sh
exec {python} {here} bundle "$@"
"""

RUNTIME = """
enum { no_device = 100 };
int hipGetDeviceCount(int* count) { *count = 0; return no_device; }
int hipGetDevicePropertiesR0600(void* properties, int device) { return no_device; }
int hipGetLastError(void) { return no_device; }
int hipLaunchKernel(void) { return no_device; }
int hipEventCreateWithFlags(void** event, unsigned flags) { return no_device; }
int hipEventRecord(void* event, void* stream) { return no_device; }
int hipEventDestroy(void* event) { return no_device; }
int hipStreamWaitEvent(void* stream, void* event, unsigned flags) { return no_device; }
const char* hipGetErrorName(int error) { return "hipErrorNoDevice"; }
const char* hipGetErrorString(int error) { return "no ROCm-capable device is detected"; }
int __hipPushCallConfiguration(void) { return no_device; }
int __hipPopCallConfiguration(void) { return no_device; }
void** __hipRegisterFatBinary(const void* data) { static void* handle; return &handle; }
void __hipRegisterFunction(void) {}
void __hipUnregisterFatBinary(void** handle) {}
"""


def package(name: str) -> Path:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is not installed (pip install 'mori_ops[test]')")
    return Path(next(iter(spec.submodule_search_locations)))


def resources() -> Path:
    """clang's own headers."""
    return package("ziglang") / "lib"


def headers() -> Path:
    return package("triton") / "backends" / "amd" / "include"


def bundle(arguments: list[str]) -> None:
    """clang-offload-bundler, as far as clang calls it to make a fat binary: a table of the code objects, then each, aligned."""
    options = [a.lstrip("-").partition("=") for a in arguments]
    targets = next(value for key, _, value in options if key == "targets").split(",")
    inputs = [Path(value).read_bytes() for key, _, value in options if key == "input"]
    output = next(value for key, _, value in options if key == "output")
    table = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(targets))
    offset, body = len(table) + sum(24 + len(t) for t in targets), b""
    first = -(-offset // FATBIN_ALIGNMENT) * FATBIN_ALIGNMENT
    for target, data in zip(targets, inputs, strict=True):
        body += b"\0" * (-len(body) % FATBIN_ALIGNMENT)
        table += struct.pack("<QQQ", first + len(body), len(data), len(target)) + target.encode()
        body += data
    Path(output).write_bytes(table.ljust(first, b"\0") + body)


def make(folder: Path) -> Path:
    """The installation; returns its root, for ROCM_HOME."""
    binaries = folder / "bin"
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    binaries.mkdir(exist_ok=True)
    values = {"bin": binaries.resolve(), "python": sys.executable, "resources": resources(), "here": Path(__file__).resolve()}
    for name, text in {"hipcc": HIPCC, "lld": LLD, "clang-offload-bundler": BUNDLER}.items():
        (binaries / name).write_text(text.format(**values))
        (binaries / name).chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    include = folder / "include"
    if not include.is_symlink():
        include.symlink_to(headers())
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / "lib" / "libamdhip64.so"], input=RUNTIME, text=True, check=True)
    return folder.resolve()


if __name__ == "__main__":
    if sys.argv[1] == "bundle":
        bundle(sys.argv[2:])
    else:
        print(make(Path(sys.argv[1])))
