"""A line in the log where a program waits long for other ranks.

Ranks whose programs have several threads may wait for each other. Until ``ranks.timeout_s`` is over, that looks like
ranks that are slow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from deepoffload.ranks.elsewhere import OURS

log = logging.getLogger("deepoffload")

NOTICE_AFTER_S = 30.0
"""A wait that takes so long is worth a line."""
ANSWERED_AFTER_S = 2.0
"""After that it is written: the others have been asked before, and say where they are."""


def is_ours(thread: threading.Thread) -> bool:
    """Whether it is one of this package."""
    return thread.name.startswith(OURS)


class LongWait:
    """One wait.

    Args:
        started: on the caller's clock in seconds, as all times here.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._next_s = started + NOTICE_AFTER_S
        self._has_asked = False
        self._is_over = is_ours(threading.current_thread())  # nobody waits for that

    def look(self, now: float, ask: Callable[[], None], text: Callable[[], str], timeout_s: float) -> None:
        """To be called now and then. Writes one line, if the wait takes long enough.

        Args:
            ask: the others where they are. Called before.
            text: where which rank waits, and for whom; empty where another rank says that.
            timeout_s: after that the wait ends with an error.
        """
        if self._is_over or now < self._next_s:
            return
        if not self._has_asked:
            self._has_asked, self._next_s = True, now + ANSWERED_AFTER_S
            ask()
            return
        self._is_over = True
        if said := text():
            log.warning(
                "%s, for %.0f s so far (only a notice: who computes is waited for. It is an error after %g s in which "
                "nothing happens, ranks.timeout_s)",
                said,
                now - self._started,
                timeout_s,
            )
