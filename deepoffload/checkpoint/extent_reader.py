"""Reads what lies in the extents of a durable step, and gives out only bytes whose checksum is right."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from deepoffload.checkpoint.block_pool import BLOCK_BYTES, BlockPool
from deepoffload.checkpoint.block_reader import FileSpan
from deepoffload.checkpoint.durable_content import ZEROS, Run
from deepoffload.errors import IoFailure, UsageError
from deepoffload.io.checksums import SUM_BYTES, crc32c
from deepoffload.io.durable_store import DurableStep
from deepoffload.io.engine import PADDED, READ
from deepoffload.io.swap_space import SwapSpace
from deepoffload.io.ticket import Ticket

AHEAD_WINDOWS = 8
KEPT_WINDOWS = 24
_PAIR_BYTES = 8


class _Window(NamedTuple):
    """Bytes of an extent that are read together: from ``start`` of the block on, of one file. ``sums``: checksums of
    the following bytes, each with how many they are."""

    start: int
    nbytes: int
    path_index: int
    offset: int
    sums: tuple[tuple[int, int], ...]


class _Arriving:
    __slots__ = ("address", "ticket", "used")

    def __init__(self, address: int, ticket: Ticket) -> None:
        self.address = address
        self.ticket: Ticket | None = ticket
        self.used = False


class ExtentReader:
    """The verified content of a durable step's tensors. A span's ``file`` is a tensor's name; its bytes are those of
    the tensor's runs, one after the other.

    Args:
        runs: of each tensor. blocks: names of the first extents' blocks.

    Raises:
        UsageError: the checksums do not fit the extents.
    """

    def __init__(
        self, space: SwapSpace, found: DurableStep, runs: Mapping[str, Sequence[Run]], blocks: Sequence[str]
    ) -> None:
        self._space = space
        self._found = found
        self._blocks = blocks
        self._runs = runs
        self._ends = {name: list(itertools.accumulate(run[2] for run in mine)) for name, mine in runs.items()}
        self._windows = [list(_windows_of(found, number)) for number in range(len(found.extents))]
        self._starts = [[window.start for window in windows] for windows in self._windows]
        self._pool = BlockPool()
        self._arrived: OrderedDict[tuple[int, int], _Arriving] = OrderedDict()
        self._coming: Iterator[tuple[int, int]] = iter(())
        self._ahead = 0

    def will_read(self, spans: Iterable[FileSpan]) -> None:
        """What will be asked for next, in this order: it is read ahead. Replaces what was said before."""
        self._coming = (
            (number, index)
            for span in spans
            for number, offset, nbytes in self._parts(span)
            if number != ZEROS
            for index in range(self._index(number, offset), self._index(number, offset + max(nbytes, 1) - 1) + 1)
        )

    def read(self, span: FileSpan, address: int) -> None:
        """Put bytes at an address.

        Raises:
            UsageError: a checksum is wrong. IoFailure: a transfer failed.
        """
        for number, offset, nbytes in self._parts(span):
            if number == ZEROS:
                ctypes.memset(address, 0, nbytes)
                address += nbytes
                continue
            end = offset + nbytes
            while offset < end:
                index = self._index(number, offset)
                window = self._windows[number][index]
                inside = offset - window.start
                part = min(end - offset, window.nbytes - inside)
                ctypes.memmove(address, self._take(number, index, span.file) + inside, part)
                offset, address = offset + part, address + part

    def close(self) -> None:
        """Wait for what is on its way."""
        while self._arrived:
            self._forget(next(iter(self._arrived)))
        self._pool.close()

    # -- where -------------------------------------------------------------------------------------------------------

    def _parts(self, span: FileSpan) -> Iterator[Run]:
        """Where the bytes of a span lie."""
        runs, ends = self._runs[span.file], self._ends[span.file]
        offset, left = span.offset, span.nbytes
        at = bisect_right(ends, offset)
        while left:
            number, begin, nbytes = runs[at]
            inside = offset - (ends[at] - nbytes)
            part = min(left, nbytes - inside)
            yield number, begin + inside if number != ZEROS else 0, part
            offset, left, at = offset + part, left - part, at + 1

    def _index(self, number: int, offset: int) -> int:
        return bisect_right(self._starts[number], offset) - 1

    # -- windows -----------------------------------------------------------------------------------------------------

    def _take(self, number: int, index: int, tensor: str) -> int:
        """The address of a window that has come and is right."""
        key = (number, index)
        found = self._arrived.get(key) or self._start(key)
        self._arrived.move_to_end(key)
        if not found.used:
            found.used = True
            self._ahead -= 1
        while self._ahead < AHEAD_WINDOWS:
            coming = next(self._coming, None)
            if coming is None:
                break
            if coming not in self._arrived:
                self._start(coming)
        if found.ticket is not None:
            self._check(key, found.ticket, found.address, tensor)
            found.ticket = None
        return found.address

    def _start(self, key: tuple[int, int]) -> _Arriving:
        if len(self._arrived) >= KEPT_WINDOWS:
            used = (known for known, window in self._arrived.items() if window.used)
            self._forget(next(itertools.chain(used, self._arrived)))
        window = self._windows[key[0]][key[1]]
        address = self._pool.take()
        try:
            file = self._space.files[window.path_index]
            ticket = self._space.engine.submit_one(READ, file, address, window.nbytes, window.offset, PADDED)
        except BaseException:
            self._pool.give_back(address)
            raise
        found = self._arrived[key] = _Arriving(address, ticket)
        self._ahead += 1
        return found

    def _forget(self, key: tuple[int, int]) -> None:
        window = self._arrived.pop(key)
        self._ahead -= not window.used
        if window.ticket is not None:
            with contextlib.suppress(IoFailure):  # of bytes that are asked for again, if at all
                window.ticket.wait()
        self._pool.give_back(window.address)

    def _check(self, key: tuple[int, int], ticket: Ticket, address: int, tensor: str) -> None:
        window = self._windows[key[0]][key[1]]
        path = self._space.files[window.path_index].path
        what = f"{self._name(key[0])} with {tensor.partition('/')[2]} of durable step {self._found.step}"
        try:
            ticket.wait()
        except IoFailure as error:
            remedy = f"It is {what}. Load a checkpoint instead: state.load(directory)"
            raise IoFailure("reading", error.errno or 0, path, window.offset, window.nbytes, remedy) from error
        at = 0
        for written, nbytes in window.sums:
            found = crc32c(address + at, nbytes)
            if found != written:
                raise UsageError(
                    f"{path} is damaged between offset {window.offset + at} and {window.offset + at + nbytes}, in "
                    f"{what}: its checksum there is {found:08x} and was {written:08x} when it was written. Load a "
                    "checkpoint instead: state.load(directory)"
                )
            at += min(SUM_BYTES, window.nbytes - at)

    def _name(self, number: int) -> str:
        return f"block {self._blocks[number]}" if number < len(self._blocks) else "what lies in no block"


def _windows_of(found: DurableStep, number: int) -> Iterator[_Window]:
    """An extent cut as its checksums are (``csrc/aio/sums.c``): each chunk of each part begins one."""
    stored = found.extents[number]
    pairs = memoryview(stored.sums).cast("I")
    start = at = 0
    for part in stored.extent.pieces:
        length = min(part.nbytes, stored.extent.nbytes - start)
        for chunk in range(0, part.nbytes, found.chunk_bytes):
            chunk_end = min(chunk + found.chunk_bytes, part.nbytes)
            for begin in range(chunk, chunk_end, BLOCK_BYTES):
                end = min(begin + BLOCK_BYTES, chunk_end)
                count = -(-(end - begin) // SUM_BYTES)
                sums = tuple((pairs[2 * i], pairs[2 * i + 1]) for i in range(at, min(at + count, len(pairs) // 2)))
                at += count
                if begin >= length:
                    continue
                covered = sum(nbytes for _, nbytes in sums)
                if len(sums) != count or covered < min(end, length) - begin or covered > end - begin:
                    raise UsageError(f"the record of durable step {found.step} is damaged: it lacks checksums")
                yield _Window(start + begin, min(end, length) - begin, part.path_index, part.offset + begin, sums)
        start += part.nbytes
