"""What is accepted trains with the NVMe that it has, and a refusal names the least ``nvme_budget`` that works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepoffload.native.aio import PAGE_BYTES
from tests.runtime.nvme_programs import AMPLE_BYTES, Program, main, run

PROGRAMS = 6


def test_random_programs_train_at_the_least_nvme_budget(tmp_path: Path) -> None:
    said: list[str] = []
    assert main(str(tmp_path), PROGRAMS, say=said.append) == 0, "\n".join(said)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_least_nvme_budget_is_the_least(tmp_path: Path, seed: int) -> None:
    """Tested by bisection: what a refusal names is accepted, and nothing below it."""
    program = Program.drawn(seed)
    host_bytes = program.host_bytes(str(tmp_path))
    named = program.least_nvme_bytes(str(tmp_path), host_bytes)
    refused, accepted = 0, named // PAGE_BYTES
    while accepted - refused > 1:
        middle = (refused + accepted) // 2
        if program.refusal(str(tmp_path), host_bytes, middle * PAGE_BYTES) is None:
            accepted = middle
        else:
            refused = middle
    assert accepted * PAGE_BYTES == named, program


@pytest.mark.parametrize(
    ("frozen", "overlap"),
    [(0.0, "none"), (0.0, "in_backward"), (0.5, "deferred"), (0.8, "none"), (0.8, "deferred"), (0.95, "in_backward")],
)
def test_frozen_weights(tmp_path: Path, frozen: float, overlap: str) -> None:
    """Down to the least NVMe, and somewhat above, where less is in its place than when the model is built."""
    program = replace(Program.drawn(5), frozen=frozen, overlap=overlap, durable=False, rank=0, unfreezes=False)
    host_bytes = program.host_bytes(str(tmp_path))
    expected = program.train(str(tmp_path), AMPLE_BYTES, AMPLE_BYTES)
    least = program.least_nvme_bytes(str(tmp_path), host_bytes)
    for pages in (0, 1, 3, 20):
        assert program.train(str(tmp_path), host_bytes, least + pages * PAGE_BYTES) == expected


@pytest.mark.parametrize("precision, overlap", [("keep", "deferred"), ("bf16", "deferred"), ("bf16", "speculative")])
def test_parameters_that_are_unfrozen_later_end_with_budgets_that_are_enough(
    tmp_path: Path, precision: str, overlap: str
) -> None:
    """Nobody knows of them when the model is built. The errors name memory or NVMe, and what they name is enough."""
    program = replace(
        Program.drawn(5), frozen=0.8, rank=0, precision=precision, overlap=overlap, durable=False, unfreezes=True
    )
    assert run(program, str(tmp_path)) is None


def test_a_placement_that_saves_more_time_gives_way_where_nvme_is_small(tmp_path: Path) -> None:
    """With a few pages less than it takes, more blocks stay in memory instead of a refusal."""
    program = replace(Program.drawn(5), frozen=0.0, rank=0, room=2.0, durable=False, unfreezes=False)
    host_bytes = program.host_bytes(str(tmp_path))
    least = program.least_nvme_bytes(str(tmp_path), host_bytes)
    expected = program.train(str(tmp_path), AMPLE_BYTES, AMPLE_BYTES)
    for share in (1.0, 1.02, 1.1, 1.5):
        assert program.train(str(tmp_path), host_bytes, int(least * share)) == expected
