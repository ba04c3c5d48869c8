"""Runs one case in a subprocess and collects what it says."""

from __future__ import annotations

import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.end_to_end.cases import Case, Side, Work
from benchmarks.end_to_end.meter import MemoryWatch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STEP_TIMEOUT_S = 600.0
ERROR_LINES = 12


class CaseFailedError(Exception):
    """The subprocess ended with an error, or said nothing for too long."""


@dataclass
class Run:
    """One run of a case. ``steps`` are the lines of :mod:`child` after the warm-up, each with ``peak_bytes``: the
    process's RssAnon + RssShmem at most since the line before. ``stats_start`` are the engine's counters when the first
    of them began. ``foreign_share_max``: steps that met more foreign load count only where no others are left."""

    case: str
    foreign_share_max: float = 1.0
    ready_s: float = 0.0
    finish_s: float = 0.0
    notes: str = ""
    stats_start: dict[str, float] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of all steps, those of the warm-up, too."""

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The undisturbed steps; all where there are none."""
        quiet = [step for step in self.steps if step["foreign_cpu_share"] <= self.foreign_share_max]
        return quiet or self.steps

    def median(self, key: str) -> float:
        return statistics.median(step[key] for step in self.counted)

    @property
    def peak_bytes(self) -> int:
        return max(step["peak_bytes"] for step in self.steps)

    def stat_per_step(self, key: str) -> float:
        """How much a counter of the engine's grew, per step."""
        last = self.steps[-1]["stats"].get(key, 0.0)
        return (last - self.stats_start.get(key, 0.0)) / len(self.steps)


def environment(threads: int) -> dict[str, str]:
    """The same for all: where the benchmarks are, and the number of threads."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}


def end_with_children() -> None:
    """Told to end, a benchmark unwinds, and so ends the process that it measures."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def python_of(case: Case, deepspeed_python: str | None) -> str:
    return deepspeed_python if case.side is Side.DEEPSPEED and deepspeed_python else sys.executable


def run_case(case: Case, work: Work, path: str, python: str, *, timeout_s: float = STEP_TIMEOUT_S) -> Run:
    """Build, warm up, measure.

    Raises:
        CaseFailedError: with the end of what it wrote to stderr.
    """
    command = [python, "-m", "benchmarks.end_to_end.child", json.dumps(case.spec(work, path))]
    run = Run(case.name, work.foreign_share_max)
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(work.threads)
        )
        try:
            with MemoryWatch(child.pid) as memory:
                _collect(child, memory, run, work, timeout_s)
            if child.wait(timeout_s) != 0:
                raise CaseFailedError(f"{case.name} ended with status {child.returncode}:\n{_tail(errors)}")
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise CaseFailedError(f"{case.name} did not go on: {error}\n{_tail(errors)}") from None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            assert child.stdout is not None
            child.stdout.close()
    if len(run.steps) < work.steps:
        raise CaseFailedError(f"{case.name} made {len(run.steps)} of {work.steps} steps")
    return run


def _collect(child: subprocess.Popen[str], memory: MemoryWatch, run: Run, work: Work, timeout_s: float) -> None:
    stats: dict[str, float] = {}
    for line in _lines(child, timeout_s):
        said = json.loads(line)
        peak = memory.take_peak()
        if "ready_s" in said:
            run.ready_s, stats = said["ready_s"], said["stats"]
        elif "step" in said:
            run.losses.append(said["loss"])
            if said["step"] >= work.warmup:
                if not run.steps:
                    run.stats_start = stats
                run.steps.append({**said, "peak_bytes": peak})
            stats = said["stats"]
        else:
            run.finish_s, run.notes = said["finish_s"], said["notes"]


def _lines(child: subprocess.Popen[str], timeout_s: float) -> Any:
    """Lines as they come; ``TimeoutError`` when there is none for ``timeout_s``."""
    found: queue.Queue[str | None] = queue.Queue()

    def read(stream: IO[str]) -> None:
        for line in stream:
            found.put(line)
        found.put(None)

    assert child.stdout is not None
    threading.Thread(target=read, args=(child.stdout,), daemon=True).start()
    while True:
        waiting_since = time.monotonic()
        try:
            line = found.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no line for {time.monotonic() - waiting_since:.0f} s") from None
        if line is None:
            return
        yield line


def _tail(errors: IO[str]) -> str:
    errors.seek(0)
    return "\n".join(errors.read().splitlines()[-ERROR_LINES:])
