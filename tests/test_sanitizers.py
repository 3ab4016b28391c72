"""The core operator tests once more, on a library built with AddressSanitizer and UndefinedBehaviorSanitizer.

The build lies in build/sanitized, a copy of the tree, so that the next run compiles only what has changed.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPY = ROOT / "build" / "sanitized"
CORE = [name for name in ("test_quantize.py", "test_mxfp8.py", "test_qsa.py", "test_gr.py") if (ROOT / "tests" / name).exists()]
LARGE = "s2 or 2_gib or huge or model_shape or size_of_the_model or prompts_of_the_seed"  # the same code on more memory
FLAGS = "-fsanitize=address,undefined"


def run(*command: str, **env: str) -> None:
    done = subprocess.run(command, cwd=COPY, env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    finding = re.search(r"[^\n]*(ERROR: AddressSanitizer|runtime error:).{0,4000}", done.stdout, re.S)
    assert done.returncode == 0, finding[0] if finding else done.stdout[-6000:]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ and its sanitizer runtimes")
def test_core_operators_are_clean_under_address_and_undefined_behaviour_sanitizers():
    for name in ("csrc", "mori_ops", "tests"):
        shutil.rmtree(COPY / name, ignore_errors=True)
        shutil.copytree(ROOT / name, COPY / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy2(ROOT / name, COPY / name)
    flags = f"{FLAGS} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 -O1"
    run(sys.executable, "setup.py", "build_ext", "--inplace", CC="gcc", CXX="g++", CXXFLAGS=flags, LDFLAGS=FLAGS, MORI_BACKENDS="cpu")

    # The runtimes go in front of Python's own libraries; libstdc++ with them, for exceptions that cross the library's border.
    runtimes = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    run(
        sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--capture=sys", "-k", f"not ({LARGE})", *(f"tests/{name}" for name in CORE),
        LD_PRELOAD=" ".join(runtimes),
        ASAN_OPTIONS="detect_leaks=0",  # the interpreter and torch keep memory until they exit
        UBSAN_OPTIONS="print_stacktrace=1",
    )  # fmt: skip
