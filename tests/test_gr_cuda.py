"""gr_down on CUDA: every route against float64, bits that hold whatever the window, extreme operands.

Skipped where there is no CUDA device, or no CUDA backend in the build.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mori_ops
from mori_ops import reference
from tests import cases

HAS_CUDA = torch.cuda.is_available() and mori_ops.kernels()["gr_down"]["cuda"]
pytestmark = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device or no CUDA backend in this build")

N, K, HC = cases.GR_N, cases.GR_K, cases.GR_HC
NORM_TYPES = (None, *cases.DTYPES)
# Full and partial groups of 8 tokens, a few and many.
WINDOWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 24, 25, 63, 64, 65, 128, 129, 256, 300, 512, 600, 1100)


def random_rows(ntok: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return cases.blocks_of_any_size(ntok, k, device="cuda").to(dtype)


def random_weight(n: int, k: int) -> Tensor:
    """All codes, -128 included, and scales of both signs."""
    blocks = torch.randint(0, 256, (n, k // 32, 34), dtype=torch.uint8, device="cuda")
    blocks[..., :2] = (torch.randn(n, k // 32, 1, device="cuda") * 0.01).half().view(torch.uint8)
    return blocks.flatten(1)


def norm_options(k: int, hc: int, dtype: torch.dtype | None) -> dict[str, Any]:
    return {} if dtype is None else {"norm_weight": (torch.rand(k, device="cuda") + 0.5).to(dtype), "hc": hc}


def route(ntok: int, n: int = N, k: int = K) -> str:
    return mori_ops.route("gr_down", ntok=ntok, n=n, k=k, device="cuda").kernel


def check(x: Tensor, w: Tensor, **options: Any) -> Tensor:
    """The result, which matches float64, repeats, and is written whole."""
    result = mori_ops.gr_down(x, w, **options)
    handful = result.numel() < 16  # these may all be small differences of large sums
    cases.assert_close(result, reference.gr_down(x, w, **options), cases.TENSOR_CORE_L2 if handful else None)
    out = torch.full_like(result, torch.nan)
    torch.ops.mori.gr_down.out(x, w, out=out, **options)
    assert torch.equal(out, result)
    return result


@pytest.mark.parametrize("norm_type", NORM_TYPES, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_every_route_matches_float64(dtype: torch.dtype, norm_type: torch.dtype | None) -> None:
    w, options = random_weight(N, K), norm_options(K, HC, norm_type)
    for ntok in WINDOWS:
        check(random_rows(ntok, K, dtype), w, **options)


@pytest.mark.parametrize("norm_type", [None, torch.bfloat16], ids=str)
def test_a_row_keeps_its_bits_in_every_window_of_its_route(norm_type: torch.dtype | None) -> None:
    x, w, options = random_rows(1200, K), random_weight(N, K), norm_options(K, HC, norm_type)
    of_route: dict[str, Tensor] = {}
    for ntok in (1200, 641, 640, 500, 321, 320, 200, 129, 128, 100, *range(70, 0, -1)):
        result = check(x[:ntok], w, **options)
        longest = of_route.setdefault(route(ntok), result)
        assert torch.equal(result, longest[:ntok]), ntok
    assert len({route(ntok) for ntok in range(1, 9)}) == 1
    for ntok, start in ((1, 5), (3, 9), (8, 13)):  # at another place among other rows
        assert torch.equal(mori_ops.gr_down(x[start : start + ntok], w, **options), of_route[route(ntok)][start : start + ntok])


@pytest.mark.parametrize("ntok", [1, 8, 20, 70, 200])
@pytest.mark.parametrize("n, k", [(1, 32), (17, 96), (500, 448), (1, 256), (193, 1280), (385, 11520), (330, 20480), (97, 2048), (40, 8192)])
def test_ragged_shapes_match_float64(n: int, k: int, ntok: int) -> None:
    x, w = random_rows(ntok, k), random_weight(n, k)
    whole = check(x, w)
    check(x, w, **norm_options(k, 1, torch.float32))
    if k % 128 == 0:
        check(x, w, **norm_options(k, 4, torch.bfloat16))
    assert torch.equal(mori_ops.gr_down(x, w[: n // 2 + 1]), whole[:, : n // 2 + 1])  # a column's bits do not depend on n


@pytest.mark.parametrize("ntok", [3, 20, 100])
def test_misaligned_and_strided_operands_give_the_bits_of_dense_ones(ntok: int) -> None:
    options = norm_options(K, HC, torch.bfloat16)
    w = random_weight(N, K)
    for dtype in cases.DTYPES:
        x = random_rows(ntok, K, dtype)
        wanted = mori_ops.gr_down(x, w, **options)
        room = torch.zeros(ntok, K + 8, dtype=dtype, device="cuda")
        room[:, 1 : K + 1] = x
        assert torch.equal(mori_ops.gr_down(room[:, 1 : K + 1], w, **options), wanted)
        flat = torch.zeros(ntok * K + 1, dtype=dtype, device="cuda")
        flat[1:] = x.flatten()
        assert torch.equal(mori_ops.gr_down(flat[1:].view(ntok, K), w, **options), wanted)
    for offset in (1, 2, 4, 8):
        flat = torch.zeros(w.numel() + offset, dtype=torch.uint8, device="cuda")
        flat[offset:] = w.flatten()
        assert torch.equal(mori_ops.gr_down(x, flat[offset:].view_as(w), **options), wanted)
    flat = torch.zeros(K + 1, dtype=torch.bfloat16, device="cuda")
    flat[1:] = options["norm_weight"]
    assert torch.equal(mori_ops.gr_down(x, w, norm_weight=flat[1:], hc=HC), wanted)


@pytest.mark.parametrize("ntok", [8, 30, 100])
def test_rows_of_any_magnitude_are_as_accurate_as_others(ntok: int) -> None:
    w = random_weight(N, K)
    x = random_rows(ntok, K) * torch.exp2(torch.randint(-60, 60, (ntok, 1), device="cuda").float())
    x[0], x[1, ::3], x[2] = 0, 0, x[2] * 1e-20
    result, wanted = check(x, w), reference.gr_down(x, w)
    for token in range(ntok):
        cases.assert_close(result[token], wanted[token].to(torch.float64), 2e-6)
    norm = norm_options(K, HC, torch.float32)
    result, wanted = mori_ops.gr_down(x, w, **norm), reference.gr_down(x, w, **norm)
    for token in range(1, ntok):
        cases.assert_close(result[token], wanted[token], 2e-6)


@pytest.mark.parametrize("norm_type", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("ntok", [8, 30, 100])
def test_nan_and_infinity_stay_in_their_token_or_row(ntok: int, dtype: torch.dtype, norm_type: torch.dtype | None) -> None:
    w, x, options = random_weight(N, K), random_rows(ntok, K, dtype), norm_options(K, HC, norm_type)
    clean = mori_ops.gr_down(x, w, **options)
    x[1, 77], x[4, K - 1], x[ntok - 1, 0] = torch.nan, torch.inf, -torch.inf
    w[7, 34:36] = torch.tensor([torch.inf]).half().view(torch.uint8).cuda()
    w[N - 1, :2] = torch.tensor([torch.nan]).half().view(torch.uint8).cuda()
    y = mori_ops.gr_down(x, w, **options)
    bad, rows = [1, 4, ntok - 1], [7, N - 1]
    assert y[1].isnan().all() and not y[bad].isfinite().any() and not y[:, rows].isfinite().any()
    tokens, columns = [t for t in range(ntok) if t not in bad], [n for n in range(N) if n not in rows]
    assert torch.equal(y[tokens][:, columns], clean[tokens][:, columns])


@pytest.mark.parametrize("ntok", [8, 30, 100])
def test_extreme_codes_and_scales_are_exact(ntok: int) -> None:
    x = torch.full((ntok, 10240), 3.0, device="cuda")
    for d, code in ((0.5, -128), (0.0, 127), (-0.25, 127), (2.0**-24, 1), (2.0**-24, -128), (65504.0, -128)):
        block = torch.cat((torch.tensor([d]).half().view(torch.uint8), torch.full((32,), code, dtype=torch.int8).view(torch.uint8)))
        assert (mori_ops.gr_down(x, block.repeat(5, 320).cuda()) == 10240 * 3 * d * code).all(), (d, code)


def test_routes_say_which_kernel_runs() -> None:
    tokens = (1, 24, 25, 64, 65, 128, 320, 640, 1024)
    routes = ["cluster"] * 2 + ["tiles_256"] * 2 + ["tiles_512"] * 2 + ["tiles_768", "tiles_1280", "tiles_2560"]
    assert [route(ntok) for ntok in tokens] == routes
    assert route(1, k=1280) == route(24, k=20480) == "tiles_256" and route(1, k=96) == "rows"
