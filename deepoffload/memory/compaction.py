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

    Args:
        layout: (offset, bytes, used) of every range and hole of the arena, in address order.
        may_move: asked only for blocks that could help.
        limit_bytes: the most that may be moved.

    Returns None when no run of movable blocks within the limit has holes enough between its ends.
    """
    best: list[Block] | None = None
    best_bytes: float = min(limit_bytes, sum(size for _, size, _ in layout)) + 1
    for first, (_, _, used) in enumerate(layout):
        if used:
            continue
        free_bytes = moved_bytes = 0
        run: list[Block] = []
        for offset, size, is_used in layout[first:]:
            if is_used:
                block = by_offset.get(offset)
                moved_bytes += size
                if block is None or moved_bytes >= best_bytes or not may_move(block):
                    break
                run.append(block)
                continue
            free_bytes += size
            if free_bytes >= nbytes:
                best, best_bytes = run, moved_bytes
                break
    return best
