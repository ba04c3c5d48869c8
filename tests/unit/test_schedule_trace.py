"""The trace learns a step, finds its place again after all that happens, and never reports a wrong distance."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from deepoffload.schedule.events import Event, Phase, UseKey
from deepoffload.schedule.postponed import with_updates_postponed
from deepoffload.schedule.trace import Trace


def program(*keys: int) -> list[Event]:
    """Events whose only block is the last digit of the key: 10..19 forward, 20..29 backward of units 0..9."""
    return [Event(key, (key % 10,)) for key in keys]


FORWARD = program(10, 11, 12)
BACKWARD = program(22, 21, 20)
UPDATE = program(30, 31, 32)
STEP = FORWARD + BACKWARD + UPDATE


def play(trace: Trace, events: list[Event], ends_step: bool = True) -> list[bool]:
    predicted = [trace.observe(event) for event in events]
    if ends_step:
        trace.end_of_step()
    return predicted


def trained(step: list[Event] = STEP) -> Trace:
    trace = Trace()
    play(trace, step)
    return trace


def test_a_repeated_step_is_predicted_after_one() -> None:
    trace = Trace()
    assert play(trace, STEP) == [False] * 9
    assert play(trace, STEP) == [True] * 9
    stats = trace.stats()
    assert (stats.observed, stats.predicted, stats.mismatches, stats.cycles_learned) == (18, 9, 0, 1)
    assert stats.cycle_events == 9


def test_nothing_is_known_while_recording() -> None:
    trace = Trace()
    play(trace, FORWARD, ends_step=False)
    assert trace.next_use(0) == math.inf
    assert list(trace.upcoming()) == []
    assert trace.expected() is None


def test_distances_go_round_the_end() -> None:
    trace = trained()
    play(trace, STEP[:7], ends_step=False)  # next: update of unit 1
    assert [trace.next_use(block) for block in (1, 2, 0, 77)] == [1, 2, 3, math.inf]
    assert list(trace.upcoming()) == [(1, 1), (2, 2), (3, 0), (4, 1), (5, 2), (7, 1), (8, 0)]


def test_a_skipped_unit_costs_one_mismatch() -> None:
    trace = trained()
    assert play(trace, [*FORWARD[:1], *FORWARD[2:], *BACKWARD, *UPDATE]) == [True, False] + [True] * 6


def test_a_repeated_event_costs_one_mismatch_and_the_place_is_kept() -> None:
    trace = trained()
    assert play(trace, [*FORWARD, FORWARD[2], *BACKWARD, *UPDATE]) == [True] * 3 + [False] + [True] * 6


def test_unknown_events_leave_the_place() -> None:
    trace = trained()
    foreign = program(55, 56)
    assert play(trace, [*FORWARD, *foreign, *BACKWARD, *UPDATE]) == [True] * 3 + [False] * 2 + [True] * 6


def test_an_eval_pass_between_steps_does_not_replace_the_cycle() -> None:
    trace = trained()
    play(trace, FORWARD * 2 + STEP)
    assert play(trace, STEP) == [True] * len(STEP)
    assert trace.stats().cycles_learned == 1


def test_a_step_cut_short_does_not_replace_the_cycle() -> None:
    trace = trained()
    assert all(play(trace, FORWARD + BACKWARD))
    assert all(play(trace, STEP))


def test_what_happens_before_every_step_is_learned_at_the_second_time() -> None:
    accumulating = FORWARD + BACKWARD + STEP
    trace = trained()
    play(trace, accumulating)
    play(trace, accumulating)
    assert all(play(trace, accumulating))


def test_a_first_step_that_began_with_an_eval_pass_is_forgotten() -> None:
    trace = trained(FORWARD + STEP)
    play(trace, STEP)
    assert all(play(trace, STEP))


def test_a_new_block_in_a_known_place_is_a_mismatch_and_is_learned() -> None:
    trace = trained()
    changed = [*STEP[:4], Event(21, (1, 7)), *STEP[5:]]
    assert play(trace, changed) == [True] * 4 + [False] + [True] * 4
    assert all(play(trace, changed))
    assert trace.next_use(7) == 5


def test_generation_is_predicted_as_a_loop_and_left_again() -> None:
    trace = trained()
    tokens = [play(trace, FORWARD, ends_step=False) for _ in range(5)]
    assert tokens[1] == [False, True, True]  # the backward pass was expected
    assert tokens[2] == [False, True, True]
    assert tokens[3:] == [[True] * 3] * 2
    assert trace.next_use(0) == 1
    assert play(trace, BACKWARD + UPDATE) == [False] + [True] * 5


def test_a_block_outside_the_loop_is_used_after_those_in_it() -> None:
    step = [*FORWARD, Event(40, (8,)), Event(41, (9,))]
    trace = trained(step)
    play(trace, FORWARD * 4, ends_step=False)
    assert trace.next_use(0) < trace.next_use(8) < trace.next_use(9) < math.inf
    assert trace.next_use(77) == math.inf


def test_without_any_end_of_step_a_loop_is_found() -> None:
    trace = Trace()
    play(trace, STEP * 2 + STEP[:1], ends_step=False)
    assert all(play(trace, STEP[1:] + STEP, ends_step=False))


def test_a_loop_longer_than_the_bound_is_not_learned_and_a_shorter_step_later_is() -> None:
    trace = Trace(max_events=6)
    play(trace, STEP)
    assert trace.expected() is None
    play(trace, FORWARD)
    assert all(play(trace, FORWARD))


events = st.builds(lambda key: Event(key, (key % 5, 10 + key % 3)), st.integers(0, 11))
sequences = st.lists(events, min_size=1, max_size=30)


def distances_by_walking(trace: Trace) -> dict[int, float]:
    found: dict[int, float] = {}
    for distance, block in trace.upcoming():
        found.setdefault(block, distance)
    return found


@given(st.lists(st.tuples(sequences, st.booleans()), min_size=1, max_size=6))
def test_next_use_agrees_with_upcoming_whatever_happens(parts: list[tuple[list[Event], bool]]) -> None:
    trace = Trace(max_events=40)
    for observed, ends_step in parts:
        for event in observed:
            expected = trace.expected()
            assert trace.observe(event) == (event == expected)
            nearest = distances_by_walking(trace)
            order = [distance for distance, _ in trace.upcoming()]
            assert order == sorted(order)
            assert all(trace.next_use(block) == distance for block, distance in nearest.items())
            if nearest:
                assert all(trace.next_use(block) > max(order) for block in range(20) if block not in nearest)
        if ends_step:
            trace.end_of_step()


@given(st.lists(st.tuples(sequences, st.booleans()), max_size=5), sequences)
def test_any_new_program_is_predicted_after_at_most_three_steps(
    past: list[tuple[list[Event], bool]], step: list[Event]
) -> None:
    """One step to learn it, if it looks like an exception one more, and one that began in the middle of something."""
    trace = Trace()
    for observed, ends_step in past:
        play(trace, observed, ends_step)
    for _ in range(3):
        play(trace, step)
    assert all(play(trace, step))


@given(sequences, st.data())
def test_a_disturbed_step_heals_at_once_where_events_are_unique(step: list[Event], data: st.DataObject) -> None:
    """Leaving the order and coming back costs at most one mismatch for each place where it was left."""
    step = list(dict.fromkeys(step))
    trace = trained(step)
    at = data.draw(st.integers(0, len(step) - 1))
    to = data.draw(st.integers(0, len(step) - 1))
    play(trace, step[:at], ends_step=False)
    assert play(trace, step[to:], ends_step=False)[1:] == [True] * (len(step) - to - 1)


def test_memory_is_bounded_when_no_event_ever_repeats() -> None:
    trace = Trace(max_events=8)
    for key in range(1000):
        trace.observe(Event(key, (key,)))
        assert len(trace._history) <= 8
        assert len(trace._last_seen) <= 16
    trace.end_of_step()
    assert trace.stats().cycle_events == 0


def test_a_steady_run_keeps_the_events_of_one_step_only() -> None:
    trace = Trace()
    for _ in range(50):
        for key in range(20):
            trace.observe(Event(key, (key, 1000 + key)))
        trace.end_of_step()
    assert len({id(event) for event in trace._history}) <= 40


def used(*keys: UseKey) -> list[Event]:
    """Events whose block is the unit's number; an update has one more, of its piece."""
    return [Event(key, (key[1][0], *(10 + piece for piece in key[1][1:]))) for key in keys]


