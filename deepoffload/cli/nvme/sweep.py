"""The sweep: all settings once, the good ones again in turns, within a time limit."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import psutil

from deepoffload.cli.nvme.data import Buffer
from deepoffload.cli.nvme.files import BenchFile, check_room
from deepoffload.cli.nvme.job import Effort, Job, geometry_of
from deepoffload.cli.nvme.plan import Plan
from deepoffload.cli.nvme.types import Pattern, Result, Sample, Setting
from deepoffload.config.units import format_bytes
from deepoffload.errors import ConfigError
from deepoffload.native.aio import HostMapping

FILL_SHARE, FIRST_ROUND_SHARE, VERIFY_SHARE = 0.2, 0.5, 0.05
MEASURE_MIN_S, MEASURE_MAX_S, REPEAT_MIN_S = 0.08, 1.0, 0.25
WARMUP_SHARE = 0.25
# Opening an engine and files, checking every byte of some transfers.
OVERHEAD_S = 0.03
MEMORY_SHARE_MAX = 0.5
HUGE_PAGE_SHARE_MIN = 0.9
VERIFY_BYTES = 8 << 20


@dataclass
class Findings:
    """What was measured so far; complete or not."""

    samples: dict[tuple[Setting, Pattern], list[Sample]] = field(default_factory=dict)
    compared_bytes: int = 0
    """Read back and compared byte for byte; the stamps of all pages were compared, too."""
    fill_bytes_per_s: float = 0.0
    huge_page_share: float = 0.0
    """Of the buffers."""
    notes: list[str] = field(default_factory=list)

    def results(self) -> list[Result]:
        """In the order of first measurement."""
        return [Result(setting, pattern, tuple(found)) for (setting, pattern), found in self.samples.items()]

    def complete(self, patterns: Sequence[Pattern]) -> list[Setting]:
        """Settings for which all patterns were measured, the best first (by :func:`score`)."""
        settings = dict.fromkeys(setting for setting, _ in self.samples)
        whole = [setting for setting in settings if all((setting, pattern) in self.samples for pattern in patterns)]
        return sorted(whole, key=lambda setting: -self.score(setting, patterns))

    def score(self, setting: Setting, patterns: Sequence[Pattern]) -> float:
        """Geometric mean of the patterns' median rates, bytes per second."""
        rates = [self.rate(setting, pattern) for pattern in patterns]
        return math.exp(sum(math.log(max(rate, 1e-9)) for rate in rates) / len(rates))

    def rate(self, setting: Setting, pattern: Pattern) -> float:
        """Median bytes per second."""
        return Result(setting, pattern, tuple(self.samples[setting, pattern])).bytes_per_s


