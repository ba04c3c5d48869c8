"""Swap files that outlive their process: one per path, under a name, locked by the run that uses them."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence

from deepoffload.errors import ConfigError, IoFailure, UsageError
from deepoffload.io.engine import IoEngine, IoFile
from deepoffload.io.header_pages import (
    HEADER_BYTES,
    OWNER_PAGE,
    owner_of,
    owner_page,
    pid_on_this_host,
    read_at,
    says_owner,
    unsealed,
    write_at,
)
from deepoffload.machine import in_memory
from deepoffload.native.aio import PAGE_BYTES

NAME = "deepoffload-rank{}.durable"
"""Nothing that clears away swap files of dead runs looks for it (``swap_files.reclaim_stale``)."""

_OPEN_ATTEMPTS = 8
_CHILDREN_END_S = 10.0
_CHILD_POLL_S = 0.05
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def durable_path(directory: str, rank: int | None = None) -> str:
    """The file of a rank in a directory: of this one when not said, as its launcher counts."""
    return os.path.join(directory, NAME.format(os.environ.get("RANK", "0") if rank is None else rank))


def open_named_files(engine: IoEngine, paths: Sequence[str], direct: str, rank: int | None = None) -> list[IoFile]:
    """Open the file of each path, locked; one that is not there is made, with nothing but its header.

    Args:
        rank: as :func:`durable_path` has it.

    Raises:
        UsageError: another process uses one of them; says which. Or one was cut off, holds something else, or is not
            this user's alone.
        ConfigError: a path is in memory, its file system has no locks, or nothing can be created there.
    """
    for path in paths:
        if in_memory(path):
            raise ConfigError(
                f"durability: {path} is in memory (tmpfs), where nothing survives a power failure; name a directory on "
                "a disk with durability.path or nvme_path"
            )
    files: list[IoFile] = []
    try:
        for path in paths:
            files.append(_open(engine, durable_path(path, rank), direct))
            if files[-1].size_at_open < HEADER_BYTES:
                refuse_cut_off(files[-1].path)
                files[-1].grow(HEADER_BYTES)
                sync_directory(path)
            else:
                _refuse_strange(engine, files[-1])
            write_at(engine, files[-1], OWNER_PAGE * PAGE_BYTES, owner_page())
    except BaseException:
        for file in files:
            with contextlib.suppress(OSError):
                file.close()
        raise
    return files


def refuse_cut_off(path: str) -> None:
    """Raise for a file shorter than a header that holds anything: ours get their header before anything is written.

    Raises:
        UsageError: it was cut off. IoFailure: it cannot be read.
    """
    content = first_bytes(path, HEADER_BYTES)
    if any(content):
        raise UsageError(
            f"durability: {path} has {len(content)} bytes: it was cut off, or is no file of deepoffload's. Resume from "
            "a checkpoint; remove the file to begin here"
        )


def _refuse_strange(engine: IoEngine, file: IoFile) -> None:
    """Raise for a file in which nothing is ours, before anything is written to it. One with a damaged page is ours."""
    header = read_at(engine, file, 0, HEADER_BYTES)
    pages = [header[at : at + PAGE_BYTES] for at in range(0, HEADER_BYTES, PAGE_BYTES)]
    if any(header) and not says_owner(pages[OWNER_PAGE]) and not any(unsealed(page) for page in pages):
        raise UsageError(
            f"durability: {file.path} is no file of deepoffload's; move it away, or name another directory with "
            "durability.path"
        )


def first_bytes(path: str, nbytes: int) -> bytes:
    """Up to so many bytes from the beginning of an ordinary file; follows no link, and waits for no pipe.

    Raises:
        IoFailure: it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read(nbytes) or b""
    except OSError as error:
        raise IoFailure("reading", error.errno or 0, path, 0, nbytes) from error


def _open(engine: IoEngine, path: str, direct: str) -> IoFile:
    until, attempt = time.monotonic() + _CHILDREN_END_S, 0
    while attempt < _OPEN_ATTEMPTS:
        create = attempt % 2 == 1
        try:
            return engine.open_file(path, create=create, lock=True, own=True, direct=direct)
        except IoFailure as failure:
            if failure.errno == errno.EWOULDBLOCK:
                if _is_gone(path) and time.monotonic() < until:
                    time.sleep(_CHILD_POLL_S)
                    continue
                raise UsageError(
                    f"durability: {path} is used by {_owner(path)}; end that run, or name another directory with "
                    "durability.path"
                ) from failure
            if failure.errno == (errno.EEXIST if create else errno.ENOENT):
                attempt += 1  # somebody made or removed it meanwhile, or it is not there yet
                continue
            if failure.errno in _NO_LOCKS:
                raise ConfigError(
                    f"durability: {os.path.dirname(path)} is on a file system without locks ({failure.strerror}), so "
                    "two runs could write to one state; name a directory on a local disk with durability.path"
                ) from failure
            if failure.errno == errno.EPERM:
                raise UsageError(
                    f"durability: {path} belongs to another user, can be written to by everybody, or has a second name "
                    "(a hard link): somebody else can change it. Name a directory of your own with durability.path, or "
                    "remove the file"
                ) from failure
            raise ConfigError(f"durability: {path} cannot be opened: {failure.strerror}") from failure
    raise ConfigError(f"durability: {path}: other processes keep making and removing it")


def _owner(path: str) -> str:
    return owner_of(_owner_page(path))


def _is_gone(path: str) -> bool:
    """Whether the process that locked a file is dead: what it forked (workers of a loader) keeps the lock for the
    moment that it takes to notice."""
    pid = pid_on_this_host(_owner_page(path))
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _owner_page(path: str) -> bytes:
    try:
        return first_bytes(path, PAGE_BYTES)
    except IoFailure:
        return b""


def sync_directory(directory: str) -> None:
    """Put the names in a directory on the disk.

    Raises:
        IoFailure: it cannot be opened or written.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise IoFailure("sync", error.errno or 0, directory, 0, 0) from error
