"""Waits that can never end, because the ranks that are waited for wait for this one in calls of another model.

Each model has its own rounds, and its thread answers there for the program. Where all of that waits in a call of
another model, the thread says ELSEWHERE, with the number of that wait. The store tells it: there a rank says in which
wait its program is, and which waits of others it has seen from there.

`[Note: who waits in vain]` Rank 0 waits at a step of model A, and rank 1 at one of model B. In a round of A in which
rank 0 is at that step rank 1 says that it is in its wait at B. So its program has come to B without having come to the
step of A. A round of B shows the same of rank 0. Neither comes to the other's step before its own is over, and neither
step is over before both have come. No clock is in this: a rank that is slow says nothing of the kind. A rank is
*needed* by a wait that cannot end before its program says something in these rounds.

A program that has several threads is not spoken for: another one of them may come. Ctrl-C may end a wait, so what
others say has to stand in two rounds.

A wait that ends by itself after a while is said, too, but sees nobody, so none is found to be in vain for it. It lets
a rank that waits for a slot of contributions know that others are not on their way to it.

Who finds that out writes it down before it raises it. A wait that ends with another error looks there first: the
program of the rank that has found it may have ended meanwhile, and that is what the other model's ranks see.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from deepoffload.ranks.collectives import LinkError
from deepoffload.ranks.rounds import NOTHING, Want, WantKind
from deepoffload.ranks.words import where_in_words

LOOK_S = 1.0
"""How often a wait looks around, once it takes long."""
FIRST_LOOKS_S = 0.1
"""The first pause between two looks of one wait; each one is twice as long as the one before."""
ANSWERS_WITHIN_S = 1.0
"""How long the store's host may take. After that nobody is found here: a limit ends such waits."""
MODELS = 16
"""Of so many models of each rank it is looked, the last ones, whether it waits there."""
OURS = "deepoffload"
"""Names of threads of this package begin with it."""


class CommonStore(Protocol):
    """What is used of a :class:`~deepoffload.ranks.limited_store.LimitedStore`."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def add(self, key: str, amount: int) -> int:
        """Count. Returns the new number."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Keep a value where ``expected`` was there; "" is where nothing was. Returns what is there then."""


