"""What an engine does when its process ends or forks, and with which status a process ends."""

from __future__ import annotations

import ctypes
import os
import signal
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
    """Have the process end as if ``error`` had ended the program. For what runs at its end: Python prints what is
    raised there, and forgets it. Functions of :mod:`atexit` run as ever."""
    library = ctypes.CDLL(None)
    if isinstance(error, KeyboardInterrupt):
        # By SIGINT, which a shell shows as status 130. Python has given the signal its default meaning back by then.
        _end_with(library, "raise", signal.SIGINT)
    elif not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        _end_with(library, "_exit", 1)
    elif error.code is None or isinstance(error.code, int):
        _end_with(library, "_exit", error.code or 0)
    else:
        sys.stderr.write(f"{error.code}\n")
        _end_with(library, "_exit", 1)


def _end_with(library: ctypes.CDLL, function: str, argument: int) -> None:
    """The interpreter has no way to change its status at its end. So the C library's ``exit``, which it calls with that
    when all else is over, is left by another function of it. What is registered last runs first: files are flushed."""
    for name, value in ((function, argument), ("fflush", None)):
        library.__cxa_atexit(library[name], ctypes.c_void_p(value), None)
