"""A device with separate memory, for tests that run the same on CUDA and on the simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload import offload_context
from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.errors import PlacementError
from deepoffload.runtime.context import engine_of
from tests.support.simulated_gpu.device_module import NAME

HOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Gpu:
    """Args:
    device: its name.
    """

    device: str
    nvme_path: Path

    @property
    def module(self) -> Any:
        """``torch.cuda`` or its like."""
        return torch.get_device_module(self.device)

    @property
    def simulated(self) -> bool:
        return self.device == NAME

    def forget_workspaces(self) -> None:
        """Give back what the library of matrix products keeps of the allocator's memory: that is no leak of ours."""
        if self.simulated:
            self.module.clear_workspaces()
        else:
            torch._C._cuda_clearCublasWorkspaces()

    def put(self, value: Any) -> Any:
        """Tensors and modules, on the device."""
        return value.to(self.device)

    def context(self, device_budget: int | None = None, host_budget: int = HOST_BYTES, **config: Any) -> Any:
        debug = {"poison": True, "evict_always": config.pop("evict_always", False)}
        if device_budget is not None:
            config["device_budget"] = device_budget
        return offload_context(
            **({"device": self.device} | config), host_budget=host_budget, nvme_path=str(self.nvme_path), debug=debug
        )

    def paged(self, build: Callable[[], Any], device_budget: int | None = None, **config: Any) -> Any:
        """What ``build`` makes on the CPU, paged."""
        with self.context(device_budget, **config):
            torch.manual_seed(0)
            return build()

    def plain(self, build: Callable[[], Any]) -> Any:
        """The same in plain PyTorch, on the device."""
        torch.manual_seed(0)
        return build().to(self.device)

    def least_bytes(self, build: Callable[[], Any]) -> int:
        """The least device budget that is accepted."""
        try:
            self.paged(build, 4096)
        except PlacementError as error:
            assert error.enough_bytes is not None
            return error.enough_bytes
        return 4096


def memory_of(model: nn.Module) -> CopyMemory:
    memory = engine_of(model).pager.memory
    assert isinstance(memory, CopyMemory)
    return memory


def on_cpu(values: Any) -> Any:
    """Nested tensors, copied to the CPU."""
    if isinstance(values, Tensor):
        return values.detach().to("cpu", copy=True)
    if isinstance(values, dict):
        return {key: on_cpu(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [on_cpu(value) for value in values]
    return values
