"""Layers that a step leaves out, as progressive layer drop does: what of the known order then does not come, and what
comes later than it says.

With three units, updates right before a unit's forward, and a step that leaves out unit 1::

    expected     update 0, forward 0, update 1, forward 1, update 2, forward 2, backward 2, backward 1, backward 0
    this step    update 0, forward 0,                      update 2, forward 2, backward 2, backward 0, update 1
    the next     update 0, forward 0,           forward 1, update 2, forward 2, backward 2, backward 1, backward 0

A unit that has no forward has no backward. Its update of the step before is made where the step ends (or where another
micro-batch runs the unit). It gets no gradient, so the next step has no update of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable
from typing import cast

from deepoffload.schedule.events import Cycle, Event, Phase, UseKey

LONGEST = 1 << 12
"""Orders of more events are not looked at: it would cost milliseconds for each layer that is left out."""


_Copied = tuple[int, int, set[int], dict[int, set[int]], dict[Hashable, Event]]
"""Place, count, units, absent indices and overdue updates of a :class:`LeftOut`."""


def phase_of(event: Event) -> tuple[Phase | None, tuple[int, ...]]:
    """The parts of a ``UseKey``; nothing where the key is no such."""
    key = event.key
    return cast(UseKey, key) if isinstance(key, tuple) and key and isinstance(key[0], Phase) else (None, ())


class LeftOut:
    """What the present step has left out.

    Args:
        order: in which the step was expected to go. place: the index in it of the event expected next.
        seen: the number of the last event with a key; -1 where this step had none.

    Attributes:
        place: as given, kept up by :meth:`jump` and :meth:`reached`.
        units: those that were left out.
        count: how many forwards of units.
        lacks_updates: an update did not come where it was expected, of a unit that has run or comes now.
    """

    def __init__(self, order: Cycle, place: int, seen: Callable[[Hashable], int]) -> None:
        self.order = order
        self.place = place
        self.units: set[int] = set()
        self.count = 0
        self.lacks_updates = False
        self._seen = seen
        self._absent: dict[int, set[int]] = {}
        self._overdue: dict[Hashable, Event] = {}
        self._rest: list[tuple[int, Event]] = []
        self._before: _Copied | None = None
        self._now: Container[int] = ()
        self._forwards: dict[int, list[int]] = {}
        self._updates: dict[int, list[int]] = {}
        for index, event in enumerate(order.events):
            phase, numbers = phase_of(event)
            if phase is Phase.FORWARD:
                for unit in numbers:
                    self._forwards.setdefault(unit, []).append(index)
            elif phase is Phase.UPDATE:
                self._updates.setdefault(numbers[0], []).append(index)

    def jump(self, to: int) -> bool:
        """The event at ``to`` comes, without those before it. Returns whether units were left out so far; where that is
        no explanation, nothing is changed."""
        skipped = [(index, *phase_of(self.order.events[index])) for index in range(self.place, to)]
        forwards = {unit for _, phase, numbers in skipped if phase is Phase.FORWARD for unit in numbers}
        left = {unit for unit in forwards if not self._is_open(unit)}
        comes, numbers = phase_of(self.order.events[to])
        if comes is Phase.UPDATE and numbers[0] in left:
            return False  # the update has come earlier, and the forward is still to come
        self._before = self._copied() if comes is Phase.UPDATE else None
        for index, phase, numbers in skipped:
            if phase is Phase.FORWARD:
                for unit in left.intersection(numbers):
                    if index not in self._absent.get(unit, ()):
                        self._leave_out(unit, index)
                        self.count += 1
            elif phase is Phase.UPDATE and index not in self._absent.get(numbers[0], ()):
                event = self.order.events[index]
                if self._seen(event.key) < 0 and numbers[0] in left:
                    self._overdue[event.key] = event
                elif self._seen(event.key) < 0:
                    self.lacks_updates = True
        self.units |= left
        self.place = to + 1
        return bool(self.units)

    def leave(self, to: int, now: Container[int]) -> bool:
        """As :meth:`jump`, where the event at ``to`` comes after the updates of the units ``now``."""
        if not self.jump(to):
            return False
        self.place, self._now, self._before = to, now, None
        return True

    def reached(self, position: int) -> None:
        """So many of the events that :meth:`ahead` gave have come."""
        for _, event in self._rest[:position]:
            self._overdue.pop(event.key, None)
        self.place = next((index for index, _ in self._rest[position:] if index >= 0), self.order.length)

    def is_late(self, event: Event) -> bool:
        """Whether an event that has just come is an update that was to come at the end, or the forward of units that
        seemed to be left out. Then they are not; and if it was expected before a jump to an update, that came early."""
        if self._before is not None and self.order.events[self._before[0]].key == event.key:
            place, self.count, self.units, self._absent, self._overdue = self._before
            self.place, self._before = place + 1, None
            return True
        if self._overdue.pop(event.key, None) is not None:
            return True
        phase, numbers = phase_of(event)
        late = phase is Phase.FORWARD and not self.units.isdisjoint(numbers)
        if late:
            self.units.difference_update(numbers)
            for unit in numbers:
                self._absent.pop(unit, None)
        return late

    def _copied(self) -> _Copied:
        absent = {unit: set(indices) for unit, indices in self._absent.items()}
        return self.place, self.count, set(self.units), absent, dict(self._overdue)

    def ahead(self, usual: Cycle) -> Cycle:
        """What comes now: the rest of this step, and the next one, which is as ``usual``."""
        absent = set().union(*self._absent.values())
        overdue: dict[int, list[tuple[int, Event]]] = {}
        for update in (each for each in self._overdue.values() if phase_of(each)[1][0] not in self._now):
            overdue.setdefault(phase_of(update)[1][0], []).append((-1, update))
        now = [event for event in self._overdue.values() if phase_of(event)[1][0] in self._now]
        self._rest = [(-1, event) for event in now]
        for index in range(self.place, self.order.length):
            if index in absent:
                continue
            event = self.order.events[index]
            phase, numbers = phase_of(event)
            if phase is Phase.FORWARD and overdue:  # of a later micro-batch
                self._rest += [each for unit in numbers for each in overdue.pop(unit, ())]
            self._rest.append((index, event))
        self._rest += [each for updates in overdue.values() for each in updates]
        idle = {unit for unit in self.units if not self._has_run(unit)}
        return Cycle((*(event for _, event in self._rest), *without_updates(usual.events, idle)))

    def _leave_out(self, unit: int, index: int) -> None:
        """A forward of ``unit`` does not come. Neither come those of the same pass (it may run again for its backward),
        its backward and, where nothing else gives the unit a gradient, its update."""
        order, forwards = self.order, self._forwards[unit]
        backward = order.find((Phase.BACKWARD, (unit,)), index)
        end = index if backward is None or backward < index else backward
        absent = self._absent.setdefault(unit, set())
        absent.update(at for at in forwards if index <= at <= end)
        if end != index:
            absent.add(end)
        if not self._has_run(unit) and forwards[-1] <= end:
            absent.update(at for at in self._updates.get(unit, ()) if at > index)

    def _last_forward(self, unit: int) -> int:
        return max((self._seen(self.order.events[index].key) for index in self._forwards.get(unit, ())), default=-1)

    def _has_run(self, unit: int) -> bool:
        return self._last_forward(unit) >= 0

    def _is_open(self, unit: int) -> bool:
        """Whether a unit has run, and its backward is still to come."""
        return self._last_forward(unit) > self._seen((Phase.BACKWARD, (unit,)))


def without_updates(step: Iterable[Event], units: Container[int]) -> tuple[Event, ...]:
    """A step without the updates of ``units`` that are left from the step before."""
    order: list[Event] = []
    after_backward: set[int] = set()
    for event in step:
        phase, numbers = phase_of(event)
        if phase is Phase.BACKWARD:
            after_backward.update(numbers)
        if phase is not Phase.UPDATE or numbers[0] not in units or numbers[0] in after_backward:
            order.append(event)
    return tuple(order)


def following(step: Iterable[Event], known: Iterable[Event], order: tuple[Event, ...]) -> tuple[Event, ...]:
    """``order`` as it will be after ``step``: a piece is updated before the unit's forward exactly if this step had a
    backward of the unit and has not updated the piece after it. ``known``: has updates that ``order`` may lack."""
    step = tuple(step)
    backward, updated = units_with(Phase.BACKWARD, step), _updates_after_backward(step)
    trained, later = units_with(Phase.BACKWARD, order), _updates_after_backward(order)
    pending: dict[int, dict[Hashable, Event]] = {}
    for event in (*known, *order):
        phase, numbers = phase_of(event)
        if phase is Phase.UPDATE and numbers[0] in backward and event.key not in updated:
            pending.setdefault(numbers[0], {})[event.key] = event
    made: list[Event] = []
    seen: set[int] = set()
    for event in order:
        phase, numbers = phase_of(event)
        if phase is Phase.BACKWARD:
            seen.update(numbers)
        if phase is Phase.UPDATE and numbers[0] in trained and not (numbers[0] in seen and event.key in later):
            continue  # those before the forward come with it
        if phase is Phase.FORWARD:
            for unit in numbers:
                made += sorted(pending.pop(unit, {}).values(), key=lambda update: phase_of(update)[1])
        made.append(event)
    return tuple(made)


def _updates_after_backward(step: Iterable[Event]) -> set[Hashable]:
    backward: set[int] = set()
    found: set[Hashable] = set()
    for event in step:
        phase, numbers = phase_of(event)
        if phase is Phase.BACKWARD:
            backward.update(numbers)
        elif phase is Phase.UPDATE and numbers[0] in backward:
            found.add(event.key)
    return found


def units_with(phase: Phase, step: Iterable[Event]) -> set[int]:
    """Units that ``step`` has events of ``phase`` of."""
    found = (phase_of(event) for event in step)
    return {unit for of, numbers in found if of is phase for unit in (numbers[:1] if of is Phase.UPDATE else numbers)}


def with_updates_as_in(
    step: Iterable[Event], usual: tuple[Event, ...], left_out: Collection[int]
) -> tuple[Event, ...] | None:
    """``usual``, with updates inside backward or before the next forward as ``step`` has them. None where ``step``
    differs in more than that, and in lacking uses of the units ``left_out``."""
    step = tuple(step)
    matched = _matched(step, usual, left_out)
    inside, before = _updates_after_backward(step), _updates_after_backward(usual)
    if matched is None or not (left_out or inside != before):
        return None
    backward = units_with(Phase.BACKWARD, step)
    kept_out = (phase_of(event) for event in usual if event.key in before - inside)
    leave = {(phase, numbers) for phase, numbers in kept_out if numbers[0] in backward and numbers[0] not in left_out}
    enter: dict[int, list[Event]] = {}
    entering, place = inside - before, -1  # where in usual
    seen: set[int] = set()
    for index, event in enumerate(step):
        place = matched.get(index, place)
        phase, numbers = phase_of(event)
        if phase is Phase.BACKWARD:
            seen.update(numbers)
        elif event.key in entering and numbers[0] in seen:  # one before the forward is of the step before
            enter.setdefault(place, []).append(event)
    postponed: dict[int, dict[Hashable, Event]] = {}
    for event in usual:
        if event.key in leave:
            postponed.setdefault(phase_of(event)[1][0], {})[event.key] = event
    order: list[Event] = []
    for index, event in enumerate(usual):
        phase, numbers = phase_of(event)
        if phase is Phase.FORWARD:
            for unit in numbers:
                order += sorted(postponed.pop(unit, {}).values(), key=lambda update: phase_of(update)[1])
        if event.key not in leave and event.key not in entering:
            order.append(event)
        order += enter.get(index, ())
    return tuple(order)


def _matched(step: tuple[Event, ...], usual: tuple[Event, ...], left_out: Container[int]) -> dict[int, int] | None:
    """Where the forwards and backwards of ``step`` are in ``usual``, by their indices; None where ``usual`` has others
    of units that are not left out."""
    found: dict[int, int] = {}
    place = 0
    for index, event in enumerate(step):
        if phase_of(event)[0] is Phase.UPDATE:
            continue
        while place < len(usual) and usual[place].key != event.key:
            phase, numbers = phase_of(usual[place])
            if phase is not Phase.UPDATE and not all(unit in left_out for unit in numbers):
                return None
            place += 1
        if place == len(usual):
            return None
        found[index] = place
        place += 1
    rest = (phase_of(event) for event in usual[place:])
    if all(phase is Phase.UPDATE or all(unit in left_out for unit in numbers) for phase, numbers in rest):
        return found
    return None
