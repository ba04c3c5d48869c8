"""Which units are whole in one rank's memory, in simulated time: as copies come and go in ``copies.residency``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


class Needed(NamedTuple):
    """Copies that are gathered for a use, in order, and those whose places they take."""

    coming: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()


class WholeCopies:
    """Copies of blocks of which several ranks store a part each. A copy that is needed takes the place of the one that
    is used last.

    Args:
        nbytes: of each block's whole copy. capacity_bytes: for all that are there at a time.
        gather_s: seconds that it takes to gather one. from_others_bytes: what of it comes from other ranks.
        sent_bytes: what of it goes on to a device, where one computes.
    """

    def __init__(
        self,
        nbytes: Mapping[int, int],
        capacity_bytes: int,
        gather_s: Mapping[int, float],
        from_others_bytes: Mapping[int, int],
        sent_bytes: Mapping[int, int],
    ) -> None:
        self.gather_s = gather_s
        self.from_others_bytes = from_others_bytes
        self.sent_bytes = sent_bytes
        self._nbytes = nbytes
        self._capacity_bytes = capacity_bytes
        self._there: set[int] = set()
        self._used_bytes = 0

    def __contains__(self, block: int) -> bool:
        return block in self._there

    def need(self, blocks: Iterable[int], next_use: Callable[[int], float]) -> Needed:
        """Have copies of ``blocks`` together.

        ``next_use``: how far in the future a block is used again.
        """
        needed = list(dict.fromkeys(blocks))
        coming = tuple(block for block in needed if block not in self._there)
        left: list[int] = []
        for block in coming:
            leaving = sorted(self._there.difference(needed), key=next_use)
            while leaving and self._used_bytes + self._nbytes[block] > self._capacity_bytes:
                left.append(leaving.pop())
                self.drop(left[-1])
            self._there.add(block)
            self._used_bytes += self._nbytes[block]
        return Needed(coming, tuple(left))

    def drop(self, block: int) -> None:
        """The copy goes, if there is one: its block has changed."""
        if block in self._there:
            self._there.remove(block)
            self._used_bytes -= self._nbytes[block]
