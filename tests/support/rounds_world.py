"""Ranks that run programs against `ranks.rounds.Rounds` under a random scheduler: no threads, no torch, no time.

A program is a list of (operation, unit). ``need`` waits for a unit's bytes, ``prefetch`` asks for them, ``drop``
forgets them, ``reduce`` announces a part (``REDUCTIONS``: the last one in this backward, or perhaps not), ``end`` ends
a backward, ``settle`` waits until this rank's parts of a unit are reduced because it has no room for more, ``read``
until all ranks' parts are, ``barrier`` is a collective of the program itself (it ends when all ranks are in it),
``step`` and ``join`` are what they are.
Messages of a round arrive at every rank at another time, and a payload is over when all ranks have launched it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from deepoffload.ranks.rounds import Payload, Rounds, WaitFor, Want, WantKind

Op = tuple[str, int]
REDUCTIONS = ("reduce", "reduce, more may come")
Program = Sequence[Op]


class SimulatedRank:
    """One rank: its program, its side of the rounds, and what it has launched."""

    def __init__(self, world: World, index: int, program: Program) -> None:
        self.world, self.index, self.program = world, index, program
        self.rounds = Rounds(index, len(world.programs), self._say)
        self.at = 0
        self.launched: list[Payload] = []
        self.asked: set[int] = set()
        self.present: dict[int, int] = {}  # which payload brings, or brought, a unit's bytes
        self.met: WantKind | None = None
        self.waits = False  # in one of our waits; else its program is elsewhere
        self.reads: list[tuple[int, int, int, int]] = []  # step, unit, backwards that have ended, reduced parts
        self.steps_reduced: list[list[tuple[int, tuple[int, ...]]]] = [[]]

    def _say(self, want: Want) -> None:
        self.world.said[self.rounds.counts.rounds][self.index] = want, self.rounds.ended

    @property
    def done(self) -> bool:
        return self.at >= len(self.program)

    def pump(self) -> bool:
        """Take the round that is over, enter the next one. Returns whether anything happened."""
        before = (self.rounds.counts.rounds, self.rounds.asked)
        said = self.world.said[self.rounds.counts.rounds]
        if self.rounds.asked is not None and len(said) == len(self.world.programs):
            self._take([said[rank] for rank in range(len(said))])
        self.rounds.enter()
        return before != (self.rounds.counts.rounds, self.rounds.asked)

    def _take(self, said: list[tuple[Want, int]]) -> None:
        outcome = self.rounds.take([want for want, _ in said], [ended for _, ended in said])
        assert not outcome.failed and not outcome.apart
        for payload in outcome.payloads:
            self.launched.append(payload)
            if payload.kind is WantKind.REDUCE:
                self.steps_reduced[-1].append((payload.unit, payload.ranks))
            elif self.index in payload.ranks:
                self.asked.remove(payload.unit)
                self.present[payload.unit] = len(self.launched) - 1
        if outcome.met is not None:
            self.met = outcome.met
            self.steps_reduced.append([])

    def advance(self) -> bool:
        """Let the program do one operation, or a part of one. Returns whether anything happened."""
        if self.done:
            return False
        operation, unit = self.program[self.at]
        if operation == "barrier":
            self.waits = False
            return self._end(self.world.enter_barrier(self.index, unit))
        moved = self.pump()
        if operation in ("need", "prefetch") and unit not in self.present and unit not in self.asked:
            self.asked.add(unit)
            self.rounds.post(Want(WantKind.GATHER, unit))
            moved = True
        if operation in REDUCTIONS:
            self.rounds.post(Want(WantKind.REDUCE, unit, REDUCTIONS.index(operation)))
        if operation == "end":
            self.rounds.end_backward()
        if operation == "drop":
            self.present.pop(unit, None)
        self.waits = not self._is_over(operation, unit)
        return self._end(not self.waits) or self.pump() or moved

    def _is_over(self, operation: str, unit: int) -> bool:
        if operation == "need":
            return unit in self.present and self.world.all_have_launched(self.present[unit])
        if operation == "settle":
            if not self.rounds.is_pending(Want(WantKind.REDUCE, unit)):
                return True
            self.rounds.rest(Want(WantKind.WAIT, 1 + unit, WaitFor.ROOM))
            return False
        if operation == "read":
            if self.rounds.awaits_parts(unit):
                self.rounds.rest(Want(WantKind.WAIT, 1 + unit, WaitFor.ALL_PARTS))
                return False
            reduced = sum(len(ranks) for found, ranks in self.steps_reduced[-1] if found == unit)
            self.reads.append((self.rounds.steps, unit, self.rounds.backwards, reduced))
        if operation in ("step", "join"):
            own = WantKind.STEP if operation == "step" else WantKind.JOIN
            met, self.met = self.met, None
            if met is own:
                return True
            assert met is None or operation == "join"  # who has joined steps with the others
            self.rounds.rest(Want(own))
            return False
        return True

    def _end(self, over: bool) -> bool:
        self.at += over
        if over:
            self.waits = False
        return over

    def is_nudged(self) -> bool:
        """Others need this rank. Returns whether it had anything to do."""
        return not self.waits and (self.pump() or self.rounds.answer())


class World:
    """All ranks, and the messages between them.

    Args:
        impatience: how often a rank that waits nudges the others although they may only be slow.
        nudging: whether a rank is nudged at all.
    """

    def __init__(self, programs: Sequence[Program], seed: int, impatience: float = 0.0, nudging: bool = True) -> None:
        self.programs, self.impatience, self.nudging = programs, impatience, nudging
        self.dice = random.Random(seed)
        self.said: defaultdict[int, dict[int, tuple[Want, int]]] = defaultdict(dict)
        self._in_barrier: defaultdict[int, set[int]] = defaultdict(set)
        self.ranks = [SimulatedRank(self, index, program) for index, program in enumerate(programs)]
        self._speed = [self.dice.choice((1, 3, 10)) for _ in programs]

    def enter_barrier(self, rank: int, barrier: int) -> bool:
        """Whether all are in it."""
        self._in_barrier[barrier].add(rank)
        return len(self._in_barrier[barrier]) == len(self.programs)

    def all_have_launched(self, index: int) -> bool:
        return all(len(rank.launched) > index for rank in self.ranks)

    def run(self) -> bool:
        """Run all programs to their end. Returns False when nobody can move and somebody is left."""
        while not all(rank.done for rank in self.ranks):
            if self.dice.choices(self.ranks, self._speed)[0].advance():
                if self.dice.random() < self.impatience and any(rank.waits for rank in self.ranks):
                    self.dice.choice(self.ranks).is_nudged()
            elif not any(rank.advance() for rank in self.ranks):
                if not self.nudging or not any(rank.is_nudged() for rank in self.ranks):
                    return False
        return True

    def sums(self) -> list[dict[int, list[tuple[int, ...]]]]:
        """By step and unit: whose parts are added, in this order. It must not depend on the scheduler."""
        found = []
        for step in self.ranks[0].steps_reduced:
            parts: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
            for unit, ranks in step:
                parts[unit].append(ranks)
            found.append(dict(parts))
        return found
