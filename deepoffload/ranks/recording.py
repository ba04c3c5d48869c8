"""What the timeline has of rounds: how long each took, the reductions that they led to, and who was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from deepoffload.ranks.rounds import NAMED, Want
from deepoffload.timeline import Lane, Timeline


class RankRecorder:
    """Records for one rank.

    Args:
        timeline: None where nothing is recorded.
        name_of: what people call what a want is of.
    """

    def __init__(self, timeline: Timeline | None, name_of: Callable[[Want], str]) -> None:
        self._timeline = timeline
        self._name_of = name_of
        self._entered_s = 0.0

    def enters(self) -> None:
        """This rank enters a round."""
        self._entered_s = time.perf_counter()

    def round_over(self, said: Want, slowest: int, lost_s: float) -> None:
        """The round is over. ``lost_s``: of that, what this rank has waited for rank ``slowest``."""
        if self._timeline is not None:
            now = time.perf_counter()
            self._timeline.add(Lane.ROUND, self._words(said), self._entered_s, now)
            if lost_s > 0.0:
                self._timeline.add(Lane.SLOWEST, f"rank {slowest}", now - lost_s, now)

    def reduced(self, want: Want, launched_s: float) -> None:
        """What was launched then has landed."""
        if self._timeline is not None:
            self._timeline.add(Lane.REDUCE, self._name_of(want), launched_s, time.perf_counter())

    def waited(self, want: Want, begin_s: float) -> None:
        """The program has stood still since then."""
        if self._timeline is not None:
            what = f"other ranks, {want.kind.name.lower()}: {self._words(want)}"
            self._timeline.add(Lane.WAIT, what, begin_s, time.perf_counter())

    def _words(self, want: Want) -> str:
        words = want.kind.name.lower()
        return f"{words} of {self._name_of(want)}" if want.kind in NAMED else words
