"""Real processes for the tests of the runtime, and what they must not leave behind."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import deepoffload
from deepoffload.deepspeed.engine import TrainingEngine
from deepoffload.runtime.engine import Engine
from tests.support.programs import Programs

ROOT = Path(__file__).parents[2]

NOISE = re.compile(
    r"Exception ignored|leaked|Segmentation|Fatal Python error|terminate called|core dumped|corrupt|double free|"
    r"Unraisable|resource_tracker|AddressSanitizer|Warning"
)

STARTED = re.compile(r"^deepoffload: .* parameters; kept in memory: .*\n", re.MULTILINE)
"""What every program says when its model is ready."""


@dataclass(frozen=True)
class Outcome:
    """How a process ended. ``said``: the JSON object that it printed last, or nothing; ``stderr``: without the lines
    that every start gives."""

    code: int
    said: dict[str, Any]
    stdout: str
    stderr: str


@contextmanager
def initialized(**arguments: Any) -> Iterator[TrainingEngine]:
    """What ``initialize`` makes, closed at the end."""
    engine, *_ = deepoffload.initialize(**arguments)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def run_program(nvme_path: Path, tmp_path: Path, programs: Programs) -> Callable[..., Outcome]:
    """Runs ``tests/runtime/<program>.py`` with arguments; the first is a directory for swap files, which must be empty
    afterwards. ``code``: the exit status it must have (None: any). ``fresh``: in a process as a shell starts it,
    not one that is forked when torch is imported."""

    def run(
        program: str, *arguments: object, code: int | None = 0, limit_s: float = 240.0, fresh: bool = False, **more: str
    ) -> Outcome:
        path = ROOT / "tests" / "runtime" / f"{program}.py"
        words = [str(nvme_path), *map(str, arguments)]
        if fresh:
            done = subprocess.run(
                [sys.executable, "-X", "faulthandler", str(path), *words],
                capture_output=True, text=True, timeout=limit_s, cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), **more},
            )  # fmt: skip
        else:
            done = programs.run(path, *words, env=more, cwd=tmp_path, timeout_s=limit_s)
        lines = done.stdout.strip().splitlines()
        said = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        assert code is None or done.returncode == code, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert not NOISE.search(done.stderr), done.stderr
        assert sorted(os.listdir(nvme_path)) == []
        return Outcome(done.returncode, said, done.stdout, STARTED.sub("", done.stderr))

    return run


@pytest.fixture
def no_other_engine() -> None:
    """Engines that earlier tests left open are closed: this test is about what one engine does while it is alone."""
    gc.unfreeze()
    gc.collect()
    engines = [found for found in gc.get_objects() if issubclass(type(found), Engine)]  # isinstance asks each object
    for engine in engines:
        engine.close("another test has ended")
    if engines:
        del engine, engines
        gc.collect()
    gc.freeze()
