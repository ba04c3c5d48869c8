"""Waits outside of rounds, at a save for example, that can never end: others wait for this rank at something else.

A rank that waits there needs nothing of rounds. After a while the thread that sleeps in it says AWAY in them. So it
hears where the others are that have not come: at a step, an edit, their end, at gradients that this rank has not
announced, or away at something else. Who waits there for this rank does not come before this rank does, so all of them
would wait until their limit. Who computes, or is in a barrier of the program's, says nothing of this kind, and is
waited for.

What a rank has said may be old: Ctrl-C ends a wait, and the program saves then. So only those count that say
it in two rounds.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from deepoffload.errors import RankError
from deepoffload.ranks.elsewhere import WaitsAcrossModels
from deepoffload.ranks.long_waits import LongWait
from deepoffload.ranks.round_runner import RoundRunner
from deepoffload.ranks.rounds import ENDS, NOTHING, EndOf, Want, WantKind
from deepoffload.ranks.words import OUTSIDE, ranks_in_words, where_in_words

APART = "ranks wait for each other at different calls. Let all ranks make the same calls in the same order"
"""What has happened. Where each of them is follows it."""


class Away:
    """What one rank says of its program while that waits outside of rounds, and what it finds out.

    Args:
        lock: of the runner.
        nudge: lets the thread of a rank take a round of this number.
        end_all: makes the error that all ranks raise, of what has happened.
        elsewhere: knows of ranks that are in calls of other models.

    Attributes:
        want: what the thread says for the program when others need this rank.
        what: the program waits at; "" where it does not.
        model: what errors call it.
        end: what ends when this rank closes.
    """

    def __init__(
        self,
        rank: int,
        runner: RoundRunner,
        lock: AbstractContextManager[Any],
        nudge: Callable[[int, int], object],
        end_all: Callable[..., RankError],
        elsewhere: WaitsAcrossModels | None = None,
    ) -> None:
        self.want = NOTHING
        self.what, self.model, self.end = "", "the model", EndOf.ENGINE
        self._rank, self._runner, self._lock = rank, runner, lock
        self._others = [other for other in range(runner.rounds.world_size) if other != rank]
        self._nudge, self._end_all, self._elsewhere = nudge, end_all, elsewhere
        self._trains_in: int | None = None
        self._stays: dict[int, tuple[Want, int]] = {}

    def trains_here(self) -> None:
        """The thread that calls this trains: while it waits, nobody else makes the steps that others wait for."""
        self._trains_in = threading.get_ident()

    @contextmanager
    def waits(self, what: str, key: str, by: int | None) -> Iterator[None]:
        """The program waits for all ranks, or for rank ``by``.

        Args:
            what: for people.
            key: of this very wait, the same on all ranks.
        """
        number = zlib.crc32(key.encode())
        self.want, self.what = Want(WantKind.AWAY, 0 if by is None else 1 + by, number), what
        self._stays.clear()
        try:
            yield
        finally:
            self.wait_is_over()
            self.want, self.what = NOTHING, ""

    def ends(self) -> None:
        """The program ends, and waits for what this rank is still at. To be called now and then by another thread: who
        waits for the program, and needs nothing of the sleeping thread, hears it."""
        if self.want == NOTHING:
            self.want = Want(WantKind.CLOSING, 0, self.end)
        with self._lock:
            number = self._runner.rounds.counts.rounds
        self._nudge(self._rank, number)

    def is_enough(self, until_s: float) -> bool:
        """Whether a wait for launches, that may take until then, is over. Where all ranks wait in rounds, nobody
        announces anything before. Others that wait for this rank outside of rounds, at a save for example, do not
        either, and those that wait in calls of other models hardly do. To be called with the lock held."""
        if until_s == math.inf:
            return False
        if time.monotonic() >= until_s or self._runner.all_rest:
            return True
        wants = self._runner.unmet
        waits_here = self._rank < len(wants) and wants[self._rank].kind in (WantKind.REDUCE, WantKind.WAIT)
        others = [(rank, wants[rank]) for rank in self._others if rank < len(wants)]
        return any(
            (waits_here and want.kind is WantKind.ELSEWHERE)
            or (want.kind is WantKind.AWAY and self._needs_us(rank, want))
            for rank, want in others
        )

    def is_of_program(self) -> bool:
        """Whether the thread that calls this is the one that trains, as far as it is known."""
        if self._trains_in is None:
            return threading.current_thread() is threading.main_thread()
        return threading.get_ident() == self._trains_in

    def look_around(self, missing: Callable[[], Collection[int]]) -> None:
        """Find out whether the ranks come that are waited for. To be called now and then inside of :meth:`waits`, with
        pauses in which the others can take a round.

        Args:
            missing: the ranks that have not come yet.

        Raises:
            RankError: some never come, as they wait for this one elsewhere. It is raised on all ranks.
        """
        with self._lock:
            number, wants = self._runner.rounds.counts.rounds, self._runner.unmet
            stay = {rank: want for rank, want in enumerate(wants) if rank != self._rank and self._needs_us(rank, want)}
            known, self._stays = self._stays, {rank: (want, number) for rank, want in stay.items()}
        for rank, (want, first) in known.items():
            if stay.get(rank) == want:
                self._stays[rank] = want, first
        again = [rank for rank, (_, first) in self._stays.items() if number > first]
        never = sorted(set(again).intersection(missing())) if again else []
        if never:
            raise self._end_all(APART, ranks=tuple(rank for rank in never if stay[rank].kind in ENDS))
        self._nudge(self._rank, number)
        here = dict(enumerate(wants)) if self._rank < len(wants) and wants[self._rank] == self.want else {}
        self._look_elsewhere(
            self._of_model(f"at {self.what}"), number, {rank: here[rank] for rank in missing() if rank in here}
        )

    # -- calls of other models -------------------------------------------------------------------------------------

    def elsewhere(self) -> Want:
        """What the thread says for a program that waits in a call of another model; nothing where it does not."""
        return NOTHING if self._elsewhere is None else self._elsewhere.want()

    def told(self) -> str | None:
        """What the wait that is under way ends with, where a rank in a call of another model has found that out."""
        return None if self._elsewhere is None else self._elsewhere.told()

    def look_from_rounds(self, at: Callable[[Want], str], want: Want, long: LongWait, timeout_s: float) -> None:
        """As :meth:`look_around`, of a wait in rounds, for ranks that are in calls of other models.

        Args:
            at: says where a want is.
            want: what is waited for.
            long: is written to the log.
            timeout_s: how long a wait takes while nothing happens.
        """
        place = self._of_model(at(want))
        long.look(time.monotonic(), lambda: self._ask(place), lambda: self._in_words(place, at), timeout_s)
        with self._lock:
            rounds, said, wants = self._runner.rounds, self._runner.said, self._runner.unmet
            is_brief = not said.stays
            if is_brief and want.kind is not WantKind.REDUCE:
                return
            number, here = rounds.counts.rounds, len(wants) > 0 and wants[self._rank] == said
            needed = {o: wants[o] for o in self._others if here and rounds.needs(self._rank, said, o)}
        if is_brief:
            self._look_elsewhere(place, number, {}, is_brief=True)
        else:
            self._look_elsewhere(self._of_model(at(said)), number, needed)

    def wait_is_over(self) -> None:
        """To be called before a program that has waited goes on."""
        if self._elsewhere is not None:
            self._elsewhere.wait_is_over()

    def close(self) -> None:
        """This model has no rounds any more."""
        if self._elsewhere is not None:
            self._elsewhere.close()

    def _of_model(self, place: str) -> str:
        number = 0 if self._elsewhere is None else self._elsewhere.model
        return f"{place} of {self.model}" + (f" (model {number})" if number else "")

    def _ask(self, place: str) -> None:
        """Let the others say where they are."""
        if self._elsewhere is not None:
            self._elsewhere.is_long(place)
        with self._lock:
            number = self._runner.rounds.counts.rounds
        for rank in self._others:
            self._nudge(rank, number)

    def _in_words(self, place: str, at: Callable[[Want], str]) -> str:
        """Who waits where for whom, as far as it is known. Empty where a lower rank waits at the same, and says so."""
        with self._lock:
            wants, said = dict(enumerate(self._runner.unmet)), self._runner.said
        if wants.get(self._rank) != said:
            wants = {}  # they are of before
        long = {} if self._elsewhere is None else self._elsewhere.long_waits()
        others = [rank for rank in self._others if rank not in wants or wants[rank].kind is not said.kind]
        others = others or self._others
        together = [rank for rank in range(len(self._others) + 1) if rank not in others]
        if self._rank > together[0]:
            return ""
        where = {rank: _where(wants.get(rank), long.get(rank, []), at) for rank in others}
        return f"{ranks_in_words(together)} {'wait' if together[1:] else 'waits'} {place}, {where_in_words(where)}"

    def _look_elsewhere(self, what: str, number: int, needed: Mapping[int, Want], *, is_brief: bool = False) -> None:
        if self._elsewhere is None:
            return
        cause = self._elsewhere.look_around(what, number, needed, is_brief=is_brief)
        if cause is not None:
            raise self._end_all(cause, says_where=True)
        if self._elsewhere.watches:
            for rank in self._others:
                self._nudge(rank, number)

    def _needs_us(self, rank: int, want: Want) -> bool:
        if want.kind is WantKind.AWAY:
            return want.content != self.want.content and want.unit in (0, 1 + self._rank)
        return want.stays and self._runner.rounds.needs(rank, want, self._rank)


def _where(said: Want | None, long: Sequence[str], at: Callable[[Want], str]) -> str:
    """What is known of a rank that is waited for. ``long``: its waits in calls of other models."""
    if long:
        return " and ".join(long)
    if said is None:
        return "not answering"
    place = at(said)
    return f"computing, or waiting {place}" if place == OUTSIDE else place
