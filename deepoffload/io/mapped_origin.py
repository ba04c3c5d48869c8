"""Where memory comes from: which bytes of which file a private mapping still shows.

Libraries that load checkpoints map the file and hand out tensors over the mapping. Their bytes are those of the file,
as long as nobody has written to them: then the system has made a copy of the page. So a range of memory *is* a range
of a file where

- the process's map (``/proc/self/maps``) says that the file is mapped there, privately, and
- none of its pages is a copy (``/proc/self/pagemap``: bit 61 of a page that is present says that it is the file's, bit
  62 that it was swapped out, which only copies are). Where the system does not let us look, the bytes are compared.

Nothing of the file is read for that, unless bytes are compared.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deepoffload.io.safetensors_header import LENGTH_BYTES, header_length
from deepoffload.io.source_files import SourceFiles
from deepoffload.native.aio import PAGE_BYTES

_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class SourceRange:
    """``nbytes`` from ``offset`` on of the source file with this ``number``."""

    number: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Mapping:
    start: int
    end: int
    offset: int
    device: int
    inode: int
    path: str


class MappedOrigins:
    """Answers for one engine.

    Args:
        untouched: whether a range of memory has no copied pages; None: it cannot be known.
    """

    def __init__(self, files: SourceFiles, untouched: Callable[[int, int], bool | None] | None = None) -> None:
        self._files = files
        self._untouched = _untouched if untouched is None else untouched
        self._is_safetensors: dict[int, bool] = {}

    def find(self, address: int, nbytes: int) -> SourceRange | None:
        """Where in a safetensors file ``nbytes`` at ``address`` lie; None where they do not."""
        found = _mapping_at(address)
        if found is None or address + nbytes > found.end or not nbytes:
            return None
        number = self._files.number_of(found.path, found.device, found.inode)
        if number is None or not self._is_one(number):
            return None
        offset = found.offset + address - found.start
        if offset + nbytes > self._files.size_of(number):
            return None
        untouched = self._untouched(address, nbytes)
        if untouched is None:
            untouched = self._same_bytes(number, offset, address, nbytes)
        return SourceRange(number, offset, nbytes) if untouched else None

    def range_in(self, path: str, status: os.stat_result, offset: int, nbytes: int) -> SourceRange | None:
        """``nbytes`` from ``offset`` on of the file at ``path``, which was a safetensors file when it had ``status``;
        None where it is another one by now, or has changed."""
        number = self._files.number_as(path, status)
        return None if number is None else SourceRange(number, offset, nbytes)

    def _is_one(self, number: int) -> bool:
        """Whether a file begins as a safetensors file does: the length of its header, and JSON."""
        if number not in self._is_safetensors:
            begin = self._files.read_at(number, 0, LENGTH_BYTES + 1)
            try:
                length = header_length(begin, self._files.size_of(number))
            except ValueError:
                length = 0
            self._is_safetensors[number] = length > 0 and begin[LENGTH_BYTES:] == b"{"
        return self._is_safetensors[number]

    def _same_bytes(self, number: int, offset: int, address: int, nbytes: int) -> bool:
        for start in range(0, nbytes, _COMPARED_BYTES):
            length = min(_COMPARED_BYTES, nbytes - start)
            if self._files.read_at(number, offset + start, length) != ctypes.string_at(address + start, length):
                return False
        return True


def _mapping_at(address: int) -> _Mapping | None:
    """The private mapping of a file that holds an address."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            lines = maps.read().splitlines()
    except OSError:
        return None
    low, high = 0, len(lines)
    while low < high:  # by address
        middle = (low + high) // 2
        if int(lines[middle].partition(b"-")[2].partition(b" ")[0], 16) <= address:
            low = middle + 1
        else:
            high = middle
    if low == len(lines):
        return None
    fields = lines[low].split(maxsplit=5)
    start, end = (int(part, 16) for part in fields[0].split(b"-"))
    if not start <= address < end or len(fields) < 6 or fields[1][3:4] != b"p" or not int(fields[4]):
        return None
    major, minor = (int(part, 16) for part in fields[3].split(b":"))
    return _Mapping(start, end, int(fields[2], 16), os.makedev(major, minor), int(fields[4]), os.fsdecode(fields[5]))


def _untouched(address: int, nbytes: int) -> bool | None:
    """Whether none of the pages of a private mapping is a copy."""
    first, last = address // PAGE_BYTES, (address + nbytes - 1) // PAGE_BYTES
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = os.pread(pagemap.fileno(), 8 * (last - first + 1), 8 * first)
    except OSError:
        return None
    if len(entries) != 8 * (last - first + 1):
        return None
    pages = np.frombuffer(entries, np.uint64)
    copied = (pages & _SWAPPED != 0) | ((pages & _PRESENT != 0) & (pages & _OF_FILE == 0))
    return not bool(copied.any())
