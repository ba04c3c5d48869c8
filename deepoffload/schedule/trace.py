"""The order in which a program uses its blocks, learned from one step and kept right when the program leaves it.

A program trains in steps which repeat, so its last complete step is the best guess of what comes next: the *cycle*.
It may leave the cycle at any time (an eval pass, a skipped layer, generation). Then the trace finds its place again; it
forgets nothing, and nothing here can fail. Memory is bounded for every sequence of events.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice


class Phase(Enum):
    """What the program does in an event."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"

    __hash__ = object.__hash__  # members are one of a kind; Enum's own would be called for every event


UseKey = tuple[Phase, tuple[int, ...]]
"""What an event is: its phase, and the indices of its units; of an update the unit's, and the number of the piece."""


@dataclass(frozen=True)
class Event:
    """One use of a few blocks at once.

    ``key`` names the phase and the unit (forward of unit 3, see ``UseKey``); equal keys mean the same place in the
    program.
    ``blocks`` are the ids of the blocks that must be in memory together.
    """

    key: Hashable
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class TraceStats:
    """Counts since the trace was made. ``mismatches`` are events that a known order did not predict."""

    observed: int
    predicted: int
    mismatches: int
    cycles_learned: int
    cycle_events: int


class _Cycle:
    """A repeating order of events, indexed by block and by key. Immutable."""

    __slots__ = ("_first", "_flat", "_places", "_uses", "events", "length")

    def __init__(self, events: tuple[Event, ...]) -> None:
        self.events = events
        self.length = len(events)
        self._uses: dict[int, list[int]] = {}
        self._places: dict[Hashable, list[int]] = {}
        self._flat: list[tuple[int, int]] = []  # (event, block), without those that the event before it uses, too
        self._first: list[int] = []  # where an event's blocks begin in it
        for index, event in enumerate(events):
            self._first.append(len(self._flat))
            before = events[index - 1].blocks
            self._flat += [(index, block) for block in dict.fromkeys(event.blocks) if block not in before]
            self._places.setdefault(event.key, []).append(index)
            for block in dict.fromkeys(event.blocks):
                self._uses.setdefault(block, []).append(index)

    def uses_from(self, position: int) -> Iterator[tuple[int, int]]:
        """(steps, block) of every use, from the event at ``position`` (1 step), once round; what consecutive events use
        only once."""
        flat = self._flat
        before, after = 1 - position, 1 - position + self.length
        for block in dict.fromkeys(self.events[position].blocks):
            yield 1, block
        if position + 1 < self.length:
            for index, block in islice(flat, self._first[position + 1], None):
                yield index + before, block
        for index, block in islice(flat, self._first[position]):
            yield index + after, block

    def distance(self, block: int, position: int) -> float:
        """Events from ``position`` to the next use of ``block``: 1 is the event at ``position`` itself."""
        uses = self._uses.get(block)
        return math.inf if uses is None else _ahead(uses, position, self.length)

    def find(self, key: Hashable, position: int) -> int | None:
        """Index of the nearest event with ``key`` at or after ``position``, going round the end."""
        places = self._places.get(key)
        return None if places is None else (position + _ahead(places, position, self.length) - 1) % self.length


def _ahead(indices: list[int], position: int, length: int) -> int:
    """1 + steps from ``position`` to the next of the sorted ``indices`` on a circle of ``length``."""
    at = bisect_left(indices, position)
    return indices[at] - position + 1 if at < len(indices) else indices[0] + length - position + 1


