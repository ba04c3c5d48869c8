"""Lightning's ``Trainer`` and ``Fabric`` on two real ranks: the weights of one process that accumulates."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning")

from tests.integrations import lightning_on_ranks  # noqa: E402
from tests.support.rank_processes import values_of  # noqa: E402


@pytest.mark.parametrize("late", [False, True])
def test_the_trainer_trains_evaluates_saves_and_resumes(late: bool, tmp_path: Path) -> None:
    (alone,) = values_of(lightning_on_ranks.train, 1, str(tmp_path / "one"), 1, late)
    assert alone[0] == alone[1]
    assert values_of(lightning_on_ranks.train, 2, str(tmp_path / "two"), 2, late) == [alone, alone]


def test_a_loop_of_fabric(tmp_path: Path) -> None:
    (alone,) = values_of(lightning_on_ranks.fabric, 1, str(tmp_path / "one"), 1)
    assert alone[1] == alone[2]
    assert values_of(lightning_on_ranks.fabric, 2, str(tmp_path / "two"), 2) == [alone, alone]
