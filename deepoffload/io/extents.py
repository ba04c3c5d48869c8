"""Where blocks lie in swap files, and which bytes of a file are free: pure arithmetic, no I/O."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from deepoffload.errors import UsageError
from deepoffload.native.aio import PAGE_BYTES


@dataclass(frozen=True)
class ExtentPart:
    """A contiguous part of an extent: bytes of the swap file on path ``path_index``; multiples of 4096."""

    path_index: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Extent:
    """Where a block lies: ``nbytes`` as asked for, and the pieces that hold them, in the order of the block's bytes."""

    nbytes: int
    pieces: tuple[ExtentPart, ...]


@dataclass(frozen=True)
class SourceExtent(Extent):
    """Where a block lies in files of others (``io.source_files``), which nobody may write to. ``path_index`` of its
    pieces is the number of such a file; the last piece may reach beyond the end of its file, up to a whole page.
    ``tensors``: names of what lies in it, for errors."""

    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExtentRange:
    """A part of one piece of an extent: ``nbytes`` from ``offset`` in piece number ``piece`` on, which are the block's
    from ``start`` on."""

    piece: int
    offset: int
    start: int
    nbytes: int


def cut_ranges(extent: Extent, limit_bytes: int, chunk_bytes: int, sum_bytes: int) -> Iterator[ExtentRange]:
    """An extent in ranges of at most ``limit_bytes``, in order.

    A range consists of whole chunks of its piece, or of a part of one chunk that begins at a multiple of ``sum_bytes``
    in it: so its checksums are those of the whole (``io.checksums``).

    Args:
        limit_bytes: at least ``min(chunk_bytes, sum_bytes)``.
    """
    if limit_bytes >= chunk_bytes:
        step_bytes = run_bytes = limit_bytes // chunk_bytes * chunk_bytes
    else:
        step_bytes, run_bytes = limit_bytes // sum_bytes * sum_bytes, chunk_bytes
    if step_bytes <= 0:
        raise UsageError(f"ranges of {limit_bytes} bytes hold neither a chunk ({chunk_bytes}) nor a checksum's bytes")
    begin = 0
    for number, piece in enumerate(extent.pieces):
        length = min(piece.nbytes, extent.nbytes - begin)
        for run in range(0, length, run_bytes):
            run_end = min(run + run_bytes, length)
            for offset in range(run, run_end, step_bytes):
                yield ExtentRange(number, offset, begin + offset, min(step_bytes, run_end - offset))
        begin += piece.nbytes


class FreeList:
    """Free space of one file as sorted, coalesced holes; best fit.

    Everything is in whole pages of 4096 bytes. An allocation is one hole where one is large enough and several pieces
    otherwise, so it succeeds whenever that many bytes are free: fragmentation costs requests, never space.
    """

    def __init__(self, capacity_bytes: int = 0) -> None:
        self.capacity_bytes = 0
        self.free_bytes = 0
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self.extend(capacity_bytes)

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    @property
    def holes(self) -> list[tuple[int, int]]:
        """``(offset, nbytes)`` of each hole, by offset."""
        return list(zip(self._offsets, self._sizes, strict=True))

    def extend(self, capacity_bytes: int) -> None:
        """The file has grown to ``capacity_bytes``."""
        grown = capacity_bytes - self.capacity_bytes
        if grown < 0 or capacity_bytes % PAGE_BYTES:
            raise UsageError(f"a swap file of {self.capacity_bytes} bytes cannot become {capacity_bytes}")
        if grown:
            offset, self.capacity_bytes = self.capacity_bytes, capacity_bytes
            self.give(offset, grown)

    def take(self, nbytes: int) -> list[tuple[int, int]] | None:
        """Pieces ``(offset, nbytes)`` that sum up to ``nbytes`` (whole pages), fewest first; ``None`` if not free."""
        if nbytes > self.free_bytes:
            return None
        fits = [index for index, size in enumerate(self._sizes) if size >= nbytes]
        if fits:
            return [self._carve(min(fits, key=lambda index: (self._sizes[index], index)), nbytes)]
        pieces = []
        while nbytes:
            largest = max(range(len(self._sizes)), key=lambda index: (self._sizes[index], -index))
            piece = self._carve(largest, min(nbytes, self._sizes[largest]))
            pieces.append(piece)
            nbytes -= piece[1]
        return pieces

    def take_at(self, offset: int, nbytes: int) -> bool:
        """Take exactly these bytes (whole pages); False, with nothing taken, when some of them are not free."""
        at = bisect_right(self._offsets, offset) - 1
        if at < 0 or offset < 0 or nbytes <= 0 or (offset | nbytes) % PAGE_BYTES:
            return False
        begin, size = self._offsets[at], self._sizes[at]
        if offset + nbytes > begin + size:
            return False
        self._offsets[at : at + 1], self._sizes[at : at + 1] = [], []
        self.free_bytes -= size
        for hole, length in ((begin, offset - begin), (offset + nbytes, begin + size - offset - nbytes)):
            if length:
                self.give(hole, length)
        return True

    def give(self, offset: int, nbytes: int) -> None:
        """Returns a piece.

        Raises:
            UsageError: Some of it is free already, or it lies outside the file.
        """
        if not self.is_taken(offset, nbytes):
            raise UsageError(f"bytes {offset} to {offset + nbytes} of the swap file are not allocated (freed twice?)")
        at = bisect_left(self._offsets, offset)
        self.free_bytes += nbytes
        if at < len(self._offsets) and self._offsets[at] == offset + nbytes:
            nbytes += self._sizes.pop(at)
            self._offsets.pop(at)
        if at > 0 and self._offsets[at - 1] + self._sizes[at - 1] == offset:
            self._sizes[at - 1] += nbytes
        else:
            self._offsets.insert(at, offset)
            self._sizes.insert(at, nbytes)

    def is_taken(self, offset: int, nbytes: int) -> bool:
        """Whether a piece lies in the file, and none of it is free."""
        at = bisect_left(self._offsets, offset)
        before = at > 0 and self._offsets[at - 1] + self._sizes[at - 1] > offset
        after = at < len(self._offsets) and offset + nbytes > self._offsets[at]
        return not before and not after and 0 <= offset and offset + nbytes <= self.capacity_bytes

    def _carve(self, index: int, nbytes: int) -> tuple[int, int]:
        offset = self._offsets[index]
        self.free_bytes -= nbytes
        if nbytes == self._sizes[index]:
            self._offsets.pop(index)
            self._sizes.pop(index)
        else:
            self._offsets[index] += nbytes
            self._sizes[index] -= nbytes
        return offset, nbytes


def split_by_weight(total: int, weights: list[float], multiple: int) -> list[int]:
    """``total`` in parts proportional to ``weights``, each a multiple of ``multiple`` but one that takes the rest.

    The rest goes to the heaviest. Deterministic; the parts sum up to ``total``.
    """
    scale = sum(weights)
    parts = [int(total * weight / scale) // multiple * multiple for weight in weights]
    heaviest = max(range(len(weights)), key=lambda index: (weights[index], -index))
    parts[heaviest] += total - sum(parts)
    return parts
