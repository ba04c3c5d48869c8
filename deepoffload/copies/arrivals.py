"""Memory of the arena in which whole copies arrive from other ranks before they go on to a device.

A range is taken when a gather is launched, which all ranks do together. So what has to be waited for then has been
launched before on every rank: it comes without anybody's program.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from deepoffload.copies.rank_device import Coming
from deepoffload.errors import BudgetError
from deepoffload.memory.arena import Ranges
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager


class Arrivals:
    """Ranges of the arena, one for each whole copy that is between the ranks and the device. Guarded by the tier
    manager's lock.
    """

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._ranges: Ranges | None = None
        self._start = 0
        self._arriving: dict[Coming, int] = {}
        self._leaving: deque[tuple[Any, int]] = deque()

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

    def take(self, coming: Coming, nbytes: int) -> Tensor:
        """Memory for what is gathered now, uint8, ``(nbytes,)``, until :meth:`sent`. Waits for copies that were
        launched before, where it is full."""
        ranges = self._ranges
        if ranges is None:
            raise RuntimeError("no memory is reserved for what arrives from other ranks")
        while True:
            while self._leaving and self._leaving[0][0].query():
                ranges.free(self._leaving.popleft()[1])
            offset = ranges.allocate(nbytes)
            if offset is not None:
                break
            if self._leaving:
                self._leaving[0][0].synchronize()
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

    def sent(self, coming: Coming, event: Any) -> None:
        """It is used no more when ``event`` has happened."""
        self._leaving.append((event, self._arriving.pop(coming)))
