"""Slides blocks together so that scattered holes become one."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping, Sequence

from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Block, host_view_owner
from deepoffload.memory.transfers import TierCounters
from deepoffload.schedule.block_state import BlockState


class Compactor:
    """Args:
    resident: the blocks that have a range in ``arena``, as they are at any time.
    note_changes: to be called before a block's bytes are copied.
    """

    def __init__(
        self,
        arena: Arena,
        resident: Mapping[int, Block],
        note_changes: Callable[[Block], None],
        counters: TierCounters,
        poison: bool,
    ) -> None:
        self._arena = arena
        self._resident = resident
        self._note_changes = note_changes
        self._counters = counters
        self._poison = poison

    def compact(self, nbytes: int, limit_bytes: float = math.inf) -> bool:
        """Merge holes into one of ``nbytes`` by sliding the fewest bytes between them; False when that cannot be done,
        or not within ``limit_bytes``."""
        if self._arena.free_bytes < nbytes:
            return False
        by_offset = {b.offset: b for b in self._resident.values()}
        run = cheapest_run(self._arena.layout(), by_offset, nbytes, self._may_move, limit_bytes)
        if run is None:
            return False
        self._counters.compactions += 1
        for block in run:
            self._slide(block)
        return True

    def _may_move(self, block: Block) -> bool:
        """A block can move while nobody refers to its memory. A lease of this thread is no obstacle: its holder takes
        addresses only when all its blocks are there, and waits for this one now. Those of other threads are."""
        if block.state not in (BlockState.CLEAN, BlockState.DIRTY):
            return False
        if block.leases and block.leased_by != threading.get_ident():
            return False
        owner = host_view_owner(block)
        return not block.copying and (owner is None or owner.can_release())

    def _slide(self, block: Block) -> None:
        self._note_changes(block)
        old = block.offset
        new = self._arena.slide_down(old) if old is not None else None
        if old is None or new is None:
            raise RuntimeError(f"block {block.name} has nothing below it to slide into")
        ctypes.memmove(self._arena.address + new, self._arena.address + old, block.nbytes)
        block.offset = new
        owner = host_view_owner(block)
        if owner is not None:
            owner.relocate(new)
        if self._poison:
            size = self._arena.size_of(new)
            start = max(old, new + size)
            ctypes.memset(self._arena.address + start, 0xFF, old + size - start)


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
