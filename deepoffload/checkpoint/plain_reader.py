"""Reads parts of tensors from plain files, several requests at a time: straight to an address, or in windows."""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from deepoffload.checkpoint.plain_files import FileTensor, PlainFile
from deepoffload.errors import IoFailure
from deepoffload.io.engine import IoEngine, IoFile
from deepoffload.io.source_files import SourceFiles
from deepoffload.io.ticket import Ticket
from deepoffload.native.aio import PAGE_BYTES

WINDOW_BYTES = 1 << 20
"""Read at a time where values are converted or go to several places."""
NUM_WINDOWS = 8
REQUEST_BYTES = 256 << 20
"""Read with one request where values go straight to their place."""


class PlainReader:
    """Args:
    files: as they were when their headers were read. Those that are others by now, or have changed, are not read.
    progress: told the bytes that have come.

    Attributes:
        read_bytes: of values, so far.
    """

    def __init__(self, files: Iterable[PlainFile], progress: Callable[[int], None]) -> None:
        self.read_bytes = 0
        self._statuses = {file.path: file.status for file in files}
        self._progress = progress
        self._io = IoEngine(block_bytes=WINDOW_BYTES)
        self._sources = SourceFiles(self._io, says_buffered=False)
        self._files: dict[str, IoFile] = {}
        memory = torch.empty(NUM_WINDOWS * WINDOW_BYTES + PAGE_BYTES, dtype=torch.uint8, device="cpu")
        aligned = -memory.data_ptr() % PAGE_BYTES
        self._windows = [memory[aligned + i * WINDOW_BYTES :][:WINDOW_BYTES] for i in range(NUM_WINDOWS)]

    def read_into(self, address: int, tensor: FileTensor, start: int, numel: int) -> None:
        """Put elements as they are at an address.

        Raises:
            IoFailure: it names the file; a part has been overwritten. IoTimeout: the disk does not answer.
        """
        itemsize = tensor.dtype.itemsize
        rest = numel * itemsize
        offset = tensor.begin + start * itemsize
        while rest:
            nbytes = min(rest, REQUEST_BYTES)
            self._await(self._io.read(self._opened(tensor.path), address, nbytes, offset), tensor)
            address, offset, rest = address + nbytes, offset + nbytes, rest - nbytes

    def pieces(self, tensor: FileTensor, start: int, numels: Iterable[int]) -> Iterator[Tensor]:
        """The elements from ``start`` on, flat, as many at a time as ``numels`` say; none takes more than a window.
        Each is valid until the next one is asked for. Raises as :meth:`read_into`."""
        itemsize, file = tensor.dtype.itemsize, self._opened(tensor.path)
        free = deque(self._windows)
        flying: deque[tuple[Ticket, Tensor, int]] = deque()
        coming = iter(numels)
        offset = tensor.begin + start * itemsize
        try:
            while True:
                while len(free) > 1 and (numel := next(coming, None)) is not None:  # one is in the caller's hands
                    window = free.popleft()
                    flying.append((self._io.read(file, window.data_ptr(), numel * itemsize, offset), window, numel))
                    offset += numel * itemsize
                if not flying:
                    return
                ticket, window, numel = flying[0]
                self._await(ticket, tensor)
                flying.popleft()
                yield window[: numel * itemsize].view(tensor.dtype)
                free.append(window)
        finally:
            for ticket, _, _ in flying:
                with contextlib.suppress(IoFailure):  # of bytes that nobody wants any more
                    ticket.wait()

    def window_numel(self, tensor: FileTensor) -> int:
        """Elements that one window holds."""
        return WINDOW_BYTES // tensor.dtype.itemsize

    def check(self) -> None:
        """Raise ``IoFailure`` where a file was written to while it was read: nobody knows what has come."""
        self._sources.check_all()

    def close(self) -> None:
        """End, and close the files."""
        self._sources.close()
        self._io.close()

    def _opened(self, path: str) -> IoFile:
        if path not in self._files:
            number = self._sources.number_as(path, self._statuses[path])
            if number is None:
                remedy = "The file was replaced, removed or written to since its header was read: load it again"
                raise IoFailure("open", errno.ESTALE, path, 0, self._statuses[path].st_size, remedy)
            self._files[path] = self._sources.file(number)
        return self._files[path]

    def _await(self, ticket: Ticket, tensor: FileTensor) -> None:
        try:
            ticket.wait()
        except IoFailure as error:
            raise IoFailure.about(f"{tensor.name} of {tensor.path}", error) from error
        self.read_bytes += ticket.nbytes
        self._progress(ticket.nbytes)
