"""Something that all ranks do together outside of rounds, such as a save: it fails on all of them or on none.

The ranks tell each other by the store what each gives, or what it has failed with. Who waits here enters no rounds; the
thread that sleeps in the rank answers for it, as while a program is in its own barrier. An error ends the task, and not
the training: all ranks raise it, and may go on.

A task may go on in a thread, as a save does for which the program does not wait. Then what its rank has said stays
until all ranks have ended it. Meanwhile they may do other things together.

`[Note: settled]` One key of the store says how a task ends: with the first failure of any rank, or well, where a rank
has said that it cannot be given up any more (a checkpoint is about to get its name). The first to write it has
decided. So a rank that gives up late, and one that publishes, never both succeed. All others look there now and then,
also in the middle of their own work.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

from deepoffload.errors import DeepOffloadError, UsageError
from deepoffload.ranks.leaving import telling_end_of_process
from deepoffload.ranks.limited_store import LimitedStore
from deepoffload.ranks.notices import LOOK_S, Missing, Notices, kind_of


class _Failure(NamedTuple):
    """What a rank has failed with first: at which task, the class of the error, and its text."""

    rank: int
    task: str
    name: str
    text: str

    def error(self) -> DeepOffloadError:
        """What the other ranks raise."""
        return kind_of(self.name)(f"rank {self.rank} has failed at {self.task}: {self.text}")


class _Message(NamedTuple):
    """What one rank has said.

    Attributes:
        task: what it is at.
        oldest: the first task that it has not ended.
        value: what it gives to all.
        error: what the task has failed with.
    """

    task: str
    oldest: int
    value: Any = None
    error: _Failure | None = None


def _how(said: bytes) -> _Failure | None:
    """How a task ends, as a rank has said it: with a failure, or well."""
    first = json.loads(said)
    return None if first is None else _Failure(*first)


def _text_of(error: BaseException) -> str:
    return f"{error}" if isinstance(error, DeepOffloadError) else f"{type(error).__name__}: {error}"


class JointTasks:
    """Counts what ranks do together: every rank begins the same tasks in the same order, in one thread. Each may end in
    another one.

    Args:
        store: nobody else uses its keys.
        notices: what waits, and finds out that a rank has gone.
    """

    def __init__(self, store: LimitedStore, notices: Notices, rank: int, world_size: int) -> None:
        self.store, self.notices = store, notices
        self.rank, self.world_size = rank, world_size
        self._count = 0
        self._lock = threading.Lock()  # over what follows
        self._keys: dict[int, list[str]] = {}
        self._open: set[int] = set()

    def begin(self, what: str) -> JointTask:
        """The next one. ``what``: for errors; the same on all ranks."""
        self._count += 1
        with self._lock:
            self._open.add(self._count)
            return JointTask(self, self._count, what, self._keys.setdefault(self._count, []))

    def ended(self, number: int) -> None:
        """This rank reads nothing more of a task."""
        with self._lock:
            self._open.discard(number)

    @property
    def oldest(self) -> int:
        """The first task that this rank has not ended."""
        with self._lock:
            return min(self._open, default=self._count + 1)

    def all_are_at(self, oldest: int) -> None:
        """Remove what this rank has said at earlier tasks: all ranks have ended these. One that fails at a task does
        not wait for the others, and may be several tasks ahead of them."""
        with self._lock:
            said = [key for known in list(self._keys) if known < oldest for key in self._keys.pop(known)]
        for key in said:
            with suppress(RuntimeError):
                self.store.delete_key(key)


class JointTask:
    """One rank's part in one task.

    Attributes:
        rank, world_size: who this is.
        what: it is, for errors.
        goes_on: it has not ended when :meth:`together` has; the caller says :meth:`end`.
    """

    def __init__(self, tasks: JointTasks, number: int, what: str, said: list[str]) -> None:
        self.rank, self.world_size = tasks.rank, tasks.world_size
        self.what = what
        self._tasks, self._number, self._said = tasks, number, said
        self._key = f"task {number}"
        self._part = 0
        self._told_s = self._looked_s = time.monotonic()
        self._failure: BaseException | None = None
        self._given_up: Exception | None = None
        self._end: Exception | None = None
        self.goes_on = False

    @contextmanager
    def together(self) -> Iterator[JointTask]:
        """What fails inside on one rank is raised on all, with that rank's text. When it ends, it has ended well on
        all. Those of one task follow each other, and do not stand inside each other."""
        try:
            yield from self._shared()
        finally:
            if not self.goes_on:
                self.end()

    def outlives_program(self) -> AbstractContextManager[None]:
        """Around what goes on in a thread that the end of the process waits for: other ranks hear of that end."""
        return telling_end_of_process(self._tasks.notices.rounds)

    @property
    def ranks_have_failed(self) -> bool:
        """Whether all calls raise an error."""
        return self._tasks.notices.rounds.has_failed

    def end(self) -> None:
        """This rank reads nothing more of it. Idempotent."""
        self._tasks.ended(self._number)

    def give_up(self, error: Exception) -> None:
        """End the task with an error soon, on all ranks, unless it is settled. May be called in any thread; the one
        that is at the task raises it."""
        self._given_up = error

    def settle(self) -> None:
        """From here on no rank gives it up. [Note: settled]

        Raises:
            DeepOffloadError: another rank has.
        """
        if (failed := self._end_with(None)) is not None:
            self.refuse(failed.error())

    def refuse(self, error: BaseException) -> NoReturn:
        """Raise what every rank raises by itself, as all know the same: nobody is told."""
        self._failure = error
        raise error

    def _shared(self) -> Iterator[JointTask]:
        try:
            yield self
        except BaseException as error:
            if error is self._failure:
                raise
            first = self._tell(error)
            if first is not None and first.rank != self.rank and isinstance(error, Exception):
                raise first.error() from error  # it may be why this rank has failed, too
            raise
        self.gather()

    def gather(self, mine: Any = None) -> list[Any]:
        """What every rank gives, in rank order; every rank calls it. For a few small things: they are pickled.

        Raises:
            DeepOffloadError: another rank has failed: its error, with the rank's number.
            RankError: another rank has gone, or does not come within the limit while nothing happens.
        """
        tasks, part = self._tasks, f"{self._key}.{self._part}"
        self._part += 1
        self._say(part, _Message(self.what, tasks.oldest, mine))
        found: list[_Message] = []
        with tasks.notices.kept_together():
            for rank in range(self.world_size):
                if (said := self._heard(part, rank)) is None:
                    break
                found.append(said)
                if said.error is not None:
                    break
        if self._end is not None:
            self._raise_end()
        for rank, said in enumerate(found):  # here, where an error is no end of the training
            self._check(rank, said)
        tasks.all_are_at(min(said.oldest for said in found))
        return [said.value for said in found]

    def alive(self) -> None:
        """To be called now and then by what takes long, in the thread that is at it: the others see that it goes on.

        Raises:
            DeepOffloadError: another rank has failed, or this one is to give up.
        """
        if self._is_over():
            self._raise_end()
        if time.monotonic() - self._told_s >= LOOK_S:
            self._told_s = time.monotonic()
            with self._tasks.notices.kept_together():
                self._tasks.store.add(self._beat, 1)

    @property
    def _beat(self) -> str:
        return f"{self._key} goes on"

    @property
    def _end_key(self) -> str:
        return f"{self._key} ends"

    def _is_over(self) -> bool:
        """Whether the task ends with an error, as far as this rank knows. It asks now and then. [Note: settled]"""
        given_up, self._given_up = self._given_up, None
        if given_up is not None and (failed := self._end_with(given_up)) is not None:
            self._end = given_up if failed.rank == self.rank else failed.error()
        elif time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            store = self._tasks.store
            with self._tasks.notices.kept_together():
                failed = _how(store.get(self._end_key)) if store.check(self._end_key) else None
            self._end = None if failed is None else failed.error()
        return self._end is not None

    def _raise_end(self) -> NoReturn:
        """Raise that. All ranks find it in the store."""
        assert self._end is not None
        self.refuse(self._end)

    def _end_with(self, error: BaseException | None) -> _Failure | None:
        """Say how the task ends, if nobody has: with ``error``, or well. Returns what it has failed with first."""
        mine = None if error is None else _Failure(self.rank, self.what, type(error).__name__, _text_of(error))
        said = json.dumps(mine)
        with self._tasks.notices.kept_together():
            found = self._tasks.store.compare_set(self._end_key, "", said)
        if found == said.encode():
            self._said.append(self._end_key)
        return _how(found)

    def _heard(self, part: str, rank: int) -> _Message | None:
        """What a rank gives to a part; None where the task has ended before."""
        tasks, key = self._tasks, f"{part} of {rank}"
        missing = None
        if self._part == 1:  # who has come to the first part comes to the others, or says why not
            ranks = range(self.world_size)
            missing = Missing(self.what, self._key, lambda: [one for one in ranks if not self._has_said(part, one)])
        place = f"rank {rank} at {self.what}"

        def is_there() -> bool:
            return self._is_over() or tasks.store.check(key)

        tasks.notices.wait(is_there, place, lambda: tasks.store.add(self._beat, 0), missing)
        return None if self._end is not None else pickle.loads(tasks.store.get(key))

    def _has_said(self, part: str, rank: int) -> bool:
        return self._tasks.store.check(f"{part} of {rank}")

    def _check(self, rank: int, said: _Message) -> None:
        """Raise what a rank has failed with, and where it is at something else."""
        if said.error is not None:
            self.refuse(said.error.error())
        if said.task != self.what:
            self.refuse(
                UsageError(
                    f"rank {rank} is at {said.task}, and rank {self.rank} at {self.what}: all ranks make the same "
                    "calls, in the same order"
                )
            )

    def _tell(self, error: BaseException) -> _Failure | None:
        """Let the others raise what this rank has failed with, at the next thing that they wait for. Returns what has
        failed first."""
        with suppress(DeepOffloadError):  # then the others have heard of something worse
            first = self._end_with(error)
            failed = first or _Failure(self.rank, self.what, type(error).__name__, _text_of(error))
            self._say(f"{self._key}.{self._part}", _Message(self.what, self._tasks.oldest, error=failed))
            return first
        return None

    def _say(self, part: str, said: _Message) -> None:
        key = f"{part} of {self.rank}"
        self._said.append(key)
        with self._tasks.notices.kept_together():
            self._tasks.store.set(key, pickle.dumps(said))
