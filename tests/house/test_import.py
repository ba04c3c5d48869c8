"""Importing deepoffload, with everything it offers, is cheap and drags nothing in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORT_LIMIT_S = 0.15
TRIES = 5
HEAVY = ("transformers", "safetensors", "peft", "psutil", "matplotlib", "rich", "tqdm", "accelerate", "pytest")

TIMED_IMPORT = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import deepoffload
for name in deepoffload.__all__:
    getattr(deepoffload, name)
print(time.perf_counter() - start)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def timed_import() -> tuple[float, set[str]]:
    result = subprocess.run([sys.executable, "-c", TIMED_IMPORT], capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, names = result.stdout.splitlines()
    return float(seconds), set(names.split())


def test_import_adds_little_to_importing_torch():
    # The smallest of several runs: the others measure what else the machine does.
    assert min(timed_import()[0] for _ in range(TRIES)) <= IMPORT_LIMIT_S


def test_import_loads_no_package_that_only_some_need():
    assert not timed_import()[1] & set(HEAVY)