class WaitsAcrossModels:
    """What one rank says of its program in one model's rounds while that waits in another's, and what it finds out.

    Args:
        store: common to all models of these ranks. Nobody else uses its keys.
        rank, world_size: who this is.
        speaks_for_all: whether the program has no other thread than the one that calls this.
        clock: in seconds.

    Attributes:
        watches: the wait that is under way asks the others where they are.
        model: how many models of these ranks this process had made, with this one.
    """

    def __init__(
        self,
        store: CommonStore,
        rank: int,
        world_size: int,
        speaks_for_all: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._clock = store, rank, clock
        self._speaks_for_all = _is_all_of_program if speaks_for_all is None else speaks_for_all
        self._number: int | None = None
        self._said = ""
        self._seen: dict[int, tuple[int, int]] = {}
        self._next_s, self._pause_s = -math.inf, FIRST_LOOKS_S
        self._others = [other for other in range(world_size) if other != rank]
        self._is_long = False
        self.model = 0
        with suppress(LinkError):
            self._models(1)
            self.model = self._store.add(self._made(rank), 1)

    @property
    def watches(self) -> bool:
        """See the class."""
        return self._number is not None

    def want(self) -> Want:
        """What the thread says for the program."""
        own = self._number
        with suppress(LinkError):
            wait = self._wait_of(self._rank)
            if wait is not None and wait["number"] not in (own, self._number):  # else it is one of these rounds
                return Want(WantKind.ELSEWHERE, 0, wait["number"])
        return NOTHING

    def look_around(self, what: str, number: int, needed: Mapping[int, Want], *, is_brief: bool = False) -> str | None:
        """Find out whether ranks wait for this one elsewhere. To be called now and then by a wait of the program.

        Args:
            what: the program waits at.
            number: of rounds that are over.
            needed: what the ranks that this wait needs have said in the last one, if this rank has said in it that it
                waits.
            is_brief: the wait ends by itself: it is only said.

        Returns:
            What all ranks raise, where this wait can never end.
        """
        now = self._clock()
        if now < self._next_s or not (is_brief or self._speaks_for_all()):
            return None
        self._next_s, self._pause_s = now + self._pause_s, min(2 * self._pause_s, LOOK_S)
        with suppress(LinkError):
            if self._number is None and self._models(0) > 1:
                self._number = self._store.add(f"waits of {self._rank}", 1)
            if self._number is not None:
                return self._judge(self._number, what, number, needed)
        return None

    def wait_is_over(self) -> None:
        """To be called before the program goes on."""
        self._next_s, self._pause_s = -math.inf, FIRST_LOOKS_S
        if self._is_long:
            self._is_long = False
            with suppress(LinkError):
                self._store.set(self._long(self._rank, self.model), "")
        if self._number is not None:
            self._number, self._said = None, ""
            self._seen.clear()
            with suppress(LinkError):
                self._store.set(self._key(self._rank), "")

    def told(self) -> str | None:
        """What the wait that is under way ends with, where another rank has found that out. From any thread."""
        own = self._number
        if own is None:
            return None
        with suppress(LinkError):
            return self._read(self._end(self._rank, own)) or self._read(self._of_others(self._rank, own)) or None
        return None

    def is_long(self, what: str) -> None:
        """The wait that is under way takes long: others look for it when theirs do."""
        with suppress(LinkError):
            if self._models(0) > 1:
                self._store.set(self._long(self._rank, self.model), what)
                self._is_long = True

    def long_waits(self) -> dict[int, list[str]]:
        """The waits of other ranks in other models that take long, by rank."""
        found: dict[int, list[str]] = {}
        with suppress(LinkError):
            for rank in self._others:
                last = self._store.add(self._made(rank), 0)
                models = (number for number in range(max(1, last - MODELS + 1), last + 1) if number != self.model)
                if waits := [what for number in models if (what := self._read(self._long(rank, number)))]:
                    found[rank] = waits
        return found

    def close(self) -> None:
        """The model has no rounds any more."""
        with suppress(LinkError):
            self._models(-1)

    def _judge(self, own: int, what: str, number: int, needed: Mapping[int, Want]) -> str | None:
        """[Note: who waits in vain]"""
        seen = {rank: want.content for rank, want in needed.items() if want.kind is WantKind.ELSEWHERE}
        said = json.dumps({"number": own, "what": what, "sees": list(seen.items())})
        if said != self._said:
            self._said = said
            self._store.set(self._key(self._rank), said)
        if told := self._read(self._end(self._rank, own)):
            return told
        known, self._seen = self._seen, {}
        for rank, there in seen.items():
            before = known.get(rank)
            first = number if before is None or before[0] != there else before[1]
            self._seen[rank] = there, first
            wait = self._wait_of(rank) if number > first else None
            if wait is not None and wait["number"] == there and [self._rank, own] in wait["sees"]:
                others = {other: at["what"] for other in self._others if (at := self._wait_of(other)) is not None}
                cause = _cause({**others, self._rank: what})
                self._tell(cause, rank, there)
                return cause
        return None

    def _tell(self, cause: str, rank: int, number: int) -> None:
        """Write down that ``rank`` waits in vain in its wait ``number``, for other ranks that wait, too."""
        for other in self._others:
            if other != rank and (wait := self._wait_of(other)) is not None:
                self._store.set(self._of_others(other, wait["number"]), cause)
        self._store.set(self._end(rank, number), cause)

    def _wait_of(self, rank: int) -> dict[str, Any] | None:
        said = self._read(self._key(rank))
        return json.loads(said) if said else None

    def _read(self, key: str) -> str:
        """Empty where there is no such key."""
        return self._store.compare_set(key, "", "").decode()

    def _models(self, more: int) -> int:
        """How many models of these ranks this process has."""
        return self._store.add(f"models of {self._rank}", more)

    @staticmethod
    def _key(rank: int) -> str:
        return f"wait of {rank}"

    @staticmethod
    def _end(rank: int, number: int) -> str:
        return f"end of wait {number} of {rank}"

    @staticmethod
    def _of_others(rank: int, number: int) -> str:
        return f"others at wait {number} of {rank}"

    @staticmethod
    def _made(rank: int) -> str:
        return f"models made by {rank}"

    @staticmethod
    def _long(rank: int, model: int) -> str:
        return f"long wait of {rank} in model {model}"


def _is_all_of_program() -> bool:
    """Whether the program has no other thread than the one that calls this."""
    own = threading.current_thread()
    others = [thread for thread in threading.enumerate() if not thread.name.startswith(OURS)]
    return others == [own]


def _cause(places: dict[int, str]) -> str:
    return (
        f"{where_in_words(places)}: they wait for each other, so none goes on. Let all ranks make the same calls of "
        "all models, in the same order"
    )
