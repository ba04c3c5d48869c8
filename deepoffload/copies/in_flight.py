"""Copies between host memory and a device's that are under way, and what is done when they end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.timeline import Lane


@dataclass(frozen=True, eq=False)
class _Launched:
    """A copy from or to the host's bytes of a block, which are leased until it is done; ``then`` is called then.
    ``number``: how many were launched before. ``begin``: begins what is done elsewhere with the
    bytes, if they have come, and says whether they have."""

    number: int
    event: Any
    block: Block
    then: Callable[[], None] | None
    lane: Lane
    nbytes: int
    begin_s: float
    begin: Callable[[], bool] | None


class DeviceTransfers:
    """Every copy in flight. Guarded by the tier manager's lock.

    Each direction has a queue, the oldest first: the device makes the copies of one direction in the order in which
    they were launched, and those of the other one independently. So a weight whose copy waits for the device to compute
    does not keep gradients that have arrived from landing. Copies of one block end in the order of their launches,
    in both directions, because the end of one may change the bytes that another one reads.

    It has no thread: the next caller notices the end of a copy.

    Attributes:
        in_bytes, out_bytes: bytes copied to the device and from it so far.
    """

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._in_flight: dict[Lane, deque[_Launched]] = {}
        self._launches = 0
        self.in_bytes = 0
        self.out_bytes = 0

    def launched(
        self,
        lane: Lane,
        event: Any,
        block: Block,
        nbytes: int,
        then: Callable[[], None] | None = None,
        *,
        begin: Callable[[], bool] | None = None,
    ) -> None:
        """Register a copy to or from the host's bytes of a leased ``block``, which completes at ``event``. :meth:`poll`
        and :meth:`end` notice its completion, call ``then`` and end the lease. Users of the block wait until then.

        Args:
            begin: where ``event`` is more than the end of the copy: begins what else it consists of, on another thread,
                if the copy has ended, and returns whether it has.
        """
        block.copying += 1
        self._launches += 1
        copy = _Launched(self._launches, event, block, then, lane, nbytes, time.perf_counter(), begin)
        self._in_flight.setdefault(lane, deque()).append(copy)
        if lane is Lane.TO_DEVICE:
            self.in_bytes += nbytes
        elif lane is Lane.FROM_DEVICE:
            self.out_bytes += nbytes

    def poll(self) -> None:
        """End what is done, in each direction the oldest first."""
        for queue in list(self._in_flight.values()):
            for copy in queue:
                if copy.begin is None or not copy.begin():
                    break
            while queue and queue[0].event.query() and self._may_end(queue[0]):
                self._finish(queue[0])

    def _may_end(self, copy: _Launched) -> bool:
        """Whether no copy of the same block that was launched before is still under way."""
        return all(other.event.query() for other in self._before(copy))

    def _before(self, copy: _Launched) -> list[_Launched]:
        """Those of the same block that were launched before, the oldest first."""
        if copy.block.copying == 1:
            return []
        return [other for other in self._of(copy.block) if other.number < copy.number]

    def _of(self, block: Block | None) -> list[_Launched]:
        """All copies of a block, or all there are, the oldest first."""
        found = [copy for queue in self._in_flight.values() for copy in queue if block is None or copy.block is block]
        return sorted(found, key=lambda copy: copy.number)

    def end(self, block: Block | None = None) -> None:
        """Wait for the copies in flight from or to the host's bytes of ``block``, or for all."""
        with self._tiers.lock:
            for copy in self._of(block):
                self._finish(copy)

    def end_some(self) -> bool:
        """End what is done; where that is nothing, wait for the copy that was launched first. False when none is in
        flight."""
        with self._tiers.lock:
            waited = self._of(None)
            if waited:
                self.poll()
                if len(self._of(None)) == len(waited):
                    self._finish(waited[0])
            return bool(waited)

    def leased_bytes(self, lane: Lane) -> int:
        """The bytes of paged blocks that copies of ``lane`` keep in memory."""
        blocks = {copy.block.id: copy.block for copy in self._in_flight.get(lane, ())}
        return sum(block.room_bytes for block in blocks.values() if block.id not in self._tiers.static)

    def end_changes(self, block: Block) -> None:
        """Wait for what overwrites the host's bytes of ``block``."""
        with self._tiers.lock:
            for copy in self._of(block):
                if copy.lane is not Lane.GATHER:
                    self._finish(copy)

    def end_oldest(self, lane: Lane, why: str) -> bool:
        """Wait for the copy of ``lane`` that was launched first; False when none is in flight. The timeline says
        ``why``."""
        with self._tiers.lock:
            queue = self._in_flight.get(lane)
            if not queue:
                return False
            self._finish(queue[0], f"{why}: ")
            return True

    def _finish(self, copy: _Launched, why: str = "") -> None:
        for other in self._before(copy):
            if other.lane is not Lane.GATHER:  # which reads for other ranks, and is waited for where it has to be
                self._finish(other)
        queue = self._in_flight[copy.lane]
        if copy not in queue:
            return  # it has ended with another one
        self._wait(copy, why)
        if copy not in queue:
            return  # what has landed meanwhile has ended it
        queue.remove(copy)
        copy.block.copying -= 1
        try:
            if copy.then is not None:
                copy.then()
        finally:
            self._tiers.release(copy.block)

    def _wait(self, copy: _Launched, why: str) -> None:
        timeline, begin_s = self._tiers.timeline, time.perf_counter()
        if not copy.event.query():
            copy.event.synchronize()
            if timeline is not None:
                what = f"{why}copy {copy.lane.value} {copy.block.kind.name.lower()}: {copy.block.name}"
                timeline.add(Lane.WAIT, what, begin_s, time.perf_counter())
        if timeline is not None:
            timeline.add(copy.lane, copy.block.name, copy.begin_s, time.perf_counter(), copy.nbytes)
