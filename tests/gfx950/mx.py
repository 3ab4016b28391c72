"""MXFP8 test data and its float64 product."""

from dataclasses import dataclass

import numpy as np


def _decode(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return np.nan
    value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -value if sign else value


E4M3 = np.array([_decode(c) for c in range(256)])
E8M0 = np.append(2.0 ** (np.arange(255.0) - 127), np.nan)


@dataclass
class Operands:
    a: np.ndarray  # [M, K] codes
    b: np.ndarray  # [N, K]
    a_scale: np.ndarray  # [M, K / 32]
    b_scale: np.ndarray  # [N / b_rows, K / 32]
    product: np.ndarray  # [M, N] float64


def operands(m: int, n: int, k: int, *, b_rows: int = 1, seed: int = 0, scales: tuple[int, int] = (118, 132)) -> Operands:
    """Random codes (no NaN) and random scales per block; a scale of B covers b_rows rows."""
    rng = np.random.default_rng(seed)
    codes = [rng.integers(0, 256, (rows, k), dtype=np.uint8) for rows in (m, n)]
    for c in codes:
        c[c & 0x7F == 0x7F] = 0x30
    a_scale = rng.integers(*scales, (m, k // 32), dtype=np.uint8)
    b_scale = rng.integers(*scales, (-(-n // b_rows), k // 32), dtype=np.uint8)
    return Operands(*codes, a_scale, b_scale, decode(codes[0], a_scale) @ decode(codes[1], b_scale, b_rows).T)


def decode(codes: np.ndarray, scale: np.ndarray, rows: int = 1) -> np.ndarray:
    return E4M3[codes] * np.repeat(np.repeat(E8M0[scale], rows, 0)[: len(codes)], 32, 1)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
