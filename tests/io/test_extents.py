"""The free list against a set of pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepoffload.errors import UsageError
from deepoffload.io.extents import FreeList, split_by_weight

PAGE = 4096


def check(free: FreeList, taken: set[int]) -> None:
    pages = free.capacity_bytes // PAGE
    holes = free.holes
    free_pages = [page for offset, size in holes for page in range(offset // PAGE, (offset + size) // PAGE)]
    assert sorted(free_pages) == [page for page in range(pages) if page not in taken]
    assert free.free_bytes == len(free_pages) * PAGE
    assert free.used_bytes == len(taken) * PAGE
    assert all(a[0] + a[1] < b[0] for a, b in zip(holes, holes[1:], strict=False)), "holes touch: not coalesced"


@given(
    pages=st.integers(0, 60),
    steps=st.lists(st.one_of(st.integers(1, 20), st.integers(-20, -1), st.just(0)), max_size=60),
)
def test_takes_succeed_exactly_when_there_is_room(pages, steps):
    """Positive: take that many pages; negative: give back one of the extents; zero: the file grows."""
    free, taken = FreeList(pages * PAGE), set()
    held: list[list[tuple[int, int]]] = []
    for step in steps:
        if step > 0:
            pieces = free.take(step * PAGE)
            assert (pieces is not None) == (step * PAGE <= free.capacity_bytes - len(taken) * PAGE)
            if pieces is None:
                continue
            new = {page for offset, size in pieces for page in range(offset // PAGE, (offset + size) // PAGE)}
            assert len(new) == step and not new & taken
            taken |= new
            held.append(pieces)
        elif step < 0 and held:
            for offset, size in held.pop(step % len(held)):
                free.give(offset, size)
                taken -= set(range(offset // PAGE, (offset + size) // PAGE))
        elif step == 0:
            free.extend(free.capacity_bytes + 7 * PAGE)
        check(free, taken)


def test_best_fit_keeps_large_holes():
    free = FreeList(100 * PAGE)
    (a,), (b,), (c,), _ = (free.take(size * PAGE) for size in (10, 30, 5, 55))
    free.give(*b)
    free.give(*c)  # next to b: one hole of 35
    free.give(*a)
    assert free.holes == [(0, 45 * PAGE)]
    taken = free.take(10 * PAGE)
    _ = free.take(20 * PAGE)
    free.give(*taken[0])  # holes of 10 and 15
    assert free.take(9 * PAGE) == [(0, 9 * PAGE)]
    assert free.take(15 * PAGE) == [(30 * PAGE, 15 * PAGE)]


def test_a_scattered_file_gives_pieces():
    free = FreeList(10 * PAGE)
    pages = [free.take(PAGE)[0] for _ in range(10)]
    for page in pages[::2]:
        free.give(*page)
    pieces = free.take(4 * PAGE)
    assert len(pieces) == 4 and sum(size for _, size in pieces) == 4 * PAGE
    assert free.take(2 * PAGE) is None


@pytest.mark.parametrize(("offset", "nbytes"), [(0, PAGE), (4 * PAGE, 2 * PAGE), (9 * PAGE, 2 * PAGE), (-PAGE, PAGE)])
def test_what_is_not_taken_cannot_be_given(offset, nbytes):
    free = FreeList(10 * PAGE)
    free.take(10 * PAGE)
    free.give(0, 5 * PAGE)
    before = free.holes
    with pytest.raises(UsageError, match="freed twice"):
        free.give(offset, nbytes)
    assert free.holes == before


def test_a_file_does_not_shrink():
    with pytest.raises(UsageError):
        FreeList(10 * PAGE).extend(5 * PAGE)


@given(
    total=st.integers(0, 1 << 40),
    weights=st.lists(st.floats(0.01, 1e10), min_size=1, max_size=6),
    multiple=st.sampled_from([1, PAGE, 1 << 20]),
)
def test_split_follows_the_weights(total, weights, multiple):
    parts = split_by_weight(total, weights, multiple)
    assert sum(parts) == total and all(part >= 0 for part in parts)
    for part, weight in zip(parts, weights, strict=True):
        assert part >= total * weight / sum(weights) - multiple - total * 1e-9 - 1
