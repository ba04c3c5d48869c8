"""The I/O engine: owns the native handle and its threads; hands out files and tickets."""

from __future__ import annotations

import enum
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepoffload.errors import ClosedError, ConfigError, IoFailure, IoTimeout, UnsupportedError, UsageError
from deepoffload.io.ticket import WAIT_SLICE_MS, Ticket, completions_lost
from deepoffload.native.aio import PAGE_BYTES, QUEUE_DEPTH_MAX, REQUEST_BYTES_MAX, ffi, lib

log = logging.getLogger("deepoffload")

# In the order of preference. Rates of large transfers are alike; alone in flight, a small read takes least time with
# libaio (io_uring completes in the thread that submitted, which is then another), and containers often forbid io_uring.
BACKENDS = ("libaio", "io_uring", "pool")
QUEUE_DEPTH = 16
READ, WRITE, URGENT, PADDED = lib.DOFF_READ, lib.DOFF_WRITE, lib.DOFF_URGENT, lib.DOFF_PADDED
ACTIONS = {READ: "read", WRITE: "write"}
DIRECT_MODES = {
    "off": lib.DOFF_DIRECT_OFF,
    "preferred": lib.DOFF_DIRECT_PREFERRED,
    "required": lib.DOFF_DIRECT_REQUIRED,
}


class Priority(enum.IntEnum):
    """URGENT requests go before all others; NORMAL reads and writes take turns, chunk by chunk."""

    URGENT = 0
    NORMAL = 1


@dataclass(frozen=True)
class BackendReport:
    """Whether a backend can be started here, and why (not)."""

    name: str
    available: bool
    reason: str


def probe_backend(name: str, queue_depth: int = QUEUE_DEPTH) -> BackendReport:
    """Starts and stops the backend's kernel queue, as long as an engine of this queue depth makes it."""
    return _report(name, -lib.doff_backend_probe(name.encode(), queue_depth))


def _report(name: str, code: int) -> BackendReport:
    """``code``: 0, or the errno with which it could not be started."""
    if code:
        hints = {
            errno.EPERM: "forbidden here: a container's seccomp profile or kernel.io_uring_disabled",
            errno.ENOSYS: "this kernel does not have it",
            errno.EAGAIN: "the system's aio requests are used up (fs.aio-max-nr)",
            errno.ENOMEM: "locked memory limit (ulimit -l) or memory exhausted",
        }
        name_of_code = errno.errorcode.get(code, str(code))
        return BackendReport(name, False, f"{name_of_code}: {hints.get(code, os.strerror(code))}")
    how = {
        "libaio": f"kernel AIO through {ffi.string(lib.doff_libaio_origin()).decode()}",
        "io_uring": "io_uring permitted",
        "pool": "pread and pwrite on threads",
    }
    return BackendReport(name, True, how[name])


def choose_backend(wanted: str, queue_depth: int = QUEUE_DEPTH) -> tuple[str, str]:
    """The backend to use and why; ``auto`` takes the first one that can be started with this queue depth.

    Raises:
        ConfigError: No backend has that name.
        UnsupportedError: The wanted one cannot be started here.
    """
    return _first_started(wanted, lambda name: -lib.doff_backend_probe(name.encode(), queue_depth))


def _first_started(wanted: str, start: Callable[[str], int]) -> tuple[str, str]:
    """As :func:`choose_backend`. ``start`` returns 0 or an errno."""
    if wanted == "auto":
        refused: list[str] = []
        for name in BACKENDS:
            report = _report(name, start(name))
            if report.available:
                return name, "; ".join([report.reason, *refused])
            refused.append(f"{name} not: {report.reason}")
        raise UnsupportedError(
            f"no I/O backend can be started: {'; '.join(refused)}. A smaller aio.queue_depth may help."
        )
    if wanted not in BACKENDS:
        raise ConfigError(f"aio.backend: {wanted!r} is unknown; it is one of auto, {', '.join(BACKENDS)}")
    report = _report(wanted, start(wanted))
    if not report.available:
        raise UnsupportedError(
            f"aio.backend: {wanted} cannot be started here ({report.reason}). Use aio.backend=auto, or a smaller "
            "aio.queue_depth."
        )
    return wanted, f"asked for; {report.reason}"


