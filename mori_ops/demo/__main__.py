"""python -m mori_ops.demo: runs every part, prints a table of checks, exits non-zero if one is out of tolerance."""

import importlib
import logging
import os
import sys
import time

from rich.console import Console

from mori_ops.demo import report

PARTS = {
    "minilm": "A real sentence-embedding model with every linear layer in MXFP8",
    "qwen4_exp": "A small qwen4_exp model: Q8_0 residual reads, sparse int8-KV attention",
    "tensor_parallel": "A tensor-parallel MLP over two processes with gemm_ar",
}


def main() -> int:
    os.environ["HF_HUB_OFFLINE"] = "1"  # all that the demo reads is installed
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    logging.disable(logging.WARNING)  # what transformers says about optional packages
    console = Console()
    start = time.perf_counter()
    checks: list[report.Check] = []
    for number, (part, title) in enumerate(PARTS.items(), 1):
        console.rule(f"{number}/{len(PARTS)} {title}", align="left")
        with console.status("importing"):
            module = importlib.import_module(f"mori_ops.demo.{part}")
        checks += module.run(console)
    console.print(report.table(checks))
    failed = sum(not check.ok for check in checks)
    console.print(f"{len(checks) - failed} of {len(checks)} checks ok, {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
