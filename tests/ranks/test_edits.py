"""All ranks make the same edit in place: each sees the result of one, however late another rank comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import editing
from tests.support.rank_processes import values_of


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(("program", "transport"), [("clip", "memory"), ("scale", "group")])
def test_edits_in_place_are_seen_once(program: str, transport: str, late: int, nvme_path: Path) -> None:
    assert values_of(editing.edit, 2, program, transport, str(nvme_path), late) == ["", ""]
