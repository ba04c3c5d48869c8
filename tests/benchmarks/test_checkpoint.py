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
    command += [
        "--rows",
        "all",
        "host",
        "background",
        "durable",
        "--rounds",
        "1",
        "--file-mib",
        "128",
        "--json",
        str(result),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(result.read_text())
    (found,), parameters = report["rounds"], report["work"]["parameters"]
    assert {row: list(actions) for row, actions in found.items()} == {
        "all": ["save", "load", "torch_save", "torch_load"],
        "host": ["save", "load"],
        "background": ["steps", "background", "steps again", "torch_async"],
        "durable": ["without", "with", "without again", "with again"],
    }
    for case in (found["all"], found["host"]):
        assert case["save"]["written_bytes"] >= 12 * parameters
        assert 12 * parameters <= case["load"]["read_bytes"] < 13 * parameters
        assert all(
            case[way + "load"]["loss"] == case[way + "save"]["loss"] for way in ("", "torch_") if way + "load" in case
        )
    assert found["host"]["save"]["read_bytes"] < parameters, "nothing of the state; the kernel may read a page of code"
    assert found["all"]["load"]["loss"] == found["host"]["load"]["loss"]
    for name in ("background", "torch_async"):
        save = found["background"][name]
        assert save["written_bytes"] >= save["state_bytes"] == 12 * parameters
        assert 0 < save["call_s"] and save["call_s"] + sum(save["steps_s"]) <= save["seconds"]
    durable = found["durable"]
    for again in ("", " again"):
        assert durable[f"with{again}"]["losses"] == durable[f"without{again}"]["losses"]
        assert all(seconds > 0 for seconds in durable[f"with{again}"]["syncs_s"])
        assert durable[f"without{again}"]["syncs_s"] == []
    assert durable["without"]["losses"] == found["background"]["steps"]["losses"]
    names = [row["name"] for row in report["to_reach"]]
    assert found["all"]["save"]["new_file_share"] > 0
    assert len(names) == 8 + 4 + 2 and all("in memory" not in name for name in names)
    assert list(nvme_path.iterdir()) == []
