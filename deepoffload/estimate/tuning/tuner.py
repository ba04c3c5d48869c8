"""Compares all candidates by the cost model, times the operators of the better ones, and runs the best two."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepoffload.config.tools import AutotuningConfig
from deepoffload.config.units import format_bytes
from deepoffload.device import Tier
from deepoffload.estimate.progress import Report, silent
from deepoffload.estimate.tuning.candidates import Candidate, Choices
from deepoffload.estimate.tuning.choice import (
    CandidateRow,
    Measurement,
    Prediction,
    micro_batches_to_run,
    next_to_run,
    ranked,
)
from deepoffload.estimate.tuning.measured import StepsRun, run_steps
from deepoffload.estimate.tuning.prediction import CostModel
from deepoffload.estimate.tuning.table import in_order
from deepoffload.estimate.tuning.written import settings_to_run

TIMED = 8
"""Candidates whose operators are timed: the best by usual rates."""
RUN_S = 30.0
"""About how long the steps of one run take at most; of more micro-batches only some are run."""
RETRY_S = 90.0
"""For so long others are tried in the place of those that failed."""
LIMIT_S, LIMIT_FACTOR = 60.0, 4.0
"""A run is ended after so many seconds, and so many times what is predicted."""


@dataclass
class Tuner:
    """``base``: the configuration as it was given. ``runs``: how many candidates are run; 0: none.
    ``memory_bytes``: what a run may take; None: what the machine of the model has."""

    model: CostModel
    choices: Choices
    base: Mapping[str, Any]
    said: AutotuningConfig
    runs: int = 2
    progress: Report = silent
    timed: int = TIMED
    memory_bytes: int | None = None
    run: Callable[..., StepsRun] = run_steps

    def rows(self) -> tuple[CandidateRow, ...]:
        """All candidates, the best first, with what was measured of those that were run."""
        found = self._predicted()
        if self.runs and self.model.machine.ranks == 1:
            self.model.times_operators = True
            for place, each in enumerate(ranked(list(found.values()))[: self.timed]):
                self.progress("predictions with timed operators", place + 1, self.timed)
                found[each.candidate] = self.model.predict(each.candidate)
        rows = {candidate: CandidateRow(each) for candidate, each in found.items()}
        for candidate, measurement in self._measured(self._to_run(list(found.values()))).items():
            rows[candidate] = rows[candidate].measured(measurement)
        return in_order(list(rows.values()))

    def _predicted(self) -> dict[Candidate, Prediction]:
        """Activations leave for NVMe only where memory is short: where the same candidate does not fit without, or not
        everything of the model stays in memory."""
        found: dict[Candidate, Prediction] = {}
        everything = self.choices.candidates()
        for place, candidate in enumerate(everything):
            self.progress("predictions", place + 1, len(everything))
            stays = found.get(replace(candidate, offload_activations=None))
            short = stays is None or stays.problem or stays.nvme_bytes
            if candidate.offload_activations is not Tier.NVME or short:
                found[candidate] = self.model.predict(candidate)
        return found

    def _to_run(self, found: list[Prediction]) -> list[Prediction]:
        """The best first; with timed operators, those alone that have them, which others cannot be compared with."""
        order = ranked(found)
        timed = [each for each in order if each.measured_operators]
        return timed or order

    def _measured(self, order: list[Prediction]) -> dict[Candidate, Measurement]:
        """Runs until enough have come to their end, twice as many were tried, or there is no time to try more."""
        found: dict[Candidate, Measurement] = {}
        end = time.monotonic() + RETRY_S
        while len(found) < 2 * self.runs and sum(not each.problem for each in found.values()) < self.runs:
            following = next_to_run(order, list(found))
            if following is None or (len(found) >= self.runs and time.monotonic() > end):
                break
            found[following.candidate] = self.measure(following, len(found) + 1)
        return found

    def measure(self, found: Prediction, number: int) -> Measurement:
        """Run some steps of a candidate, as the run with this number."""
        candidate, said = found.candidate, self.said
        steps = said.end_profile_step
        accumulation, part_s = self._part(found, steps)
        task = {
            "model": self.model.form.as_json(),
            "config": settings_to_run(self.base, found, accumulation),
            "micro_batch": candidate.micro_batch,
            "checkpointing": candidate.checkpointing,
            "tiled_loss": candidate.tiled_loss,
            "steps": steps,
        }
        limit_s = LIMIT_S + LIMIT_FACTOR * steps * part_s
        run = self.run(task, steps, limit_s, lambda what, *count: self.progress(f"run {number}, {what}", *count))
        timed = run.seconds[said.start_profile_step - 1 :] or run.seconds[-1:]  # these of a run that was ended
        problem = run.problem
        most = self.memory_bytes or self.model.machine.host_memory_bytes
        if not problem and run.peak_bytes > most:
            problem = f"it took {format_bytes(run.peak_bytes)} of memory, of which {format_bytes(most)} may be used"
        if problem:
            return Measurement(peak_bytes=run.peak_bytes, accumulation=accumulation, steps=len(timed), problem=problem)
        seconds = statistics.median(timed) * found.seconds / part_s
        return Measurement(seconds, run.peak_bytes, accumulation, len(timed))

    def _part(self, found: Prediction, steps: int) -> tuple[int, float]:
        """How many micro-batches a step of the run has, and what is predicted for it."""
        candidate = found.candidate
        count, least = candidate.accumulation, 2 if candidate.is_vertical else 1
        if count <= least or found.seconds * steps <= RUN_S:
            return count, found.seconds
        part = micro_batches_to_run(self._with_count(found, least), found.seconds, least, count, RUN_S / steps)
        return part, self._with_count(found, part)

    def _with_count(self, found: Prediction, count: int) -> float:
        """Seconds of a step with fewer micro-batches."""
        fewer = self.model.predict(replace(found.candidate, accumulation=count))
        return fewer.seconds or found.seconds * count / found.candidate.accumulation
