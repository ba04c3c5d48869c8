"""Ranks that die, stop or fail at a few random places; ``python -m tests.ranks.deaths`` tries more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.ranks import deaths

BUSY_S = 90.0
"""What other work of the machine may add to the limits, which the campaign holds the ranks to."""


@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP", "disk full"])
def test_all_others_hear_of_a_death(way: str, nvme_path: Path, tmp_path: Path) -> None:
    death = next(death for death in deaths.deaths(8, seed=3) if death.way == way)
    deaths.check(replace(death, timeout_s=6.0), nvme_path, tmp_path, BUSY_S)


@pytest.mark.parametrize(("overlap", "way"), [("speculative", "SIGKILL guess"), ("in_backward", "SIGKILL early")])
def test_all_others_hear_of_a_death_in_an_update(overlap: str, way: str, nvme_path: Path, tmp_path: Path) -> None:
    death = next(one for one in deaths.deaths(8, 3, overlap) if one.way == way)
    deaths.check(death, nvme_path, tmp_path, BUSY_S)


def test_all_others_hear_of_a_death_while_a_save_is_under_way(nvme_path: Path, tmp_path: Path) -> None:
    death = next(one for one in deaths.deaths(8, 3, "speculative", 3, saves=True) if one.way == "SIGKILL")
    deaths.check(death, nvme_path, tmp_path, BUSY_S)
