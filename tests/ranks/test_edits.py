"""Edits on several ranks: the same ones are seen once, however late another rank comes; others are an error on all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import editing
from tests.support.rank_processes import values_of, values_of_each


def test_edits_in_place_are_seen_once(nvme_path: Path) -> None:
    cases = [("clip", "memory"), ("scale", "group")]
    calls = [(*case, str(nvme_path), late) for case in cases for late in (0, 1)]
    assert values_of_each(editing.edit, 2, calls) == [["", ""]] * len(calls)


@pytest.mark.parametrize("how", list(editing.OTHER_VALUES))
def test_other_values_on_each_rank_are_an_error(how: str, nvme_path: Path) -> None:
    transport = "group" if how == "gradient" else "memory"
    for text in values_of(editing.edit_differently, 2, how, transport, str(nvme_path)):
        what = "2.weight.grad" if "gradient" in how else "2.weight"
        assert f"'{what}' was given other values on rank 1 than on rank 0" in text
