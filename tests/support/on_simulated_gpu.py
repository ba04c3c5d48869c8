"""A pytest plugin that runs any test of the suite on the simulated GPU: ``pytest -p tests.support.on_simulated_gpu``.

Tensors and models are made on the device, and the engines find it by themselves. What a test says of the host's budget
holds as ever; the device has room for a few of the models' weights. ``SIMULATED_GPU_MODE`` is the order of copies, or
several with commas, which the tests take in turns.
"""

from __future__ import annotations

import itertools
import os
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch.utils._device import DeviceContext

from tests.support.host_only import HOST_ONLY
from tests.support.simulated_gpu import install, settings

install(devices=1, memory_bytes=int(os.environ.get("SIMULATED_GPU_BYTES", 256 << 20)))
_modes = itertools.cycle(os.environ.get("SIMULATED_GPU_MODE", "late").split(","))
settings(mode=next(_modes))


class _OnDevice(DeviceContext):
    """``with torch.device("simgpu")``, where values that come from a generator of the CPU's are those of the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if generator is not None and generator.device.type == "cpu" and "device" not in kwargs:
            return func(*args, **kwargs).to(self.device)
        return super().__torch_function__(func, types, args, kwargs)


_OnDevice.__name__ = DeviceContext.__name__  # the mode of torch.device is known by its name
_OnDevice(torch.device("simgpu")).__enter__()


def pytest_runtest_setup() -> None:
    settings(mode=next(_modes))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is about the CPU as the device."""
    for item in items:
        for pattern, why in HOST_ONLY.items():
            # Brackets of parameters are no sets of characters.
            if fnmatchcase(item.nodeid, pattern.replace("[", "[[]")):
                item.add_marker(pytest.mark.skip(reason=why))
