"""Reads parts of extents: rows of a table, experts of a layer. Whole pages, in one request for all parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from deepoffload.io.engine import READ, URGENT, IoFile
from deepoffload.io.extents import Extent, SourceExtent
from deepoffload.io.swap_space import SwapSpace
from deepoffload.io.ticket import Ticket
from deepoffload.native.aio import PAGE_BYTES, ffi, round_up


class PageRead(NamedTuple):
    """Bytes of a block, from ``start`` on, and where in memory they are to go. All are multiples of 4096."""

    start: int
    nbytes: int
    address: int


def page_runs(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, end) of the whole pages that hold some (start, nbytes), merged and in order."""
    runs: list[tuple[int, int]] = []
    for start, nbytes in sorted(ranges):
        begin, end = start // PAGE_BYTES * PAGE_BYTES, round_up(start + nbytes)
        if runs and begin <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((begin, end))
    return runs


def read_parts(space: SwapSpace, extent: Extent, parts: Sequence[PageRead]) -> Ticket:
    """Begin to read parts of a block, before everything that is not urgent."""
    cuts = [cut for part in parts for cut in _cut(space, extent, part)]
    segments = ffi.new("doff_segment[]", len(cuts))
    for segment, (file, offset, nbytes, address) in zip(segments, cuts, strict=True):
        segment.address, segment.offset, segment.nbytes, segment.file = address, offset, nbytes, file.file_id
    total = sum(nbytes for _, _, nbytes, _ in cuts)
    files = list(dict.fromkeys(file for file, _, _, _ in cuts))
    ticket = space.engine.submit(READ, segments, len(cuts), total, URGENT, files)
    space.bytes_read += total
    return space.sources.judged(ticket, extent) if isinstance(extent, SourceExtent) else ticket


def _cut(space: SwapSpace, extent: Extent, part: PageRead) -> Iterator[tuple[IoFile, int, int, int]]:
    """File, offset, bytes and address of each piece that a part lies in, as far as the file reaches."""
    begin, end = 0, part.start + part.nbytes
    for piece in extent.pieces:
        first, last = max(begin, part.start), min(begin + piece.nbytes, end)
        if first < last:
            offset, nbytes = piece.offset + first - begin, last - first
            if isinstance(extent, SourceExtent):
                file = space.sources.file(piece.path_index)
                nbytes = min(nbytes, space.sources.size_of(piece.path_index) - offset)
            else:
                file = space.files[piece.path_index]
            yield file, offset, nbytes, part.address + first - part.start
        begin += piece.nbytes
