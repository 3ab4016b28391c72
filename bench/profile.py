"""python -m bench profile [--only m=33] [--no-save]: what Nsight Compute's counters say about the kernels of some cases on an NVIDIA GPU.

A kernel is measured alone and with cold caches: what programmatic dependent launch overlaps shows in the suites' times only.
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import report, suites
from bench.timing import Case

# Where the H200 misses a goal, or meets it with little to spare.
CASES: dict[str, Callable[[], Case]] = {
    **{
        f"mxfp8_raw m={m} n={n} k={k}": functools.partial(suites.gemm_case, "mxfp8_raw", m, n, k, "cuda")
        for (n, k), tokens in {
            (7168, 2048): (1, 16, 32, 33, 64, 128, 256, 512, 1024),
            (8192, 1280): (16, 32, 128),
            (5120, 2048): (16, 32, 1024),
            (8192, 7168): (1, 16, 32, 33, 128, 256, 1024, 4096),
        }.items()
        for m in tokens
    },
    **{f"qsa_flash t={t} pos={30000 - t}": functools.partial(suites.qsa_case, t, 30000 - t, "cuda") for t in (4, 96, 512, 1984)},
    **{f"qsa_flash t={t} pos=0": functools.partial(suites.qsa_case, t, 0, "cuda") for t in (96, 512, 1984)},
    **{f"gr_down ntok={ntok}": functools.partial(suites.gr_case, ntok, "cuda", fused=False) for ntok in (1, 8, 64, 256, 512, 1024)},
}
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "WarpStateStats", "SchedulerStats", "LaunchStats")
METRICS = {
    "us": "gpu__time_duration.sum",
    "ctas": "launch__grid_size",
    "threads": "launch__block_size",
    "registers": "launch__registers_per_thread",
    "dram %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "L1 + shared %": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
}
STALL = "smsp__average_warps_issue_stalled_"


def run(names: list[str]) -> None:
    """Calls our operator once per case, in a range of the case's name; the call before that loads the kernels."""
    for name in names:
        arm = CASES[name]().arms[0]
        arm.call(arm.operands[0])
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        with torch.cuda.nvtx.range(f"{name};"):
            arm.call(arm.operands[-1])
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def counters(names: list[str]) -> list[dict[str, Any]]:
    sections = [argument for section in SECTIONS for argument in ("--section", section)]
    command = ["ncu", "--clock-control", "none", "--nvtx", "--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base", *sections]
    done = subprocess.run([*command, sys.executable, "-m", "bench.profile", *names], capture_output=True, text=True)
    table = done.stdout[done.stdout.find('"ID"') :]
    if done.returncode or not table.startswith('"ID"'):
        raise SystemExit(f"ncu failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    columns, _units, *rows = csv.reader(io.StringIO(table))
    return [kernel(dict(zip(columns, row, strict=True)), names) for row in rows]


def kernel(row: dict[str, str], names: list[str]) -> dict[str, Any]:
    case = next(name for name in names if any(f"{name};" in cell for cell in row.values()))
    values = {label: float(row[metric].replace(",", "")) for label, metric in METRICS.items() if row.get(metric)}
    values["us"] /= 1e3
    waits = [key for key in row if key.startswith(STALL) and "selected" not in key]
    worst = {key[len(STALL) :].removesuffix("_per_issue_active.ratio"): float(row[key]) for key in sorted(waits, key=lambda key: -float(row[key]))[:3]}
    return {"case": case, "kernel": row["Kernel Name"].split("(")[0][:80], **values, "stalled warps per issue": worst}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench profile", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="DIM=VALUE", help="only cases of this shape; may be repeated")
    parser.add_argument("--no-save", action="store_true", help="do not write bench/results/cuda_profile.json")
    options = parser.parse_args(arguments)
    if shutil.which("ncu") is None or not torch.cuda.is_available():
        raise SystemExit("bench profile: needs an NVIDIA GPU and ncu, Nsight Compute's command line, on PATH")
    names = [name for name in CASES if set(options.only) <= set(name.split())]
    if not names:
        raise SystemExit(f"bench profile: no case has {' and '.join(options.only)}; there are: {', '.join(CASES)}")
    rows = counters(names)
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(title="a kernel alone, cold caches; % of peak; warps stalled per issued instruction")
    for column in ("case", "kernel", *METRICS, "stalls"):
        table.add_column(column, justify="left" if column in ("case", "kernel", "stalls") else "right")
    for row in rows:
        stalls = ", ".join(f"{name} {value:.1f}" for name, value in row["stalled warps per issue"].items())
        table.add_row(row["case"], row["kernel"][-40:], *(f"{row[label]:.4g}" if label in row else "" for label in METRICS), stalls)
    console.print(table)
    if not options.no_save:
        console.print(f"saved {report.save('profile', '', report.machine('cuda'), rows)}")
    return 0


if __name__ == "__main__":
    run(sys.argv[1:])
