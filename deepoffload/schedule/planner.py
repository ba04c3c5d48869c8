"""What to move next over a known cyclic order, in which least-recently-used would never hit where it is longer than the
memory. Who leaves is decided by ``victims``.

All functions are pure; their callers carry the moves out.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from deepoffload.schedule.victims import Rank, leaving_order, rank


class MoveKind(Enum):
    FETCH = "fetch"
    EVICT = "evict"


@dataclass(frozen=True)
class Move:
    """One step of a plan: ``FETCH`` reads the block from NVMe into memory, ``EVICT`` frees its memory (after writing it
    back when it is dirty)."""

    kind: MoveKind
    block: int


def plan_prefetch(
    upcoming: Iterable[tuple[int, int]],
    *,
    is_resident: Callable[[int], bool],
    nbytes: Callable[[int], int],
    free_bytes: int,
    evictable: Iterable[int],
    next_use: Callable[[int], float],
    lookahead_bytes: int,
    static: Container[int] = frozenset(),
    is_empty: Callable[[int], bool] = lambda block: False,
    reserve_bytes: int = 0,
    aside_bytes: int = 0,
    scan_limit: int = 256,
) -> list[Move]:
    """The moves that bring upcoming blocks nearer, in the order in which they must be carried out.

    upcoming: (distance, block) in order of use, see ``Trace.upcoming``; at most ``scan_limit`` entries are looked at.
    is_resident: whether the block is in memory or on its way there.
    free_bytes: memory that nobody holds. At no prefix of the plan do fetches exceed free plus evicted bytes.
    evictable: blocks that may be evicted now; looked at only when there is no room, so a lazy iterable is welcome.
    lookahead_bytes: the window: the first ``lookahead_bytes`` of distinct upcoming blocks, resident or not. So no more
        than that is ever fetched and not yet used, and what was fetched for an order the program has left does not
        count against what is needed now.
    static: blocks that are always in memory; skipped, and not counted in the window.
    is_empty: whether a block has no bytes anywhere (a gradient before it lands). It is never fetched and not counted in
        the window; but its memory has to be there when it comes, so room for such blocks is left before anything used
        later is fetched: for all of them that are ``static``, and for ``reserve_bytes`` of others.
    aside_bytes: room to leave before anything is fetched: what the running event is about to take.

    A block is evicted only for one that is used strictly sooner. The plan ends at the first block for which no room can
    be made: a prefetch never waits.
    """
    moves: list[Move] = []
    seen: set[int] = set()
    victims: _Victims | None = None
    window_bytes = 0
    others_aside_bytes = 0
    for distance, block in islice(upcoming, scan_limit):
        if block in seen:
            continue
        seen.add(block)
        if block in static:
            aside_bytes += nbytes(block) if is_empty(block) else 0
            continue
        size = nbytes(block)
        if is_empty(block):
            others_aside_bytes = min(others_aside_bytes + size, reserve_bytes)
            continue
        window_bytes += size
        if window_bytes > lookahead_bytes:
            break
        if is_resident(block):
            if victims is not None and block in victims.taken:
                break  # given up for a nearer one: memory ends here
            continue
        lacking_bytes = size + aside_bytes + others_aside_bytes - free_bytes
        if lacking_bytes > 0:
            if victims is None:
                victims = _Victims(evictable, next_use, nbytes)
            chosen = victims.take(lacking_bytes, distance)
            if not chosen:
                break
            moves.extend(Move(MoveKind.EVICT, victim) for victim in chosen)
            free_bytes += sum(nbytes(victim) for victim in chosen)
        moves.append(Move(MoveKind.FETCH, block))
        free_bytes -= size
    return moves


def plan_write_back(
    dirty: Iterable[int],
    upcoming: Iterable[tuple[int, int]],
    *,
    nbytes: Callable[[int], int],
    next_use: Callable[[int], float],
    lookahead_bytes: int,
    static: Container[int] = frozenset(),
    scan_limit: int = 256,
) -> list[int]:
    """The dirty blocks to write now, so that their memory can be taken later without waiting; first what leaves first.

    Left out are ``static`` blocks and those used again within the window of ``plan_prefetch``, of which the arguments
    are the same: they may change again before they go. The caller offers no block that is in use or being written.
    """
    left = {block for block in dirty if block not in static}
    near: set[int] = set()
    window_bytes = 0
    for _, block in islice(upcoming, scan_limit):
        if not left:
            break
        if block in near or block in static:
            continue
        window_bytes += nbytes(block)
        if window_bytes > lookahead_bytes:
            break
        near.add(block)
        left.discard(block)
    return list(leaving_order(left, next_use))


class _Victims:
    """Evictable blocks, the first to leave last."""

    __slots__ = ("_nbytes", "_order", "taken")

    def __init__(
        self, evictable: Iterable[int], next_use: Callable[[int], float], nbytes: Callable[[int], int]
    ) -> None:
        self._order = sorted(rank(block, next_use) for block in evictable)
        self._nbytes = nbytes
        self.taken: set[int] = set()

    def take(self, needed_bytes: int, farther_than: float) -> list[int]:
        """Blocks of at least ``needed_bytes``, each used strictly ``farther_than``; empty when there are not enough."""
        order, found_bytes, first = self._order, 0, len(self._order)
        while found_bytes < needed_bytes:
            first -= 1
            if first < 0 or order[first][0] <= farther_than:
                return []
            found_bytes += self._nbytes(order[first][2])
        chosen: list[int] = []
        kept: list[Rank] = []
        for entry in order[first:]:  # the nearest first: what a larger, farther one makes needless stays in memory
            size = self._nbytes(entry[2])
            if found_bytes - size >= needed_bytes:
                found_bytes -= size
                kept.append(entry)
            else:
                chosen.append(entry[2])
        self._order = order[:first] + kept
        self.taken.update(chosen)
        return chosen[::-1]
