"""The device of the simulated clock: it computes what the program has launched, while the program goes on.

The program is one thread of the host: it launches, updates, and waits. Next to it run the device, the link's two
directions, and the host's thread that lands gradients. Updates and landings share the host's memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceWork:
    """What a visit has the device do: ``seconds`` of computing, after ``in_bytes`` of weights have come; then
    ``out_bytes`` of gradients leave, and the host lands them in ``landing_s``."""

    seconds: float
    in_bytes: int = 0
    out_bytes: int = 0
    landing_s: float = 0.0


@dataclass(frozen=True)
class _Coming:
    at_s: float
    nbytes: int
    landing_s: float


class TimedDevice:
    """Times are those of the program's clock.

    Args:
        link_bytes_per_s: each way.
        ring_bytes: of gradients that have left the device or are about to, and have not landed. The program waits
            where it launches more.
    """

    def __init__(self, link_bytes_per_s: float, ring_bytes: int) -> None:
        self._link_bytes_per_s = link_bytes_per_s
        self._ring_bytes = ring_bytes
        self._computed_s = self._came_s = self._left_s = self._landed_s = 0.0
        self._coming: deque[_Coming] = deque()
        self._under_way: deque[tuple[float, int]] = deque()  # landings that have begun: their ends and bytes
        self._launched = self._landed = 0

    def launch(self, now: float, work: DeviceWork) -> float:
        """The program launches a visit. Returns when it goes on, which is later where the ring is full."""
        self._pass(now)
        while work.out_bytes and self._ring_is_full(now, work.out_bytes):
            now = self._next_end(now)
        if work.in_bytes:
            self._came_s = max(self._came_s, now) + work.in_bytes / self._link_bytes_per_s
        self._computed_s = max(self._computed_s, now, self._came_s if work.in_bytes else 0.0) + work.seconds
        if work.out_bytes:
            self._left_s = max(self._left_s, self._computed_s) + work.out_bytes / self._link_bytes_per_s
            self._coming.append(_Coming(self._left_s, work.out_bytes, work.landing_s))
            self._launched += 1
        return now

    @property
    def launched(self) -> int:
        """How many visits with gradients have been launched."""
        return self._launched

    def has_landed(self, visit: int, now: float) -> bool:
        """Whether the gradients of that visit, counted from 1, have landed."""
        self._pass(now)
        return visit <= self._landed

    def wait_for(self, visit: int, now: float) -> float:
        """When they have, at the earliest ``now``."""
        self._pass(now)
        while visit > self._landed:
            now = self._next_end(now)
        return now

    def update(self, now: float, seconds: float) -> float:
        """When an update that begins now ends: landings that begin meanwhile have the memory first."""
        self._pass(now)
        end = now + seconds
        while self._coming and self._coming[0].at_s < end:
            end += self._begin_landing()
        return end

    def _ring_is_full(self, now: float, nbytes: int) -> bool:
        used = sum(each.nbytes for each in self._coming) + sum(each for end, each in self._under_way if end > now)
        return used > 0 and used + nbytes > self._ring_bytes

    def _next_end(self, now: float) -> float:
        """When the next landing has ended."""
        if not self._under_way:
            self._begin_landing()
        end = max(now, self._under_way[0][0])
        self._pass(end)
        return end

    def _begin_landing(self) -> float:
        arrival = self._coming.popleft()
        self._landed_s = max(self._landed_s, arrival.at_s) + arrival.landing_s
        self._under_way.append((self._landed_s, arrival.nbytes))
        return arrival.landing_s

    def _pass(self, now: float) -> None:
        """Time has come to ``now``."""
        while self._coming and self._coming[0].at_s <= now:
            self._begin_landing()
        while self._under_way and self._under_way[0][0] <= now:
            self._under_way.popleft()
            self._landed += 1
