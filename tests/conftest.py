"""`pytest --device cuda`: the tests of the operators with their tensors on another device than the CPU.

Test inputs come from seeded generators of the CPU, so that every device gets the same ones.
"""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class OnDevice(TorchFunctionMode):
    """New tensors on `device`, unless the call names one; random ones of a CPU generator are made there and moved."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function not in _device_constructors() or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return function(*args, **kwargs).to(self.device)
        return function(*args, **kwargs, device=self.device)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tests of the operators put their tensors")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu: about the CPU alone")
    if config.getoption("--device") != "cpu":
        from tests import cases  # not above: it needs the library, which some tests are without

        cases.RELATIVE_L2[torch.float32] = cases.TENSOR_CORE_L2
        config.stash[_MODE] = OnDevice(config.getoption("--device"))
        config.stash[_MODE].__enter__()  # from here on: modules make tensors while they are collected


def pytest_unconfigure(config: pytest.Config) -> None:
    if _MODE in config.stash:
        config.stash[_MODE].__exit__(None, None, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cpu":
        return
    for item in items:
        generic = getattr(item, "callspec", None) is not None and item.callspec.params.get("isa") == "generic"
        if generic or item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason="about the CPU"))


_MODE = pytest.StashKey[OnDevice]()
