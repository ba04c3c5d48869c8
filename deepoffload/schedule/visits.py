"""In which order units are visited, when several micro-batches go through a model side by side.

A *path* is what one micro-batch visits in one forward, in its order. Micro-batches may go different ways: one skips a
layer, another one ends early. Each visit gets a *place*, so that places grow along every path. Who always lets the
micro-batch with the least place go first brings all of them to a visit before any of them has made it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Path = Sequence[Hashable]
V = TypeVar("V", bound=Hashable)


def places_of(paths: Iterable[Sequence[V]]) -> dict[V, int] | None:
    """The place of every visit: one more than the largest place among those that come right before it on a path.

    Returns None where no such places exist: one path visits a before b, and another one b before a.
    """
    before: dict[V, set[V]] = {}
    after: dict[V, set[V]] = {}
    for path in paths:
        for visit in path:
            before.setdefault(visit, set())
            after.setdefault(visit, set())
        for one, other in zip(path, path[1:], strict=False):
            before[other].add(one)
            after[one].add(other)
    places = dict.fromkeys((visit for visit, earlier in before.items() if not earlier), 0)
    ready = list(places)
    for visit in ready:
        for later in after[visit]:
            before[later].discard(visit)
            places[later] = max(places.get(later, 0), places[visit] + 1)
            if not before[later]:
                ready.append(later)
    return places if len(ready) == len(before) else None


class VisitOrder:
    """The places of visits in the forwards of a model, learned from its steps.

    Attributes:
        is_learned: from a forward at least; else it is a guess.
        taken_as_given: visits that need what they are given itself, not something that stands for it.
        hides_weights: a reentrant checkpoint uses weights that no visit shows.
    """

    def __init__(self) -> None:
        self.is_learned = False
        self.taken_as_given: set[Hashable] = set()
        self.hides_weights = False
        self._places: dict[Hashable, int] = {}
        self._last = -1

    def guess(self, visits: Iterable[Hashable]) -> None:
        """The order in which no step has been made yet, such as that in which modules are registered."""
        self._places = {visit: place for place, visit in enumerate(visits)}
        self._last = -1

    def place(self, visit: Hashable, count: int) -> int:
        """Where a visit stands. Not known yet: after ``count`` visits, those that the micro-batch has made so far."""
        return self._places.get(visit, count)

    def is_last(self, visit: Hashable) -> bool:
        """Whether the last step has made no visit after this one."""
        return self._places.get(visit, -2) == self._last

    def learn(self, paths: Sequence[Path]) -> None:
        """Take over the order of a step. A visit that this step did not make keeps its place among the others, if that
        agrees with the step."""
        self.is_learned = True
        known = sorted(self._places, key=self._places.__getitem__)
        seen = {visit for path in paths for visit in path}
        if not (self._places and seen.issubset(self._places) and all(map(self._grows, paths))):
            self._places = places_of([*paths, known]) or places_of(paths) or {}
        self._last = max((self._places[visit] for visit in seen if visit in self._places), default=-1)

    def _grows(self, path: Path) -> bool:
        places = [self._places[visit] for visit in path]
        return all(one < other for one, other in zip(places, places[1:], strict=False))
