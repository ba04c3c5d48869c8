"""A case in a separate process that is told what to do."""

from __future__ import annotations

import json
import subprocess
import tempfile
from contextlib import ExitStack
from typing import Any

from benchmarks.end_to_end.cases import Case, Work
from benchmarks.end_to_end.meter import MemoryWatch
from benchmarks.end_to_end.runner import ROOT, CaseFailedError, environment

ERROR_CHARACTERS = 2000
END_TIMEOUT_S = 60


class CaseProcess:
    """Runs ``child`` in a folder of its own in ``path``; a context manager.

    Raises:
        CaseFailedError: from the start and from each method, when the process ended with an error.
    """

    def __init__(self, case: Case, work: Work, path: str, python: str) -> None:
        self._case = case
        self._work = work
        self._path = path
        self._python = python
        self._stack = ExitStack()

    def __enter__(self) -> CaseProcess:
        with ExitStack() as stack:
            self._errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self._path))
            self._child = subprocess.Popen(
                [
                    self._python,
                    "-m",
                    "benchmarks.checkpoint.child",
                    json.dumps(self._case.spec(self._work, folder)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=environment(self._work.threads),
                cwd=ROOT,
            )
            stack.callback(self._kill)
            self._memory = stack.enter_context(MemoryWatch(self._child.pid))
            self._answer()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, action: str) -> dict[str, Any]:
        """What an action cost; ``more_bytes`` of memory at its peak than in the time before it."""
        assert self._child.stdin is not None
        before = self._memory.take_peak()
        try:
            print(action, file=self._child.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure() from None
        answer = self._answer()
        return {**answer, "more_bytes": max(0, self._memory.take_peak() - before)}

    def end(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        if self._child.wait(END_TIMEOUT_S):
            raise self._failure()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise self._failure()
        found: dict[str, Any] = json.loads(line)
        return found

    def _failure(self) -> CaseFailedError:
        self._child.wait(END_TIMEOUT_S)
        self._errors.seek(0)
        return CaseFailedError(f"{self._case.name} failed:\n{self._errors.read()[-ERROR_CHARACTERS:]}")

    def _kill(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._child.stdin.close()
        self._child.stdout.close()
