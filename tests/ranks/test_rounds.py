"""The protocol of rounds, with random programs: nothing hangs, payloads have one order, and timing changes no sum."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepoffload.ranks.rounds import NOTHING, Payload, RoundOutcome, Rounds, WaitFor, Want, WantKind
from tests.support.rounds_world import REDUCTIONS, Op, Program, World

GATHER, REDUCE = WantKind.GATHER, WantKind.REDUCE
STEP, JOIN, CLOSE, FAILED, WAIT = (
    Want(kind) for kind in (WantKind.STEP, WantKind.JOIN, WantKind.CLOSE, WantKind.FAILED, WantKind.WAIT)
)


def test_a_wait_for_gradients_that_a_rank_at_an_edit_has_not_announced_is_an_error() -> None:
    rounds = Rounds(0, 2, lambda _: None)
    edit, waits = Want(WantKind.EDIT, 4), Want(WantKind.WAIT, 1 + 7)

    def outcome(own: Want, other: Want) -> RoundOutcome:
        rounds.rest(own) if own.kind is WantKind.EDIT else (rounds.post(own), rounds.enter())
        return rounds.take([own, other])

    assert outcome(Want(REDUCE, 5), Want(REDUCE, 7)) == RoundOutcome()
    assert rounds.needs(1, waits, 0) and not rounds.needs(1, Want(WantKind.WAIT, 1 + 5), 0)
    assert outcome(edit, WAIT) == RoundOutcome(), "it waits for a while only"
    assert outcome(edit, waits).apart


def one_step(step: int, units: int, dice: random.Random, own: random.Random, barrier: bool, full: bool) -> list[Op]:
    """A step of one rank: ``dice`` are thrown alike on all ranks, ``own`` are the rank's."""
    order = list(range(units))
    if own.random() < 0.3:
        own.shuffle(order)
    order = [unit for unit in order if own.random() < 0.8]
    apart = {unit for unit in range(units) if dice.random() < 0.3}
    ops: list[Op] = []
    if own.random() < 0.3:  # an evaluation of this rank alone
        ops += [op for unit in range(units) for op in (("need", unit), ("drop", unit))]
    if barrier and dice.random() < 0.7:
        ops.append(("barrier", step))
    for _ in range(own.choice((1, 1, 2, 3))):
        for is_backward in (False, True):
            phase = order[::-1] if is_backward else order
            for place, unit in enumerate(phase):
                ops.append(("need", unit))
                ops += [("prefetch", later) for later in phase[place + 1 : place + 2 + own.randrange(2)]]
                ops.append(("drop", unit))
                if is_backward:
                    again = "reduce, more may come" if unit in apart else "reduce"
                    ops += [(again, unit)] * own.choice((0, 0, 0, 1))
                    ops.append((again if own.random() < 0.5 else "reduce", unit))
                    if full and own.random() < 0.3:  # no room for the next part
                        ops.append(("settle", unit))
        ops.append(("end", 0))
        ops += [("read", unit) for unit in range(units) if own.random() < 0.2]
    return [*ops, ("step", 0)]


def programs(
    seed: int, ranks: int, units: int, steps: list[int], *, equal: bool = False, full: bool = True
) -> list[Program]:
    """One for each rank; rank r makes ``steps[r]`` steps and then joins. ``full``: sometimes there is no room."""
    found = []
    for rank in range(ranks):
        dice, own = random.Random(seed), random.Random(seed if equal else hash((seed, rank)))
        ops = []
        for step in range(steps[rank]):
            ops += one_step(step, units, dice, own, barrier=step < min(steps), full=full)
        found.append([*ops, ("join", 0)])
    return found


SEEDS = st.integers(0, 2**32)
SIZES = st.integers(2, 4).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks), st.integers(1, 6), st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks)
    )
)


@settings(max_examples=150)
@given(SEEDS, SIZES, st.sampled_from((0.0, 0.05, 0.5)))
def test_programs_that_differ_all_finish_and_launch_in_one_order(seed, sizes, impatience):
    ranks, units, steps = sizes
    world = World(programs(seed, ranks, units, steps), seed, impatience)
    assert world.run()
    assert all(rank.launched == world.ranks[0].launched for rank in world.ranks)
    assert all(rank.rounds.steps == max(steps) for rank in world.ranks)
    assert all(rank.rounds.asked in (None, NOTHING) for rank in world.ranks)


