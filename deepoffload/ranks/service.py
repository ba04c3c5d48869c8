"""Rounds at work: a rank says what it needs, waits for what all have agreed on, and serves the others meanwhile.

`[Note: who serves]` Every call of the program takes rounds that are over and enters the next one. A program that waits
here does so until it has what it needs. A program that is elsewhere (in a long computation, in its own barrier) calls
nothing: then a rank that waits longer than is usual *nudges* it, and the thread that sleeps in this rank answers
for it. If the program stays away, the thread answers the rounds that follow without being nudged again, as long as they
move bytes. All waits are gloo's, in C++ and without the GIL; they return to Python to nudge, to hear Ctrl-C, and to
give up.

`[Note: held]` A launch runs what it finds to do: it may update a unit's weights, and evict others. So a thread that is
in the middle of such a thing holds the rounds (:meth:`RoundService.hold`), and nothing is launched until it lets go.
Meanwhile it may wait for payloads that are in flight (:meth:`RoundService.wait_out`): all ranks have agreed on these,
so none of them needs another round for them. Each takes what has come in every wait. A launch may wait for earlier
reductions to land: so who waits for readers lands first. So of all payloads in flight the first one always ends.

`[Note: ends]` A rank whose connection closes, for which another has waited ``timeout_s`` in vain, or that says that it
has failed, is an error on all ranks, with one text. After it every call raises it again. The links are cut, so that
gloo's own threads end and the other ranks notice.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist

from deepoffload.errors import RankError
from deepoffload.ranks.away import Away
from deepoffload.ranks.collectives import LinkError
from deepoffload.ranks.common_error import CommonError
from deepoffload.ranks.elsewhere import WaitsAcrossModels
from deepoffload.ranks.leaving import at_exit_of, await_first_end, call_at_exit, text_of
from deepoffload.ranks.links import NudgeLink, RoundLink
from deepoffload.ranks.recording import RankRecorder
from deepoffload.ranks.roll_call import RollCall
from deepoffload.ranks.round_runner import Launch, PayloadFlight, RoundRunner, Waitable
from deepoffload.ranks.rounds import NEEDS_PROGRAMS, NOTHING, EndOf, WaitFor, Want, WantKind
from deepoffload.ranks.sleeper import Sleeper
from deepoffload.ranks.wait_times import Patience, RoundStats
from deepoffload.ranks.words import Whereabouts, at
from deepoffload.timeline import Timeline

log = logging.getLogger("deepoffload")

SLICE_S = 1.0
"""A wait returns to Python this often at least, so that Ctrl-C is heard."""
SERVE_S = 0.5
"""How long the thread waits for a round that it has answered; then it sleeps again, and hears nudges and alarms."""


class RoundService:
    """One rank's part in the rounds. Any thread may call it.

    It has many methods, because every wait for another rank is one of them: who waits elsewhere serves nobody.

    Attributes:
        away: what waits outside of rounds says there that it does.
        error: what all ranks raise, once something has happened.
        outside_modes: a context outside of all modes of the program, which would see and change what rounds do.

    Args:
        store: nobody else uses its keys.
        launch: starts a payload that all ranks launch now. It is called with the lock held, in the same order on all
            ranks, by any thread, also for a payload that this rank has not asked for. Returns what to wait for or None.
        name_of: what errors call what a want is of.
        timeout_s: how long a rank waits while nothing happens.
        lock: held while the state changes and while ``launch`` runs, not while this rank waits. Re-entrant.
        abandon: ends the payload that is in flight, after an error.
        outside: calls a function with interrupts let through, for waits of a caller that has the lock.
        let_go: around a wait for other programs, whose caller has the lock too: they may wait for a save of this rank.
        timeline: of what rounds and waits take; None: nothing is recorded.
        elsewhere: knows of ranks that are in calls of other models; None: they have none.
        ready_at_launch: as :attr:`~deepoffload.ranks.exchange.Exchange.ready_at_launch` of the payloads.

    Raises:
        RankError: not every rank has come within ``timeout_s``. All methods that post or wait raise it, too: see the
            module.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        launch: Launch,
        name_of: Callable[[Want], str],
        *,
        timeout_s: float = 600.0,
        lock: Any = None,
        abandon: Callable[[], None] | None = None,
        outside: Callable[..., Any] | None = None,
        let_go: Callable[[], AbstractContextManager[None]] = nullcontext,
        timeline: Timeline | None = None,
        elsewhere: WaitsAcrossModels | None = None,
        ready_at_launch: bool = False,
    ) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self._others = [other for other in range(world_size) if other != rank]
        self._name_of, self._abandon, self._outside, self._let_go = name_of, abandon, outside, let_go
        self.outside_modes: Callable[[], AbstractContextManager[None]] = nullcontext
        self._at = partial(at, name_of=name_of)
        self._recorder = RankRecorder(timeline, name_of)
        self._lock = threading.RLock() if lock is None else lock
        self._closed = False
        self._nudges = 0
        self._inside = 0  # calls of the program that wait
        self._calls = 0  # of the program: the thread sees by it whether the program is elsewhere
        self._answered_at = -1  # the number of calls when the thread answered last
        try:
            self._link = RoundLink(store, rank, world_size, timeout_s)
            nudge_link = NudgeLink(store, rank, world_size, timeout_s)
        except LinkError as error:
            raise RankError(f"rank {rank} at the start of rounds: {error}") from error
        self._runner = RoundRunner(self._link, rank, world_size, launch, self._recorder, ready_at_launch)
        roll_call = RollCall(
            store,
            rank,
            world_size,
            lambda other: self._sleeper.alarm(other),
            lambda other: self._sleeper.is_alarmed(other),
        )
        self.error = CommonError(
            roll_call,
            self._runner,
            self._lock,
            self._here,
            self._nudge,
            lambda: self.away.told(),
            self._cut,
            name_of,
        )
        self._sleeper = Sleeper(nudge_link, rank, world_size, self._serve, self.error.answer_alarm)
        self.away = Away(rank, self._runner, self._lock, self._sleeper.nudge, self.end_all, elsewhere)
        self._cancel_at_exit = call_at_exit(at_exit_of(weakref.ref(self)))

    # -- what the program says --------------------------------------------------------------------------------------
    def post(self, want: Want) -> None:
        """This rank needs a gather, or has its part of a reduction. Once for each; does not wait."""
        with self.judged(want), self._lock:
            self._calls += 1
            self.check()
            self._runner.rounds.post(want)
            self._runner.advance()

    def queue(self, want: Want) -> None:
        """The same for a caller that is in the middle of something: it launches nothing."""
        with self.judged(want), self._lock:
            self._calls += 1
            self.check()
            self._runner.rounds.post(want)
            self._runner.enter()

    def pump(self) -> None:
        """Take what is over and say what comes next, without waiting."""
        with self.judged(), self._lock:
            self._calls += 1
            self.check()
            self._runner.advance()

    def wait_launched(self, want: Want) -> None:
        """Return when a gather that this rank has posted has been launched."""
        self._until(lambda: not self._runner.rounds.is_pending(want), want)

    def wait_reduced(self, unit: int, reason: WaitFor, limit_s: float = math.inf) -> bool:
        """Return when parts of a unit have been launched: of ALL_PARTS also those of other ranks, in the backwards that
        this program has ended, else those of this rank. Or when about ``limit_s`` are over, or would be in vain.
        Returns whether they have been launched."""
        want, rounds = Want(WantKind.REDUCE, unit), self._runner.rounds
        over = partial(self.awaits_parts, unit) if reason is WaitFor.ALL_PARTS else partial(rounds.is_pending, want)
        lasts = reason is not WaitFor.A_WHILE and self.away.is_of_program()
        until = time.monotonic() + limit_s
        rest = Want(WantKind.WAIT, 1 + unit if lasts else 0, reason)
        self._until(lambda: not over() or self.away.is_enough(until), want, rest)
        with self._lock:
            return not over()

    def awaits_parts(self, unit: int, *, ended: bool = True) -> bool:
        """Whether parts of a unit are still to be launched, of this rank or of backwards that this program has ended.
        ``ended``: the other ranks have to say that they have ended these; else one part from each of them is enough."""
        with self._lock:
            return self._runner.rounds.awaits_parts(unit, ended=ended)

    def end_backward(self) -> None:
        """The program has ended a backward. The others hear it with what this rank says next."""
        with self._lock:
            self._runner.rounds.end_backward()

    def wait_flight(self, flight: PayloadFlight, want: Want) -> None:
        """Return when a payload is over."""
        self._until(lambda: self._runner.has_arrived(flight), want, flight=flight)
        with self.judged(want), self._lock:
            flight.ready_within(0.0)  # raises if it has failed

    def wait_out(self, flight: PayloadFlight, want: Want) -> None:
        """Return when a payload that is in flight is over, without taking a round meanwhile. [Note: held]"""
        self._until(lambda: self._runner.has_arrived(flight), want, flight=flight, serve=False)

    def take_all(self, want: Want) -> None:
        """Return when all that is in flight has arrived, without taking a round; at once where nothing may land."""
        while self._runner.may_land and (flight := self._runner.oldest_flight) is not None:
            self._until(partial(self._runner.has_arrived, flight), want, flight=flight, serve=False, land=True)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """While this lasts nothing is launched. To be called with the lock held. [Note: held]"""
        self._runner.held += 1
        try:
            yield
        finally:
            self._runner.held -= 1

    @property
    def is_held(self) -> bool:
        """Whether nothing may be launched now. To be asked with the lock held."""
        return self._runner.held > 0

    @property
    def has_failed(self) -> bool:
        """Whether every call raises."""
        return self.error.text is not None

    @property
    def meetings(self) -> int:
        """How often all ranks have met, at steps and elsewhere. The same on all ranks at one place of the program."""
        return self._runner.rounds.meetings

    def meet(self, kind: WantKind, unit: int = 0, content: int = 0) -> WantKind:
        """Wait at STEP, JOIN, CLOSE or EDIT (of ``unit``) until all ranks are there, and serve them until then.

        Returns:
            What has been met. After JOIN that may be STEP: the program makes it with the others, and joins again.
            :attr:`joined` has the ranks that had joined.
        """
        want = Want(kind, unit, content)
        self.away.trains_here()
        self._until(lambda: self._runner.met is not None, want, want)
        with self._lock:
            return self._runner.take_met()

    @property
    def joined(self) -> tuple[int, ...]:
        """The ranks that had joined when the ranks met last. The same on all ranks, until they meet again."""
        return self._runner.joined

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks that had made no backward for the step at which the ranks met last, where others had."""
        return self._runner.idle

    def stats(self) -> RoundStats:
        """What rounds have cost this rank so far."""
        with self._lock:
            return self._runner.stats(self._nudges)

    def fail(self, message: str) -> None:
        """Tell all ranks that this one cannot continue, and why: all raise it. Returns when they have heard it."""
        with self.outside_modes():
            self.error.fail(message)

    @property
    def untold(self) -> str | None:
        """What has failed, where the program does not know it."""
        return None if self.error.is_told else self.error.text

    def program_ends(self) -> None:
        """What :meth:`close` tells the others: it is not the program that calls it."""
        self.away.end = EndOf.PROGRAM

    def let_first_end(self) -> None:
        """To be called when the process ends. Where another rank is why, return when its process has ended."""
        if self.error.is_of_another:
            await_first_end(lambda: all(self._sleeper.reaches(other) for other in self._others))

    def close(self) -> None:
        """Wait until all ranks close, serve them until then, and end. Idempotent.

        Raises:
            RankError: others train on. It is raised there, too. This rank's part has ended all the same. Or what the
                program has not been told yet.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not self.error.is_told or self.away.want.kind is WantKind.CLOSING:
                self.meet(WantKind.CLOSE, content=self.away.end)
        finally:
            self._cancel_at_exit()
            self._sleeper.end(stays_connected=self.away.end is EndOf.PROGRAM)
            self.away.close()
            with self._lock:
                self._link.cut()

    # -- waiting ----------------------------------------------------------------------------------------------------
    def _until(
        self,
        over: Callable[[], bool],
        want: Want,
        rest: Want | None = None,
        flight: PayloadFlight | None = None,
        *,
        serve: bool = True,
        land: bool = False,
    ) -> None:
        """Wait until ``over``.

        Args:
            rest: what this rank says meanwhile, if it has nothing else to say.
            flight: what is waited for, if it is a payload that has been launched.
            serve: take rounds meanwhile, and launch what they say.
            land: take what has come of reductions, too; who serves does.
        """
        started = time.monotonic()
        patience = Patience(self._runner.times.nudge_after_s, started)
        with self._counted_in(), self.judged(want):
            while True:
                with self._lock:
                    self.check()
                    if serve:
                        if self._runner.held:
                            raise RuntimeError(f"rank {self.rank} waits {self._at(want)} and can serve nobody")
                        self._runner.advance()
                    else:
                        self._runner.take_arrived(land=land)
                    if over():
                        break
                    if rest is not None:
                        self._runner.rounds.rest(rest)
                    waitable = self._runner.waitable(flight)
                self._wait(waitable, patience, want)
            # Nobody nudges at a rest. How long a wait takes that a nudge has ended says nothing about other programs.
            if not patience.has_nudged and (rest is None or rest.kind is WantKind.WAIT):
                self._runner.times.ended(time.monotonic() - started)

    def _wait(self, waitable: Waitable, patience: Patience, want: Want) -> None:
        """One wait in C++. Nudges the others when it is time to; gives up when nothing has happened for too long."""
        begun, begun_s = time.monotonic(), time.perf_counter()
        give_up_at = max(patience.started, self._runner.heard) + self.timeout_s
        until = min(begun + SLICE_S, give_up_at, patience.nudge_at if waitable.may_nudge else give_up_at)
        limit_s = max(until - begun, 0.001)
        with self._let_go() if want.kind in NEEDS_PROGRAMS else nullcontext():
            over = waitable.within(limit_s) if self._outside is None else self._outside(waitable.within, limit_s)
        now = time.monotonic()
        self._runner.times.waited_s += now - begun
        self._recorder.waited(want, begun_s)
        if over:
            return
        if waitable.may_nudge and now >= patience.nudge_at:
            patience.nudged(now)
            self._nudge(waitable.round)
        else:
            # gloo does not tell a wait of a rank that has died in the middle of a message. To send to it fails.
            self._check_all(self._sleeper.reaches)
        self.away.look_from_rounds(self._at, want, patience.long, self.timeout_s)
        if now >= max(patience.started, self._runner.heard) + self.timeout_s:
            cause = f"rank {self.rank} has waited {self.timeout_s:g} s {self._at(want)} and nothing has happened"
            raise self.end_all(cause)

    def _nudge(self, number: int) -> None:
        self._nudges += len(self._others)
        self._check_all(lambda other: self._sleeper.nudge(other, number))

    def _check_all(self, reaches: Callable[[int], bool]) -> None:
        gone = [other for other in self._others if not reaches(other)]
        if gone:
            raise LinkError(f"no connection to rank {gone[0]}")

    @contextmanager
    def _counted_in(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            self._calls += not self._sleeper.is_current()
        try:
            yield
        finally:
            self.away.wait_is_over()
            with self._lock:
                self._inside -= 1

    # -- serving, in the thread -------------------------------------------------------------------------------------
    def _serve(self, number: int) -> None:
        """Take round ``number`` for a program that is elsewhere; the next ones too, if it has not called since the last
        time."""
        try:
            with self.judged():
                stays = self._calls == self._answered_at
                waitable = self._serve_once(number, stays, self.away.elsewhere())
                while waitable is not None and waitable.within(SERVE_S):
                    waitable = self._serve_once(number, stays)
        except Exception as error:  # the program hears of it with its next call, as all ranks do
            log.debug("rank %d: the thread has ended its service: %s", self.rank, error)
            if not self.has_failed:
                self.fail(text_of(error))

    def _serve_once(self, number: int, stays: bool, want: Want = NOTHING) -> Waitable | None:
        # The program may wait with the lock held, and serves then. In any case this thread must hear the next message.
        if not self._lock.acquire(timeout=SERVE_S):
            return None
        with self._lock:
            self._lock.release()
            if self._inside or self.has_failed:
                return None
            self._runner.advance()
            rounds = self._runner.rounds
            stays = stays and self._calls == self._answered_at and self._runner.bytes_wanted
            # What the program has asked for before it left costs no other rank a round.
            if rounds.counts.rounds > number and rounds.asked is None and not stays:
                return None
            if rounds.answer(want if self.away.want == NOTHING else self.away.want):
                self._answered_at = self._calls
            return self._runner.waitable()

    # -- when something is wrong ------------------------------------------------------------------------------------
    def hear(self) -> None:
        """Raise what another rank has said to all, for a wait that is not in a round. Asks the store."""
        self.error.hear()

    def end_all(self, cause: str, *, says_where: bool = False, ranks: tuple[int, ...] = ()) -> RankError:
        """Let all ranks raise ``cause``, and where each of them is unless it ``says_where``. Returns the error.
        ``ranks``: those that have caused it, and end."""
        with self.outside_modes():
            return self.error.end_all(cause, says_where=says_where, ranks=ranks)

    def check(self) -> None:
        """Raise what has failed before, if anything has."""
        self.error.check()

    @contextmanager
    def judged(self, want: Want = NOTHING) -> Iterator[None]:
        """Errors of the links and of payloads become the one that all ranks raise."""
        with self.outside_modes(), self.error.judged(want):
            yield

    def _cut(self) -> None:
        self._link.cut()
        if self._abandon is not None:
            self._abandon()

    def _here(self) -> Whereabouts:
        waits = self._inside > 0 or not self._sleeper.is_current()
        where = f"at {self.away.what}" if self.away.what else self._at(self._runner.said)
        return Whereabouts(where, self._runner.rounds.steps, waits or self.away.what != "")
