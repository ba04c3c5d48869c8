"""The lock over the books of memory, and the shield that keeps Ctrl-C from interrupting them half-way.

Python runs signal handlers between any two steps of the main thread. A ``KeyboardInterrupt`` in the middle of moving a
block would leave books that nobody could trust, so that a program which catches Ctrl-C (a notebook, always) could not
go on. Therefore an interrupt that arrives while the main thread holds a :class:`BooksLock` is delivered when it lets
go; waits for the disk, which may take long, are taken outside.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class InterruptShield:
    """Holds SIGINT back while the main thread is inside :meth:`enter` and :meth:`leave`. One per process.

    In force while anybody has engaged it. It takes the place of the handler that it finds, and calls that one for every
    interrupt, at once or when the main thread leaves. A handler that the program installs later is left alone.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._held_back = False
        self._engaged = 0
        self._previous: Callable[[int, FrameType | None], Any] | None = None

    def engage(self) -> None:
        """Another engine wants protection."""
        self._engaged += 1
        self.refresh()

    def refresh(self) -> None:
        """Take over SIGINT if Python's own handler is there (Jupyter reinstalls it for every cell)."""
        if self._engaged and threading.get_ident() == self._main:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._previous = signal.default_int_handler
                signal.signal(signal.SIGINT, self._on_interrupt)

    def disengage(self) -> None:
        """One engine less; the last one puts back the handler that was found."""
        self._engaged -= 1
        if self._engaged == 0 and self._previous is not None and threading.get_ident() == self._main:
            if signal.getsignal(signal.SIGINT) == self._on_interrupt:
                signal.signal(signal.SIGINT, self._previous)

    def enter(self) -> None:
        if threading.get_ident() == self._main:
            self._depth += 1

    def leave(self) -> None:
        """May raise what the interrupt's handler raises: ``KeyboardInterrupt``."""
        if threading.get_ident() == self._main:
            self._depth = max(0, self._depth - 1)
            if self._held_back and self._depth == 0:
                self._deliver(None)

    def outside(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """``call`` with interrupts let through, for waits at which the books are right."""
        if threading.get_ident() != self._main:
            return call(*arguments)
        depth = self._depth
        try:
            self._depth = 0
            if self._held_back:
                self._deliver(None)
            return call(*arguments)
        finally:
            self._depth = depth

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._held_back = True
        else:
            self._deliver(frame)

    def _deliver(self, frame: FrameType | None) -> None:
        self._held_back = False
        if self._previous is not None:
            self._previous(signal.SIGINT, frame)


SHIELD = InterruptShield()
"""The process's: it has one SIGINT, too."""


class BooksLock:
    """A re-entrant lock inside which the main thread is not interrupted by Ctrl-C."""

    __slots__ = ("_lock", "_depth")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> BooksLock:
        SHIELD.enter()
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire_idle(self) -> bool:
        """Take the lock if nobody has it, this thread included. Whoever got it calls :meth:`release`.

        For finalizers, which may run in the middle of anything, also of what the lock guards.
        """
        SHIELD.enter()
        if self._lock.acquire(blocking=False):
            if not self._depth:
                self._depth = 1
                return True
            self._lock.release()
        SHIELD.leave()
        return False

    def release(self) -> None:
        self._depth -= 1
        self._lock.release()
        SHIELD.leave()
