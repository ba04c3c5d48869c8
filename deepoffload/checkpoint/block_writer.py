"""One file of a checkpoint, written at any positions, each byte once: blocks go to the disk when full.

State comes piece by piece, and a piece has runs of several tensors of the file. A block of the file is collected in
memory until all of its bytes are there; then its checksum is taken and it is written directly (O_DIRECT). As runs of
one tensor come in order, only a few blocks are open at a time: at most two per tensor that is being written. Where
pieces come in another order, the block that has waited longest is set aside: what it has goes to the file, and is read
again when the rest is there.

Several ranks may write one file, each its part of it. A block of which a rank has all bytes is that rank's to write. A
block of which several have some is rank 0's: the others put theirs into separate files, at the same positions.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from deepoffload.checkpoint.block_pool import BLOCK_BYTES, BlockPool, num_blocks_of
from deepoffload.checkpoint.safetensors_file import failure
from deepoffload.errors import IoFailure
from deepoffload.io.checksums import crc32c
from deepoffload.io.engine import IoEngine, IoFile
from deepoffload.io.ticket import Ticket

IN_FLIGHT_BLOCKS = 24
"""Blocks on their way to the disk at a time, while the program waits."""

FEW_BLOCKS = 12
"""While it trains on: more would make its own transfers wait."""


OPEN_BLOCKS = 12
"""Blocks of one file that are partly filled and in memory, at most."""

Run = tuple[int, int]
"""From and to, in a block."""


class FilePart(NamedTuple):
    """What one rank has written of a file.

    Attributes:
        sums: the checksum of each block; ``sent`` is 1 where the rank has written it.
        runs: what the rank has of other blocks, in a separate file.
    """

    sums: array[int]
    sent: bytes
    runs: dict[int, list[Run]]


@dataclass
class _OpenBlock:
    """A block of which ``filled_bytes`` have come. Those of ``runs`` are in memory, those ``aside`` in a file."""

    address: int
    filled_bytes: int = 0
    runs: list[Run] = field(default_factory=list)
    aside: list[tuple[IoFile, Run]] = field(default_factory=list)

    def add(self, start: int, end: int) -> None:
        self.filled_bytes += end - start
        if self.runs and self.runs[-1][1] == start:
            start = self.runs.pop()[0]
        self.runs.append((start, end))


class BlockWriter:
    """Writes a new file of ``nbytes`` at ``path``.

    Args:
        progress: told the bytes of each block when it is handed to the disk.
        aside_path: where blocks are set aside, and left that another rank has the rest of. That rank has made the file.
            None: this process makes the file, and writes all of it.
        check: called before each write; what it raises ends the file.

    Raises:
        IoFailure: the file cannot be made, or the disk has no room for it.
    """

    def __init__(
        self,
        io: IoEngine,
        pool: BlockPool,
        path: str,
        nbytes: int,
        progress: Callable[[int], None],
        aside_path: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self._check = check
        self.nbytes = nbytes
        self.sums = array("I", bytes(4 * num_blocks_of(nbytes)))
        self._sent = bytearray(num_blocks_of(nbytes))
        self._pool = pool
        self._io = io
        self._progress = progress
        self._open: dict[int, _OpenBlock] = {}
        self._aside: dict[int, _OpenBlock] = {}
        self._flying: deque[tuple[Ticket, int, int]] = deque()
        self._left_bytes = nbytes
        self._aside_path = aside_path
        self._others: list[IoFile] = []
        try:
            if aside_path is None:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # with the user's permissions
            self._file = io.open_file(path)
            if aside_path is None:
                self._file.grow(nbytes)
        except OSError as error:
            raise failure("making a file", error, path, 0, nbytes) from error

    def put(self, offset: int, address: int, nbytes: int) -> None:
        """Take bytes for the positions from ``offset`` on; the memory may be used again when this returns.

        Raises:
            IoFailure: a block that was full before could not be written.
        """
        while nbytes:
            index, inside = divmod(offset, BLOCK_BYTES)
            part = min(nbytes, BLOCK_BYTES - inside)
            block = self._opened(index)
            ctypes.memmove(block.address + inside, address, part)
            block.add(inside, inside + part)
            if block.filled_bytes == self._length_of(index):
                self._send(index, self._open.pop(index))
            offset, address, nbytes = offset + part, address + part, nbytes - part

    def put_bytes(self, offset: int, data: bytes) -> None:
        """The same of a Python object."""
        if data:
            held = ctypes.create_string_buffer(data, len(data))
            self.put(offset, ctypes.addressof(held), len(data))

    def wait_for_room(self, *, alone: bool) -> None:
        """Return when the next block can be handed to the disk without waiting. Raises as :meth:`put`.

        Args:
            alone: nobody else waits for the disk.
        """
        while len(self._flying) >= (IN_FLIGHT_BLOCKS if alone else FEW_BLOCKS):
            self._land()

    def finish(self) -> None:
        """Wait until all is on the disk (``fdatasync``), and close the file.

        Raises:
            IoFailure: as :meth:`put`. RuntimeError: some positions were never given.
        """
        if self._left_bytes or self._open or self._aside:
            raise RuntimeError(f"{self.path}: {self._left_bytes} of {self.nbytes} bytes are missing")
        self._sync()
        for file in (*self._others, self._file):
            file.close()

    def end_part(self) -> FilePart:
        """The same of what this rank has. What it has of blocks that are not complete is in its own file.

        Raises:
            IoFailure: as :meth:`put`.
        """
        for index in list(self._open):
            self._set_aside(index)
        self._sync()
        for file in (*self._others, self._file):
            file.close()
        runs = {index: [run for _, run in block.aside] for index, block in self._aside.items()}
        self._aside.clear()
        return FilePart(self.sums, bytes(self._sent), runs)

    def adopt(self, part: FilePart, path: str) -> None:
        """Take over what another rank has written; ``path``: of that rank's file. Raises IoFailure."""
        for index, sent in enumerate(part.sent):
            if sent:
                self.sums[index] = part.sums[index]
                self._is_sent(index)
        if not part.runs:
            return
        try:
            file = self._io.open_file(path, readonly=True)
        except OSError as error:
            raise failure("reading what another rank has written", error, path, 0) from error
        self._others.append(file)
        for index, runs in part.runs.items():
            block = self._opened(index)
            block.aside += [(file, run) for run in runs]
            block.filled_bytes += sum(end - start for start, end in runs)
            if block.filled_bytes == self._length_of(index):
                self._send(index, self._open.pop(index))

    def abandon(self) -> None:
        """After a failure: wait for what is on its way, so that its memory may go, and close the file."""
        while self._flying:
            with contextlib.suppress(OSError):
                self._land()
        for block in self._open.values():
            self._pool.give_back(block.address)
        self._open.clear()
        for file in (*self._others, self._file):
            with contextlib.suppress(OSError):
                file.close()

    def _sync(self) -> None:
        while self._flying:
            self._check()
            self._land()
        self._check()
        for file in (*self._others, self._file) if self._aside_path is not None else (self._file,):
            try:
                file.sync()
            except OSError as error:
                raise failure("writing", error, file.path, 0, self.nbytes) from error

    def _aside_file(self) -> IoFile:
        """Where blocks are set aside."""
        if self._aside_path is None:
            return self._file
        if not self._others:
            try:
                self._others.append(self._io.open_file(self._aside_path, create=True))
            except OSError as error:
                raise failure("making a file", error, self._aside_path, 0) from error
        return self._others[0]

    def _length_of(self, index: int) -> int:
        return min(BLOCK_BYTES, self.nbytes - index * BLOCK_BYTES)

    def _opened(self, index: int) -> _OpenBlock:
        """A block that takes bytes now."""
        block = self._open.pop(index, None) or self._aside.pop(index, None)
        if block is None or not block.address:
            if len(self._open) >= OPEN_BLOCKS:
                self._set_aside(next(iter(self._open)))
            block = block or _OpenBlock(0)
            block.address = self._pool.take()
        self._open[index] = block  # the last one: the first ones have waited longest
        return block

    def _set_aside(self, index: int) -> None:
        """Put what a block has in memory into a file, and give its memory back."""
        block = self._open.pop(index)
        try:
            file = self._aside_file()
            aside = [(file, run) for run in block.runs]
            self._move(self._io.write, index, block.address, aside, "writing")
        finally:
            self._pool.give_back(block.address)
        block.address = 0
        block.aside += aside
        block.runs = []
        self._aside[index] = block

    def _move(
        self, move: Callable[..., Ticket], index: int, address: int, places: list[tuple[IoFile, Run]], action: str
    ) -> None:
        for file, (start, end) in places:
            self._check()
            offset = index * BLOCK_BYTES + start
            try:
                move(file, address + start, end - start, offset).wait()
            except IoFailure as error:
                raise failure(action, error, file.path, offset, end - start) from error

    def _send(self, index: int, block: _OpenBlock) -> None:
        nbytes = self._length_of(index)
        try:
            self._check()
            self._move(self._io.read, index, block.address, block.aside, "reading again")
        except BaseException:
            self._pool.give_back(block.address)
            raise
        self._flying.append(
            (self._io.write(self._file, block.address, nbytes, index * BLOCK_BYTES), block.address, index)
        )
        self.sums[index] = crc32c(block.address, nbytes)  # while the disk has it
        self._is_sent(index)
        while self._flying and (self._flying[0][0].done() or len(self._flying) > IN_FLIGHT_BLOCKS):
            self._land()

    def _is_sent(self, index: int) -> None:
        """A block has all of its bytes, and its checksum."""
        if self._sent[index]:
            raise RuntimeError(f"{self.path}: block {index} was written twice")
        self._sent[index] = 1
        self._left_bytes -= self._length_of(index)
        self._progress(self._length_of(index))

    def _land(self) -> None:
        ticket, address, index = self._flying.popleft()
        try:
            ticket.wait()
        except IoFailure as error:
            offset = index * BLOCK_BYTES
            raise failure("writing", error, self.path, offset, self._length_of(index)) from error
        finally:
            if ticket.done():
                self._pool.give_back(address)


def write_small_file(path: str, data: bytes) -> None:
    """Write a new file as a whole and put it on the disk.

    Raises:
        IoFailure: with errno and path.
    """
    try:
        with open(path, "xb", buffering=0) as file:
            view = memoryview(data)
            while view:
                written = file.write(view)
                if not written:
                    raise OSError(errno.EIO, "nothing was written")
                view = view[written:]
            os.fsync(file.fileno())
    except OSError as error:
        raise failure("writing", error, path, 0, len(data)) from error
