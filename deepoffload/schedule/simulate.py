"""The planner played without a disk: which blocks a program faults on and what it moves, counted and not timed.

Transfers complete at once here. What is left is what the schedule alone decides: order, room and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from deepoffload.errors import BudgetError
from deepoffload.schedule.cost_model import BlockKind, StepOverlap, Workload
from deepoffload.schedule.placement import BlockSpec
from deepoffload.schedule.planner import MoveKind, choose_victim, plan_prefetch, plan_write_back
from deepoffload.schedule.trace import Event, Trace


@dataclass(frozen=True)
class Use:
    """An event and what it does to its blocks: ``writes`` are changed by it, ``drops`` are worthless after it (a
    gradient once it is applied: never written back, and next time it begins empty without a read), ``named`` belong to
    the event and are not touched (a gradient that does not land yet)."""

    event: Event
    writes: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    named: tuple[int, ...] = ()


@dataclass
class Counts:
    """What happened so far. ``faults``: blocks read on demand. ``peak_bytes``: most memory held at a time."""

    uses: int = 0
    faults: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    peak_bytes: int = 0


class Simulation:
    """Memory of ``capacity_bytes`` in which a program's uses are played one by one.

    ``static`` blocks are in memory from the beginning and for ever; ``empty`` blocks have no content yet, all others
    lie on NVMe. ``write_behind``: dirty blocks are written as soon as they are not needed soon; otherwise when evicted.
    """

    def __init__(
        self,
        nbytes: Mapping[int, int],
        capacity_bytes: int,
        *,
        lookahead_bytes: int,
        static: frozenset[int] = frozenset(),
        empty: Iterable[int] = (),
        write_behind: bool = False,
    ) -> None:
        self.trace = Trace()
        self.counts = Counts()
        self.resident: set[int] = set(static)
        self._nbytes = nbytes
        self._lookahead_bytes = lookahead_bytes
        self._static = static
        self._empty = set(empty)
        self._write_behind = write_behind
        self._dirty: set[int] = set()
        self._free_bytes = capacity_bytes - sum(nbytes[block] for block in static)
        self._capacity_bytes = capacity_bytes
        self._note_peak()

    def use(self, use: Use) -> int:
        """Play one use: fetch what is missing, apply what it does, prefetch. Returns the number of faults.

        Raises ``BudgetError`` when the blocks of the event alone do not fit.
        """
        blocks = use.event.blocks
        self.trace.observe(use.event)
        faults = 0
        for block in dict.fromkeys(blocks):
            if block not in self.resident:
                faults += block not in self._empty
                self._make_room(self._nbytes[block], blocks)
                self._fetch(block)
        self.counts.uses += 1
        self.counts.faults += faults
        self._dirty.update(use.writes)
        self._empty.difference_update(use.writes)
        for block in use.drops:
            self._dirty.discard(block)
            self._empty.add(block)
            if block not in self._static:
                self._evict(block)
        if self._write_behind:
            self._write_back()
        self._prefetch(blocks)
        return faults

    def end_of_step(self) -> None:
        """Close the step; what was learned from it is used at once."""
        self.trace.end_of_step()
        self._prefetch(())

    def _prefetch(self, in_use: tuple[int, ...]) -> None:
        moves = plan_prefetch(
            self.trace.upcoming(),
            is_resident=self.resident.__contains__,
            nbytes=self._nbytes.__getitem__,
            free_bytes=self._free_bytes,
            evictable=self._evictable(in_use),
            next_use=self.trace.next_use,
            lookahead_bytes=self._lookahead_bytes,
            static=self._static,
            cost=self._cost,
        )
        for move in moves:
            (self._fetch if move.kind is MoveKind.FETCH else self._evict)(move.block)

    def _write_back(self) -> None:
        written = plan_write_back(
            self._dirty,
            self.trace.upcoming(),
            nbytes=self._nbytes.__getitem__,
            next_use=self.trace.next_use,
            lookahead_bytes=self._lookahead_bytes,
            static=self._static,
        )
        self._dirty.difference_update(written)
        self.counts.written_bytes += sum(self._nbytes[block] for block in written)

    def _make_room(self, needed_bytes: int, in_use: tuple[int, ...]) -> None:
        while self._free_bytes < needed_bytes:
            victim = choose_victim(self._evictable(in_use), self.trace.next_use, cost=self._cost)
            if victim is None:
                event_bytes = sum(self._nbytes[block] for block in set(in_use) - self._static)
                raise BudgetError(
                    f"one event uses {event_bytes} bytes beside the blocks that stay in memory, which does not fit in "
                    f"a capacity of {self._capacity_bytes} bytes"
                )
            self._evict(victim)

    def _evictable(self, in_use: tuple[int, ...]) -> list[int]:
        return [block for block in self.resident if block not in self._static and block not in in_use]

    def _cost(self, block: int) -> float:
        return float(self._nbytes[block]) if block in self._dirty else 0.0

    def _fetch(self, block: int) -> None:
        self.resident.add(block)
        self._free_bytes -= self._nbytes[block]
        if block not in self._empty:
            self.counts.read_bytes += self._nbytes[block]
        self._note_peak()

    def _evict(self, block: int) -> None:
        self.resident.remove(block)
        self._free_bytes += self._nbytes[block]
        if block in self._dirty:
            self._dirty.remove(block)
            self.counts.written_bytes += self._nbytes[block]

    def _note_peak(self) -> None:
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._capacity_bytes - self._free_bytes)


def step_uses(blocks: Iterable[BlockSpec], workload: Workload) -> list[Use]:
    """The uses of one step of a chain of units (forward in the order of their numbers, backward in reverse).

    Updates of ``DEFERRED`` are those of the gradients of the step before.
    """
    units: dict[int, _Unit] = {}
    for block in sorted(blocks, key=lambda block: block.unit):
        unit = units.setdefault(block.unit, _Unit([], [], []))
        {BlockKind.WEIGHT: unit.weights, BlockKind.GRADIENT: unit.gradients, BlockKind.STATE: unit.state}[
            block.kind
        ].append(block.id)
    keys: dict[tuple[str, int, int], int] = {}

    def use(phase: str, number: int, blocks: list[int], piece: int = 0, **effects: tuple[int, ...]) -> Use:
        return Use(Event(keys.setdefault((phase, number, piece), len(keys)), tuple(blocks)), **effects)

    def update(number: int, unit: _Unit) -> Iterator[Use]:
        for piece, state in enumerate(unit.state):
            applied = tuple(unit.gradients) if piece == len(unit.state) - 1 else ()
            yield use(
                "update",
                number,
                [*unit.weights, *unit.gradients, state],
                piece,
                writes=(*unit.weights, state),
                drops=applied,
            )

    if not workload.training:
        return [use("forward", number, unit.weights) for number, unit in units.items()]
    uses: list[Use] = []
    last = workload.accumulation_steps - 1
    for micro in range(workload.accumulation_steps):
        for number, unit in units.items():
            if micro == 0 and workload.step_overlap is StepOverlap.DEFERRED:
                uses.extend(update(number, unit))
            uses.append(use("forward", number, unit.weights))
        for number, unit in reversed(units.items()):
            landed = tuple(unit.gradients)
            uses.append(use("backward", number, [*unit.weights, *unit.gradients], writes=landed))
            if micro == last and workload.step_overlap is StepOverlap.IN_BACKWARD:
                uses.extend(update(number, unit))
    if workload.step_overlap is StepOverlap.NONE:
        for number, unit in units.items():
            uses.extend(update(number, unit))
    return uses


@dataclass(frozen=True)
class _Unit:
    """Block ids of one unit by kind."""

    weights: list[int]
    gradients: list[int]
    state: list[int]
