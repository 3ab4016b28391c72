"""The shipped HIP kernels, compiled, and the launches that mxfp8_gfx950.cpp makes of them, on the interpreter."""

import functools
import struct
from pathlib import Path

import numpy as np

from .assembly import Kernel
from .interpreter import LATE, Launch, Machine, Schedule, Statistics
from .toolchain import compile_hip, only

CSRC = Path(__file__).parents[2] / "csrc"
FILES = {"collective": "gemm_ar", "gemm_ar": "gemm_ar"}  # the folder of a file; mxfp8 of all others
GEMM_KERNELS = {
    "packed 256x256": ("Li2ENS0_12PackedScales", 256),
    "raw 256x256": ("Li2ENS0_9RawScales", 256),
    "packed 256x128": ("Li1ENS0_12PackedScales", 128),
    "raw 256x128": ("Li1ENS0_9RawScales", 128),
}
FLOATS = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}  # enum class Float; uint16 holds bf16 bits


@functools.cache
def kernels(file: str, arch: str = "gfx950") -> dict[str, Kernel]:
    return compile_hip(CSRC / FILES.get(file, "mxfp8") / f"{file}_gfx950.hip", arch=arch)


def gemm_kernel(name: str) -> Kernel:
    return only(kernels("mxfp8_gemm"), GEMM_KERNELS[name][0])


def pack_a(scale: np.ndarray) -> np.ndarray:
    """mxfp8.h: (m, j) is byte (m % 64) / 16 of dword j * Mp / 4 + (m / 64) * 16 + m % 16."""
    rows, blocks = scale.shape
    padded = np.full((-(-rows // 64) * 64, blocks), 127, np.uint8)
    padded[:rows] = scale
    return np.ascontiguousarray(padded.reshape(-1, 4, 16, blocks).transpose(3, 0, 2, 1))


def pack_b(scale: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(scale.T.astype(np.int32))


def gemm_args(machine: Machine, a: np.ndarray, b: np.ndarray, a_scale: np.ndarray, b_scale: np.ndarray, bias: np.ndarray | None, out: np.ndarray) -> bytes:
    """struct GemmArgs."""
    pointers = [machine.address(t) for t in (a, b, a_scale, b_scale)] + [0 if bias is None else machine.address(bias)]
    bias_type = 0 if bias is None else FLOATS[bias.dtype]
    return struct.pack("<5QixxxxQixxxx3q", *pointers, bias_type, machine.address(out), FLOATS[out.dtype], len(a), len(b), a.shape[1])


def gemm(name: str, a, b, a_scale, b_scale, out, *, bias=None, kernel: Kernel | None = None, schedule: Schedule = LATE) -> Statistics:
    """The whole grid of a tiled kernel; scales raw, packed here where the kernel wants that."""
    columns = GEMM_KERNELS[name][1]
    if name.startswith("packed"):
        a_scale, b_scale = pack_a(a_scale), pack_b(b_scale)
    machine = Machine()
    grid = (-(-len(b) // columns), -(-len(a) // 256))
    return machine.run(Launch(kernel or gemm_kernel(name), grid, 512, (gemm_args(machine, a, b, a_scale, b_scale, bias, out),)), schedule=schedule)[0]


def skinny(a, b, a_scale, b_scale, out, *, packed: bool, bias=None, schedule: Schedule = LATE) -> Statistics:
    tiles = 1 if len(a) <= 16 else 2
    if packed:
        a_scale, b_scale = pack_a(a_scale), pack_b(b_scale)
    machine = Machine()
    kernel = only(kernels("mxfp8_skinny"), f"skinnyILi{tiles}ELb{int(packed)}E")
    return machine.run(Launch(kernel, (-(-len(b) // 16),), 512, (gemm_args(machine, a, b, a_scale, b_scale, bias, out),)), schedule=schedule)[0]


def simple(a, b, a_scale, b_scale, out, quant: str, *, bias=None, arch: str = "gfx950", schedule: Schedule = LATE) -> Statistics:
    """quant: packed, raw, ptpc, blockscale. The second argument is struct ByteScales or FloatScales."""
    (m, k), n = a.shape, len(b)
    machine = Machine()
    if quant == "packed":
        a_scale, b_scale = pack_a(a_scale), pack_b(b_scale)
    kernel, scales = simple_scales(machine, a_scale, b_scale, quant, m, n, k)
    args = gemm_args(machine, a, b, a_scale, b_scale, bias, out)
    launch = Launch(only(kernels("mxfp8_simple", arch), kernel), (-(-n // 64) * -(-m // 64),), 256, (args, scales))
    return machine.run(launch, schedule=schedule)[0]


def simple_scales(machine: Machine, a_scale: np.ndarray, b_scale: np.ndarray, quant: str, m: int, n: int, k: int) -> tuple[str, bytes]:
    """The name and the content of struct ByteScales or FloatScales."""
    pointers = [machine.address(a_scale), machine.address(b_scale)]
    if quant in ("packed", "raw"):
        return "ByteScales", struct.pack("<2Q3qBxxxxxxx", *pointers, k // 32, -(-m // 64), -(-n // 32), quant == "packed")
    ptpc = quant == "ptpc"
    return "FloatScales", struct.pack("<2Q3q", *pointers, 1 if ptpc else -(-k // 128), 2**63 - 1 if ptpc else 4, 1 if ptpc else 128)


# The element types of quantize_gfx950.hip as they stand in a symbol.
_SYMBOL = {np.dtype(np.float32): "If", np.dtype(np.uint16): "IDF16b", np.dtype(np.float16): "IDF16_"}
STRIDE = 256  # items that the flat kernels take at a time with one workgroup


def _quantize_kernel(name: str, dtype: np.dtype | None = None) -> Kernel:
    return only(kernels("quantize"), name + ("" if dtype is None else _SYMBOL[dtype]))


def _run(kernel: Kernel, grid: tuple[int, ...], *arguments: object) -> None:
    Machine().run(Launch(kernel, grid, 256, arguments))


def quantize(x: np.ndarray, rceil: bool, codes: np.ndarray, scale: np.ndarray, *, aligned: bool = True) -> None:
    _run(_quantize_kernel("quantize_rows", x.dtype), (1,), x, x.size // 32, STRIDE, rceil, aligned, codes, scale)


def quantize_weight(w: np.ndarray, rceil: bool, codes: np.ndarray, scale: np.ndarray, *, aligned: bool = True) -> None:
    n, k = w.shape
    _run(_quantize_kernel("quantize_weight", w.dtype), (-(-k // 512) * -(-n // 32),), w, n, k, rceil, aligned, codes, scale)


def dequantize(codes: np.ndarray, scale: np.ndarray, rows_per_scale: int, out: np.ndarray) -> None:
    _run(_quantize_kernel("dequantize", out.dtype), (1,), codes, scale, *codes.shape, rows_per_scale, STRIDE, out)


def pack_scales(scale: np.ndarray, side: str, out: np.ndarray) -> None:
    rows, blocks = scale.shape
    padded = (-(-rows // 64) * 64,) if side == "a" else ()
    _run(_quantize_kernel(f"pack_{side}"), (1,), scale, rows, blocks, *padded, STRIDE, out)
