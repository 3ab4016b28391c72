"""The whole extension with its HIP backend, compiled and linked without ROCm and loaded where there is no device."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import rocm
from .toolchain import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ROOT = Path(__file__).parents[2]
CALLS = """
import torch, mori_ops
assert mori_ops.build_info["backends"] == "cpu,hip"
x = torch.ones(2, 64)
codes, scale = mori_ops.mxfp8_quantize(x)
assert torch.equal(mori_ops.mxfp8_dequantize(codes, scale).float(), x)
assert mori_ops.route("mxfp8_raw", m=4096, n=5120, k=2048, device="cuda").kernel == "scaled mfma 256x256"
assert mori_ops.route("mxfp8_raw", m=1024, n=5120, k=2048, device="cuda").kernel == "scaled mfma 256x128"
assert mori_ops.route("mxfp8", m=32, n=5120, k=2048, device="cuda").kernel == "skinny"
assert mori_ops.route("gemm_ar", world=2, m=16, n=5120, device="cuda").kernel == "one_shot"
assert mori_ops.route("gemm_ar", world=2, m=4096, n=5120, device="cuda").kernel == "overlapped"
assert all(mori_ops.kernels()[op]["cuda"] == (op.startswith(("mxfp8", "scaled_gemm", "gemm_ar"))) for op in mori_ops.kernels())
hip = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)  # what a ROCm torch dispatches to
for op, args in {"mxfp8_raw": (codes, codes, scale, scale[:1]), "mxfp8_quantize": (x,), "mxfp8_dequantize": (codes, scale)}.items():
    try:
        getattr(torch.ops.mori, op).default.redispatch(hip, *args)
    except RuntimeError as error:
        print(op, error)
workspaces, out = [0, 0], torch.empty(2, 2, dtype=torch.bfloat16)
try:
    torch.ops.mori._gemm_ar_symmetric.default.redispatch(
        hip, codes, codes, scale, scale[:1], "mxfp8_raw", None, "bf16", "overlapped", 64, 1, 0, workspaces, [1 << 20] * 6, 0, 1.0, [0], out=out)
except RuntimeError as error:
    print("gemm_ar", error)
"""


def test_the_extension_builds_without_rocm_and_says_that_there_is_no_device(tmp_path):
    for name in ("setup.py", "csrc", "mori_ops"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    home = rocm.make(tmp_path / "rocm")
    # Host code is compiled for the fourth time in this suite: quickly.
    environment = {**os.environ, "MORI_BACKENDS": "hip", "ROCM_HOME": str(home), "CXXFLAGS": "-O0", "LD_LIBRARY_PATH": str(home / "lib")}
    for command in (("setup.py", "-q", "build_ext", "-i"), ("-c", CALLS)):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("mori_ops: no HIP device") == 4, done.stdout
