"""A rank that is faster clears its gradients while the others still look at theirs."""

from __future__ import annotations

import pytest

from tests.ranks.dropping import look_alone, look_and_clear
from tests.support.rank_processes import values_of


@pytest.mark.parametrize("transport", ["memory", "group"])
def test_slower_rank_sees_gradients_that_others_have_cleared(transport: str):
    assert values_of(look_and_clear, 2, transport) == [[], []]


def test_look_at_what_another_rank_has_cleared_and_not_read_is_an_error_on_all():
    said = values_of(look_alone, 2)
    assert all(
        "0.weight.grad is read on another rank, and the program of this one has dropped it" in text for text in said
    )
    assert "rank 0 has failed" in said[1]