class Trace:
    """Records the order of events and says what comes next.

    Three things may be known, and the first that applies predicts: a *loop* (the program left the cycle and repeats
    something short, such as the forward pass in generation), the *cycle* (the last complete step), nothing yet.

    ``max_events`` bounds the memory: a step, or a loop, of more events than that is not learned.
    """

    def __init__(self, max_events: int = 1 << 18) -> None:
        if max_events < 1:
            raise ValueError(f"max_events must be at least 1, not {max_events}")
        self._limit = max_events
        self._history: list[Event] = []  # ring: event number i lies at i % limit
        self._observed = 0
        self._step_begin = 0
        self._last_seen: dict[Hashable, int] = {}  # key -> number of its last event
        self._lag = 0  # the last _run events equal those _lag before them
        self._run = 0
        self._cycle: _Cycle | None = None
        self._position = 0  # index in the cycle of the event expected next
        self._loop: _Cycle | None = None
        self._loop_position = 0
        self._exception: tuple[Event, ...] | None = None
        self._usual: _Cycle | None = None  # what comes back after the one step for which the cycle is another
        self._predicted = 0
        self._mismatches = 0
        self._learned = 0

    # -- recording ---------------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> bool:
        """Record that ``event`` happens now; return whether it was the one predicted, with the same blocks."""
        expected = self.expected()
        if expected is not None and expected == event:
            event = expected  # the history of a steady run is made of one step's objects
        else:
            event = self._known(event)
        self._record(event)
        if expected is not None and expected.key == event.key:
            self._advance()
            predicted = expected.blocks == event.blocks
        else:
            self._heal(event)
            predicted = False
        if predicted:
            self._predicted += 1
        elif expected is not None:
            self._mismatches += 1
        return predicted

    def end_of_step(self, *, spoiled: bool = False) -> None:
        """Close the recorded order: an optimizer step has finished, and the next event begins a new one.

        The finished step becomes the cycle. Exceptions are a step that is the cycle with something before it (an eval
        pass) and one that is only its beginning (an update skipped for an overflow): these replace the cycle when they
        happen twice in a row.

        Args:
            spoiled: the step was none to learn from, where an order is known.
        """
        count = self._observed - self._step_begin
        complete = 0 < count <= self._limit
        step = self._tail(count) if complete else ()
        self._step_begin = self._observed
        self._loop = None
        self._position = 0
        expected, usual, self._usual = self._cycle, self._usual, None
        if usual is not None:
            self._cycle = usual
        if expected is not None and (spoiled or (usual is not None and step == expected.events)):
            self._exception = None
            return
        if not complete or (self._cycle is not None and step == self._cycle.events):
            self._exception = None
            return
        if self._cycle is not None and _is_exception(step, self._cycle.events) and step != self._exception:
            self._exception = step
            return
        self._exception = None
        self._cycle = _Cycle(step)
        self._learned += 1

    def guess(self, events: Iterable[Event]) -> None:
        """Take an order for the cycle that no step has shown yet, such as that in which modules are registered. What is
        seen corrects it as it corrects a cycle."""
        order = tuple(events)
        if self._cycle is None and 0 < len(order) <= self._limit:
            self._cycle = _Cycle(order)

    def expect_once(self, change: Callable[[tuple[Event, ...]], tuple[Event, ...]]) -> None:
        """The next step, and no other, has another order than the usual one: ``change`` of that. To be called between
        two steps. Nothing happens while no order is known."""
        usual = self._cycle if self._usual is None else self._usual
        order = () if usual is None else change(usual.events)
        if usual is not None and order != usual.events and 0 < len(order) <= self._limit:
            self._usual, self._cycle = usual, _Cycle(order)

    # -- asking ------------------------------------------------------------------------------------------------------

    def expected(self) -> Event | None:
        """The event predicted next, or None while no order is known."""
        if self._loop is not None:
            return self._loop.events[self._loop_position]
        return None if self._cycle is None else self._cycle.events[self._position]

    def next_use(self, block: int) -> float:
        """Events until ``block`` is used again: 1 in the event expected next; ``math.inf`` when no use is known.

        The event observed last counts as past: its blocks are in use, and the caller must not offer them for eviction.
        Cost: O(log uses of the block in a step).
        """
        loop, cycle = self._loop, self._cycle
        if loop is None:
            return math.inf if cycle is None else cycle.distance(block, self._position)
        distance = loop.distance(block, self._loop_position)
        if distance == math.inf and cycle is not None:
            # Used only after the loop, which lasts unknown long: behind all the loop uses, in the order of the cycle.
            return loop.length + cycle.distance(block, self._position)
        return distance

    def upcoming(self) -> Iterator[tuple[int, int]]:
        """(distance, block) of every predicted use in order, from the event expected next, once round the order.

        A block that consecutive events use appears for the first of them only. Nothing is yielded while no order is
        known. Observing while iterating does not disturb the iteration, which keeps to the place it began at.
        """
        if self._loop is not None:
            return self._loop.uses_from(self._loop_position)
        return iter(()) if self._cycle is None else self._cycle.uses_from(self._position)

    def stats(self) -> TraceStats:
        length = 0 if self._cycle is None else self._cycle.length
        return TraceStats(self._observed, self._predicted, self._mismatches, self._learned, length)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _known(self, event: Event) -> Event:
        """The same event as it was recorded last, where it was: the history of a run in changing order is long."""
        last = self._last_seen.get(event.key)
        if last is None or self._observed - last > self._limit:
            return event
        before = self._history[last % self._limit]
        return before if before == event else event

    def _record(self, event: Event) -> None:
        number, history = self._observed, self._history
        if 0 < self._lag <= min(number, self._limit) and history[(number - self._lag) % self._limit] == event:
            self._run += 1
        else:
            self._lag = number - self._last_seen.get(event.key, number)
            again = 0 < self._lag <= self._limit and history[(number - self._lag) % self._limit] == event
            self._run = 1 if again else 0
        if len(history) < self._limit:
            history.append(event)
        else:
            history[number % self._limit] = event
        self._observed = number + 1
        self._last_seen[event.key] = number
        if len(self._last_seen) > 2 * self._limit:
            oldest = number - self._limit
            self._last_seen = {key: seen for key, seen in self._last_seen.items() if seen > oldest}

    def _tail(self, count: int) -> tuple[Event, ...]:
        """The last ``count`` events, of which the ring still has all."""
        begin = self._observed - count
        return tuple(self._history[number % self._limit] for number in range(begin, self._observed))

    def _advance(self) -> None:
        if self._loop is not None:
            self._loop_position = (self._loop_position + 1) % self._loop.length
        elif self._cycle is not None:
            self._position = (self._position + 1) % self._cycle.length

    def _heal(self, event: Event) -> None:
        """Find the place after an event nobody predicted. An unknown event leaves the place as it is."""
        self._loop = None
        if self._run > self._lag > 0:
            # A whole period has repeated, and once more its first event came instead of what the cycle says.
            self._loop = _Cycle(self._tail(self._lag))
            self._loop_position = 0
        if self._cycle is not None:
            found = self._cycle.find(event.key, self._position)
            if found is not None:
                self._position = (found + 1) % self._cycle.length


def _is_exception(step: tuple[Event, ...], cycle: tuple[Event, ...]) -> bool:
    if len(step) > len(cycle):
        return step[-len(cycle) :] == cycle
    return step == cycle[: len(step)]
