"""Rounds and the payloads they lead to, on real links. Not thread-safe: :mod:`service` holds a lock and waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from deepoffload.errors import RankError
from deepoffload.ranks.apart import PeersApartError
from deepoffload.ranks.collectives import LinkError, wait_within
from deepoffload.ranks.links import RoundLink
from deepoffload.ranks.recording import RankRecorder
from deepoffload.ranks.rounds import ANSWERS, NOTHING, PAYLOADS, RESTS, Payload, Rounds, Want, WantKind
from deepoffload.ranks.wait_times import RoundStats, WaitTimes

AHEAD = 2
"""So many payloads may be in flight when the next one is agreed on."""


class PayloadFlight(Protocol):
    """A collective that has been launched. All methods raise RuntimeError (RankError is one) if it has failed."""

    def ready(self) -> bool:
        """Whether it need not wait for another rank any more."""

    def ready_within(self, limit_s: float) -> bool:
        """Wait for that in C++, at most so long. Returns :meth:`ready`."""

    def arrive(self) -> None:
        """Called once, when it is ready, by any thread: takes what has come. Those of reductions are called in the
        order in which they were launched."""


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


class LaunchError(RuntimeError):
    """A payload could not be launched here, or not be taken when it had come; the others do so. The cause is the error
    that was raised."""

    def __init__(self, payload: Payload) -> None:
        super().__init__(payload)
        self.payload = payload


class RoundRunner:
    """One rank's rounds, its link and its payloads.

    Attributes:
        said: the last want that this rank has said.
        met: what all ranks have met at, until somebody takes note of it.
        joined: the ranks that were there because they have joined. idle: those that had made no backward for the step.
        unmet: what every rank has said in the last round, in rank order; nothing where that was a meeting.
        all_rest: whether all ranks rested in the last round, and it led to nothing.
        bytes_wanted: whether any rank asked for a payload in the last round.
        heard: when a payload was launched or over, or something met, on the clock of ``time.monotonic``.
        held: above zero no round is taken and nothing is launched: what a launch calls, or an update, is in the middle
            of something.
    """

    def __init__(
        self,
        link: RoundLink,
        rank: int,
        world_size: int,
        launch: Launch,
        recorder: RankRecorder,
        ready_at_launch: bool = False,
    ) -> None:
        self._recorder = recorder
        self._ready_at_launch = ready_at_launch
        self.rounds = Rounds(rank, world_size, self._say)
        self.times = WaitTimes(world_size)
        self.said = NOTHING
        self.met: WantKind | None = None
        self.joined: tuple[int, ...] = ()
        self.idle: tuple[int, ...] = ()
        self.unmet: tuple[Want, ...] = ()
        self.all_rest = False
        self.bytes_wanted = False
        self._said_at = 0.0
        self._answered: tuple[Want, float] | None = None
        self._link, self._launch = link, launch
        self._flights: list[tuple[int, Payload, PayloadFlight]] = []
        self._launched_s: dict[PayloadFlight, float] = {}
        self._launching = 0
        self.held = 0
        self.heard = time.monotonic()

    def advance(self) -> None:
        """Take the rounds that are over, launch what they say, and enter the next one. Does not wait.

        Raises:
            LinkError, PeersFailedError, PeersApartError, LaunchError, or what a flight raises.
        """
        self.take_arrived(land=not self.held)
        while not self.held:
            if self.rounds.asked is not None:
                if not self._link.is_over():
                    return
                self._take()
            if not self.enter():
                return

    def enter(self) -> bool:
        """Enter the next round, if this rank has something to say and there is room for it. Returns whether it has."""
        upcoming = self.rounds.upcoming
        if upcoming is None or (upcoming.kind in PAYLOADS and len(self._flights) >= AHEAD):
            return False
        self.rounds.enter()
        return True

    def take_met(self) -> WantKind:
        """What all ranks have met at. Once for each."""
        met, self.met = self.met, None
        assert met is not None
        return met

    def stats(self, nudges: int) -> RoundStats:
        """What rounds have cost this rank so far, with so many messages that it has sent."""
        counts, times = self.rounds.counts, self.times
        return RoundStats(counts.rounds, counts.mixed, nudges, counts.answers, times.waited_s, tuple(times.for_rank_s))

    @property
    def oldest_flight(self) -> PayloadFlight | None:
        """The first of those that have not arrived here."""
        return self._flights[0][2] if self._flights else None

    @property
    def may_land(self) -> bool:
        """Whether reductions may land: nothing is in progress here, except perhaps a launch that waits."""
        return self.held == self._launching

    def has_arrived(self, flight: PayloadFlight) -> bool:
        """Whether it is ready, and has been taken if it was launched here."""
        return all(known is not flight for _, _, known in self._flights) and flight.ready()

    def waitable(self, flight: PayloadFlight | None = None) -> Waitable:
        """What to wait for: ``flight``, the round under way, or room for the next payload."""
        asked = self.rounds.asked
        if flight is None and asked is not None:
            work = self._link.work
            if work is None:  # another thread has met the error, and still asks who has gone
                raise LinkError("a connection has ended before this round")
            helps = self.rounds.has_queue or asked.kind not in RESTS - {WantKind.WAIT} | ANSWERS
            if self._ready_at_launch and self._flights:
                # All ranks launch it before the round is over. Until it is taken here, others wait to be read. It may
                # have come since this rank has looked: then this wait is over at once.
                launched, _, known = self._flights[0]
                return Waitable(known.ready_within, launched, helps)
            return Waitable(lambda limit_s: wait_within(work, limit_s), self.rounds.counts.rounds, helps)
        reduces = any(p.kind is WantKind.REDUCE and known is flight for _, p, known in self._flights)
        for launched, payload, known in self._flights:
            if flight is None or known is flight or (reduces and payload.kind is WantKind.REDUCE):
                return Waitable(known.ready_within, launched, True)
        assert flight is not None, "nothing to wait for"
        return Waitable(flight.ready_within, self.rounds.counts.rounds - 1, True)

    def take_arrived(self, *, land: bool) -> None:
        """Take what has come of the payloads that are in flight. ``land``: of reductions, too."""
        while (entry := self._next_arrived(land)) is not None:
            _, payload, flight = entry
            launched_s = self._launched_s.pop(flight)
            self._flights.remove(entry)  # before: what is called may come back here
            self.heard = time.monotonic()
            self.held += 1
            try:
                flight.arrive()
            except RankError:
                raise
            except BaseException as error:  # an interrupt, too: the others do not know of it
                raise LaunchError(payload) from error
            finally:
                self.held -= 1
            if payload.kind is WantKind.REDUCE:
                self._recorder.reduced(Want(payload.kind, payload.unit), launched_s)

    def _next_arrived(self, land: bool) -> tuple[int, Payload, PayloadFlight] | None:
        for entry in self._flights:
            _, payload, flight = entry
            if payload.kind is WantKind.REDUCE and not land:
                continue
            if flight.ready():
                return entry
            land = land and payload.kind is not WantKind.REDUCE  # one after the other
        return None

    def _note_who_is_elsewhere(self, others: list[Want]) -> None:
        """A program that comes to the same place one round after its thread has answered was only slow. Then the nudge
        was needless, and the next one waits longer."""
        answered, self._answered = self._answered, None
        if answered is not None and answered[0] in others:
            self.times.ended(time.monotonic() - answered[1])
        if any(want.kind in ANSWERS for want in others):
            self._answered = self.said, self._said_at

    def _say(self, want: Want) -> None:
        self.said, self._said_at = want, time.monotonic()
        self._recorder.enters()
        self._link.start((*want, self.rounds.ended, self.rounds.steps, int(self.times.waited_s * 1e6)))

    def _take(self) -> None:
        messages = self._link.take()
        number = self.rounds.counts.rounds
        wants = [Want(WantKind(kind), unit, content) for kind, unit, content, *_ in messages]
        outcome = self.rounds.take(wants, [ended for *_, ended, _, _ in messages])
        slowest, lost_s = self.times.round_over(self.rounds.rank, [waited_us for *_, waited_us in messages])
        self._recorder.round_over(self.said, slowest, lost_s)
        self.bytes_wanted = any(want.kind in PAYLOADS for want in wants)
        self._note_who_is_elsewhere([want for rank, want in enumerate(wants) if rank != self.rounds.rank])
        if outcome.failed:
            raise PeersFailedError(outcome.failed)
        if outcome.apart:
            raise PeersApartError(wants, [steps for *_, steps, _ in messages])
        self.unmet = tuple(wants) if outcome.met is None else ()
        self.all_rest = not outcome.payloads and all(want.kind in RESTS for want in self.unmet or (NOTHING,))
        if outcome.met is not None:
            self.met, self.joined, self.idle = outcome.met, outcome.joined, outcome.idle
        if outcome.payloads or outcome.met is not None:
            self.heard = time.monotonic()
        for payload in outcome.payloads:
            self.held += 1
            self._launching += 1
            try:
                flight = self._launch(payload)
            except RankError:
                raise
            except BaseException as error:  # an interrupt, too: the others do not know of it
                raise LaunchError(payload) from error
            finally:
                self._launching -= 1
                self.held -= 1
            if flight is not None:
                self._flights.append((number, payload, flight))
                self._launched_s[flight] = time.perf_counter()


def say_failure(
    runner: RoundRunner,
    lock: AbstractContextManager[Any],
    nudge: Callable[[int], None],
    has_heard: Callable[[], bool],
    limit_s: float,
) -> None:
    """Say in a round that this rank has failed. Returns when all ranks have heard it, at the latest after ``limit_s``.

    Args:
        lock: of the runner; not held.
        nudge: tells the others to take a round.
        has_heard: whether this rank raises an error in all of its calls. Asked with the lock held.
    """
    until = time.monotonic() + limit_s
    rounds = runner.rounds
    with lock:
        number = rounds.counts.rounds + (rounds.asked is not None)
        rounds.fail()
    nudge(number)
    while (left_s := until - time.monotonic()) > 0:
        with lock:
            if has_heard():
                return
            runner.advance()
            if rounds.asked is None:
                return  # the thread has taken the round in which this was said: all have heard it
            waitable = runner.waitable()
        waitable.within(left_s)
