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


class AnnouncedPart(NamedTuple):
    """What a rank has announced: of which ``backward`` it is, and whether it ``may_have_more`` in that."""

    backward: int
    may_have_more: bool

    @classmethod
    def said(cls, content: int) -> AnnouncedPart:
        """The part that :attr:`content` stands for."""
        return cls(content >> 1, bool(content & 1))

    @property
    def content(self) -> int:
        """As a number."""
        return 2 * self.backward + self.may_have_more


class HeldReductions:
    """What every rank has announced for which reductions, of those that are not launched yet.

    Where each rank has one part in a backward, these are one reduction. Where a rank has said that it may have several,
    all are awaited. Each is a reduction then: those of the first rank, those of the second one, and so on. So each
    element is added in the order of ranks. Parts that come although their rank has said no such thing belong to one
    more reduction.

    Attributes:
        ended: how many backwards each rank has ended in this step, as far as it has said so.
        over: the ranks that announce no more parts in this step.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._parts: dict[int, list[deque[AnnouncedPart]]] = {}  # by unit, those of each rank
        self._latest: dict[int, list[AnnouncedPart]] = {}  # by unit: each rank's latest part in this step
        self._released: dict[int, int] = {}  # by unit: of which backward the latest reduction was
        self.ended = [0] * world_size
        self.over: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def of(self, unit: int, rank: int) -> int:
        """How many parts of ``rank`` for ``unit`` wait."""
        parts = self._parts.get(unit)
        return 0 if parts is None else len(parts[rank])

    def announce(self, unit: int, rank: int, part: AnnouncedPart) -> None:
        """``rank`` has a part in a reduction."""
        self._parts.setdefault(unit, [deque() for _ in range(self._world_size)])[rank].append(part)
        self._latest.setdefault(unit, [AnnouncedPart(-1, False)] * self._world_size)[rank] = part

    def has_ended(self, rank: int, backward: int) -> bool:
        """Whether ``rank`` announces no more parts of a backward."""
        return rank in self.over or self.ended[rank] > backward

    def has_said(self, unit: int, rank: int, backward: int) -> bool:
        """Whether ``rank`` has announced its parts of a backward, as far as it knows, or can have none any more."""
        latest = self._latest[unit][rank] if unit in self._latest else AnnouncedPart(-1, False)
        return self.has_ended(rank, backward) or latest.backward > backward or latest == (backward, False)

    def holds(self, unit: int, backwards: int) -> bool:
        """Whether a part of a unit waits that is of the first ``backwards`` ones."""
        return any(said and said[0].backward < backwards for said in self._parts.get(unit, ()))

    def needs(self, unit: int, rank: int, other: int, *, reads: bool) -> bool:
        """Whether ``rank``, which waits for its parts of a unit or ``reads`` the sum, does not go on before ``other``
        says something."""
        said = self._parts[unit][rank] if unit in self._parts else ()
        if reads and self.ended[rank] > 0 and not self.has_ended(other, self.ended[rank] - 1):
            return True
        if not said:
            return False
        backward = said[-1].backward
        is_all = self.has_said(unit, rank, backward) or other in self.over
        return not (is_all and self.has_said(unit, other, backward))

    def release(self, unit: int, *, partial: bool = False) -> Iterator[Released]:
        """The reductions of ``unit`` that may start. ``partial``: also without the parts of ranks that may give theirs
        later."""
        while (parts := self._parts.get(unit)) is not None:
            backward = min(said[0].backward for said in parts if said)
            in_turn = any(said and said[0] == (backward, True) for said in parts)
            if in_turn and all(self.has_said(unit, rank, backward) for rank in range(self._world_size)):
                yield from self._release_in_turn(unit, backward)
                continue
            complete = not in_turn and all(said or self.has_ended(rank, backward) for rank, said in enumerate(parts))
            if not (complete or partial):
                return
            ranks = tuple(rank for rank, said in enumerate(parts) if said and said[0].backward == backward)
            yield Released(unit, ranks, not complete, self._take(unit, backward, ranks))

    def _release_in_turn(self, unit: int, backward: int) -> Iterator[Released]:
        """All parts of a backward, one by one."""
        counts = [sum(part.backward == backward for part in said) for said in self._parts[unit]]
        turns = [rank for rank, count in enumerate(counts) for _ in range(count)]
        was_begun = self._released.get(unit) == backward
        for number, rank in enumerate(turns, 1):
            self._take(unit, backward, (rank,))
            yield Released(unit, (rank,), number < len(turns), was_begun or max(counts) > 1)

    def _take(self, unit: int, backward: int, ranks: Collection[int]) -> bool:
        """The next parts of ``ranks`` wait no longer. Returns whether others of that backward were released before."""
        parts = self._parts[unit]
        for rank in ranks:
            parts[rank].popleft()
        if not any(parts):
            del self._parts[unit]
        was_begun = self._released.get(unit) == backward
        self._released[unit] = backward
        return was_begun

    def release_all(self, *, partial: bool = False, but: Collection[int] = ()) -> Iterator[Released]:
        """The same of all units, ``but`` these."""
        for unit in [unit for unit in self._parts if unit not in but]:
            yield from self.release(unit, partial=partial)
