"""Loads the compiled library, whose static initialisers register torch.ops.mori.*, or says why it cannot be loaded."""

import importlib
import re
from pathlib import Path

import torch

MINIMUM_TORCH = (2, 11)
FOLDER = Path(__file__).parent


def load() -> None:
    if tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) < MINIMUM_TORCH:
        needed = ".".join(map(str, MINIMUM_TORCH))
        raise ImportError(f"mori_ops needs torch >= {needed}, found torch {torch.__version__}: pip install --upgrade 'torch>={needed}'")
    try:
        importlib.import_module("mori_ops._C")
    except ImportError as error:
        raise ImportError(_explain(error)) from error


def _explain(error: ImportError) -> str:
    library = next(FOLDER.glob("_C*.so"), None)
    if library is None:
        return (f"mori_ops: the compiled library is missing from {FOLDER}. In the source folder, build it with `pip install .`, "
                "or in place with `pip install --no-build-isolation -e .`. If mori_ops is installed already, start Python "
                "in another folder: this one holds its bare sources.")
    built = re.search(rb"mori_build:backends=[^;]*;torch=([^;]*);", library.read_bytes())
    built_torch = built[1].decode() if built else "an unknown version"
    return (f"mori_ops: {library} was built with torch {built_torch} and cannot be loaded beside torch {torch.__version__} ({error}). "
            "Build it again with the torch that is installed: in the source folder, `pip install --force-reinstall --no-deps .`")
