"""The arena's allocator: exact tilings, best fit from both ends, coalescing, sliding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepoffload.errors import BudgetError
from deepoffload.memory.arena import Arena
from deepoffload.native.aio import PAGE_BYTES, round_up
from tests.support.memory_watch import resident_bytes

PAGES = 16


@pytest.fixture
def arena() -> Arena:
    return Arena(PAGES * PAGE_BYTES)


def pages(arena: Arena, count: int, *, high: bool = False) -> int:
    """Allocate whole pages; the number of the first one."""
    offset = arena.allocate(count * PAGE_BYTES, high=high)
    assert offset is not None and offset % PAGE_BYTES == 0
    return offset // PAGE_BYTES


def largest_hole_bytes(arena: Arena) -> int:
    return max((size for _, size, used in arena.layout() if not used), default=0)


def test_capacity_is_rounded_down_to_pages() -> None:
    assert Arena(3 * PAGE_BYTES + 4095).capacity_bytes == 3 * PAGE_BYTES


def test_the_two_ends(arena: Arena) -> None:
    assert [pages(arena, 2), pages(arena, 3, high=True), pages(arena, 1), pages(arena, 1, high=True)] == [0, 13, 2, 12]
    assert largest_hole_bytes(arena) == 9 * PAGE_BYTES == arena.free_bytes


def test_the_smallest_hole_that_fits(arena: Arena) -> None:
    held = [pages(arena, size) for size in (3, 1, 2, 1, 4, 5)]
    for index in (0, 2, 4):
        arena.free(held[index] * PAGE_BYTES)
    assert pages(arena, 2) == held[2]
    assert pages(arena, 3, high=True) == held[0]
    assert pages(arena, 1, high=True) == held[4] + 3, "the upper end of the hole"


def test_equal_holes_lowest_or_highest(arena: Arena) -> None:
    held = [pages(arena, size) for size in (1, 2, 1, 2, 10)]
    arena.free(held[1] * PAGE_BYTES)
    arena.free(held[3] * PAGE_BYTES)
    assert pages(arena, 1, high=True) == held[3] + 1
    assert pages(arena, 2) == held[1]


def test_an_exact_fit_takes_all_and_then_nothing_fits(arena: Arena) -> None:
    assert pages(arena, PAGES) == 0
    assert arena.free_bytes == 0 == largest_hole_bytes(arena)
    assert arena.allocate(1) is None
    arena.free(0)
    assert arena.allocate((PAGES + 1) * PAGE_BYTES) is None
    assert pages(arena, PAGES, high=True) == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_holes_merge_in_any_order(arena: Arena, order: tuple[int, ...]) -> None:
    held = [pages(arena, size) for size in (5, 6, 5)]
    for index in order:
        arena.free(held[index] * PAGE_BYTES)
    assert largest_hole_bytes(arena) == arena.free_bytes == PAGES * PAGE_BYTES


def test_sliding_down_moves_the_hole_up(arena: Arena) -> None:
    held = [pages(arena, size) * PAGE_BYTES for size in (2, 3, 4)]
    assert arena.slide_down(held[0]) is None, "nothing below it"
    assert arena.slide_down(held[2]) is None, "its neighbour is in use"
    arena.free(held[0])
    assert arena.slide_down(held[1]) == 0
    assert arena.slide_down(held[2]) == 3 * PAGE_BYTES
    assert largest_hole_bytes(arena) == 9 * PAGE_BYTES
    assert (arena.size_of(0), arena.size_of(3 * PAGE_BYTES)) == (3 * PAGE_BYTES, 4 * PAGE_BYTES)


def test_a_view_outlives_the_arena(arena: Arena) -> None:
    view = arena.view(PAGE_BYTES, 10)
    view[:] = bytes(range(10))
    arena.close()
    arena.close()
    assert bytes(view) == bytes(range(10))


def filled(arena: Arena, offset: int, value: int) -> bytes:
    """Fill a range with one value; what it then has to hold."""
    content = bytes([value]) * arena.size_of(offset)
    arena.view(offset, len(content))[:] = content
    return content


def test_pages_of_several_holes_make_one_range(arena: Arena) -> None:
    held = [pages(arena, 2) * PAGE_BYTES for _ in range(8)]
    content = {offset: filled(arena, offset, number + 1) for number, offset in enumerate(held)}
    assert arena.lend(PAGE_BYTES) is None, "nothing is free"
    for offset in held[::2]:
        arena.free(offset)
    assert arena.allocate(5 * PAGE_BYTES) is None
    lent = arena.lend(5 * PAGE_BYTES)
    assert lent is not None and lent >= arena.capacity_bytes
    content[lent] = filled(arena, lent, 99)
    assert arena.size_of(lent) == 5 * PAGE_BYTES and arena.free_bytes == 3 * PAGE_BYTES
    assert sum(size for _, size in arena.memory_of(lent)) == 5 * PAGE_BYTES
    assert all(bytes(arena.view(offset, len(content[offset]))) == content[offset] for offset in (*held[1::2], lent))
    assert arena.holds(arena.address + lent)
    assert arena.lend(4 * PAGE_BYTES) is None, "only three pages are free"
    arena.free(lent)
    assert arena.free_bytes == 8 * PAGE_BYTES and largest_hole_bytes(arena) == 2 * PAGE_BYTES
    for offset in held[1::2]:
        arena.free(offset)
    assert pages(arena, PAGES) == 0


def test_lent_pages_take_no_more_memory_than_the_budget() -> None:
    """In a separate process: here other tests' memory comes and goes."""
    program = "from tests.memory.test_arena import lend_and_measure; lend_and_measure()"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, stderr=subprocess.PIPE,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def lend_and_measure() -> None:
    capacity_bytes, chunk_bytes = 64 << 20, 1 << 20
    before = resident_bytes()
    arena = Arena(capacity_bytes)
    held = [arena.allocate(chunk_bytes) or 0 for _ in range(capacity_bytes // chunk_bytes)]
    for offset in held:
        filled(arena, offset, 1)
    assert resident_bytes() - before > capacity_bytes - (8 << 20)
    for _ in range(3):
        for offset in held[::2]:
            arena.free(offset)
        lent = arena.lend(capacity_bytes // 2)
        assert lent is not None
        filled(arena, lent, 2)
        assert resident_bytes() - before < capacity_bytes + (8 << 20)
        arena.free(lent)
        assert resident_bytes() - before < capacity_bytes // 2 + (8 << 20)
        held[::2] = [arena.allocate(chunk_bytes) or 0 for _ in held[::2]]


@pytest.mark.parametrize("lends", [True, False])
def test_an_arena_may_be_larger_than_the_memory_that_the_system_has_now(lends: bool) -> None:
    """As with ``memory_may_grow``; nothing is touched. A system that allows no overcommitment refuses it. (One that
    does not lend is that of a model on a GPU.)"""
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        with pytest.raises(BudgetError, match="overcommit_memory"):
            Arena(2 * memory, lends=lends)
    else:
        arena = Arena(2 * memory, lends=lends)
        assert arena.capacity_bytes >= 2 * memory - PAGE_BYTES
        arena.close()


def test_an_arena_that_does_not_lend_has_no_spare_addresses() -> None:
    arena = Arena(PAGES * PAGE_BYTES, lends=False)
    assert arena.lend(PAGE_BYTES) is None and arena.mapped_bytes == arena.capacity_bytes


def test_a_range_gives_its_end_back(arena: Arena) -> None:
    first, second = pages(arena, 6) * PAGE_BYTES, pages(arena, 10) * PAGE_BYTES
    arena.shrink(first, PAGE_BYTES + 1)
    assert (arena.size_of(first), arena.free_bytes) == (2 * PAGE_BYTES, 4 * PAGE_BYTES)
    arena.shrink(first, 3 * PAGE_BYTES)
    assert arena.size_of(first) == 2 * PAGE_BYTES, "it does not grow again"
    arena.shrink(second, 0)
    assert arena.free_bytes == 13 * PAGE_BYTES, "a page stays"
    arena.free(first)
    arena.free(second)
    assert largest_hole_bytes(arena) == PAGES * PAGE_BYTES


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["allocate", "lend"]), st.integers(0, 5 * PAGE_BYTES), st.booleans()),
            st.tuples(st.sampled_from(["free", "slide"]), st.integers(0, 99), st.booleans()),
        ),
        max_size=60,
    )
)
def test_ranges_never_overlap_and_holes_are_all_that_is_left(steps: list[tuple[str, int, bool]]) -> None:
    arena = Arena(PAGES * PAGE_BYTES)
    used: dict[int, int] = {}
    lent: dict[int, list[tuple[int, int]]] = {}
    peak = 0
    for action, number, high in steps:
        if action == "lend":
            size = max(PAGE_BYTES, round_up(number))
            free_bytes = arena.free_bytes
            offset = arena.lend(number)
            assert (offset is not None) == (size <= free_bytes), "every free byte can be had"
            if offset is not None:
                lent[offset] = arena.memory_of(offset)
                assert sum(part for _, part in lent[offset]) == arena.size_of(offset) == size
                used.update(lent[offset])
        elif lent and high and action == "free":
            for start, _ in lent[offset := min(lent)]:
                del used[start]
            arena.free(offset)
            del lent[offset]
        elif action == "allocate":
            size = max(PAGE_BYTES, round_up(number))
            offset = arena.allocate(number, high=high)
            if offset is None:
                assert largest_hole_bytes(arena) < size
            else:
                used[offset] = size
        elif own := sorted(used.keys() - {start for parts in lent.values() for start, _ in parts}):
            offset = own[number % len(own)]
            if action == "free":
                arena.free(offset)
                del used[offset]
            else:
                new = arena.slide_down(offset)
                if new is not None:
                    assert new < offset
                    used[new] = used.pop(offset)
        peak = max(peak, sum(used.values()))
        assert arena.used_bytes == sum(used.values()) == arena.capacity_bytes - arena.free_bytes
        assert largest_hole_bytes(arena) == _largest_gap(used, arena.capacity_bytes)
        assert {part: size for offset in used for part, size in arena.memory_of(offset)} == used
    assert arena.peak_bytes == peak


