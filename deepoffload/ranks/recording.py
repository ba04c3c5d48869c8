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
        unit_name: what people are told of a unit.
    """

    def __init__(self, timeline: Timeline | None, unit_name: Callable[[int], str]) -> None:
        self._timeline = timeline
        self._unit_name = unit_name
        self._entered_s = 0.0

    def words(self, want: Want) -> str:
        """What people are told of a want."""
        words = want.kind.name.lower()
        return f"{words} of {self._unit_name(want.unit)}" if want.kind in NAMED else words

    def enters(self) -> None:
        """This rank enters a round."""
        self._entered_s = time.perf_counter()

    def round_over(self, said: Want, slowest: int, lost_s: float) -> None:
        """The round is over. ``lost_s``: of that, what this rank has waited for rank ``slowest``."""
        if self._timeline is not None:
            now = time.perf_counter()
            self._timeline.add(Lane.ROUND, self.words(said), self._entered_s, now)
            if lost_s > 0.0:
                self._timeline.add(Lane.SLOWEST, f"rank {slowest}", now - lost_s, now)

    def reduced(self, want: Want, launched_s: float) -> None:
        """What was launched then has landed."""
        if self._timeline is not None:
            self._timeline.add(Lane.REDUCE, self._unit_name(want.unit), launched_s, time.perf_counter())

    def waited(self, want: Want, begin_s: float) -> None:
        """The program has stood still since then."""
        if self._timeline is not None:
            what = f"other ranks, {want.kind.name.lower()}: {self.words(want)}"
            self._timeline.add(Lane.WAIT, what, begin_s, time.perf_counter())
