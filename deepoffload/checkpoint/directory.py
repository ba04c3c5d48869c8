"""A save appears whole or not at all: files are written next to their place and moved when all are on the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence

from deepoffload.checkpoint.safetensors_file import failure
from deepoffload.checkpoint.shards import INDEX_NAME, WEIGHTS_NAME, is_weight_file
from deepoffload.config.units import format_bytes
from deepoffload.errors import IoFailure, UsageError
from deepoffload.machine import disk_space

log = logging.getLogger("deepoffload")

STAGING_PREFIX = ".deepoffload-save-"


def prepare(directory: str, needed_bytes: int, who: str = "save_pretrained") -> str | None:
    """Check, before anything is written, that ``directory`` can take the files; make it when it is not there.

    Returns:
        The first folder on the way to it that was not there before.

    Raises:
        UsageError: not a directory, not writable. IoFailure: not enough space.
    """
    if os.path.exists(directory) and not os.path.isdir(directory):
        raise UsageError(f"{who}: {directory!r} is a file; give a directory")
    if os.path.islink(directory) and not os.path.exists(directory):
        raise UsageError(f"{who}: {directory!r} is a link that leads nowhere; give a directory")
    there, missing = directory, []
    while not os.path.lexists(there):
        missing.append(there)
        there = os.path.dirname(there)
    made = missing[-1] if missing else None
    if made is not None:
        _refuse_without_room(there, needed_bytes)
    try:
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
    except OSError as error:
        raise UsageError(
            f"{who}: {directory!r} cannot be made ({error.strerror}); give a directory in a writable place"
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{who}: {directory!r} is not writable by this user; give another directory")
    _remove_leftovers(directory)
    if made is None:
        _refuse_without_room(directory, needed_bytes)
    return made


def _refuse_without_room(directory: str, needed_bytes: int) -> None:
    if not os.path.isdir(directory):
        return
    free = disk_space(directory).free_bytes
    if free < needed_bytes:
        remedy = (
            f"{format_bytes(free)} are free; free some space or save to another directory. Nothing has been written"
        )
        raise IoFailure("reserving space to save", errno.ENOSPC, directory, 0, needed_bytes, remedy)


@contextlib.contextmanager
def staging(directory: str, made: str | None = None) -> Iterator[str]:
    """A directory next to the final place, removed with everything in it when the context ends, however it ends; but
    not by a forked child.

    Args:
        made: what :func:`prepare` has returned; after a failure it is removed again.

    Raises:
        IoFailure: it cannot be made.
    """
    process = os.getpid()
    path = lock = None
    try:
        path = tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=directory)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another process then knows that this save is alive
    except OSError as error:
        if lock is not None:
            os.close(lock)
        if path is not None:
            _remove_empty(path, path)
        _remove_empty(directory, made)
        raise failure("making a directory", error, directory, 0) from error
    failed = True
    try:
        yield path
        failed = False
    finally:
        if os.getpid() == process:
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
        if failed and os.getpid() == process:
            _remove_empty(directory, made)


def _remove_empty(directory: str, made: str | None) -> None:
    """Remove folders without contents, from ``directory`` up to ``made``."""
    with contextlib.suppress(OSError):
        while made is not None:
            os.rmdir(directory)
            directory, made = os.path.dirname(directory), None if directory == made else made


def publish(staged: str, directory: str) -> None:
    """Move every staged file to its place, so that at no moment new and old shards can be read as one model.

    Raises:
        IoFailure: a file could not be moved.
    """
    try:
        names = sorted(os.listdir(staged))
        if INDEX_NAME in names:
            _unlink(os.path.join(directory, INDEX_NAME))  # an old index must never name new shards
        for name in sorted(names, key=_publishing_order):
            os.replace(os.path.join(staged, name), os.path.join(directory, name))
        for name in os.listdir(directory):
            if is_weight_file(name) and name not in names:
                _unlink(os.path.join(directory, name))
        sync_directory(directory)
    except IoFailure:
        raise
    except OSError as error:
        raise failure("moving files into place", error, error.filename or directory, 0) from error


def _publishing_order(name: str) -> tuple[int, str]:
    order: Sequence[str] = (WEIGHTS_NAME, INDEX_NAME)
    return (order.index(name) + 1 if name in order else 0, name)


def sync_file(path: str) -> None:
    """Put a file that somebody else has written on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: str) -> None:
    """Put the names in a directory on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _remove_leftovers(directory: str) -> None:
    """Staging directories of saves that were killed: nobody holds their lock."""
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if not name.startswith(STAGING_PREFIX) or not os.path.isdir(path):
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            log.info("%s, which an earlier save has left, stays: %s", path, error)  # or its own process removes it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # of a save that is under way
        except OSError as error:
            log.info("%s, which an earlier save has left, stays: %s", path, error)
        finally:
            os.close(descriptor)
