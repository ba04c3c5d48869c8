"""One request on its way: is it done, wait for it, what came of it."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import ClosedError, IoFailure, IoTimeout
from ..native.aio import ffi, lib

# A wait is cut into pieces of this length, so that Ctrl-C is seen between them.
WAIT_SLICE_MS = 100

_REMEDIES = {
    errno.ENOSPC: "The file system is full: free space there or name another nvme_path.",
    errno.EDQUOT: "The disk quota is used up: free space or name another nvme_path.",
    errno.EFBIG: "The file would exceed a size limit: see `ulimit -f` and the file system's maximum.",
    errno.EIO: "The device or file system reports an error: see the kernel's log (dmesg).",
    errno.ENODATA: "The file ends before this offset: was it truncated while in use?",
    errno.EINVAL: "The file system refuses this transfer; direct='off' avoids direct I/O there.",
    errno.EAGAIN: "The kernel's queue stayed full: see /proc/sys/fs/aio-nr, or use another aio.backend.",
    errno.EFAULT: "The memory given is not mapped.",
    errno.ETIMEDOUT: "The device did not answer in time: see the kernel's log (dmesg).",
    errno.ECANCELED: "It was cancelled before it was submitted.",
}


class FileLike(Protocol):
    """What a ticket needs to know of a file to name it in an error."""

    @property
    def file_id(self) -> int: ...
    @property
    def path(self) -> str: ...


class Ticket:
    """One request, of one or several segments. Made by :class:`~deepoffload.io.engine.IoEngine` only.

    The memory of the request must stay until ``done()``. A ticket dropped before that does not stop the transfer.

    Attributes:
        started_s: when its first byte was handed to the kernel, on the clock of ``time.perf_counter``; 0 when none was.
        finished_s: when its last byte was reported. Both are known once a wait has returned or raised the result.
    """

    __slots__ = (
        "nbytes",
        "started_s",
        "finished_s",
        "_action",
        "_check",
        "_error",
        "_files",
        "_finished",
        "_handle",
        "_keep",
    )

    def __init__(
        self,
        handle: Any,
        nbytes: int,
        action: str,
        files: Sequence[FileLike],
        keep: object = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.started_s = 0.0
        self.finished_s = 0.0
        self._handle = handle
        self._action = action
        self._files = files
        self._keep = keep
        self._check = check
        self._finished = False
        self._error: Callable[[], Exception] | None = None

    def done(self) -> bool:
        """Whether the transfer ended, well or badly. Cheap (no lock); never raises."""
        return self._finished or lib.doff_request_done(self._handle) == 1

    def wait(self, timeout_s: float = 60.0) -> None:
        """Returns when all bytes arrived. Releases the GIL; Ctrl-C interrupts it.

        Raises:
            IoFailure: The first error of the request (each time it is asked).
            IoTimeout: Not done after ``timeout_s``: the transfer goes on and its memory is still in use.
            ClosedError: In a forked child, which has no part in its parent's transfers.
        """
        if not self._finished:
            self._wait_native(timeout_s)
        if self._error is not None:
            raise self._error()

    def result(self) -> int:
        """Waits as ``wait()`` does, then says how many bytes arrived: ``nbytes``."""
        self.wait()
        return self.nbytes

    def cancel(self) -> bool:
        """Takes the request back if nothing of it was submitted; a later ``wait()`` then raises with ``ECANCELED``."""
        return not self._finished and lib.doff_request_cancel(self._handle) == 1

    def promote(self) -> None:
        """Makes a queued request urgent: a prefetch whose bytes are needed now."""
        if not self._finished:
            lib.doff_request_promote(self._handle)

    def _wait_native(self, timeout_s: float) -> None:
        result = ffi.new("doff_result *")
        until = time.monotonic() + timeout_s
        while True:
            left_ms = max(0, min(WAIT_SLICE_MS, round((until - time.monotonic()) * 1000)))
            code = lib.doff_request_wait(self._handle, left_ms, result)
            if code == 0:
                break
            if code == -errno.ECHILD:
                raise ClosedError("this transfer belongs to the parent process: a forked child cannot wait for it")
            if time.monotonic() >= until:
                raise IoTimeout(
                    f"{self._action} of {self.nbytes} bytes ({self._names()}) is not done after {timeout_s:g} s; "
                    "it is still in flight and its memory in use"
                )
        self._settle(result)

    def _settle(self, result: Any) -> None:
        self.started_s = result.started_ns * 1e-9
        self.finished_s = result.finished_ns * 1e-9
        code = int(result.error)
        if code:
            file = next((file for file in self._files if file.file_id == result.file), None)
            path = file.path if file else self._names()
            where = (self._action, code, path, int(result.offset), int(result.nbytes), _REMEDIES.get(code, ""))
            self._error = lambda: IoFailure(*where)
        elif self._check is not None:
            try:
                self._check()
            except IoFailure as failure:
                mismatch = failure
                self._error = lambda: mismatch
        self._finished = True
        self._keep = self._check = None

    def _names(self) -> str:
        return ", ".join(file.path for file in self._files)

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle is not None:
            lib.doff_request_release(handle)

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "in flight"
        return f"Ticket({self._action}, {self.nbytes} bytes, {state})"