class Bench:
    """Test files and memory for a plan, and the measurements on them. Close it, or use it as a context manager.

    Args:
        directories: one set of files on each; all are used at once.
        progress: is told what is going on.
        guests: also make files for another tool to write to, as many and as large.

    Raises:
        BudgetError: the disk has not the room.
        ConfigError: the machine has not the memory.
    """

    def __init__(
        self, plan: Plan, directories: Sequence[str], progress: Callable[[str], None], *, guests: bool = False
    ) -> None:
        self.plan, self.directories = plan, list(directories)
        self.findings = Findings(notes=list(plan.notes))
        self.stop = threading.Event()
        self.progress = progress
        self._stack = ExitStack()
        check_room(self.directories, plan.file_bytes * plan.files_max * (2 if guests else 1))
        memory_bytes = max(geometry_of(setting).memory_bytes for setting in plan.settings)
        available = psutil.virtual_memory().available
        if memory_bytes * len(self.directories) > MEMORY_SHARE_MAX * available:
            raise ConfigError(
                f"--block-size and --queue-depth: {format_bytes(memory_bytes)} of memory per path would be needed for "
                f"the requests in flight, {format_bytes(available)} are available. Give smaller ones."
            )
        try:
            self.memory = [self._stack.enter_context(_painted(memory_bytes)) for _ in self.directories]
            self._look_at_huge_pages()
            self.files = [self._make_files(directory) for directory in self.directories]
            self.guests = [self._make_files(directory) for directory in self.directories] if guests else []
        except BaseException:
            self._stack.close()
            raise

    def job(self, setting: Setting, paths: Sequence[int] | None = None, *, guests: bool = False) -> Job:
        """A job on all paths, or on some (by index); on the other tool's files when ``guests``."""
        chosen = range(len(self.directories)) if paths is None else paths
        files = self.guests if guests else self.files
        return Job(
            setting,
            [files[path][: setting.files] for path in chosen],
            [self.memory[path] for path in chosen],
            self.stop,
        )

    def fill(self, deadline_s: float) -> None:
        """First writes, in the setting that asks for the largest part of a file, so that all settings find enough."""
        self.progress("writing the test files")
        wide = max(self.plan.settings, key=lambda setting: geometry_of(setting).memory_bytes / setting.files)
        largest = Setting(wide.backend, wide.block_bytes, wide.queue_depth, wide.direct, self.plan.files_max)
        with self.job(largest) as job:
            self.findings.fill_bytes_per_s = job.fill(deadline_s)
        filled = min(file.filled_bytes for path_files in self.files for file in path_files)
        if filled < self.plan.file_bytes * 0.99:
            self.findings.notes.append(
                f"this disk is slow: only {format_bytes(filled)} of each file of {format_bytes(self.plan.file_bytes)} "
                "were written in the time and are used"
            )

    def sweep(self, patterns: Sequence[Pattern], repeats: int, warmup: bool, deadline_s: float) -> None:
        """Fills, then measures; ``findings`` grows as it goes."""
        left_s = deadline_s - time.monotonic()
        self.fill(time.monotonic() + FILL_SHARE * left_s)
        share = FIRST_ROUND_SHARE if repeats > 1 else 1.0
        end_s, deadline_s = deadline_s, deadline_s - VERIFY_SHARE * left_s
        left_s = deadline_s - time.monotonic()
        settings, seconds = self._afford(list(self.plan.settings), patterns, left_s * share)
        self._round(settings, patterns, _effort(seconds, warmup), deadline_s)
        for round_index in range(1, repeats):
            left_s = (deadline_s - time.monotonic()) / (repeats - round_index)
            best = self._finalists(patterns, max(1, int(left_s / (len(patterns) * (REPEAT_MIN_S + OVERHEAD_S)))))
            if not best or left_s <= 0:
                break
            seconds = min(MEASURE_MAX_S, left_s / (len(best) * len(patterns)) - OVERHEAD_S)
            # Backwards every other time, so that a drift of the machine does not favour what comes first.
            order = best if round_index % 2 == 0 else best[::-1]
            self._round(order, patterns, _effort(seconds, warmup), deadline_s)
        self._verify_everything(end_s)

    def measure(self, setting: Setting, pattern: Pattern, effort: Effort, paths: Sequence[int] | None = None) -> Sample:
        """One measurement, which is not added to ``findings``."""
        with self.job(setting, paths) as job:
            return job.measure(pattern, effort)

    def close(self) -> None:
        """Gives disk space and memory back. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look_at_huge_pages(self) -> None:
        """The kernel gives them where it may and has them."""
        whole = sum(mapping.nbytes for mapping in self.memory)
        share = sum(mapping.huge_page_bytes() for mapping in self.memory) / whole
        self.findings.huge_page_share = share
        if share < HUGE_PAGE_SHARE_MIN:
            self.findings.notes.append(
                f"only {share:.0%} of the buffers lie on huge pages, which costs bandwidth and CPU time; see "
                "/sys/kernel/mm/transparent_hugepage/enabled (madvise or always) and the free memory"
            )

    def _make_files(self, directory: str) -> list[BenchFile]:
        return [
            self._stack.enter_context(BenchFile(directory, index, self.plan.file_bytes))
            for index in range(self.plan.files_max)
        ]

    def _afford(
        self, settings: list[Setting], patterns: Sequence[Pattern], budget_s: float
    ) -> tuple[list[Setting], float]:
        """As many settings as there is time for, and seconds for each measurement."""
        least_s = MEASURE_MIN_S + OVERHEAD_S
        count = max(1, int(budget_s / (len(patterns) * least_s)))
        if count < len(settings):
            self.findings.notes.append(
                f"{len(settings) - count} of {len(settings)} settings were not measured for want of time; "
                "give a larger --time-limit or name fewer"
            )
            settings = settings[:count]
        seconds = budget_s / (len(settings) * len(patterns)) - OVERHEAD_S
        return settings, min(MEASURE_MAX_S, max(MEASURE_MIN_S, seconds))

    def _round(
        self, settings: Sequence[Setting], patterns: Sequence[Pattern], effort: Effort, deadline_s: float
    ) -> None:
        late = 0
        for index, setting in enumerate(settings):
            drain_s = 2 * geometry_of(setting).memory_bytes / max(self.findings.fill_bytes_per_s, 1.0)
            cost_s = len(patterns) * (effort.warmup_s + effort.measure_s + drain_s)
            # The first setting is always measured: there is always a result.
            if self.findings.samples and time.monotonic() + cost_s > deadline_s:
                late += 1
                continue
            with self.job(setting) as job:
                for pattern in patterns:
                    self.progress(f"{index + 1} of {len(settings)}: {setting}: {pattern.value}")
                    sample = job.measure(pattern, effort)
                    self.findings.samples.setdefault((setting, pattern), []).append(sample)
                self.findings.compared_bytes += job.verify(VERIFY_BYTES, deadline_s)
        if late:
            self.findings.notes.append(f"{late} measurements of settings were left out at the end of the time")

    def _finalists(self, patterns: Sequence[Pattern], count: int) -> list[Setting]:
        """The best ``count``, and the best direct one of each backend."""
        ranked = self.findings.complete(patterns)
        chosen = ranked[:count]
        for backend in dict.fromkeys(setting.backend for setting in ranked):
            leader = next((s for s in ranked if s.backend == backend and s.direct), None)
            if leader is not None and leader not in chosen:
                chosen.append(leader)
        return chosen

    def _verify_everything(self, deadline_s: float) -> None:
        self.progress("comparing every byte of the files")
        usual = self.plan.settings[0]
        everything = Setting(usual.backend, usual.block_bytes, usual.queue_depth, usual.direct, self.plan.files_max)
        with self.job(everything) as job:
            self.findings.compared_bytes += job.verify(self.plan.file_bytes, deadline_s)


def _painted(nbytes: int) -> HostMapping:
    mapping = HostMapping(nbytes)
    Buffer(mapping.buffer, mapping.address).paint()
    return mapping


def _effort(seconds: float, warmup: bool) -> Effort:
    """Divides the time of one measurement."""
    return Effort(seconds * WARMUP_SHARE, seconds * (1 - WARMUP_SHARE)) if warmup else Effort(0.0, seconds)
