"""gr_down on Metal: the size of the model for every window, equal bits of all members of a KS, rows that keep their bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mori_ops
from mori_ops import mps, reference
from tests import cases
from tests.cases import assert_close, same_bits
from tests.metal import emulator
from tests.metal.device import DEVICE, emulated_only, gpu, metal_operators, needs_metal, settings  # noqa: F401

pytestmark = needs_metal
MEMBERS = {4: ("4_4", "4_4_r2"), 8: ("8_8", "8_8_r2")}  # by KS
EXPERIMENTS = {4: ("4_4_r4", "8_4", "8_4_r2", "16_4", "32_4"), 8: ("8_8_r4", "16_8")}  # lost in the public report; for bench/compare.py
WINDOWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 64)


def random_q8(n: int, k: int, *, seed: int = 0) -> Tensor:
    """Q8_0 bytes with every code, -128 included, and a scale per block of either sign."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (n, k // 32, 34), dtype=torch.uint8, generator=generator)
    blocks[..., :2] = (torch.randn(n, k // 32, 1, generator=generator) * 0.01).half().view(torch.uint8)
    return blocks.flatten(1)


def random_x(ntok: int, k: int, dtype: torch.dtype = torch.float32, *, seed: int = 1) -> Tensor:
    return torch.randn(ntok, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def down(x: Tensor, w: Tensor, norm: Tensor | None = None, **options: object) -> Tensor:
    """The public operator, from and to the host."""
    return mori_ops.gr_down(x.to(DEVICE), w.to(DEVICE), norm_weight=None if norm is None else norm.to(DEVICE), **options).cpu()


def member(x: Tensor, w: Tensor, name: str, norm: Tensor | None = None, **options: object) -> Tensor:
    """The launch below the operator, for members that it does not choose."""
    out = torch.full((x.shape[0], w.shape[0]), torch.nan, device=DEVICE)
    mps.project(x.to(DEVICE), w.to(DEVICE), None if norm is None else norm.to(DEVICE), 1e-6, 4, name, out, **options)
    return out.cpu()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ks", MEMBERS)
def test_every_window_of_the_model_by_every_member(ks: int, fused: bool) -> None:
    w, x = random_q8(cases.GR_N, cases.GR_K), random_x(8, cases.GR_K)
    norm = 0.5 + torch.rand(cases.GR_K, generator=torch.Generator().manual_seed(3)) if fused else None
    whole = down(x, w, norm, variant=MEMBERS[ks][0])
    assert_close(whole, reference.gr_down(x, w, norm_weight=norm))
    for ntok in range(1, 9):
        for variant in MEMBERS[ks]:
            assert same_bits(down(x[:ntok], w, norm, variant=variant), whole[:ntok]), (variant, ntok)


@pytest.mark.parametrize("ks", MEMBERS)
def test_a_rolled_token_loop_and_the_experiments_give_the_same_bits(ks: int) -> None:
    w, x, norm = random_q8(21, 1120), random_x(8, 1120), torch.rand(1120)
    for weights in (None, norm):
        for ntok in (1, 5, 8):
            first = member(x[:ntok], w, MEMBERS[ks][0], weights)
            for name in (*MEMBERS[ks], *EXPERIMENTS[ks]):
                assert same_bits(member(x[:ntok], w, name, weights), first), (name, ntok)
            for rolled in (False, True):
                assert same_bits(member(x[:ntok], w, MEMBERS[ks][1], weights, rolled=rolled), first), (rolled, ntok)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("n, k", [(1, 32), (7, 96), (61, 544), (33, 1056)])
def test_any_size(gpu: str, n: int, k: int, dtype: torch.dtype) -> None:  # noqa: F811
    w = random_q8(n, k)
    for ntok in WINDOWS:
        x = random_x(ntok, k, dtype)
        assert_close(down(x, w), reference.gr_down(x, w))


@pytest.mark.parametrize("dtype, norm_dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize("hc", [1, 2, 4, 11, 352])
def test_fused_norm_of_any_group(hc: int, dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
    k = 352  # 11 units: no whole runs, so that only K 1408 takes the fused kernel
    for k in (352, 1408):
        w, norm = random_q8(13, k), (0.5 + torch.rand(k, generator=torch.Generator().manual_seed(3))).to(norm_dtype)
        for ntok in (1, 3, 9):
            x = (random_x(ntok, k) * torch.exp(random_x(ntok, 1, seed=2) * 2)).to(dtype)
            want = reference.gr_down(x, w, norm_weight=norm, hc=hc, eps=1e-3)
            for variant in ("auto", "auto_8"):
                assert_close(down(x, w, norm, hc=hc, eps=1e-3, variant=variant), want)


@pytest.mark.parametrize("hc", [4, 8])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-18, 1e18, 1e30])
def test_fused_norm_squares_neither_overflow_nor_vanish(magnitude: float, hc: int) -> None:
    x, w, norm = random_x(3, 256), random_q8(5, 256), torch.rand(256)
    x[1] *= magnitude  # beside tokens that need no care
    x[2, 64:128] *= magnitude
    for eps in (0.0, 1e-6):
        assert_close(down(x, w, norm, eps=eps, hc=hc), reference.gr_down(x, w, norm_weight=norm, eps=eps, hc=hc))


def test_zero_groups_with_eps_give_zeros() -> None:
    x, w, norm = torch.zeros(2, 256), random_q8(5, 256), torch.rand(256)
    for hc in (4, 8):
        assert (down(x, w, norm, hc=hc) == 0).all()


def test_n14_a_row_keeps_its_bits_in_any_window_and_at_any_place(gpu: str) -> None:  # noqa: F811
    w, row, norm = random_q8(41, 1152), random_x(1, 1152, seed=5), torch.rand(1152)
    for weights in (None, norm):
        alone = down(row, w, weights)
        for ntok in WINDOWS:
            for place in {0, ntok // 2, ntok - 1}:
                x = random_x(ntok, 1152)
                x[place] = row[0]
                assert same_bits(down(x, w, weights)[place], alone[0]), (ntok, place)


def test_an_output_column_keeps_its_bits_for_any_number_of_rows(gpu: str) -> None:  # noqa: F811
    w, x = random_q8(11, 608), random_x(6, 608)
    full = down(x, w)
    for n in (1, 2, 5, 10):
        assert same_bits(down(x, w[:n]), full[:, :n].contiguous())


@pytest.mark.parametrize("ntok", range(1, 10))
def test_n13_large_activations_and_extreme_blocks_are_exact(ntok: int) -> None:
    def blocks(d: float, q: int) -> Tensor:
        return torch.cat([torch.tensor([d]).half().view(torch.uint8), torch.full((32,), q, dtype=torch.int8).view(torch.uint8)]).repeat(3, 8)

    for dtype in (torch.bfloat16, torch.float32):
        assert (down(torch.full((ntok, 256), 99840.0, dtype=dtype), blocks(2.0**-10, 1)) == 24960).all()
    x = torch.full((ntok, 256), 3.0)
    for d, q in ((0.5, -128), (0.0, 127), (-0.25, 127), (2.0**-24, 1), (2.0**-24, -128), (65504.0, -128)):
        assert (down(x, blocks(d, q)) == 256 * 3 * d * q).all(), (d, q)


def test_nan_and_infinity_reach_only_their_own_token_or_row(gpu: str) -> None:  # noqa: F811
    x, w = random_x(9, 96), random_q8(13, 96)
    for norm in (None, torch.rand(96)):
        x[4, 50], bad = 1.0, w.clone()
        clean = down(x, w, norm, hc=3)
        x[4, 50] = torch.nan
        bad[7, 34:36] = torch.tensor([torch.inf]).half().view(torch.uint8)
        y = down(x, bad, norm, hc=3)
        assert y[4].isnan().all() and not y[:, 7].isfinite().any()
        others, columns = [t for t in range(9) if t != 4], [n for n in range(13) if n != 7]
        assert same_bits(y[others][:, columns], clean[others][:, columns])


def test_s3_empty_dimensions() -> None:
    w = random_q8(5, 64)
    for ntok in (0, 1, 9):
        for n in (0, 5):
            assert down(random_x(ntok, 64), w[:n], torch.ones(64)).shape == (ntok, n)
    assert same_bits(down(torch.zeros(3, 0), w[:, :0]), torch.zeros(3, 5))


@emulated_only
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ks", MEMBERS)
def test_bits_depend_on_no_order_of_lanes_and_the_checker_is_content(ks: int, fused: bool) -> None:
    w, x, norm = random_q8(7, 1152), random_x(6, 1152), torch.rand(1152) if fused else None
    for name in (*MEMBERS[ks], *EXPERIMENTS[ks][:1]):
        first = member(x, w, name, norm)
        for changes in ({"order": "reverse"}, {"order": "shuffled", "seed": 3}, {"checked": True}, {"checked": True, "order": "reverse"}):
            with settings(**changes):
                assert same_bits(member(x, w, name, norm), first), (name, changes)


@emulated_only
@pytest.mark.parametrize("simd_sum", emulator.SIMD_SUMS)
def test_members_agree_under_any_tree_of_a_lane_sum(simd_sum: str) -> None:
    w, x = random_q8(9, 1120), random_x(7, 1120)
    with settings(simd_sum=simd_sum):
        for names in MEMBERS.values():
            results = [member(x, w, name) for name in names]
            assert same_bits(*results)
            assert_close(results[0], reference.gr_down(x, w))


def test_refused_inputs_are_named_and_write_nothing() -> None:
    x, w = torch.zeros(2, 64, device=DEVICE), torch.zeros(3, 68, dtype=torch.uint8, device=DEVICE)
    out = torch.full((2, 3), 7.0, device=DEVICE)
    for options, message in (
        ({"variant": "4_8"}, "variant must be 'auto'.*got '4_8'"),
        ({"variant": "8_4"}, "variant must be 'auto'.*got '8_4'"),  # an experiment is no variant
        ({"norm_weight": torch.ones(64, device=DEVICE), "hc": 3}, "hc must be positive and divide K = 64, got 3"),
        ({"norm_weight": torch.ones(32, device=DEVICE)}, r"norm_weight must have shape \[64\]"),
    ):
        with pytest.raises(ValueError, match=f"gr_down: {message}"):
            torch.ops.mori.gr_down.out(x, w, out=out, **options)
    with pytest.raises(ValueError, match="K a multiple of 32"):
        mori_ops.q8_0_quantize(torch.zeros(2, 33, device=DEVICE))
    with pytest.raises(ValueError, match=r"Q8_0 bytes .* got uint8 \[2, 33\]"):
        mori_ops.q8_0_dequantize(torch.zeros(2, 33, dtype=torch.uint8, device=DEVICE))
    assert (out == 7).all()


def test_a_block_with_nan_or_infinity_reads_back_as_nan_and_spares_its_neighbours() -> None:
    w = random_x(4, 96)
    w[0, 40], w[1, 33], w[2, 63] = torch.nan, torch.inf, -torch.inf
    packed = mori_ops.q8_0_quantize(w.to(DEVICE))
    back = mori_ops.q8_0_dequantize(packed).cpu()
    assert back[:3, 32:64].isnan().all()
    assert back[:, :32].isfinite().all() and back[:, 64:].isfinite().all() and back[3].isfinite().all()
    assert (packed[:3, 36:68] == 0).all()


def test_quantise_ties_and_the_range_of_the_scale() -> None:
    w = torch.arange(-126.5, 127, 0.5)[: 15 * 33].reshape(15, 33)
    w[:, 0] = 127  # d = 1: half of the values are exact ties
    exponents = torch.exp2(torch.arange(-119, 119).float())[:, None]  # an fp32 subnormal d may be flushed
    for values in (w[:, :32].contiguous(), random_x(238, 32) * exponents):
        assert same_bits(mori_ops.q8_0_quantize(values.to(DEVICE)).cpu(), reference.q8_0_quantize(values))
