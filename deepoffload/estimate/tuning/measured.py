"""Some steps of a candidate, in a separate process, which is watched from here: its memory, its time, its end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from deepoffload.estimate.progress import Report, silent

PROGRAM = "deepoffload.tuned_steps"
"""It builds and trains, with packages that the estimators do not know; so it is started by its name."""
SAMPLE_S = 0.02
"""Between two looks at the memory of the process."""
STEPS_MIN = 2
"""Steps that tell something where there is no time for more: the first one learns the order."""
END_S = 15.0
"""What a process has to end by itself when it is told to."""
_ERROR_LINES = 3


@dataclass
class StepsRun:
    """What a process has said. ``seconds``: of each step. ``problem``: why it has not come to its end."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    problem: str = ""


def run_steps(said: Mapping[str, Any], steps: int, limit_s: float, progress: Report = silent) -> StepsRun:
    """Run ``steps`` steps of what ``said`` describes (see :mod:`deepoffload.tuned_steps`). However this ends, the
    process ends with it.

    Args:
        limit_s: after so many seconds the process is ended; from two complete steps on, they count.
    """
    run = StepsRun()
    with tempfile.TemporaryFile("w+") as errors, _process(errors) as process:
        assert process.stdin is not None and process.stdout is not None
        with process.stdin:
            process.stdin.write(json.dumps(said).encode())
        end, rest = time.monotonic() + limit_s, b""
        progress("starting", 0, steps)
        while True:
            ready, _, _ = select.select([process.stdout], [], [], SAMPLE_S)
            run.peak_bytes = max(run.peak_bytes, _memory_bytes(process.pid))
            if ready:
                read = os.read(process.stdout.fileno(), 1 << 16)
                if not read:
                    break
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    _take(run, json.loads(line))
                progress("step", len(run.seconds), steps)
            elif time.monotonic() > end:
                if len(run.seconds) < STEPS_MIN:
                    run.problem = f"ended after {limit_s:.0f} s, with {len(run.seconds)} of {steps} steps"
                return run
        status = process.wait()
        if not run.problem and (status or len(run.seconds) < steps):
            run.problem = _death(status, errors)
    return run


def _take(run: StepsRun, line: Mapping[str, Any]) -> None:
    if "seconds" in line:
        run.seconds.append(float(line["seconds"]))
    run.problem = line.get("problem", run.problem)


def _death(status: int, errors: IO[str]) -> str:
    if status < 0:
        more = ": out of memory?" if status == -9 else ""
        return f"the process was ended by signal {-status}{more}"
    errors.seek(0)
    said = " | ".join(errors.read().strip().splitlines()[-_ERROR_LINES:])
    return f"the process ended with status {status}: {said}"


@contextmanager
def _process(errors: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    """It ends with this block. Its swap files have no names, so nothing of it is left."""
    root = str(Path(__file__).parents[3])  # however this program found the package, the new one does, too
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-m", PROGRAM],
        stdin=pipe,
        stdout=pipe,
        stderr=errors,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _memory_bytes(pid: int) -> int:
    """RssAnon + RssShmem of a process; 0 when it has gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem") if name in fields)
