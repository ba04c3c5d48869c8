"""Runs with durable steps that are killed: none loses what it was promised, all end as if undisturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.training import ALL

ROOT = Path(__file__).parents[2]

RUNS = [
    # placement, overlap, precision, every, kills, paths
    ("half", "deferred", "bf16", 1, "5", 1),
    ("all", "in_backward", "keep", 2, "4", 2),
]
if ALL:  # 200 kills, over all placements and overlaps
    RUNS = [
        (placement, overlap, precision, every, "17", paths)
        for number, placement in enumerate(("host", "half", "optimizer", "all"))
        for overlap, precision, every, paths in (
            ("deferred", ("bf16", "keep", "fp16", "bf16")[number], 1, 1 + number % 2),
            ("none", ("keep", "bf16", "bf16", "fp16")[number], 1 + number, 1),
            ("in_backward", ("bf16", "keep")[number % 2], 1, 2 - number % 2),
        )
    ]
    RUNS.append(("half", "deferred", "bf16", 1, "+50", 1))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("placement", "overlap", "precision", "every", "kills", "paths"), RUNS)
def test_kills_at_random_moments(
    placement: str, overlap: str, precision: str, every: int, kills: str, paths: int, tmp_path: Path
) -> None:
    arguments = [str(tmp_path), placement, overlap, precision, str(every), kills, str(paths)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.durable_runs", *arguments],
        capture_output=True,
        text=True,
        timeout=1100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"killed {kills} times" in done.stdout
