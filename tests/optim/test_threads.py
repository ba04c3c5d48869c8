"""Native passes of the optimizers run on torch's number of threads, within what the process may use."""

from __future__ import annotations

import subprocess
import sys

import torch

from deepoffload.optim.threads import num_threads


def test_torchs_number_of_threads_counts() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert 1 <= num_threads() <= before


def test_no_more_threads_than_cores_that_may_be_used() -> None:
    code = """
import os, torch
torch.set_num_threads(4)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from deepoffload.optim.threads import num_threads
print(torch.get_num_threads(), num_threads())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["4", "1"]
