"""Ranks update inside backward: the bits are those of one process that accumulates, and what cannot be is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.ranks.early_programs import make_mistakes
from tests.ranks.speculating import PLACEMENTS
from tests.ranks.training_programs import Job, check_all, check_all_with_ranks
from tests.support.rank_processes import values_of


def early(placement: str, *, transport: str = "memory", precision: str = "fp32", **changes: Any) -> Job:
    """A training that updates inside backward. ``changes``: fields of the job."""
    config = {**PLACEMENTS[placement], "precision": precision, "ranks": {"transport": transport}}
    config["step_overlap"] = "in_backward"
    return Job(**{"clip": None, "config": config, **changes})


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    jobs = [
        early("nvme"),
        early("half", transport="group", precision="bf16", micro_batches=3),
        early("evicted", uneven="layer drop", micro_batches=2),
        early("memory", model="gpt-reentrant"),
        early("nvme", uneven="other order"),
    ]
    disk, *_ = check_all(jobs, tmp_path)
    assert all(found.stats["disk_bytes_written"] > 0 for found in disk)


def test_three_ranks_train_as_three_that_update_in_the_step(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"precision": "bf16", "data_ranks": 3, "steps": 3}
    jobs = [early("nvme", micro_batches=2, **changes), early("memory", uneven="layer drop", **changes)]
    check_all_with_ranks(jobs, tmp_path, world_size=3)


def test_what_cannot_be_updated_inside_backward_is_an_error(tmp_path: Path) -> None:
    for said in values_of(make_mistakes, 2):
        assert "another gradient arrived" in said["two backwards"]
        assert "changed between backward() and step()" in said["another rate"]
        assert "has gone into the update already" in said["a look"]
        assert "max_grad_norm" in said["clipping"]
        assert "is updated with other numbers on rank 1 than on rank 0" in said["other rates"]
        assert said["no step"] == "updated all the same"
