"""What ``AsyncIOBuilder().load()`` gives: DeepSpeed's calls for transfers between tensors and files, over our own
:class:`~deepoffload.io.engine.IoEngine`.

Source of the calls: DeepSpeed 0.19.8 (``csrc/aio/py_lib``). An error is raised, where DeepSpeed prints a line and
returns -1 or ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import BudgetError, IoFailure, UsageError
from deepoffload.io.engine import IoEngine, IoFile
from deepoffload.io.ticket import Ticket
from deepoffload.native.aio import PAGE_BYTES, round_up

WAIT_S = 86_400.0
COMPARED_BYTES = 16 << 20
"""How much of a file is read at a time where a transfer is validated."""


class AioHandle:
    """DeepSpeed's ``aio_handle``: an engine, and the transfers that :meth:`wait` waits for.

    The tensors of a transfer are kept until :meth:`wait`. They are ordinary tensors, dense ones, of any type; those on
    a device go through host memory. Files are made where they do not exist; what a file has beyond a transfer stays.

    Args:
        block_size: bytes of one request to the kernel; rounded up to whole pages of 4096 bytes.
        queue_depth: how many of them are in flight.
        single_submit, overlap_events, intra_op_parallelism: kept for the questions; the engine decides itself how it
            submits, and on how many threads.

    Raises:
        ConfigError: a number is out of its range. UnsupportedError: the kernel has no queue for us.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._block_size, self._queue_depth = int(block_size), int(queue_depth)
        self._single_submit, self._overlap_events = bool(single_submit), bool(overlap_events)
        self._intra_op_parallelism = int(intra_op_parallelism)
        self._engine = IoEngine(queue_depth=self._queue_depth, block_bytes=round_up(self._block_size))
        self._transfers: list[_FileTransfer] = []
        self._locked: dict[int, mmap.mmap] = {}
        # Memory of transfers that nobody has waited for must stay until the engine has ended.
        self._finalizer = weakref.finalize(self, _end, self._engine, self._transfers)

    def get_block_size(self) -> int:
        return self._block_size

    def get_queue_depth(self) -> int:
        return self._queue_depth

    def get_single_submit(self) -> bool:
        return self._single_submit

    def get_overlap_events(self) -> bool:
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """What sizes and offsets are best multiples of, in bytes. Others work, too."""
        return PAGE_BYTES

    # -- transfers -------------------------------------------------------------------------------------------------

    def pread(self, buffer: Tensor, filename: str, validate: bool, asynchronous: bool, file_offset: int = 0) -> int:
        """Read ``buffer.nbytes`` bytes at ``file_offset``.

        Args:
            validate: compare what was read with the file once more.
            asynchronous: return at once, and have :meth:`wait` wait. Else this does, also for earlier transfers.

        Returns:
            0, or how many transfers are done.

        Raises:
            UsageError: the tensor is none that can be filled, or the file ends before. IoFailure: as :meth:`wait`.
        """
        return self._start(True, buffer, filename, validate, asynchronous, file_offset)

    def pwrite(self, buffer: Tensor, filename: str, validate: bool, asynchronous: bool, file_offset: int = 0) -> int:
        """As :meth:`pread`, the other way round. The tensor must not change until :meth:`wait`."""
        return self._start(False, buffer, filename, validate, asynchronous, file_offset)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(
        self, buffer: Tensor, filename: str | int | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Also to an open file, by its number, which may be closed after :meth:`wait`."""
        name = fd if filename is None else filename
        if name is None or (filename is not None and fd is not None):
            raise UsageError("aio_handle.async_pwrite: give a file's name or the number of an open file")
        return self._start(False, buffer, name, False, True, file_offset)

    def read(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """As :meth:`pread`, and wait. Returns 0, as DeepSpeed does."""
        self.pread(buffer, filename, validate, False, file_offset)
        return 0

    def write(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """As :meth:`pwrite`, and wait. Returns 0, as DeepSpeed does."""
        self.pwrite(buffer, filename, validate, False, file_offset)
        return 0

    def wait(self) -> int:
        """Wait for all transfers that were started.

        Returns:
            How many there were since the last call.

        Raises:
            IoFailure: one has failed; the first error, after all have ended. IoTimeout: the device does not answer; the
                transfer goes on, and the next call waits for it again.
        """
        done, failure = 0, None
        while self._transfers:
            try:
                self._transfers[0].finish()
            except IoFailure as error:
                failure = failure or error
            del self._transfers[0]
            done += 1
        if failure is not None:
            raise failure
        return done

    def _start(
        self, is_read: bool, buffer: Tensor, name: str | int, validate: bool, asynchronous: bool, offset: int
    ) -> int:
        self._transfers.append(_FileTransfer(self._engine, is_read, buffer, name, int(offset), validate))
        return 0 if asynchronous else self.wait()

    # -- memory ----------------------------------------------------------------------------------------------------

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A tensor of ``num_elem`` elements of the example's type, which the kernel does not page out.

        Raises:
            BudgetError: this process may not lock so much memory.
        """
        nbytes = max(1, int(num_elem)) * example_tensor.element_size()
        memory = mmap.mmap(-1, nbytes)
        with contextlib.suppress(OSError):  # kernels without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(memory, dtype=example_tensor.dtype, count=max(1, int(num_elem)))
        if _libc().mlock(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(nbytes)):
            raise BudgetError(
                f"new_cpu_locked_tensor: the system does not lock {nbytes} bytes of memory: "
                f"{os.strerror(ctypes.get_errno())}. Raise the limit (ulimit -l), or use an ordinary tensor, which "
                "aio_handle takes as well."
            )
        self._locked[tensor.data_ptr()] = memory
        return tensor[: int(num_elem)]

    def free_cpu_locked_tensor(self, locked_tensor: Tensor) -> bool:
        """Unlock it; the memory goes when no tensor shows it any more. False where it is none of ours."""
        memory = self._locked.pop(locked_tensor.data_ptr(), None)
        if memory is None:
            return False
        _libc().munlock(ctypes.c_void_p(locked_tensor.data_ptr()), ctypes.c_size_t(len(memory)))
        return True


class _FileTransfer:
    """One of them on its way, with the tensor that it fills or writes."""

    def __init__(
        self, engine: IoEngine, is_read: bool, buffer: Tensor, name: str | int, offset: int, validate: bool
    ) -> None:
        call = f"aio_handle.{'pread' if is_read else 'pwrite'}"
        _check_buffer(call, buffer)
        if offset < 0:
            raise UsageError(f"{call}: file_offset = {offset} is negative")
        self._is_read, self._buffer, self._name, self._offset = is_read, buffer, name, offset
        self._validate = validate and not isinstance(name, int)
        self._host = buffer.detach()
        if buffer.device.type != "cpu":
            self._host = torch.empty_like(buffer, device="cpu") if is_read else buffer.detach().cpu()
        self._file = self._open(call, engine)
        self._ticket: Ticket | None = None
        if self._host.nbytes:
            act = engine.read if is_read else engine.write
            self._ticket = act(self._file, self._host.data_ptr(), self._host.nbytes, offset)

    def _open(self, call: str, engine: IoEngine) -> IoFile:
        path = f"/proc/self/fd/{self._name}" if isinstance(self._name, int) else os.fspath(self._name)
        if not self._is_read:
            if not isinstance(self._name, int):
                with _named(path):
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o660))
            return engine.open_file(path)
        file = engine.open_file(path, readonly=True)
        end = self._offset + self._host.nbytes
        if end > file.size_at_open:
            file.close()
            raise UsageError(
                f"{call}: {path} has {file.size_at_open} bytes, and {self._host.nbytes} at {self._offset} are asked "
                f"for; read {max(0, file.size_at_open - self._offset)} there"
            )
        return file

    def finish(self) -> None:
        """Wait for it; raise IoFailure where it has failed."""
        try:
            if self._ticket is not None:
                self._ticket.wait(WAIT_S)
        except IoFailure:
            self._file.close()
            raise
        self._file.close()
        if self._is_read:
            with torch.no_grad():
                if self._host.data_ptr() != self._buffer.data_ptr():
                    self._buffer.copy_(self._host)
                elif not self._buffer.is_inference():
                    torch.autograd.graph.increment_version(self._buffer)
        if self._validate:
            self._compare()

    def _compare(self) -> None:
        mine = self._host.reshape(-1).view(torch.uint8)
        with open(self._name, "rb", buffering=0) as file:
            file.seek(self._offset)
            for start in range(0, len(mine), COMPARED_BYTES):
                part = mine[start : start + COMPARED_BYTES]
                theirs = bytearray(file.read(len(part)))
                if len(theirs) != len(part) or not torch.equal(torch.frombuffer(theirs, dtype=torch.uint8), part):
                    action = "read" if self._is_read else "write"
                    raise IoFailure(
                        action, 5, str(self._name), self._offset + start, len(part),
                        "The file has other bytes than the tensor: does another program write there?",
                    )  # fmt: skip


