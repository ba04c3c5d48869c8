"""Who is there when something went wrong: every rank tells the store where it is, and the first one to judge says what
has happened. So all ranks raise the same error, and it names the rank that caused it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

ANSWER_WITHIN_S = 2.0
"""How long a rank that is alive may take to say where it is. A thread of ours answers for its program."""
ASK_AGAIN_S = 0.02
_VERDICT = "verdict"


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is, as it says itself.

    Attributes:
        want: the last thing that it has said in a round, in words.
        step: how many steps it has made.
        waits: whether its program waits for the others; else it computes, or waits for something that is not ours.
    """

    want: str
    step: int
    waits: bool

    def __str__(self) -> str:
        elsewhere = "" if self.waits else ", its program elsewhere"
        return f"at {self.want} (step {self.step}{elsewhere})"


class RollCall:
    """One rank's part in it.

    Args:
        alarm: tells another rank to say where it is; returns False where that rank has gone.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, alarm: Callable[[int], bool]) -> None:
        self._store = dist.PrefixStore("roll call", store)
        self._rank, self._world_size = rank, world_size
        self._alarm = alarm

    def answer(self, here: Whereabouts) -> None:
        """Say where this rank is."""
        with suppress(RuntimeError):  # the store's host may be what has gone
            self._store.set(str(self._rank), json.dumps(asdict(here)))

    def verdict(self, limit_s: float = 0.0) -> str | None:
        """What another rank has found, waited for at most ``limit_s``; None when it is not there."""
        return self._read(_VERDICT, limit_s)

    def judge(self, text: str) -> str:
        """Say for all ranks what has happened. Returns what the first one to judge has said."""
        with suppress(RuntimeError):
            return self._store.compare_set(_VERDICT, "", text).decode()
        return text

    def inquire(self, here: Whereabouts, cause: str) -> str:
        """Find out who is there, and judge.

        Args:
            cause: what this rank has met, for the case in which everybody answers.
        """
        if (said := self.verdict()) is not None:
            return said
        self.answer(here)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        gone = [rank for rank in others if not self._alarm(rank)]
        known = {self._rank: here}
        silent: list[int] = []
        until = time.monotonic() + ANSWER_WITHIN_S
        for rank in others:
            found = None if rank in gone else self._whereabouts(rank, until)
            if found is not None:
                known[rank] = found
            elif rank not in gone:
                (silent if self._alarm(rank) else gone).append(rank)
        return self.judge(_text(gone, silent, known, cause))

    def _whereabouts(self, rank: int, until: float) -> Whereabouts | None:
        """What another rank answers; None when it does not, or has gone. Its connection may end later than what was
        noticed of its end, so that is asked again."""
        while (said := self._read(str(rank), 0.0)) is None and time.monotonic() < until and self._alarm(rank):
            time.sleep(ASK_AGAIN_S)
        return None if said is None else Whereabouts(**json.loads(said))

    def _read(self, key: str, limit_s: float) -> str | None:
        with suppress(RuntimeError):
            if not self._store.check([key]):
                if limit_s <= 0:
                    return None
                self._store.wait([key], timedelta(seconds=limit_s))
            return self._store.get(key).decode()
        return None


def _text(gone: list[int], silent: list[int], known: dict[int, Whereabouts], cause: str) -> str:
    places = ", ".join(f"rank {rank} was {place}" for rank, place in sorted(known.items()))
    if gone:
        return f"{_ranks(gone)} gone; {places}. Look at the output of the process that has gone: its error is there"
    if silent:
        return (
            f"{_ranks(silent, 'does', 'do')} not answer: stopped, or the connection to its host is lost; {cause}; "
            f"{places}"
        )
    return f"{cause}; {places}"


def _ranks(ranks: list[int], one: str = "has", several: str = "have") -> str:
    names = " and ".join(str(rank) for rank in ranks)
    return f"rank {names} {one}" if len(ranks) == 1 else f"ranks {names} {several}"
