"""The coming of whole units from all ranks, and the CPU as a device on which copies are whole units.

Copying is done when a call returns, as on every CPU. Only that coming takes time: it is the one event that may not have
happened yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepoffload.copies.cpu_device import CpuDevice
from deepoffload.copies.rank_link import RankLink
from deepoffload.memory.tier_manager import TierManager
from deepoffload.ranks.exchange import Flight


class GatherFlight:
    """The transfers that make one gather: one of each section.

    Args:
        then: called when all of it has arrived.
    """

    def __init__(self, flights: list[Flight], then: Callable[[], None]) -> None:
        self._flights = flights
        self._then = then
        self._arrived = False

    def ready(self) -> bool:
        return all(flight.ready() for flight in self._flights)

    def ready_within(self, limit_s: float) -> bool:
        return all(flight.ready_within(limit_s) for flight in self._flights)

    def arrive(self) -> None:
        for flight in self._flights:
            flight.wait()
        self._arrived = True
        self._then()

    def releasable(self) -> bool:
        return self._arrived and all(flight.releasable() for flight in self._flights)

    def releasable_within(self, limit_s: float) -> bool:
        if not self._arrived:
            self.ready_within(limit_s)  # who waits takes it then, and asks again
            return False
        return all(flight.releasable_within(limit_s) for flight in self._flights)

    def release(self) -> None:
        """Let go of what it has given; to be called when it is releasable."""
        for flight in self._flights:
            flight.release()


class Coming:
    """The event of a whole copy's coming. Guarded by the tier manager's lock.

    Attributes:
        whole: the copy's bytes; of one that goes on to a device, where they arrive once it has been launched.
        arrived: it has happened.
        flight: the gather, once it has been launched.
        send: called when it happens, before ``then``: launches the way from ``whole`` to a device.
        then: called once when it happens.
    """

    def __init__(self, link: RankLink, number: int, whole: Tensor) -> None:
        self.whole = whole
        self.arrived = False
        self.flight: GatherFlight | None = None
        self.send: Callable[[], None] | None = None
        self.then: Callable[[], None] | None = None
        self._link = link
        self._number = number

    def has_arrived(self) -> None:
        """What was gathered is there."""
        self.arrived = True
        send, then = self.send, self.then
        self.send = self.then = None
        if send is not None:
            send()
        if then is not None:
            then()

    def query(self) -> bool:
        """Whether it has happened. Never waits."""
        return self.arrived

    def await_served(self) -> None:
        """Wait for it, and serve other ranks meanwhile."""
        if not self.arrived:
            self._link.wait_launched(self._number)
            if self.flight is None:
                self._link.lose(self._number)
            self._wait(serve=True)

    def synchronize(self) -> None:
        """Wait for it where nothing may be launched meanwhile. It must have been launched."""
        if not self.arrived:
            self._wait(serve=False)

    def _wait(self, *, serve: bool) -> None:
        flight = self.flight
        if flight is None:
            raise RuntimeError(f"the gather of block {self._number} has not been launched")
        self._link.wait_gathered(self._number, flight, serve=serve)


class Served:
    """The event after which no rank reads the shard that was given to a gather."""

    def __init__(self, link: RankLink, number: int, flight: GatherFlight) -> None:
        self._link = link
        self._number = number
        self._flight = flight

    def query(self) -> bool:
        """Whether it has happened. Never waits."""
        return self._link.is_over or self._link.is_released(self._number, self._flight)

    def synchronize(self) -> None:
        """Wait for it; nothing is launched meanwhile."""
        if not self.query():
            self._link.wait_released(self._number, self._flight)

    def end(self) -> None:
        """Let go of what was given, when it has happened."""
        if not self._link.is_over:
            self._flight.release()


def await_event(stream: Any, event: Any) -> None:
    """What is launched on ``stream`` from now on comes after ``event``. For the coming of a whole copy the host waits,
    and serves other ranks meanwhile."""
    if isinstance(event, Coming):
        event.await_served()
    else:
        stream.wait_event(event)


class RankDevice(CpuDevice):
    """The CPU of one of several ranks. Copies lie in the host's arena, so the host budget is the only one.

    Attributes:
        tiers: whose arena that is; to be set before copies take their memory.
    """

    has_memory = False

    def __init__(self) -> None:
        super().__init__()
        self.tiers: TierManager | None = None

    def empty(self, nbytes: int) -> Tensor:
        """Memory for copies, inside the arena.

        Raises:
            BudgetError: what must stay in the arena leaves no room.
        """
        assert self.tiers is not None, "set where it is made"
        arena = self.tiers.arena
        with self.tiers.lock:
            offset = self.tiers.room.reserve("whole copies of units", nbytes)
        return torch.frombuffer(arena.buffer, dtype=torch.uint8, count=nbytes, offset=offset)

    def no_room(self, needed_bytes: int, capacity_bytes: int) -> tuple[str, str]:
        wanted = f"{needed_bytes} bytes for its whole copy; all {capacity_bytes} bytes of host_budget for these are"
        return wanted, "Raise host_budget"
