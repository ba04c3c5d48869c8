"""Files of others that blocks are read from where they lie: checkpoints. Nothing is ever written to them.

A file is held open, so its name may go or come to mean another file. What it holds must stay: its size and the time of
its last change are compared with those at first after every transfer. Different ones mean that nobody knows what was
read, and so the transfer counts as failed. That is the verdict of the ticket (``Ticket.verdict``).
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepoffload.errors import IoFailure
from deepoffload.io.engine import READ, URGENT, IoEngine, IoFile
from deepoffload.io.extents import ExtentRange, SourceExtent
from deepoffload.io.ticket import Ticket
from deepoffload.native.aio import ffi

Content = tuple[int, int]
"""The size of a file, and the time of its last change."""

NAMES_IN_ERRORS = 3
"""Of the tensors in a whole file that an error is about."""


@dataclass(frozen=True)
class SourceFile:
    """An open file. ``fd`` is ours, to ask what has become of it."""

    path: str
    fd: int
    file: IoFile
    content: Content


def _content(fd: int) -> Content:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


class SourceFiles:
    """The files that extents of one swap space are read from, by number.

    Args:
        engine: does the transfers; it must outlive them.
        says_buffered: warn of files that are read through the page cache, once for each file system.
    """

    def __init__(self, engine: IoEngine, *, says_buffered: bool = True) -> None:
        self._engine = engine
        self._says_buffered = says_buffered
        self._said_buffered: set[int] = set()
        self._files: list[SourceFile] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self._fds: list[int] = []
        self._finalizer = weakref.finalize(self, _close_all, self._fds)

    def number_of(self, path: str, device: int, inode: int) -> int | None:
        """The number of a file, which is opened when it is asked for first; None where ``path`` is no such file (any
        more), or cannot be read.

        Args:
            device, inode: which file it must be; by now another one may lie at ``path``.
        """
        with self._lock:
            known = self._numbers.get((device, inode))
            return self._open(path, device, inode) if known is None else known

    def number_as(self, path: str, status: os.stat_result) -> int | None:
        """The same of a file that had ``status``; None, too, where it was written to since."""
        number = self.number_of(path, status.st_dev, status.st_ino)
        same = number is not None and self._files[number].content == (status.st_size, status.st_mtime_ns)
        return number if same else None

    def _open(self, path: str, device: int, inode: int) -> int | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != (device, inode):
                os.close(fd)
                return None
            # By our number of it: the name may go before the engine opens it.
            file = replace(self._engine.open_file(f"/proc/self/fd/{fd}", readonly=True), path=path)
        except OSError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        if not file.direct and self._says_buffered and device not in self._said_buffered:
            self._said_buffered.add(device)
            name = errno.errorcode.get(file.direct_errno, str(file.direct_errno))
            warnings.warn(
                f"{path}: O_DIRECT does not work there ({name}); weights are read through the page cache, which costs "
                "memory and CPU time. A checkpoint on a local ext4 or xfs disk avoids that.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._fds.append(fd)
        self._files.append(SourceFile(path, fd, file, _content(fd)))
        number = self._numbers[(device, inode)] = len(self._files) - 1
        return number

    def size_of(self, number: int) -> int:
        """Bytes of a file, when it was opened."""
        return self._files[number].content[0]

    def file(self, number: int) -> IoFile:
        """What its transfers are asked of."""
        return self._files[number].file

    def read_at(self, number: int, offset: int, nbytes: int) -> bytes:
        """Bytes of a file, through the page cache."""
        return os.pread(self._files[number].fd, nbytes, offset)

    def read(self, extent: SourceExtent, address: int, nbytes: int, *, urgent: bool) -> Ticket:
        """Reads the first ``nbytes`` of an extent to ``address``, a multiple of 4096."""
        segments = ffi.new("doff_segment[]", len(extent.pieces))
        count, begin = 0, 0
        for piece in extent.pieces:
            if begin >= nbytes:
                break
            self._fill(segments[count], extent, count, 0, address + begin, min(piece.nbytes, nbytes - begin))
            begin += piece.nbytes
            count += 1
        files = [self._files[piece.path_index].file for piece in extent.pieces]
        return self.judged(self._engine.submit(READ, segments, count, nbytes, URGENT if urgent else 0, files), extent)

    def read_range(self, extent: SourceExtent, part: ExtentRange, address: int) -> Ticket:
        """Reads a part of one piece."""
        segments: Any = ffi.new("doff_segment[1]")
        self._fill(segments[0], extent, part.piece, part.offset, address, part.nbytes)
        files = (self._files[extent.pieces[part.piece].path_index].file,)
        return self.judged(self._engine.submit(READ, segments, 1, part.nbytes, 0, files), extent)

    def judged(self, ticket: Ticket, extent: SourceExtent) -> Ticket:
        """``ticket``, which reads of ``extent``: it fails, too, where a file does not hold any more what it held at
        first. Its failures name the tensors that lie in the extent."""
        ticket.verdict = partial(self._verdict, extent)
        return ticket

    def _verdict(self, extent: SourceExtent, failure: IoFailure | None) -> IoFailure | None:
        for number in dict.fromkeys(piece.path_index for piece in extent.pieces):
            failure = self._stale(number, extent) or failure
        return None if failure is None else IoFailure.about(", ".join(extent.tensors), failure)

    def _fill(self, segment: Any, extent: SourceExtent, piece: int, start: int, address: int, nbytes: int) -> None:
        """One transfer, of no more than the file has."""
        part = extent.pieces[piece]
        source = self._files[part.path_index]
        offset = part.offset + start
        segment.address, segment.offset, segment.file = address, offset, source.file.file_id
        segment.nbytes = min(nbytes, source.content[0] - offset)

    def check_all(self, tensors_of: Callable[[int], Sequence[str]] | None = None) -> None:
        """Raise where a file does not hold any more what it held at first.

        Args:
            tensors_of: names of what is read from the file of a number, for the error.

        Raises:
            IoFailure: naming the file.
        """
        for number in range(len(self._files)):
            failure = self._stale(number, None)
            if failure is not None:
                names = () if tensors_of is None else tensors_of(number)
                raise failure if not names else IoFailure.about(_listed(names), failure)

    def _stale(self, number: int, extent: SourceExtent | None) -> IoFailure | None:
        """The failure of what was read of a file that was written to; None where it was not."""
        source = self._files[number]
        now = _content(source.fd)
        if now == source.content:
            return None
        return IoFailure(
            "read",
            errno.ESTALE,
            source.path,
            0 if extent is None else next(piece.offset for piece in extent.pieces if piece.path_index == number),
            now[0] if extent is None else extent.nbytes,
            f"The checkpoint was written to after the model was loaded from it: it had {source.content[0]} bytes and "
            f"has {now[0]}. Load the model again, and write a new checkpoint to another place (or to a new file that "
            "takes the name of the old one when it is whole)",
        )

    def close(self) -> None:
        """Close all files; transfers have ended. Idempotent."""
        for source in self._files:
            source.file.close()
        self._files.clear()
        self._numbers.clear()
        _close_all(self._fds)


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - NAMES_IN_ERRORS
    return ", ".join(names[:NAMES_IN_ERRORS]) + (f" and {rest} more" if rest > 0 else "")


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
