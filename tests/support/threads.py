"""Threads of this process that the native code started."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

GONE_WITHIN_S = 10.0


def native_threads() -> list[str]:
    """Their names."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ends while we look
            names.append((task / "comm").read_text().strip())
    return [name for name in names if name.startswith("doff")]


def native_threads_left(allowed: int = 0) -> list[str]:
    """Those that do not end. The kernel may list a thread for a moment after somebody has joined it."""
    until = time.monotonic() + GONE_WITHIN_S
    while len(left := native_threads()) > allowed and time.monotonic() < until:
        time.sleep(0.01)
    return left if len(left) > allowed else []
