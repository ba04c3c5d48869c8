"""What durable states a directory holds, for people. Nothing is changed, and a run that uses one is not disturbed."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from deepoffload.checkpoint.values import parse_json
from deepoffload.config.units import format_bytes
from deepoffload.errors import IoFailure, UsageError
from deepoffload.io.durable_store import newest_slot, read_body
from deepoffload.io.engine import IoEngine
from deepoffload.io.header_pages import HEADER_BYTES, MARK_PAGE, Mark, owner_of, read_at
from deepoffload.io.named_files import NAME
from deepoffload.native.aio import PAGE_BYTES


def durable_states(directory: str | os.PathLike[str]) -> list[str]:
    """A line for each file of a durable state in ``directory``; none where there is none.

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
        return [f"{path.name}: {_line(io, path)}" for path in found]


def _line(io: IoEngine, path: Path) -> str:
    try:
        ordinary = stat.S_ISREG(path.lstat().st_mode)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"{_described(io, path)}; {_use(path)}" if ordinary else "no ordinary file"


def _described(io: IoEngine, path: Path) -> str:
    """What a file holds; a damaged one is said to be so."""
    try:
        if path.stat().st_size < HEADER_BYTES:
            return "no durable step"
        file = io.open_file(path, readonly=True)
        mark = Mark.of(read_at(io, file, MARK_PAGE * PAGE_BYTES, PAGE_BYTES))
        if mark is not None and mark.index:
            return f"part {mark.index + 1} of {len(mark.paths)} of the durable state in {mark.paths[0]}"
        _, slot = newest_slot(io, file)
        if slot is None:
            return "no durable step"
        directories = mark.paths if mark is not None and slot.files > 1 else (str(path.parent),)
        others = [io.open_file(Path(other) / path.name, readonly=True) for other in directories[1:]]
        step = read_body(io, [file, *others], slot)
        said = parse_json(step.content, str(path))
        tensors = sum(map(len, said["tensors"].values()))
        nbytes = sum(part.nbytes for stored in step.extents for part in stored.extent.pieces)
        where = f" on {len(directories)} paths ({', '.join(directories)})" if len(directories) > 1 else ""
        return f"durable step {step.step}, {tensors} tensors, {format_bytes(nbytes)}{where}"
    except (UsageError, IoFailure, OSError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be read: {error}"


def _use(path: Path) -> str:
    """Who uses a file now."""
    try:
        with open(path, "rb") as file:
            owner = owner_of(file.read(PAGE_BYTES))
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return f"in use by {owner}"
    except OSError as error:
        return f"cannot be read: {error}"
    return f"last used by {owner}"
