"""Room in the arena: who must go, in which order what helps is tried, and what is said when nothing does.

The order of uses belongs to the caller, which knows the program. It is given as an :class:`EvictionPolicy` when the
tier manager is built.
"""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

from deepoffload.errors import BudgetError, IoFailure
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Alias, Block, DeviceCopies, host_view_owner
from deepoffload.memory.compaction import Compactor
from deepoffload.memory.disk_room import DiskRoom
from deepoffload.memory.limbo import Limbo
from deepoffload.memory.no_room import BudgetFor, no_room
from deepoffload.memory.transfers import TierCounters, Transfers
from deepoffload.native.aio import round_up
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.placement import BlockKind, Placement
from deepoffload.schedule.victims import leaving_order, rank

SLIDE_WORTH = 3
"""Sliding this many bytes in memory costs about as much as reading one from NVMe (10 GB/s on one core, some 3 GB/s)."""


class EvictionPolicy(Protocol):
    """What the memory asks of its policy, which knows the order in which the program uses blocks (implemented by
    :class:`deepoffload.params.use_order.UseOrder`).

    Attributes:
        predicted: ids of the blocks of the present event, when the event was expected. To wait for one of these is no
            fault.
    """

    predicted: frozenset[int]

    def next_use(self, block_id: int) -> float:
        """Distance to the next use of a block. The farthest leaves first."""

    def before_leaving(self, block: Block) -> None:
        """A block that placement keeps in memory is going to leave it after all."""

    def wanted_together(self) -> Sequence[Block]:
        """The blocks that the program's running operation needs in memory at once, as far as that is known."""


class UnknownOrder:
    """The policy of a program of which nothing is known: no block is nearer than another."""

    predicted: frozenset[int] = frozenset()

    def next_use(self, block_id: int) -> float:
        return math.inf

    def before_leaving(self, block: Block) -> None:
        """Nobody has to know."""

    def wanted_together(self) -> Sequence[Block]:
        return ()


