"""PEP 517 backend: setuptools, building against the torch of the environment that is installed into.

pip's isolated build hides that environment, but runs its interpreter: asked without pip's variables, the interpreter
names the folders that it would import from. They go to the end of sys.path, so that the isolated setuptools and ninja win
and only torch (and what torch imports) comes from there. Without this, pip would download another torch, several GB, and
build against that one. Builders that make an environment of their own (`python -m build`, uv) need `--no-isolation` or
`--no-build-isolation` for the same effect.
"""

import importlib.util
import json
import os
import subprocess
import sys

from setuptools.build_meta import *  # noqa: F403  (every hook that is not replaced below)

_PROBE = "import importlib.util, json, sys; print(json.dumps(sys.path if importlib.util.find_spec('torch') else []))"


def _expose_installed_torch() -> bool:
    if importlib.util.find_spec("torch"):
        return True
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    probe = subprocess.run([sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True, check=True)
    sys.path += [folder for folder in json.loads(probe.stdout) if folder and folder not in sys.path]
    importlib.invalidate_caches()
    return importlib.util.find_spec("torch") is not None


_REQUIRES = [] if _expose_installed_torch() else ["torch>=2.11"]


def get_requires_for_build_wheel(config_settings=None):
    return _REQUIRES


def get_requires_for_build_editable(config_settings=None):
    return _REQUIRES


def get_requires_for_build_sdist(config_settings=None):
    return []
