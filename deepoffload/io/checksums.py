"""CRC-32C of what lies in extents, to notice a disk that returns other bytes than it was given (key ``aio.verify``).

The I/O threads compute them (``csrc/aio/sums.c``): a block of 256 KiB at most is summed before it is submitted and
again when it was read. They are kept in memory only, 8 bytes per block.
"""

from __future__ import annotations

from typing import Any

from deepoffload.io.engine import IoEngine
from deepoffload.io.extents import Extent, ExtentRange
from deepoffload.native.aio import ffi, lib

SUM_BYTES: int = lib.DOFF_SUM_BYTES


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

    def forget(self, extent: Extent) -> None:
        self._sums.pop(extent, None)
