"""Rounds and the payloads they lead to, on real links. Not thread-safe: :mod:`service` holds a lock and waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from deepoffload.ranks.collectives import wait_within
from deepoffload.ranks.links import RoundLink
from deepoffload.ranks.rounds import NOTHING, PAYLOADS, RESTS, Payload, Rounds, Want, WantKind
from deepoffload.ranks.wait_times import WaitTimes

AHEAD = 2
"""So many payloads may be in flight when the next one is agreed on."""


class PayloadFlight(Protocol):
    """A collective that has been launched. Both methods raise RuntimeError (RankError is one) if it has failed."""

    def ready(self) -> bool:
        """Whether it need not wait for another rank any more."""

    def ready_within(self, limit_s: float) -> bool:
        """Wait for that in C++, at most so long. Returns :meth:`ready`."""


Launch = Callable[[Payload], PayloadFlight | None]


@dataclass(frozen=True)
class Waitable:
    """What a wait waits for now.

    Attributes:
        within: waits at most so many seconds, and returns whether it is over.
        round: the others must have taken this round before it can be over.
        may_nudge: a rank whose program is elsewhere can help. It cannot where this rank waits for programs to come.
    """

    within: Callable[[float], bool]
    round: int
    may_nudge: bool


class PeersFailedError(RuntimeError):
    """``ranks`` have said that they have failed."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class PeersClosedError(RuntimeError):
    """``ranks`` have closed while others train. ``wants`` and ``steps`` say where every rank is."""

    def __init__(self, ranks: tuple[int, ...], wants: Sequence[Want], steps: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks, self.wants, self.steps = ranks, wants, steps


class LaunchError(RuntimeError):
    """A payload could not be launched here; the others launch it. The cause is the error that was raised."""

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        self.payload = payload


class RoundRunner:
    """One rank's rounds, its link and its payloads.

    Attributes:
        said: the last want that this rank has said.
        met: what all ranks have met at, until somebody takes note of it.
        bytes_wanted: whether any rank asked for a payload in the last round.
        heard: when a payload was launched or over, or something met, on the clock of ``time.monotonic``.
    """

    def __init__(self, link: RoundLink, rank: int, world_size: int, launch: Launch) -> None:
        self.rounds = Rounds(rank, world_size, self._say)
        self.times = WaitTimes(world_size)
        self.said = NOTHING
        self.met: WantKind | None = None
        self.bytes_wanted = False
        self._link, self._launch = link, launch
        self._flights: list[tuple[int, PayloadFlight]] = []
        self.heard = time.monotonic()

    def advance(self) -> None:
        """Take the rounds that are over, launch what they say, and enter the next one. Does not wait.

        Raises:
            LinkError, PeersFailedError, PeersClosedError, LaunchError, or what a flight raises.
        """
        self._drop_flights()
        while True:
            if self.rounds.asked is not None:
                if not self._link.is_over():
                    return
                self._take()
            upcoming = self.rounds.upcoming
            if upcoming is None or (upcoming.kind in PAYLOADS and len(self._flights) >= AHEAD):
                return
            self.rounds.enter()

    def waitable(self, flight: PayloadFlight | None = None) -> Waitable:
        """What to wait for: ``flight``, the round under way, or room for the next payload."""
        asked = self.rounds.asked
        if flight is None and asked is not None:
            work = self._link.work
            assert work is not None
            helps = self.rounds.has_queue or asked.kind not in RESTS - {WantKind.WAIT} | {WantKind.NOTHING}
            return Waitable(lambda limit_s: wait_within(work, limit_s), self.rounds.counts.rounds, helps)
        for launched, known in self._flights:
            if flight is None or known is flight:
                return Waitable(known.ready_within, launched, True)
        assert flight is not None, "nothing to wait for"
        return Waitable(flight.ready_within, self.rounds.counts.rounds - 1, True)

    def _drop_flights(self) -> None:
        over = [flight for _, flight in self._flights if flight.ready()]
        if over:
            for flight in over:
                flight.ready_within(0.0)  # raises if it has failed
            self._flights = [entry for entry in self._flights if entry[1] not in over]
            self.heard = time.monotonic()

    def _say(self, want: Want) -> None:
        self.said = want
        self._link.start((want.kind, want.unit, self.rounds.steps, int(self.times.waited_s * 1e6)))

    def _take(self) -> None:
        messages = self._link.take()
        number = self.rounds.counts.rounds
        wants = [Want(WantKind(kind), unit) for kind, unit, _, _ in messages]
        outcome = self.rounds.take(wants)
        self.times.round_over(self.rounds.rank, [waited_us for _, _, _, waited_us in messages])
        self.bytes_wanted = any(want.kind in PAYLOADS for want in wants)
        if outcome.failed:
            raise PeersFailedError(outcome.failed)
        if outcome.closed:
            raise PeersClosedError(outcome.closed, wants, [steps for _, _, steps, _ in messages])
        if outcome.met is not None:
            self.met = outcome.met
        if outcome.payloads or outcome.met is not None:
            self.heard = time.monotonic()
        for payload in outcome.payloads:
            try:
                flight = self._launch(payload)
            except Exception as error:
                raise LaunchError(payload) from error
            if flight is not None:
                self._flights.append((number, flight))
