"""Edits on several ranks: the same ones are seen once, however late another rank comes; others are an error on all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import editing
from tests.support.rank_processes import values_of


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(("program", "transport"), [("clip", "memory"), ("scale", "group")])
def test_edits_in_place_are_seen_once(program: str, transport: str, late: int, nvme_path: Path) -> None:
    assert values_of(editing.edit, 2, program, transport, str(nvme_path), late) == ["", ""]


@pytest.mark.parametrize("how", list(editing.OTHER_VALUES))
def test_other_values_on_each_rank_are_an_error(how: str, nvme_path: Path) -> None:
    transport = "group" if how == "gradient" else "memory"
    for text in values_of(editing.edit_differently, 2, how, transport, str(nvme_path)):
        what = "2.weight.grad" if "gradient" in how else "2.weight"
        assert f"{what} was given other values on rank 1 than on rank 0" in text
