"""The README is true: its examples run, its table of operators and devices is the dispatcher's, its folders exist."""

import re
from pathlib import Path

import pytest

import mori_ops

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_examples_run(example: str) -> None:
    exec(compile(example, "README.md", "exec"), {})


def test_operator_table_is_the_dispatchers() -> None:
    header, rows = re.search(r"\| op \| (.*?) \|\n\|[-|]+\|\n((?:\| `.*\n)+)", README).groups()
    devices = header.split(" | ")
    table = {cells[0].strip("`"): dict(zip(devices, cells[1:], strict=True)) for cells in (row.strip("| ").split(" | ") for row in rows.splitlines())}
    built = {"cpu", *mori_ops.build_info["backends"].split(",")} & set(devices)
    kernels = mori_ops.kernels()
    assert table.keys() == kernels.keys()
    for op, on in kernels.items():
        for device in built:
            assert table[op][device] == ("yes" if on["cuda" if device == "hip" else device] else "–"), f"{op} on {device}"


def test_folders_of_the_map_exist() -> None:
    folders = README.split("## Folders")[1]
    for cell in re.findall(r"^\| (`.*?) \|", folders, re.MULTILINE):
        for path in re.findall(r"`([\w./]+)`", cell):
            found = [p for p in (ROOT / path, ROOT / "mori_ops" / path) if p.exists()]
            assert found, f"{path} is in the README's map but not in the tree"
