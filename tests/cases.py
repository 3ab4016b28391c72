"""Shapes, inputs and tolerances that the tests and the benchmarks share.

Inputs are always fresh random data: codes over the whole finite e4m3 range, and random scales per block, so that a kernel
that mixes up blocks or rows cannot pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mori_ops import reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# (N, K) of the linear layers that the GEMMs serve, per rank.
LINEARS = {"wo_b": (5120, 2048), "wo_b_wide": (7168, 2048), "wq_b": (8192, 1280), "square": (8192, 7168)}
# (M, N, K): ragged in every dimension, one of each edge.
GEMM_SHAPES = (
    (1, 1, 32), (1, 33, 64), (2, 40, 96), (3, 64, 32), (4, 100, 256), (5, 7, 640), (8, 96, 512), (9, 65, 1408),
    (16, 128, 128), (17, 31, 160), (33, 70, 320), (64, 129, 256), (65, 768, 64), (100, 257, 192), (130, 2112, 32),
)  # fmt: skip
QUANTS = ("mxfp8", "mxfp8_raw", "ptpc", "blockscale")

# The model behind gr_down: K = 4 streams of 2560, 320 rows and 4 inject rows. The one behind qsa_flash: 24 query heads,
# 2 KV heads, head dim 256, up to 2048 + 3 cells per token.
GR_N, GR_K, GR_HC = 324, 10240, 4
QSA_HQ, QSA_HKV, QSA_D, QSA_S = 24, 2, 256, 2051

# Relative L2 error against float64 that one rounding to the format explains over many values (an rms of 1.7e-3 for
# bfloat16), with room for the spread; float32 is the accumulation's. Few values may come near the largest, half an ulp.
RELATIVE_L2 = {torch.bfloat16: 2.0e-3, torch.float16: 3.0e-4, torch.float32: 1.0e-6}
TENSOR_CORE_L2 = 1e-5  # of float32 results on a GPU: tensor cores add in their own order
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FEW = 4096


def relative_l2(result: Tensor, expected: Tensor) -> float:
    """|result - expected| / |expected| in float64."""
    result, expected = result.to(torch.float64), expected.to(torch.float64)
    return ((result - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def assert_close(result: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """`result` is finite, has the shape of `expected`, and is as near to it as its format allows."""
    assert result.shape == expected.shape, f"shape {tuple(result.shape)}, expected {tuple(expected.shape)}"
    assert result.isfinite().all(), "not finite"
    if expected.numel():
        error = relative_l2(result, expected)
        if tolerance is None:
            few = expected.numel() < FEW and result.dtype in HALF_ULP
            tolerance = (HALF_ULP if few else RELATIVE_L2)[result.dtype]
        assert error <= tolerance, f"relative L2 error {error:.3e} > {tolerance:.1e}"


def bits(t: Tensor) -> Tensor:
    """The tensor's bits as integers of the same size, strides kept."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def random_codes(*shape: int, generator: torch.Generator | None = None) -> Tensor:
    """e4m3 codes, uniform over all finite ones."""
    codes = torch.randint(0, 254, shape, dtype=torch.uint8, generator=generator)
    codes = codes + (codes >= 127).to(torch.uint8)  # skips 0x7F; 0xFF is never reached
    return codes.view(torch.float8_e4m3fn)


def blocks_of_any_size(rows: int, k: int, block_rows: int = 1, *, device: str = "cpu") -> Tensor:
    """Normal float32 values [rows, k] whose blocks of `block_rows` x 32 differ in size by up to 2^12."""
    size = torch.exp2(torch.randint(-6, 7, (-(-rows // block_rows), k // 32), device=device).float())
    return torch.randn(rows, k, device=device) * size.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(32, 1)


def random_scales(*shape: int, spread: int = 6, generator: torch.Generator | None = None) -> Tensor:
    """e8m0 bytes around 2^-12 (dot products of random codes then fit float16), +- `spread` powers of two."""
    byte = torch.randint(115 - spread, 116 + spread, shape, dtype=torch.int64, generator=generator)
    return byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def gemm_operands(m: int, n: int, k: int, quant: str = "mxfp8_raw", *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random (a, b, a_scale, b_scale) for one of QUANTS."""
    generator = torch.Generator().manual_seed(seed)
    a, b = random_codes(m, k, generator=generator), random_codes(n, k, generator=generator)
    if quant in ("mxfp8", "mxfp8_raw"):
        a_scale = random_scales(m, k // 32, generator=generator)
        b_scale = random_scales(-(-n // 32), k // 32, generator=generator)
        if quant == "mxfp8":
            a_scale, b_scale = reference.mxfp8_pack_a_scale(a_scale), reference.mxfp8_pack_b_scale(b_scale)
        return a, b, a_scale, b_scale
    shapes = ((m,), (n,)) if quant == "ptpc" else ((m, -(-k // 128)), (-(-n // 128), -(-k // 128)))
    a_scale, b_scale = (0.001 + torch.rand(shape, generator=generator) * 0.01 for shape in shapes)
    return a, b, a_scale, b_scale


def kv_cache(cells: int, heads: int, dim: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random int8 (k, v, k_scale, v_scale) whose scales differ per group."""
    generator = torch.Generator().manual_seed(seed)
    codes = lambda: torch.randint(-127, 128, (cells, heads, dim), dtype=torch.int8, generator=generator)  # noqa: E731
    scale = lambda: (0.002 + 0.02 * torch.rand(cells, heads, dim // 64, generator=generator)).half()  # noqa: E731
    return codes(), codes(), scale(), scale()


def selected_ids(tokens: int, slots: int, cells: int, *, empty: float = 0.1, seed: int = 0) -> Tensor:
    """int32 ids [tokens, slots]: random distinct cells per token, a share of the slots empty, anywhere."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.rand(tokens, max(cells, slots), generator=generator).argsort(-1)[:, :slots]
    hole = (torch.rand(tokens, slots, generator=generator) < empty) | (picks >= cells)
    return torch.where(hole, -1, picks).to(torch.int32)


def prompt_ids(tokens: int, position: int, slots: int = QSA_S, *, seed: int = 0) -> Tensor:
    """int32 ids of a prompt whose first token stands at `position`: token t selects among cells 0..position + t, all of
    them while they fit into `slots`, ascending, padded with -1; the width is the longest row's."""
    generator = torch.Generator().manual_seed(seed)
    width = min(slots, position + tokens)
    ids = torch.full((tokens, width), -1, dtype=torch.int32)
    for t in range(tokens):
        seen = position + t + 1
        row = torch.arange(seen) if seen <= slots else torch.randperm(seen, generator=generator)[:slots].sort().values
        ids[t, : row.numel()] = row.to(torch.int32)
    return ids
