"""The device of the simulated clock: it computes what the program has launched, while the program goes on.

The program is one thread of the host: it launches, updates, and waits. Next to it run the device, the link's two
directions, and the host's thread that lands gradients. Updates and landings share the host's memory.

One of several ranks adds up gradients in the program itself, and what goes to the device passes through host memory
that is kept for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceWork:
    """What a visit has the device do: ``seconds`` of computing, after ``in_bytes`` of weights have come; then
    ``out_bytes`` of gradients leave, and the host lands them in ``landing_s``. ``link_s``: of these, the seconds in
    which gradients go to other ranks."""

    seconds: float
    in_bytes: int = 0
    out_bytes: int = 0
    landing_s: float = 0.0
    link_s: float = 0.0


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
        arriving_bytes: of weights on their way to the device, where they pass through separate memory. The program
            waits where it sends more.
        program_lands: gradients land where the program launches or waits, and not on a thread.

    Attributes:
        in_bytes, out_bytes: what has passed over the link so far.
    """

    def __init__(
        self,
        link_bytes_per_s: float,
        ring_bytes: int,
        *,
        arriving_bytes: float = math.inf,
        program_lands: bool = False,
    ) -> None:
        self.in_bytes = self.out_bytes = 0
        self._link_bytes_per_s = link_bytes_per_s
        self._ring_bytes = ring_bytes
        self._arriving_bytes = arriving_bytes
        self._program_lands = program_lands
        self._arriving: deque[tuple[float, int]] = deque()  # when they are on the device, and their bytes
        self._used_s: dict[int, float] = {}
        self._computed_s = self._came_s = self._left_s = self._landed_s = 0.0
        self._coming: deque[_Coming] = deque()
        self._under_way: deque[tuple[float, int]] = deque()  # landings that have begun: their ends and bytes
        self._launched = self._landed = 0
        self._passing: list[tuple[float, float]] = []  # begin and end of what passes over the link

    def launch(self, now: float, work: DeviceWork) -> float:
        """The program launches a visit. Returns when it goes on, which is later where the ring is full."""
        now = self.land(now)
        while work.out_bytes and self._ring_is_full(now, work.out_bytes):
            now = self._next_end(now)
        if work.in_bytes:
            self._send(now, work.in_bytes)
        self._computed_s = max(self._computed_s, now, self._came_s) + work.seconds
        if work.out_bytes:
            self.out_bytes += work.out_bytes
            self._left_s = self._pass_over(max(self._left_s, self._computed_s), work.out_bytes)
            self._coming.append(_Coming(self._left_s, work.out_bytes, work.landing_s))
            self._launched += 1
        return now

    def send(self, now: float, nbytes: int, replaced: Iterable[int]) -> float:
        """The program sends weights that have arrived in host memory. They take the places of copies ``replaced``, when
        what uses these has been computed. Returns when it goes on, which is later where no memory is left for them."""
        while self._arriving and self._arriving[0][0] <= now:
            self._arriving.popleft()
        while self._arriving and sum(each for _, each in self._arriving) + nbytes > self._arriving_bytes:
            now = max(now, self._arriving.popleft()[0])
        self._send(max([now, *(self._used_s.get(copy, 0.0) for copy in replaced)]), nbytes)
        self._arriving.append((self._came_s, nbytes))
        return now

    def _send(self, now: float, nbytes: int) -> None:
        self.in_bytes += nbytes
        self._came_s = self._pass_over(max(self._came_s, now), nbytes)

    def _pass_over(self, begin: float, nbytes: int) -> float:
        """Returns when these bytes, which leave at ``begin``, have passed over the link."""
        end = begin + nbytes / self._link_bytes_per_s
        self._passing.append((begin, end))
        return end

    def bus_s(self) -> float:
        """Seconds in which bytes pass over the link in either direction, in both or in one."""
        merged: list[tuple[float, float]] = []
        for begin, end in sorted(self._passing):
            if merged and begin <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((begin, end))
        self._passing = merged
        return sum(end - begin for begin, end in merged)

    def uses(self, copies: Iterable[int]) -> None:
        """What has been launched last uses these."""
        self._used_s.update(dict.fromkeys(copies, self._computed_s))

    @property
    def launched(self) -> int:
        """How many visits with gradients have been launched."""
        return self._launched

    def has_landed(self, visit: int, now: float) -> bool:
        """Whether the gradients of that visit, counted from 1, have landed."""
        self._pass(now)
        return visit <= self._landed

    def land(self, now: float) -> float:
        """The program lands what has come, if that is its work. Returns when it goes on."""
        self._pass(now)
        while self._program_lands and self._coming and self._coming[0].at_s <= now:
            now = self._next_end(now)
        return now

    def wait_for(self, visit: int, now: float) -> float:
        """When they have, at the earliest ``now``."""
        now = self.land(now)
        while visit > self._landed:
            now = self._next_end(now)
        return now

    def update(self, now: float, seconds: float) -> float:
        """When an update that begins now ends: landings that begin meanwhile have the memory first."""
        now = self.land(now)
        end = now + seconds
        while not self._program_lands and self._coming and self._coming[0].at_s < end:
            end += self._begin_landing(now)
        return end

    def _ring_is_full(self, now: float, nbytes: int) -> bool:
        used = sum(each.nbytes for each in self._coming) + sum(each for end, each in self._under_way if end > now)
        return used > 0 and used + nbytes > self._ring_bytes

    def _next_end(self, now: float) -> float:
        """When the next landing has ended."""
        if not self._under_way:
            self._begin_landing(now)
        end = max(now, self._under_way[0][0])
        self._pass(end)
        return end

    def _begin_landing(self, now: float) -> float:
        arrival = self._coming.popleft()
        begin = max(arrival.at_s, now) if self._program_lands else arrival.at_s
        self._landed_s = max(self._landed_s, begin) + arrival.landing_s
        self._under_way.append((self._landed_s, arrival.nbytes))
        return arrival.landing_s

    def _pass(self, now: float) -> None:
        """Time has come to ``now``."""
        while not self._program_lands and self._coming and self._coming[0].at_s <= now:
            self._begin_landing(now)
        while self._under_way and self._under_way[0][0] <= now:
            self._under_way.popleft()
            self._landed += 1
