"""What the order of uses is made of: events, and a cycle of them that repeats."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterator
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


class Cycle:
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