@settings(max_examples=100)
@given(SEEDS, SIZES, SEEDS, SEEDS)
def test_neither_speed_nor_nudges_change_a_sum(seed, sizes, first, second):
    ranks, units, steps = sizes
    sums = []
    for schedule, impatience in ((first, 0.0), (second, 0.5)):
        world = World(programs(seed, ranks, units, steps), schedule, impatience)
        assert world.run()
        sums.append(world.sums())
    assert sums[0] == sums[1]


def in_rank_order(program: Program) -> list[dict[int, list[tuple[int, bool]]]]:
    """By step and unit: of which backward each part of a rank is, and whether it has said that more may come."""
    found: list[dict[int, list[tuple[int, bool]]]] = [{}]
    backward = 0
    for operation, unit in program:
        if operation in REDUCTIONS:
            found[-1].setdefault(unit, []).append((backward, operation != "reduce"))
        backward += operation == "end"
        if operation == "step":
            found.append({})
            backward = 0
    return found


@settings(max_examples=100)
@given(SEEDS, SIZES, SEEDS)
def test_parts_are_added_by_backward_and_rank_and_who_reads_a_sum_gets_all_of_it(seed, sizes, schedule):
    ranks, units, steps = sizes
    said = programs(seed, ranks, units, steps, full=False)
    world = World(said, schedule, 0.1)
    assert world.run()
    parts = [in_rank_order(program) for program in said]
    for step, found in enumerate(world.sums()[: max(steps)]):
        for unit in range(units):
            of_ranks = [one[step].get(unit, []) if step < len(one) else [] for one in parts]
            wanted = []
            for backward in range(3):
                counts = [sum(of == backward for of, _ in found) for found in of_ranks]
                if any((backward, True) in found for found in of_ranks):
                    wanted += [(rank,) for rank, count in enumerate(counts) for _ in range(count)]
                else:
                    wanted += [tuple(r for r in range(ranks) if counts[r] > place) for place in range(max(counts))]
            assert found.get(unit, []) == wanted
    for rank in world.ranks:
        for step, unit, ended, reduced in rank.reads:
            of_ranks = [one[step].get(unit, []) if step < len(one) else [] for one in parts]
            assert reduced >= sum(backward < ended for found in of_ranks for backward, _ in found)


@settings(max_examples=100)
@given(SEEDS, SIZES, SEEDS)
def test_equal_programs_make_no_mixed_round(seed, sizes, schedule):
    ranks, units, steps = sizes
    world = World(programs(seed, ranks, units, steps[:1] * ranks, equal=True), schedule)
    assert world.run()
    for rank in world.ranks:
        assert rank.rounds.counts.mixed == 0
        assert rank.rounds.counts.answers == 0


@given(SEEDS)
def test_an_evaluation_on_one_rank_needs_nudges(schedule):
    alone = [("need", 0), ("drop", 0), ("need", 1), ("drop", 1), ("barrier", 0), ("step", 0)]
    waiting = [("barrier", 0), ("step", 0)]
    assert World([alone, waiting], schedule).run()
    assert not World([alone, waiting], schedule, nudging=False).run()


def ready(rank: int, want: Want, world_size: int = 2) -> Rounds:
    """A rank that says ``want``."""
    rounds = Rounds(rank, world_size, lambda _: None)
    if want.kind in (GATHER, REDUCE):
        rounds.post(want)
        rounds.enter()
    elif want.kind is WantKind.FAILED:
        rounds.fail()
    elif want == NOTHING:
        rounds.answer()
    else:
        rounds.rest(want)
    return rounds


