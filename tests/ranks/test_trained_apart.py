"""Ranks that train ordinary parameters next to a model that they share are told that these go apart."""

from __future__ import annotations

import pytest

from tests.ranks import ordinary_programs as programs
from tests.support.rank_processes import values_of


@pytest.mark.parametrize(("place", "frozen"), [("prompt", True), ("head", True), ("head", False)])
def test_gradients_that_differ_are_said_once(place: str, frozen: bool) -> None:
    said = [text for texts in values_of(programs.warned_of, 2, place, False, frozen) for text in texts]
    assert 1 <= len(said) <= 2, said  # who comes last says it, or both
    for text in said:
        assert text.startswith("ranks 0 and 1 step with different gradients for an ordinary parameter of shape")
        assert "(16, 16), next to Base, which they share" in text


@pytest.mark.parametrize(("place", "frozen"), [("head", True), ("prompt", False)])
def test_a_program_that_averages_them_is_told_nothing(place: str, frozen: bool) -> None:
    assert values_of(programs.warned_of, 3, place, True, frozen) == [[]] * 3


def test_an_optimizer_of_torch_over_the_model_alone_is_fine() -> None:
    assert values_of(programs.warned_of, 2, "none", False, False) == [[]] * 2


def test_no_hook_is_left() -> None:
    assert values_of(programs.leave_no_hooks, 2) == [0, 0]
