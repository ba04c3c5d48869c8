"""The benchmark on a GPU: which rows it refuses, and what it says of each goal."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.cases import GIB, ROWS, Case
from benchmarks.gpu.goals import in_words, judge

BY_NAME = {case.name: case for case in ROWS}
TRANSFERS = {"in_ratio": 0.95, "out_ratio": 0.8}


def row(case: Case, step_s: float = 1.0) -> dict[str, Any]:
    rates = {f"{kind}_bytes_per_s": 2e9 for kind in ("read", "write", "mixed")}
    return {
        "case": case.as_json(),
        "step_s": step_s,
        "device_peak_bytes": 11 * GIB,
        "device_estimate_bytes": 10 * GIB,
        "disk_read_bytes": 2 << 30,
        "disk_written_bytes": 2 << 30,
        "disk_rates": rates,
    }


def judged(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {goal["goal"]: goal for goal in judge(report)}


def test_every_goal_is_judged_by_rows_that_there_are() -> None:
    found = judged({"cases": [row(case) for case in ROWS], "transfers": TRANSFERS})
    assert len(found) == 12 and not [goal for goal in found.values() if "missing" in goal]
    assert found["1.24 B, state in host memory, over plain PyTorch"]["reached"]
    assert not found["7 B over torchao"]["reached"], "as fast as another one is not .95 of its time"
    assert found["copies in over the link's rate"]["reached"]
    assert not found["copies out over the link's rate"]["reached"]
    bound = found["3.2 B on NVMe over max(compute, bytes / rate)"]
    assert bound["figure"] == pytest.approx(2e9 / (4 << 30)) and bound["reached"], "the disk needs 2.1 s, computing 1 s"
    assert in_words(bound).endswith("to be at most 1.15: reached")
    peak = found["7 B in 8 GiB of device memory trains; its peak is off the estimate by"]
    assert peak["figure"] == pytest.approx(0.1)
    assert found["Python and driver calls of ours per step, 319 M on the device"]["figure"] == 0.0


def test_a_goal_without_its_row_says_why() -> None:
    rows = [row(case) for case in ROWS if case.name != "7b FSDP2 CPU offload"]
    rows += [{"case": BY_NAME["7b FSDP2 CPU offload"].as_json(), "error": "a line\nRuntimeError: no memory"}]
    rows = [each for each in rows if each["case"]["name"] != "1.24b plain PyTorch"]
    found = judged({"cases": rows, "transfers": {"error": "no device"}})
    assert in_words(found["7 B over FSDP2"]) == (
        "7 B over FSDP2: not known (7b FSDP2 CPU offload: RuntimeError: no memory), to be at most 0.55"
    )
    plain = found["1.24 B, state in host memory, over plain PyTorch"]
    assert plain["missing"] == "1.24b plain PyTorch has not run"
    assert found["copies in over the link's rate"]["missing"] == "transfers: no device"


@pytest.mark.parametrize(
    ("name", "room", "said"),
    [
        ("3.2b plain PyTorch", (128, 64, 24), "64 GB of device memory are needed before activations, 26 GB are there"),
        ("7b ours, state in host memory", (64, 64, 80), "100 GB of host memory are needed, 69 GB are free"),
        ("13b ours, 24 GB of device memory", (64, 64, 80), "134 GB of disk are needed, 69 GB are free"),
        ("7b ours, 24 GB of device memory", (128, 64, 16), "the device has 17 GB of memory"),
    ],
)
def test_rows_that_the_machine_cannot_hold_are_refused(name: str, room: tuple[int, ...], said: str) -> None:
    host_bytes, disk_bytes, device_bytes = (gib * GIB for gib in room)
    assert BY_NAME[name].lacks(host_bytes, disk_bytes, device_bytes) == said
    assert BY_NAME[name].tiny().lacks(GIB, GIB, 4 * GIB) is None
    assert BY_NAME[name].lacks(1 << 50, 1 << 50, 1 << 50) is None
