"""python -m bench compare: the pairs it times are the shapes and members it names, and a pair of other bits is told, not timed."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from bench import compare
from mori_ops import mps
from tests.metal.device import DEVICE, emulated, gpu, metal_operators, needs_metal  # noqa: F401

pytestmark = needs_metal


def run(pairs, columns) -> tuple[list[dict], str]:
    text = io.StringIO()
    rows = compare.compare("title", columns, pairs, DEVICE, Console(file=text, width=120), rounds=2, round_seconds=1e-3)
    return rows, text.getvalue()


def test_attention_pairs_are_equal_and_timed_where_asked(gpu: str) -> None:  # noqa: F811
    rows, text = run(compare.attention_pairs(DEVICE, prompts=((40, 2),), edges=((3, 1),)), ("kernel", "T", "pos0"))
    assert [(row["T"], row["pos0"], row["same_bits"]) for row in rows] == [("2", "40", True), ("1", "3", True)]
    assert rows[0]["pairs"] == 2 and rows[0]["before_us"] > 0 and "ratio" not in rows[1]
    assert "equal" in text and "DIFFERENT" not in text


def test_projection_pairs_hold_every_member_against_its_base() -> None:
    family = (*compare.FAMILY, *compare.LOST)
    rows, _ = run(compare.projection_pairs(DEVICE, family, windows=(3,), n=9, k=1280), ("members", "ntok"))
    assert len(rows) == len(family) and all(row["same_bits"] and row["ratio"] > 0 for row in rows)
    assert rows[0]["members"] == "4_4_r2 unrolled -> 4_4_r2 rolled" and rows[1]["members"].startswith("fused ")


def test_a_pair_with_other_bits_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cpu":
        pytest.skip("breaks the hoisted form in the emulator")
    mps.library.cache_clear()
    monkeypatch.setattr(mps, "compile_shader", lambda source: emulated(source.replace("present ? of_cell", "present ? 1.01f * of_cell")))
    rows, text = run(compare.attention_pairs(DEVICE, prompts=((40, 2),), edges=()), ("kernel", "T", "pos0"))
    mps.library.cache_clear()
    assert not rows[0]["same_bits"] and "ratio" not in rows[0] and "DIFFERENT" in text


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this is a Mac")
def test_without_a_mac_it_says_what_it_needs() -> None:
    with pytest.raises(SystemExit, match="needs the mps device of a Mac"):
        compare.main([])
