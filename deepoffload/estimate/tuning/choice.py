"""Which candidates are run, and which one is taken: pure functions of predictions and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepoffload.estimate.tuning.candidates import Candidate

MEMORY_SHARE = 0.95
"""Of the memory that may be used, for what is predicted: predictions of peaks are some hundredths off."""

WORTH_PER_CHANGE = 0.01
"""What each change of the program has to save of a step, or it is left out."""


@dataclass(frozen=True)
class Prediction:
    """What the cost model says of a candidate. Seconds and disk bytes are those of one optimizer step; memory is a
    node's. ``problem``: why it cannot be used; then numbers may be 0. ``least_memory_bytes``: with so much memory it
    could be; 0: not known, or memory is not what is missing."""

    candidate: Candidate
    tokens: int
    host_budget_bytes: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    nvme_bytes: int = 0
    moved_bytes: int = 0
    measured_operators: bool = False
    problem: str = ""
    least_memory_bytes: int = 0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens

    @property
    def weighed(self) -> float:
        """Seconds of a step, a little more for each change of the program."""
        return self.seconds * (1 + WORTH_PER_CHANGE * self.candidate.changes)


@dataclass(frozen=True)
class Measurement:
    """What some steps of a candidate took. ``seconds``: of a whole optimizer step, as far as one was run: those of
    ``accumulation`` micro-batches were measured, and the rest is in proportion to the prediction."""

    seconds: float = 0.0
    peak_bytes: int = 0
    accumulation: int = 1
    steps: int = 0
    problem: str = ""


@dataclass(frozen=True)
class CandidateRow:
    """A candidate, what is predicted, and what was measured (None: it was not run)."""

    prediction: Prediction
    measurement: Measurement | None = None

    @property
    def seconds(self) -> float:
        measured = self.measurement
        return measured.seconds if measured is not None and not measured.problem else self.prediction.seconds

    @property
    def problem(self) -> str:
        return self.prediction.problem or (self.measurement.problem if self.measurement is not None else "")

    def measured(self, measurement: Measurement) -> CandidateRow:
        return replace(self, measurement=measurement)


def ranked(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Those that can be used, the best first. Equal ones stay in their order."""
    return sorted((each for each in predictions if not each.problem), key=lambda each: each.weighed)


def next_to_run(order: Sequence[Prediction], done: Sequence[Candidate]) -> Prediction | None:
    """Which of ``order`` (the best first) is run next, after ``done``: the best one; and where all that ran took the
    micro-batches in vertical order, the best in the other order, because the two are predicted in different ways."""
    left = [each for each in order if each.candidate not in done]
    if done and all(candidate.is_vertical for candidate in done):
        left = [each for each in left if not each.candidate.is_vertical] or left
    return left[0] if left else None


def best(rows: Sequence[CandidateRow]) -> CandidateRow | None:
    """The fastest that ran; where none did, the best prediction of those that were not run, of which those with timed
    operators come first: usual rates do not compare with them. None: none can be used."""
    usable = [row for row in rows if not row.problem]
    ran = [row for row in usable if row.measurement is not None]
    if ran:
        return min(ran, key=lambda row: row.seconds)
    return min(usable, key=lambda row: (not row.prediction.measured_operators, row.prediction.weighed), default=None)


def most_frugal(rows: Sequence[CandidateRow]) -> CandidateRow | None:
    """Of those that do not fit, the one that needs the least memory; None: none would fit into more."""
    short = [row for row in rows if row.prediction.problem and row.prediction.least_memory_bytes]
    return min(short, key=lambda row: row.prediction.least_memory_bytes, default=None)


def micro_batches_to_run(least_s: float, whole_s: float, least: int, count: int, room_s: float) -> int:
    """How many of ``count`` micro-batches a step of a run has, so that it takes at most ``room_s``; not fewer than
    ``least``.

    Args:
        least_s, whole_s: predicted seconds of a step with ``least`` and with all; those between are in proportion.
    """
    if count <= least or whole_s <= room_s:
        return count
    if least_s >= room_s or whole_s <= least_s:
        return least
    return min(count, least + int((room_s - least_s) * (count - least) / (whole_s - least_s)))
