"""Devices and workgroups that share memory, interleaved: what is right passes under every seed, what lacks a fence is caught."""

from pathlib import Path

import numpy as np
import pytest

from .interpreter import Hazard, Launch, Machine, Schedule
from .toolchain import compile_hip, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

FLAGS = Path(__file__).parent / "kernels" / "flags.hip"
SEEDS = range(12)


def schedules() -> list[Schedule]:
    return [
        Schedule(retire, "random", quantum=24, seed=s, resident=64, caches=True, budget=300_000)
        for s in SEEDS
        for retire in ("random", "late")
    ]


def exchange(schedule: Schedule, **defines: int) -> bool:
    """One producer on device 0, one consumer on device 1; whether the data arrived."""
    kernels = compile_hip(FLAGS, defines=defines)
    data = np.random.default_rng(schedule.seed).integers(0, 1 << 32, 512, dtype=np.uint32)
    window, out, flag = np.zeros(512, np.uint32), np.zeros(512, np.uint32), np.zeros(1, np.uint32)
    producer = Launch(kernels["producer"], (1,), 128, (window, data, flag, 7), device=0)
    consumer = Launch(kernels["consumer"], (1,), 128, (out, window, flag, 7), device=1)
    Machine().run(producer, consumer, schedule=schedule)
    return bool((out == data).all())


def test_a_fenced_exchange_between_devices_arrives_under_every_interleaving():
    assert all(exchange(s) for s in schedules())


@pytest.mark.parametrize("missing_part", ["NO_RELEASE", "NO_ACQUIRE", "NO_BARRIER", "AGENT_SCOPE"])
def test_an_exchange_that_lacks_a_part_is_caught(missing_part):
    def caught(schedule: Schedule) -> bool:
        try:
            return not exchange(schedule, **{missing_part: 1})
        except Hazard as hazard:  # a flag that never arrives
            return hazard.kind == "no-progress"

    assert any(caught(s) for s in schedules())


def test_the_last_workgroup_to_arrive_sees_what_all_the_others_stored():
    kernel = compile_hip(FLAGS)["last_arrival"]
    groups = 12
    want = (np.arange(groups)[:, None] * 1000 + np.arange(64)).sum(0)
    for schedule in schedules():
        partial, counter, total = np.zeros(groups * 64, np.uint32), np.zeros(1, np.uint32), np.zeros(64, np.uint32)
        Machine().run(Launch(kernel, (groups,), 64, (partial, counter, total, groups)), schedule=schedule)
        assert (total == want).all() and counter[0] == groups


def test_a_launch_after_another_sees_what_it_stored_without_any_fence():
    kernels = compile_hip(FLAGS)
    for schedule in schedules():
        data = np.random.default_rng(schedule.seed).integers(0, 1 << 32, 512, dtype=np.uint32)
        first, second, flags = np.zeros(512, np.uint32), np.zeros(512, np.uint32), np.zeros(2, np.uint32)
        machine = Machine()
        machine.address(flags)  # the kernels get parts of it
        one = Launch(kernels["producer"], (1,), 128, (first, data, flags[:1], 1))
        two = Launch(kernels["producer"], (1,), 128, (second, first, flags[1:], 1), after=one)
        machine.run(one, two, schedule=schedule)
        assert (second == data).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_of_devices_sums_what_all_of_them_have(ranks):
    kernel = compile_hip(FLAGS)["ring"]
    for schedule in schedules():
        mine = np.random.default_rng(schedule.seed).integers(0, 1 << 20, (ranks, 64), dtype=np.uint32)
        windows = [np.zeros((ranks - 1, 64), np.uint32) for _ in range(ranks)]
        flags = [np.zeros(ranks - 1, np.uint32) for _ in range(ranks)]
        sums = [np.zeros(64, np.uint32) for _ in range(ranks)]

        def launch(r: int, mine=mine, windows=windows, flags=flags, sums=sums) -> Launch:
            following = (r + 1) % ranks
            return Launch(
                kernel,
                (1,),
                64,
                (mine[r], windows[r], flags[r], windows[following], flags[following], sums[r], ranks),
                device=r,
            )

        Machine().run(*map(launch, range(ranks)), schedule=schedule)
        assert all((s == mine.sum(0)).all() for s in sums)


def test_compare_and_swap_loses_no_addition():
    kernel = compile_hip(FLAGS)["compare_and_swap"]
    for schedule in schedules():
        counters = np.zeros(4, np.uint32)
        Machine().run(Launch(kernel, (6,), 64, (counters,)), schedule=schedule)
        np.testing.assert_array_equal(counters, 6 * np.arange(64).reshape(16, 4).sum(0))
