"""A step that leaves layers out: what of the known order does not come is not waited for, and what comes later is."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from deepoffload.schedule.events import Event, Phase, UseKey
from deepoffload.schedule.trace import Trace
from deepoffload.schedule.united import united

PIECES = 2


def used(*keys: UseKey) -> list[Event]:
    """Events whose block is the unit's number; an update has one more, of its piece."""
    return [Event(key, (key[1][0], *(100 * (1 + key[1][0]) + piece for piece in key[1][1:]))) for key in keys]


def forward(unit: int) -> UseKey:
    return Phase.FORWARD, (unit,)


def backward(unit: int) -> UseKey:
    return Phase.BACKWARD, (unit,)


def update(unit: int) -> list[UseKey]:
    return [(Phase.UPDATE, (unit, piece)) for piece in range(PIECES)]


def backwards(units: Iterable[int], recompute: bool = False) -> list[UseKey]:
    return [key for unit in reversed(list(units)) for key in [forward(unit)] * recompute + [backward(unit)]]


class Program:
    """Steps of a model as the engine makes events of them: a pending update comes with a unit's next forward, or where
    the next step ends."""

    def __init__(self, *, deferred: bool = True, recompute: bool = False) -> None:
        self.deferred = deferred
        self.recompute = recompute
        self.guessed: set[int] = set()  # updated inside backward
        self.pending: set[int] = set()

    def step(self, *passes: Iterable[int]) -> list[Event]:
        """Of micro-batches, each through some units."""
        keys: list[UseKey] = []
        ran: set[int] = set()
        for units in map(list, passes):
            for unit in units:
                keys += update(unit) if unit in self.pending else []
                self.pending.discard(unit)
                keys.append(forward(unit))
            for key in backwards(units, self.recompute):
                in_backward = key[0] is Phase.BACKWARD and key[1][0] in self.guessed
                keys += [key, *(update(key[1][0]) if in_backward else ())]
            ran.update(units)
        for unit in sorted(ran if not self.deferred else self.pending):
            keys += update(unit)
        self.pending = ran - self.guessed if self.deferred else set()
        return used(*keys)


def play(trace: Trace, events: list[Event]) -> list[bool]:
    predicted = [trace.observe(event) for event in events]
    trace.end_of_step()
    return predicted


def surprises(trace: Trace, events: list[Event]) -> int:
    return play(trace, events).count(False)


def trained(program: Program, *passes: Iterable[int]) -> Trace:
    trace = Trace()
    for _ in range(3):
        play(trace, program.step(*passes))
    return trace


def without(*units: int, of: int = 6) -> list[int]:
    return [unit for unit in range(of) if unit not in units]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_unit_that_is_left_out_costs_one_surprise(deferred: bool, recompute: bool) -> None:
    program = Program(deferred=deferred, recompute=recompute)
    trace = trained(program, range(6))
    learned = trace.stats().cycles_learned
    for left in ((2,), (1,), (3, 4), (), (5,), (0, 2, 4), (), ()):
        jumps = sum(unit - 1 not in left for unit in left)
        assert surprises(trace, program.step(without(*left))) == jumps, left
    assert trace.stats().cycles_learned == learned
    assert trace.stats().left_out == 8


def test_what_was_left_out_is_used_next_in_the_next_step_and_its_update_at_the_end() -> None:
    program = Program()
    trace = trained(program, range(3))
    for event in program.step([0, 2])[:6]:  # both pieces and forward of 0, then of 2
        trace.observe(event)
    order = [block for _, block in trace.upcoming()]
    assert order[:5] == [2, 0, 1, 200, 201], "backward of 2 and 0, and the pieces of 1"
    assert trace.next_use(1) == 3, "its update"
    following = order[5:]
    assert following.index(0) < following.index(1) < following.index(2)
    assert 200 not in following, "no gradient, so no update in the next step"


def test_the_next_step_has_no_update_of_what_was_left_out() -> None:
    program = Program()
    trace = trained(program, range(3))
    play(trace, program.step([0, 2]))
    assert all(play(trace, program.step(range(3))))


@pytest.mark.parametrize("deferred", [False, True])
def test_micro_batches_may_leave_out_different_units(deferred: bool) -> None:
    program = Program(deferred=deferred)
    trace = trained(program, range(6), range(6))
    for first, second in (((1,), ()), ((), (1,)), ((2,), (3,)), ((4,), (4,)), ((), ())):
        assert surprises(trace, program.step(without(*first), without(*second))) == len(first) + len(second)


def test_a_pattern_that_repeats_is_learned_and_the_longer_one_is_remembered() -> None:
    program = Program()
    trace = trained(program, range(6))
    for _ in range(4):
        play(trace, program.step(without(2, 4)))
    assert all(play(trace, program.step(without(2, 4))))
    assert surprises(trace, program.step(without(4))) == 2, "unit 2 is back, and the order lacks 4 again"
    assert surprises(trace, program.step(range(6))) == 0
    assert all(play(trace, program.step(range(6))))


