"""Transformers' ``Trainer`` and accelerate on two real ranks: the weights of one process that accumulates."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations import on_ranks  # noqa: E402
from tests.support.rank_processes import values_of  # noqa: E402


def test_the_trainer_trains_saves_and_resumes(tmp_path: Path) -> None:
    (alone,) = values_of(on_ranks.train, 1, str(tmp_path / "one"), 1)
    weights, norms, resumed = alone
    assert resumed == weights
    assert len(norms) == 4
    assert values_of(on_ranks.train, 2, str(tmp_path / "two"), 2) == [alone, alone]


def test_a_loop_of_accelerate() -> None:
    (alone,) = values_of(on_ranks.accelerate, 1, 1)
    assert len(alone[1]) == on_ranks.ROWS // 4
    assert values_of(on_ranks.accelerate, 2, 2) == [alone, alone]
