"""Children that are killed: at which moments, and what each of them has told by then."""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

LIMIT_S = 200.0
"""A child that takes longer is stuck."""

PHASES = ("opens", "resumes", "resumed", "committed")
"""What a child tells: before it opens its files, before and after it takes over what is there, after each commit."""

FIRST_STEPS = 3
"""So many commits still belong to the beginning of a life."""


class Moment(NamedTuple):
    """So many seconds after a child was made, or after its ``nth`` telling of a phase; None: it may live."""

    seconds: float | None
    after: str = ""
    nth: int = 1


class Life(NamedTuple):
    """What a child told, when it told of each phase, and whether it was killed before its end."""

    lines: list[str]
    told_s: dict[str, list[float]]
    killed: bool

    @property
    def phase(self) -> str:
        """The last one that it told of."""
        return next((phase for phase in reversed(PHASES) if phase in self.told_s), "begins")

    @property
    def has_resumed(self) -> bool:
        """Whether there was something to take over, and it has been."""
        return any(line.startswith("resumed") and line != "resumed 0" for line in self.lines)


class Kills:
    """Moments of so many kills: some time after a child was made, or after its first commit."""

    def __init__(self, dice: random.Random, count: int) -> None:
        self.dice = dice
        self.left = count
        self.phases: Counter[str] = Counter()

    def moment(self) -> Moment:
        """For the next child."""
        return self.drawn() if self.left > 0 else Moment(None)

    def drawn(self) -> Moment:
        return Moment(self.dice.uniform(0.0, 0.5), self.dice.choice(("", "committed")))

    def note(self, life: Life) -> None:
        """How a child has ended."""
        if life.killed:
            self.left -= 1
            self.phases[life.phase] += 1


class AfterFirstCommit(Kills):
    """Each child has made at least one commit."""

    def drawn(self) -> Moment:
        return Moment(self.dice.uniform(0.0, 0.05), "committed")


class WhileResuming(Kills):
    """While a child opens its files, takes over what is there, and makes its first steps: at a moment of the least time
    that this has taken in a life that came through it."""

    def __init__(self, dice: random.Random, count: int) -> None:
        super().__init__(dice, count)
        self._lives = 0
        self._least_s: dict[str, float] = {}

    def drawn(self) -> Moment:
        self._lives += 1
        if self._lives % 5 == 1:  # the run goes on, so that there is always another step to resume
            return Moment(self.dice.uniform(0.0, 0.1), "committed", self.dice.randrange(2, 7))
        phase = ("resumes", "opens", "resumes", "resumed")[self._lives % 4]
        return Moment(self.dice.uniform(0.0, self._least_s.get(phase, 0.01)), phase)

    def note(self, life: Life) -> None:
        super().note(life)
        told_s = life.told_s
        if life.has_resumed:
            ends = {"opens": told_s["resumes"][0], "resumes": told_s["resumed"][0]}
            if len(told_s.get("committed", ())) >= FIRST_STEPS:
                ends["resumed"] = told_s["committed"][FIRST_STEPS - 1]
            for phase, end in ends.items():
                took_s = end - told_s[phase][0]
                self._least_s[phase] = min(took_s, self._least_s.get(phase, took_s))


KINDS: dict[str, type[Kills]] = {"any": Kills, "committed": AfterFirstCommit, "resuming": WhileResuming}


class _Child:
    """What a child tells, and its end: the kernel's timer, so that no other process has to run for it."""

    def __init__(self, told: int, moment: Moment) -> None:
        self._told = told
        self._moment = moment
        self._left = moment.nth
        if not moment.after:
            self._set_timer()

    def tell(self, line: str) -> None:
        os.write(self._told, f"{time.monotonic()} {line}\n".encode())
        if self._moment.after and line.split()[0] == self._moment.after:
            self._left -= 1
            if not self._left:
                self._set_timer()

    def _set_timer(self) -> None:
        """SIGKILL at the moment (timer_create(2))."""
        seconds, self._moment = self._moment.seconds, Moment(None)
        if seconds is None:
            return
        libc, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
        event = struct.pack("=Qii48x", 0, signal.SIGKILL, 0)  # sigevent: SIGEV_SIGNAL
        nanoseconds = max(1, int(seconds * 1e9))
        times = struct.pack("=qqqq", 0, 0, nanoseconds // 10**9, nanoseconds % 10**9)
        for code in (
            libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)),
            libc.timer_settime(timer, 0, times, None),
        ):
            assert not code, os.strerror(ctypes.get_errno())


def life_of(body: Callable[[Callable[[str], None]], None], moment: Moment) -> Life:
    """Fork a child that runs ``body`` and is killed at the moment. ``body`` is given a function that tells a line, and
    tells "closed" at its end.

    Raises:
        AssertionError: the child has failed by itself, or is stuck.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            body(_Child(writes, moment).tell)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writes)
    told, stuck = _listen(reads)
    os.close(reads)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    lines: list[str] = []
    told_s: dict[str, list[float]] = {}
    for said in told.decode().splitlines():
        when, _, line = said.partition(" ")
        lines.append(line)
        told_s.setdefault(line.split()[0], []).append(float(when))
    assert not stuck, f"a child is stuck: {lines}"
    assert "closed" in lines or os.WIFSIGNALED(status), f"a child has failed by itself: {lines}"
    return Life(lines, told_s, "closed" not in lines)


def _listen(told: int) -> tuple[bytes, bool]:
    """What a child tells until its end; True if that does not come."""
    lines, until = b"", time.monotonic() + LIMIT_S
    while (left_s := until - time.monotonic()) > 0:
        if select.select([told], [], [], left_s)[0]:
            more = os.read(told, 1 << 16)
            if not more:
                return lines, False
            lines += more
    return lines, True
