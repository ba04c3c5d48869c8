"""Data that shows where it belongs, so that every transfer of a measurement can be checked.

A file's content repeats ``PERIOD_BYTES`` random bytes, which no disk compresses away, and the first eight bytes of
every 4096-byte page are a *stamp*: file, page and how many times it was written. Checking the stamps costs a few
microseconds per MiB and finds what was cut short, not written, or read from or to the wrong place; ``check_all``
compares every byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepoffload.cli.nvme.types import DataMismatch

PAGE_BYTES = 4096
PERIOD_BYTES = 256 << 10
_SEED = 20260501

Stamps = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


class Buffer:
    """Bytes of host memory seen as pages: ``size`` is a multiple of ``PERIOD_BYTES``.

    Args:
        memory: a writable buffer; it must outlive this object.
        address: where it lies.
    """

    def __init__(self, memory: Any, address: int) -> None:
        self.address = address
        self.bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.size = self.bytes.size
        self._words: Stamps = self.bytes.view(np.uint64).reshape(-1, PAGE_BYTES // 8)
        self._heads = self._words[:, 0]

    def paint(self) -> None:
        """Fills it with the repeated random bytes; stamps come later."""
        self.bytes.reshape(-1, PERIOD_BYTES)[:] = pattern_bytes()

    def poison(self) -> None:
        """Overwrites everything, so that a read which moves nothing cannot pass."""
        self.bytes.fill(0xA5)

    def stamp(self, stamps: Stamps) -> None:
        """Marks the first ``len(stamps)`` pages."""
        self._heads[: stamps.size] = stamps

    def check_stamps(self, stamps: Stamps, where: str, first_page: int) -> None:
        """Compares the stamps of the first pages.

        Raises:
            DataMismatch: naming the first page that is wrong.
        """
        if not np.array_equal(self._heads[: stamps.size], stamps):
            wrong = np.flatnonzero(self._heads[: stamps.size] != stamps)
            raise _mismatch(where, first_page, wrong)

    def check_all(self, stamps: Stamps, where: str, first_page: int) -> None:
        """Compares every byte of the first ``len(stamps)`` pages.

        Raises:
            DataMismatch: naming the first page that is wrong.
        """
        expected = np.resize(pattern_bytes().view(np.uint64).reshape(-1, PAGE_BYTES // 8), (stamps.size, 512))
        expected[:, 0] = stamps
        wrong = np.flatnonzero((self._words[: stamps.size] != expected).any(axis=1))
        if wrong.size:
            raise _mismatch(where, first_page, wrong)


def pattern_bytes() -> Bytes:
    """The random bytes that every file repeats, uint8 of ``PERIOD_BYTES``."""
    return np.random.default_rng(_SEED).integers(0, 256, PERIOD_BYTES, dtype=np.uint8)


def make_stamps(file_serial: int, first_page: int, count: int, generation: int) -> Stamps:
    """Stamps of ``count`` pages: 8 bits of file, 24 of generation, 32 of page."""
    head = (file_serial & 0xFF) << 56 | (generation & 0xFFFFFF) << 32
    return np.arange(first_page, first_page + count, dtype=np.uint64) | np.uint64(head)


def _mismatch(where: str, first_page: int, wrong: npt.NDArray[np.intp]) -> DataMismatch:
    offset = (first_page + int(wrong[0])) * PAGE_BYTES
    return DataMismatch(
        f"{where}: the data read at offset {offset} is not what was written there ({wrong.size} pages of {PAGE_BYTES} "
        "bytes differ in this transfer). Do not trust this disk, file system or kernel with data; see dmesg."
    )
