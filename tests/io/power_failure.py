"""A disk whose power fails: what was written and not synced is lost, torn at 512 bytes, or arrives in another order.

:class:`JournalEngine` is the real engine. It also notes what is written to each file, and when a file is synced. From
these notes :func:`images_after` makes what a power failure may leave at any moment.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
from collections.abc import Iterable
from typing import Any

from deepoffload.io.engine import WRITE, IoEngine, IoFile
from deepoffload.io.ticket import Ticket
from deepoffload.native.aio import ffi, round_up

SECTOR_BYTES = 512


@dataclasses.dataclass(eq=False)
class Event:
    """A write (``data``), or a sync of a file and the writes that were done before it."""

    path: str
    offset: int = 0
    data: bytes = b""
    ticket: Ticket | None = None
    synced: list[Event] | None = None


class JournalEngine(IoEngine):
    """Notes writes when they are submitted, and syncs when they have returned."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.events: list[Event] = []
        self.note_syncs = True

    def open_file(self, path: Any, **options: Any) -> IoFile:
        file = super().open_file(path, **options)
        return JournalFile(**{field.name: getattr(file, field.name) for field in dataclasses.fields(file)})

    def submit_one(
        self, operation: int, file: IoFile, address: int, nbytes: int, offset: int, flags: int, sums: Any = ffi.NULL
    ) -> Ticket:
        data = ctypes.string_at(address, round_up(nbytes)) if operation == WRITE else b""
        ticket = super().submit_one(operation, file, address, nbytes, offset, flags, sums)
        if data:
            self.events.append(Event(file.path, offset, data, ticket))
        return ticket

    def submit(
        self, operation: int, segments: Any, count: int, nbytes: int, flags: int, files: Any, sums: Any = ffi.NULL
    ) -> Ticket:
        paths = {file.file_id: file.path for file in files}
        parts = [
            (paths[segments[i].file], int(segments[i].offset), int(segments[i].address), int(segments[i].nbytes))
            for i in range(count)
        ]
        written = [ctypes.string_at(address, round_up(length)) for _, _, address, length in parts]
        ticket = super().submit(operation, segments, count, nbytes, flags, files, sums)
        if operation == WRITE:
            self.events += [Event(part[0], part[1], data, ticket) for part, data in zip(parts, written, strict=True)]
        return ticket


class JournalFile(IoFile):
    """Its syncs are noted."""

    def sync(self) -> None:
        engine = self.engine
        assert isinstance(engine, JournalEngine)
        done = [e for e in engine.events if e.path == self.path and e.ticket is not None and e.ticket.done()]
        super().sync()
        if engine.note_syncs:
            engine.events.append(Event(self.path, synced=done))


def images_after(events: Iterable[Event], sizes: dict[str, int], dice: random.Random) -> dict[str, bytearray]:
    """What each file may hold after these events and a power failure."""
    images = {path: bytearray(nbytes) for path, nbytes in sizes.items()}
    loose: dict[str, list[Event]] = {path: [] for path in sizes}
    for event in events:
        if event.synced is None:
            loose[event.path].append(event)
            continue
        for write in event.synced:
            if write in loose[event.path]:
                images[event.path][write.offset : write.offset + len(write.data)] = write.data
                loose[event.path].remove(write)
    for path, writes in loose.items():
        keep = dice.choice((0.0, 0.5, 0.9, 1.0))
        if dice.random() < 0.5:
            dice.shuffle(writes)
        for write in writes:
            for at in range(0, len(write.data), SECTOR_BYTES):
                if dice.random() < keep:
                    sector = write.data[at : at + SECTOR_BYTES]
                    images[path][write.offset + at : write.offset + at + SECTOR_BYTES] = sector
    return images
