"""The ZIP archives of ``torch.save``: uncompressed records, each with its CRC-32, which is compared before any byte of
the record is used.

The places of the records are taken from the archive's directory, and every length is compared with the file's before
anything is allocated.
"""

from __future__ import annotations

import copy
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from deepoffload.checkpoint.manifest import open_plain
from deepoffload.checkpoint.values import clipped
from deepoffload.errors import IoFailure, UsageError

_DIRECTORY_BYTES_MAX = 24 << 20
_RECORDS_MAX = 200_000
_TAIL_BYTES = (1 << 16) + 22
_HEADER_BYTES = 30
_WINDOW_BYTES = 1 << 20
_END = b"PK\x05\x06"
_END_64 = b"PK\x06\x06"
_LOCAL = b"PK\x03\x04"
_ENTRY = b"PK\x01\x02"
_FULL = 0xFFFFFFFF


class ByteSource:
    """A file, or a part of one. It is open only while it is read: there may be thousands of them.

    Raises:
        UsageError: it is missing, a link, or no ordinary file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.begin = 0
        with self._opened() as descriptor:
            self._identity = _identity(descriptor)
        self.nbytes = self._identity[2]

    def part(self, begin: int, nbytes: int) -> ByteSource:
        """A part of it.

        Raises:
            UsageError: it does not lie in the file.
        """
        if begin < 0 or nbytes < 0 or begin + nbytes > self.nbytes:
            raise UsageError(f"{self.path} has {self.nbytes} bytes; bytes {begin} to {begin + nbytes} are not there")
        made = copy.copy(self)
        made.begin, made.nbytes = self.begin + begin, nbytes
        return made

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes that are there.

        Raises:
            UsageError: the file ends before. IoFailure: it cannot be read.
        """
        if offset < 0 or offset + nbytes > self.nbytes:  # before memory is taken for them
            raise UsageError(f"{self.path} is damaged: it refers to bytes behind its end")
        target = bytearray(nbytes)
        self.read_into(memoryview(target), offset)
        return bytes(target)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill memory with the bytes from ``offset`` on; raises as :meth:`read`."""
        if offset < 0 or offset + len(target) > self.nbytes:
            raise UsageError(f"{self.path} is damaged: it refers to bytes behind its end")
        at = self.begin + offset
        with self._opened() as descriptor:
            if _identity(descriptor) != self._identity:
                raise UsageError(f"{self.path} was changed while it was read; start again")
            while target:
                try:
                    count = os.preadv(descriptor, [target], at)
                except OSError as error:
                    remedy = "Copy the file to another disk if it can be read there"
                    raise IoFailure("reading", error.errno or 0, self.path, at, len(target), remedy) from error
                if not count:
                    raise UsageError(f"{self.path} became shorter while it was read")
                target, at = target[count:], at + count

    @contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = open_plain(self.path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int, int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class ArchiveRecord(NamedTuple):
    """Where the header of a record begins, how many bytes the record has, and their CRC-32."""

    header: int
    nbytes: int
    crc: int


class Archive:
    """An archive whose directory was read.

    Attributes:
        records: by name.

    Raises:
        UsageError: it is no archive without compression, or damaged.
    """

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.records = _records(source)

    def begin(self, name: str) -> int:
        """Where the bytes of a record begin: behind its header, whose length the header says."""
        record = self.records[name]
        data = self.source.read(record.header, _HEADER_BYTES)
        if data[:4] != _LOCAL:
            raise UsageError(f"{self.source.path} is damaged: a record of it has no header")
        name_bytes, extra_bytes = struct.unpack_from("<HH", data, 26)
        return int(record.header + _HEADER_BYTES + name_bytes + extra_bytes)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """A small record.

        Raises:
            UsageError: it is larger than ``limit_bytes``, or its checksum is wrong.
        """
        record = self.records[name]
        if record.nbytes > limit_bytes:
            raise UsageError(f"{self.source.path}: {name} has {record.nbytes} bytes; at most {limit_bytes} are read")
        data = self.source.read(self.begin(name), record.nbytes)
        if not _is_right(zlib.crc32(data), record.crc):
            raise damaged(self.source, name)
        return data


def is_intact(source: ByteSource, begin: int, record: ArchiveRecord) -> bool:
    """Whether the bytes of a record, which begin at ``begin``, have its checksum. Reads them window by window."""
    window = memoryview(bytearray(min(record.nbytes, _WINDOW_BYTES)))
    crc = 0
    for at in range(0, record.nbytes, _WINDOW_BYTES):
        part = window[: min(_WINDOW_BYTES, record.nbytes - at)]
        source.read_into(part, begin + at)
        crc = zlib.crc32(part, crc)
    return _is_right(crc, record.crc)


def _is_right(crc: int, expected: int) -> bool:
    return expected in (crc, 0)  # 0: torch.serialization.set_crc32_options(False) writes none


def damaged(source: ByteSource, entry: str, tensor: str = "") -> UsageError:
    """The error for a record whose checksum is wrong.

    Args:
        tensor: what lies in it.
    """
    whose = f"the tensor {clipped(tensor)}, its entry" if tensor else "its entry"
    return UsageError(
        f"{source.path} is damaged: {whose} {clipped(entry)!r}, has other bytes than its checksum (CRC-32) says; copy "
        "the file again, or use another checkpoint"
    )


def _records(source: ByteSource) -> dict[str, ArchiveRecord]:
    begin, nbytes, count = _directory(source)
    if nbytes > _DIRECTORY_BYTES_MAX or count > _RECORDS_MAX:
        raise UsageError(f"{source.path} has {count} records; at most {_RECORDS_MAX} are read")
    data = source.read(begin, nbytes)
    found: dict[str, ArchiveRecord] = {}
    at = 0
    try:
        for _ in range(count):
            if data[at : at + 4] != _ENTRY:
                raise ValueError("an entry of its directory is none")
            method, crc, packed, size, name_bytes, extra_bytes, comment_bytes, header = struct.unpack_from(
                "<10xH4xIIIHHH8xI", data, at
            )
            name = data[at + 46 : at + 46 + name_bytes].decode()
            extra = data[at + 46 + name_bytes : at + 46 + name_bytes + extra_bytes]
            size, packed, header = _wide(extra, size, packed, header)
            if method != 0 or packed != size:
                raise ValueError("a record is compressed")
            if name in found or header + size > source.nbytes:
                raise ValueError(f"the record {name[:80]!r} is there twice, or ends behind the file")
            found[name] = ArchiveRecord(header, size, crc)
            at += 46 + name_bytes + extra_bytes + comment_bytes
        _refuse_overlaps(found)
    except (struct.error, ValueError) as error:
        raise UsageError(f"{source.path} is damaged, or no file of torch.save ({error})") from None
    return found


def _refuse_overlaps(records: Mapping[str, ArchiveRecord]) -> None:
    """Bytes of several records would be read several times."""
    end = 0
    for record in sorted(records.values()):
        if record.header < end:
            raise ValueError("two of its records overlap")
        end = record.header + _HEADER_BYTES + record.nbytes


def _wide(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """The numbers that do not fit into 32 bits."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            wide = at + 4
            if size == _FULL:
                (size,), wide = struct.unpack_from("<Q", extra, wide), wide + 8
            if packed == _FULL:
                (packed,), wide = struct.unpack_from("<Q", extra, wide), wide + 8
            if header == _FULL:
                (header,) = struct.unpack_from("<Q", extra, wide)
            break
        at += 4 + length
    return size, packed, header


def _directory(source: ByteSource) -> tuple[int, int, int]:
    """Where the archive's directory begins, its bytes, and how many entries it has."""
    tail_bytes = min(source.nbytes, _TAIL_BYTES)
    tail = source.read(source.nbytes - tail_bytes, tail_bytes)
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < 22:
        old = source.nbytes > 2 and source.read(0, 2) == b"\x80\x02"
        hint = ": it has torch's format from before version 1.6; load it there and save it again" if old else ""
        raise UsageError(f"{source.path} is no file of torch.save{hint or ', or was cut off'}")
    count, nbytes, begin = struct.unpack_from("<HII", tail, at + 10)
    if count == 0xFFFF or nbytes == _FULL or begin == _FULL:
        if at < 20:
            raise UsageError(f"{source.path} is damaged: its directory is missing")
        (end_64,) = struct.unpack_from("<Q", tail, at - 20 + 8)
        data = source.read(end_64, 56)
        if data[:4] != _END_64:
            raise UsageError(f"{source.path} is damaged: its directory is missing")
        count, nbytes, begin = struct.unpack_from("<QQQ", data, 32)
    return begin, nbytes, count
