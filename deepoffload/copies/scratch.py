"""Memory within a device's budget for what an operation needs meanwhile."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepoffload.copies.accelerator import ComputeDevice
from deepoffload.copies.fenced_arena import DeviceArena
from deepoffload.native.aio import round_up

LEAST_BYTES = 40 << 10
MOST_BYTES = 48 << 20
SHARE = 16
"""Of the device budget it takes this part, but no less and no more than the above."""


def scratch_bytes(device_bytes: int) -> int:
    """How much of a device budget of ``device_bytes`` is for this, where optimizer state is kept on the device."""
    return round_up(min(max(device_bytes // SHARE, LEAST_BYTES), MOST_BYTES))


class DeviceScratch:
    """One range of the device's arena, taken when it is first asked for. Guarded by the tier manager's lock.

    Its user launches all that uses it before anybody else asks. On another stream that waits for the one before.
    """

    def __init__(self, accelerator: ComputeDevice, arena: DeviceArena) -> None:
        self._accelerator = accelerator
        self._arena = arena
        self._nbytes = 0
        self._offset: int | None = None
        self._stream: Any = None

    def keep(self, nbytes: int) -> None:
        """Have at least ``nbytes`` from now on.

        Raises:
            RuntimeError: the arena has no room, which the plan has to leave.
        """
        if self._offset is not None:
            return
        self._nbytes, self._offset = nbytes, self._arena.allocate(nbytes, high=True)
        if self._offset is None:
            raise RuntimeError(f"no room was left for {nbytes} bytes that updates on the device need")

    def take(self) -> Tensor:
        """All of it, uint8, to be overwritten by what is launched on the current stream now."""
        if self._offset is None:
            raise RuntimeError("no memory is kept for updates on the device")
        current = self._accelerator.current()
        if self._stream is None:
            for event in self._arena.events_before(self._offset):
                current.wait_event(event)
        elif self._stream.stream_id != current.stream_id:
            current.wait_event(self._accelerator.event(self._stream))
        self._stream = current
        return self._arena.bytes()[self._offset : self._offset + self._nbytes]
