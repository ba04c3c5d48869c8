"""Memory of the arena in which whole copies arrive from other ranks before they go on to a device.

A range is taken when a gather is launched, which all ranks do together. So what has to be waited for then has been
launched before on every rank: it comes without any rank's program.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepoffload.copies.rank_device import Coming
from deepoffload.errors import BudgetError
from deepoffload.memory.arena import Ranges
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.timeline import Lane


@dataclass(frozen=True)
class _Leaving:
    """A copy that goes on to the device. ``offset``: of its range. ``event``: the end of that."""

    offset: int
    event: Any
    name: str
    nbytes: int
    begin_s: float


class Arrivals:
    """Ranges of the arena, one for each whole copy that is between the ranks and the device. Guarded by the tier
    manager's lock.
    """

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._ranges: Ranges | None = None
        self._start = 0
        self._arriving: dict[Coming, int] = {}
        self._leaving: deque[_Leaving] = deque()

    def reserve(self, nbytes: int) -> None:
        """Take this memory, for good. Once.

        Raises:
            BudgetError: what must stay in the arena leaves no room.
        """
        self._start = self._tiers.room.reserve("whole copies on their way to the device", nbytes)
        self._ranges = Ranges(nbytes, "host_budget")

    def check(self, block: Block) -> None:
        """Raise BudgetError where a block never fits. All ranks have as much memory for it."""
        capacity_bytes = 0 if self._ranges is None else self._ranges.capacity_bytes
        if block.shown_nbytes > capacity_bytes:
            raise BudgetError(
                f"{block.name}: its whole copy of {block.shown_nbytes} bytes comes to the device through host memory, "
                f"of which {capacity_bytes} bytes are for that. Build it inside the context, where that is planned "
                "for, or raise host_budget"
            )

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes could come in addition to what is there, without waiting for the device."""
        self.poll()
        return self._ranges is not None and nbytes <= self._ranges.free_bytes

    def take(self, coming: Coming, nbytes: int) -> Tensor:
        """Memory for what is gathered now, uint8, ``(nbytes,)``, until :meth:`sent`. Waits for copies that were
        launched before, where it is full."""
        ranges = self._ranges
        if ranges is None:
            raise RuntimeError("no memory is reserved for what arrives from other ranks")
        while True:
            self.poll()
            offset = ranges.allocate(nbytes)
            if offset is not None:
                break
            if self._leaving:
                self._leaving[0].event.synchronize()
            elif self._arriving:
                next(iter(self._arriving)).synchronize()
            else:
                raise RuntimeError(f"{nbytes} bytes do not fit in the memory for what arrives from other ranks")
        self._arriving[coming] = offset
        buffer, at = self._tiers.arena.buffer, self._start + offset
        return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=at)

    def offset_of(self, coming: Coming) -> int:
        """Where in the arena it has arrived."""
        return self._start + self._arriving[coming]

    def sent(self, coming: Coming, event: Any, name: str) -> None:
        """It is used no more when ``event`` has happened."""
        begin_s, nbytes = time.perf_counter(), coming.whole.numel()
        self._leaving.append(_Leaving(self._arriving.pop(coming), event, name, nbytes, begin_s))

    def forget(self, coming: Coming) -> None:
        """Nobody uses what has arrived."""
        if self._ranges is not None:
            self._ranges.free(self._arriving.pop(coming))

    def poll(self) -> None:
        """Have the memory back of what has left."""
        while self._ranges is not None and self._leaving and self._leaving[0].event.query():
            gone = self._leaving.popleft()
            self._ranges.free(gone.offset)
            if self._tiers.timeline is not None:
                now_s = time.perf_counter()
                self._tiers.timeline.add(Lane.TO_DEVICE, gone.name, gone.begin_s, now_s, gone.nbytes)
