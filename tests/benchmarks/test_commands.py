"""Benchmarks say what they need instead of ending in a traceback."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.cpu_adam.whole", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def test_help_needs_no_peers() -> None:
    done = run("--help")
    assert done.returncode == 0 and "--matrices" in done.stdout, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_a_missing_peer_is_named_with_the_way_to_install_it() -> None:
    done = run()
    assert done.returncode == 2 and "pip install -e '.[bench-peers]'" in done.stderr
    assert "Traceback" not in done.stderr