@pytest.mark.parametrize(
    ("wants", "outcome"),
    [
        ([Want(GATHER, 3)] * 2, RoundOutcome((Payload(GATHER, 3, (0, 1)),))),
        ([Want(GATHER, 3), Want(GATHER, 1)], RoundOutcome((Payload(GATHER, 3, (0,)), Payload(GATHER, 1, (1,))))),
        ([NOTHING, Want(GATHER, 1)], RoundOutcome((Payload(GATHER, 1, (1,)),))),
        ([Want(REDUCE, 0)] * 2, RoundOutcome((Payload(REDUCE, 0, (0, 1)),))),
        ([Want(REDUCE, 0), NOTHING], RoundOutcome()),
        ([Want(REDUCE, 0), STEP], RoundOutcome((Payload(REDUCE, 0, (0,)),))),
        ([Want(REDUCE, 0), Want(REDUCE, 1)], RoundOutcome()),
        ([Want(REDUCE, 0), JOIN], RoundOutcome((Payload(REDUCE, 0, (0,)),))),
        ([STEP, STEP], RoundOutcome(met=WantKind.STEP)),
        ([JOIN, STEP], RoundOutcome(met=WantKind.STEP, joined=(0,))),
        ([JOIN, JOIN], RoundOutcome(met=WantKind.JOIN, joined=(0, 1))),
        ([STEP, NOTHING], RoundOutcome()),
        ([Want(WantKind.EDIT, 4)] * 2, RoundOutcome(met=WantKind.EDIT)),
        ([Want(WantKind.EDIT, 4), Want(WantKind.EDIT, 2)], RoundOutcome(apart=True)),
        ([Want(WantKind.EDIT, 4), JOIN], RoundOutcome(apart=True)),
        ([Want(WantKind.EDIT, 4), WAIT], RoundOutcome()),
        ([Want(WantKind.EDIT, 4), Want(GATHER, 4)], RoundOutcome((Payload(GATHER, 4, (1,)),))),
        ([Want(WantKind.EDIT, 4), CLOSE], RoundOutcome(apart=True)),
        ([CLOSE, CLOSE], RoundOutcome(met=WantKind.CLOSE)),
        ([CLOSE, NOTHING], RoundOutcome()),
        ([CLOSE, Want(GATHER, 2)], RoundOutcome((Payload(GATHER, 2, (1,)),))),
        ([CLOSE, STEP], RoundOutcome(apart=True)),
        ([JOIN, CLOSE], RoundOutcome(apart=True)),
        ([Want(REDUCE, 0), CLOSE], RoundOutcome(apart=True)),
        ([WAIT, CLOSE], RoundOutcome(apart=True)),
        ([Want(GATHER, 0), FAILED], RoundOutcome(failed=(1,))),
        ([FAILED, CLOSE], RoundOutcome(failed=(0,))),
    ],
)
def test_what_a_round_leads_to(wants, outcome):
    for rank, want in enumerate(wants):
        rounds = ready(rank, want)
        assert rounds.asked == want
        assert rounds.take(wants) == outcome
        assert rounds.asked is None
        assert rounds.counts.rounds == 1
        assert rounds.counts.mixed == (wants[0] != wants[1])


@pytest.mark.parametrize(
    ("other", "ended", "idle"),
    [(STEP, [0, 2], (0,)), (STEP, [1, 0], (1,)), (STEP, [0, 0], ()), (STEP, [1, 2], ()), (JOIN, [1, 0], ())],
)
def test_a_step_tells_which_ranks_have_made_no_backward_for_it(other, ended, idle):
    assert ready(0, STEP).take([STEP, other], ended).idle == idle


def test_parts_wait_for_the_slow_rank():
    rounds = ready(0, Want(REDUCE, 5))
    assert rounds.take([Want(REDUCE, 5), NOTHING]) == RoundOutcome()
    assert rounds.is_pending(Want(REDUCE, 5))
    rounds.rest(Want(WantKind.WAIT))
    assert rounds.take([WAIT, Want(REDUCE, 5)]) == RoundOutcome((Payload(REDUCE, 5, (0, 1)),))
    assert not rounds.is_pending(Want(REDUCE, 5))


def test_a_rank_that_has_ended_a_backward_is_not_waited_for_and_its_next_part_is_of_the_next_one():
    rounds = Rounds(0, 2, lambda _: None)
    rounds.end_backward()
    assert rounds.awaits_parts(5) and rounds.awaits_parts(5, ended=False)
    rounds.answer()
    assert rounds.take([NOTHING, Want(REDUCE, 5)], [1, 0]) == RoundOutcome((Payload(REDUCE, 5, (1,)),))
    assert rounds.awaits_parts(5) and not rounds.awaits_parts(5, ended=False), "it may have another one"
    rounds.post(Want(REDUCE, 5))
    rounds.end_backward()
    rounds.enter()
    another = Payload(REDUCE, 5, (1,), is_more=True)
    assert rounds.take([Want(REDUCE, 5, 2), Want(REDUCE, 5)], [2, 0]) == RoundOutcome((another,))
    rounds.answer()
    assert rounds.take([NOTHING, NOTHING], [2, 2]) == RoundOutcome((Payload(REDUCE, 5, (0,)),))
    assert not rounds.is_pending(Want(REDUCE, 5)) and not rounds.awaits_parts(5)


