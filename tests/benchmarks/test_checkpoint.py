"""The benchmark of checkpoints runs, and what it reports is what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.test_end_to_end import ROOT


def test_one_round_of_a_tiny_model(nvme_path: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--path", str(nvme_path), "--size", "tiny", "--seq", "32"]
    command += ["--rounds", "1", "--file-mib", "128", "--json", str(result)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(result.read_text())
    (costs,), parameters = report["rounds"], report["work"]["parameters"]
    assert {case: set(found) for case, found in costs.items()} == {
        "all": {"save", "load", "torch_save", "torch_load"},
        "host": {"save", "load"},
    }
    for case in costs.values():
        assert case["save"]["written_bytes"] >= 12 * parameters
        assert 12 * parameters <= case["load"]["read_bytes"] < 13 * parameters
        assert all(
            case[way + "load"]["loss"] == case[way + "save"]["loss"] for way in ("", "torch_") if way + "load" in case
        )
    assert costs["host"]["save"]["read_bytes"] == 0
    assert costs["all"]["load"]["loss"] == costs["host"]["load"]["loss"]
    assert len(report["to_reach"]) == 6
    assert list(nvme_path.iterdir()) == []