def _close_handle(handle: Any, timeout_s: float) -> bool:
    """Closes and frees a native engine; False when something stayed in flight (then nothing is freed)."""
    until = time.monotonic() + timeout_s
    while True:
        code = lib.doff_engine_close(handle, WAIT_SLICE_MS)
        if code == -errno.ENOTRECOVERABLE or (code == -errno.ETIMEDOUT and time.monotonic() >= until):
            return False
        if code != -errno.ETIMEDOUT:
            break
    if code == 0:
        lib.doff_engine_release(handle)
    return True


class IoEngine:
    """Asynchronous transfers between memory and files.

    Args:
        backend: ``libaio``, ``io_uring``, ``pool``, or ``auto``: the first of them that can be started.
        queue_depth: Chunks in flight per device, 1 to 1024.
        block_bytes: Chunk size; a multiple of 4096.
        pending_max: Requests submitted and not done, beyond which submitting waits.
        submit_timeout_s: How long it waits then, before :class:`~deepoffload.errors.IoTimeout`.
        fault_script: For tests: rules of ``csrc/aio/backend_fault.c``.

    Raises:
        ConfigError: A value is out of its range.
        UnsupportedError: The backend cannot be started here.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        queue_depth: int = QUEUE_DEPTH,
        block_bytes: int = 1 << 20,
        pending_max: int = 1024,
        submit_timeout_s: float = 60.0,
        fault_script: str | None = None,
    ) -> None:
        if not 1 <= queue_depth <= QUEUE_DEPTH_MAX:
            raise ConfigError(f"aio.queue_depth: {queue_depth} is not between 1 and {QUEUE_DEPTH_MAX}")
        if block_bytes <= 0 or block_bytes % PAGE_BYTES or block_bytes > REQUEST_BYTES_MAX:
            raise ConfigError(f"aio.block_size: {block_bytes} is not a multiple of {PAGE_BYTES} up to 1 GiB")
        if pending_max < 1:
            raise ConfigError(f"pending_max: {pending_max} is not positive")
        self.queue_depth, self.block_bytes = queue_depth, block_bytes
        self.submit_timeout_s = submit_timeout_s
        self._lock = threading.Lock()
        out = ffi.new("doff_engine **")
        script = ffi.NULL if fault_script is None else fault_script.encode()
        # Started at once, not probed before: to end a kernel queue takes 30 ms.
        self.backend, self.backend_reason = _first_started(
            backend,
            lambda name: -lib.doff_engine_open(name.encode(), script, queue_depth, block_bytes, pending_max, out),
        )
        self._handle: Any = out[0]
        self._finalizer = weakref.finalize(self, _close_handle, self._handle, 10.0)
        log.info("disk requests go through %s (%s)", self.backend, self.backend_reason)

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._handle is None

    def handle(self) -> Any:
        """The native engine, for this package's modules.

        Raises:
            ClosedError: The engine is closed.
        """
        if self._handle is None:
            raise ClosedError("this I/O engine is closed")
        return self._handle

    def close(self, timeout_s: float = 60.0) -> None:
        """Finishes what was submitted, ends the threads, closes the files. Idempotent; a no-op in a forked child.

        Raises:
            IoTimeout: Something is still in flight after ``timeout_s``: its memory must stay. All other files are
                closed and nothing more can be submitted. May be called again.
        """
        with self._lock:
            if self._handle is None:
                return
            if not _close_handle(self._handle, timeout_s):
                lost = self.stats()["completions_lost_errno"]
                why = completions_lost(lost) if lost else "the device does not answer"
                raise IoTimeout(f"transfers are still in flight after {timeout_s:g} s: {why}")
            self._finalizer.detach()
            self._handle = None

    def stats(self) -> dict[str, int]:
        """Counters since the start: bytes, requests, chunks, retries; what is in flight now. All zero once closed."""
        out = ffi.new("doff_stats *")
        if self._handle is not None:
            lib.doff_engine_stats(self._handle, out)
        return {name: int(getattr(out, name)) for name, _ in ffi.typeof("doff_stats").fields}

    def open_file(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        readonly: bool = False,
        lock: bool = False,
        unlink: bool = False,
        own: bool = False,
        direct: str = "preferred",
    ) -> IoFile:
        """Opens a file for transfers.

        Args:
            create: It must not exist yet (mode 0600); else it must exist.
            lock: Take an exclusive ``flock``, without waiting.
            unlink: Remove its name at once, so that it dies with this process.
            own: Refuse one of another user, one that everybody may write to, and one with several names (``EPERM``).
            direct: ``required``, ``preferred`` (buffered where O_DIRECT fails: ``IoFile.direct_errno``), ``off``.

        Raises:
            IoFailure: With the reason of the system (``EWOULDBLOCK``: somebody else holds the lock).
        """
        if direct not in DIRECT_MODES:
            raise ConfigError(f"direct: {direct!r} is unknown; it is one of {', '.join(DIRECT_MODES)}")
        name = os.fspath(path)
        flags = (
            (lib.DOFF_OPEN_CREATE if create else 0)
            | (lib.DOFF_OPEN_READONLY if readonly else 0)
            | (lib.DOFF_OPEN_LOCK if lock else 0)
            | (lib.DOFF_OPEN_UNLINK if unlink else 0)
            | (lib.DOFF_OPEN_OWN if own else 0)
        )
        info = ffi.new("doff_file_info *")
        code = lib.doff_file_open(self.handle(), os.fsencode(name), flags, DIRECT_MODES[direct], info)
        if code < 0:
            raise self._failure("open", code, name, 0, 0)
        return IoFile(
            engine=self,
            file_id=code,
            path=name,
            direct=bool(info.direct),
            direct_errno=int(info.direct_errno),
            memory_align=int(info.memory_align),
            offset_align=int(info.offset_align),
            size_at_open=int(info.size),
            device=int(info.device),
        )

    def read(
        self, file: IoFile, address: int, nbytes: int, offset: int, *, priority: Priority = Priority.NORMAL
    ) -> Ticket:
        """Reads ``nbytes`` at ``offset`` into memory. Any alignment works, and leaves nothing of a direct file in the
        page cache: memory that does not lie as the file's blocks do costs a copy through a bounce buffer (at most 1 MiB
        per chunk in flight), a part of a 4096-byte block a visit to the page cache, which then drops it."""
        return self.submit_one(READ, file, address, nbytes, offset, URGENT if priority is Priority.URGENT else 0)

    def write(
        self, file: IoFile, address: int, nbytes: int, offset: int, *, priority: Priority = Priority.NORMAL
    ) -> Ticket:
        """Writes ``nbytes`` from memory at ``offset``; the memory must not change until done. As :meth:`read`; a part
        of a block is on the device when the request is done (``sync_file_range``), as direct transfers are."""
        return self.submit_one(WRITE, file, address, nbytes, offset, URGENT if priority is Priority.URGENT else 0)

    def submit_one(
        self,
        operation: int,
        file: IoFile,
        address: int,
        nbytes: int,
        offset: int,
        flags: int,
        sums: Any = ffi.NULL,
    ) -> Ticket:
        """One request over one piece of one file; for this package's modules. See :meth:`submit`."""
        submit, handle = lib.doff_submit_one, self.handle()
        request = submit(handle, operation, file.file_id, address, nbytes, offset, flags, sums, 0)
        if not request:

            def again() -> tuple[int, Any]:
                found = submit(handle, operation, file.file_id, address, nbytes, offset, flags, sums, WAIT_SLICE_MS)
                return (0 if found else ffi.errno), found

            request = self._insist(ffi.errno, again, operation, nbytes, (file,))
        return Ticket(request, nbytes, ACTIONS[operation], (file,))

    def submit(
        self,
        operation: int,
        segments: Any,
        count: int,
        nbytes: int,
        flags: int,
        files: Sequence[IoFile],
        sums: Any = ffi.NULL,
    ) -> Ticket:
        """One request over ``count`` native segments; for this package's modules.

        ``files`` are those the segments name (for errors); ``sums`` are native checksums, which a write records and a
        read compares with.

        Raises:
            IoTimeout: No room in the queue within ``submit_timeout_s``; nothing was submitted.
            UsageError: Address, offset or length cannot be.
            ClosedError: The engine is closed.
        """
        out, handle = ffi.new("doff_request **"), self.handle()
        code = lib.doff_submit(handle, operation, segments, count, flags, sums, 0, out)
        if code:

            def again() -> tuple[int, Any]:
                return -lib.doff_submit(handle, operation, segments, count, flags, sums, WAIT_SLICE_MS, out), out[0]

            self._insist(-code, again, operation, nbytes, files)
        return Ticket(out[0], nbytes, ACTIONS[operation], files)

    def _insist(
        self,
        code: int,
        again: Callable[[], tuple[int, Any]],
        operation: int,
        nbytes: int,
        files: Sequence[IoFile],
    ) -> Any:
        """The request that ``again`` gets as soon as the queue has room; raises what else hinders it."""
        until = time.monotonic() + self.submit_timeout_s
        request = None
        while code == errno.ETIMEDOUT and time.monotonic() < until:
            code, request = again()
        if code:
            raise self._submit_error(ACTIONS[operation], code, nbytes, files)
        return request

    def _submit_error(self, action: str, code: int, nbytes: int, files: Sequence[IoFile]) -> Exception:
        names = ", ".join(file.path for file in files)
        if code == errno.ETIMEDOUT:
            return IoTimeout(
                f"{action} of {nbytes} bytes ({names}): no room in the queue after {self.submit_timeout_s:g} s"
            )
        if code in (errno.ECHILD, errno.ESHUTDOWN):
            why = "belongs to the parent process" if code == errno.ECHILD else "is closed"
            return ClosedError(f"{action} of {nbytes} bytes ({names}): this I/O engine {why}")
        if code == errno.EBADF:
            return ClosedError(f"{action} of {nbytes} bytes: the file ({names}) is closed")
        if code == errno.ENOTRECOVERABLE:
            lost = self.stats()["completions_lost_errno"]
            return IoFailure(action, lost, names, 0, nbytes, completions_lost(lost))
        if code == errno.EINVAL:
            return UsageError(
                f"{action} of {nbytes} bytes ({names}): address, offset or length is negative or not aligned"
            )
        return self._failure(action, -code, names, 0, nbytes)

    @staticmethod
    def _failure(action: str, code: int, path: str, offset: int, nbytes: int) -> Exception:
        if code == -errno.ECHILD:
            return ClosedError(f"{action} {path}: this I/O engine belongs to the parent process")
        if code == -errno.ESHUTDOWN:
            return ClosedError(f"{action} {path}: this I/O engine is closed")
        return IoFailure(action, -code, path, offset, nbytes)

    def __enter__(self) -> IoEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"IoEngine({self.backend}, queue_depth={self.queue_depth}, block_bytes={self.block_bytes}{state})"


