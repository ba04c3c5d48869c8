"""What an engine does when its process ends or forks."""

from __future__ import annotations

import os
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
