"""A save in a separate thread, and what the program has of it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from deepoffload.checkpoint.arguments import checked_timeout
from deepoffload.checkpoint.saving import Save
from deepoffload.errors import ClosedError, IoTimeout
from deepoffload.memory.lock import SHIELD, raised_by_handler
from deepoffload.ranks.leaving import text_of
from deepoffload.runtime.process_end import end_as

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
    thread = threading.Thread(target=_run, args=(save, handle), name=THREAD_NAME, daemon=True)
    save.copying.thread = thread
    thread.start()
    at_end = partial(_finish_at_end, weakref.ref(handle), weakref.WeakMethod(save.give_up))
    try:
        # As concurrent.futures does: before Python waits for the program's threads and calls functions of atexit, the
        # engine's among them. There it is seen what ends the wait. A daemon, since Python's own wait would hide that.
        threading._register_atexit(at_end)  # type: ignore[attr-defined]
    except RuntimeError:  # another thread of the program saves, and the process has begun to end
        at_end()
    return handle


def finish(save: Save) -> SaveHandle:
    """Run a save whose blocks are frozen here and now. Raises what it fails with."""
    handle = SaveHandle(save)
    save.copying.hurry()
    save.run()
    handle._ended.set()
    return handle


def _run(save: Save, handle: SaveHandle) -> None:
    try:
        with save.in_background():
            save.run()
    except Exception as error:
        handle.error = error
        reason = f"{error}" if str(error) else type(error).__name__
        log.error("saving %s in the background failed; earlier checkpoints are intact: %s", save.folder, reason)
    finally:
        handle._ended.set()


def _finish_at_end(
    reference: weakref.ref[SaveHandle], give_up: weakref.WeakMethod[Callable[[Exception], None]]
) -> None:
    """At the end of a process: return when the save has ended. What interrupts that (Ctrl-C, or what a signal's handler
    raises) gives the save up: nothing is left behind, and the process does not end as if all were well."""
    handle, give_up_save = reference(), give_up()
    if handle is None or give_up_save is None or os.getpid() != handle._process or handle.done():
        return
    interrupted_by: BaseException | None = None
    try:
        with SHIELD:  # torchrun sends a second Ctrl-C
            interrupted_by = _wait_or_give_up(handle, give_up_save)
    except KeyboardInterrupt as error:
        interrupted_by = interrupted_by or error
    if interrupted_by is not None:
        end_as(interrupted_by)


def _wait_or_give_up(handle: SaveHandle, give_up: Callable[[Exception], None]) -> BaseException | None:
    """Return when the save has ended; what has interrupted that."""
    try:
        handle._copying.hurry()
        SHIELD.let_through(handle._ended.wait)
    except BaseException as error:
        what = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else raised_by_handler(error) or text_of(error)
        give_up(ClosedError(f"the end of the process waited for it, and was interrupted ({what})"))
        until = time.monotonic() + EXIT_LIMIT_S
        while (left_s := until - time.monotonic()) > 0 and not handle.done():
            with contextlib.suppress(BaseException):  # more of the same: the process ends already
                handle._ended.wait(left_s)
        return error
    return None
