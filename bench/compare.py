"""python -m bench compare: forms of the Metal kernels against each other, in alternating pairs, their bits compared first.

Prints the two tables of the public reports behind the kernels for the GPU at hand: qsa_flash with a branch per element and with
hoisted loads; members of the gr_down family for 1..8 tokens. A pair whose bits differ is not timed, and the exit status says so.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mori_ops
from bench.report import RESULTS
from mori_ops import mps
from tests import cases

PROMPTS = tuple(itertools.product((0, 30000), (96, 512, 1024, 1984)))  # position, tokens
EDGES = ((1984, 96), (2050, 96), (0, 1), (1987, 64), (1900, 200), (2050, 1), (2051, 1), (2049, 3), (30000, 33))  # compared, not timed
WINDOWS = tuple(range(1, 9))
# Base and new member, whether their token loops are rolled (None: as the operator does), with the fused norm.
FAMILY = (
    ("4_4_r2", False, "4_4_r2", True, False),
    ("4_4_r2", False, "4_4_r2", True, True),
    ("8_8_r2", False, "8_8_r2", True, False),
    ("4_4", None, "4_4_r2", None, False),
    ("8_8", None, "8_8_r2", None, False),
)
LOST = tuple(("4_4", None, name, None, False) for name in ("4_4_r4", "8_4", "8_4_r2", "16_4", "16_4_r2", "32_4"))


@dataclass(frozen=True)
class Pair:
    """Two ways to the same bits."""

    name: tuple[str, ...]
    before: Callable[[], Tensor]
    after: Callable[[], Tensor]
    timed: bool = True


def attention_pairs(device: str, prompts: Sequence[tuple[int, int]] = PROMPTS, edges: Sequence[tuple[int, int]] = EDGES) -> Iterator[Pair]:
    for position, tokens in (*prompts, *edges):
        kernel = mps.route("qsa_flash", t=tokens).kernel
        q = torch.randn(tokens, cases.QSA_HQ, cases.QSA_D, generator=torch.Generator().manual_seed(tokens)).half().to(device)
        k, v, k_scale, v_scale = (t.to(device) for t in cases.kv_cache(position + tokens, cases.QSA_HKV, cases.QSA_D))
        ids, gate = cases.prompt_ids(tokens, position).to(device), torch.randn(q.shape).to(device)

        def run(hoisted: bool, q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale, ids=ids, gate=gate, kernel=kernel) -> Tensor:
            out = torch.empty_like(q)
            mps.attend(q, k, v, ids, k_scale, v_scale, gate, None, out, None, 1, kernel=kernel, hoisted=hoisted)
            return out

        name = (kernel, str(tokens), str(position))
        yield Pair(name, lambda run=run: run(False), lambda run=run: run(True), (position, tokens) in prompts)


def projection_pairs(device: str, family: Sequence[tuple] = FAMILY, windows: Sequence[int] = WINDOWS, n: int = cases.GR_N, k: int = cases.GR_K) -> Iterator[Pair]:
    w = mori_ops.q8_0_quantize(torch.randn(n, k) / k**0.5).to(device)
    norm = (0.5 + torch.rand(k)).to(device)
    for (base, base_rolled, new, new_rolled, fused), ntok in itertools.product(family, windows):
        x = torch.randn(ntok, k).to(device)

        def run(member: str, rolled: bool | None, x=x, fused=fused) -> Tensor:
            out = torch.empty(x.shape[0], n, device=device)
            mps.project(x, w, norm if fused else None, 1e-6, cases.GR_HC, member, out, rolled=rolled)
            return out

        label = lambda member, rolled: member + {None: "", False: " unrolled", True: " rolled"}[rolled]  # noqa: E731
        name = (("fused " if fused else "") + f"{label(base, base_rolled)} -> {label(new, new_rolled)}", str(ntok))
        before, after = ((member, rolled) for member, rolled in ((base, base_rolled), (new, new_rolled)))
        yield Pair(name, lambda run=run, a=before: run(*a), lambda run=run, a=after: run(*a))


def synchronize(device: str) -> None:
    if device == "mps":
        torch.mps.synchronize()


def seconds_per_call(call: Callable[[], Tensor], calls: int, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def measure(pair: Pair, device: str, rounds: int, round_seconds: float) -> dict[str, float]:
    """Microseconds of both, and the median over the pairs of after / before, each pair in the other order than the last."""
    calls = max(1, round(round_seconds / seconds_per_call(pair.after, 1, device)))
    samples: dict[str, list[float]] = {"before": [], "after": []}
    for i in range(rounds):
        for side in ("before", "after") if i % 2 == 0 else ("after", "before"):
            samples[side].append(seconds_per_call(getattr(pair, side), calls, device))
    ratios = [after / before for before, after in zip(samples["before"], samples["after"], strict=True)]
    return {f"{side}_us": 1e6 * statistics.median(times) for side, times in samples.items()} | {"ratio": statistics.median(ratios), "pairs": rounds}


def compare(title: str, columns: tuple[str, ...], pairs: Iterator[Pair], device: str, console: Console, *, rounds: int, round_seconds: float = 0.02) -> list[dict]:
    table = Table(title=title)
    for column in (*columns, "bits", "before us", "after us", "median change"):
        table.add_column(column, justify="left" if column in columns[:1] else "right")
    rows = []
    for pair in pairs:
        same = cases.same_bits(pair.before().cpu(), pair.after().cpu())
        row: dict = dict(zip(columns, pair.name, strict=True)) | {"same_bits": same}
        if same and pair.timed:
            row |= measure(pair, device, rounds, round_seconds)
        rows.append(row)
        times = [f"{row['before_us']:.2f}", f"{row['after_us']:.2f}", f"{100 * (row['ratio'] - 1):+.1f}%"] if "ratio" in row else ["", "", ""]
        table.add_row(*pair.name, "equal" if same else "DIFFERENT", *times)
    console.print(table)
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16, help="pairs per row")
    parser.add_argument("--lost", action="store_true", help="also the members that lost in the public report")
    parser.add_argument("--no-save", action="store_true", help="do not write bench/results/mps_compare.json")
    options = parser.parse_args(arguments)
    if not torch.backends.mps.is_available():
        raise SystemExit("bench compare: needs the mps device of a Mac")
    torch.manual_seed(0)
    console = Console(width=None if sys.stdout.isatty() else 120)
    where = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.backends.mps.get_name(),
        "macos": ".".join(map(str, mps.macos_version())),
        "torch": torch.__version__,
    }
    console.print(f"{where['gpu']}, macOS {where['macos']}, torch {where['torch']}")
    family = (*FAMILY, *(LOST if options.lost else ()))
    tables = {
        "qsa_flash": compare(
            "qsa_flash, a branch per element -> hoisted loads", ("kernel", "T", "pos0"), attention_pairs("mps"), "mps", console, rounds=options.rounds
        ),
        "gr_down": compare("gr_down 324 x 10240, base -> new", ("members", "ntok"), projection_pairs("mps", family), "mps", console, rounds=options.rounds),
    }
    if not options.no_save:
        path = RESULTS / "mps_compare.json"
        path.write_text(json.dumps({"command": "python -m bench compare", "machine": where, **tables}, indent=1) + "\n")
        console.print(f"saved {path}")
    return 0 if all(row["same_bits"] for rows in tables.values() for row in rows) else 1
