"""Notices that ranks leave each other in the store: for what is rare, and where the ranks that wait need no bytes.

A rank that waits here enters no rounds. Others that need its bytes nudge it, and the thread that sleeps in it answers
for it, as while a program is in its own barrier.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from deepoffload import errors
from deepoffload.errors import DeepOffloadError, RankError
from deepoffload.ranks.collectives import LinkError, first_line
from deepoffload.ranks.limited_store import LimitedStore
from deepoffload.ranks.long_waits import LongWait
from deepoffload.ranks.service import RoundService
from deepoffload.ranks.words import ranks_in_words

POLL_S = 0.001
"""How soon a wait looks first. It looks less often as it gets longer."""
LONGEST_POLL_S = 0.05
LOOK_S = 1.0
"""How often a wait looks whether another rank has gone or failed, and how often a rank that is busy says that it is."""
LOOKS_SHARE = 0.1
"""But it looks after this share of the limit: something that has happened may have done so one look earlier."""


class Missing(NamedTuple):
    """Whom a wait of the program waits for, until these have come.

    Attributes:
        at: what all of them have to come to, for people.
        key: of this very wait, the same on all ranks.
        ranks: those that have not come. Asked now and then.
        by: where one rank alone is waited for; else all of them are.
    """

    at: str
    key: str
    ranks: Callable[[], Collection[int]]
    by: int | None = None


class Notices:
    """One rank's view of it. One thread at a time uses it.

    Args:
        store: nobody else uses its keys.
        rounds: what errors end, and what tells of the errors of others.
        has_gone: whether the connection to a rank is closed.
        timeout_s: how long a rank waits while nothing happens.
    """

    def __init__(
        self,
        store: LimitedStore,
        rounds: RoundService,
        world_size: int,
        has_gone: Callable[[int], bool],
        timeout_s: float,
    ) -> None:
        self._store = store
        self.rounds = rounds
        self._world_size = world_size
        self._has_gone = has_gone
        self._timeout_s = timeout_s
        self._times: Counter[str] = Counter()

    def meet(self, what: str) -> None:
        """Return when all ranks are at ``what``. Every rank calls it as often as the others.

        Raises:
            RankError: another rank has gone or failed, or does not come within the limit.
        """
        key = self._key(what)
        with self.kept_together():
            self._store.set(f"{key} on {self.rounds.rank}", "")
            self._store.add(key, 1)
            self.wait(
                lambda: self._store.add(key, 0) >= self._world_size,
                what,
                lambda: self._store.add(key, 0),
                Missing(what, key, lambda: self._not_there(key)),
            )

    def _not_there(self, key: str) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._store.check(f"{key} on {rank}")]

    @contextmanager
    def telling(self, what: str) -> Iterator[Callable[[], None]]:
        """This rank does something alone, and tells the others how it ends. It does not wait for them.

        Yields:
            To be called now and then: the others see that it goes on.
        """
        key, number = self._counted(what)
        said = time.monotonic()
        with self.kept_together():
            self._store.add(f"{key} begun", 1)

        def alive() -> None:
            nonlocal said
            if time.monotonic() - said >= LOOK_S:
                said = time.monotonic()
                with self.kept_together():
                    self._store.add(f"{key} goes on", 1)

        try:
            yield alive
        except BaseException as error:
            text = f"{error}" if isinstance(error, DeepOffloadError) else f"{type(error).__name__}: {error}"
            self._tell(f"{key} #{number}", [type(error).__name__, text])
            raise
        self._tell(f"{key} #{number}", None)

    def await_told(self, what: str, by: int) -> None:
        """Return when rank ``by`` has done what it does alone: as often as this one has called this since all ranks met
        last. Where it is at it once more, or has made some of its calls alone, the last one that it has begun counts.

        Raises:
            DeepOffloadError: what it has failed with. RankError: it has gone, or does not do it within the limit.
        """
        key, number = self._counted(what)
        found = ""

        def last() -> str:
            return f"{key} #{max(number, self._store.add(f'{key} begun', 0))}"

        def is_told() -> bool:
            nonlocal found
            found = last()
            return self._store.check(found)

        with self.kept_together():
            self.wait(
                is_told,
                f"{what} on rank {by}",
                lambda: self._store.add(f"{key} goes on", 0),
                Missing(what, key, lambda: [] if self._store.check(last()) else [by], by),
            )
            told = json.loads(self._store.get(found))
        if told is not None:
            name, text = told
            raise kind_of(name)(f"rank {by} has failed at {what}: {text}")

    def _key(self, what: str) -> str:
        key, number = self._counted(what)
        return f"{key} #{number}"

    def _counted(self, what: str) -> tuple[str, int]:
        """What the same call on all ranks has in common, and its number. Some calls are made by one rank alone: those
        before the ranks met last do not count."""
        key = f"{what} after {self.rounds.meetings} meetings"
        self._times[key] += 1
        return key, self._times[key]

    def _tell(self, key: str, message: object) -> None:
        with self.kept_together():
            self._store.set(key, json.dumps(message))

    def wait(
        self, over: Callable[[], bool], what: str, progress: Callable[[], int], missing: Missing | None = None
    ) -> None:
        """Return when ``over``. To be called inside of :meth:`kept_together`.

        Args:
            what: is waited for.
            progress: as long as it changes, something happens.
            missing: who is waited for, where others may never come.

        Raises:
            RankError: another rank has gone or failed, does not come, or nothing has happened for too long.
        """
        away = self.rounds.away
        if missing is None or not away.is_of_program():
            self._wait(over, what, progress, lambda: None, missing)
        else:
            with away.waits(missing.at, missing.key, missing.by):
                self._wait(over, what, progress, lambda: away.look_around(missing.ranks), missing)

    def _in_words(self, what: str, missing: Missing | None) -> str:
        """Who waits for whom. Empty where a lower rank waits for the same, and says so."""
        here, late = [self.rounds.rank], [] if missing is None else missing.ranks()
        if missing is not None and missing.by is None:
            here = [rank for rank in range(self._world_size) if rank not in late]
        if missing is None or not late:
            return f"rank {self.rounds.rank} waits for {what}"
        if here[0] < self.rounds.rank:
            return ""
        waits = "wait" if here[1:] else "waits"
        return f"{ranks_in_words(here)} {waits} at {missing.at} for {ranks_in_words(sorted(late))}"

    def _wait(
        self,
        over: Callable[[], bool],
        what: str,
        progress: Callable[[], int],
        look_around: Callable[[], None],
        missing: Missing | None,
    ) -> None:
        heard = looked = time.monotonic()
        seen, pause_s, long = progress(), POLL_S, LongWait(heard)
        look_s = min(LOOK_S, LOOKS_SHARE * self._timeout_s)
        while not over():
            now = time.monotonic()
            if now - looked >= look_s:
                looked = now
                long.look(now, lambda: None, lambda: self._in_words(what, missing), self._timeout_s)
                self._look_after()
                look_around()
                if (said := progress()) != seen:
                    seen, heard = said, now
            if now - heard >= self._timeout_s:
                self.rounds.fail(f"it has waited {self._timeout_s:g} s for {what}. Every rank has to call it")
                self.rounds.check()
            time.sleep(pause_s)
            pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)

    def _look_after(self) -> None:
        self.rounds.hear()
        gone = [rank for rank in range(self._world_size) if self._has_gone(rank)]
        if gone:
            raise LinkError(f"no connection to rank {gone[0]}")

    @contextmanager
    def kept_together(self) -> Iterator[None]:
        """An error of the store is the one that all ranks raise."""
        self.rounds.check()
        with self.rounds.judged():
            try:
                yield
            except (DeepOffloadError, LinkError):
                raise
            except RuntimeError as error:
                raise LinkError(first_line(error)) from error


def kind_of(name: str) -> type[DeepOffloadError]:
    """The class of what is raised for another rank's error: its own, where it takes a text alone."""
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, DeepOffloadError) or issubclass(kind, errors.IoFailure):
        return RankError
    return kind
