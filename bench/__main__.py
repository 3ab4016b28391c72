"""python -m bench <suite>|all [--device cpu] [--threads 2] [--only m=1] [--budget 20] [--plot out.png] [--no-save]
python -m bench compare [--rounds 16] [--lost] [--no-save]: forms of the Metal kernels in pairs, on a Mac
python -m bench profile [--only m=33] [--no-save]: counters of the kernels' hardware units, on an NVIDIA GPU"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import compare, distributed, profile, report
from bench.suites import CPU_SUITES, SUITES
from bench.timing import BUDGET, copy_bandwidth, matmul_flops, paired


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Checks, then times mori_ops against named baselines.")
    parser.add_argument("suite", choices=[*SUITES, "gemm_ar", "all"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="of rounds, for a case in one mode (at least 5 rounds)")
    parser.add_argument("--only", action="append", default=[], metavar="DIM=VALUE", help="only cases of this shape; may be repeated")
    parser.add_argument("--plot", metavar="PNG", help="write a plot of time over the first dimension")
    parser.add_argument("--no-save", action="store_true", help="do not write bench/results/<device>_<suite>.json")
    return parser.parse_args()


def measured(suite: str, options: argparse.Namespace, wanted: dict[str, str], bandwidth: float, flops: float, console: Console) -> list[dict[str, Any]]:
    """The rows of a suite's cases of the wanted shapes."""
    rows = []
    makers = list(SUITES[suite](options.device))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(suite, total=len(makers))
        for make in makers:
            case = make()
            if all(str(case.shape.get(key)) == value for key, value in wanted.items()):
                figures = case.verify() or {}
                for mode in case.modes:
                    row = report.row(case, mode, paired(case, mode, options.device, budget=options.budget)) | figures
                    row["floor_us"] = 1e6 * max(case.bytes_moved / bandwidth, case.flops / flops)
                    rows.append(row)
            progress.advance(task)
    return rows


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    wanted = dict(item.split("=", 1) for item in options.only)
    console = Console(width=None if sys.stdout.isatty() else 160)
    bandwidth, flops = copy_bandwidth(options.device), matmul_flops(options.device)
    where = report.machine(options.device) | {"copy_gbytes_per_s": bandwidth / 1e9, "matmul_gflops": flops / 1e9}
    console.print(f"copy {bandwidth / 1e9:.1f} GB/s, float32 matmul {flops / 1e9:.0f} GFLOP/s")
    available = [*(SUITES if options.device == "cuda" else CPU_SUITES), *(["gemm_ar"] if distributed.available(options.device) else [])]
    if options.suite not in ("all", *available):
        raise SystemExit(f"bench: {options.suite} has no {options.device} kernel in this build, or too few devices")
    everything = []
    for suite in available if options.suite == "all" else [options.suite]:
        rows = distributed.rows(options.device) if suite == "gemm_ar" else measured(suite, options, wanted, bandwidth, flops, console)
        report.show(rows, console)
        if not options.no_save and not wanted:
            given = f"--device {options.device} --threads {options.threads} --budget {options.budget:g}"
            console.print(f"saved {report.save(suite, given, where, rows)}")
        everything += rows
    if options.plot:
        report.plot(everything, where, options.plot)
    return 0


if __name__ == "__main__":
    command = {"compare": compare.main, "profile": profile.main}.get(sys.argv[1] if sys.argv[1:] else "")
    sys.exit(command(sys.argv[2:]) if command else main())
