"""One order out of steps that each leave out other units, where no step has shown all of them.

With layers that a program drops from its very first step on, no step may ever have all of them. For example, two steps
of one micro-batch, of which each has shown a part of the four units of a model::

    known        forward 0, forward 1, forward 3, backward 3, backward 1, backward 0
    this step    forward 0, forward 2, forward 3, backward 3, backward 2, backward 0
    united       forward 0, forward 1, forward 2, forward 3, backward 3, backward 2, backward 1, backward 0

Where neither says which of two units comes first, it is the one that was registered first, and the other way round in
backward. All micro-batches of such a program have one order, which is that of all of them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from deepoffload.schedule.events import Event, Phase
from deepoffload.schedule.left_out import phase_of, units_with

Events = tuple[Event, ...]


@dataclass
class _MicroBatch:
    """One micro-batch: what comes before its first backward, and the rest."""

    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)

    def has_backward(self, key: Hashable) -> bool:
        return any(event.key == key for event in self.backward)

    def units(self) -> set[int]:
        return units_with(Phase.FORWARD, self.forward)


def united(known: Events, step: Events) -> Events | None:
    """An order that has the events of both, if each only leaves out units that the other one has; else None. Also None
    where no unit is ever left out: then steps differ in something else, such as the first one of a pipeline, which runs
    each stage once more, and the newer one is the order."""
    ran = units_with(Phase.FORWARD, step)
    late = {event.key for event in step if phase_of(event)[0] is Phase.UPDATE and phase_of(event)[1][0] not in ran}
    one, other = _passes(known), _passes(tuple(event for event in step if event.key not in late))
    if one is None or other is None or len(one[0]) != len(other[0]):
        return None
    if len({frozenset(each.units()) for each in (*one[0], *other[0])}) == 1:
        return None
    passes = [_both(mine, new) for mine, new in zip(one[0], other[0], strict=True)]
    updates = _joined(one[1], other[1], backward=False)
    found = [each for each in passes if each is not None]
    if updates is None or len(found) < len(passes):
        return None
    whole: _MicroBatch | None = found[0]
    for each in found[1:]:
        whole = None if whole is None else _both(whole, each)
    if whole is not None and len(found) > 1:
        found = [_as_first(whole, leading=number == 0) for number in range(len(found))]
    return tuple(event for each in found for event in (*each.forward, *each.backward)) + tuple(updates)


def _passes(step: Events) -> tuple[list[_MicroBatch], list[Event]] | None:
    """The micro-batches of a step, each of which begins with the forward that the step begins with, and the updates
    after the last one. The unit of that forward may run again for its backward: that is no beginning."""
    first = next((event for event in step if phase_of(event)[0] is Phase.FORWARD), None)
    if first is None:
        return None
    begins, ends = first.key, (Phase.BACKWARD, phase_of(first)[1])
    end = max(index for index, event in enumerate(step) if phase_of(event)[0] is not Phase.UPDATE) + 1
    is_trained = any(event.key == ends for event in step)
    found = [_MicroBatch()]
    for event in step[:end]:
        if event.key == begins and found[-1].backward and (found[-1].has_backward(ends) or not is_trained):
            found.append(_MicroBatch())
        is_backward = phase_of(event)[0] is Phase.BACKWARD or found[-1].backward
        (found[-1].backward if is_backward else found[-1].forward).append(event)
    return found, list(step[end:])


def _both(one: _MicroBatch, other: _MicroBatch) -> _MicroBatch | None:
    """None where they differ in more than units that one of them has not run at all."""
    shared = one.units() & other.units()
    if 2 * len(shared) < min(len(one.units()), len(other.units())):
        return None
    for phase, mine, new in (
        (Phase.FORWARD, one.forward, other.forward),
        (Phase.BACKWARD, one.backward, other.backward),  # the last unit does not run again for its own
    ):
        if (units_with(phase, mine) ^ units_with(phase, new)) & shared:
            return None
    forward = _joined(one.forward, other.forward, backward=False)
    backward = _joined(one.backward, other.backward, backward=True)
    return None if forward is None or backward is None else _MicroBatch(forward, backward)


def _joined(one: Sequence[Event], other: Sequence[Event], *, backward: bool) -> list[Event] | None:
    """None where they have the same events in different orders."""
    order: list[Event] = []
    matcher = SequenceMatcher(None, [event.key for event in one], [event.key for event in other], autojunk=False)
    for what, begin, end, other_begin, other_end in matcher.get_opcodes():
        mine, new = list(one[begin:end]), list(other[other_begin:other_end])
        if what == "equal":
            order += new
            continue
        while mine and new:
            order.append((mine if _comes_first(mine[0], new[0], backward) else new).pop(0))
        order += mine + new
    counts = _counted(one) | _counted(other)
    return order if _counted(order) == counts else None


def _comes_first(mine: Event, new: Event, backward: bool) -> bool:
    one, other = phase_of(mine)[1][:1], phase_of(new)[1][:1]
    return one >= other if backward else one <= other


def _counted(events: Iterable[Event]) -> Counter[Hashable]:
    return Counter(event.key for event in events)


def _as_first(whole: _MicroBatch, *, leading: bool) -> _MicroBatch:
    """A micro-batch with all that any has; updates of the step before come with the first one."""
    kept = [event for event in whole.forward if leading or phase_of(event)[0] is not Phase.UPDATE]
    return _MicroBatch(kept, list(whole.backward))
