"""Which blocks have a copy on the device, and which copy leaves for another one."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from deepoffload.copies.block_copy import BlockCopy
from deepoffload.copies.fenced_arena import DeviceArena
from deepoffload.copies.gathered import is_shard
from deepoffload.copies.movement import Movement
from deepoffload.errors import BudgetError
from deepoffload.memory.block import Alias, Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.schedule.placement import BlockKind
from deepoffload.schedule.planner import MoveKind, plan_prefetch
from deepoffload.schedule.victims import leaving_order

GATHERED_AHEAD = 3
"""So many units that are used next are gathered in advance, where there is room. Ranks with the same program want the
same ones at the same moment, however fast their bytes come."""

SCAN_LIMIT = 256
"""So many of the next uses of weights are looked at, as :func:`plan_prefetch` does."""


@dataclass
class DeviceCounters:
    """Running totals. ``faults``: copies that were made when they were needed, which no prefetch had brought."""

    faults: int = 0
    prefetches: int = 0
    evictions: int = 0


class Residency:
    """The copies that there are. Guarded by the tier manager's lock.

    Attributes:
        copies: by the block's id.
        staying: ids of the blocks whose copies are never evicted.
    """

    def __init__(self, tiers: TierManager, arena: DeviceArena, movement: Movement) -> None:
        self.copies: dict[int, BlockCopy] = {}
        self.staying: set[int] = set()
        self._stale: set[int] = set()
        self.counters = DeviceCounters()
        self._tiers = tiers
        self._arena = arena
        self._movement = movement

    def of(self, block: Block) -> BlockCopy | None:
        return self.copies.get(block.id)

    # -- coming ----------------------------------------------------------------------------------------------------

    def need(self, block: Block, *, load: bool = True) -> BlockCopy:
        """The copy of a block, which is made now where there is none. ``load``: False when the caller overwrites all
        of it."""
        copy = self.copies.get(block.id)
        if copy is None:
            copy = self._bring(block, load)
            self.counters.faults += load
        elif copy.stale:
            self._refill(copy, load=load)
            self.counters.faults += load
        return copy

    def shows(self, block: Block) -> bool:
        """Whether there is a copy of what is stored now, or of what the program made of it."""
        copy = self.copies.get(block.id)
        return copy is not None and not copy.stale

    def outdate(self, copy: BlockCopy) -> None:
        """Other bytes are stored from now on. A weight, which is used again, keeps its place for them; other copies
        that nobody uses go."""
        if copy.block.kind is not BlockKind.WEIGHT or is_shard(copy.block):
            self.drop(copy)
            return
        if copy.block.owner is not None:
            copy.block.owner.release()
        self._movement.outdate(copy)
        self._stale.add(copy.block.id)

    def _bring(self, block: Block, load: bool) -> BlockCopy:
        if not is_shard(block):
            self._movement.end_copies(block)  # a gradient may be landing in it
        copy = BlockCopy(block, self._make_room(block))
        self.copies[block.id] = copy
        try:
            if load:
                self._movement.copy_in(copy)
            else:
                self._movement.overwrite(copy)
        except BaseException:
            del self.copies[block.id]
            self._movement.give_up(copy)
            raise
        return copy

    def plan(self, upcoming: Iterable[tuple[int, int]], in_use: set[int] | frozenset[int]) -> None:
        """Start copies of the weights that are used next and are in host memory, as far as there is room."""
        weights = self._weights(upcoming)
        if self._stale:
            listed = list(islice(weights, SCAN_LIMIT))
            self._fill_again(block for _, block in listed)
            weights = iter(listed)
        moves = plan_prefetch(
            weights,
            is_resident=lambda b: b in self.copies or not self._is_loadable(b),
            nbytes=lambda b: self._tiers.block(b).shown_room_bytes,
            free_bytes=self._arena.free_bytes,
            evictable=(c.block.id for c in list(self.copies.values()) if self._is_idle(c, in_use)),
            next_use=self._tiers.policy.next_use,
            lookahead_bytes=self._arena.capacity_bytes,
        )
        for move in moves:
            if move.kind is MoveKind.EVICT:
                self._evict(self.copies[move.block])
            elif not self._prefetch(self._tiers.block(move.block)):
                break

    def _fill_again(self, blocks: Iterable[int]) -> None:
        """Start copies into the ranges of stale ones, in the order of their uses, up to the first weight that needs
        room."""
        for block_id in blocks:
            copy = self.copies.get(block_id)
            if copy is None and self._is_loadable(block_id):
                return
            if copy is not None and copy.stale and self._is_loadable(block_id):
                self._refill(copy, load=True)
                self.counters.prefetches += 1

    def _refill(self, copy: BlockCopy, *, load: bool) -> None:
        self._movement.end_copies(copy.block)
        self._movement.fill_again(copy, load=load)
        self._stale.discard(copy.block.id)

    def _weights(self, upcoming: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The uses of weights among ``upcoming``, as far as copies are made in advance. This runs at every event, and a
        step may have many more."""
        nearest: set[int] = set()
        for distance, block in upcoming:
            if self._is_weight(block):
                nearest.add(block)
                if len(nearest) > GATHERED_AHEAD and is_shard(self._tiers.block(block)):
                    return
                yield distance, block

    def _prefetch(self, block: Block) -> bool:
        from_ranks = self._movement.from_ranks
        if from_ranks is not None and is_shard(block) and not from_ranks.gathered.has_room(block):
            return False
        offset = self._arena.allocate(block.shown_room_bytes)
        if offset is None:
            return False
        copy = BlockCopy(block, offset)
        try:
            self._movement.copy_in(copy)
        except BaseException:
            self._movement.give_up(copy)
            raise
        self.copies[block.id] = copy
        self.counters.prefetches += 1
        return True

    def _is_weight(self, block_id: int) -> bool:
        return self._tiers.room_bytes(block_id) > 0 and self._tiers.block(block_id).kind is BlockKind.WEIGHT

    def _is_loadable(self, block_id: int) -> bool:
        """In host memory, where no update of it is still to come and no copy is on its way."""
        block = self._tiers.block(block_id)
        owner = block.owner
        if is_shard(block):  # each rank brings its part when the gather is launched
            return self._tiers.has_bytes(block) and owner is not None and not owner.update_to_come()
        if block.copying:  # what the program wrote may still be coming, on another stream
            return False
        return block.resident and owner is not None and not owner.on_host and not owner.update_to_come()

    def _is_idle(self, copy: BlockCopy, in_use: set[int] | frozenset[int]) -> bool:
        if copy.block.id in in_use or copy.leases or copy.block.id in self.staying:
            return False
        if is_shard(copy.block) and not copy.streams:
            return False  # it may still be coming
        return copy.may_go() and not copy.is_dirty()

    # -- going -----------------------------------------------------------------------------------------------------

    def drop(self, copy: BlockCopy, aliases: list[Alias] | None = None) -> None:
        """A copy goes as it is; ``aliases`` keep its memory."""
        if copy.block.owner is not None:
            copy.block.owner.release()
        del self.copies[copy.block.id]
        self._stale.discard(copy.block.id)
        self._movement.free(copy, aliases)

    def evict_all(self, in_use: set[int] | frozenset[int]) -> None:
        """Evict what may be evicted."""
        for copy in list(self.copies.values()):
            if copy.block.id not in in_use:
                self._evict(copy)

    def _evict(self, copy: BlockCopy) -> bool:
        if copy.leases or copy.block.id in self.staying or not copy.may_go():
            return False
        from_ranks = self._movement.from_ranks
        if from_ranks is not None and not from_ranks.let_arrive(copy):
            return False
        if self.copies.get(copy.block.id) is not copy or copy.leases:
            return False
        if copy.is_dirty():
            self._movement.copy_out(copy)
        self.drop(copy)
        self.counters.evictions += 1
        return True

    def _evict_farthest(self) -> bool:
        candidates = [copy.block.id for copy in self.copies.values() if not copy.leases]
        leaving = leaving_order(candidates, self._tiers.policy.next_use, is_clean=lambda b: not self.copies[b].dirty)
        # Waiting for one may have taken others.
        return any(self._evict(self.copies[block]) for block in leaving if block in self.copies)

    def _make_room(self, block: Block) -> int:
        collected = False
        while True:
            offset = self._arena.allocate(block.shown_room_bytes, high=block.id in self.staying)
            if offset is not None:
                return offset
            if self._arena.empty_limbo() or self._evict_farthest():
                continue
            if not collected and any(not copy.leases and not copy.may_go() for copy in self.copies.values()):
                collected = True
                gc.collect()  # views in reference cycles, or in the traceback of a caught exception
                continue
            raise BudgetError(self._no_room(block))

    def _no_room(self, block: Block) -> str:
        held = [
            f"  {copy.block.name}: {copy.block.shown_room_bytes} bytes, "
            f"{'in use' if copy.leases else 'views of it are held'}"
            for copy in self.copies.values()
            if copy.leases or not copy.may_go()
        ]
        wanted, remedy = self._arena.no_room(block.shown_room_bytes)
        return (
            f"{block.name} needs {wanted} held by\n" + "\n".join(held[:20]) + f"\n{remedy}, or let go of views of "
            "weights and gradients (CPUAdam instead of torch's optimizers)"
        )

    def close(self) -> None:
        """Show nothing any more. Memory that the program has views of lives as long as these."""
        for copy in list(self.copies.values()):
            if copy.block.owner is not None:
                copy.block.owner.release()
        self.copies.clear()
        self._stale.clear()
        self._movement.forget_all()
