"""Reductions that wait for what every rank says of its part."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import NamedTuple


class Released(NamedTuple):
    """A reduction that may start, as :class:`~deepoffload.ranks.rounds.Payload` says it."""

    unit: int
    ranks: tuple[int, ...]
    is_partial: bool
    is_more: bool


class HeldReductions:
    """What every rank has announced for which reductions, of those that are not launched yet.

    Several parts of a rank in one backward belong to as many reductions, one after the other.

    Attributes:
        ended: how many backwards each rank has ended in this step, as far as it has said so.
        over: the ranks that announce no more parts in this step.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._parts: dict[int, list[deque[int]]] = {}  # by unit, those of each rank: of which backward
        self._latest: dict[int, list[int]] = {}  # by unit: the backward of each rank's latest part in this step
        self._released: dict[int, int] = {}  # by unit: of which backward the latest reduction was
        self.ended = [0] * world_size
        self.over: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def of(self, unit: int, rank: int) -> int:
        """How many parts of ``rank`` for ``unit`` wait."""
        parts = self._parts.get(unit)
        return 0 if parts is None else len(parts[rank])

    def announce(self, unit: int, rank: int, backward: int) -> None:
        """``rank`` has a part in one more reduction."""
        self._parts.setdefault(unit, [deque() for _ in range(self._world_size)])[rank].append(backward)
        self._latest.setdefault(unit, [-1] * self._world_size)[rank] = backward

    def has_ended(self, rank: int, backward: int) -> bool:
        """Whether ``rank`` announces no more parts of a backward."""
        return rank in self.over or self.ended[rank] > backward

    def has_said(self, unit: int, rank: int, backward: int) -> bool:
        """Whether ``rank`` has announced a part of a backward, or can have none any more."""
        latest = self._latest.get(unit)
        return self.has_ended(rank, backward) or (latest is not None and latest[rank] >= backward)

    def holds(self, unit: int, backwards: int) -> bool:
        """Whether a part of a unit waits that is of the first ``backwards`` ones."""
        return any(said and said[0] < backwards for said in self._parts.get(unit, ()))

    def needs(self, unit: int, rank: int, other: int, *, reads: bool) -> bool:
        """Whether ``rank``, which waits for its parts of a unit or ``reads`` the sum, does not go on before ``other``
        says something."""
        waits_for = max(self._parts[unit][rank], default=-1) if unit in self._parts else -1
        if reads and self.ended[rank] > 0 and not self.has_ended(other, self.ended[rank] - 1):
            return True
        return waits_for >= 0 and not self.has_said(unit, other, waits_for)

    def release(self, unit: int, *, partial: bool = False) -> Iterator[Released]:
        """The reductions of ``unit`` that may start. ``partial``: also without the parts of ranks that may give theirs
        later."""
        while (parts := self._parts.get(unit)) is not None:
            backward = min(said[0] for said in parts if said)
            complete = all(said or self.has_ended(rank, backward) for rank, said in enumerate(parts))
            if not (complete or partial):
                return
            ranks = tuple(rank for rank, said in enumerate(parts) if said and said[0] == backward)
            for rank in ranks:
                parts[rank].popleft()
            if not any(parts):
                del self._parts[unit]
            is_more = self._released.get(unit) == backward
            self._released[unit] = backward
            yield Released(unit, ranks, not complete, is_more)

    def release_all(self, *, partial: bool = False, but: Collection[int] = ()) -> Iterator[Released]:
        """The same of all units, ``but`` these."""
        for unit in [unit for unit in self._parts if unit not in but]:
            yield from self.release(unit, partial=partial)
