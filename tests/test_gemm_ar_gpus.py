"""gemm_ar on two GPUs or more: exact sums over P2P memory and over NCCL, graphs, soak, lifetimes, missing ranks.

`make test-gpu2` runs it; skipped where there are not two GPUs or no CUDA backend in the build.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mori_ops
from mori_ops import distributed, reference, symmetric
from mori_ops.distributed import GemmAllReduce
from tests import cases
from tests.distributed_worker import Ranks
from tests.test_gemm_ar import FP8_WIRE_LIMITS, bias_of, integer_operands, message, random_operands

WORLD = min(torch.cuda.device_count(), 2) if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(WORLD < 2 or not mori_ops.kernels()["gemm_ar"]["cuda"], reason="needs two GPUs and the CUDA backend")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(WORLD, "nccl", timeout=120.0)
    yield pool
    pool.close()


@contextmanager
def forced(algorithm: str | None) -> Iterator[None]:
    """Small shapes by the algorithms of large ones. The table's choice where `algorithm` is None."""
    chosen = distributed.algorithm_of
    if algorithm is not None:
        distributed.algorithm_of = lambda *shape: algorithm
    try:
        yield
    finally:
        distributed.algorithm_of = chosen


def on_gpu(operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.cuda() for t in operands)


def exact_parts(world: int, *args) -> list[Tensor]:
    """Every rank's product of integers, on the GPU."""
    return [reference.scaled_gemm(*on_gpu(integer_operands(rank, *args)), args[3]).float() for rank in range(world)]


def exact_sum(world: int, *args) -> Tensor:
    return sum(exact_parts(world, *args)).double()


def exact_result(world: int, *args, **options) -> Tensor:
    return result_of(exact_parts(world, *args), **options)


def result_of(parts: list[Tensor], *, out_dtype: torch.dtype = torch.bfloat16, bias: Tensor | None = None, wire: str = "bf16") -> Tensor:
    """What integers give, bit for bit: summands travel as bf16 for a bf16 result, and as fp32 for the others."""
    total = sum(part.bfloat16().float() if out_dtype == torch.bfloat16 else part for part in parts)
    total = (total if bias is None else total + bias).to(out_dtype)
    return total if wire == "bf16" else coded(total)


