"""Ranks that wait for each other at steps of different models: found where nobody can go on, and nowhere else.

No processes and no time: a random scheduler says who does what next. What a rank has said arrives at each of the others
at another moment, and what a thread has read may be old when it says it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepoffload.ranks.elsewhere import WaitsAcrossModels
from deepoffload.ranks.rounds import NOTHING, Rounds, Want, WantKind

STEP = Want(WantKind.STEP)
EVENTS = 4000
"""More than any of these programs needs."""


class Store:
    """That of all ranks."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.numbers: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def add(self, key: str, amount: int) -> int:
        self.numbers[key] += amount
        return self.numbers[key]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = value
        return self.values.get(key, "").encode()


class Model:
    """One rank's side of one model."""

    def __init__(self, world: World, number: int, rank: int) -> None:
        self.rank, self.said = rank, world.said[number]
        self.rounds = Rounds(
            rank, world.ranks, lambda want: self.said[self.rounds.counts.rounds].__setitem__(rank, want)
        )
        self.elsewhere = WaitsAcrossModels(world.store, rank, world.ranks, lambda: True, world.tick)
        self.unmet: list[Want] = []
        self.met = False
        self.read: Want = NOTHING

    def take(self) -> None:
        """Take the round that is over, if there is one."""
        said = self.said[self.rounds.counts.rounds]
        if self.rounds.asked is not None and len(said) == self.rounds.world_size:
            wants = [said[rank] for rank in range(self.rounds.world_size)]
            outcome = self.rounds.take(wants)
            self.unmet = [] if outcome.met else wants
            self.met = self.met or outcome.met is not None


class World:
    """All ranks. ``programs``: the models at whose steps each of them is, one after the other."""

    def __init__(self, programs: list[list[int]], seed: int) -> None:
        self.programs, self.ranks, self.dice = programs, len(programs), random.Random(seed)
        self.store, self.now = Store(), 0.0
        self.said: Any = defaultdict(lambda: defaultdict(dict))
        self.models = [[Model(self, number, rank) for number in range(2)] for rank in range(self.ranks)]
        self.at = [0] * self.ranks
        self.inside = [False] * self.ranks
        self.paces = self._new_paces()

    def tick(self) -> float:
        """Each look at the clock is a long time after the last one."""
        self.now += 2.0
        return self.now

    def is_over(self) -> bool:
        return all(at == len(program) for at, program in zip(self.at, self.programs, strict=True))

    def happens(self) -> str | None:
        """Something does. Returns what a rank has found out."""
        if self.dice.random() < 0.05:
            self.paces = self._new_paces()
        ((rank, thread),) = self.dice.choices(list(self.paces), list(self.paces.values()))
        program, at = self.programs[rank], self.at[rank]
        if thread is not None:
            self._thread(rank, thread)
        elif at < len(program):
            return self._program(rank, self.models[rank][program[at]])
        return None

    def _new_paces(self) -> dict[tuple[int, int | None], float]:
        """How often each program (None) and each thread does something from now on: some hardly do."""
        actors = itertools.product(range(self.ranks), (None, 0, 1))
        return {actor: self.dice.choice((0.001, 1.0)) for actor in actors}

    def _program(self, rank: int, model: Model) -> str | None:
        self.inside[rank] = True
        model.take()
        if model.met:
            model.elsewhere.wait_is_over()
            model.met, self.inside[rank] = False, False
            self.at[rank] += 1
            return None
        model.rounds.rest(STEP)
        here = bool(model.unmet) and model.unmet[rank] == STEP and self.dice.random() < 0.5
        needed = {other: want for other, want in enumerate(model.unmet) if here and other != rank}
        return model.elsewhere.look_around("at step", model.rounds.counts.rounds, needed)

    def _thread(self, rank: int, number: int) -> None:
        model = self.models[rank][number]
        if self.dice.random() < 0.5:
            model.read = model.elsewhere.want()
        elif not (self.inside[rank] and self.programs[rank][self.at[rank]] == number):
            model.take()
            model.rounds.answer(model.read)
            model.read = NOTHING


def ends(programs: list[list[int]]) -> bool:
    """Whether ranks that do nothing but meet come to the end."""
    return all(program == programs[0] for program in programs)


@st.composite
def orders(draw: Any) -> list[list[int]]:
    """The same steps on all ranks, in other orders on some or in the same one on all."""
    first = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
    same = draw(st.booleans())
    return [first if same else draw(st.permutations(first)) for _ in range(draw(st.integers(2, 4)))]


@settings(max_examples=300)
@given(orders(), st.integers(0, 2**32))
@example([[0, 1], [1, 0]], 0)
def test_ranks_are_found_to_wait_for_each_other_where_they_do_so_for_ever(programs: list[list[int]], seed: int) -> None:
    world = World(programs, seed)
    found = None
    for _ in range(EVENTS):
        found = world.happens()
        if found or world.is_over():
            break
    told = [model.elsewhere.told() for models in world.models for model in models if model.elsewhere.watches]
    if found:  # by one of those that wait; it may end before the others look
        assert told.count(None) <= 1 and set(told) - {None} == {found}
    else:
        assert not any(told)
    assert (found is None) == ends(programs) == world.is_over(), (found, world.at)
    assert found is None or "none goes on. Let all ranks make the same calls of all models" in found
