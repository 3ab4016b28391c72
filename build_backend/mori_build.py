"""PEP 517 backend: setuptools, building against the torch of the environment that is installed into.

pip's isolated build hides that environment's site-packages; sysconfig still names the directory. It goes to the end of
sys.path, so that the isolated setuptools and ninja win and only torch (and what torch imports) comes from there.
Without this, pip would download another torch, and the library would be built against that one.
"""

import importlib.util
import os
import sys
import sysconfig

from setuptools.build_meta import *  # noqa: F403  (every hook that is not replaced below)


def _expose_installed_torch() -> bool:
    if importlib.util.find_spec("torch"):
        return True
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        if os.path.isfile(os.path.join(site, "torch", "version.py")):
            sys.path.append(site)
            importlib.invalidate_caches()
            return True
    return False


_REQUIRES = [] if _expose_installed_torch() else ["torch>=2.11"]


def get_requires_for_build_wheel(config_settings=None):
    return _REQUIRES


def get_requires_for_build_editable(config_settings=None):
    return _REQUIRES


def get_requires_for_build_sdist(config_settings=None):
    return []
