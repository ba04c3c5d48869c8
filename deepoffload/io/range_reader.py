"""Reads extents from beginning to end through a few buffers: the disk works on the next ranges meanwhile."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from deepoffload.errors import IoFailure
from deepoffload.io.extents import Extent, ExtentRange
from deepoffload.io.swap_space import SwapSpace
from deepoffload.io.ticket import Ticket
from deepoffload.native.aio import HostMapping

RANGE_BYTES = 1 << 20
NUM_BUFFERS = 12
"""With fewer, the disk has nothing to read next to what is written of the last ones."""
FEW_BUFFERS = 4
"""Next to transfers that the program waits for: more would make these wait."""


class ReadRange(NamedTuple):
    """Bytes of a block, from ``start`` on, that have been read to ``address``."""

    start: int
    address: int
    nbytes: int


class RangeReader:
    """One extent at a time. The buffers are made when the first one is opened.

    Attributes:
        alone: nobody else waits for the disk.
    """

    def __init__(self, space: SwapSpace) -> None:
        self.extent: Extent | None = None
        self.alone = True
        self._space = space
        self._mapping: HostMapping | None = None
        self._free: list[int] = []
        self._coming: Iterator[ExtentRange] = iter(())
        self._flying: deque[tuple[Ticket, ExtentRange, int]] = deque()
        self._given = 0

    def open(self, extent: Extent, start: int) -> None:
        """Begin with the range that holds position ``start`` of the block."""
        self.end()
        if self._mapping is None:
            self._mapping = HostMapping(NUM_BUFFERS * RANGE_BYTES)
            self._free = [self._mapping.address + index * RANGE_BYTES for index in range(NUM_BUFFERS)]
        ranges = self._space.ranges(extent, RANGE_BYTES)
        self._coming = (part for part in ranges if part.start + part.nbytes > start)
        self.extent = extent

    def read(self) -> ReadRange | None:
        """The next range; None at the end. It is valid until the next call.

        Raises:
            IoFailure: it could not be read. IoTimeout: the disk does not answer.
        """
        extent = self.extent
        if extent is None:
            raise RuntimeError("no extent is open")
        if self._given:
            self._free.append(self._given)
            self._given = 0
        while self._free and (self.alone or len(self._flying) < FEW_BUFFERS):
            part = next(self._coming, None)
            if part is None:
                break
            address = self._free.pop()
            try:
                ticket = self._space.read_range(extent, part, address)
            except BaseException:
                self._free.append(address)
                raise
            self._flying.append((ticket, part, address))
        if not self._flying:
            return None
        ticket, part, address = self._flying[0]
        try:
            ticket.wait()
        finally:
            if ticket.done():
                self._flying.popleft()
                self._given = address
        return ReadRange(part.start, address, part.nbytes)

    def end(self) -> None:
        """Read no more of the present extent: nothing of it is on its way when this returns."""
        while self._flying:
            ticket, _, address = self._flying[0]
            with contextlib.suppress(IoFailure):  # of bytes that nobody wants
                ticket.wait()
            self._flying.popleft()
            self._free.append(address)
        if self._given:
            self._free.append(self._given)
            self._given = 0
        self._coming = iter(())
        self.extent = None

    def close(self) -> None:
        """Give the buffers back."""
        self.end()
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
