"""A progress bar on a terminal; nothing elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

BAR_COLUMNS = 24
REFRESH_S = 0.1


class JobProgress:
    """One line that is rewritten. Use as a context manager, so that it is gone at the end.

    Args:
        total_s: about how long everything takes; the bar shows time.
    """

    def __init__(self, total_s: float, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()
        self._start_s = time.monotonic()
        self._total_s = max(total_s, 1e-3)
        self._last_s = 0.0

    def update(self, text: str) -> None:
        """Shows what is being done."""
        now = time.monotonic()
        if not self._shown or now - self._last_s < REFRESH_S:
            return
        self._last_s = now
        passed_s = now - self._start_s
        filled = min(BAR_COLUMNS, int(BAR_COLUMNS * passed_s / self._total_s))
        line = f"[{'#' * filled}{'.' * (BAR_COLUMNS - filled)}] {passed_s:3.0f}/{self._total_s:.0f} s  {text}"
        self._write(line[: shutil.get_terminal_size().columns - 1])

    def __enter__(self) -> JobProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._write("")

    def _write(self, line: str) -> None:
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()