def test_steps_of_which_none_is_whole_are_put_together() -> None:
    program = Program()
    trace = Trace()
    for left in (2, 4, 1, 3):
        play(trace, program.step(without(left)))
    play(trace, program.step(range(6)))
    assert surprises(trace, program.step(range(6))) <= PIECES
    assert surprises(trace, program.step(without(3))) == 1


def test_a_unit_that_comes_later_than_usual_is_not_left_out() -> None:
    program = Program(deferred=False)
    trace = trained(program, range(4))
    assert surprises(trace, program.step([0, 2, 1, 3])) <= 5


def test_an_update_that_is_made_early_leaves_nothing_out() -> None:
    """The program has looked at a weight of unit 3 between two steps."""
    program = Program()
    trace = trained(program, range(6))
    step = program.step(range(6))
    early = [event for event in step if event.key in update(3)]
    assert surprises(trace, [*early, *(event for event in step if event not in early)]) == 3
    assert trace.stats().left_out == 0
    assert all(play(trace, program.step(range(6))))


def test_a_seeded_run_with_random_depth_has_one_surprise_for_each_unit_left_out() -> None:
    draw = random.Random(0)
    program = Program()
    trace = trained(program, range(12))
    before = trace.stats()
    for _ in range(300):
        play(trace, program.step([unit for unit in range(12) if draw.random() > unit / 24]))
    stats = trace.stats()
    assert stats.mismatches - before.mismatches <= stats.left_out - before.left_out
    assert stats.left_out - before.left_out > 700


def test_a_program_that_leaves_units_out_from_its_first_step_on_is_learned() -> None:
    draw = random.Random(0)
    program, trace = Program(), Trace()
    for number in range(40):
        before = trace.stats()
        play(trace, program.step([unit for unit in range(12) if draw.random() > unit / 24]))
        after = trace.stats()
        assert number < 8 or after.mismatches - before.mismatches <= after.left_out - before.left_out, number


def test_updates_that_move_into_backward_or_out_of_it_are_learned_though_each_step_leaves_out_others() -> None:
    draw = random.Random(0)
    program = Program()
    trace = trained(program, range(12))
    for guessed in ({2, 5, 8}, {2, 5, 6, 8, 11}, {0, 5, 8}, set()):
        moved, program.guessed = len(guessed ^ program.guessed), guessed
        for number in range(30):
            before = trace.stats()
            play(trace, program.step([unit for unit in range(12) if draw.random() > unit / 24]))
            after = trace.stats()
            allowed = after.left_out - before.left_out + (2 * PIECES * moved if number < 4 else 0)
            assert after.mismatches - before.mismatches <= allowed, (guessed, number)


def once(events: list[Event]) -> list[Event]:
    """The same use again is no other event: the last unit that runs need not run again for its backward."""
    return [event for number, event in enumerate(events) if not number or event != events[number - 1]]


def test_united_has_both_in_order_and_no_update_of_a_unit_that_has_not_run() -> None:
    one = tuple(used(forward(0), forward(2), forward(3), backward(3), backward(2), backward(0)))
    other = tuple(used(forward(0), forward(1), forward(3), backward(3), backward(1), backward(0), *update(2)))
    both = [forward(0), forward(1), forward(2), forward(3), backward(3), backward(2), backward(1), backward(0)]
    assert united(one, other) == tuple(used(*both))
    turned = tuple(used(forward(0), forward(3), forward(1), backward(1), backward(3), backward(0)))
    frozen = tuple(used(forward(0), forward(2), forward(3), backward(3), backward(0)))
    assert united(other, turned) is None, "another order"
    assert united(one, frozen) is None, "a unit without its backward is not left out"
    assert united(one, one + one) is None, "another number of micro-batches"
    tried_first = tuple(used(forward(0), forward(2), forward(3))) + one
    assert united(tried_first, one) is None, "no unit is left out: what ran once more was the first step's alone"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_layers_that_are_left_out_from_the_first_step_on(micro_batches: int, deferred: bool, recompute: bool) -> None:
    """No step ever has all of them. After a few it is foreseen as where whole steps came first."""
    for seed in range(4):
        draw = random.Random(seed)
        program, trace = Program(deferred=deferred, recompute=recompute), Trace()
        knowing_program = Program(deferred=deferred, recompute=recompute)
        knowing = Trace()
        for _ in range(3):
            play(knowing, once(knowing_program.step(*[range(12)] * micro_batches)))
        surprised, knowing_surprised, left = [], [], []
        for _ in range(20):
            passes = [[u for u in range(12) if not u or draw.random() > u / 24] for _ in range(micro_batches)]
            left.append(12 * micro_batches - sum(map(len, passes)))
            surprised.append(surprises(trace, once(program.step(*passes))))
            knowing_surprised.append(surprises(knowing, once(knowing_program.step(*passes))))
        allowed = max(sum(knowing_surprised[6:]), 1.2 * sum(left[6:]))
        assert sum(surprised[6:]) <= allowed, (seed, surprised, knowing_surprised)
