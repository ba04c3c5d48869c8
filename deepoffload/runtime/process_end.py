"""What an engine does when its process ends or forks, and with which status a process ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import weakref

from deepoffload.memory.lock import SHIELD
from deepoffload.params.pager import Pager
from deepoffload.runtime.disk import EngineDisk

_LAST_USE_S = 5.0
"""How long the process waits at its end for what another thread does with the memory at that moment."""


def close_at_exit(reference: weakref.ref[Pager], disk: EngineDisk, pid: int) -> None:
    pager = reference()
    if pager is not None:
        pager.life.ignore_deaths()
    if os.getpid() != pid:
        return  # a forked child: the files and threads are the parent's
    if pager is not None and threading.active_count() > 1:
        pager.lock.acquire(timeout=_LAST_USE_S)  # for good: a daemon thread that trains stops here and sees no error
    disk.close()
    SHIELD.disengage()


def forked(reference: weakref.ref[Pager]) -> None:
    """In a forked child, which inherits neither the memory nor the transfers: every use is refused from now on."""
    pager = reference()
    if pager is not None and pager.life.closed_because is None:
        pager.life.close("it is the parent process's; a forked child cannot use it (start it with spawn)")


def end_as(error: BaseException) -> None:
    """Have the process end as if ``error`` had ended the program. For a function of :mod:`atexit`: Python prints what
    such a function raises, and forgets it. All others run as ever."""
    if isinstance(error, KeyboardInterrupt):
        _end_as_interrupted()
    elif not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        _end_with_status(1)
    elif error.code is None or isinstance(error.code, int):
        _end_with_status(error.code or 0)
    else:
        sys.stderr.write(f"{error.code}\n")
        _end_with_status(1)


def _end_as_interrupted() -> None:
    """By SIGINT, which a shell shows as status 130.

    CPython remembers a KeyboardInterrupt that ends code given as text (``unhandled_keyboard_interrupt`` in
    Python/pythonrun.c), and asks for it when all is over (Modules/main.c).
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def _end_with_status(status: int) -> None:
    """The interpreter has no way to change its status at its end. So the C library's ``exit``, which it calls with that
    when all else is over, is left by ``_exit`` with this one. What runs last runs first: before, files are flushed."""
    library = ctypes.CDLL(None)
    for function, argument in ((library._exit, status), (library.fflush, None)):
        library.__cxa_atexit(function, ctypes.c_void_p(argument), None)