def _check_buffer(call: str, buffer: Any) -> None:
    if type(buffer) not in (Tensor, nn.Parameter) or getattr(buffer, "_slot", None) is not None:
        raise UsageError(
            f"{call}: the buffer is a {type(buffer).__name__}, whose bytes may move: give an ordinary tensor, such as "
            "a clone()"
        )
    if buffer.layout is not torch.strided or not buffer.is_contiguous():
        raise UsageError(f"{call}: the buffer's elements do not lie one after the other; give contiguous()")
    if buffer.is_conj() or buffer.is_neg():
        raise UsageError(
            f"{call}: the buffer shows other values than its bytes are: it is conjugated or negated when it is read; "
            "give resolve_conj().resolve_neg()"
        )


@contextlib.contextmanager
def _named(path: str) -> Any:
    """Errors of the system as ours."""
    try:
        yield
    except OSError as error:
        raise IoFailure("open", error.errno or 0, path, 0, 0, "") from error


def _end(engine: IoEngine, transfers: list[_FileTransfer]) -> None:
    """The handle is gone."""
    engine.close(WAIT_S)
    transfers.clear()


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def aio_read(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill a tensor from the begin of a file, with a separate handle. Returns 0."""
    return AioHandle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Write a tensor to the begin of a file, with a separate handle. Returns 0."""
    return AioHandle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest: Tensor, src: Tensor) -> int:
    """Copy the elements of one tensor into another one of the same size. Returns 0."""
    with torch.no_grad():
        dest.copy_(src.view_as(dest))
    return 0


aio_handle = AioHandle
