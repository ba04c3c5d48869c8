"""The record of a durable step, byte by byte.

A *slot* is a page that names a step and where the record's *body* lies; it ends with a checksum. The body has the
extents of the step with the checksums of what is in them, and bytes of those who made it. What is read may be damaged,
or made by anybody: nothing is believed before it is checked.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from deepoffload.errors import UsageError
from deepoffload.io.extents import Extent, ExtentPart
from deepoffload.io.header_pages import FORMAT_VERSION, sealed, unsealed
from deepoffload.native.aio import PAGE_BYTES, REQUEST_BYTES_MAX, round_up

PARTS_MAX = 128
"""Of the extent of a body."""

_SLOT_MAGIC = b"deepoffload step"
_SLOT = struct.Struct("<16sII16sQQQII")  # magic, version, parts, store, sequence, step, bytes, checksum, files
_PART = struct.Struct("<IIQQ")  # path, 0, offset, bytes
_BODY = struct.Struct("<8sIIQQQ")  # magic, version, extents, bytes of a chunk, of the table, of the rest
_EXTENT = struct.Struct("<QII")  # bytes, parts, checksums
_BODY_MAGIC = b"doffbody"
_PAIR_BYTES = 8


@dataclass(frozen=True)
class Slot:
    """A step that is durable.

    Attributes:
        store: of which store; as :class:`~deepoffload.io.header_pages.Mark` has it.
        sequence: counts the records of a store.
        files: how many the store has.
        body: where the body lies, and the CRC-32C of it.
    """

    store: bytes
    sequence: int
    step: int
    files: int
    body: Extent
    body_sum: int

    def page(self) -> bytes:
        """As it lies in the file."""
        parts = self.body.pieces
        if len(parts) > PARTS_MAX:
            raise AssertionError(f"the record lies in {len(parts)} parts")
        head = _SLOT.pack(
            _SLOT_MAGIC,
            FORMAT_VERSION,
            len(parts),
            self.store,
            self.sequence,
            self.step,
            self.body.nbytes,
            self.body_sum,
            self.files,
        )
        return sealed(head + b"".join(_PART.pack(part.path_index, 0, part.offset, part.nbytes) for part in parts))

    @classmethod
    def of(cls, page: bytes) -> Slot | None:
        """None for anything that is no slot, or a torn one.

        Raises:
            UsageError: a newer version wrote it.
        """
        content = unsealed(page)
        if content is None or not content.startswith(_SLOT_MAGIC):
            return None
        _, version, count, store, sequence, step, nbytes, body_sum, files = _SLOT.unpack_from(content)
        if version != FORMAT_VERSION:
            raise UsageError(
                f"the durable state has format version {version}, and this deepoffload reads {FORMAT_VERSION}"
            )
        if not 0 < count <= PARTS_MAX:
            return None
        parts = tuple(
            ExtentPart(path, offset, size)
            for path, _, offset, size in (
                _PART.unpack_from(content, _SLOT.size + index * _PART.size) for index in range(count)
            )
        )
        return cls(store, sequence, step, files, Extent(nbytes, parts), body_sum)


@dataclass(frozen=True)
class StoredExtent:
    """An extent of a durable step, and what lies in it: pairs of checksum and bytes, as
    :meth:`~deepoffload.io.checksums.ChecksumTable.of` gives them."""

    extent: Extent
    sums: bytes

    def packed(self) -> bytes:
        """As it lies in a body."""
        parts = self.extent.pieces
        head = _EXTENT.pack(self.extent.nbytes, len(parts), len(self.sums) // _PAIR_BYTES)
        return b"".join((head, *(_PART.pack(p.path_index, 0, p.offset, p.nbytes) for p in parts), self.sums))


def body_of(packed: Sequence[bytes], content: bytes, chunk_bytes: int) -> bytes:
    """A body with these extents, each as :meth:`StoredExtent.packed` gives it."""
    table = b"".join(packed)
    head = _BODY.pack(_BODY_MAGIC, FORMAT_VERSION, len(packed), chunk_bytes, len(table), len(content))
    return b"".join((head, table, content))


def parse_body(body: bytes) -> tuple[list[StoredExtent], bytes, int]:
    """What :func:`body_of` was given.

    Raises:
        UsageError: it is no such body.
    """
    try:
        magic, version, count, chunk_bytes, table_bytes, rest_bytes = _BODY.unpack_from(body)
        if magic != _BODY_MAGIC or version != FORMAT_VERSION or len(body) != _BODY.size + table_bytes + rest_bytes:
            raise ValueError("its beginning is wrong")
        if not chunk_bytes or chunk_bytes % PAGE_BYTES or chunk_bytes > REQUEST_BYTES_MAX:
            raise ValueError("its chunks have no whole pages")
        at, end = _BODY.size, _BODY.size + table_bytes
        extents = []
        for _ in range(count):
            found, at = _parse_extent(body, at, end)
            extents.append(found)
        if at != end:
            raise ValueError("its table of extents has another length")
    except (struct.error, ValueError) as error:
        raise UsageError(f"the record of the durable state is damaged: {error}") from None
    return extents, body[end:], chunk_bytes


def _parse_extent(body: bytes, at: int, end: int) -> tuple[StoredExtent, int]:
    nbytes, count, sums = _EXTENT.unpack_from(body, at)
    at += _EXTENT.size
    if count * _PART.size + sums * _PAIR_BYTES > end - at:
        raise ValueError("an extent is longer than the table")
    parts = []
    for _ in range(count):
        path, _, offset, size = _PART.unpack_from(body, at)
        at += _PART.size
        parts.append(ExtentPart(path, offset, size))
    extent = Extent(nbytes, tuple(parts))
    check_extent(extent)
    return StoredExtent(extent, bytes(body[at : at + sums * _PAIR_BYTES])), at + sums * _PAIR_BYTES


def check_extent(extent: Extent) -> None:
    """Raise ``ValueError`` for one that no allocation gives."""
    if not extent.pieces or extent.nbytes <= 0 or sum(part.nbytes for part in extent.pieces) != round_up(extent.nbytes):
        raise ValueError(f"an extent of {extent.nbytes} bytes has other parts")
    if any(part.offset % PAGE_BYTES or part.nbytes % PAGE_BYTES or not part.nbytes for part in extent.pieces):
        raise ValueError("a part of an extent is not in whole pages")