def test_parts_that_all_wait_for_each_other_are_added_as_they_are():
    rounds = ready(0, Want(REDUCE, 1), world_size=3)
    rounds.take([Want(REDUCE, 1), Want(REDUCE, 2), Want(REDUCE, 1)])
    rounds.rest(Want(WantKind.WAIT))
    assert rounds.take([WAIT, NOTHING, WAIT]) == RoundOutcome()
    rounds.rest(Want(WantKind.WAIT))
    assert rounds.take([WAIT, WAIT, STEP]) == RoundOutcome(), "who reads may have waited for the last rank only"
    rounds.rest(Want(WantKind.WAIT))
    partial = (Payload(REDUCE, 1, (0, 2), is_partial=True), Payload(REDUCE, 2, (1,), is_partial=True))
    assert rounds.take([WAIT, WAIT, STEP]) == RoundOutcome(partial)


def test_parts_are_not_added_before_a_rank_that_waits_for_a_while_has_announced_its_others():
    rounds = ready(0, Want(REDUCE, 1))
    rounds.take([Want(REDUCE, 1), Want(REDUCE, 2)])
    reads, tries = Want(WantKind.WAIT, 1 + 1, WaitFor.ALL_PARTS), Want(WantKind.WAIT, 0, WaitFor.A_WHILE)
    rounds.rest(reads)
    assert rounds.take([reads, tries]) == RoundOutcome()
    rounds.rest(reads)
    assert rounds.take([reads, Want(REDUCE, 1)]) == RoundOutcome((Payload(REDUCE, 1, (0, 1)),))


def test_who_has_no_room_gets_it_from_sums_that_nobody_reads_first():
    rounds = ready(0, Want(REDUCE, 1))
    rounds.take([Want(REDUCE, 1), Want(REDUCE, 2)])
    reads, full = Want(WantKind.WAIT, 1 + 1, WaitFor.ALL_PARTS), Want(WantKind.WAIT, 1 + 2, WaitFor.ROOM)
    rounds.rest(reads)
    assert rounds.take([reads, full]) == RoundOutcome((Payload(REDUCE, 2, (1,), is_partial=True),))
    rounds.post(Want(REDUCE, 2))
    rounds.enter()
    assert rounds.take([Want(REDUCE, 2), Want(WantKind.WAIT, 1 + 2, WaitFor.ROOM)]) == RoundOutcome()
    both = (Payload(REDUCE, 1, (0,), is_partial=True), Payload(REDUCE, 2, (0,), is_partial=True, is_more=True))
    rounds.rest(reads)
    assert rounds.take([reads, Want(WantKind.WAIT, 1 + 3, WaitFor.ROOM)]) == RoundOutcome(both[1:])
    rounds.rest(reads)
    last = rounds.take([reads, Want(WantKind.WAIT, 1 + 3, WaitFor.ROOM)])
    assert last == RoundOutcome(both[:1]), "else nobody goes on"


def test_who_has_not_asked_yet_takes_nothing():
    rounds = ready(0, Want(GATHER, 1))
    rounds.post(Want(GATHER, 2))
    outcome = rounds.take([Want(GATHER, 1), Want(GATHER, 2)])
    assert outcome.payloads == (Payload(GATHER, 1, (0,)), Payload(GATHER, 2, (1,)))
    assert rounds.upcoming == Want(GATHER, 2)
    assert rounds.is_pending(Want(GATHER, 2))


def test_a_failure_comes_before_everything_else():
    said = []
    rounds = Rounds(0, 2, said.append)
    rounds.post(Want(GATHER, 1))
    rounds.enter()
    rounds.post(Want(GATHER, 2))
    rounds.fail()
    rounds.take([Want(GATHER, 1), Want(GATHER, 1)])
    rounds.enter()
    assert said == [Want(GATHER, 1), FAILED]
