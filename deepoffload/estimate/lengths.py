"""A model whose forward is a loop over tokens in Python: run on a few short sequences, and worked out for a long one.

Every number of a run (how often a kernel is called, the sizes of its tensors, the bytes that are alive after it) is a
polynomial of the sequence's length, of the second degree where attention is among it. Three lengths give it, a
fourth one checks it to the unit, and so does the beginning of the run on the long sequence itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any, Protocol

from deepoffload.errors import UsageError
from deepoffload.estimate.dry_run import LossOf, NeedsValues
from deepoffload.estimate.progress import Report, silent
from deepoffload.estimate.recording import MALLOC_CHUNK_MAX_BYTES, LiveBytes, NotRegular, Op, Recording, Shape, Visit
from deepoffload.estimate.tracker import LoopSeen

LENGTHS = (6, 7, 9, 10)
"""The lengths that are run; the last one checks. Models have sizes like 4, 8 and 16: at those, kernels that differ
would look alike."""

CALLS_MAX = 64
"""So many calls of one kernel, with tensors of the same shapes, in one use of a unit are a loop over tokens perhaps."""


@dataclass(frozen=True)
class ByLength:
    """A model's sequences: of ``length`` tokens, and how to call the model with those of another length."""

    length: int
    loss_at: Callable[[int], LossOf]


class Runs(Protocol):
    """How a model is run: ``checked`` with layers enough to see that those that repeat do the same, ``least`` without
    that. ``least_of`` and ``checked_of`` make of the one recording the other, or raise ``NotRegular``: then all layers
    have to be run."""

    def checked(self, loss_of: LossOf, calls_max: int | None = None) -> Recording: ...

    def least(self, loss_of: LossOf) -> Recording: ...

    def least_of(self, checked: Recording) -> Recording: ...

    def checked_of(self, least: Recording) -> Recording: ...


def record_quickly(runs: Runs, loss_of: LossOf, by_length: ByLength | None, progress: Report = silent) -> Recording:
    """``runs.checked(loss_of)``, where a loop over many tokens is run for few of them only. Raises ``NotRegular`` as
    ``runs`` does.

    Where the short runs do not tell, the model is run as it is: that takes a millisecond for each kernel call.
    """
    if by_length is None or by_length.length <= CALLS_MAX:
        return runs.checked(loss_of)
    try:
        return runs.checked(loss_of, calls_max=CALLS_MAX)
    except LoopSeen as seen:
        found = _from_short_runs(runs, by_length, seen.visits)
    if found is None:
        progress(f"every kernel call of a loop over {by_length.length} tokens; fewer tokens take less time")
        return runs.checked(loss_of)
    return found


def _from_short_runs(runs: Runs, by_length: ByLength, beginning: Sequence[Visit]) -> Recording | None:
    """What layers repeat is checked at the first length only, if the others can do without."""
    first, length = LENGTHS[0], by_length.length
    try:
        checked = runs.checked(by_length.loss_at(first))
        least = {first: runs.least_of(checked)}
        found = at_length(lambda n: least.get(n) or runs.least(by_length.loss_at(n)), length)
        if found is not None:
            found = runs.checked_of(found)
        elif least[first] is not checked:  # perhaps what is around the layers depends on their number
            found = at_length(lambda n: checked if n == first else runs.checked(by_length.loss_at(n)), length)
    except NeedsValues:
        raise
    except UsageError:
        return None  # perhaps it takes no short sequences
    return found if found is not None and _begins_so(found, beginning) else None


def at_length(record_at: Callable[[int], Recording], length: int, lengths: Sequence[int] = LENGTHS) -> Recording | None:
    """The recording of a run on sequences of ``length`` tokens, from runs on ``lengths`` (``record_at`` makes them).

    Returns:
        None where the runs do not tell: they follow no polynomial of the second degree, or the number of calls does not
        depend on the length.
    """
    runs: list[Recording] = []
    for each in lengths:
        runs.append(record_at(each))
        if len(runs) == 2 and _num_calls(runs[0]) == _num_calls(runs[1]):
            return None
    try:
        return _Fit(lengths, length).recording(runs)
    except NotRegular:
        return None


def _num_calls(run: Recording) -> int:
    return sum(sum(visit.ops.values()) for visit in run.visits)


def _begins_so(run: Recording, beginning: Sequence[Visit]) -> bool:
    """Whether ``run`` begins as the long run did; what its last visit had done must be part of that visit."""
    if len(run.visits) < len(beginning):
        return False
    *whole, part = zip(run.visits, beginning, strict=False)
    return all(mine.units == theirs.units and mine.ops == theirs.ops for mine, theirs in whole) and (
        part[0].units == part[1].units and part[1].ops <= part[0].ops
    )


