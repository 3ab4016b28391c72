"""gemm_ar on the CPU over gloo: exact sums, one rounding, agreement between ranks, errors that leave the group usable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mori_ops
from mori_ops import collectives, reference
from mori_ops.collectives import REFUSED, Group, gloo_group
from mori_ops.distributed import GemmAllReduce, shard
from mori_ops.nn import Mxfp8Linear, RowParallelMxfp8Linear
from mori_ops.symmetric import Board
from tests import cases
from tests.distributed_worker import Ranks

OPERANDS = ("a", "b", "a_scale", "b_scale")
BF16_LIMIT = 2.5e-3
FP8_WIRE_LIMITS = (5e-3, 4.5e-2)  # two-sided: an unused wire is noticed


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


# --- operands ---------------------------------------------------------------------------------------------------------


def random_operands(rank: int, m: int, n: int, k: int, quant: str, seed: int = 0) -> tuple[Tensor, ...]:
    return cases.gemm_operands(m, n, k, quant, seed=1000 * seed + rank)


def integer_operands(rank: int, m: int, n: int, k: int, quant: str, seed: int = 0) -> tuple[Tensor, ...]:
    """Small integers with small integer scales: every sum is exact in fp32."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)

    def codes(rows: int) -> Tensor:
        return torch.randint(-4, 5, (rows, k), generator=generator).float().to(torch.float8_e4m3fn)

    def scales(*shape: int) -> Tensor:
        value = torch.randint(0, 2, shape, generator=generator)
        return (127 + value).to(torch.uint8) if quant.startswith("mxfp8") else 1.0 + value

    a, b = codes(m), codes(n)
    if quant == "ptpc":
        return a, b, scales(m), scales(n)
    if quant == "blockscale":
        return a, b, scales(m, -(-k // 128)), scales(-(-n // 128), -(-k // 128))
    a_scale, b_scale = scales(m, k // 32), scales(-(-n // 32), k // 32)
    if quant == "mxfp8":
        a_scale, b_scale = reference.mxfp8_pack_a_scale(a_scale), reference.mxfp8_pack_b_scale(b_scale)
    return a, b, a_scale, b_scale


def expected_sum(operands, world: int, *args) -> Tensor:
    """float64; every rank can make every rank's operands."""
    quant = args[3]
    return sum(reference.scaled_gemm(*operands(rank, *args), quant) for rank in range(world))


def bias_of(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32) * 3 - 7


def message(error: type[Exception], function, *args, **kwargs) -> str:
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def assert_same_on_all_ranks(result: Tensor, group) -> None:
    everyone = [None] * group.size()
    dist.all_gather_object(everyone, result.contiguous().view(torch.uint8).tolist(), group=group)
    assert all(other == everyone[0] for other in everyone)


def assert_next_call_works(group) -> None:
    args = (3, 33, 64, "ptpc", 99)
    result = mori_ops.gemm_ar(*integer_operands(group.rank(), *args), "ptpc", group, out_dtype=torch.float32)
    assert torch.equal(result.double(), expected_sum(integer_operands, group.size(), *args))


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", cases.QUANTS)
@pytest.mark.parametrize("out_dtype", cases.DTYPES)
def test_without_a_process_group_it_is_the_plain_gemm_bitwise_d8(quant, out_dtype):
    operands = random_operands(0, 17, 33, 192, quant)
    for bias in (None, torch.randn(33)):
        plain = mori_ops.scaled_gemm(*operands, quant, bias=bias, out_dtype=out_dtype)
        for wire in ("bf16", "fp8"):
            assert cases.same_bits(mori_ops.gemm_ar(*operands, quant, bias=bias, out_dtype=out_dtype, wire=wire), plain)
        out = torch.full_like(plain, torch.nan)
        torch.ops.mori.gemm_ar.out(*operands, quant, "", bias=bias, out=out)
        assert cases.same_bits(out, plain)


def test_leading_dimensions_stay():
    a, b, a_scale, b_scale = random_operands(0, 6, 33, 64, "mxfp8_raw")
    flat = mori_ops.gemm_ar(a, b, a_scale, b_scale, "mxfp8_raw")
    shaped = mori_ops.gemm_ar(a.view(2, 3, 64), b, a_scale.view(2, 3, 2), b_scale, "mxfp8_raw")
    assert shaped.shape == (2, 3, 33) and torch.equal(shaped.view(6, 33), flat)


REFUSED = {
    "a_scale": (lambda a, b, sa, sb: (a, b, sa.double(), sb, "ptpc"), {}, "gemm_ar: a_scale must be float32, got float64"),
    "b": (lambda a, b, sa, sb: (a, b[:, :32], sa, sb, "ptpc"), {}, "gemm_ar: b must have the K of a, 64, got"),
    "quant": (lambda a, b, sa, sb: (a, b, sa, sb, "int4"), {}, "gemm_ar: quant must be 'ptpc', 'blockscale', .* got 'int4'"),
    "fp32 scales for mxfp8 (N12)": (lambda a, b, sa, sb: (a, b, sa, sb, "mxfp8"), {}, "a_scale must be int32, got float32"),
    "wire": (lambda *args: (*args, "ptpc"), {"wire": "fp4"}, "gemm_ar: wire must be 'bf16' or 'fp8', got 'fp4'"),
    "bias": (lambda *args: (*args, "ptpc"), {"bias": torch.zeros(5)}, r"gemm_ar: bias must have shape \[33\] \(N\), got"),
    "out_dtype": (lambda *args: (*args, "ptpc"), {"out_dtype": torch.float64}, "gemm_ar: out_dtype must be .* got float64"),
    "group": (lambda *args: (*args, "ptpc", 7), {}, "gemm_ar: group must be a process group .* got 7"),
    "group name": (lambda *args: (*args, "ptpc", "nobody"), {}, "gemm_ar: group_name must name .* got 'nobody'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_by_name(case):
    change, options, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        mori_ops.gemm_ar(*change(*random_operands(0, 3, 33, 64, "ptpc")), **options)


def test_a_refused_out_is_not_written():
    operands = random_operands(0, 3, 33, 64, "ptpc")
    for out in (torch.full((3, 32), 7.0), torch.full((33, 3), 7.0).t(), torch.full((3, 33), 7.0, dtype=torch.float64)):
        with pytest.raises(ValueError, match="gemm_ar: out must"):
            torch.ops.mori.gemm_ar.out(*operands, "ptpc", "", out=out)
        assert (out == 7).all()


def test_meta_tensors_give_the_shape_without_a_group():
    operands = [t.to("meta") for t in random_operands(0, 3, 33, 64, "mxfp8_raw")]
    result = torch.ops.mori.gemm_ar(*operands, "mxfp8_raw", "a group that is not there", out_dtype=torch.float16)
    assert result.device.type == "meta" and result.shape == (3, 33) and result.dtype == torch.float16


# --- several processes: values ----------------------------------------------------------------------------------------


def check_integer_sums(group, shapes: list[tuple[int, int, int]]) -> None:
    for seed, (m, n, k) in enumerate(shapes):
        for quant in cases.QUANTS:
            operands = integer_operands(group.rank(), m, n, k, quant, seed)
            expected = expected_sum(integer_operands, group.size(), m, n, k, quant, seed)
            for out_dtype in cases.DTYPES:
                result = mori_ops.gemm_ar(*operands, quant, group, out_dtype=out_dtype)
                assert result.dtype == out_dtype and result.is_contiguous()
                assert torch.equal(result, expected.to(out_dtype)), (m, n, k, quant, out_dtype)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_integer_sums_are_exact_at_any_m(ranks, world):
    """Fewer rows than ranks, rows that do not divide by them, none at all (S3); N smaller and larger than a block."""
    ranks.run(check_integer_sums, [(m, 33, 64) for m in (0, 1, 2, 3, 5, 64, 67)] + [(4, 0, 64), (5, 1, 32)], world=world)


@pytest.mark.parametrize("world", [2, 3])
def test_shards_smaller_than_a_block_s10(ranks, world):
    shapes = [(5, n, k) for n in (1, 33, 768, 2112) for k in (64, 192)] + [(3, 40, 576), (3, 48, 192)]
    ranks.run(check_integer_sums, shapes, world=world)


def check_blockscale_scales(group) -> None:
    ones = torch.ones(2, 128).to(torch.float8_e4m3fn)
    scales = torch.full((2, 1), 1.5), torch.full((1, 1), 1.25)
    assert (mori_ops.gemm_ar(ones, ones, *scales, "blockscale", group) == 240.0 * group.size()).all()


def test_scales_that_are_no_powers_of_two_n12(ranks):
    ranks.run(check_blockscale_scales, world=2)


def check_random_sums(group) -> None:
    for quant in cases.QUANTS:
        args = (65, 257, 320, quant)
        operands = random_operands(group.rank(), *args)
        expected = expected_sum(random_operands, group.size(), *args)
        for out_dtype, limit in ((torch.bfloat16, BF16_LIMIT), (torch.float32, 1e-6)):
            result = mori_ops.gemm_ar(*operands, quant, group, out_dtype=out_dtype)
            cases.assert_close(result, expected, limit)
            assert cases.same_bits(mori_ops.gemm_ar(*operands, quant, group, out_dtype=out_dtype), result)
            assert_same_on_all_ranks(result, group)


def test_the_route_says_which_algorithm_runs():
    assert mori_ops.route("gemm_ar", world=1, m=4096, n=7168).kernel == "plain"
    assert mori_ops.route("gemm_ar", world=2, m=1, n=7168).kernel == "one_shot"
    assert mori_ops.route("gemm_ar", world=2, m=4096, n=7168).kernel == "bands"


def check_rows_do_not_depend_on_m(group) -> None:
    a, b, a_scale, b_scale = random_operands(group.rank(), 70, 1024, 64, "mxfp8_raw")
    for wire in collectives.WIRES:
        many = mori_ops.gemm_ar(a, b, a_scale, b_scale, "mxfp8_raw", group, wire=wire)
        few = mori_ops.gemm_ar(a[:5], b, a_scale[:5], b_scale, "mxfp8_raw", group, wire=wire)
        assert cases.same_bits(many[:5], few)


def test_a_row_has_the_same_bits_by_every_algorithm(ranks):
    kernels = [mori_ops.route("gemm_ar", world=3, m=m, n=1024).kernel for m in (5, 70)]
    assert kernels == ["one_shot", "bands"]
    ranks.run(check_rows_do_not_depend_on_m, world=3)


@pytest.mark.parametrize("world", [2, 3])
def test_random_sums_are_near_float64_and_the_same_bits_on_all_ranks_and_runs(ranks, world):
    ranks.run(check_random_sums, world=world)


def check_fp8_wire(group) -> None:
    for m in (1, 65):
        args = (m, 257, 320, "mxfp8_raw")
        operands = random_operands(group.rank(), *args)
        exact = mori_ops.gemm_ar(*operands, "mxfp8_raw", group, out_dtype=torch.float32)
        result = mori_ops.gemm_ar(*operands, "mxfp8_raw", group, wire="fp8")
        error = cases.relative_l2(result, expected_sum(random_operands, group.size(), *args))
        assert FP8_WIRE_LIMITS[0] < error < FP8_WIRE_LIMITS[1], error
        assert_same_on_all_ranks(result, group)
        scale = exact.abs().amax(1, keepdim=True) / 448
        coded = (exact / scale).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(result, coded.bfloat16())
    zero = torch.zeros(3, 64).to(torch.float8_e4m3fn)
    scales = torch.ones(3), torch.ones(3)
    assert (mori_ops.gemm_ar(zero, zero, *scales, "ptpc", group, wire="fp8") == 0).all()


@pytest.mark.parametrize("world", [2, 3])
def test_fp8_wire_rounds_every_row_once_to_e4m3(ranks, world):
    ranks.run(check_fp8_wire, world=world)


def check_bias(group) -> None:
    for wire in ("bf16", "fp8"):
        zero = torch.zeros(5, 64).to(torch.float8_e4m3fn)
        b = torch.ones(33, 64).to(torch.float8_e4m3fn)
        once = mori_ops.gemm_ar(zero, b, torch.ones(5), torch.ones(33), "ptpc", group, bias=torch.full((33,), 7.0), wire=wire)
        assert (once == 7).all()
    args = (5, 33, 64, "mxfp8_raw")
    operands = integer_operands(group.rank(), *args)
    exact = expected_sum(integer_operands, group.size(), *args) + bias_of(33).double()
    for dtype in cases.DTYPES:
        result = mori_ops.gemm_ar(*operands, "mxfp8_raw", group, bias=bias_of(33).to(dtype))
        assert torch.equal(result, exact.bfloat16())  # one rounding: rounding the sum first would differ in a few places


@pytest.mark.parametrize("world", [1, 2, 3])
def test_bias_is_added_once_before_the_one_rounding(ranks, world):
    ranks.run(check_bias, world=world)


def check_uneven_k(group) -> None:
    shapes = [(7, 33, 32 * (rank + 1), "mxfp8_raw") for rank in range(group.size())]
    parts = [integer_operands(rank, *shape) for rank, shape in enumerate(shapes)]
    result = mori_ops.gemm_ar(*parts[group.rank()], "mxfp8_raw", group, out_dtype=torch.float32)
    assert torch.equal(result.double(), sum(reference.scaled_gemm(*part, "mxfp8_raw") for part in parts))


def test_ranks_may_hold_slices_of_different_width(ranks):
    ranks.run(check_uneven_k, world=3)


def check_strided(group) -> None:
    args = (6, 33, 64, "mxfp8_raw")
    a, b, a_scale, b_scale = random_operands(group.rank(), *args)
    expected = mori_ops.gemm_ar(a, b, a_scale, b_scale, "mxfp8_raw", group)
    wide = torch.zeros(6, 2, 64).to(torch.float8_e4m3fn)
    wide[:, 1] = a
    strided = wide[:, 1], b.t().contiguous().t(), a_scale.t().contiguous().t(), b_scale
    assert not strided[0].is_contiguous() and not strided[1].is_contiguous()
    assert cases.same_bits(mori_ops.gemm_ar(*strided, "mxfp8_raw", group), expected)


def test_strided_operands_give_the_same_bits(ranks):
    ranks.run(check_strided, world=2)


def check_out(group) -> None:
    for m, wire in ((0, "bf16"), (1, "bf16"), (5, "bf16"), (5, "fp8")):
        operands = random_operands(group.rank(), m, 33, 64, "mxfp8_raw")
        expected = mori_ops.gemm_ar(*operands, "mxfp8_raw", group, bias=bias_of(33), wire=wire)
        out = torch.full((m, 33), torch.nan, dtype=torch.bfloat16)
        torch.ops.mori.gemm_ar.out(*operands, "mxfp8_raw", group.group_name, bias=bias_of(33), wire=wire, out=out)
        assert cases.same_bits(out, expected)


@pytest.mark.parametrize("world", [2, 3])
def test_out_overload_fills_the_callers_tensor(ranks, world):
    ranks.run(check_out, world=world)


def check_many_bands(group) -> None:
    """Bands of 128 rows, the last one lower than the world; every algorithm's bits are those of one band."""
    m, n, k = 128 * 3 + 1, 65, 96
    for quant in cases.QUANTS:
        exact = integer_operands(group.rank(), m, n, k, quant, 3)
        expected = expected_sum(integer_operands, group.size(), m, n, k, quant, 3) + bias_of(n).double()
        result = mori_ops.gemm_ar(*exact, quant, group, bias=bias_of(n), out_dtype=torch.float32)
        assert torch.equal(result.double(), expected)
    operands = random_operands(group.rank(), m, n, k, "mxfp8_raw")
    for wire in collectives.WIRES:
        whole = mori_ops.gemm_ar(*operands, "mxfp8_raw", group, wire=wire)
        assert_same_on_all_ranks(whole, group)
        first = [operands[0][:128], operands[1], operands[2][:128], operands[3]]
        assert cases.same_bits(mori_ops.gemm_ar(*first, "mxfp8_raw", group, wire=wire), whole[:128])


@pytest.mark.parametrize("world", [2, 3])
def test_rows_in_several_bands_have_the_bits_of_one(ranks, world):
    heights = [collectives.band_height(rows) for rows in range(1, 9000)]
    assert heights == sorted(heights) and all(height % 64 == 0 for height in heights)
    ranks.run(check_many_bands, world=world)


# --- several processes: the object of engines -------------------------------------------------------------------------


def check_object(group) -> None:
    with GemmAllReduce(m_max=130, n_max=65, group=group) as all_reduce:
        before = all_reduce.nbytes
        for seed, (m, n) in enumerate([(130, 65), (1, 33), (0, 65), (7, 65), (129, 64)]):
            for quant, wire in zip(cases.QUANTS, ("bf16", "fp8", "bf16", "fp8")):
                operands = random_operands(group.rank(), m, n, 64, quant, seed)
                expected = mori_ops.gemm_ar(*operands, quant, group, bias=bias_of(n), wire=wire)
                out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
                assert all_reduce(*operands, quant, bias=bias_of(n), wire=wire, out=out) is out
                assert cases.same_bits(out, expected)
                assert cases.same_bits(all_reduce(*operands, quant, bias=bias_of(n), wire=wire), expected)
        assert all_reduce.nbytes == before
        for m in (131, 3 * 128 + 1):  # more than it was made for (D8): lower bands, no more memory
            operands = random_operands(group.rank(), m, 65, 64, "mxfp8", m)
            assert cases.same_bits(all_reduce(*operands, "mxfp8", wire="fp8"), mori_ops.gemm_ar(*operands, "mxfp8", group, wire="fp8"))
        assert all_reduce.nbytes == before
        text = message(ValueError, all_reduce, *random_operands(group.rank(), 3, 66, 64, "ptpc"), "ptpc")
        assert text == "gemm_ar: N must be at most the n_max of this GemmAllReduce, 65, got 66"
        assert cases.same_bits(all_reduce(*operands, "mxfp8", out_dtype=torch.float16), mori_ops.gemm_ar(*operands, "mxfp8", group, out_dtype=torch.float16))
    all_reduce.close()
    assert all_reduce.nbytes == 0
    assert "GemmAllReduce: it is closed" in message(RuntimeError, all_reduce, *operands, "mxfp8")
    assert_next_call_works(group)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_object_has_the_bits_of_the_operator_and_keeps_its_memory(ranks, world):
    ranks.run(check_object, world=world)


def check_object_is_refused_on_one_rank(group) -> None:
    """One rank calls with more columns than it reserved for; the others learn of it."""
    n_max = 33 if group.rank() == 1 else 64
    operands = random_operands(group.rank(), 3, 64, 64, "ptpc")
    with GemmAllReduce(8, n_max, group) as all_reduce:
        text = message(ValueError, all_reduce, *operands, "ptpc")
    assert ("n_max" if group.rank() == 1 else "rank 1 of group") in text
    assert_next_call_works(group)


def test_a_call_that_the_object_refuses_on_one_rank_raises_on_all(ranks):
    ranks.run(check_object_is_refused_on_one_rank, world=3)


def test_the_object_wants_a_size():
    with pytest.raises(ValueError, match="m_max and n_max must be positive, got 0 and 8"):
        GemmAllReduce(0, 8, "")


# --- several processes: sequences and groups --------------------------------------------------------------------------


def check_alternating_shapes(group) -> None:
    generator = torch.Generator().manual_seed(5)
    for seed in range(60):
        m = (0, 1, 2, 8, 9, 33, 64)[int(torch.randint(7, (), generator=generator))]
        n = (33, 48)[int(torch.randint(2, (), generator=generator))]
        args = (m, n, 64, cases.QUANTS[seed % 4], seed)
        result = mori_ops.gemm_ar(*integer_operands(group.rank(), *args), args[3], group, out_dtype=torch.float32)
        assert torch.equal(result.double(), expected_sum(integer_operands, group.size(), *args)), args


def test_alternating_shapes_never_mix_data_d9(ranks):
    ranks.run(check_alternating_shapes, world=2)


def check_groups(world_group) -> None:
    """Two pairs, an outer pair and the default group in turn: each sums over its own ranks."""
    rank = world_group.rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    outer = dist.new_group([0, 3])
    for seed in range(5):
        args = (3 + seed, 33, 64, "ptpc", seed)
        mine = integer_operands(rank, *args)
        parts = [reference.scaled_gemm(*integer_operands(r, *args), "ptpc") for r in range(4)]
        pair = rank // 2
        in_pair = mori_ops.gemm_ar(*mine, "ptpc", pairs[pair], out_dtype=torch.float32)
        assert torch.equal(in_pair.double(), parts[2 * pair] + parts[2 * pair + 1])
        if rank in (0, 3):
            first_and_last = mori_ops.gemm_ar(*mine, "ptpc", outer, out_dtype=torch.float32)
            assert torch.equal(first_and_last.double(), parts[0] + parts[3])
        everyone = mori_ops.gemm_ar(*mine, "ptpc", out_dtype=torch.float32)  # None: the default group
        assert torch.equal(everyone.double(), sum(parts))
        by_name = mori_ops.gemm_ar(*mine, "ptpc", world_group.group_name, out_dtype=torch.float32)
        assert torch.equal(by_name, everyone)
    if rank in (1, 2):
        text = message(ValueError, mori_ops.gemm_ar, *mine, "ptpc", outer)
        assert "gemm_ar: group must be a process group that this rank belongs to" in text


def test_several_groups_sum_over_their_own_ranks(ranks):
    ranks.run(check_groups)


# --- several processes: disagreement ----------------------------------------------------------------------------------

DISAGREEMENTS = {
    "M": (lambda last: {"m": 9 if last else 8}, "M is 8 on {others}, 9 on {last}"),
    "N": (lambda last: {"n": 34 if last else 33}, "N is 33 on {others}, 34 on {last}"),
    "quant": (lambda last: {"quant": "blockscale" if last else "ptpc"}, "quant is ptpc on {others}, blockscale on {last}"),
    "out_dtype": (
        lambda last: {"out_dtype": torch.float16 if last else torch.bfloat16},
        "out_dtype is torch.bfloat16 on {others}, torch.float16 on {last}",
    ),
    "wire": (lambda last: {"wire": "fp8" if last else "bf16"}, "wire is bf16 on {others}, fp8 on {last}"),
    "bias": (lambda last: {"biased": last}, "bias is absent on {others}, given on {last}"),
}


def check_disagreement(group, case: str) -> None:
    change, text = DISAGREEMENTS[case]
    last = group.size() - 1
    call = {"m": 8, "n": 33, "quant": "ptpc", "out_dtype": torch.bfloat16, "wire": "bf16", "biased": False}
    call |= change(group.rank() == last)
    operands = random_operands(group.rank(), call["m"], call["n"], 64, call["quant"])
    bias = bias_of(call["n"]) if call["biased"] else None
    out = torch.full((call["m"], call["n"]), torch.nan, dtype=call["out_dtype"])
    refused = message(
        ValueError, torch.ops.mori.gemm_ar.out, *operands, call["quant"], group.group_name, bias=bias, wire=call["wire"], out=out
    )
    others = "rank 0" if last == 1 else "ranks 0, 1"
    assert f"the ranks of group '{group.group_name}' disagree: {text.format(others=others, last=f'rank {last}')}" in refused
    assert out.isnan().all()
    assert_next_call_works(group)


@pytest.mark.parametrize("case", DISAGREEMENTS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_disagreement_raises_on_every_rank_and_the_next_call_works_d3(ranks, world, case):
    ranks.run(check_disagreement, case, world=world)


def check_refusal_on_one_rank(group, culprit: int, field: str) -> None:
    operands = list(random_operands(group.rank(), 5, 33, 64, "ptpc"))
    out = torch.full((5, 33), torch.nan)
    if group.rank() == culprit:
        if field == "out":
            out = torch.full((5, 32), torch.nan)
        else:
            operands[OPERANDS.index(field)] = operands[OPERANDS.index(field)].double()
    text = message(ValueError, torch.ops.mori.gemm_ar.out, *operands, "ptpc", group.group_name, out=out)
    if group.rank() == culprit:
        assert f"gemm_ar: {field} must" in text
    else:
        assert text == f"gemm_ar: rank {culprit} of group '{group.group_name}' refused the arguments; see the error there"
    assert out.isnan().all()
    assert_next_call_works(group)


@pytest.mark.parametrize("field", ["a", "a_scale", "out"])
def test_an_argument_refused_on_one_rank_is_named_on_the_others(ranks, field):
    ranks.run(check_refusal_on_one_rank, 1, field, world=3)


def check_missing_rank(world_group, ending: str) -> None:
    """Rank 1 of three makes one call fewer than the others."""
    rank, members = world_group.rank(), [0, 1, 2]
    dist.barrier(world_group)
    short = dist.new_group(members, timeout=timedelta(seconds=3))
    again = dist.new_group(members)
    if rank not in members:
        return
    operands = integer_operands(rank, 3, 33, 64, "ptpc")
    mori_ops.gemm_ar(*operands, "ptpc", short)
    start = time.monotonic()
    if rank != 1:
        text = message(RuntimeError, mori_ops.gemm_ar, *operands, "ptpc", short)
        assert f"gemm_ar: rank 1 of group '{short.group_name}' did not take part in this call" in text
        assert time.monotonic() - start < 10
    elif ending == "another collective":
        message(RuntimeError, dist.all_reduce, torch.ones(3), group=short)
    else:
        time.sleep(4)
    assert_next_call_works(again)


@pytest.mark.parametrize("ending", ["nothing", "another collective"])
def test_a_rank_that_does_not_come_is_named_within_the_timeout_d3(ranks, ending):
    ranks.run(check_missing_rank, ending)


def check_board(world_group) -> None:
    rank = world_group.rank()
    short = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank > 1:
        return
    board = Board.open(Group.named(short.group_name))
    for call in range(200):
        assert board.same([call, 7168, 0])
    for call in range(21):
        assert board.same([8, rank if call % 3 == 0 else call]) == (call % 3 != 0)
    assert board.same(REFUSED) and board.same(REFUSED if rank == 1 else [8, 33]) is False
    if rank == 0:
        assert "gemm_ar: rank 1 of group" in message(RuntimeError, board.same, [8, 33])
    else:
        time.sleep(2.5)


def test_hosts_agree_by_words_of_shared_memory_d3(ranks):
    ranks.run(check_board)


def check_control_group(world_group) -> None:
    """Where some ranks belong to more groups than others (dist.new_group cannot do that)."""
    rank = world_group.rank()
    dist.new_group([0, 2])
    members = dist.new_group([3, 1, 0])
    if rank == 2:
        return
    for _ in range(2):
        control = gloo_group(members, timedelta(seconds=10))
        assert control.rank() == members.rank() and dist.get_process_group_ranks(control) == dist.get_process_group_ranks(members)
        everyone = [None] * 3
        dist.all_gather_object(everyone, rank, group=control)
        assert everyone == dist.get_process_group_ranks(members)


def test_ranks_with_different_numbers_of_groups_can_talk(ranks):
    ranks.run(check_control_group)


# --- several processes: torch integration -----------------------------------------------------------------------------


def check_compile(group) -> None:
    torch.compiler.reset()
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module

    @torch.compile(fullgraph=True, dynamic=True, backend=count)
    def layer(a, b, a_scale, b_scale):
        return mori_ops.gemm_ar(a, b, a_scale, b_scale, "mxfp8_raw", group).float() * 2

    for m in (3, 8, 64, 2, 1):  # not 2 first: torch would take M and K/32 for one number
        args = (m, 33, 64, "mxfp8_raw", m)
        result = layer(*integer_operands(group.rank(), *args))
        assert torch.equal(result.double(), expected_sum(integer_operands, group.size(), *args).bfloat16().double() * 2)
    assert len(graphs) <= 2


def test_compiles_into_one_graph_for_all_m(ranks):
    ranks.run(check_compile, world=2)


def check_opcheck(group) -> None:
    operands = integer_operands(group.rank(), 3, 33, 64, "mxfp8_raw")
    # without test_schema, which compares the inputs before and after by allclose: torch has none for float8
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    arguments = (*operands, "mxfp8_raw", group.group_name), {"bias": bias_of(33)}
    torch.library.opcheck(torch.ops.mori.gemm_ar.default, *arguments, test_utils=checks)
    with torch.inference_mode():
        inferred = mori_ops.gemm_ar(*operands, "mxfp8_raw", group)
    assert torch.equal(inferred, mori_ops.gemm_ar(*operands, "mxfp8_raw", group))


@pytest.mark.parametrize("world", [1, 2])
def test_opcheck_and_inference_mode(ranks, world):
    ranks.run(check_opcheck, world=world)


# --- the layer --------------------------------------------------------------------------------------------------------


def whole_layer(features: int) -> tuple[torch.nn.Linear, Tensor]:
    torch.manual_seed(11)
    return torch.nn.Linear(features, 40), torch.randn(2, 3, features)


def check_row_parallel_layer(group) -> None:
    linear, x = whole_layer(160)  # five blocks: the ranks hold slices of different width
    whole = Mxfp8Linear.from_linear(linear)
    layer = RowParallelMxfp8Linear.from_linear(linear, group=group)
    mine = shard(160, group)
    assert layer.in_features == mine.stop - mine.start
    assert torch.equal(layer.dequantize(), whole.dequantize()[:, mine])
    assert torch.equal(layer.bias, linear.bias)
    for dtype in cases.DTYPES:
        y = layer(x[..., mine].to(dtype))
        assert y.shape == (2, 3, 40)
        cases.assert_close(y, reference.mxfp8_linear(x.to(dtype), *quantised(whole), bias=linear.bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x[..., mine]).dtype == torch.bfloat16
    starts = [None] * group.size()
    dist.all_gather_object(starts, (mine.start, mine.stop), group=group)
    assert starts[0][0] == 0 and starts[-1][1] == 160
    assert all(left[1] == right[0] for left, right in zip(starts, starts[1:]))


def quantised(layer: Mxfp8Linear) -> tuple[Tensor, Tensor]:
    return layer.codes.view(torch.float8_e4m3fn), layer.scale


@pytest.mark.parametrize("world", [1, 2, 3])
def test_row_parallel_layer_is_the_whole_layer(ranks, world):
    ranks.run(check_row_parallel_layer, world=world)


def check_layer_that_cannot_be_split(group) -> None:
    assert message(ValueError, shard, 100, group) == (
        "shard: features must be a multiple of 32, a block or more for each of 3 ranks, got 100"
    )
    linear, _ = whole_layer(64)
    assert "for each of 3 ranks, got 64" in message(ValueError, RowParallelMxfp8Linear.from_linear, linear, group=group)


def test_a_layer_with_fewer_blocks_than_ranks_is_refused(ranks):
    ranks.run(check_layer_that_cannot_be_split, world=3)


def test_the_layer_alone_is_the_mxfp8_layer_and_exports():
    linear, x = whole_layer(160)
    layer = RowParallelMxfp8Linear.from_linear(linear, group="")
    expected = Mxfp8Linear.from_linear(linear)(x)
    assert torch.equal(layer(x), expected)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), expected)
