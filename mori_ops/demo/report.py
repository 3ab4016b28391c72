"""The demo's verdict: one figure per check, what it has to be, and whether it is."""

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass
class Check:
    name: str
    value: float
    limit: str
    ok: bool


def at_most(name: str, value: float, limit: float) -> Check:
    return Check(name, value, f"<= {limit:g}", value <= limit)


def at_least(name: str, value: float, limit: float) -> Check:
    return Check(name, value, f">= {limit:g}", value >= limit)


def table(checks: list[Check]) -> Table:
    result = Table("check", box=SIMPLE_HEAD, pad_edge=False)
    result.add_column("value", justify="right")
    result.add_column("limit", justify="right")
    result.add_column("")
    for check in checks:
        result.add_row(check.name, f"{check.value:.4g}", check.limit, "[green]ok[/]" if check.ok else "[bold red]FAILED[/]")
    return result
