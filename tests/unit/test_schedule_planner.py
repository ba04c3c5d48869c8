"""Plans never exceed memory, never give up what is needed sooner, and always use the room there is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from deepoffload.schedule.planner import Move, MoveKind, plan_prefetch, plan_write_back
from deepoffload.schedule.victims import choose_victim, leaving_order


@dataclass(frozen=True)
class Case:
    """A memory of ``free_bytes`` and the resident blocks, and the order of uses ahead."""

    order: list[int]
    sizes: dict[int, int]
    resident: frozenset[int]
    evictable: frozenset[int]
    static: frozenset[int]
    free_bytes: int
    lookahead_bytes: int

    @property
    def upcoming(self) -> list[tuple[int, int]]:
        """Two blocks for each event."""
        return [(1 + index // 2, block) for index, block in enumerate(self.order)]

    def next_use(self, block: int) -> float:
        return 1 + self.order.index(block) // 2 if block in self.order else math.inf

    def plan(self) -> list[Move]:
        return plan_prefetch(
            iter(self.upcoming),
            is_resident=self.resident.__contains__,
            nbytes=self.sizes.__getitem__,
            free_bytes=self.free_bytes,
            evictable=self.evictable,
            next_use=self.next_use,
            lookahead_bytes=self.lookahead_bytes,
            static=self.static,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    blocks = list(range(draw(st.integers(1, 12))))
    subset = st.frozensets(st.sampled_from(blocks))
    resident = draw(subset)
    static = resident & draw(subset)
    return Case(
        order=draw(st.lists(st.sampled_from(blocks), max_size=30)),
        sizes={block: draw(st.integers(1, 9)) for block in blocks},
        resident=resident,
        evictable=(resident - static) & draw(subset),
        static=static,
        free_bytes=draw(st.integers(0, 30)),
        lookahead_bytes=draw(st.integers(0, 60)),
    )


@given(cases())
def test_every_prefix_of_a_plan_fits_and_every_move_is_possible(case: Case) -> None:
    free, resident = case.free_bytes, set(case.resident)
    for move in case.plan():
        if move.kind is MoveKind.FETCH:
            assert move.block not in resident
            resident.add(move.block)
            free -= case.sizes[move.block]
        else:
            assert move.block in resident & case.evictable
            resident.remove(move.block)
            free += case.sizes[move.block]
        assert free >= 0


@given(cases())
def test_nothing_is_evicted_for_a_block_that_is_used_later(case: Case) -> None:
    moves = case.plan()
    fetched = [case.next_use(move.block) for move in moves if move.kind is MoveKind.FETCH]
    evicted = [case.next_use(move.block) for move in moves if move.kind is MoveKind.EVICT]
    assert not evicted or min(evicted) > max(fetched)


@given(cases())
def test_a_plan_never_undoes_itself_and_ends_with_a_fetch(case: Case) -> None:
    moves = case.plan()
    assert len({move.block for move in moves}) == len(moves)
    assert not moves or moves[-1].kind is MoveKind.FETCH


@given(cases())
def test_fetches_are_those_next_in_order_within_the_window(case: Case) -> None:
    fetched = [move.block for move in case.plan() if move.kind is MoveKind.FETCH]
    distinct = [block for block in dict.fromkeys(case.order) if block not in case.static]
    missing = [block for block in distinct if block not in case.resident]
    assert fetched == missing[: len(fetched)]
    if fetched:
        window = distinct[: distinct.index(fetched[-1]) + 1]
        assert sum(case.sizes[block] for block in window) <= case.lookahead_bytes


@given(cases())
def test_a_plan_stops_only_for_want_of_room_or_at_the_window(case: Case) -> None:
    """Progress: the next missing block is fetched whenever evicting all that is used later makes room for it."""
    moves = case.plan()
    fetched = {move.block for move in moves if move.kind is MoveKind.FETCH}
    evicted = {move.block for move in moves if move.kind is MoveKind.EVICT}
    free = case.free_bytes + sum(case.sizes[b] for b in evicted) - sum(case.sizes[b] for b in fetched)
    window_bytes = 0
    for block in dict.fromkeys(block for block in case.order if block not in case.static):
        window_bytes += case.sizes[block]
        if window_bytes > case.lookahead_bytes or block in evicted:
            return
        if block not in case.resident | fetched:
            later = [b for b in case.evictable - evicted if case.next_use(b) > case.next_use(block)]
            assert free + sum(case.sizes[b] for b in later) < case.sizes[block]
            return


@given(cases())
def test_no_eviction_of_a_plan_is_needless(case: Case) -> None:
    free, evicted = case.free_bytes, list[int]()
    for move in case.plan():
        if move.kind is MoveKind.EVICT:
            evicted.append(case.sizes[move.block])
            continue
        if evicted:
            room = free + sum(evicted)
            assert all(room - size < case.sizes[move.block] for size in evicted)
        free += sum(evicted) - case.sizes[move.block]
        evicted = []


def test_a_larger_farther_victim_spares_a_smaller_nearer_one() -> None:
    case = Case(
        [0, 0, 1, 1, 2, 2, 3, 3],
        {0: 5, 1: 1, 2: 5, 3: 2},
        frozenset({1, 2, 3}),
        frozenset({1, 2, 3}),
        frozenset(),
        0,
        99,
    )
    assert case.plan() == [Move(MoveKind.EVICT, 2), Move(MoveKind.FETCH, 0)]


def test_what_an_eviction_leaves_over_is_used() -> None:
    case = Case([0, 0, 2, 2, 1], {0: 5, 1: 4, 2: 1}, frozenset({1}), frozenset({1}), frozenset(), 2, 99)
    assert case.plan() == [Move(MoveKind.EVICT, 1), Move(MoveKind.FETCH, 0), Move(MoveKind.FETCH, 2)]


def test_blocks_of_the_same_event_do_not_take_each_others_room() -> None:
    case = Case([0, 1], {0: 5, 1: 5}, frozenset({1}), frozenset({1}), frozenset(), 0, 99)
    assert case.plan() == []


def test_nothing_is_fetched_beyond_a_block_that_was_given_up() -> None:
    case = Case([0, 0, 1, 1, 2], {0: 2, 1: 3, 2: 1}, frozenset({1}), frozenset({1}), frozenset(), 0, 99)
    assert case.plan() == [Move(MoveKind.EVICT, 1), Move(MoveKind.FETCH, 0)]


def test_write_back_begins_with_the_farthest() -> None:
    order = [0, 1, 2, 3, 4]
    written = plan_write_back(
        [2, 9, 4, 0, 3],
        list(enumerate(order, 1)),
        nbytes=lambda block: 1,
        next_use=lambda block: order.index(block) + 1 if block in order else math.inf,
        lookahead_bytes=2,
    )
    assert written == [9, 4, 3, 2]


def test_the_scan_is_limited() -> None:
    def upcoming() -> object:
        for distance in range(1, 5):
            yield distance, distance
        raise AssertionError("looked too far")

    moves = plan_prefetch(
        upcoming(),  # type: ignore[arg-type]
        is_resident=lambda block: True,
        nbytes=lambda block: 1,
        free_bytes=0,
        evictable=(),
        next_use=lambda block: math.inf,
        lookahead_bytes=1 << 40,
        scan_limit=4,
    )
    assert moves == []


distances = st.dictionaries(st.integers(0, 20), st.one_of(st.integers(1, 5).map(float), st.just(math.inf)))


@given(distances, st.frozensets(st.integers(0, 20)), st.sampled_from([-math.inf, 2.0, math.inf]))
def test_the_victim_is_the_farthest_then_the_cleanest_then_the_highest(
    next_use: dict[int, float], dirty: frozenset[int], farther_than: float
) -> None:
    def order(block: int) -> tuple[float, bool, int]:
        return -next_use[block], block in dirty, -block

    is_clean: Callable[[int], bool] = lambda block: block not in dirty  # noqa: E731
    victim = choose_victim(next_use, next_use.__getitem__, is_clean=is_clean, farther_than=farther_than)
    allowed = [block for block in next_use if next_use[block] > farther_than]
    assert victim == (min(allowed, key=order) if allowed else None)
    assert list(leaving_order(next_use, next_use.__getitem__, is_clean=is_clean)) == sorted(next_use, key=order)


@given(distances)
def test_the_victim_does_not_depend_on_the_order_of_candidates(next_use: dict[int, float]) -> None:
    forward = choose_victim(list(next_use), next_use.__getitem__)
    assert forward == choose_victim(reversed(list(next_use)), next_use.__getitem__)


@given(cases(), st.frozensets(st.integers(0, 11)))
def test_write_back_takes_what_is_not_needed_within_the_window_farthest_first(
    case: Case, dirty: frozenset[int]
) -> None:
    dirty = dirty & case.resident
    written = plan_write_back(
        dirty,
        case.upcoming,
        nbytes=case.sizes.__getitem__,
        next_use=case.next_use,
        lookahead_bytes=case.lookahead_bytes,
        static=case.static,
    )
    near: set[int] = set()
    for block in case.order:
        if block not in case.static and sum(case.sizes[b] for b in near | {block}) > case.lookahead_bytes:
            break
        near |= {block} - case.static
    assert set(written) == dirty - case.static - near
    uses = [case.next_use(block) for block in written]
    assert uses == sorted(uses, reverse=True)


@given(cases(), st.frozensets(st.integers(0, 11)), st.integers(0, 20), st.integers(0, 20))
def test_room_is_left_for_blocks_that_come_without_a_transfer(
    case: Case, without: frozenset[int], reserve_bytes: int, aside_bytes: int
) -> None:
    """Empty blocks are never fetched, and before anything is fetched there is room for those used sooner: for every
    static one, for ``reserve_bytes`` of the others, and for what the running event takes."""
    empty = without - case.resident
    static = case.static | frozenset(block for block in empty if block % 2)
    moves = plan_prefetch(
        iter(case.upcoming),
        is_resident=lambda block: block in case.resident,
        nbytes=case.sizes.__getitem__,
        free_bytes=case.free_bytes,
        evictable=case.evictable,
        next_use=case.next_use,
        lookahead_bytes=case.lookahead_bytes,
        static=static,
        is_empty=empty.__contains__,
        reserve_bytes=reserve_bytes,
        aside_bytes=aside_bytes,
    )
    free, order = case.free_bytes, list(dict.fromkeys(case.order))
    for move in moves:
        if move.kind is MoveKind.EVICT:
            free += case.sizes[move.block]
            continue
        assert move.block not in empty
        free -= case.sizes[move.block]
        sooner = [block for block in order[: order.index(move.block)] if block in empty]
        others_bytes = sum(case.sizes[block] for block in sooner if block not in static)
        static_bytes = sum(case.sizes[block] for block in sooner if block in static)
        assert free >= aside_bytes + static_bytes + min(reserve_bytes, others_bytes)


def test_what_comes_without_a_transfer_does_not_end_the_plan() -> None:
    """In backward the gradients to come lie before the state of the next step, which the idle disk can bring."""
    moves = plan_prefetch(
        [(1, 0), (2, 1), (3, 2), (4, 3)],
        is_resident=lambda block: False,
        nbytes=lambda block: 10,
        free_bytes=40,
        evictable=(),
        next_use=lambda block: block + 1,
        lookahead_bytes=10,
        is_empty={0, 1, 2}.__contains__,
        reserve_bytes=20,
    )
    assert moves == [Move(MoveKind.FETCH, 3)]
