"""The memory of a device that deepoffload manages: one tensor of exactly the budget, and who may write where and when.

A range is given back by the host while the device may still be reading it. What was launched until then is told by
events; the next user of the range has the device wait for these, never the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepoffload.copies.accelerator import ComputeDevice
from deepoffload.memory.arena import Ranges
from deepoffload.memory.block import Alias
from deepoffload.memory.limbo import Limbo
from deepoffload.native.aio import PAGE_BYTES


@dataclass(frozen=True)
class _Fence:
    """A range that was given back, and the event after which it may be written."""

    start: int
    end: int
    event: Any


class DeviceArena:
    """Ranges of the device's memory.

    Args:
        capacity_bytes: the device budget.
        outside_user_modes: a context outside of the program's modes, in which bytes are moved.
        poison: fill what is taken back with 0xFF.

    Raises:
        BudgetError: the budget is less than a page.
    """

    def __init__(
        self,
        accelerator: ComputeDevice,
        capacity_bytes: int,
        *,
        outside_user_modes: Callable[[], AbstractContextManager[None]],
        poison: bool,
    ) -> None:
        self._accelerator = accelerator
        self._outside_user_modes = outside_user_modes
        self._poison = poison
        self._ranges = Ranges(capacity_bytes, "device_budget")
        self._bytes: Tensor | None = None
        self._fences: list[_Fence] = []
        self._limbo: Limbo[tuple[int, list[Any]]] = Limbo()

    @property
    def capacity_bytes(self) -> int:
        return self._ranges.capacity_bytes

    def no_room(self, needed_bytes: int) -> tuple[str, str]:
        """For errors: what :meth:`ComputeDevice.no_room` says."""
        return self._accelerator.no_room(needed_bytes, self.capacity_bytes)

    @property
    def free_bytes(self) -> int:
        return self._ranges.free_bytes

    @property
    def used_bytes(self) -> int:
        return self._ranges.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._ranges.peak_bytes

    def trim(self, needed_bytes: int) -> None:
        """Take no more than ``needed_bytes`` of the budget, where nothing was taken yet."""
        if self._bytes is None and needed_bytes < self.capacity_bytes:
            self._ranges = Ranges(max(needed_bytes, PAGE_BYTES), "device_budget")

    def bytes(self) -> Tensor:
        """All of it, ``(capacity_bytes,)`` uint8; allocated when first asked for."""
        if self._bytes is None:
            with self._outside_user_modes():
                try:
                    self._bytes = self._accelerator.empty(self.capacity_bytes)
                except torch.OutOfMemoryError:
                    gc.collect()  # models that are gone, but kept by reference cycles, hold their arenas
                    self._bytes = self._accelerator.empty(self.capacity_bytes)
            # torch may give memory that what was launched on this stream before still uses.
            event = self._accelerator.event(self._accelerator.current())
            self._fences.append(_Fence(0, self.capacity_bytes, event))
        return self._bytes

    def holds(self, address: int) -> bool:
        """Whether an address of the device lies in it."""
        return self._bytes is not None and 0 <= address - self._bytes.data_ptr() < self.capacity_bytes

    def allocate(self, nbytes: int, *, high: bool = False) -> int | None:
        """Offset of a range; None when no hole is large enough. What stays for good is taken from the ``high`` end."""
        return self._ranges.allocate(nbytes, high=high)

    def events_before(self, offset: int) -> list[Any]:
        """Events to wait for before a write to the range at ``offset``. Completed events are pruned."""
        start, end = offset, offset + self._ranges.size_of(offset)
        self._fences = [fence for fence in self._fences if not fence.event.query()]
        return [fence.event for fence in self._fences if fence.start < end and start < fence.end]

    def free(self, offset: int, events: list[Any], aliases: list[Alias] | None = None) -> None:
        """Give a range back.

        Args:
            events: when these have happened, nothing that was launched on the device until now uses it.
            aliases: who in the program still refers to it; it is not used again before they have gone.
        """
        if aliases:
            self._limbo.put((offset, events), aliases)
            return
        start, end = offset, offset + self._ranges.size_of(offset)
        events = self.spoil(offset, events)
        self._ranges.free(offset)
        fences = [*self._fences, *(_Fence(start, end, event) for event in events)]
        self._fences = [fence for fence in fences if not fence.event.query()]

    def spoil(self, offset: int, events: list[Any]) -> list[Any]:
        """Nobody may use the bytes of a range any more: with ``poison`` they are overwritten, when ``events`` have
        happened. Returns the events after which the range may be written."""
        if not self._poison or self._bytes is None:
            return events
        current = self._accelerator.current()
        for event in events:
            current.wait_event(event)
        with self._outside_user_modes():
            self._bytes[offset : offset + self._ranges.size_of(offset)].fill_(0xFF)
        return [self._accelerator.event(current)]

    def empty_limbo(self) -> bool:
        """Take back ranges whose last alias has gone; True when some came back."""
        free = self._limbo.take_free()
        for offset, events in free:
            # Every use of the last view has been launched on the stream that is current now.
            self.free(offset, [*events, self._accelerator.event(self._accelerator.current())])
        return bool(free)

    def close(self) -> None:
        """Let go of the memory; it lives as long as views of it."""
        self._fences.clear()
        self._limbo.clear()
        self._bytes = None
