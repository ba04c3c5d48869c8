"""A line that says what is being measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

Report = Callable[..., None]
"""Called with what is done now, and perhaps how much of how much is done."""

EVERY_S = 1.0
"""How often the line changes within one measurement."""


class MeasuringProgress:
    """Call it with what goes on now. On a terminal there is one line, which is cleared at the end; elsewhere each is a
    separate line."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._said_at = float("-inf")
        self._said = ""

    def __enter__(self) -> MeasuringProgress:
        return self

    def __call__(self, what: str, done: int = 0, of: int = 0) -> None:
        now = time.monotonic()
        if what == self._said and now < self._said_at + EVERY_S and done < of:
            return
        text = f"measuring: {what}" + (f" ({done} of {of})" if of else "")
        self._stream.write(f"\r\x1b[K{text}" if self._stream.isatty() else f"{text}\n")
        self._stream.flush()
        self._said, self._said_at = what, now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._said and self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def silent(what: str, done: int = 0, of: int = 0) -> None:
    """No progress is shown."""