class _Fit:
    """Values at one length from those at others. Everything it is given is a value for each of ``lengths``."""

    def __init__(self, lengths: Sequence[int], length: int) -> None:
        *nodes, check = lengths
        self._at_check, self._at_length = _weights(nodes, check), _weights(nodes, length)

    def number(self, values: Sequence[int]) -> int:
        if values.count(values[0]) == len(values):
            return values[0]
        *known, checked = values
        found = sum(w * v for w, v in zip(self._at_length, known, strict=True))
        if sum(w * v for w, v in zip(self._at_check, known, strict=True)) != checked or found.denominator != 1:
            raise NotRegular
        return int(found)

    def value(self, values: Sequence[Any]) -> Any:
        """Of arguments: numbers, shapes, sequences of them; a sequence of another length at each repeats its elements
        more often."""
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            raise NotRegular
        if isinstance(first, Shape):
            shape, stride = self.value([v.shape for v in values]), self.value([v.stride for v in values])
            return Shape(shape, stride, self.value([v.dtype for v in values]))
        if isinstance(first, (list, tuple)):
            if any(len(value) != len(first) for value in values):
                runs = [[(each, len(list(group))) for each, group in groupby(value)] for value in values]
                counted = [(self.value([r[0] for r in of]), self.number([r[1] for r in of])) for of in _zip(runs)]
                return type(first)(each for each, count in counted for _ in range(count))
            return type(first)(self.value(list(elements)) for elements in _zip(values))
        if isinstance(first, dict):
            return {key: self.value([value[key] for value in values]) for key in first}
        if isinstance(first, int) and not isinstance(first, bool):
            return self.number(values)
        if isinstance(first, float):
            return values[-1]  # a factor; no kernel is faster for it
        if any(value != first for value in values):
            raise NotRegular
        return first

    def recording(self, runs: Sequence[Recording]) -> Recording:
        calls = [list(run.calls) for run in runs]
        sorts = [self._op(ops) for ops in _zip(calls)]
        numbers = [{op: number for number, op in enumerate(ops)} for ops in calls]
        made = {
            sort: tuple(
                self.number(sizes) for sizes in _zip([run.made_bytes[op] for run, op in zip(runs, ops, strict=True)])
            )
            for sort, ops in zip(sorts, _zip(calls), strict=True)
        }
        chunks = (size for sizes in made.values() for size in sizes if size <= MALLOC_CHUNK_MAX_BYTES)
        if len({run.recomputes for run in runs}) > 1:
            raise NotRegular

        def sort_of(ops: Sequence[Op]) -> Op:
            """The same kernels must come in the same order."""
            places = {number[op] for number, op in zip(numbers, ops, strict=True)}
            if len(places) > 1:
                raise NotRegular
            return sorts[places.pop()]

        visits = [self._visit(of, sort_of) for of in _zip([run.visits for run in runs])]
        spans = [self._span(of, sort_of) for of in _zip([run.spans for run in runs])]
        return Recording(
            visits=tuple(visits),
            spans=tuple(spans),
            made_bytes=made,
            head_bytes=self.number([run.head_bytes for run in runs]),
            largest_chunk_bytes=max(chunks, default=0),
            recomputes=runs[0].recomputes,
            calls={
                sort: self.value([run.calls[op] for run, op in zip(runs, ops, strict=True)])
                for sort, ops in zip(sorts, _zip(calls), strict=True)
            },
        )

    def _op(self, ops: Sequence[Op]) -> Op:
        return Op(
            self.value([op.name for op in ops]),
            self.value([op.tensors for op in ops]),
            self.number([op.flops for op in ops]),
            self.number([op.nbytes for op in ops]),
        )

    def _visit(self, visits: Sequence[Visit], sort_of: Callable[[Sequence[Op]], Op]) -> Visit:
        first = visits[0]
        if any((v.backward, v.units, v.landed) != (first.backward, first.units, first.landed) for v in visits):
            raise NotRegular
        ops: Counter[Op] = Counter()
        for counted in _zip([list(visit.ops.items()) for visit in visits]):
            # += : kernels that differ at the short lengths may be alike at this one
            ops[sort_of([op for op, _ in counted])] += self.number([count for _, count in counted])
        return replace(first, ops=ops)

    def _span(self, spans: Sequence[LiveBytes], sort_of: Callable[[Sequence[Op]], Op]) -> LiveBytes:
        first = spans[0]
        if any((span.visit, span.after_forward) != (first.visit, first.after_forward) for span in spans):
            raise NotRegular
        freed_in = dict.fromkeys(number for span in spans for number in span.freed)
        over: dict[tuple[Op, int], int] = {}
        for calls in _zip([list(span.over_by_call.items()) for span in spans]):
            numbers = {number for (_, number), _ in calls}
            if len(numbers) > 1:
                raise NotRegular
            call = sort_of([op for (op, _), _ in calls]), numbers.pop()
            nbytes = self.number([nbytes for _, nbytes in calls])
            over[call] = max(over.get(call, nbytes), nbytes)
        return LiveBytes(
            first.visit,
            first.after_forward,
            net_bytes=self.number([span.net_bytes for span in spans]),
            over_bytes=max(0, *over.values()) if over else 0,
            over_by_call=over,
            freed=Counter({number: self.number([span.freed[number] for span in spans]) for number in freed_in}),
        )


def _weights(nodes: Sequence[int], at: int) -> list[Fraction]:
    """Lagrange's: a polynomial's value ``at`` is the sum of its values at ``nodes``, so weighted."""
    result = []
    for node in nodes:
        weight = Fraction(1)
        for other in nodes:
            if other != node:
                weight *= Fraction(at - other, node - other)
        result.append(weight)
    return result


def _zip(sequences: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Their elements side by side; they have to be of one length."""
    if len({len(each) for each in sequences}) > 1:
        raise NotRegular
    return list(zip(*sequences, strict=True))
