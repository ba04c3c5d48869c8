"""System calls that fail, one after the other, in a program that runs in a process of its own (``failing_calls.c``)."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_with_failing_calls(tmp_path: Path, module: str, *arguments: object, timeout_s: float) -> str:
    """What a module prints that is run with ``failing_calls.c`` before libc."""
    return run_before_libc(Path(__file__).with_suffix(".c"), tmp_path, module, *arguments, timeout_s=timeout_s)


def run_before_libc(source: Path, tmp_path: Path, module: str, *arguments: object, timeout_s: float) -> str:
    """What a module prints that is run with a library before libc, made of ``source``; the test is skipped without a C
    compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C compiler {compiler[0]}")
    library = tmp_path / source.with_suffix(".so").name
    subprocess.run([*compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, source, "-ldl"], check=True)
    preloaded = f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()  # a sanitizer comes first
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LD_PRELOAD": preloaded}
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


class FailingCalls:
    """For the program: calls on files below a directory.

    Attributes:
        count: of calls in the last :meth:`one`.
        failed: the name of the one that failed.
    """

    def __init__(self, directory: Path) -> None:
        self.count = 0
        self.failed = ""
        self._directory = os.fsencode(directory)
        self._library = ctypes.CDLL(None)
        self._library.failing_calls_failed.restype = ctypes.c_char_p
        self._library.failing_calls_end.restype = ctypes.c_long
        self._library.failing_calls_begin.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]

    @contextmanager
    def one(self, number: int, code: int) -> Iterator[None]:
        """The call with this number fails with an errno (0: a write writes a half); none does with number 0."""
        self._library.failing_calls_begin(self._directory, number, code)
        try:
            yield
        finally:
            self.count = int(self._library.failing_calls_end())
            self.failed = self._library.failing_calls_failed().decode()
