"""The benchmark of checkpoints runs, and what it reports is what happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.checkpoint.__main__ import main


def test_one_round_of_a_tiny_model(run_here: Callable[..., None], nvme_path: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ["--path", nvme_path, "--size", "tiny", "--seq", "32", "--file-mib", "128", "--json", result]
    run_here(main, *words, "--rows", "all", "background", "--rounds", "1")
    report = json.loads(result.read_text())
    (found,), parameters = report["rounds"], report["work"]["parameters"]
    assert {row: list(actions) for row, actions in found.items()} == {
        "all": ["save", "load", "torch_save", "torch_load"],
        "background": ["steps", "background", "steps again", "torch_async"],
    }
    case = found["all"]
    assert case["save"]["written_bytes"] >= 12 * parameters
    assert 12 * parameters <= case["load"]["read_bytes"] < 13 * parameters
    assert all(case[f"{way}load"]["loss"] == case[f"{way}save"]["loss"] for way in ("", "torch_"))
    for name in ("background", "torch_async"):
        save = found["background"][name]
        assert save["written_bytes"] >= save["state_bytes"] == 12 * parameters
        assert 0 < save["call_s"] and save["call_s"] + sum(save["steps_s"]) <= save["seconds"]
    names = [row["name"] for row in report["to_reach"]]
    assert found["all"]["save"]["new_file_share"] > 0
    assert len(names) == 6 + 4 and all("in memory" not in name for name in names)
    assert list(nvme_path.iterdir()) == []
