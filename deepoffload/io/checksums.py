"""CRC-32C of what lies in extents, to notice a disk that returns other bytes than it was given (key ``aio.verify``)."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import IoFailure
from ..native.aio import crc32c_blocks, ffi
from .extents import Extent

BLOCK_BYTES = 256 << 10


@dataclass(frozen=True)
class _Sums:
    nbytes: int
    blocks: Any  # cffi uint32_t[], one per BLOCK_BYTES


class ChecksumTable:
    """Sums of the last write to each extent. In memory only: 4 bytes per 256 KiB."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[Extent, _Sums] = {}

    def record(self, extent: Extent, address: int, nbytes: int) -> None:
        """Sums the bytes about to be written."""
        sums = _Sums(nbytes, crc32c_blocks(address, nbytes, BLOCK_BYTES))
        with self._lock:
            self._sums[extent] = sums

    def forget(self, extent: Extent) -> None:
        with self._lock:
            self._sums.pop(extent, None)

    def checker(
        self, extent: Extent, address: int, nbytes: int, locate: Callable[[Extent, int], tuple[str, int]]
    ) -> Callable[[], None] | None:
        """What compares the bytes at ``address`` once they are read; ``None`` for an extent that was never written.

        Only blocks that were read as far as they were written can be compared. ``locate`` gives path and file offset of
        a position in an extent, for the error: an :class:`~deepoffload.errors.IoFailure` with ``EBADMSG``.
        """
        with self._lock:
            known = self._sums.get(extent)
        if known is None:
            return None
        comparable = known.nbytes if nbytes >= known.nbytes else nbytes // BLOCK_BYTES * BLOCK_BYTES

        def check() -> None:
            found = crc32c_blocks(address, comparable, BLOCK_BYTES)
            count = -(-comparable // BLOCK_BYTES)
            if ffi.buffer(found, 4 * count)[:] == ffi.buffer(known.blocks, 4 * count)[:]:
                return
            block = next(index for index in range(count) if found[index] != known.blocks[index])
            start = block * BLOCK_BYTES
            path, offset = locate(extent, start)
            length = min(BLOCK_BYTES, comparable - start)
            remedy = (
                f"Checksum {found[block]:#010x} was read where {known.blocks[block]:#010x} was written (byte {start} "
                f"of an extent of {extent.nbytes}): disk, cable or memory damages data, or another program wrote there."
            )
            raise IoFailure("read", errno.EBADMSG, path, offset, length, remedy)

        return check