def coded(total: Tensor) -> Tensor:
    """Through the fp8 wire."""
    of_448 = torch.full((), 448.0, device="cuda")  # by a Python number torch multiplies with 1/448, which is another fp32 in some rows
    scale = (total.float().abs().amax(1, keepdim=True) / of_448).clamp_min(torch.finfo(torch.float32).tiny)
    return ((total.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(total.dtype)


def assert_next_call_works(group) -> None:
    args = (130, 264, 128, "mxfp8_raw", 9)
    result = mori_ops.gemm_ar(*on_gpu(integer_operands(group.rank(), *args)), args[3], group, out_dtype=torch.float32)
    assert torch.equal(result.double(), exact_sum(group.size(), *args))


def assert_same_on_all_ranks(result: Tensor, group) -> None:
    everyone = torch.empty(group.size() * result.numel() * result.itemsize, dtype=torch.uint8, device="cuda")
    dist.all_gather_into_tensor(everyone, result.contiguous().view(torch.uint8).flatten(), group=group)
    parts = everyone.chunk(group.size())
    assert all(torch.equal(part, parts[0]) for part in parts)


# --- values -----------------------------------------------------------------------------------------------------------

ROWS = (0, 1, 65, 257, 1000, 2049, 4099)


def check_integers(group, quant: str, algorithm: str) -> None:
    world = group.size()
    for seed, m in enumerate(ROWS):
        n, k = ((33, 64), (264, 128), (1024, 256))[seed % 3]
        args = (m, n, k, quant, seed)
        operands, parts, bias = on_gpu(integer_operands(group.rank(), *args)), exact_parts(world, *args), bias_of(n).cuda()
        for out_dtype in cases.DTYPES:
            for options in ({}, {"bias": bias}, {"wire": "fp8"}):
                with forced(algorithm):
                    result = mori_ops.gemm_ar(*operands, quant, group, out_dtype=out_dtype, **options)
                expected = result_of(parts, out_dtype=out_dtype, **options)
                assert result.dtype == out_dtype and torch.equal(result, expected), (args, out_dtype, options.keys())


# `pair` takes MXFP8 alone, and gives to `spans` what is not bf16.
@pytest.mark.parametrize(("algorithm", "quant"), [(a, q) for a in ("one_shot", "pair", "spans") for q in cases.QUANTS if a != "pair" or q.startswith("mxfp8")])
def test_integer_sums_are_exact_at_any_m(ranks, algorithm, quant):
    ranks.run(check_integers, quant, algorithm)


def check_random(group, m: int, n: int, k: int, algorithm: str | None = None) -> None:
    with forced(algorithm):
        check_random_sums(group, m, n, k)


def check_random_sums(group, m: int, n: int, k: int) -> None:
    parts = [on_gpu(random_operands(rank, m, n, k, "mxfp8_raw")) for rank in range(group.size())]
    expected = sum(reference.scaled_gemm(*part, "mxfp8_raw") for part in parts)
    operands = parts[group.rank()]
    for wire, limits in (("bf16", (1e-3, 2.6e-3)), ("fp8", FP8_WIRE_LIMITS)):
        result = mori_ops.gemm_ar(*operands, "mxfp8_raw", group, wire=wire)
        error = cases.relative_l2(result, expected)
        assert limits[0] < error < limits[1], (wire, error)
        assert_same_on_all_ranks(result, group)
        for _ in range(3):
            assert cases.same_bits(mori_ops.gemm_ar(*operands, "mxfp8_raw", group, wire=wire), result)
    exact = mori_ops.gemm_ar(*operands, "mxfp8_raw", group, out_dtype=torch.float32)
    assert cases.relative_l2(exact, expected) < 1e-5
    result = mori_ops.gemm_ar(*operands, "mxfp8_raw", group, out_dtype=torch.float32, wire="fp8")
    assert torch.equal(result, coded(exact))


@pytest.mark.parametrize("algorithm", [None, "pair", "spans"])
@pytest.mark.parametrize("shape", [(3, 1024, 256), (300, 1032, 640), (2500, 1032, 640)], ids=str)
def test_random_sums_are_near_float64_and_the_same_bits_on_all_ranks_and_runs(ranks, shape, algorithm):
    ranks.run(check_random, *shape, algorithm)


def check_first_call(group) -> None:
    operands = on_gpu(random_operands(group.rank(), 300, 1032, 640, "mxfp8_raw"))
    with forced("spans"):
        result = mori_ops.gemm_ar(*operands, "mxfp8_raw", group, out_dtype=torch.float32)
    assert result.isfinite().all()


def test_the_spans_of_a_first_call_take_kernels_that_nothing_has_loaded():
    """Loading one can wait for all that runs: nothing may wait for its span by then. The last span here, of 44 rows, takes another GEMM."""
    pool = Ranks(WORLD, "nccl", timeout=60.0)
    try:
        pool.run(check_first_call)
    finally:
        pool.close()


def check_extremes(group, algorithm: str) -> None:
    """NaN codes and scales beyond bf16, in the rows of either rank: every row as by the GEMM alone."""
    m, n, k = 1300, 264, 256
    a, b, a_scale, b_scale = on_gpu(integer_operands(group.rank(), m, n, k, "mxfp8_raw"))
    for rank, row in ((0, 7), (1, 907), (0, 1200), (1, 1)):
        if rank == group.rank():
            a.view(torch.uint8)[row, 3] = 0x7F
    a_scale[900, 1], a_scale[11, 0], b_scale[2, 0] = 255, 254, 250
    mine = mori_ops.mxfp8_raw(a, b, a_scale, b_scale)
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    expected = sum(part.float() for part in parts).bfloat16()
    assert 0 < expected.isnan().sum() < expected.numel() / 10 and not expected.isinf().all()
    with forced(algorithm):
        result = mori_ops.gemm_ar(a, b, a_scale, b_scale, "mxfp8_raw", group)
    assert torch.equal(result.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))


@pytest.mark.parametrize("algorithm", ["one_shot", "pair", "spans"])
def test_nan_and_extreme_scales_are_exact(ranks, algorithm):
    ranks.run(check_extremes, algorithm)


def check_without_p2p(group) -> None:
    """What a machine without P2P memory has: the same results over NCCL, and one warning."""
    original, symmetric.obstacle = symmetric.obstacle, lambda group, device: "this is a test"
    distributed._engines.clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for m, n in ((1, 264), (65, 33), (5000, 1024)):
                for quant in cases.QUANTS:
                    args = (m, n, 128, quant, m)
                    result = mori_ops.gemm_ar(*on_gpu(integer_operands(group.rank(), *args)), quant, group, out_dtype=torch.float32)
                    assert torch.equal(result.double(), exact_sum(group.size(), *args))
        assert sum("falls back" in str(w.message) and "this is a test" in str(w.message) for w in caught) == 1
    finally:
        symmetric.obstacle = original
        distributed._engines.clear()


def test_without_p2p_memory_it_falls_back_to_nccl_with_one_warning_d7(ranks):
    ranks.run(check_without_p2p)


# --- sequences --------------------------------------------------------------------------------------------------------


def check_alternating(group, calls: int) -> None:
    generator = torch.Generator().manual_seed(1)
    pool = []
    for seed in range(48):
        m, n = (1, 8, 64, 65, 300, 1000, 2048, 2500)[seed % 8], (1024, 264, 33)[seed % 3]
        args = (m, n, 128, cases.QUANTS[seed % 4], seed)
        options = {"out_dtype": cases.DTYPES[seed // 8 % 3], "wire": ("bf16", "fp8")[seed // 24]}
        algorithm = ("one_shot", "pair", "spans")[seed // 3 % 3]
        pool.append((algorithm, on_gpu(integer_operands(group.rank(), *args)), args[3], options, exact_result(group.size(), *args, **options)))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(calls):
        algorithm, operands, quant, options, expected = pool[int(torch.randint(len(pool), (), generator=generator))]
        with forced(algorithm):
            wrong += (mori_ops.gemm_ar(*operands, quant, group, **options) != expected).sum()
    assert wrong.item() == 0


def test_two_thousand_calls_of_alternating_shapes_are_exact_d9(ranks):
    ranks.run(check_alternating, 2000)


def check_back_to_back(group, graph: bool, out_dtype: torch.dtype) -> None:
    """A consumer reads each result at once; the next call overwrites it (D2)."""
    shapes = [(64, 7168), (128, 7168), (512, 7168), (2048, 7168), (4096, 7168)]
    with GemmAllReduce(4096, 7168, group, device="cuda", out_dtype=out_dtype) as all_reduce:
        for m, n in shapes:
            args = [(m, n, 256, "mxfp8_raw", seed) for seed in range(2)]
            operands = [on_gpu(integer_operands(group.rank(), *a)) for a in args]
            expected = [exact_result(group.size(), *a, out_dtype=out_dtype) for a in args]
            out, wrong = torch.empty(m, n, dtype=out_dtype, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")

            def both() -> None:
                for one, right in zip(operands, expected):
                    all_reduce(*one, "mxfp8_raw", out=out)
                    wrong.add_((out != right).sum())

            if graph:
                both()
                torch.cuda.synchronize()
                captured = torch.cuda.CUDAGraph()
                with torch.cuda.graph(captured):
                    both()
            for _ in range(125):
                captured.replay() if graph else both()
            assert wrong.item() == 0, (m, n)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_back_to_back_calls_with_an_immediate_consumer_are_exact_d2(ranks, graph, out_dtype):
    ranks.run(check_back_to_back, graph, out_dtype)


def check_graphs_mixed_with_eager(group) -> None:
    generator = torch.Generator().manual_seed(3)
    calls = []
    with GemmAllReduce(8192, 1024, group, device="cuda") as all_reduce:
        for m in (1, 8, 64, 512, 1024, 8192):
            args = (m, 1024, 128, "mxfp8_raw", m)
            operands, expected = on_gpu(integer_operands(group.rank(), *args)), exact_result(group.size(), *args)
            out = torch.empty(m, 1024, dtype=torch.bfloat16, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                all_reduce(*operands, "mxfp8_raw", out=out)
            calls.append((graph, operands, out, expected))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(2000):
            graph, operands, out, expected = calls[int(torch.randint(len(calls), (), generator=generator))]
            if int(torch.randint(4, (), generator=generator)):
                graph.replay()
            else:
                all_reduce(*operands, "mxfp8_raw", out=out)
            wrong += (out != expected).sum()
            out.fill_(torch.nan)
        assert wrong.item() == 0


def test_graphs_in_random_order_mixed_with_eager_calls_d9(ranks):
    ranks.run(check_graphs_mixed_with_eager)


def check_two_groups(group) -> None:
    """Two groups of the same ranks, on two streams."""
    other = dist.new_group(list(range(group.size())))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")  # each stream has its own
    args = [(m, 1024, 128, "mxfp8_raw", m) for m in (8, 8192)]
    operands = [on_gpu(integer_operands(group.rank(), *a)) for a in args]
    expected = [exact_result(group.size(), *a) for a in args]
    torch.cuda.synchronize()
    for i in range(200):
        for which, stream, count in ((group, streams[0], wrong[0]), (other, streams[1], wrong[1])):
            with torch.cuda.stream(stream):
                count.add_((mori_ops.gemm_ar(*operands[i % 2], "mxfp8_raw", which) != expected[i % 2]).sum())
    torch.cuda.synchronize()
    assert wrong.sum().item() == 0


def test_two_groups_interleaved_on_two_streams(ranks):
    ranks.run(check_two_groups)


def check_lifetimes(group) -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    if group.rank() == 0:
        gc.disable()
    try:
        for i in range(100):
            with GemmAllReduce(512, 1024, group, device="cuda"):
                pass
            if i == 4:
                baseline = used()
        assert used() - baseline < 64 << 20
    finally:
        gc.enable()
    assert_next_call_works(group)


def test_create_and_destroy_a_hundred_times_d5(ranks):
    ranks.run(check_lifetimes)


def check_more_rows_than_reserved(group) -> None:
    with GemmAllReduce(256, 1024, group, device="cuda") as all_reduce:
        before = all_reduce.nbytes
        for m, dtype in ((256, torch.bfloat16), (257, torch.float32), (20000, torch.float32)):
            for quant in cases.QUANTS:
                args = (m, 1024, 128, quant, m)
                result = all_reduce(*on_gpu(integer_operands(group.rank(), *args)), quant, out_dtype=torch.float32)
                assert torch.equal(result.double(), exact_sum(group.size(), *args))
        assert all_reduce.nbytes == before


def test_more_rows_than_reserved_go_in_several_rounds_d8(ranks):
    ranks.run(check_more_rows_than_reserved)


# --- disagreement and missing ranks -----------------------------------------------------------------------------------


def check_disagreement(group) -> None:
    for case in range(20):
        m = 8 + (group.rank() == 1)
        operands = on_gpu(random_operands(group.rank(), m, 264, 128, "mxfp8_raw"))
        out = torch.full((m, 264), torch.nan, dtype=torch.bfloat16, device="cuda")
        text = message(ValueError, torch.ops.mori.gemm_ar.out, *operands, "mxfp8_raw", group.group_name, out=out)
        assert "disagree: M is 8 on rank 0, 9 on rank 1" in text and out.isnan().all()
        if group.rank() == case % 2:
            text = message(ValueError, mori_ops.gemm_ar, *operands[:2], operands[2].double(), operands[3], "mxfp8_raw", group)
            assert "a_scale must be" in text
        else:
            assert f"rank {case % 2} of group" in message(ValueError, mori_ops.gemm_ar, *operands, "mxfp8_raw", group)
        assert_next_call_works(group)


def test_disagreement_and_refusal_raise_on_all_ranks_and_the_next_call_works_d3(ranks):
    ranks.run(check_disagreement)


def check_missing_replay(group) -> None:
    args = (600, 1024, 128, "mxfp8_raw", 1)
    operands = on_gpu(integer_operands(group.rank(), *args))
    all_reduce = GemmAllReduce(1024, 1024, group, device="cuda", timeout=2.0)
    out = torch.zeros(600, 1024, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_reduce(*operands, "mxfp8_raw", out=out)
    graph.replay()
    torch.cuda.synchronize()
    all_reduce.check()
    dist.barrier(group)
    if group.rank() == 0:
        start = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        assert 1.5 < time.monotonic() - start < 10 and out.isnan().all()
        assert "rank 1 of group" in message(RuntimeError, all_reduce.check)
    dist.barrier(group)
    error = message((RuntimeError, ValueError), all_reduce, *operands, "mxfp8_raw", out=out)
    assert "rank 1" in error if group.rank() == 0 else "rank 0" in error
    all_reduce.close()
    assert_next_call_works(group)


def test_a_rank_that_misses_a_replay_is_named_within_the_timeout_d3(ranks):
    ranks.run(check_missing_replay)