def forward(unit: int) -> UseKey:
    return Phase.FORWARD, (unit,)


def backward(unit: int) -> UseKey:
    return Phase.BACKWARD, (unit,)


def update(unit: int, piece: int = 0) -> UseKey:
    return Phase.UPDATE, (unit, piece)


GUESSING = used(
    *(update(0), forward(0), update(1, 1), forward(1), forward(2)),
    *(backward(2), update(2), backward(1), update(1, 0), update(1, 2), backward(0)),
)
"""Unit 2 and two pieces of unit 1 are updated inside backward."""

AFTER_ONE_UNDONE = used(
    *(update(0), forward(0), update(1, 0), update(1, 1), update(1, 2), forward(1), update(2), forward(2)),
    *(backward(2), update(2), backward(1), update(1, 0), update(1, 2), backward(0)),
)


def test_updates_that_were_undone_come_before_the_next_forward() -> None:
    assert list(with_updates_postponed(GUESSING, {0, 1, 2})) == AFTER_ONE_UNDONE
    only_two = [*GUESSING[:4], *used(update(2)), *GUESSING[4:]]
    assert list(with_updates_postponed(GUESSING, {2})) == only_two
    assert list(with_updates_postponed(GUESSING, {0})) == GUESSING


def test_a_step_of_another_order_is_expected_once() -> None:
    trace = trained(GUESSING)

    def play_undone(events: list[Event]) -> list[bool]:
        seen = play(trace, events, ends_step=False)
        trace.end_of_step(spoiled=True)
        trace.expect_once(lambda usual: with_updates_postponed(usual, {1, 2}))
        return seen

    spoiled = GUESSING[:-5]  # the last gradients told before the rest was guessed
    assert all(play_undone(spoiled))
    assert all(play_undone(AFTER_ONE_UNDONE)), "undone again"
    assert all(play(trace, AFTER_ONE_UNDONE))
    assert all(play(trace, GUESSING)), "the usual order is back"
    assert trace.stats().cycles_learned == 1


def test_a_step_that_is_not_as_expected_once_is_learned() -> None:
    trace = trained(GUESSING)
    trace.expect_once(lambda usual: with_updates_postponed(usual, {1, 2}))
    deferred = AFTER_ONE_UNDONE[:8] + used(backward(2), backward(1), backward(0))
    play(trace, deferred)
    assert all(play(trace, deferred))
