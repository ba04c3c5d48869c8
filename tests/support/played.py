"""The planner played without a disk: which blocks a program faults on and what it moves, counted and not timed.

Transfers complete at once here. What is left is what the schedule alone decides: order, room and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deepoffload.errors import BudgetError
from deepoffload.schedule.cost_model import Workload
from deepoffload.schedule.placement import BlockSpec
from deepoffload.schedule.planner import MoveKind, plan_prefetch, plan_write_back
from deepoffload.schedule.trace import Trace
from deepoffload.schedule.uses import Use, step_uses, unit_blocks
from deepoffload.schedule.victims import choose_victim


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

    ``static`` blocks are in memory from the beginning to the end; ``empty`` blocks have no content yet, all others
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
            self._drop(block)
        if self._write_behind:
            self._write_back()
        self._prefetch(blocks)
        return faults

    def end_of_step(self, discards: Iterable[int] = ()) -> None:
        """Close the step, after which ``discards`` are worthless; what was learned from it is used at once."""
        self.trace.end_of_step()
        for block in discards:
            self._drop(block)
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
            victim = choose_victim(self._evictable(in_use), self.trace.next_use, is_clean=self._is_clean)
            if victim is None:
                event_bytes = sum(self._nbytes[block] for block in set(in_use) - self._static)
                raise BudgetError(
                    f"one event uses {event_bytes} bytes next to the blocks that stay in memory, which does not fit in "
                    f"a capacity of {self._capacity_bytes} bytes"
                )
            self._evict(victim)

    def _evictable(self, in_use: tuple[int, ...]) -> list[int]:
        return [block for block in self.resident if block not in self._static and block not in in_use]

    def _is_clean(self, block: int) -> bool:
        return block not in self._dirty

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

    def _drop(self, block: int) -> None:
        self._dirty.discard(block)
        self._empty.add(block)
        if block in self.resident and block not in self._static:
            self._evict(block)

    def _note_peak(self) -> None:
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._capacity_bytes - self._free_bytes)


@dataclass(frozen=True)
class ChainVisit:
    """A visit of one unit of a chain."""

    backward: bool
    units: tuple[int, ...]
    landed: Mapping[int, int]


def chain_uses(blocks: Iterable[BlockSpec], workload: Workload) -> list[Use]:
    """The uses of one step of a chain of units: forward in the order of their numbers, backward in reverse."""
    units = unit_blocks(blocks)
    visits = [ChainVisit(False, (unit,), {}) for unit in units]
    visits += [ChainVisit(True, (unit,), {unit: 1}) for unit in reversed(units)]
    return [use.use for use in step_uses(visits, units, workload)]
