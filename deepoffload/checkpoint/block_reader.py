"""Reads the files of a checkpoint, block by block, and gives out only bytes whose checksum is right."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from deepoffload.checkpoint.block_pool import BLOCK_BYTES, BlockPool
from deepoffload.checkpoint.manifest import Manifest, open_plain
from deepoffload.errors import IoFailure, UsageError
from deepoffload.io.checksums import crc32c
from deepoffload.io.engine import IoEngine, IoFile
from deepoffload.io.ticket import Ticket

AHEAD_BLOCKS = 16
"""Blocks that are on their way, or have come and were not asked for yet."""

KEPT_BLOCKS = 28
"""Blocks in memory, at most: those ahead, and as many of which a part was given out. Parameters have up to five arrays
in a file, and one array ends in the block in which the next one begins."""


class FileSpan(NamedTuple):
    """Bytes of a file of the checkpoint."""

    file: str
    offset: int
    nbytes: int


class ReadsAhead(Protocol):
    """Something that tensors are read from."""

    def will_read(self, spans: Iterable[FileSpan]) -> None:
        """What will be asked for next, in this order. Replaces what was said before."""
        ...


class _Block:
    __slots__ = ("address", "ticket", "used", "left_bytes")

    def __init__(self, address: int, ticket: Ticket, left_bytes: int) -> None:
        self.address = address
        self.ticket: Ticket | None = ticket
        self.used = False
        self.left_bytes = left_bytes


class BlockReader:
    """The verified content of a checkpoint's files.

    The memory of a block goes back to the pool with the last of its bytes, so that few are in memory. What is asked for
    twice may be read twice.

    Args:
        progress: told the bytes of each block that was read and is right.
    """

    def __init__(
        self, io: IoEngine, pool: BlockPool, directory: str, manifest: Manifest, progress: Callable[[int], None]
    ) -> None:
        self.directory = directory
        self._io = io
        self._pool = pool
        self._records = manifest.files
        self._progress = progress
        self._files: dict[str, IoFile] = {}
        self._blocks: OrderedDict[tuple[str, int], _Block] = OrderedDict()
        self._coming: Iterator[tuple[str, int]] = iter(())
        self._ahead = 0

    def will_read(self, spans: Iterable[FileSpan]) -> None:
        """What will be asked for next, in this order: it is read ahead. Replaces what was said before."""
        self._coming = (
            (span.file, index)
            for span in spans
            for index in range(span.offset // BLOCK_BYTES, -(-(span.offset + span.nbytes) // BLOCK_BYTES))
        )

    def read(self, span: FileSpan, address: int) -> None:
        """Put bytes at an address.

        Raises:
            UsageError: a checksum is wrong. IoFailure: a transfer failed.
        """
        offset, end = span.offset, span.offset + span.nbytes
        while offset < end:
            index, inside = divmod(offset, BLOCK_BYTES)
            part = min(end - offset, BLOCK_BYTES - inside)
            block = self._arrived(span.file, index)
            ctypes.memmove(address, block.address + inside, part)
            block.left_bytes -= part
            if block.left_bytes <= 0:
                self._forget((span.file, index))
            offset, address = offset + part, address + part

    def length_of_file(self, file: str) -> int:
        return self._records[file].nbytes

    def content(self, file: str) -> bytes:
        """All of a (small) file."""
        return self.part(FileSpan(file, 0, self._records[file].nbytes))

    def part(self, span: FileSpan) -> bytes:
        """A (small) part of a file."""
        held = ctypes.create_string_buffer(max(1, span.nbytes))
        self.read(span, ctypes.addressof(held))
        return held.raw[: span.nbytes]

    def verify(self, file: str) -> None:
        """Read all of a file for its checksums only."""
        spans = [FileSpan(file, start, 1) for start in range(0, self._records[file].nbytes, BLOCK_BYTES)]
        self.will_read(spans)
        for span in spans:
            index = span.offset // BLOCK_BYTES
            self._arrived(file, index)
            self._forget((file, index))

    def close(self) -> None:
        """Wait for what is on its way, and close the files."""
        for block in self._blocks.values():
            if block.ticket is not None:
                with contextlib.suppress(OSError):
                    block.ticket.wait()
            self._pool.give_back(block.address)
        self._blocks.clear()
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _arrived(self, file: str, index: int) -> _Block:
        key = (file, index)
        block = self._blocks.get(key)
        if block is None:
            block = self._start(key)
        self._blocks.move_to_end(key)
        if not block.used:
            block.used = True
            self._ahead -= 1
        self._read_ahead()
        if block.ticket is not None:
            self._check(key, block, block.ticket)
        return block

    def _start(self, key: tuple[str, int]) -> _Block:
        file, index = key
        if len(self._blocks) >= KEPT_BLOCKS:
            self._forget_one()
        start = index * BLOCK_BYTES
        address = self._pool.take()
        try:
            ticket = self._io.read(self._opened(file), address, self._length_of(key), start)
        except BaseException:
            self._pool.give_back(address)
            raise
        block = self._blocks[key] = _Block(address, ticket, self._length_of(key))
        self._ahead += 1
        return block

    def _read_ahead(self) -> None:
        while self._ahead < AHEAD_BLOCKS:
            key = next(self._coming, None)
            if key is None:
                return
            if key not in self._blocks:
                self._start(key)

    def _forget_one(self) -> None:
        """Take the memory of the block whose use is longest ago."""
        used = (key for key, block in self._blocks.items() if block.used)
        self._forget(next(itertools.chain(used, self._blocks)))

    def _forget(self, key: tuple[str, int]) -> None:
        block = self._blocks.pop(key)
        if not block.used:
            self._ahead -= 1
        if block.ticket is not None:
            with contextlib.suppress(IoFailure):  # of bytes that are asked for again, if at all
                block.ticket.wait()
        self._pool.give_back(block.address)

    def _check(self, key: tuple[str, int], block: _Block, ticket: Ticket) -> None:
        file, index = key
        path = os.path.join(self.directory, file)
        try:
            ticket.wait()
        except IoFailure as error:
            self._forget(key)
            remedy = "Load another checkpoint, or copy this one to another disk if it can be read there"
            code, offset = error.errno or 0, index * BLOCK_BYTES
            raise IoFailure("reading the checkpoint", code, path, offset, self._length_of(key), remedy) from error
        nbytes = self._length_of(key)
        found, written = crc32c(block.address, nbytes), self._records[file].sums[index]
        if found != written:
            self._forget(key)
            raise UsageError(
                f"{path} is damaged between offset {index * BLOCK_BYTES} and {index * BLOCK_BYTES + nbytes}: its "
                f"checksum there is {found:08x} and was {written:08x} when it was saved; load another checkpoint"
            )
        block.ticket = None
        self._progress(nbytes)

    def _length_of(self, key: tuple[str, int]) -> int:
        file, index = key
        return min(BLOCK_BYTES, self._records[file].nbytes - index * BLOCK_BYTES)

    def _opened(self, file: str) -> IoFile:
        if file not in self._files:
            path = os.path.join(self.directory, file)
            os.close(open_plain(path))
            self._files[file] = self._io.open_file(path, readonly=True)
        return self._files[file]
