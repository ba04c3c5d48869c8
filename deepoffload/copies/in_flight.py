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
    """A copy from or to the host's bytes of a block, which are leased until it is done; ``then`` is called then."""

    event: Any
    block: Block
    then: Callable[[], None] | None
    lane: Lane
    nbytes: int
    begin_s: float


class DeviceTransfers:
    """Every copy in flight, the oldest first. Guarded by the tier manager's lock.

    It has no thread: the next caller notices the end of a copy.

    Attributes:
        in_bytes, out_bytes: bytes copied to the device and from it so far.
    """

    def __init__(self, tiers: TierManager) -> None:
        self._tiers = tiers
        self._in_flight: deque[_Launched] = deque()
        self.in_bytes = 0
        self.out_bytes = 0

    def launched(
        self, lane: Lane, event: Any, block: Block, nbytes: int, then: Callable[[], None] | None = None
    ) -> None:
        """Register a copy to or from the host's bytes of a leased ``block``, which completes at ``event``. :meth:`poll`
        and :meth:`end` notice its completion, call ``then`` and end the lease. Users of the block wait until then."""
        block.copying += 1
        self._in_flight.append(_Launched(event, block, then, lane, nbytes, time.perf_counter()))
        if lane is Lane.TO_DEVICE:
            self.in_bytes += nbytes
        elif lane is Lane.FROM_DEVICE:
            self.out_bytes += nbytes

    def poll(self) -> None:
        """End what is done, oldest first."""
        while self._in_flight and self._in_flight[0].event.query():
            self._finish(self._in_flight[0])

    def end(self, block: Block | None = None) -> bool:
        """Wait for the copies in flight from or to the host's bytes of ``block``, or for all."""
        with self._tiers.lock:
            waited = [copy for copy in self._in_flight if block is None or copy.block is block]
            for copy in waited:
                self._finish(copy)
            return bool(waited)

    def end_changes(self, block: Block) -> None:
        """Wait for what overwrites the host's bytes of ``block``."""
        with self._tiers.lock:
            for copy in [copy for copy in self._in_flight if copy.block is block and copy.lane is not Lane.GATHER]:
                self._finish(copy)

    def end_oldest(self, why: str) -> bool:
        """Wait for the copy that was launched first; False when none is in flight. The timeline says ``why``."""
        with self._tiers.lock:
            if not self._in_flight:
                return False
            self._finish(self._in_flight[0], f"{why}: ")
            return True

    def _finish(self, copy: _Launched, why: str = "") -> None:
        self._wait(copy, why)
        self._in_flight.remove(copy)
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
