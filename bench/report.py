"""What a run says: a table on the terminal, a JSON file, a plot."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import mori_ops
from bench.timing import Case, summary

RESULTS = Path(__file__).parent / "results"


def machine(device: str) -> dict[str, Any]:
    """Where and when: goes into every stored result."""
    name = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        name = next((line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")), name)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "cpu": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "mori_ops": mori_ops.build_info,
        "commit": commit,
    }


def row(case: Case, mode: str, samples: dict[str, list[float]]) -> dict[str, Any]:
    arms = {name: summary(times) for name, times in samples.items()}
    ours = next(iter(arms))
    time = arms[ours]["median_us"]
    result: dict[str, Any] = {"op": case.op, "shape": case.shape, "mode": mode, "arms": arms}
    result["speedup"] = {name: arm["median_us"] / time for name, arm in arms.items() if name != ours}
    result["goals"] = [
        {"against": list(goal.against), "ratio": goal.ratio, "measured": min(result["speedup"][name] for name in goal.against)}
        for goal in case.goals
        if goal.mode == mode
    ]
    if case.flops:
        result["gflops"] = case.flops / time / 1e3
    if case.bytes_moved:
        result["gbytes_per_s"] = case.bytes_moved / time / 1e3
    return result


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="median time per call; speedup of mori_ops over each baseline; goal: measured / wanted")
    for column in ("op", "shape", "mode", "mori us", "GB/s", "GFLOP/s", "baselines", "goals"):
        table.add_column(column, justify="left" if column in ("op", "shape", "baselines", "goals") else "right")
    for r in rows:
        ours = next(iter(r["arms"].values()))["median_us"]
        goals = [f"[{'green' if g['measured'] >= g['ratio'] else 'red'}]{g['measured']:.2f} / {g['ratio']:g}[/]" for g in r["goals"]]
        if r.get("misrounded"):  # shares of results that are not the exact ones rounded, ours first
            goals.append("misrounded " + ", ".join(f"{share:.3%}" for share in r["misrounded"].values()))
        table.add_row(
            r["op"],
            " ".join(f"{key}={value}" for key, value in r["shape"].items()),
            r["mode"],
            f"{ours:.1f}",
            f"{r['gbytes_per_s']:.1f}" if "gbytes_per_s" in r else "",
            f"{r['gflops']:.0f}" if "gflops" in r else "",
            "\n".join(f"{name}: {ratio:.2f}x" for name, ratio in r["speedup"].items()),
            "\n".join(goals),
        )
    console.print(table)


def save(suite: str, options: str, where: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """`options`: what `python -m bench <suite>` was called with."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{where['device']}_{suite}.json"
    path.write_text(json.dumps({"command": f"python -m bench {suite} {options}".rstrip(), "machine": where, "rows": rows}, indent=1) + "\n")
    return path


def plot(rows: list[dict[str, Any]], where: dict[str, Any], path: str) -> None:
    """Time over the first dimension of the shape, one panel per (op, other dimensions), against the roofline floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple, list[dict[str, Any]]] = {}
    for r in rows:
        if r["mode"] == ("cold" if any(s["mode"] == "cold" and s["op"] == r["op"] for s in rows) else "hot"):
            first, *rest = r["shape"].items()
            panels.setdefault((r["op"], first[0], *rest), []).append(r)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False)
    for axis, ((op, first, *rest), group) in zip(axes[0], panels.items(), strict=True):
        x = [r["shape"][first] for r in group]
        for name in group[0]["arms"]:
            points = [(r["shape"][first], r["arms"][name]["median_us"]) for r in group if name in r["arms"]]
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        if all("floor_us" in r for r in group):
            axis.plot(x, [r["floor_us"] for r in group], "k--", label="floor: bytes at copy speed or FLOP at matmul speed")
        axis.set(xscale="log", yscale="log", xlabel=first, ylabel="us per call", title=f"{op} {' '.join(f'{a}={b}' for a, b in rest)} ({group[0]['mode']})")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=7)
    figure.suptitle(f"{where['gpu'] or where['cpu']}, {where['threads']} threads, torch {where['torch']}, {where['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
