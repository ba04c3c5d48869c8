"""What a rank says to the others when its program ends: at the end of a process that has not closed, and while the
program waits at its end for something of this rank's own.

`[Note: ends while a save goes on]` A save in the background ends when all ranks have copied, and one whose program
trains on does not hurry. Engine and process end after it. The others must not wait for that at a step to which this
rank's program never comes: a thread tells them, and the error on all ranks ends the save, too.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from typing import Any, Protocol

import torch.distributed as dist

from deepoffload.errors import RankError
from deepoffload.ranks.rounds import EndOf

log = logging.getLogger("deepoffload")

AT_EXIT_S = 60.0
"""How long a process that ends without having closed waits while nothing happens. The others may wait for its end."""

AT_EXIT_PRIORITY = 100
"""Of multiprocessing's finalizers ours comes before those of its queues and managers."""

TOLD_AFTER_S = 1.0
"""What ends sooner is waited for first: a small save is complete then."""
FIRST_ENDS_WITHIN_S = 3.0
"""How long a process whose program has ended takes until it is gone."""
NOTICED_WITHIN_S = 0.5
"""torchrun looks at its processes ten times a second."""
LOOK_S = 0.5
"""How often it is looked whether the program has ended, and how often the others hear that it has."""


class Leaves(Protocol):
    """What serves the other ranks (implemented by :class:`deepoffload.ranks.service.RoundService`)."""

    timeout_s: float

    @property
    def untold(self) -> str | None:
        """What has failed, where the program does not know it."""

    def fail(self, message: str) -> None:
        """Tell all ranks that this one cannot continue."""

    def program_ends(self) -> None:
        """What :meth:`close` tells the others."""

    def let_first_end(self) -> None:
        """Where another rank is why this one ends, return when that has ended."""

    def close(self) -> None:
        """Serve the others until all close."""


def text_of(error: BaseException) -> str:
    """The class of an error and what it says."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def at_exit_of(reference: weakref.ref[Leaves]) -> Callable[[], None]:
    """What the end of the process does: the others are told why, or are served until they end, too."""
    process = os.getpid()

    def leave() -> None:
        service = reference()
        if service is None or os.getpid() != process:  # a forked child has the parent's connections
            return
        # a child of multiprocessing says what has happened while it is handled
        error = _last_error() or sys.exc_info()[1]
        service.program_ends()
        if error is not None:
            service.fail(_ended_with(error))
        service.let_first_end()
        service.timeout_s = min(service.timeout_s, AT_EXIT_S)
        try:
            untold = service.untold
            service.close()
        except RankError as told:  # nobody can handle it here; an error that has ended the program says more
            untold = str(told)
        if untold is not None:
            log.log(logging.ERROR if error is None else logging.DEBUG, "at the end of the program: %s", untold)

    return leave


def await_first_end(all_are_there: Callable[[], bool]) -> None:
    """Return when a process that others end after has ended, and the launcher has noticed that: torchrun calls the
    first one that ends with an error the root cause, and ends the others. Returns at once with other launchers."""
    if not dist.is_torchelastic_launched():
        return
    until = time.monotonic() + FIRST_ENDS_WITHIN_S
    while time.monotonic() < until:
        if not all_are_there():
            time.sleep(NOTICED_WITHIN_S)
            return
        time.sleep(NOTICED_WITHIN_S / 10)


class Ends(Protocol):
    """What tells the other ranks (implemented by :class:`deepoffload.ranks.service.RoundService`).

    Attributes:
        away: whose ``ends`` says in rounds that the program does, now and then.
    """

    away: Any

    @property
    def has_failed(self) -> bool:
        """Whether all ranks raise an error."""

    def fail(self, message: str) -> None:
        """Tell all ranks that this one cannot continue."""


@contextmanager
def telling_end(rounds: Ends, failure: str | None) -> Iterator[None]:
    """Around a wait at the end of the program: others hear of the end if it lasts. [Note: ends while a save goes on]

    Args:
        failure: what the program ends with; None where it ends well.
    """
    with _meanwhile(lambda over: _tell_end(rounds, failure, over)):
        yield


def program_has_ended() -> bool:
    """Whether the main program is over. Python marks its thread as ended a little later: after what waits for saves."""
    return bool(threading._SHUTTING_DOWN) or not threading.main_thread().is_alive()  # type: ignore[attr-defined]


@contextmanager
def telling_end_of_process(rounds: Ends, has_ended: Callable[[], bool] = program_has_ended) -> Iterator[None]:
    """Around something in a thread that the process waits for when its program has ended. The others hear of that end
    as in :func:`telling_end`. ``has_ended``: whether it has."""

    def watch(over: threading.Event) -> None:
        while not has_ended():
            if over.wait(LOOK_S):
                return
        error = _last_error()
        rounds.away.end = EndOf.PROGRAM
        _tell_end(rounds, None if error is None else _ended_with(error), over)

    with _meanwhile(watch):
        yield


@contextmanager
def _meanwhile(run: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run it in a thread, which is told when the block is over."""
    over = threading.Event()
    thread = threading.Thread(target=run, args=(over,), name="deepoffload leaving ranks", daemon=True)
    with suppress(RuntimeError):  # the interpreter ends, and starts no threads any more
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def _tell_end(rounds: Ends, failure: str | None, over: threading.Event) -> None:
    if over.wait(TOLD_AFTER_S):
        return
    if failure is not None and not rounds.has_failed:
        rounds.fail(failure)
    with suppress(RankError):
        while not rounds.has_failed:
            rounds.away.ends()
            if over.wait(LOOK_S):
                return


def _last_error() -> BaseException | None:
    """What has ended the main program, where it has ended."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _ended_with(error: BaseException) -> str:
    return f"its program ended with {text_of(error)}"


def call_at_exit(leave: Callable[[], None]) -> Callable[[], None]:
    """Have the end of the process call ``leave``. Returns what undoes that.

    Children that multiprocessing forks run no functions of :mod:`atexit`, but its own finalizers.
    """
    atexit.register(leave)
    finalizer = None
    if multiprocessing.parent_process() is not None:
        finalizer = Finalize(None, leave, exitpriority=AT_EXIT_PRIORITY)

    def cancel() -> None:
        atexit.unregister(leave)
        if finalizer is not None:
            finalizer.cancel()

    return cancel
