"""One request on its way: is it done, wait for it, what came of it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from deepoffload.errors import ClosedError, IoFailure, IoTimeout
from deepoffload.native.aio import ffi, lib

# A wait is cut into pieces of this length, so that Ctrl-C is seen between them.
WAIT_SLICE_MS = 100
WAIT_SLICE_S = WAIT_SLICE_MS / 1000

_REMEDIES = {
    errno.ENOSPC: "The file system is full: free space there, or use another directory.",
    errno.EDQUOT: "The disk quota is used up: free space, or use another directory.",
    errno.EFBIG: "The file would exceed a size limit: see `ulimit -f` and the file system's maximum.",
    errno.EIO: "The device or file system reports an error: see the kernel's log (dmesg).",
    errno.ENODATA: "The file ends before this offset: was it truncated while in use?",
    errno.EINVAL: "The file system refuses this transfer; direct='off' avoids direct I/O there.",
    errno.EAGAIN: "The kernel's queue stayed full: see /proc/sys/fs/aio-nr, or use another aio.backend.",
    errno.EFAULT: "The memory given is not mapped.",
    errno.EINTR: "The system interrupts this call again and again: is a profiler or a debugger attached?",
    errno.ETIMEDOUT: "The device did not answer in time: see the kernel's log (dmesg).",
    errno.ECANCELED: "It was cancelled before it was submitted.",
}

_DAMAGED = (
    "Checksum {found:#010x} was read where {written:#010x} was written: disk, cable or memory damages data, or another "
    "program wrote there. The bytes are lost: look for the cause (dmesg, smartctl), then go on from a checkpoint."
)


def completions_lost(code: int) -> str:
    """What to say when the native engine answers ``ENOTRECOVERABLE`` because of ``code``."""
    return (
        f"the kernel's queue no longer says what is done ({errno.errorcode.get(code, code)}: {os.strerror(code)}). "
        "This engine can transfer nothing more; end this process and start again with another aio.backend."
    )


class FileLike(Protocol):
    """What a ticket needs to know of a file to name it in an error."""

    @property
    def file_id(self) -> int: ...
    @property
    def path(self) -> str: ...


class Ticket:
    """One request, of one or several segments. Made by :class:`~deepoffload.io.engine.IoEngine` only.

    The memory of the request must stay until ``done()``. A ticket dropped before that does not stop the transfer.

    Making one and waiting for it are short on purpose: between computations a processor's caches have forgotten both,
    and every call into another library costs microseconds then.

    Attributes:
        verdict: set by those who know more of what was read than the kernel says. It gets the failure, or None, and
            gives the one that counts.
    """

    __slots__ = (
        "nbytes",
        "verdict",
        "_action",
        "_error",
        "_files",
        "_finished",
        "_handle",
    )

    def __init__(
        self,
        handle: Any,
        nbytes: int,
        action: str,
        files: Sequence[FileLike],
    ) -> None:
        self.nbytes = nbytes
        # Released in C: Ctrl-C while Python runs for an object that ends would be lost.
        self._handle = ffi.gc(handle, lib.doff_request_release)
        self._action = action
        self._files = files
        self._finished = False
        self._error: Callable[[], IoFailure] | None = None
        self.verdict: Callable[[IoFailure | None], IoFailure | None] | None = None

    def done(self) -> bool:
        """Whether the transfer ended, well or badly. Cheap (no lock); never raises."""
        return self._finished or lib.doff_request_done(self._handle) == 1

    @property
    def started_s(self) -> float:
        """When its first byte was handed to the kernel, on the clock of ``time.perf_counter``; 0 before it is done, and
        when none was."""
        return float(self._native_result().started_ns) * 1e-9

    @property
    def finished_s(self) -> float:
        """When its last byte was reported; 0 before it is done."""
        return float(self._native_result().finished_ns) * 1e-9

    def wait(self, timeout_s: float = 60.0) -> None:
        """Returns when all bytes arrived. Releases the GIL; Ctrl-C interrupts it.

        Raises:
            IoFailure: The first error of the request (each time it is asked).
            IoTimeout: Not done after ``timeout_s``: the transfer goes on and its memory is still in use.
            ClosedError: In a forked child, which has no part in its parent's transfers.
        """
        if not self._finished:
            first_ms = WAIT_SLICE_MS if timeout_s > WAIT_SLICE_S else round(timeout_s * 1000)
            code = lib.doff_request_wait(self._handle, first_ms)
            self._settle(code if code >= 0 else self._wait_on(code, first_ms, timeout_s))
        failure = None if self._error is None else self._error()
        if self.verdict is not None:
            failure = self.verdict(failure)
        if failure is not None:
            raise failure

    def cancel(self) -> bool:
        """Takes the request back if nothing of it was submitted; a later ``wait()`` then raises with ``ECANCELED``."""
        return not self._finished and lib.doff_request_cancel(self._handle) == 1

    def promote(self) -> None:
        """Makes a queued request urgent: a prefetch whose bytes are needed now."""
        if not self._finished:
            lib.doff_request_promote(self._handle)

    def _wait_on(self, code: int, waited_ms: int, timeout_s: float) -> int:
        """What ``doff_request_wait`` says once the request is done; ``code`` is what it said after ``waited_ms``."""
        until = time.monotonic() + timeout_s - waited_ms / 1000
        while code == -errno.ETIMEDOUT:
            left_ms = round((until - time.monotonic()) * 1000)
            if left_ms <= 0:
                raise IoTimeout(
                    f"{self._action} of {self.nbytes} bytes ({self._names()}) is not done after {timeout_s:g} s; "
                    "it is still in flight and its memory in use"
                )
            code = lib.doff_request_wait(self._handle, min(WAIT_SLICE_MS, left_ms))
        if code == -errno.ENOTRECOVERABLE:
            raise IoTimeout(
                f"{self._action} of {self.nbytes} bytes ({self._names()}) may still be in flight, its memory in use: "
                + completions_lost(int(self._native_result().error))
            )
        if code == -errno.ECHILD:
            raise ClosedError("this transfer belongs to the parent process: a forked child cannot wait for it")
        return int(code)

    def _settle(self, failed: int) -> None:
        if failed:
            result = self._native_result()
            code = int(result.error)
            file = next((file for file in self._files if file.file_id == result.file), None)
            path = file.path if file else self._names()
            remedy = _REMEDIES.get(code, "")
            if result.sum_found != result.sum_written:
                remedy = _DAMAGED.format(found=int(result.sum_found), written=int(result.sum_written))
            where = (self._action, code, path, int(result.offset), int(result.nbytes), remedy)
            self._error = lambda: IoFailure(*where)
        self._finished = True

    def _native_result(self) -> Any:
        """All zero while the request is in flight (but for the error of a lost queue), and in a forked child."""
        result = ffi.new("doff_result *")
        lib.doff_request_result(self._handle, result)
        return result

    def _names(self) -> str:
        return ", ".join(file.path for file in self._files)

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "in flight"
        return f"Ticket({self._action}, {self.nbytes} bytes, {state})"
