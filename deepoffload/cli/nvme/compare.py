"""The chosen setting through another tool, in turns with our engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepoffload.cli.nvme.fio import find_fio, run_fio
from deepoffload.cli.nvme.job import Effort
from deepoffload.cli.nvme.report import sample_json
from deepoffload.cli.nvme.sweep import Bench
from deepoffload.cli.nvme.types import Pattern, Sample, Setting

ROUNDS_MAX = 3
MEASURE_MIN_S, MEASURE_MAX_S = 0.4, 3.0
# Starting fio and ending it.
FIO_OVERHEAD_S = 0.6
WARMUP_S = 0.3


@dataclass(frozen=True)
class Comparison:
    """The samples of both, round by round."""

    tool: str
    setting: Setting
    pattern: Pattern
    ours: tuple[Sample, ...]
    theirs: tuple[Sample, ...]

    @property
    def ratio(self) -> float:
        """Median over the rounds of our rate divided by theirs."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return statistics.median(ours.bytes_per_s / max(theirs.bytes_per_s, 1.0) for ours, theirs in pairs)

    def __str__(self) -> str:
        ours, theirs = (
            statistics.median(sample.bytes_per_s for sample in side) / 1e6 for side in (self.ours, self.theirs)
        )
        cpu = [statistics.median(s.cpu_s_per_gb for s in side) for side in (self.ours, self.theirs)]
        return (
            f"{self.pattern.value:5}  deepoffload {ours:7.0f} MB/s   {self.tool} {theirs:7.0f} MB/s   ratio "
            f"{self.ratio:.2f}   CPU s/GB {cpu[0]:.3f} and {cpu[1]:.3f}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "tool": self.tool,
            "setting": str(self.setting),
            "pattern": self.pattern.value,
            "ratio": self.ratio,
            "ours": [sample_json(sample) for sample in self.ours],
            "theirs": [sample_json(sample) for sample in self.theirs],
        }


def compare_with_fio(
    bench: Bench, setting: Setting, patterns: Sequence[Pattern], deadline_s: float, warmup: bool
) -> list[Comparison]:
    """Interleaved rounds; fio has its own files next to ours, since what it writes is not checked data.

    Raises:
        UnsupportedError: fio is missing or fails.
    """
    fio = find_fio()
    with bench.job(setting, guests=True) as job:
        job.fill(time.monotonic() + 0.2 * max(0.0, deadline_s - time.monotonic()))
    left_s = max(0.0, deadline_s - time.monotonic())
    warmup_s = WARMUP_S if warmup else 0.0
    least_s = 2 * (warmup_s + MEASURE_MIN_S) + FIO_OVERHEAD_S
    rounds = min(ROUNDS_MAX, max(1, int(left_s / (len(patterns) * least_s))))
    each_s = left_s / (2 * rounds * len(patterns)) - FIO_OVERHEAD_S / 2 - warmup_s
    effort = Effort(warmup_s, min(MEASURE_MAX_S, max(MEASURE_MIN_S, each_s)))
    guests = [file for path_files in bench.guests for file in path_files[: setting.files]]
    found: dict[Pattern, tuple[list[Sample], list[Sample]]] = {pattern: ([], []) for pattern in patterns}
    for _ in range(rounds):
        for pattern in patterns:
            bench.progress(f"fio and deepoffload in turns: {pattern.value}")
            theirs = run_fio(fio, setting, pattern, guests, len(bench.guests), effort)
            found[pattern][0].append(bench.measure(setting, pattern, effort))
            found[pattern][1].append(theirs)
    return [
        Comparison("fio", setting, pattern, tuple(ours), tuple(theirs)) for pattern, (ours, theirs) in found.items()
    ]
