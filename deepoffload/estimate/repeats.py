"""Layers that repeat are run a few times and counted as often as they are there.

A model of 80 equal layers is run with four of them: the first, two in the middle, and the last. The two in the middle
must do the same, byte for byte and operator for operator; then all others in the middle do it, too. A model of which
that is not so is run whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from deepoffload.errors import UsageError
from deepoffload.estimate.dry_run import DryRun, LiveBytes, LossOf, Recording, Visit
from deepoffload.estimate.lengths import ByLength, record_quickly
from deepoffload.estimate.progress import Report, silent
from deepoffload.runtime.compute_types import KEEP_TYPES, ComputeTypes

KEPT = 4
"""Periods that run: the first, two in the middle (1 and 2), and the last."""
MIDDLE = 2
PERIOD_MAX = 8
_OWN_NUMBER = ("idx", "index", "layer_id", "number")
"""In the names of attributes that say which layer it is, and not of what sort."""


@dataclass(frozen=True)
class Repeat:
    """``times`` times ``period`` elements of ``container`` from element ``start`` on, one like the other."""

    container: nn.Module
    start: int
    period: int
    times: int

    @property
    def left_out(self) -> int:
        return self.times - KEPT

    def modules(self, number: int) -> list[nn.Module]:
        """The elements of one period."""
        first = self.start + number * self.period
        return list(self.container.children())[first : first + self.period]


def dry_run_once_per_layer(
    model: nn.Module,
    loss_of: LossOf,
    *,
    windows: Sequence[nn.Module],
    unit_of: Mapping[int, int],
    types: ComputeTypes = KEEP_TYPES,
    by_length: ByLength | None = None,
    progress: Report = silent,
) -> DryRun:
    """As :func:`deepoffload.estimate.dry_run.dry_run`. ``model`` has fewer layers while this runs.

    Args:
        by_length: how to run it on shorter sequences, where that is enough.
        progress: is told of what takes long.

    Raises:
        UsageError: the model cannot run without data, or gives no loss.
    """
    run_it = partial(
        record_quickly, model, loss_of, by_length, windows=windows, unit_of=unit_of, types=types, progress=progress
    )
    repeats = find_repeats(model)
    places = _Places.of(repeats, unit_of, model) if repeats else None
    if places is not None:
        try:
            with _shortened(repeats):
                run = run_it()
        except UsageError:
            expanded = None  # perhaps because of the layers that were missing: the whole model tells
        else:
            expanded = _expanded(run, repeats, places)
        if expanded is not None:
            return expanded.summary()
    return run_it().summary()


# -- finding ---------------------------------------------------------------------------------------------------------


def find_repeats(model: nn.Module) -> list[Repeat]:
    """Runs of more than ``KEPT`` equal periods in the outermost lists of modules."""
    found: list[Repeat] = []

    def look(module: nn.Module) -> None:
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            mine = list(_repeats_in(module))
            if mine:
                found.extend(mine)
                return
        for child in module.children():
            look(child)

    look(model)
    return found


def _repeats_in(container: nn.Module) -> Iterator[Repeat]:
    sorts = [_sort(child) for child in container._modules.values()]
    at = 0
    while at < len(sorts):
        best = max(
            ((_times(sorts, at, period) - KEPT) * period, -period, _times(sorts, at, period))
            for period in range(1, PERIOD_MAX + 1)
        )
        gain, minus_period, times = best
        if gain > 0:
            yield Repeat(container, at, -minus_period, times)
            at += -minus_period * times
        else:
            at += 1


def _times(sorts: Sequence[object], at: int, period: int) -> int:
    """How often the ``period`` elements from ``at`` on come one after the other."""
    times = 1
    while sorts[at : at + period] == sorts[at + times * period : at + (times + 1) * period]:
        times += 1
        if at + times * period >= len(sorts):
            break
    return times


def _sort(module: nn.Module | None) -> object:
    """What two modules have in common that do the same with other values."""
    if module is None:
        return None
    said = sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and not any(part in name for part in _OWN_NUMBER)
    )
    tensors = [
        (name, tensor if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    ]
    children = [(name, _sort(child)) for name, child in module._modules.items()]
    return type(module), said, tensors, children


@contextmanager
def _shortened(repeats: Sequence[Repeat]) -> Iterator[None]:
    """Take the left-out layers out of their lists for a while."""
    with ExitStack() as stack:
        for container in {id(repeat.container): repeat.container for repeat in repeats}.values():
            gone: set[int] = set()
            for repeat in repeats:
                if repeat.container is container:
                    first = repeat.start + (MIDDLE + 1) * repeat.period
                    gone.update(range(first, first + repeat.left_out * repeat.period))
            every = container._modules
            kept = [child for number, child in enumerate(every.values()) if number not in gone]
            stack.callback(setattr, container, "_modules", every)
            container._modules = {str(number): child for number, child in enumerate(kept)}
        yield


# -- expanding -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """``by_unit``: the repeat and the period of a unit in repeated layers. ``unit_like``: by repeat and period, the
    unit of that period that is like a unit of the middle one."""

    by_unit: Mapping[int, tuple[int, int]]
    unit_like: Mapping[tuple[int, int], Mapping[int, int]]

    @classmethod
    def of(cls, repeats: Sequence[Repeat], unit_of: Mapping[int, int], model: nn.Module) -> _Places | None:
        """None where a unit has parameters of several periods, or of none."""
        by_unit: dict[int, tuple[int, int]] = {}
        unit_like: dict[tuple[int, int], dict[int, int]] = {}
        seen: set[int] = set()
        for number, repeat in enumerate(repeats):
            elements = list(repeat.container.children())
            for period in range(repeat.times):
                place = (number, period)
                first = repeat.start + period * repeat.period
                like = repeat.start + MIDDLE * repeat.period
                for at in range(repeat.period):
                    pairs = zip(elements[like + at].parameters(), elements[first + at].parameters(), strict=True)
                    for middle, mine in pairs:
                        seen.add(id(mine))
                        if id(mine) not in unit_of:
                            continue
                        unit = unit_of[id(mine)]
                        if by_unit.setdefault(unit, place) != place:
                            return None
                        if unit_like.setdefault(place, {}).setdefault(unit_of[id(middle)], unit) != unit:
                            return None
        if any(unit_of.get(id(param)) in by_unit for param in model.parameters() if id(param) not in seen):
            return None
        return cls(by_unit, unit_like)

    def of_visit(self, visit: Visit) -> tuple[int, int] | None:
        """The repeat and the period (of those that ran) that a visit belongs to: that of all of its units."""
        found = {self.by_unit.get(unit) for unit in visit.units}
        place = found.pop() if len(found) == 1 else None
        return None if place is None else (place[0], min(place[1], KEPT - 1))


@dataclass
class _Stretch:
    """Visits of one place, one after the other, with their spans."""

    place: tuple[int, int] | None
    visits: list[tuple[Visit, list[LiveBytes]]]


def _expanded(run: Recording, repeats: Sequence[Repeat], places: _Places) -> Recording | None:
    """The recording of the whole model from that of the shortened one; None where the middle periods differ."""
    place_of = [places.of_visit(visit) for visit in run.visits]
    spans: dict[int, list[LiveBytes]] = {}
    for span in _without_far_frees(run, place_of, repeats):
        spans.setdefault(span.visit, []).append(span)
    stretches: list[_Stretch] = []
    for number, visit in enumerate(run.visits):
        if not stretches or stretches[-1].place != place_of[number]:
            stretches.append(_Stretch(place_of[number], []))
        stretches[-1].visits.append((visit, spans[number]))
    result: list[tuple[Visit, list[LiveBytes]]] = []
    middles = [0] * len(repeats)
    for at, stretch in enumerate(stretches):
        place = stretch.place
        if place is None or place[1] != MIDDLE:
            result += stretch.visits
            continue
        number = place[0]
        before = stretches[at - 1] if at else None
        after = stretches[at + 1] if at + 1 < len(stretches) else None
        copies = [
            _copy(stretch, places.unit_like[number, period])
            for period in range(MIDDLE + 1, MIDDLE + 1 + repeats[number].left_out)
        ]
        middles[number] += 1
        if before is not None and before.place == (number, MIDDLE - 1) and _alike(before, stretch, places):
            result += stretch.visits
            result += [pair for copy in copies for pair in copy]
        elif after is not None and after.place == (number, MIDDLE - 1) and _alike(after, stretch, places):
            result += [pair for copy in reversed(copies) for pair in copy]
            result += stretch.visits
        else:
            return None
    if not all(middles):
        return None
    visits = tuple(visit for visit, _ in result)
    return replace(run, visits=visits, spans=tuple(span for _, mine in result for span in mine))


def _alike(other: _Stretch, middle: _Stretch, places: _Places) -> bool:
    """Whether the period before the middle one does the same."""
    if other.place is None or len(other.visits) != len(middle.visits):
        return False
    like = places.unit_like[other.place]
    for (visit, spans), (theirs, their_spans) in zip(_copy(middle, like), other.visits, strict=True):
        if visit != theirs or [_moved(span) for span in spans] != [_moved(span) for span in their_spans]:
            return False
    return True


def _moved(span: LiveBytes) -> tuple[bool, int, int]:
    return span.after_forward, span.net_bytes, span.over_bytes


def _copy(stretch: _Stretch, like: Mapping[int, int]) -> list[tuple[Visit, list[LiveBytes]]]:
    """The same in another period."""
    return [
        (
            replace(
                visit,
                units=tuple(like[unit] for unit in visit.units),
                landed=Counter({like[unit]: count for unit, count in visit.landed.items()}),
            ),
            spans,
        )
        for visit, spans in stretch.visits
    ]


def _without_far_frees(run: Recording, place_of: Sequence[Any], repeats: Sequence[Repeat]) -> list[LiveBytes]:
    """The spans of ``run``. What one frees of a middle period far away (a cache of keys, when the forward ends), it
    frees of those that were left out, too.

    What each period frees of those before it or behind it is no such thing: the copies of the middle one do that.
    """
    usual: Counter[tuple[int, int, bool]] = Counter()  # (repeat, distance, after the forward) to bytes
    for span in run.spans:
        mine = place_of[span.visit]
        if mine is not None and mine[1] == (MIDDLE - 1 if span.after_forward else MIDDLE):
            for made_in, nbytes in span.freed.items():
                theirs = place_of[made_in]
                if theirs is not None and theirs[0] == mine[0]:
                    usual[mine[0], theirs[1] - mine[1], span.after_forward] += nbytes
    result = []
    for span in run.spans:
        mine = place_of[span.visit]
        more = 0
        for made_in, nbytes in span.freed.items():
            theirs = place_of[made_in]
            if theirs is None or theirs[1] not in (MIDDLE - 1, MIDDLE):
                continue
            number, period = theirs
            if mine is None or mine[0] != number:
                more += nbytes * repeats[number].left_out * (period == MIDDLE)
            elif abs(period - mine[1]) > 1:
                key = (number, period - mine[1], span.after_forward)
                expected = min(usual[key], nbytes)
                usual[key] -= expected
                more += (nbytes - expected) * repeats[number].left_out
        result.append(replace(span, net_bytes=span.net_bytes - more) if more else span)
    return result
