"""What durable states a directory holds, for people. Nothing is changed, and a run that uses one is not disturbed."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from deepoffload.checkpoint.values import parse_json
from deepoffload.config.units import format_bytes
from deepoffload.errors import IoFailure, UsageError
from deepoffload.io.durable_store import newest_slot, read_body
from deepoffload.io.engine import IoEngine
from deepoffload.io.header_pages import HEADER_BYTES, MARK_PAGE, Mark, owner_of, read_at
from deepoffload.io.named_files import NAME, refuse_cut_off
from deepoffload.native.aio import PAGE_BYTES


@dataclass(frozen=True)
class DurableFile:
    """A file of a durable state.

    Attributes:
        text: what it holds and who uses it. usable: whether a run can resume from what it holds, or begin there.
    """

    name: str
    text: str
    usable: bool


def durable_states(directory: str | os.PathLike[str]) -> list[DurableFile]:
    """The files of durable states in ``directory``; none where there is none.

    Raises:
        UsageError: the directory cannot be read.
    """
    try:
        found = sorted(Path(directory).glob(NAME.format("*")))
    except OSError as error:
        raise UsageError(f"{os.fspath(directory)} cannot be read: {error.strerror}") from error
    if not found:
        return []
    with IoEngine(backend="pool", queue_depth=1) as io:
        return [_looked_at(io, path) for path in found]


def _looked_at(io: IoEngine, path: Path) -> DurableFile:
    try:
        ordinary = stat.S_ISREG(path.lstat().st_mode)
    except OSError as error:
        return DurableFile(path.name, f"cannot be read: {error.strerror}", usable=False)
    if not ordinary:
        return DurableFile(path.name, "no ordinary file", usable=False)
    text, usable = _described(io, path)
    return DurableFile(path.name, f"{text}; {_use(path)}", usable)


def _described(io: IoEngine, path: Path) -> tuple[str, bool]:
    """What a file holds, and whether that can be used."""
    try:
        if path.stat().st_size < HEADER_BYTES:
            refuse_cut_off(str(path))
            return "no durable step", True
        file = io.open_file(path, readonly=True)
        mark = Mark.of(read_at(io, file, MARK_PAGE * PAGE_BYTES, PAGE_BYTES))
        if mark is not None and mark.index:
            return f"part {mark.index + 1} of {len(mark.paths)} of the durable state in {mark.paths[0]}", True
        _, slot = newest_slot(io, file)
        if slot is None:
            return "no durable step", True
        directories = mark.paths if mark is not None and slot.files > 1 else (str(path.parent),)
        others = [io.open_file(Path(other) / path.name, readonly=True) for other in directories[1:]]
        step = read_body(io, [file, *others], slot)
        said = parse_json(step.content, str(path))
        tensors = sum(map(len, said["tensors"].values()))
        nbytes = sum(part.nbytes for stored in step.extents for part in stored.extent.pieces)
        where = f" on {len(directories)} paths ({', '.join(directories)})" if len(directories) > 1 else ""
        rank = f" of rank {said['ranks'][0]} of {said['ranks'][1]}" if "ranks" in said else ""
        return f"durable step {step.step}{rank}, {tensors} tensors, {format_bytes(nbytes)}{where}", True
    except (UsageError, IoFailure, OSError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"cannot be used: {error}", False


def _use(path: Path) -> str:
    """Who uses a file now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            owner = owner_of(file.read(PAGE_BYTES) or b"")
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return f"in use by {owner}"
    except OSError as error:
        return f"cannot be read: {error}"
    return f"last used by {owner}"
