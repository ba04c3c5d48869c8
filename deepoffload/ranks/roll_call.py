"""Who is there when something went wrong: every rank tells the store where it is, and the first one to judge says what
has happened. So all ranks raise the same error, and it names the rank that caused it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple

import torch.distributed as dist

from deepoffload.ranks.limited_store import LimitedStore
from deepoffload.ranks.words import Whereabouts, ranks_in_words

ANSWER_WITHIN_S = 1.5
"""How long a rank that is alive may take to say where it is. A thread of ours answers for its program."""
STORE_ANSWERS_WITHIN_S = 1.0
"""How long the store's host may take."""
ASK_AGAIN_S = 0.02
_VERDICT = "verdict"


class Verdict(NamedTuple):
    """What has happened.

    Attributes:
        text: what all ranks raise.
        ranks: those that have caused it, and end.
    """

    text: str
    ranks: tuple[int, ...] = ()

    @classmethod
    def read(cls, said: bytes) -> Verdict:
        """As :meth:`written`."""
        text, ranks = json.loads(said)
        return cls(text, tuple(ranks))

    def written(self) -> str:
        """As the store has it."""
        return json.dumps(self)


class RollCall:
    """One rank's part in it.

    Args:
        alarm: tells another rank to say where it is; returns False where that rank has gone.
        is_alive: whether another rank has heard that. It is asked where the store's host may be what has stopped.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        alarm: Callable[[int], bool],
        is_alive: Callable[[int], bool],
    ) -> None:
        self._store = LimitedStore(dist.PrefixStore("roll call", store), STORE_ANSWERS_WITHIN_S)
        self._rank, self._world_size = rank, world_size
        self._alarm, self._is_alive = alarm, is_alive

    def answer(self, here: Whereabouts) -> None:
        """Say where this rank is."""
        with suppress(RuntimeError):  # the store's host may be what has gone
            self._store.set(str(self._rank), json.dumps(asdict(here)))

    def verdict(self, limit_s: float = 0.0) -> Verdict | None:
        """What another rank has found, waited for at most ``limit_s``; None when it is not there."""
        said = self._read(_VERDICT, limit_s)
        return None if said is None else Verdict.read(said)

    def judge(self, found: Verdict) -> Verdict:
        """Say for all ranks what has happened. Returns what the first one to judge has said."""
        with suppress(RuntimeError):
            return Verdict.read(self._store.compare_set(_VERDICT, "", found.written()))
        return found

    def inquire(
        self, here: Whereabouts, cause: str, *, says_where: bool = False, ranks: tuple[int, ...] = ()
    ) -> Verdict:
        """Find out who is there, and judge.

        Args:
            cause: what this rank has met, for the case in which everybody answers.
            says_where: it names the places of the ranks itself.
            ranks: those that have caused it, and end.
        """
        until = time.monotonic() + ANSWER_WITHIN_S
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        gone = [rank for rank in others if not self._alarm(rank)]
        if (said := self.verdict()) is not None:
            return said
        self.answer(here)
        known = {self._rank: here}
        silent: list[int] = []
        for rank in others:
            found = None if rank in gone else self._whereabouts(rank, until)
            if found is not None:
                known[rank] = found
            elif rank not in gone and not self._alarm(rank):
                gone.append(rank)
            elif rank not in gone and not self._is_alive(rank):
                silent.append(rank)
        text = cause if says_where and not gone and not silent else _text(gone, silent, known, cause)
        return self.judge(Verdict(text, tuple(gone) if gone else () if silent else ranks))

    def _whereabouts(self, rank: int, until: float) -> Whereabouts | None:
        """What another rank answers; None when it does not, or has gone. Its connection may end later than what was
        noticed of its end, so that is asked again."""
        while (said := self._read(str(rank), 0.0)) is None and time.monotonic() < until and self._alarm(rank):
            if self._store.is_lost and self._is_alive(rank):
                break
            time.sleep(ASK_AGAIN_S)
        return None if said is None else Whereabouts(**json.loads(said))

    def _read(self, key: str, limit_s: float) -> bytes | None:
        until = time.monotonic() + limit_s
        with suppress(RuntimeError):
            while not self._store.check(key):
                if time.monotonic() >= until:
                    return None
                time.sleep(ASK_AGAIN_S)  # to wait in the store would keep other threads from asking it
            return self._store.get(key)
        return None


def _text(gone: list[int], silent: list[int], known: dict[int, Whereabouts], cause: str) -> str:
    places = ", ".join(place.of(rank) for rank, place in sorted(known.items()))
    if gone:
        end = "has gone" if len(gone) == 1 else "have gone"
        return (
            f"{ranks_in_words(gone)} {end}; {places}. Look at the output of the process that has gone: its error is "
            "there"
        )
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        return (
            f"{ranks_in_words(silent)} {verb} not answer: stopped, or the connection to its host is lost; {cause}; "
            f"{places}"
        )
    return f"{cause}; {places}"
