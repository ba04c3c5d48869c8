"""What a rank says to the others when its process ends without having closed."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Protocol

AT_EXIT_S = 60.0
"""How long a process that ends without having closed waits while nothing happens. The others may wait for its end."""

AT_EXIT_PRIORITY = 100
"""Of multiprocessing's finalizers ours comes before those of its queues and managers."""


class Leaves(Protocol):
    """What serves the other ranks (implemented by :class:`deepoffload.ranks.service.RoundService`)."""

    timeout_s: float

    def fail(self, message: str) -> None:
        """Tell all ranks that this one cannot continue."""

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
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or sys.exc_info()[1]
        if error is not None:
            service.fail(f"its program ended with {text_of(error)}")
        service.timeout_s = min(service.timeout_s, AT_EXIT_S)
        service.close()

    return leave


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
