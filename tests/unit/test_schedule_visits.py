"""Places of visits grow along the path of every micro-batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepoffload.schedule.visits import VisitOrder, places_of

LAYERS = st.permutations(range(8)).flatmap(
    lambda order: st.lists(
        st.sets(st.sampled_from(order), min_size=1).map(lambda way: sorted(way, key=order.index)), min_size=1
    )
)
"""Paths of micro-batches that skip some of eight layers, which have one order."""


@given(LAYERS)
def test_places_grow_along_paths_that_have_a_common_order(paths: list[list[int]]) -> None:
    places = places_of(paths)
    assert places is not None
    assert set(places) == {layer for path in paths for layer in path}
    assert all(places[one] < places[other] for path in paths for one, other in zip(path, path[1:], strict=False))


def test_paths_in_opposite_orders_have_no_places() -> None:
    assert places_of([["a", "b", "c"], ["c", "b"]]) is None


def test_a_skipped_visit_keeps_its_place() -> None:
    order = VisitOrder()
    order.guess("abcd")
    order.learn([["a", "c"], ["a", "b", "d"]])
    assert sorted("abcd", key=lambda visit: order.place(visit, 0)) == list("abcd")


def test_what_a_step_shows_replaces_a_wrong_guess() -> None:
    order = VisitOrder()
    order.guess("ba")
    order.learn([["a", "b"], ["a"]])
    assert order.place("a", 9) < order.place("b", 9)
    assert order.place("unknown", 9) == 9


def test_what_contradicts_itself_is_not_learned() -> None:
    order = VisitOrder()
    order.learn([["a", "b"], ["b", "a"]])
    assert order.place("a", 3) == order.place("b", 3) == 3
