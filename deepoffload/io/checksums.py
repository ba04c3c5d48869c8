"""CRC-32C of what lies in extents, to notice a disk that returns other bytes than it was given (key ``aio.verify``).

The I/O threads compute them (``csrc/aio/sums.c``): a block of 256 KiB at most is summed before it is submitted and
again when it was read. They are kept in memory, 8 bytes per block; those of a durable step are in its record, too.
"""

from __future__ import annotations

from typing import Any

from deepoffload.io.engine import IoEngine
from deepoffload.io.extents import Extent, ExtentRange
from deepoffload.native.aio import ffi, lib

SUM_BYTES: int = lib.DOFF_SUM_BYTES


def crc32c(address: int, nbytes: int) -> int:
    """CRC-32C (Castagnoli) of bytes in memory."""
    found = ffi.new("uint32_t[1]")
    if nbytes:
        lib.doff_crc32c_blocks(address, nbytes, nbytes, found)
    return int(found[0])


def crc32c_of(data: bytes) -> int:
    """CRC-32C of ``data``."""
    return crc32c(int(ffi.cast("uintptr_t", ffi.from_buffer(data))), len(data))


class ChecksumTable:
    """The native checksums of each extent that was written."""

    def __init__(self, engine: IoEngine) -> None:
        self._engine = engine
        self._sums: dict[Extent, Any] = {}

    def known(self, extent: Extent) -> Any:
        """What a read compares with: ``NULL`` for an extent that was never written."""
        return self._sums.get(extent, ffi.NULL)

    def to_record(self, extent: Extent) -> Any:
        """What a write leaves its checksums in."""
        sums = self._sums.get(extent)
        if sums is None:
            lengths = [piece.nbytes for piece in extent.pieces]
            native = lib.doff_sums_new(self._engine.handle(), lengths, len(lengths))
            if not native:
                raise MemoryError(f"no memory for the checksums of {extent.nbytes} bytes")
            sums = self._sums.setdefault(extent, ffi.gc(native, lib.doff_sums_release))
        return sums

    def count_before(self, extent: Extent, part: ExtentRange) -> int:
        """How many checksums of an extent come before those of a range."""
        whole = [piece.nbytes for piece in extent.pieces[: part.piece]]
        return sum(int(lib.doff_sums_count(self._engine.handle(), nbytes)) for nbytes in (*whole, part.offset))

    def of(self, extent: Extent) -> bytes:
        """Of each block of an extent, its checksum and of how many bytes of the block it is: pairs of little-endian
        32-bit numbers. Nothing for an extent that was never written. No write to it may be in flight."""
        sums = self._sums.get(extent)
        if sums is None:
            return b""
        count = int(lib.doff_sums_copy(sums, ffi.NULL, 0))
        pairs = ffi.new("uint32_t[]", 2 * count)
        lib.doff_sums_copy(sums, pairs, count)
        return bytes(ffi.buffer(pairs))

    def forget(self, extent: Extent) -> None:
        self._sums.pop(extent, None)
