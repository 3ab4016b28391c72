"""Compiles every CUDA kernel for sm_90a, without a GPU, and reports what each one takes: python -m tests.cuda_report

Registers, spills and shared memory are ptxas's; CTAs per SM is what registers, threads and static shared memory allow
(kernels that ask for dynamic shared memory at launch may fit fewer).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SM_REGISTERS, SM_THREADS, SM_SHARED_BYTES, SM_CTAS = 65536, 2048, 227 * 1024, 32  # compute capability 9.0
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
THREADS = re.compile(r"\.entry (\w+)\(.*?\)\s*(?:\.explicitcluster\s*|\.reqnctapercluster[^\n]*\s*|\.minnctapersm[^\n]*\s*)*\.maxntid (\d+)", re.DOTALL)


@dataclass(frozen=True)
class Kernel:
    file: str
    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    threads: int

    @property
    def ctas_per_sm(self) -> int:
        warps = -(-self.threads // 32)
        per_warp = -(-self.registers * 32 // 256) * 256
        by_shared = SM_SHARED_BYTES // (self.shared_bytes + 1024)
        return min(SM_REGISTERS // (per_warp * warps), SM_THREADS // self.threads, by_shared, SM_CTAS)


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")


def _demangled(names: list[str]) -> list[str]:
    if not shutil.which("c++filt"):
        return names
    text = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout
    short = re.sub(r"mori::\w+::|\(anonymous namespace\)::|^void ", "", text, flags=re.MULTILINE)
    return [line.split("(")[0] for line in short.splitlines()]


def compile_file(source: Path) -> list[Kernel]:
    """The kernels of one file; raises RuntimeError with the compiler's words when it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc(), "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "--keep", f"--keep-dir={folder}"]
        done = subprocess.run([*command, "-c", str(source), "-o", f"{folder}/out.o"], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{source.name}: {done.stderr}")
        ptx = "".join(path.read_text() for path in Path(folder).glob("*.ptx"))
    threads = {name: int(count) for name, count in THREADS.findall(ptx)}
    parts = re.split(r"Compiling entry function '(\w+)' for 'sm_90a'", done.stderr)[1:]
    mangled, texts = parts[::2], parts[1::2]
    kernels = []
    for name, entry, text in zip(_demangled(mangled) if mangled else [], mangled, texts, strict=True):
        stores, loads = map(int, SPILLS.search(text).groups())
        shared = SHARED.search(text)
        kernels.append(
            Kernel(source.name, name, int(REGISTERS.search(text)[1]), stores + loads, int(shared[1]) if shared else 0, threads.get(entry, 1024))
        )
    return kernels


def report() -> list[Kernel]:
    sources = sorted((ROOT / "csrc").rglob("*_sm90.cu"), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return [kernel for kernels in pool.map(compile_file, sources) for kernel in kernels]


def table(kernels: list[Kernel]) -> str:
    lines = [f"{'registers':>9} {'spilled B':>9} {'shared B':>8} {'threads':>7} {'CTAs/SM':>7}  kernel"]
    for k in sorted(kernels, key=lambda k: (k.file, k.name)):
        lines.append(f"{k.registers:9} {k.spilled_bytes:9} {k.shared_bytes:8} {k.threads:7} {k.ctas_per_sm:7}  {k.file}: {k.name}")
    return "\n".join(lines)


if __name__ == "__main__":
    if nvcc() is None:
        sys.exit("cuda_report: no nvcc (put it on PATH or set CUDA_HOME)")
    print(table(report()))
