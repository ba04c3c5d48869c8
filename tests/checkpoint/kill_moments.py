"""Children that are killed: at which moments, and what each of them has told by then."""

from __future__ import annotations

import os
import random
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

LIMIT_S = 60.0
"""A child that takes longer is stuck."""

PHASES = ("opens", "resumes", "resumed", "committed")
"""What a child tells: before it opens its files, before and after it takes over what is there, after each commit."""

FIRST_STEPS = 3
"""So many commits still belong to the beginning of a life."""


class Moment(NamedTuple):
    """So many seconds after a child was made, or after it has told of a phase first; None: it may live."""

    seconds: float | None
    after: str = ""


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
    """While a child opens its files, takes over what is there, and makes its first steps: at a moment of the time that
    this took in the last life that came through it."""

    def __init__(self, dice: random.Random, count: int) -> None:
        super().__init__(dice, count)
        self._lives = 0
        self._took_s = {"opens": 0.2, "resumes": 0.05, "resumed": 0.1}

    def drawn(self) -> Moment:
        self._lives += 1
        if self._lives % 5 == 1:  # the run goes on, so that there is always another step to resume
            return Moment(self.dice.uniform(0.0, 0.3), "committed")
        phase = tuple(self._took_s)[self._lives % 3]
        return Moment(self.dice.uniform(0.0, self._took_s[phase]), phase)

    def note(self, life: Life) -> None:
        super().note(life)
        if not life.has_resumed:
            return
        told_s = life.told_s
        self._took_s["opens"] = told_s["resumes"][0] - told_s["opens"][0]
        self._took_s["resumes"] = told_s["resumed"][0] - told_s["resumes"][0]
        if len(told_s.get("committed", ())) >= FIRST_STEPS:
            self._took_s["resumed"] = told_s["committed"][FIRST_STEPS - 1] - told_s["resumed"][0]


KINDS: dict[str, type[Kills]] = {"any": Kills, "committed": AfterFirstCommit, "resuming": WhileResuming}


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
            body(lambda line: _tell(writes, line))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads, "rb", buffering=0) as told:
        lines, told_s, came = _listen(told.fileno(), moment)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        said = (lines + told.read()).decode().splitlines()
    assert came, f"a child is stuck: {said}"
    assert "closed" in said or os.WIFSIGNALED(status), f"a child has failed by itself: {said}"
    return Life(said, told_s, "closed" not in said)


def _tell(told: int, line: str) -> None:
    os.write(told, (line + "\n").encode())


def _listen(told: int, moment: Moment) -> tuple[bytes, dict[str, list[float]], bool]:
    """What is told until the moment, or until nothing more comes, and when; False if neither came."""
    lines, told_s = b"", dict[str, list[float]]()
    waits = moment.seconds is None or bool(moment.after)
    until = time.monotonic() + (LIMIT_S if waits else moment.seconds or 0.0)
    while True:
        left_s = until - time.monotonic()
        if left_s <= 0:
            return lines, told_s, not waits
        if not select.select([told], [], [], left_s)[0]:
            continue
        more = os.read(told, 1 << 16)
        if not more:
            return lines, told_s, True
        lines += more
        for line in more.decode().splitlines():
            told_s.setdefault(line.split()[0], []).append(time.monotonic())
        if waits and moment.after in told_s:
            waits, until = False, time.monotonic() + (moment.seconds or 0.0)
