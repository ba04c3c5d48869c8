"""Tests that were written for the CPU as the device, run with the simulated GPU as theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RUNS = {
    "aliases and activations": (
        "late",
        [
            "tests/params/test_aliases.py",
            "tests/activations/test_training.py",
            "-k",
            "(aliases or reentrant) and tight",
        ],
    ),
    "transformers": ("random", ["tests/models/test_zoo.py", "-k", "T5 and tight"]),
}
"""Order of copies, and which tests."""


@pytest.mark.parametrize("name", RUNS)
def test_on_the_simulated_gpu(name: str) -> None:
    mode, chosen = RUNS[name]
    if name == "transformers":  # a machine that was lent for its GPU may lack them
        for package in ("transformers", "peft"):
            pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.on_simulated_gpu"]
        + ["-p", "no:xdist", "-p", "no:cacheprovider", *chosen],
        cwd=ROOT,
        env=os.environ | {"SIMULATED_GPU_MODE": mode},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
