"""gemm_ar's P2P protocol in every interleaving: no deadlock, no lost and no stale rows; planted mistakes are found."""

from __future__ import annotations

import pytest

from tests.protocol import BUGS, PAIR_BUGS, Call, Found, Programs, explore

SPANS, PULL = Call(2), Call(1, "pull")
PAIR, FP8, ONE, TWO = Call(2, "pair"), Call(2, "pair", "fp8"), Call(1, "one_shot"), Call(2, "one_shot")

SEQUENCES = {
    "the same shape again and again": (2, [SPANS] * 4),
    "alternating shapes": (2, [Call(3), Call(1), SPANS, Call(3)]),
    "a pair again and again": (2, [PAIR] * 3),
    "pairs of alternating shapes and wires": (2, [Call(3, "pair"), FP8, Call(1, "pair"), FP8]),
    "one-shot again and again": (2, [ONE, TWO, ONE, TWO, TWO, ONE]),
    "every algorithm behind every other": (2, [PAIR, ONE, PAIR, TWO, TWO, FP8, SPANS, ONE, SPANS, PAIR]),
    "one-shot by reading in between": (2, [SPANS, PULL, PULL, SPANS, PULL]),
    "a call that one rank refuses": (2, [SPANS, Call(2, skipped_by=1), Call(1), Call(1, "one_shot", skipped_by=0), PAIR, Call(2, "pair", skipped_by=0), PAIR]),
    "three ranks": (3, [Call(1), ONE, Call(1)]),
    "three ranks, one-shot": (3, [ONE, TWO]),
    "three ranks, a refused call": (3, [Call(1), Call(1, skipped_by=2), Call(1)]),
    "four ranks": (4, [Call(1), Call(1)]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_interleaving_is_right(name):
    world, calls = SEQUENCES[name]
    assert explore(Programs(world, calls)) > 100


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_planted_mistake_is_found(world, bug):
    skipped = 1 if bug == "others do not hear of an exception" else None
    calls = [PULL, PULL] if bug == "a call ends without the others" else [SPANS, Call(1, "one_shot", skipped_by=skipped), TWO, SPANS]
    with pytest.raises(Found):
        explore(Programs(world, calls, bug))


@pytest.mark.parametrize("bug", PAIR_BUGS)
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_a_planted_mistake_of_a_pair_is_found(wire, bug):
    with pytest.raises(Found):
        explore(Programs(2, [Call(2, "pair", wire)] * 2, bug))


def test_a_rank_that_leaves_for_good_is_a_deadlock():
    """What the kernels' timeout is for."""
    with pytest.raises(Found, match="deadlock"):
        explore(Programs(2, [Call(1), Call(1, skipped_by=1)], "others do not hear of an exception"))