@dataclass(frozen=True, eq=False)
class IoFile:
    """An open file of an engine. ``direct`` says whether O_DIRECT works on it, ``direct_errno`` why it does not."""

    engine: IoEngine
    file_id: int
    path: str
    direct: bool
    direct_errno: int
    memory_align: int
    offset_align: int
    size_at_open: int
    device: int

    def grow(self, size_bytes: int) -> None:
        """Allocates blocks up to ``size_bytes`` (never shrinks); with zeros where the file system has no ``fallocate``.

        Raises:
            IoFailure: ``ENOSPC``, ``EDQUOT``, ``EFBIG``, ...; the size is then as before.
        """
        code = lib.doff_file_grow(self.engine.handle(), self.file_id, size_bytes)
        if code:
            raise IoEngine._failure("allocate", code, self.path, self.size_at_open, size_bytes)

    def sync(self) -> None:
        """Waits until what was written is on the device (``fdatasync``)."""
        code = lib.doff_file_sync(self.engine.handle(), self.file_id)
        if code:
            raise IoEngine._failure("sync", code, self.path, 0, 0)

    def close(self, timeout_s: float = 60.0) -> None:
        """Waits for requests on the file, then closes it. Idempotent as long as the engine lives; nothing after that.

        Raises:
            IoTimeout: Requests are still in flight.
        """
        until = time.monotonic() + timeout_s
        while not self.engine.closed:
            code = lib.doff_file_close(self.engine.handle(), self.file_id)
            if code == -errno.ENOTRECOVERABLE:
                lost = self.engine.stats()["completions_lost_errno"]
                raise IoTimeout(f"{self.path}: transfers may still be in flight: {completions_lost(lost)}")
            if code != -errno.EBUSY:
                return
            if time.monotonic() >= until:
                raise IoTimeout(f"{self.path}: transfers are still in flight after {timeout_s:g} s")
            time.sleep(0.002)
