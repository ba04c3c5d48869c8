"""Notices every access to the files of a directory (inotify(7)), made in any way."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

_ALL_EVENTS = 0xFFF
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16


class FileWatch:
    """A context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor = -1

    def __enter__(self) -> FileWatch:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        added = libc.inotify_add_watch(self._descriptor, os.fsencode(self._directory), _ALL_EVENTS)
        if self._descriptor < 0 or added < 0:
            raise OSError(ctypes.get_errno(), "inotify", str(self._directory))
        return self

    def seen(self) -> list[str]:
        """Names of the files that were opened, read, written, made or removed since the last call; an empty name is the
        directory itself."""
        found = []
        while True:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return found
            at = 0
            while at < len(data):
                *_, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                found.append(data[at : at + length].rstrip(b"\0").decode())
                at += length

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
