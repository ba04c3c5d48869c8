"""The order in which a program uses its blocks, learned from one step and kept right when the program leaves it.

A program trains in steps which repeat, so its last complete step is the best guess of what comes next: the *cycle*.
It may leave the cycle at any time (an eval pass, a skipped layer, generation). Then the trace finds its place again; it
forgets nothing, and nothing here can fail. Memory is bounded for every sequence of events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from deepoffload.schedule.events import Cycle, Event, Phase, UseKey
from deepoffload.schedule.left_out import (
    LONGEST,
    LeftOut,
    following,
    phase_of,
    units_with,
    with_updates_as_in,
)
from deepoffload.schedule.united import united

FAR_EVENTS = 512
"""What is expected beyond so many events is not looked for."""


@dataclass(frozen=True)
class TraceStats:
    """Counts since the trace was made. ``mismatches`` are events that a known order did not predict, ``left_out`` the
    forwards of units that steps have left out of it."""

    observed: int
    predicted: int
    mismatches: int
    cycles_learned: int
    cycle_events: int
    left_out: int


class Trace:
    """Records the order of events and says what comes next.

    Three things may be known, and the first that applies predicts: a *loop* (the program left the cycle and repeats
    something short, such as the forward pass in generation), the *cycle* (the last complete step), nothing yet.

    A step that leaves units out, in another way than the one before, is not learned: the cycle is the step with all of
    them. What is left of the step, and the next one, are then foreseen as ``schedule.left_out`` says.

    It has many attributes, because everything is counted by the event: each costs an operation or two.

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
        self._cycle: Cycle | None = None
        self._position = 0  # index in the cycle of the event expected next
        self._loop: Cycle | None = None
        self._loop_position = 0
        self._exception: tuple[Event, ...] | None = None
        self._usual: Cycle | None = None  # what comes back after the one step for which the cycle is another
        self._left: LeftOut | None = None  # what this step has left out, which the cycle then shows
        self._longer: Cycle | None = None  # the cycle before the last steps, if these have left something out of it
        self._strange = False  # this step has events that nothing explains
        self._come_back = False  # it has units that the last ones have left out
        self._left_out = 0
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
            self._strange = self._strange or not predicted
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
        left, self._left = self._left, None
        if left is not None:
            self._left_out += left.count
        expected, usual, self._usual = self._cycle, self._usual, None
        if usual is not None:
            self._cycle = usual
        as_expected = usual is not None and left is None and expected is not None and step == expected.events
        if (expected is not None and spoiled) or as_expected or not complete:
            self._exception = None
        else:
            self._learn(step, left)
        if (left is not None or self._come_back or self._strange) and not spoiled and complete:
            self.expect_once(partial(following, step, () if expected is None else expected.events))
        self._strange = self._come_back = False

    def guess(self, events: Iterable[Event]) -> None:
        """Take an order for the cycle that no step has shown yet, such as that in which modules are registered. What is
        seen corrects it as it corrects a cycle."""
        order = tuple(events)
        if self._cycle is None and 0 < len(order) <= self._limit:
            self._cycle = Cycle(order)

    def expect_once(self, change: Callable[[tuple[Event, ...]], tuple[Event, ...]]) -> None:
        """The next step, and no other, has another order than the usual one: ``change`` of that. To be called between
        two steps. Nothing happens while no order is known."""
        expected = self._cycle
        order = () if expected is None else change(expected.events)
        if expected is not None and order != expected.events and 0 < len(order) <= self._limit:
            self._usual, self._cycle = self._usual or expected, Cycle(order)

    # -- asking ------------------------------------------------------------------------------------------------------

    def expected(self) -> Event | None:
        """The event predicted next, or None while no order is known."""
        if self._loop is not None:
            return self._loop.events[self._loop_position]
        return None if self._cycle is None else self._cycle.events[self._position]

    def left_out_before(self, forward: UseKey) -> list[int]:
        """This forward begins now: the units whose forwards were expected before it."""
        found: list[int] = []
        cycle, position = self._cycle, self._position
        if cycle is None or self._loop is not None:
            return found
        for index in range(position, min(cycle.length, position + FAR_EVENTS)):
            event = cycle.events[index]
            phase, numbers = phase_of(event)
            if phase is Phase.BACKWARD:
                break
            if event.key == forward or _is_update_of(event, forward[1]):
                return found
            found += numbers if phase is Phase.FORWARD else ()
        return []

    def leave_out(self, forward: UseKey, now: Container[int]) -> None:
        """What :meth:`left_out_before` gave is left out. The updates of its units ``now`` come before ``forward``."""
        left = self._left
        if left is not None:
            left.reached(self._position)
        elif self._cycle is None:
            return
        order, place = (self._cycle, self._position) if left is None else (left.order, left.place)
        to = None if order is None else order.find(forward, place)
        if order is None or to is None or to < place or order.length > LONGEST:
            return
        while to > place and _is_update_of(order.events[to - 1], forward[1]):
            to -= 1
        left = left or LeftOut(order, place, self._number_in_step)
        if left.leave(to, now):
            self._go_on(left)

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
        left_out = self._left_out + (0 if self._left is None else self._left.count)
        return TraceStats(self._observed, self._predicted, self._mismatches, self._learned, length, left_out)

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
            self._loop = Cycle(self._tail(self._lag))
            self._loop_position = 0
        if self._cycle is None:
            return
        left = self._left
        if left is not None:
            left.reached(self._position)
        order, place = (self._cycle, self._position) if left is None else (left.order, left.place)
        found = order.find(event.key, place)
        if found is None and self._longer is not None:
            found = self._longer.find(event.key, place)
            if found is not None:  # a unit that the last steps have left out is back, and so is their order
                order = self._cycle = self._longer
                self._left_out += 0 if left is None else left.count
                self._left = self._longer = self._usual = None
                self._come_back = True
                self._position = (found + 1) % order.length
                return
        if found is None:
            self._strange = True
            return
        if found >= place and order.length <= LONGEST:
            left = left or LeftOut(order, place, self._number_in_step)
            if left.jump(found):
                self._strange = self._strange or left.lacks_updates
                self._go_on(left)
                return
        if left is not None and found < place and left.is_late(event):
            self._go_on(left)
            return
        if phase_of(event)[0] is Phase.UPDATE:  # made elsewhere than usual: what was expected now still is
            self._strange = True
            return
        if left is not None:
            self._left_out += left.count
        self._strange, self._left = True, None
        self._cycle, self._position = order, (found + 1) % order.length

    def _go_on(self, left: LeftOut) -> None:
        """Predict the rest of a step that leaves out what ``left`` says, and the next one."""
        usual = self._usual or left.order
        self._left, self._usual = left, usual
        self._cycle, self._position = left.ahead(usual), 0

    def _number_in_step(self, key: Hashable) -> int:
        number = self._last_seen.get(key, -1)
        return number if number >= self._step_begin else -1

    def _learn(self, step: tuple[Event, ...], left: LeftOut | None) -> None:
        """A whole step has ended, which was not as expected for once. ``left``: what it has left out, if that is known
        to the end."""
        cycle = self._cycle
        exception, self._exception = self._exception, None
        if cycle is not None and step == cycle.events:
            return
        if cycle is not None and not self._strange and (left is not None or self._come_back):
            if step != exception:
                self._exception = step
                return
            self._longer = self._longer or cycle
        elif cycle is not None and _is_exception(step, cycle.events) and step != exception:
            self._exception = step
            return
        elif cycle is not None and (moved := self._with_updates_of(step, cycle, left)) is not None:
            self._longer, step = None, moved
        else:
            self._longer = None
            if cycle is not None:
                step = united(cycle.events, step) or step
        self._cycle = Cycle(step)
        self._learned += 1

    def _with_updates_of(self, step: tuple[Event, ...], cycle: Cycle, left: LeftOut | None) -> tuple[Event, ...] | None:
        """The whole order, where ``step`` lacks units and has updates at other places; None: that is not all."""
        whole = cycle if self._longer is None else self._longer
        if any(whole.find(event.key, 0) is None for event in step):
            return None  # there is more to learn
        left_out = units_with(Phase.FORWARD, whole.events) - units_with(Phase.FORWARD, cycle.events)
        return with_updates_as_in(step, whole.events, left_out if left is None else left_out | left.units)


def _is_update_of(event: Event, units: Container[int]) -> bool:
    phase, numbers = phase_of(event)
    return phase is Phase.UPDATE and numbers[0] in units


def _is_exception(step: tuple[Event, ...], cycle: tuple[Event, ...]) -> bool:
    if len(step) > len(cycle):
        return step[-len(cycle) :] == cycle
    return step == cycle[: len(step)]
