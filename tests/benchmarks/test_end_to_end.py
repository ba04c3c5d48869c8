"""The end-to-end benchmark runs, our side and plain PyTorch, and what it reports is what happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.end_to_end.__main__ import main
from benchmarks.end_to_end.runner import Run
from benchmarks.end_to_end.targets import Round, against_deepspeed, rolled_back

CASES = ("plain", "host-none", "all-none", "beside-all-none")
STEPS = 2


def test_one_round_of_a_tiny_model(run_here: Callable[..., None], nvme_path: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ["--path", nvme_path, "--size", "tiny", "--seq", "32", "--file-mib", "128", "--json", result]
    steps = ["--rounds", "1", "--steps", STEPS, "--steps-max", STEPS, "--warmup", "1", "--threads", "1"]
    run_here(main, *words, *steps, "--beside", "--rows", *CASES)
    report = json.loads(result.read_text())
    runs = {case["case"]: case["runs"][0] for case in report["cases"] if case["runs"]}
    assert set(CASES) <= set(runs)
    assert all(len(run["losses"]) == STEPS + 1 for run in runs.values())
    assert runs["host-none"]["losses"] == runs["all-none"]["losses"] == runs["beside-all-none"]["losses"]
    assert abs(runs["host-none"]["losses"][-1] - runs["plain"]["losses"][-1]) < 0.01
    parameters = report["work"]["parameters"]
    moved = {name: sum(run["steps"][-1][key] for key in ("read_bytes", "written_bytes")) for name, run in runs.items()}
    assert moved["host-none"] == 0 and 10 * parameters < moved["all-none"] < 40 * parameters
    assert all(step["peak_bytes"] > 0 for run in runs.values() for step in run["steps"])
    assert {row["name"] for row in report["to_reach"]} >= {
        "all-none / bound",
        "all-none / bound with its bytes moved beside it",
        "disk bytes, everything on NVMe",
    }
    assert list(nvme_path.iterdir()) == []


def test_a_step_that_is_rolled_back_counts_what_the_next_one_takes_longer() -> None:
    def run(case: str, seconds: list[float], undone: list[float]) -> Run:
        steps = [
            {"seconds": s, "foreign_cpu_share": 0.0, "stats": {"rolled_back": n}}
            for s, n in zip(seconds, undone, strict=True)
        ]
        return Run(case, steps=steps)

    deferred = run("deferred", [1.4] * 4, [0.0] * 4)
    wrong = run("wrong", [9.0, 1.0, 1.2, 1.5, 1.0, 1.0], [0.0, 0.0, 4.0, 4.0, 4.0, 4.0])
    right = run("right", [1.0] * 4, [4.0] * 4)
    round = Round({each.case: each for each in (deferred, wrong, right)})
    assert rolled_back("wrong", "deferred")(round) == pytest.approx((1.2 + 1.5 - 1.0) / 1.4)
    assert rolled_back("right", "deferred")(round) is None


def test_what_the_disk_alone_takes_stands_beside_the_ratio_to_another_program() -> None:
    def run(case: str, seconds: float, moved: float) -> Run:
        step = {"seconds": seconds, "foreign_cpu_share": 0.0, "read_bytes": moved, "written_bytes": moved, "stats": {}}
        return Run(case, steps=[step])

    runs = (run("optimizer-speculative", 2.2, 4e9), run("deepspeed-nvme-tuned", 5.0, 6e9))
    round = Round({each.case: each for each in runs}, rates={"libaio": 4e9})
    ratio, disk = (row.value(round) for row in against_deepspeed("optimizer-speculative", "all", (0.3, 0.3))[:2])
    assert (ratio, disk) == pytest.approx((2.2 / 5.0, 2.0 / 5.0))
