from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.matrix import EXCEPTIONS, cells
from tests.models.refusals import REFUSALS, Refusal
from tests.models.what_works import markdown
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp
from tests.support.paging import RESIDENT, Paging, plain

PAGE = Path(__file__).parents[2] / "docs" / "what_works.md"


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: python -m tests.models.what_works > docs/what_works.md"


def test_every_exception_belongs_to_a_cell() -> None:
    assert set(EXCEPTIONS) <= {(family.name, feature.name) for family, feature in cells()}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.what)
def test_what_is_refused_says_so_and_changes_nothing(paging: Paging, refusal: Refusal) -> None:
    model = paging.build(mlp, RESIDENT)
    with pytest.raises(refusal.error) as caught:
        refusal.do(model)
    assert refusal.message in str(caught.value)
    assert_same_bits(weights_of(plain(mlp)), weights_of(model))
