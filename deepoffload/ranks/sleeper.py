"""The thread that sleeps until another rank needs this one."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from deepoffload.ranks.collectives import LinkError
from deepoffload.ranks.links import NudgeLink

ENDS_WITHIN_S = 10.0


class Message(enum.IntEnum):
    """What wakes it."""

    NUDGE = 0
    """Another rank waits for this one to take a round."""
    RECEIVED = 1
    """Another rank has received a nudge, so it can be sent another one."""
    ALARM = 2
    """Something is wrong: say where this rank is. Sent once."""
    ALARMED = 3
    """The answer to an alarm: this rank is alive."""
    END = 4


class Sleeper:
    """It sleeps in C++, in a receive, and is ended by a message to itself. A thread that is still in one when the
    interpreter ends makes it abort.

    Args:
        on_nudge: called in the thread with the number of the round.
        on_alarm: called in the thread.
    """

    def __init__(
        self,
        link: NudgeLink,
        rank: int,
        world_size: int,
        on_nudge: Callable[[int], None],
        on_alarm: Callable[[], None],
    ) -> None:
        self._link, self._rank = link, rank
        self._on_nudge, self._on_alarm = on_nudge, on_alarm
        self._lock = threading.Lock()
        self._under_way = [-1] * world_size  # the round of the nudge that another rank has not received yet
        self._wanted = [-1] * world_size  # the last round that somebody has waited for
        self._alarmed: set[int] = set()  # ranks that have been sent an alarm
        self._answered: set[int] = set()  # those that have heard it
        self._thread = threading.Thread(target=self._run, name="deepoffload ranks", daemon=True)
        self._thread.start()

    def nudge(self, rank: int, number: int) -> bool:
        """Another rank must take round ``number``. Returns False where it has gone."""
        with self._lock:
            self._wanted[rank] = number
            if self._under_way[rank] >= 0:
                return self._link.reaches(rank)
            self._under_way[rank] = number
            return self._link.send(rank, (Message.NUDGE, number, self._rank, 0))

    def alarm(self, rank: int) -> bool:
        """Another rank must say where it is. Returns False where it has gone."""
        with self._lock:
            if rank in self._alarmed:
                return self._link.reaches(rank)
            self._alarmed.add(rank)
            return self._link.send(rank, (Message.ALARM, 0, self._rank, 0))

    def is_alarmed(self, rank: int) -> bool:
        """Whether another rank has heard the alarm, so it is alive."""
        return rank in self._answered

    def reaches(self, rank: int) -> bool:
        """Whether another rank has not gone."""
        with self._lock:
            return self._link.reaches(rank)

    def is_current(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.current_thread() is self._thread

    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def end(self, *, stays_connected: bool) -> None:
        """End the thread and the link. ``stays_connected``: others see the end of this process by it."""
        if self._thread.is_alive():
            with self._lock:
                self._link.send(self._rank, (Message.END, 0, self._rank, 0))
            self._thread.join(ENDS_WITHIN_S)
        if not self._thread.is_alive():
            with self._lock:
                self._link.close(stays_connected=stays_connected)

    def _run(self) -> None:
        while True:
            try:
                message, number, sender, _ = self._link.receive()
            except LinkError:
                return
            if message == Message.END:
                return
            if message == Message.ALARM:
                with self._lock:
                    self._link.send(sender, (Message.ALARMED, 0, self._rank, 0))
                self._on_alarm()
            elif message == Message.ALARMED:
                self._answered.add(sender)
            elif message == Message.RECEIVED:
                self._received_by(sender)
            else:
                with self._lock:
                    self._link.send(sender, (Message.RECEIVED, number, self._rank, 0))
                self._on_nudge(number)

    def _received_by(self, rank: int) -> None:
        with self._lock:
            old, self._under_way[rank] = self._under_way[rank], -1
            if self._wanted[rank] > old:
                self._under_way[rank] = self._wanted[rank]
                self._link.send(rank, (Message.NUDGE, self._wanted[rank], self._rank, 0))
