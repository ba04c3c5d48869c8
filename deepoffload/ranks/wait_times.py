"""How long this rank waits for others: how long it has, for whom, what is usual, and when it is time to nudge them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepoffload.ranks.long_waits import LongWait

NUDGE_AFTER_S = 0.1
"""Nobody is nudged before. A nudge costs an extra round if its rank is only slow."""
NUDGE_AFTER_USUAL = 2.0
"""Nobody is nudged before so many times the longest wait that is usual."""
NUDGE_AFTER_S_MAX = 1.0
"""But nobody waits longer for the first nudge. Next to such a wait, a nudge that was not needed costs little."""
NUDGE_AGAIN_S_MAX = 5.0
"""The longest pause between two nudges of one wait."""
NOT_A_WAIT_S = 0.001
"""What takes less does not count for what is usual."""
_FADES = 0.997
"""What a long wait still counts after each one that follows. A step has some hundred waits, and one of them is often
much longer than the others."""


@dataclass(frozen=True)
class RoundStats:
    """What rounds have cost this rank so far.

    Attributes:
        mixed_rounds: those in which not all ranks said the same.
        nudges: messages that this rank has sent because it had waited longer than is usual.
        answers: rounds in which this rank had nothing to say because its program was elsewhere.
        waited_s: seconds in which it waited, for rounds and for bytes.
        waited_for_s: by rank, how much of this was waiting for a rank that is slower. The rest is what all wait for.
    """

    rounds: int
    mixed_rounds: int
    nudges: int
    answers: int
    waited_s: float
    waited_for_s: tuple[float, ...]


class WaitTimes:
    """The waits of one rank.

    Attributes:
        usual_s: what the longest waits for another rank's program take, as long as it comes by itself.
        waited_s: seconds in which this rank has waited, for rounds and for bytes.
        for_rank_s: by rank, how much longer than that rank this one has waited while that rank waited least of all. So
            it is the time that is lost because ranks are not equally fast; what all wait for, transfers, is not in it.
    """

    def __init__(self, world_size: int) -> None:
        self.usual_s = 0.0
        self.waited_s = 0.0
        self.for_rank_s = [0.0] * world_size
        self._known_us = [0] * world_size

    @property
    def nudge_after_s(self) -> float:
        """How long a wait takes before the others are nudged."""
        return min(max(NUDGE_AFTER_S, NUDGE_AFTER_USUAL * self.usual_s), NUDGE_AFTER_S_MAX)

    def ended(self, seconds: float) -> None:
        """A wait that a nudge could end is over, or would be without the nudge, and took so long."""
        if seconds >= NOT_A_WAIT_S:
            self.usual_s = max(min(seconds, NUDGE_AFTER_S_MAX), _FADES * self.usual_s)

    def round_over(self, rank: int, waited_us: Sequence[int]) -> tuple[int, float]:
        """A round is over. ``rank`` is this one; ``waited_us``: how long each rank had waited, by then, in all.

        Returns:
            The rank that waited least, and how many seconds longer this one has waited.
        """
        newly = [now - known for now, known in zip(waited_us, self._known_us, strict=True)]
        least = min(newly)
        slowest, lost_s = newly.index(least), (newly[rank] - least) * 1e-6
        self.for_rank_s[slowest] += lost_s
        self._known_us = list(waited_us)
        return slowest, lost_s


class Patience:
    """One wait: when to nudge, each time after twice as long. ``now`` is the caller's clock in seconds.

    Attributes:
        long: the line in the log that it may be worth.
    """

    def __init__(self, nudge_after_s: float, now: float) -> None:
        self.started = now
        self.long = LongWait(now)
        self.has_nudged = False
        self._gap_s = nudge_after_s
        self.nudge_at = now + nudge_after_s

    def nudged(self, now: float) -> None:
        """The others have been nudged."""
        self.has_nudged = True
        self._gap_s = min(2 * self._gap_s, NUDGE_AGAIN_S_MAX)
        self.nudge_at = now + self._gap_s
