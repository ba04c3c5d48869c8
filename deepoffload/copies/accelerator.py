"""A device with its own memory and streams, as torch's module for it offers them (``torch.cuda`` and its like).

Three streams: the program's current one computes, ``copy_in`` brings bytes from host memory, ``copy_out`` takes them
there; both directions of the bus are in use at once, next to computing (CUDA C++ Programming Guide, "Overlap of Data
Transfer and Kernel Execution").
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from deepoffload.errors import ConfigError


class ComputeDevice(Protocol):
    """What copies ask of the device on which they are: an :class:`Accelerator`, or the CPU as one
    (:class:`~deepoffload.copies.cpu_device.CpuDevice`). Streams and events are what torch's module for it has.

    Attributes:
        copy_in, copy_out: the streams of copies from host memory and to it.
        locks_host_memory: whether copies run next to computing only from memory that is page-locked for the device.
        has_memory: whether copies are there in addition to the host's arena.
    """

    device: torch.device
    copy_in: Any
    copy_out: Any
    locks_host_memory: bool
    has_memory: bool

    def current(self) -> Any:
        """The stream on which this thread launches what the program computes now."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which operations are launched on ``stream``."""

    def event(self, stream: Any) -> Any:
        """An event that has happened when everything launched on ``stream`` until now is done."""

    def synchronize(self) -> None:
        """Wait until everything launched on the device is done. Nothing to wait for in a forked child."""

    def is_capturing(self) -> bool:
        """Whether what is launched on the current stream is captured into a graph, and not run."""

    def identity(self) -> str | None:
        """What tells this device from all others of all hosts; None where it does not say."""

    def free_bytes(self) -> int:
        """Memory that this process may still take."""

    def empty(self, nbytes: int) -> Tensor:
        """Memory for all copies, ``(nbytes,)`` uint8. Raises ``torch.OutOfMemoryError``, or BudgetError where it is
        the host's."""

    def no_room(self, needed_bytes: int, capacity_bytes: int) -> tuple[str, str]:
        """For errors: "<block> needs ... held by", and what to change."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock host memory for this device. None when that went well, else why it did not."""

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`. A forked child has nothing to undo."""


def device_budget_words(device: torch.device, needed_bytes: int, capacity_bytes: int) -> tuple[str, str]:
    """What :meth:`ComputeDevice.no_room` says of a device that has its own budget."""
    return (
        f"{needed_bytes} bytes on {device}, whose device_budget of {capacity_bytes} bytes is",
        "Raise device_budget",
    )


class Accelerator:
    """One device with its own memory.

    Args:
        device: with or without an index; without one it is the current one of its kind.

    Attributes:
        copy_in, copy_out: streams, made once.

    Raises:
        ConfigError: torch cannot use such a device here.
    """

    locks_host_memory = True
    has_memory = True

    def __init__(self, device: torch.device) -> None:
        self._module = _module_of(device)
        index = device.index if device.index is not None else self._module.current_device()
        if index >= self._module.device_count():
            raise ConfigError(f"device {device} does not exist: torch sees {self._module.device_count()} of this kind")
        self.device = torch.device(device.type, index)
        self._pid = os.getpid()
        self.copy_in: Any = self._module.Stream(device=self.device)
        self.copy_out: Any = self._module.Stream(device=self.device)

    # -- streams and events ----------------------------------------------------------------------------------------

    def current(self) -> Any:
        """The stream on which this thread launches what the program computes now."""
        return self._module.current_stream(self.device)

    def on(self, stream: Any) -> Any:
        """A context in which operations are launched on ``stream``."""
        if self._module.current_device() == self.device.index:
            return self._module.stream(stream)
        return self._on_from_elsewhere(stream)

    @contextlib.contextmanager
    def _on_from_elsewhere(self, stream: Any) -> Iterator[None]:
        """The same on a thread whose current device is another one, as threads begin with the first. torch would make
        that one current again at the end, for which CUDA takes memory on it; a device's own context does not."""
        with self._module.device(self.device), self._module.stream(stream):
            yield

    def event(self, stream: Any) -> Any:
        """An event that has happened when everything launched on ``stream`` until now is done."""
        event = self._module.Event()
        event.record(stream)
        return event

    def synchronize(self) -> None:
        """Wait until everything launched on the device is done. Nothing to wait for in a forked child."""
        if os.getpid() == self._pid:
            self._module.synchronize(self.device)

    def is_capturing(self) -> bool:
        """Whether what is launched on the current stream is captured into a graph, and not run."""
        asked = getattr(self._module, "is_current_stream_capturing", None)  # not every backend has graphs
        if asked is None or self._module.current_device() == self.device.index:
            return asked is not None and bool(asked())
        with self._module.device(self.device):
            return bool(asked())

    def identity(self) -> str | None:
        """What tells this device from all others of all hosts; None where it does not say."""
        asked = getattr(self._module, "get_device_properties", None)
        found = None if asked is None else getattr(asked(self.device), "uuid", None)
        return None if found is None else str(found)

    # -- memory ----------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Memory that this process may still take: what is free or kept by torch for later, and no more than its share
        (``torch.cuda.set_per_process_memory_fraction``)."""
        free, total = self._module.mem_get_info(self.device)
        allocated = int(self._module.memory_allocated(self.device))
        free = int(free) + int(self._module.memory_reserved(self.device)) - allocated
        share = getattr(self._module, "get_per_process_memory_fraction", None)
        if share is None:  # not every backend has it
            return free
        return max(0, min(free, int(total * share(self.device)) - allocated))

    def empty(self, nbytes: int) -> Tensor:
        """Memory for all copies."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def no_room(self, needed_bytes: int, capacity_bytes: int) -> tuple[str, str]:
        return device_budget_words(self.device, needed_bytes, capacity_bytes)

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock host memory for this device. None when that went well, else why it did not."""
        cudart = getattr(self._module, "cudart", None)
        if cudart is None:
            return f"torch has no way to lock memory for {self.device.type}"
        with self._module.device(self.device):
            code = int(cudart().cudaHostRegister(address, nbytes, 0))
            if code:
                self._forget_error()
        return f"cudaHostRegister gave error {code}" if code else None

    def _forget_error(self) -> None:
        """CUDA keeps the error of a call that failed, and torch's next launch on this thread, of any
        kernel, would raise it. Let that be one of ours."""
        with contextlib.suppress(RuntimeError):
            torch.ones((), dtype=torch.uint8, device=self.device)

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`. A forked child has nothing to undo."""
        if os.getpid() != self._pid:
            return
        with self._module.device(self.device):
            if int(self._module.cudart().cudaHostUnregister(address)):
                self._forget_error()


def _module_of(device: torch.device) -> Any:
    try:
        module = torch.get_device_module(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device} is not known to this torch: {error}") from error
    if not module.is_available():
        raise ConfigError(
            f"device {device} is not available: torch {torch.__version__} finds none here. Say device = 'cpu', or "
            "install a torch that is built for it"
        )
    return module
