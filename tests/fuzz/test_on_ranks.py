"""Random programs on two ranks: the numbers of plain PyTorch, or an error that says what several ranks cannot do."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.on_ranks import campaign
from tests.support.rank_processes import values_of

PROGRAMS = 6


def test_random_programs_on_two_ranks(nvme_path: Path) -> None:
    first, second = values_of(campaign, 2, 0, PROGRAMS, str(nvme_path), limit_s=300.0)
    assert first == second
    assert not [ended for ended in first if ended.startswith("wrong")]
    assert first.count("equal") > 0.5 * PROGRAMS, first
