"""Blocks that are looked at one after the other, once: saving, loading. Those to come are read ahead, and those that
only came for this leave again, so that the disk reads and writes at the same time.

The order of training, by which the prefetcher goes, says nothing of such a pass, and is not changed by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from deepoffload.memory.block import Block
from deepoffload.params.pager import Pager
from deepoffload.params.prefetcher import EXTRA_VICTIMS_MAX
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.victims import choose_victim, leaving_order

AHEAD_BYTES = 64 << 20
"""Of blocks to come that are read, or have been read, at a time. Two pieces of state keep a disk busy."""

AHEAD_BLOCKS = 64
"""Blocks to come that are looked at, where they are small."""

WRITTEN_SHARE = 0.5
"""At most this share of the memory is on its way to the disk behind a pass."""


class Passage:
    """One pass over blocks of a pager.

    Args:
        blocks: in the order in which they will be looked at. That is a hint: others may come in between, or some be
            left out. One that is there several times counts where it is first.
    """

    def __init__(self, pager: Pager, blocks: Iterable[Block]) -> None:
        self._pager = pager
        self._tiers = pager.tiers
        self._order = list(dict.fromkeys(blocks))
        self._places = {block.id: place for place, block in enumerate(self._order)}
        with pager.lock:
            self._staying = {block.id for block in self._tiers.resident()}
        self._present: Block | None = None
        self._leaving: deque[Block] = deque()

    def at(self, block: Block) -> None:
        """``block`` is looked at from now on, and the one before no more. Call before it is acquired.

        Raises:
            IoFailure: a block that was changed could not be written; it is as it was.
        """
        tiers = self._tiers
        if block is self._present or not self._pager.prefetch or tiers.space is None or tiers.all_stay():
            return
        with self._pager.lock:
            tiers.poll()
            self._leave()
            self._present = block
            self._read_ahead(block)

    def end(self) -> None:
        """Nothing of it is looked at any more."""
        with self._pager.lock:
            self._leave()
            self._present = None

    def _leave(self) -> None:
        """Start writing the present block where it was changed, and let go of those before."""
        block = self._present
        if block is not None and block.id not in self._staying and block.resident:
            self._tiers.write_behind(block)
            self._leaving.append(block)
        while self._leaving:
            block = self._leaving[0]
            if block.state is BlockState.WRITING and self._written_bytes() <= self._written_bytes_max():
                return
            self._leaving.popleft()
            if block.state is BlockState.WRITING or self._tiers.evictable(block):
                self._tiers.evict(block)

    def _written_bytes(self) -> int:
        return self._tiers.in_flight_bytes(BlockState.WRITING)

    def _written_bytes_max(self) -> float:
        return self._tiers.arena.capacity_bytes * WRITTEN_SHARE

    def _read_ahead(self, block: Block) -> None:
        place = self._places.get(block.id)
        if place is None:
            return
        left_bytes = AHEAD_BYTES
        near = {block.id}
        for coming in self._order[place + 1 : place + 1 + AHEAD_BLOCKS]:
            left_bytes -= coming.room_bytes
            if left_bytes < 0 and len(near) > 1:
                return
            near.add(coming.id)
            if coming.state is BlockState.ON_NVME and not self._fetch(coming, near, block):
                self._write_behind(near)
                return

    def _fetch(self, coming: Block, near: set[int], present: Block) -> bool:
        """Start reading a block that is to come, in memory that the present one does not need."""
        tiers = self._tiers
        needed_bytes = coming.room_bytes + (0 if present.resident else present.room_bytes)
        tries = EXTRA_VICTIMS_MAX
        while tries:
            if tiers.arena.free_bytes >= needed_bytes:
                if tiers.prefetch(coming):
                    return True
                tries -= 1
            victim = choose_victim(self._evictable(near), tiers.policy.next_use)
            if victim is None or not tiers.evict(tiers.block(victim)):
                break
        return tiers.arena.free_bytes >= needed_bytes and tiers.prefetch(coming, compact=True)

    def _write_behind(self, near: set[int]) -> None:
        """Start writing changed blocks, so that the next ones have room."""
        tiers = self._tiers
        dirty = [block.id for block in tiers.passing(BlockState.DIRTY) if block.id not in near]
        room_bytes = min(AHEAD_BYTES, self._written_bytes_max()) - self._written_bytes()
        for block_id in leaving_order(dirty, tiers.policy.next_use):
            block = tiers.block(block_id)
            if room_bytes < block.room_bytes:
                return
            if tiers.write_behind(block):
                room_bytes -= block.room_bytes

    def _evictable(self, near: set[int]) -> Iterator[int]:
        for block in self._tiers.passing(BlockState.CLEAN):
            if block.id not in near and self._tiers.evictable(block):
                yield block.id
