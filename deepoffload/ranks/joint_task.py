"""Something that all ranks do together outside of rounds, such as a save: it fails on all of them or on none.

The ranks tell each other by the store what each gives, or what it has failed with. Who waits here enters no rounds; the
thread that sleeps in the rank answers for it, as while a program is in its own barrier. An error ends the task, and not
the training: all ranks raise it, and may go on.

A task may go on in a thread, as a save does for which the program does not wait. Then what its rank has said stays
until all ranks have ended it. Meanwhile they may do other things together.
"""

from __future__ import annotations

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


class _Message(NamedTuple):
    """What one rank has said.

    Attributes:
        task: what it is at.
        oldest: the first task that it has not ended.
        value: what it gives to all.
        error: what it has failed with: the class of the error, and its text.
    """

    task: str
    oldest: int
    value: Any = None
    error: tuple[str, str] | None = None


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
        self._told_s = time.monotonic()
        self._failure: BaseException | None = None
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
            before = self._failed_before() if isinstance(error, Exception) else None
            self._tell(error)
            if before is not None:
                raise before from error  # it is what has failed first, and may be why this rank has failed, too
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
                found.append(self._heard(part, rank))
                if found[-1].error is not None:
                    break
        for rank, said in enumerate(found):  # here, where an error is no end of the training
            self._check(rank, said)
        tasks.all_are_at(min(said.oldest for said in found))
        return [said.value for said in found]

    def alive(self) -> None:
        """To be called now and then by what takes long: the others see that it goes on."""
        if time.monotonic() - self._told_s >= LOOK_S:
            self._told_s = time.monotonic()
            with self._tasks.notices.kept_together():
                self._tasks.store.add(self._beat, 1)

    @property
    def _beat(self) -> str:
        return f"{self._key} goes on"

    def _failed_before(self) -> BaseException | None:
        """What another rank has said that it has failed with."""
        part, store = f"{self._key}.{self._part}", self._tasks.store
        with suppress(DeepOffloadError), self._tasks.notices.kept_together():
            for rank in range(self.world_size):
                key = f"{part} of {rank}"
                said: _Message | None = pickle.loads(store.get(key)) if store.check(key) else None
                if said is not None and said.error is not None:
                    return self._failed(rank, said)
        return None

    def _heard(self, part: str, rank: int) -> _Message:
        """What a rank gives to a part."""
        tasks, key = self._tasks, f"{part} of {rank}"
        missing = None
        if self._part == 1:  # who has come to the first part comes to the others, or says why not
            ranks = range(self.world_size)
            missing = Missing(self.what, self._key, lambda: [one for one in ranks if not self._has_said(part, one)])
        place = f"rank {rank} at {self.what}"
        tasks.notices.wait(lambda: tasks.store.check(key), place, lambda: tasks.store.add(self._beat, 0), missing)
        said: _Message = pickle.loads(tasks.store.get(key))
        return said

    def _has_said(self, part: str, rank: int) -> bool:
        return self._tasks.store.check(f"{part} of {rank}")

    def _check(self, rank: int, said: _Message) -> None:
        """Raise what a rank has failed with, and where it is at something else."""
        if said.error is not None:
            self.refuse(self._failed(rank, said))
        if said.task != self.what:
            self.refuse(
                UsageError(
                    f"rank {rank} is at {said.task}, and rank {self.rank} at {self.what}: all ranks make the same "
                    "calls, in the same order"
                )
            )

    @staticmethod
    def _failed(rank: int, said: _Message) -> DeepOffloadError:
        assert said.error is not None
        name, text = said.error
        return kind_of(name)(f"rank {rank} has failed at {said.task}: {text}")

    def _tell(self, error: BaseException) -> None:
        """Let the others raise what this rank has failed with, at the next thing that they wait for."""
        text = f"{error}" if isinstance(error, DeepOffloadError) else f"{type(error).__name__}: {error}"
        with suppress(DeepOffloadError):  # then the others have heard of something worse
            said = _Message(self.what, self._tasks.oldest, error=(type(error).__name__, text))
            self._say(f"{self._key}.{self._part}", said)

    def _say(self, part: str, said: _Message) -> None:
        key = f"{part} of {self.rank}"
        self._said.append(key)
        with self._tasks.notices.kept_together():
            self._tasks.store.set(key, pickle.dumps(said))
