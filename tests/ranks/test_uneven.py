"""Programs that differ from rank to rank train to the same bits, and none of them hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.training_programs import Job, check_same

IN_MEMORY: dict[str, Any] = {"host_budget": "64MiB"}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_layer_that_some_ranks_leave_out(micro_batches: int) -> None:
    check_same(Job(uneven="layer drop", micro_batches=micro_batches, config=IN_MEMORY, steps=5))


def test_contributions_wait_for_ranks_that_begin_later(nvme_path: Path) -> None:
    config = {"host_budget": "2200KiB", "nvme_budget": "64MiB"}
    check_same(Job(uneven="turns", before_step="turns", steps=2, config=config), str(nvme_path))


@pytest.mark.parametrize("between", ["evaluation", "looks", "edits"])
def test_between_steps(between: str) -> None:
    check_same(Job(between_steps=between, config=IN_MEMORY))
