"""gemm_ar's P2P protocol in every interleaving: no deadlock, no lost and no stale rows; planted mistakes are found."""

from __future__ import annotations

import pytest

from tests.protocol import BUGS, Call, Found, Programs, explore

SEQUENCES = {
    "the same shape again and again": (2, [Call(2)] * 4),
    "alternating shapes": (2, [Call(3), Call(1), Call(2), Call(3)]),
    "one-shot in between": (2, [Call(2), Call(one_shot=True), Call(one_shot=True), Call(2)]),
    "a call that one rank refuses": (2, [Call(2), Call(2, skipped_by=1), Call(1), Call(one_shot=True, skipped_by=0), Call(2)]),
    "three ranks": (3, [Call(2), Call(one_shot=True), Call(1)]),
    "three ranks, a refused call": (3, [Call(1), Call(1, skipped_by=2), Call(1)]),
    "four ranks": (4, [Call(1), Call(1)]),
    "four ranks, one-shot": (4, [Call(one_shot=True), Call(one_shot=True)]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_interleaving_is_right(name):
    world, calls = SEQUENCES[name]
    assert explore(Programs(world, calls)) > 100


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_planted_mistake_is_found(world, bug):
    skipped = 1 if bug == "others do not hear of an exception" else None
    with pytest.raises(Found):
        explore(Programs(world, [Call(2), Call(one_shot=True, skipped_by=skipped), Call(2)], bug))


def test_a_rank_that_leaves_for_good_is_a_deadlock():
    """What the kernels' timeout is for."""
    with pytest.raises(Found, match="deadlock"):
        explore(Programs(2, [Call(1), Call(1, skipped_by=1)], "others do not hear of an exception"))
