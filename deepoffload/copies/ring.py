"""A ring of staging slots: bytes of a device that go into no block as they are come through it into host memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from deepoffload.copies.host_link import HostLink
from deepoffload.errors import BudgetError
from deepoffload.memory.block import Block
from deepoffload.timeline import Lane

Arrived = Callable[[int, int, int], None]
"""Called with the address of a part that has arrived, and with its first byte and its bytes in the source."""


class StagingRing:
    """Slots in the arena, page-locked. Guarded by the tier manager's lock.

    A slot is used again when its copy is done and what arrived in it has been used. When all of them are on their way,
    the next user waits for the oldest; the timeline names that wait.

    Args:
        what: passes through it, for errors and the timeline.

    Attributes:
        nbytes: what it takes of the arena.

    Raises:
        BudgetError: the host budget has no room for it.
    """

    def __init__(self, link: HostLink, what: str, slot_bytes: int, slots: int) -> None:
        self._link = link
        self._tiers = link.tiers
        self._what = what
        self._slot_bytes = slot_bytes
        self.nbytes = slots * slot_bytes
        arena = link.tiers.arena
        start = arena.allocate(self.nbytes)
        if start is None:
            raise BudgetError(
                f"host_budget is {arena.capacity_bytes} bytes; {self.nbytes} are needed for {what} on their way "
                f"from {link.accelerator.device} alone. Raise host_budget"
            )
        link.pinned.lock(start, self.nbytes)  # before all else: who waits for such a copy holds up the device
        self._free = [start + index * slot_bytes for index in range(slots)]

    def parts_of(self, nbytes: int) -> int:
        """In how many parts so many bytes pass through."""
        return -(-nbytes // self._slot_bytes)

    def take(self, source: Tensor, block: Block, then: Arrived) -> None:
        """Start taking ``source`` (uint8, on the device, complete on the current stream) to the host, part by part. To
        be called outside of the program's modes.

        Args:
            block: for which it comes. It is resident, and leased until the last part has arrived.
            then: called for each part where its arrival is noticed. It must have used the bytes when it returns.
        """
        accelerator, nbytes = self._link.accelerator, source.numel()
        stream = accelerator.copy_out
        stream.wait_event(accelerator.event(accelerator.current()))
        for start in range(0, nbytes, self._slot_bytes):
            part = source[start : start + self._slot_bytes]
            offset = self._take_slot()
            try:
                with accelerator.on(stream):
                    self._link.take(part, offset)
                self._tiers.acquire(block)
            except BaseException:
                self._free.append(offset)  # launches into it precede the next copy of this stream
                raise
            done = partial(self._arrived, then, offset, start, part.numel())
            self._link.transfers.launched(Lane.FROM_DEVICE, accelerator.event(stream), block, part.numel(), done)

    def _take_slot(self) -> int:
        self._link.transfers.poll()
        while not self._free:
            if not self._link.transfers.end_oldest(Lane.FROM_DEVICE, f"the ring of {self._what} is full"):
                raise RuntimeError(f"the ring of {self._what} is full, and nothing is on its way")
        return self._free.pop()

    def _arrived(self, then: Arrived, offset: int, start: int, nbytes: int) -> None:
        try:
            then(self._tiers.arena.address + offset, start, nbytes)
        finally:
            self._free.append(offset)
