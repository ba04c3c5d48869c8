"""The matrix on two ranks: the lives of models of every kind are those of plain PyTorch, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.models.matrix import ON_RANKS, SELDOM_ON_RANKS
from tests.models.on_ranks import Job, live
from tests.support.paging import EVICTING, RESIDENT
from tests.support.rank_processes import values_of

pytest.importorskip("transformers")

JOBS = [
    Job(family, EVICTING if number == 0 else RESIDENT, ("memory", "group")[number % 2])
    for number, family in enumerate(ON_RANKS)
    if os.environ.get("MODELS") == "all" or family not in SELDOM_ON_RANKS
]


def test_lives_of_models_on_two_ranks(nvme_path: Path, tmp_path: Path) -> None:
    """Two processes for all of them, which takes less than one start for each."""
    faults = values_of(live, 2, JOBS, str(nvme_path), str(tmp_path), limit_s=300.0)
    assert faults == [[], []]
