"""A save in a separate thread, and what the program has of it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from deepoffload.checkpoint.arguments import checked_timeout
from deepoffload.checkpoint.saving import Save
from deepoffload.errors import ClosedError, IoTimeout

log = logging.getLogger("deepoffload")

THREAD_NAME = "deepoffload-save"

EXIT_LIMIT_S = 10.0
"""How long a process that cannot wait for a save waits for what it leaves behind to be removed."""

_SLICE_S = 0.2


class SaveHandle:
    """A save that goes on while the program does: what ``TrainingState.save(..., wait=False)`` returns.

    Attributes:
        folder: of the checkpoint, which is there when the save is done.
        step: optimizer steps that it stands after.
        error: what the save failed with; None while it has not.
    """

    def __init__(self, save: Save) -> None:
        self.folder = save.folder
        self.step = save.step
        self.error: Exception | None = None
        self._copying = save.copying
        self._told = False
        self._ended = threading.Event()
        self._process = os.getpid()

    def done(self) -> bool:
        """Whether the save has ended, well or badly."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> str:
        """Return the folder when the checkpoint is on the disk. The save takes all of the disk meanwhile.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            IoTimeout: it has not ended by then, and continues. UsageError: ``timeout`` is no number of seconds. Else
            what the save failed with, each time.
        """
        timeout_s = checked_timeout(timeout)
        if os.getpid() != self._process:
            raise ClosedError(f"saving {self.folder} is the parent process's work: a forked child cannot wait for it")
        self._copying.hurry()
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ended.wait(
            _SLICE_S if until_s is None else max(0.0, min(_SLICE_S, until_s - time.monotonic()))
        ):
            if until_s is not None and time.monotonic() >= until_s:
                raise IoTimeout(f"saving {self.folder} has not ended after {timeout_s:g} s; it continues")
        if self._copying.thread is not None:
            self._copying.thread.join()
        if self.error is not None:
            self._told = True
            raise self.error
        return self.folder

    def end_before(self) -> None:
        """Wait because another save or a load is to come. Raises what this one failed with, if nobody was told yet."""
        if os.getpid() != self._process or (self._ended.is_set() and (self.error is None or self._told)):
            return
        told = self._told
        try:
            self.wait()
        except Exception:
            if not told:
                raise

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "done" if self.error is None else f"failed: {self.error}"
        return f"<SaveHandle {self.folder}, {state}>"


def start(save: Save) -> SaveHandle:
    """Run a save whose blocks are frozen in a thread. The process does not end before it, unless it is interrupted."""
    handle = SaveHandle(save)
    give_up = partial(_give_up, handle)
    thread = threading.Thread(target=_run, args=(save, handle, give_up), name=THREAD_NAME, daemon=False)
    atexit.register(give_up)  # after the engine's: called before that closes
    save.copying.thread = thread
    thread.start()
    return handle


def finish(save: Save) -> SaveHandle:
    """Run a save whose blocks are frozen here and now. Raises what it fails with."""
    handle = SaveHandle(save)
    save.copying.hurry()
    save.run()
    handle._ended.set()
    return handle


def _run(save: Save, handle: SaveHandle, give_up: Callable[[], None]) -> None:
    try:
        with save.in_background():
            save.run()
    except Exception as error:
        handle.error = error
        reason = "training has ended with an error" if save.ranks_have_failed else error  # which is raised there
        log.error("saving %s in the background failed; earlier checkpoints are intact: %s", save.folder, reason)
    finally:
        handle._ended.set()
        atexit.unregister(give_up)


def _give_up(handle: SaveHandle) -> None:
    """At the end of a process, which waits for its threads first: where one still saves, Ctrl-C has ended that wait.
    Nothing is left behind, and the process does not end as if all were well."""
    if os.getpid() == handle._process and not handle.done():
        handle._copying.failed(ClosedError("the end of the process waited for it, and was interrupted (Ctrl-C)"))
        if not handle._ended.wait(EXIT_LIMIT_S) or handle.error is not None:
            _end_as_interrupted()


def _end_as_interrupted() -> None:
    """Have the process end as one that Ctrl-C has ended: by SIGINT, which a shell shows as status 130.

    Python prints a KeyboardInterrupt that ends the wait for threads, and forgets it: the status would be 0. CPython
    remembers one that ends code given as text (``unhandled_keyboard_interrupt`` in Python/pythonrun.c), and asks for
    it when all is over (Modules/main.c), so that functions of :mod:`atexit` run as ever.
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