class RoomMaker:
    """Finds a range of the arena for a block, and takes it back: evicts, waits and moves others as far as that goes.

    Args:
        resident: the blocks that have a range in ``arena``, as they are at any time.
        static: ids of the blocks that placement keeps in memory.
        copies: what a device holds of the blocks; None where the CPU computes.
        disk_room: where blocks go; None where they cannot leave at all.
        evict: evicts a block; False when it must stay. Raises IoFailure when its bytes cannot be written, BudgetError
            when there is no room for them on NVMe.
        poison: fill every range that is taken back with 0xFF.

    Attributes:
        placement: of the models, once there is one; errors show it.
        budget_for: finds the budget that errors name for them.
    """

    def __init__(
        self,
        arena: Arena,
        resident: Mapping[int, Block],
        static: set[int],
        transfers: Transfers,
        compactor: Compactor,
        counters: TierCounters,
        policy: EvictionPolicy,
        copies: DeviceCopies | None,
        disk_room: DiskRoom | None,
        *,
        evict: Callable[[Block], bool],
        poison: bool,
    ) -> None:
        self.placement: Placement | None = None
        self.budget_for: BudgetFor | None = None
        self._arena = arena
        self._resident = resident
        self._static = static
        self._limbo: Limbo[int] = Limbo()
        self._transfers = transfers
        self._compactor = compactor
        self._counters = counters
        self._policy = policy
        self._copies = copies
        self._disk_room = disk_room
        self._disk_full: BudgetError | None = None
        self._evict = evict
        self._poison = poison
        self._survivors: Set[int] = frozenset()

    def find(self, block: Block) -> int:
        """An arena offset for ``block``.

        Raises:
            BudgetError: what must stay leaves no room, or there is no room on NVMe for what must leave.
            IoFailure: no block that may go could be written.
        """
        nbytes = block.room_bytes
        high = block.kind is BlockKind.STATE
        compact, collected, self._disk_full = self._compactor.compact, False, None
        while True:
            offset = self._arena.allocate(nbytes, high=high)
            if offset is not None:
                return offset
            if self._empty_limbo():
                continue
            if compact(nbytes, SLIDE_WORTH * nbytes) or self._evict_farthest(block) or compact(nbytes):
                continue
            if self._transfers.in_flight():
                self._transfers.settle_all(self._transfers.in_flight())
                continue
            if self._copies is not None and self._copies.end_some_copies():
                continue
            offset = self._arena.lend(nbytes)
            if offset is not None:
                self._counters.lent += 1
                return offset
            if not collected and not self._referred_to() <= self._survivors:
                collected = self._collect()
                continue
            if self._let_one_go(block):
                continue
            if not collected:
                collected = self._collect()
                continue
            full, self._disk_full = self._disk_full, None  # not kept: its traceback keeps the program's tensors
            if full is not None:
                raise full
            placement = self.placement
            raise no_room(
                block,
                self._arena,
                self._resident.values(),
                self._static,
                self._limbo.held(),
                self._policy.wanted_together(),
                budget_for=self.budget_for,
                has_nvme=self._disk_room is not None,
                table="" if placement is None else f"\n{placement.table()}",
            )

    def reserve(self, name: str, nbytes: int) -> int:
        """Take a range of the arena for good, which is no block's. Called under the memory's lock. Raises as
        :meth:`find`."""
        return self.find(Block(0, name, BlockKind.STATE, round_up(nbytes), {state: {} for state in BlockState}))

    def give_back(self, offset: int, aliases: list[Alias] | None = None) -> None:
        """Take back a block's range. ``aliases``: what the program still has of it; it is used again when these are
        gone."""
        if aliases:
            self._limbo.put(offset, aliases)
            return
        if self._poison:
            for start, nbytes in self._arena.memory_of(offset):
                ctypes.memset(self._arena.address + start, 0xFF, nbytes)
        self._arena.free(offset)

    def _empty_limbo(self) -> bool:
        """Take back memory of discarded blocks whose last alias has gone; True when some came back."""
        free = self._limbo.take_free()
        for offset in free:
            self.give_back(offset)
        return bool(free)

    def _referred_to(self) -> set[int]:
        """Offsets of the memory that stays only because the program refers to it."""
        viewed = ((block, host_view_owner(block)) for block in self._resident.values() if not block.leases)
        held = (block for block, owner in viewed if owner is not None and not owner.can_release())
        return {*self._limbo.held(), *(b.offset for b in held if b.offset is not None)}

    def _collect(self) -> bool:
        """Collect garbage: aliases in reference cycles, or in the traceback of a caught exception, hold memory until
        then. That takes as long as the program's heap is large, so what has been through it is no reason for another
        one, except before an error."""
        gc.collect()
        self._survivors = self._referred_to()
        return True

    def _evict_farthest(self, wanted: Block) -> bool:
        resident = self._resident.values()
        candidates = {b.id: b for b in resident if b.leases == 0 and b.id not in self._static and b is not wanted}

        def is_clean(block_id: int) -> bool:
            return candidates[block_id].state is BlockState.CLEAN

        failure: IoFailure | None = None
        for candidate in leaving_order(candidates, self._policy.next_use, is_clean=is_clean):
            try:
                if self._evict(candidates[candidate]):
                    return True
            except IoFailure as error:  # it could not be written and stays; another may be clean
                failure = failure or error
            except BudgetError as error:  # it stays; another may have its place on NVMe already, or be smaller
                self._disk_full = error
        if failure is not None:
            raise failure
        return False

    def _let_one_go(self, wanted: Block) -> bool:
        """The plan is no longer right (parameters were unfrozen, for example): a block that was to stay may leave
        now."""
        room = self._disk_room
        if room is None:
            return False
        static = [b for b in self._resident.values() if b.id in self._static and b is not wanted and not b.leases]
        going = [b for b in static if (owner := host_view_owner(b)) is None or owner.can_release()]
        going = [b for b in going if room.may_take(b)]
        if not going:
            return False
        block = max(going, key=lambda b: (b.kind is BlockKind.STATE, rank(b.id, self._policy.next_use)))
        self._policy.before_leaving(block)
        self._static.discard(block.id)
        return True
