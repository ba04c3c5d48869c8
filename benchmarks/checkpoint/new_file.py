"""How fast the file system takes a file that is new, compared with one that was written before.

The disk's rate is measured in files that were written before. A save makes new ones, and ext4 notes for each extent of
them that it is written now (fs/ext4/extents.c, "unwritten extents"): no save can have more than this share of the rate.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from pathlib import Path

from deepoffload.io.engine import IoEngine
from deepoffload.io.ticket import Ticket
from deepoffload.native.aio import HostMapping

BLOCK_BYTES = 1 << 20
IN_FLIGHT = 24
"""As a save has it (``deepoffload.checkpoint.block_writer``)."""
AGAIN = 2


def new_file_share(path: Path, nbytes: int) -> float:
    """The rate of writing and syncing a new file of ``nbytes`` in ``path``, as a share of the same over again."""
    file = path / "new-file"
    with HostMapping(IN_FLIGHT * BLOCK_BYTES) as memory, IoEngine(block_bytes=BLOCK_BYTES) as io:
        ctypes.memset(memory.address, 1, memory.nbytes)
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            new_s = _write(io, file, memory.address, nbytes)
            return min(_write(io, file, memory.address, nbytes) for _ in range(AGAIN)) / new_s
        finally:
            file.unlink(missing_ok=True)


def _write(io: IoEngine, path: Path, address: int, nbytes: int) -> float:
    """Seconds."""
    file = io.open_file(str(path))
    flying: deque[Ticket] = deque()
    try:
        started = time.perf_counter()
        file.grow(nbytes)
        for number in range(nbytes // BLOCK_BYTES):
            if len(flying) == IN_FLIGHT:
                flying.popleft().wait()
            at = address + number % IN_FLIGHT * BLOCK_BYTES
            flying.append(io.write(file, at, BLOCK_BYTES, number * BLOCK_BYTES))
        while flying:
            flying.popleft().wait()
        file.sync()
        return time.perf_counter() - started
    finally:
        while flying:
            flying.popleft().wait()
        file.close()
