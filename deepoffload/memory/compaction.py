"""Which blocks to slide so that scattered holes become one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from deepoffload.memory.block import Block


def cheapest_run(
    layout: Sequence[tuple[int, int, bool]],
    by_offset: Mapping[int | None, Block],
    nbytes: int,
    may_move: Callable[[Block], bool],
    limit_bytes: float = math.inf,
) -> list[Block] | None:
    """Neighbours which, slid down one after the other, leave a hole of ``nbytes`` above them; the fewest bytes that do.

    One pass: every range comes in at the upper end of the run once, and goes at the lower one once.

    Args:
        layout: (offset, bytes, used) of every range and hole of the arena, in address order.
        may_move: asked at most once for each block, and only where sliding it would help.
        limit_bytes: the most that may be moved.

    Returns None when no run of movable blocks within the limit has holes enough between its ends.
    """
    best: tuple[int, int] | None = None
    best_bytes = limit_bytes
    movable: set[int] = set()
    first = free_bytes = moved_bytes = 0
    for last, (_, size, used) in enumerate(layout):
        if used:
            moved_bytes += size
            continue
        free_bytes += size
        fixed = -1
        while first <= last:
            _, size, used = layout[first]
            if not (used or first <= fixed or moved_bytes > best_bytes or free_bytes - size >= nbytes):
                if free_bytes < nbytes or (best is not None and moved_bytes == best_bytes):
                    break
                fixed = _highest_fixed(layout, by_offset, range(last - 1, first, -1), movable, may_move)
                if fixed < 0:
                    best, best_bytes = (first, last), moved_bytes
                    break
            if used:
                moved_bytes -= size
            else:
                free_bytes -= size
            first += 1
    if best is None:
        return None
    return [by_offset[offset] for offset, _, used in layout[best[0] : best[1]] if used]


def _highest_fixed(
    layout: Sequence[tuple[int, int, bool]],
    by_offset: Mapping[int | None, Block],
    indices: range,
    movable: set[int],
    may_move: Callable[[Block], bool],
) -> int:
    """The first of ``indices`` whose block cannot be moved, -1 when there is none. ``movable``: those known to be."""
    for index in indices:
        offset, _, used = layout[index]
        if used and index not in movable:
            block = by_offset.get(offset)
            if block is None or not may_move(block):
                return index
            movable.add(index)
    return -1
