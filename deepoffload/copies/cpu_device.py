"""The CPU as a device with its own copies: an :class:`~deepoffload.copies.accelerator.Accelerator` whose streams
and events are trivial, because each operation is done when its call returns.

What is shown on it need not be what is stored; and everything that copies can get wrong shows without a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from deepoffload import machine
from deepoffload.copies.accelerator import device_budget_words


class DoneEvent:
    """An event that has happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CallOrder:
    """A stream in which each operation is done when its call returns."""

    stream_id = 0

    def wait_event(self, event: DoneEvent) -> None:
        """Nothing to wait for."""


class CpuDevice:
    """The CPU, as :class:`~deepoffload.copies.accelerator.ComputeDevice` asks for it."""

    locks_host_memory = False
    has_memory = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.copy_in = self.copy_out = self._current = CallOrder()
        self._event = DoneEvent()

    def current(self) -> CallOrder:
        return self._current

    def on(self, stream: CallOrder) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self, stream: CallOrder) -> DoneEvent:
        return self._event

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def is_capturing(self) -> bool:
        return False

    def identity(self) -> str | None:
        return None

    def free_bytes(self) -> int:
        """Memory of the machine that is available now."""
        return machine.measure().memory_available_bytes

    def empty(self, nbytes: int) -> Tensor:
        """Memory for all copies."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def no_room(self, needed_bytes: int, capacity_bytes: int) -> tuple[str, str]:
        return device_budget_words(self.device, needed_bytes, capacity_bytes)

    def register(self, address: int, nbytes: int) -> str | None:
        return "copies in one memory need none that is page-locked"

    def unregister(self, address: int) -> None:
        """Nothing was registered."""
