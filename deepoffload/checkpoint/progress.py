"""Tells in the log how far a save or a load has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from deepoffload.config.units import format_bytes

log = logging.getLogger("deepoffload")

PROGRESS_INTERVAL_S = 10.0


class Progress:
    """A line in the log every few seconds, and one at the end.

    Args:
        action, done: what the two kinds of lines begin with, such as ``"saving to DIR"`` and ``"saved to DIR"``.
    """

    def __init__(self, total_bytes: int, action: str, done: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_bytes = total_bytes
        self.action = action
        self.done_text = done
        self.clock = clock
        self.moved_bytes = 0
        self.started = self.said = clock()

    def advance(self, nbytes: int) -> None:
        self.moved_bytes += nbytes
        now = self.clock()
        if now - self.said >= PROGRESS_INTERVAL_S:
            self.said = now
            share = self.moved_bytes / max(1, self.total_bytes)
            log.info("%s: %s, %.0f %%", self.action, format_bytes(self.moved_bytes), 100 * share)

    def done(self) -> None:
        """All is there."""
        seconds = max(self.clock() - self.started, 1e-9)
        rate = format_bytes(int(self.moved_bytes / seconds))
        log.info("%s: %.1f s, %s/s", self.done_text, seconds, rate)
