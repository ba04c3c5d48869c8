"""Tests of a device with separate memory: on CUDA where there is one, and on the simulated GPU everywhere.

Each device has a process that does nothing else.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import cuda
from tests.support.gpu import Gpu
from tests.support.simulated_gpu.isolation import (
    device_of,
    pytest_collection_finish,
    pytest_runtest_protocol,
    pytest_runtestloop,
    simulated_gpu,
)

__all__ = ["pytest_collection_finish", "pytest_runtest_protocol", "pytest_runtestloop", "simulated_gpu"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = cuda.missing()
    for item in items:
        if why is not None and device_of(item) == "cuda":
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="module", params=[pytest.param("cuda", marks=pytest.mark.gpu), "simgpu"])
def device(request: pytest.FixtureRequest) -> str:
    """The name of the device. On CUDA, kernels that give the same bits each time."""
    if request.param == "simgpu":
        from tests.support.simulated_gpu import install

        install()
        return "simgpu"
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return "cuda"


@pytest.fixture
def gpu(device: str, nvme_path: Path) -> Iterator[Gpu]:
    """The device with nothing queued; when the test is over, all that it held is free again."""
    if device == "simgpu":
        from tests.support.simulated_gpu import reset

        reset()
    gpu = Gpu(device, nvme_path)
    gc.collect()
    gpu.forget_workspaces()
    before_bytes = gpu.module.memory_allocated()
    yield gpu
    gc.collect()
    gpu.module.synchronize()
    gpu.forget_workspaces()
    assert list(nvme_path.iterdir()) == []
    assert gpu.module.memory_allocated() <= before_bytes
