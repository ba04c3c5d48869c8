"""Swap files as things on a file system: checking a path, names, creation, and what dead runs left behind."""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import secrets
import stat
import time
import warnings
from collections.abc import Iterable, Sequence

from deepoffload.errors import ConfigError, IoFailure, IoTimeout
from deepoffload.io.engine import IoEngine, IoFile
from deepoffload.machine import disk_space

PREFIX, SUFFIX = "deepoffload-", ".swap"
_CREATE_ATTEMPTS = 8


def check_paths(paths: Sequence[str | os.PathLike[str]], key: str = "nvme_path") -> list[str]:
    """Absolute paths, each an existing directory in which we may create files. Creates nothing.

    Raises:
        ConfigError: Saying which path and what to do.
    """
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    if not paths:
        raise ConfigError(f"{key}: no directory is given; name one on a local disk")
    for path in [os.fspath(path) for path in paths]:
        if not path:
            raise ConfigError(f"{key}: an empty path is given; name a directory on a local disk")
        if "\0" in path:
            raise ConfigError(f"{key}: {path!r} has a zero byte, which no path can have")
    checked = [os.path.realpath(path) for path in paths]
    for path in checked:
        try:
            is_directory = stat.S_ISDIR(os.stat(path).st_mode)
            status = os.statvfs(path)
        except FileNotFoundError:
            raise ConfigError(f"{key}: {path} does not exist; create the directory or name another") from None
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            raise ConfigError(f"{key}: {path} cannot be looked at: {error.strerror} ({name}); name another") from error
        if not is_directory:
            raise ConfigError(f"{key}: {path} is not a directory; name the directory that is to hold the swap file")
        if status.f_flag & os.ST_RDONLY:
            raise ConfigError(f"{key}: {path} is on a file system mounted read-only; name another directory")
        if not status.f_blocks:
            raise ConfigError(
                f"{key}: {path} is on a file system that keeps no files (it has 0 bytes in all, as /proc and /sys); "
                "name a directory on a local disk"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{key}: {path} is not writable for user id {os.geteuid()}; change its mode or name another"
            )
    if len(set(checked)) != len(checked):
        raise ConfigError(f"{key}: the same directory is named twice: {', '.join(map(str, paths))}")
    return checked


def warn_of_shared(paths: Sequence[str], key: str = "nvme_path") -> None:
    """Warns of directories in which others may replace our files: writable for them, without a sticky bit.

    ``key``: of the configuration, that names them.
    """
    for path in paths:
        status = os.stat(path)
        by_group = status.st_mode & stat.S_IWGRP and not _group_of_one(status.st_gid)
        if status.st_mode & stat.S_ISVTX or not (status.st_mode & stat.S_IWOTH or by_group):
            continue
        who = "everybody" if status.st_mode & stat.S_IWOTH else f"every member of group {status.st_gid}"
        warnings.warn(
            f"{key}: {path} can be written to by {who} and has no sticky bit: others can remove and replace what "
            f"this run makes there. Give a directory of your own, or run `chmod +t {path}`.",
            RuntimeWarning,
            stacklevel=2,
        )


def _group_of_one(gid: int) -> bool:
    """Whether it is this user's private group, as most distributions make one of the user's name."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def free_bytes(path: str) -> int:
    """Bytes an ordinary user can still allocate on the file system of ``path``. Raises IoFailure."""
    return disk_space(path).free_bytes


def create_swap_file(engine: IoEngine, directory: str, label: str, direct: str, key: str = "nvme_path") -> IoFile:
    """A new, empty, locked file of this process, already without a name: nothing can leave it behind.

    It never has one where the file system has ``O_TMPFILE``. Elsewhere (on network file systems) a process killed
    between making it and removing its name leaves one page, unlocked, which the next run there reclaims.

    Raises:
        ConfigError: Direct I/O is required and does not work there, or nothing can be created there.
    """
    rank = os.environ.get("RANK", "0")
    for _ in range(_CREATE_ATTEMPTS):
        name = f"{PREFIX}{label}-rank{rank}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        try:
            return engine.open_file(os.path.join(directory, name), create=True, lock=True, unlink=True, direct=direct)
        except IoFailure as failure:
            # Somebody clearing away stale files got hold of ours before we had locked it, or the name exists.
            if failure.errno in (errno.EWOULDBLOCK, errno.EEXIST):
                continue
            direct_failed = direct == "required" and failure.errno in (errno.EINVAL, errno.EOPNOTSUPP)
            remedy = (
                "direct I/O is required and does not work there" if direct_failed else "no swap file can be created"
            )
            raise ConfigError(f"{key}: {directory}: {remedy}: {failure.strerror}") from failure
    raise ConfigError(f"{key}: {directory}: other processes keep locking or removing our new files")


def reclaim_stale(directory: str) -> list[str]:
    """Removes swap files of runs that died before they could; returns their paths.

    A file that somebody holds locked belongs to a live run and is never touched. Other users' files are not, either.
    """
    removed = []
    for entry in _entries(directory):
        try:
            descriptor = os.open(entry, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours, there = os.fstat(descriptor), os.lstat(entry)
            if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino) and ours.st_uid == os.geteuid():
                os.unlink(entry)
                removed.append(entry)
        except OSError:
            pass  # locked by a live run, or gone meanwhile
        finally:
            os.close(descriptor)
    return removed


def _entries(directory: str) -> Iterable[str]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX):
                if stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                    yield entry.path


def buffered_warning(path: str, file: IoFile) -> str:
    """What is said where transfers of a file go through the page cache."""
    name = errno.errorcode.get(file.direct_errno, str(file.direct_errno))
    return (
        f"{path}: O_DIRECT does not work there ({name}: {os.strerror(file.direct_errno)}); transfers go through the "
        "page cache, which costs memory and CPU time. A directory on a local ext4 or xfs disk avoids that."
    )


def close_files(files: list[IoFile], timeout_s: float) -> None:
    """Closes all that can be closed within ``timeout_s`` in all; the others stay in ``files``, and the first of their
    errors is raised."""
    until = time.monotonic() + timeout_s
    problem: IoTimeout | None = None
    for file in list(files):
        try:
            file.close(max(0.0, until - time.monotonic()))
        except IoTimeout as error:
            problem = problem or error
        else:
            files.remove(file)
    if problem is not None:
        raise problem
