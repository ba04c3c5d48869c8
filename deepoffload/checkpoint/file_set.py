"""The large files of one save, each made when something is first written to it.

Where several ranks write them, rank 0 makes them all before the others begin.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from deepoffload.checkpoint.block_pool import BLOCK_BYTES, BlockPool
from deepoffload.checkpoint.block_writer import BlockWriter, FilePart
from deepoffload.checkpoint.file_layout import PlannedFile
from deepoffload.checkpoint.manifest import FileRecord
from deepoffload.io.engine import IoEngine


class FileSet:
    """Files in the folder ``staged``. One thread at a time.

    Args:
        open_io: makes the engine that writes them.
        progress: told the bytes of each block when it is handed to the disk.
        rank: which of several this is; None where this process writes all.
        check: called before each write; what it raises ends the save.
    """

    def __init__(
        self,
        staged: str,
        planned: Sequence[PlannedFile],
        progress: Callable[[int], None],
        open_io: Callable[..., IoEngine],
        rank: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.put_bytes = 0
        self._staged = staged
        self._planned = {file.name: file for file in planned}
        self._progress = progress
        self._open_io = open_io
        self._io: IoEngine | None = None
        self._pool = BlockPool()
        self._writers: dict[str, BlockWriter] = {}
        self._closed = False
        self._rank = rank
        self._check = check
        if rank == 0:
            try:
                for name in self._planned:
                    self._writer(name)
            except BaseException:
                self.close()
                raise

    def put(self, file: str, position: int, address: int, nbytes: int) -> None:
        """Write bytes of memory to a position; they may change when this returns. Raises IoFailure."""
        self._writer(file).put(position, address, nbytes)
        self.put_bytes += nbytes

    def put_tensor(self, file: str, position: int, values: Tensor) -> None:
        """The same of a contiguous tensor on the CPU."""
        if values.nbytes:
            self.put(file, position, values.data_ptr(), values.nbytes)

    def put_headers(self) -> None:
        for file in self._planned.values():
            self._writer(file.name).put_bytes(0, file.header)

    def wait_for_room(self, *, alone: bool) -> None:
        """Return when a block can be handed to the disk without waiting for it. Raises IoFailure. See
        :meth:`BlockWriter.wait_for_room`."""
        for writer in self._writers.values():
            writer.wait_for_room(alone=alone)

    def finish(self) -> dict[str, FileRecord]:
        """All of it is on the disk; the checksums. Raises IoFailure."""
        records = {}
        for name, file in self._planned.items():
            writer = self._writer(name)
            writer.finish()
            records[name] = FileRecord(file.nbytes, writer.sums)
        return records

    def end_part(self) -> dict[str, FilePart]:
        """What this rank has written is on the disk. Raises IoFailure."""
        return {name: writer.end_part() for name, writer in self._writers.items()}

    def adopt(self, rank: int, parts: Mapping[str, FilePart]) -> None:
        """Take over what another rank has written. Raises IoFailure."""
        for name, part in parts.items():
            self._writer(name).adopt(part, self._aside_path(rank, name))

    def close(self) -> None:
        """Wait for what is on its way, and give everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for writer in self._writers.values():
            writer.abandon()
        if self._io is not None:
            self._io.close()
        self._pool.close()

    def _writer(self, name: str) -> BlockWriter:
        if self._closed:
            raise RuntimeError("the files of this save are closed")
        if name not in self._writers:
            if self._io is None:
                self._io = self._open_io(block_bytes=BLOCK_BYTES)
            path, nbytes = os.path.join(self._staged, name), self._planned[name].nbytes
            aside_path = self._aside_path(self._rank, name) if self._rank else None
            self._writers[name] = BlockWriter(
                self._io, self._pool, path, nbytes, self._progress, aside_path, self._check
            )
        return self._writers[name]

    def _aside_path(self, rank: int, name: str) -> str:
        """What a rank has of blocks that other ranks have the rest of; next to the folder that is published."""
        return os.path.join(os.path.dirname(self._staged), f"rank{rank}-{name}")
