"""The lock over the books of memory, and the shield that keeps Ctrl-C from interrupting them half-way.

Python runs signal handlers between any two steps of the main thread. A ``KeyboardInterrupt`` in the middle of moving a
block would leave books that nobody could trust, so that a program which catches Ctrl-C (a notebook, always) could not
go on. Therefore an interrupt that arrives while the main thread holds a :class:`BooksLock` is delivered when it lets
go; waits for the disk, which may take long, are taken outside. Where there is no lock to hold, ``with SHIELD:`` does
the same: a switch of torch's that must be set back, and a door that has taken leases.

Handlers of other signals are the program's, and run at once. One that raises in the middle of a change leaves books
that are wrong. That is seen when the exception passes the lock: the engine then refuses further use.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

_RLock: Any = type(threading.RLock())


class InterruptShield:
    """Holds SIGINT back while the main thread has one of the locks that it guards. One per process.

    In force while anybody has engaged it. It takes the place of the handler that it finds, and calls that one for every
    interrupt, at once or when the main thread lets go. A handler that the program installs later is left alone.

    Attributes:
        held_back: an interrupt waits for the main thread to let go.
    """

    def __init__(self) -> None:
        self.held_back = False
        self._blocks = 0
        self._main = threading.main_thread().ident
        self._locks: list[weakref.ref[BooksLock]] = []
        self._outside = False
        self._engaged = 0
        self._previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> None:
        """No interrupt is delivered to the main thread until the block has ended. Such blocks may be nested."""
        if threading.get_ident() == self._main:
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._main:
            self._blocks -= 1
            if self.held_back:
                self.let_go()

    def guard(self, lock: BooksLock) -> None:
        """From now on no interrupt is delivered while the main thread has ``lock``."""
        self._locks = [known for known in self._locks if known() is not None] + [weakref.ref(lock)]

    def engage(self) -> None:
        """Another engine wants protection."""
        self._engaged += 1
        self.refresh()

    def is_engaged(self) -> bool:
        """Whether there are engines that have not ended."""
        return self._engaged > 0

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

    def let_go(self) -> None:
        """Deliver what was held back, if this is the main thread and it has none of the locks any more. May raise what
        the interrupt's handler raises: ``KeyboardInterrupt``."""
        if self.held_back and threading.get_ident() == self._main and not self._is_busy():
            self._deliver(None)

    def outside(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """``call`` with interrupts let through, for waits at which the books are right."""
        if threading.get_ident() != self._main:
            return call(*arguments)
        before = self._outside
        try:
            self._outside = True
            self.let_go()
            return call(*arguments)
        finally:
            self._outside = before

    def let_through(
        self, call: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``call`` inside a block of the shield with interrupts delivered all the same, unless a lock is held: it runs
        code of the program's, or takes long."""
        kwargs = kwargs or {}
        if threading.get_ident() != self._main:
            return call(*args, **kwargs)
        before = self._blocks
        try:
            self._blocks = 0
            self.let_go()
            return call(*args, **kwargs)
        finally:
            self._blocks = before

    def leaving(self, switch: Callable[[], Any]) -> None:
        """``switch`` leaves this code inside a block of the shield, for other code of the same thread, and comes back.
        The block is as it was then: in between, blocks are those of the other code."""
        if threading.get_ident() != self._main:
            switch()
            return
        before = self._blocks
        try:
            switch()
        finally:
            self._blocks = before

    def _is_busy(self) -> bool:
        if self._outside:
            return False
        if self._blocks:
            return True
        locks = (known() for known in self._locks)
        return any(lock is not None and lock.is_mine() for lock in locks)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        # Python runs this in the main thread: `mine` is the main thread's.
        if self._is_busy():
            self.held_back = True
        else:
            self._deliver(frame)

    def _deliver(self, frame: FrameType | None) -> None:
        self.held_back = False
        if self._previous is not None:
            self._previous(signal.SIGINT, frame)


SHIELD = InterruptShield()
"""The process's: it has one SIGINT, too."""


class BooksLock(_RLock):  # type: ignore[misc]
    """A re-entrant lock inside which the main thread is not interrupted by Ctrl-C.

    Taking it is Python's own lock and nothing else (the interrupt handler asks who has it), since every event of
    a model takes it several times.

    Attributes:
        when_torn: is told why the books are wrong, where a handler of another signal has raised under the lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.when_torn: Callable[[str], None] | None = None
        self._borrowers: set[int] = set()
        SHIELD.guard(self)

    @contextmanager
    def borrowing(self) -> Iterator[None]:
        """For a thread of ours that works while the program does. Inside, it can take the lock also while the program
        waits in :meth:`let_go`."""
        thread = threading.get_ident()
        self._borrowers.add(thread)
        try:
            yield
        finally:
            self._borrowers.discard(thread)

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """For waits during which the books are right. Inside, this thread does not have the lock if another one borrows
        it. Afterwards it has it as often as before."""
        if not self._borrowers or not self.is_mine():
            yield
            return
        state = self._release_save()
        try:
            yield
        finally:
            self._acquire_restore(state)

    def __exit__(self, kind: object = None, error: BaseException | None = None, traceback: object = None) -> None:
        if error is not None and self.when_torn is not None:
            raised = raised_by_handler(error, but_not_in=_LETTING_THROUGH)
            if raised:
                self.when_torn(
                    f"{raised} in the middle of a change of memory. Let it set a flag that the loop looks at; "
                    "build the model again, and load a checkpoint"
                )
        _release(self)
        if SHIELD.held_back:
            SHIELD.let_go()

    def release(self) -> None:
        self.__exit__()

    def is_mine(self) -> bool:
        """Whether this thread has the lock."""
        return bool(self._is_owned())

    def acquire_idle(self) -> bool:
        """Take the lock if nobody has it, this thread included. The caller that gets it calls :meth:`release`.

        For finalizers, which may run in the middle of anything, also of what the lock guards.
        """
        return not self._is_owned() and bool(self.acquire(blocking=False))


_release: Callable[[Any], None] = _RLock.release


def raised_by_handler(error: BaseException, but_not_in: Collection[CodeType] = ()) -> str:
    """Which handler of a signal has raised ``error``; "" where none has, or where it was called inside of this code."""
    numbers = {_code_of(signal.getsignal(number)): number for number in signal.valid_signals()}
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code not in but_not_in:
        code = step.tb_frame.f_code
        if code in numbers:
            name = getattr(numbers[code], "name", f"signal {numbers[code]}")
            return f"{code.co_name}, the handler of {name}, has raised {type(error).__name__}"
        step = step.tb_next
    return ""


_LETTING_THROUGH = (InterruptShield.outside.__code__, InterruptShield.let_through.__code__)


def _code_of(handler: Any) -> CodeType | None:
    """That of a handler that is written in Python."""
    if not callable(handler):
        return None
    inner = getattr(handler, "func", handler)  # of a functools.partial
    return getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
