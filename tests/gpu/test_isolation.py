"""Tests with the fixture ``simulated_gpu`` run in a child, and their outcomes are reported here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = (Path(__file__).parent / "conftest.py").read_text()
TESTS = """
import ctypes, os, pytest, torch

def test_outside():
    assert not hasattr(torch, "simgpu")
    print("outside in", os.getpid())
    assert False

@pytest.fixture(scope="module")
def maker():
    return os.getpid()

def test_passes(simulated_gpu, maker, tmp_path):
    assert maker == os.getpid()
    assert torch.ones(3, device=simulated_gpu).sum() == 3

def test_same_child(simulated_gpu, maker):
    print("child is", os.getpid())
    assert maker != os.getpid()

@pytest.mark.parametrize("value", [1, 2])
def test_parameters(simulated_gpu, value):
    assert value == 2

def test_skips(simulated_gpu):
    pytest.skip("for a reason")

def test_crashes(simulated_gpu):
    ctypes.string_at(torch.ones(3, device=simulated_gpu).data_ptr(), 1)

def test_after_a_crash(simulated_gpu):
    assert torch.ones(3, device=simulated_gpu).sum() == 3

@pytest.mark.timeout(2)
def test_hangs(simulated_gpu):
    import time
    time.sleep(1000)
"""


def test_outcomes_and_failures_of_children(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_inner.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:xdist", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    outcomes = dict(
        line.split(" - ")[0].split("test_inner.py::")[::-1]
        for line in done.stdout.splitlines()
        if line.startswith(("PASSED", "FAILED")) and "::" in line
    )
    assert {name: outcome.strip() for name, outcome in outcomes.items()} == {
        "test_outside": "FAILED",
        "test_passes": "PASSED",
        "test_same_child": "FAILED",
        "test_parameters[1]": "FAILED",
        "test_parameters[2]": "PASSED",
        "test_crashes": "FAILED",
        "test_after_a_crash": "PASSED",
        "test_hangs": "FAILED",
    }, done.stdout
    for text in ("child is", "assert 1 == 2", "ended with status -11", "in test_crashes", "Timeout", "1 skipped"):
        assert text in done.stdout