def _largest_gap(used: dict[int, int], capacity: int) -> int:
    """Also checks that no two ranges overlap."""
    at, largest = 0, 0
    for offset in sorted(used):
        assert offset >= at
        largest = max(largest, offset - at)
        at = offset + used[offset]
    assert at <= capacity
    return max(largest, capacity - at)


@pytest.mark.parametrize("capacity_bytes", [1, 20, PAGE_BYTES - 1])
def test_less_than_a_page_is_refused(capacity_bytes: int) -> None:
    with pytest.raises(BudgetError, match="less than a page"):
        Arena(capacity_bytes)


def test_memory_of_holes_goes_back_to_the_system_as_whole_huge_pages() -> None:
    huge = 2 << 20
    arena = Arena(16 * huge)
    kept, gone, last = (arena.allocate(nbytes) for nbytes in (huge // 2, 12 * huge, huge))
    assert kept is not None and gone is not None and last is not None
    arena.buffer[: arena.capacity_bytes] = b"\x01" * arena.capacity_bytes
    before = resident_bytes()
    arena.free(gone)
    given = arena.give_back_holes()
    assert 11 * huge <= given < 16 * huge
    assert resident_bytes() <= before - given + huge
    assert bytes(arena.buffer[kept : kept + huge // 2]) == b"\x01" * (huge // 2)
    assert bytes(arena.buffer[last : last + huge]) == b"\x01" * huge
    again = arena.allocate(12 * huge)
    assert again == gone and bytes(arena.buffer[again + huge : again + 2 * huge]) == bytes(huge)


def test_memory_that_a_device_knows_stays() -> None:
    assert Arena(4 << 20, lends=False).give_back_holes() == 0
