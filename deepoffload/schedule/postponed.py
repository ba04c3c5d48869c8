"""The order of uses after a step whose updates inside backward were undone: they come once more, before the forward."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import cast

from deepoffload.schedule.events import Event, Phase, UseKey


def with_updates_postponed(step: Iterable[Event], units: Container[int]) -> tuple[Event, ...]:
    """The events of the step after one that could not keep some of its updates inside backward.

    With units 0 and 1, of which 1 is updated inside backward, and ``units`` that hold 1::

        step      update 0, forward 0, forward 1, backward 1, update 1, backward 0
        returned  update 0, forward 0, update 1, forward 1, backward 1, update 1, backward 0

    Args:
        step: the events of a step that keeps all (their keys are ``UseKey``).
        units: whose updates were undone.
    """
    step = tuple(step)
    undone = _updates_after_backward(step, units)
    order: list[Event] = []
    for event in step:
        phase, numbers = _key(event)
        if phase is Phase.FORWARD and not undone.keys().isdisjoint(numbers):
            before = _take_last_updates(order)
            for unit in numbers:
                mine = [*before.pop(unit, ()), *undone.pop(unit, ())]
                order += sorted(mine, key=lambda update: _key(update)[1])
            order += [update for updates in before.values() for update in updates]
        order.append(event)
    return tuple(order)


def _updates_after_backward(step: Iterable[Event], units: Container[int]) -> dict[int, list[Event]]:
    """By unit."""
    found: dict[int, list[Event]] = {}
    in_backward: set[int] = set()
    for event in step:
        phase, numbers = _key(event)
        if phase is Phase.BACKWARD:
            in_backward.update(numbers)
        elif phase is Phase.UPDATE and numbers[0] in units and numbers[0] in in_backward:
            found.setdefault(numbers[0], []).append(event)
    return found


def _take_last_updates(order: list[Event]) -> dict[int, list[Event]]:
    """The updates at the end of ``order``, by unit. They are taken out of it."""
    begin = len(order)
    while begin and _key(order[begin - 1])[0] is Phase.UPDATE:
        begin -= 1
    updates: dict[int, list[Event]] = {}
    for update in order[begin:]:
        updates.setdefault(_key(update)[1][0], []).append(update)
    del order[begin:]
    return updates


def _key(event: Event) -> UseKey:
    return cast(UseKey, event.key)
