"""Random programs over random models: the numbers of plain PyTorch, or an error that can be explained.

``python -m tests.fuzz.campaign`` runs as many as you like, and any one again.
"""

from __future__ import annotations

import pytest

from tests.fuzz.blocks import BLOCKS
from tests.fuzz.campaign import campaign
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.program import generate
from tests.support.paging import Paging

FIRST, PROGRAMS, PART = 45, 80, 40
"""These have every block and every operation; the first 80 of all do not."""


def test_the_programs_have_every_block_and_every_operation() -> None:
    programs = [generate(seed) for seed in range(FIRST, FIRST + PROGRAMS)]
    assert {kind for program in programs for kind in program.kinds} == set(BLOCKS)
    assert {name for program in programs for name in program.operations} == set(OPERATIONS)


@pytest.mark.parametrize("first", range(FIRST, FIRST + PROGRAMS, PART))
def test_random_programs_are_equal_or_explained(paging: Paging, first: int) -> None:
    ended, wrong = campaign(paging, first, PART)
    assert not wrong, f"{len(wrong)} programs cannot be explained:\n" + "\n".join(wrong)
    assert ended["equal"] > 0.7 * PART, f"too many programs end early to say much: {dict(ended)}"
