"""What was measured once, kept in the user's cache directory: one JSON file for each measurement.

Only what this user has written, and nobody else can write to, is believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("deepoffload")

MAX_AGE_S = 30 * 86400.0
"""Older measurements are taken again."""
FILE_BYTES_MAX = 64 << 10
RATE_MAX = 1e15
MEASURED_AT = "measured_at_unix_s"
"""Every file says under this name when it was measured."""


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/deepoffload``, by default ``~/.cache/deepoffload`` (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "deepoffload"


def kept_file(kind: str, key: str) -> Path:
    """Where a measurement is kept. ``kind``: what is measured. ``key``: of what, in any words."""
    return cache_directory() / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def kept(file: Path, what: str, check: Callable[[dict[str, Any]], None], rates: tuple[str, ...]) -> dict[str, Any]:
    """What was stored there in the last 30 days; nothing where there is no such file, or one that cannot be ours, which
    is logged.

    Args:
        what: is measured again then.
        check: raises ValueError where the values are not those that we store. ``rates`` are the names of those that are
            positive numbers, which are checked before; ``MEASURED_AT`` is always one.
    """
    try:
        found = _read(file, rates)
        check(found)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, OverflowError, RecursionError) as reason:
        log.warning("%s is ignored, and %s is measured again: %s", file, what, reason)
        return {}
    return found if 0 <= time.time() - found[MEASURED_AT] < MAX_AGE_S else {}


def has_names(found: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ValueError where a file has other names than we give."""
    if set(found) != set(names):
        raise ValueError("it has other fields than ours")


def _read(file: Path, rates: tuple[str, ...]) -> dict[str, Any]:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a plain file")
        if status.st_uid != os.geteuid():
            raise ValueError(f"it belongs to user id {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("others may write to it")
        text = opened.read(FILE_BYTES_MAX + 1)
    if len(text) > FILE_BYTES_MAX:
        raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
    found = json.loads(text)
    if not isinstance(found, dict) or not {MEASURED_AT, *rates} <= set(found):
        raise ValueError("it has other fields than ours")
    for name in (MEASURED_AT, *rates):
        if type(found[name]) not in (int, float) or not 0 < found[name] <= RATE_MAX:
            raise ValueError(f"{name} is {str(found[name])[:40]}, not a number that can be")
        found[name] = float(found[name])
    return found


def write_kept(file: Path, values: Mapping[str, Any]) -> bool:
    """Keep a measurement in the place of what is there. Atomically: a reader sees the old file or the new one.

    Returns:
        Whether it could be written: not where the directory is read-only or not this user's.
    """
    try:
        _make_private(file.parent)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as written:
            json.dump(values, written, indent=1)
        os.replace(written.name, file)
        _forget_old(file)
    except OSError:
        return False
    return True


def _make_private(directory: Path) -> None:
    """A directory of our own, for nobody else. ``PermissionError`` when it is a link or another user's."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{directory} belongs to user id {status.st_uid}")
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def _forget_old(like: Path) -> None:
    """Remove what is of the same kind and too old to be used: everything that was ever measured has left a file."""
    kind = like.name.partition("-")[0]
    for file in like.parent.glob(f"{kind}-*.json"):
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            if time.time() - file.lstat().st_mtime > MAX_AGE_S:
                file.unlink()
