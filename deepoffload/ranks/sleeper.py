"""The thread that sleeps until another rank needs this one."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from deepoffload.ranks.links import LinkError, NudgeLink

ENDS_WITHIN_S = 10.0


class Message(enum.IntEnum):
    """What wakes it."""

    NUDGE = 0
    """Another rank waits for this one to take a round."""
    ALARM = 1
    """Something is wrong: say where this rank is."""
    END = 2
    PROBE = 3
    """Nothing: it cannot be sent to a rank that has gone."""


class Sleeper:
    """It sleeps in C++, in a receive, and is ended by a message to itself. A thread that is still in one when the
    interpreter ends makes it abort.

    Args:
        on_nudge: called in the thread with the number of the round.
        on_alarm: called in the thread.
    """

    def __init__(
        self, link: NudgeLink, rank: int, on_nudge: Callable[[int], None], on_alarm: Callable[[], None]
    ) -> None:
        self._link, self._rank = link, rank
        self._sending = threading.Lock()
        self._on_nudge, self._on_alarm = on_nudge, on_alarm
        self._thread = threading.Thread(target=self._run, name="deepoffload ranks", daemon=True)
        self._thread.start()

    def send(self, rank: int, message: Message, number: int = 0) -> bool:
        """Wake the thread of a rank. Returns False where that rank has gone."""
        with self._sending:
            return self._link.send(rank, (message, number, self._rank, 0))

    def is_current(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.current_thread() is self._thread

    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def end(self) -> None:
        """End the thread and the link."""
        if self._thread.is_alive():
            self.send(self._rank, Message.END)
            self._thread.join(ENDS_WITHIN_S)
        if not self._thread.is_alive():
            self._link.close()

    def _run(self) -> None:
        while True:
            try:
                message, number, _, _ = self._link.receive()
            except LinkError:
                return
            if message == Message.END:
                return
            if message == Message.ALARM:
                self._on_alarm()
            elif message == Message.NUDGE:
                self._on_nudge(number)
