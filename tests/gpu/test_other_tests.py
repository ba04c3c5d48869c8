"""Tests that were written for the CPU as the device, run with the simulated GPU as theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FILES = ("tests/params/test_aliases.py", "tests/activations/test_training.py", "tests/models/test_zoo.py")
CHOSEN = "(aliases or reentrant or T5) and tight"


def test_on_the_simulated_gpu() -> None:
    """In one process, with copies as late as possible and at random moments in turns."""
    for package in ("transformers", "peft"):  # a machine that was lent for its GPU may lack them
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.on_simulated_gpu"]
        + ["-p", "no:xdist", "-p", "no:cacheprovider", *FILES, "-k", CHOSEN],
        cwd=ROOT,
        env=os.environ | {"SIMULATED_GPU_MODE": "late,random"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
