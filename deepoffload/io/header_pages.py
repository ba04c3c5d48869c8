"""The pages in front of the extents of a swap file that outlives its process: who uses it, what it belongs to, records.

Page 0 says who uses the file now, page 1 which files belong together, pages 2 and 3 are the two places of the record
(of the first path's file only).
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from deepoffload.io.checksums import crc32c_of
from deepoffload.io.engine import PADDED, READ, WRITE, IoEngine, IoFile
from deepoffload.native.aio import PAGE_BYTES, HostMapping

OWNER_PAGE, MARK_PAGE, SLOT_PAGES = 0, 1, (2, 3)
HEADER_BYTES = 4 * PAGE_BYTES
FORMAT_VERSION = 1

_MARK_MAGIC = b"deepoffload mark"
_MARK = struct.Struct("<16sII16sII")
_SUM = struct.Struct("<I")


def read_at(engine: IoEngine, file: IoFile, offset: int, nbytes: int) -> bytes:
    """Bytes of a file; ``offset`` is a multiple of 4096.

    Raises:
        IoFailure: they cannot be read.
    """
    with HostMapping(nbytes) as memory:
        engine.submit_one(READ, file, memory.address, nbytes, offset, PADDED).wait()
        return bytes(memory.buffer[:nbytes])


def write_at(engine: IoEngine, file: IoFile, offset: int, data: bytes) -> None:
    """Put bytes into a file and wait until they are written; a power failure may still lose them. The page behind the
    last byte is filled with zeros.

    Raises:
        IoFailure: they cannot be written; nobody knows what lies there then.
    """
    with HostMapping(len(data)) as memory:
        memory.buffer[: len(data)] = data
        engine.submit_one(WRITE, file, memory.address, len(data), offset, PADDED).wait()


def sealed(content: bytes) -> bytes:
    """A page that ends with the checksum of what is before."""
    page = content.ljust(PAGE_BYTES - _SUM.size, b"\0")
    return page + _SUM.pack(crc32c_of(page))


def unsealed(page: bytes) -> bytes | None:
    """What :func:`sealed` was given, with zeros behind it; None for anything else."""
    content = page[: PAGE_BYTES - _SUM.size]
    right = len(page) == PAGE_BYTES and _SUM.unpack(page[-_SUM.size :])[0] == crc32c_of(content)
    return content if right else None


@dataclass(frozen=True)
class Mark:
    """Which file of a store this is.

    Attributes:
        store: what all its files have in common; 16 random bytes.
        paths: the directories of all of them, in order, at the time when they were made.
    """

    store: bytes
    index: int
    paths: tuple[str, ...]

    def page(self) -> bytes:
        """As it lies in the file. Paths that are too long for a page are cut: they are for people."""
        head = _MARK.pack(_MARK_MAGIC, FORMAT_VERSION, self.index, self.store, len(self.paths), 0)
        names = "\0".join(self.paths).encode("utf-8", "surrogateescape")
        return sealed(head + names[: PAGE_BYTES - len(head) - 2 * _SUM.size])

    @classmethod
    def of(cls, page: bytes) -> Mark | None:
        """None where there is none."""
        content = unsealed(page)
        if content is None or not content.startswith(_MARK_MAGIC):
            return None
        _, version, index, store, count, _ = _MARK.unpack_from(content)
        names = content[_MARK.size :].rstrip(b"\0").decode("utf-8", "replace").split("\0")
        paths = (*names, *["?"] * count)[: min(count, PAGE_BYTES)]
        return cls(store, index, paths) if version == FORMAT_VERSION else None


def owner_page() -> bytes:
    """Says that this process uses the file."""
    said = {"host": socket.gethostname()[:200], "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    return json.dumps(said).encode().ljust(PAGE_BYTES, b"\0")


def says_owner(page: bytes) -> bool:
    """Whether a page is what :func:`owner_page` makes."""
    return _said_by(page) is not None


def owner_of(page: bytes) -> str:
    """Who uses a file, or used it last, for people."""
    said = _said_by(page)
    return "another process" if said is None else f"process {said[1]} on {said[0]} (since {said[2]})"


def pid_on_this_host(page: bytes) -> int | None:
    """The process that uses a file, or used it last; None where it is on another host, or unknown."""
    said = _said_by(page)
    return said[1] if said is not None and said[0] == socket.gethostname()[:200] else None


def _said_by(page: bytes) -> tuple[str, int, str] | None:
    try:
        said: Any = json.loads(page.rstrip(b"\0").decode("utf-8"))
        return str(said["host"])[:200], int(said["pid"]), str(said["since"])[:40]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
