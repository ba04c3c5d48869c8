"""Waits outside of rounds, at a save for example, that can never end: others wait for this rank at something else.

A rank that waits there needs nothing of rounds. After a while the thread that sleeps in it says AWAY in them. So it
hears where the others are that have not come: at a step, an edit, their end, or away at something else. Who waits there
for this rank does not come before this rank does, so all of them would wait until their limit. Who computes, or is in a
barrier of the program's, says nothing of this kind, and is waited for.

What a rank has said may be old: Ctrl-C ends a wait, and the program saves then. So only those count that say
it in two rounds.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from deepoffload.errors import RankError
from deepoffload.ranks.round_runner import RoundRunner
from deepoffload.ranks.rounds import NOTHING, Want, WantKind
from deepoffload.ranks.words import ranks_in_words

STAYS = frozenset({WantKind.STEP, WantKind.JOIN, WantKind.CLOSE, WantKind.EDIT})
"""Where a program waits for all others."""


class Away:
    """What one rank says of its program while that waits outside of rounds, and what it finds out.

    Args:
        lock: of the runner.
        nudge: lets the thread of a rank take a round of this number.
        end_all: makes the error that all ranks raise, of what has happened.

    Attributes:
        want: what the thread says for the program when others need this rank.
        what: the program waits at; "" where it does not.
    """

    def __init__(
        self,
        rank: int,
        runner: RoundRunner,
        lock: AbstractContextManager[Any],
        nudge: Callable[[int, int], object],
        end_all: Callable[[str], RankError],
    ) -> None:
        self.want = NOTHING
        self.what = ""
        self._rank, self._runner, self._lock = rank, runner, lock
        self._nudge, self._end_all = nudge, end_all
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
            self.want, self.what = NOTHING, ""

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
            stay = {rank: want for rank, want in enumerate(wants) if rank != self._rank and self._waits_for_us(want)}
            known, self._stays = self._stays, {rank: (want, number) for rank, want in stay.items()}
        for rank, (want, first) in known.items():
            if stay.get(rank) == want:
                self._stays[rank] = want, first
        again = [rank for rank, (_, first) in self._stays.items() if number > first]
        never = sorted(set(again).intersection(missing())) if again else []
        if never:
            raise self._end_all(self._cause(never))
        self._nudge(self._rank, number)

    def _waits_for_us(self, want: Want) -> bool:
        if want.kind is WantKind.AWAY:
            return want.content != self.want.content and want.unit in (0, 1 + self._rank)
        return want.kind in STAYS

    def _cause(self, others: Sequence[int]) -> str:
        who = ranks_in_words(others)
        verb = "waits" if len(others) == 1 else "wait"
        return (
            f"rank {self._rank} waits for {who} at {self.what}, and {who} {verb} for rank {self._rank} elsewhere: all "
            "ranks make the same calls, in the same order"
        )
