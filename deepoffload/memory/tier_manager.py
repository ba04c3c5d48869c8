"""Moves blocks between the arena (host memory) and the swap space (NVMe), within the byte budget.

The arena is the budget: a block is resident only while it has a range there, so the budget cannot be exceeded. A block
that somebody leases, or whose memory somebody still refers to, stays. Everything else is evicted when room is needed,
farthest next use first (Belady's choice, on the order that the caller's ``policy`` knows; see ``memory.eviction``).

No Python thread: transfers run in the I/O engine's native threads, and each call in here also collects what has
completed. One re-entrant lock guards all of it; completions never need that lock, so waiting under it cannot deadlock.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Container, Iterable

from deepoffload.errors import ClosedError, UnsupportedError
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.arena import Arena, common_size
from deepoffload.memory.block import Alias, Block, BlockOwner, Census, DeviceCopies, host_view_owner
from deepoffload.memory.compaction import Compactor
from deepoffload.memory.disk_room import DiskRoom
from deepoffload.memory.eviction import SLIDE_WORTH, EvictionPolicy, RoomMaker, UnknownOrder
from deepoffload.memory.form import Form
from deepoffload.memory.guards import Guards
from deepoffload.memory.lock import BooksLock
from deepoffload.memory.no_room import BudgetFor
from deepoffload.memory.transfers import TierCounters, Transfers
from deepoffload.native.aio import PAGE_BYTES, round_up
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.placement import BlockKind, Placement
from deepoffload.timeline import Timeline


class TierManager:
    """Owner of arena, swap space and blocks.

    It has more methods than other classes, because nothing else may change a block's state or memory: each method is
    one such change or one question. What that takes lies in ``eviction``, ``transfers`` and ``compaction``.

    Args:
        arena: the memory; its capacity is the budget.
        space: where evicted blocks go; None when there is no NVMe path, then nothing dirty can be evicted.
        policy: the order in which the program uses blocks.
        copies: what a device holds of the blocks; None where the CPU computes.
        poison: fill every range that is taken back with 0xFF (NaN), so that a stale alias shows.
        timeline: where transfers and waits are recorded, if anywhere.

    Attributes:
        static: ids of the blocks that placement keeps in memory for good: never evicted, so never written.
        copies, room: as given; what finds room in the arena, also for what is no block.
        is_away: whether a block, by id, exists and has its bytes on NVMe only.
        is_empty: whether a block, by id, exists and has no bytes anywhere yet.
    """

    def __init__(
        self,
        arena: Arena,
        space: SwapSpace | None,
        policy: EvictionPolicy | None = None,
        *,
        copies: DeviceCopies | None = None,
        poison: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        self.arena = arena
        self.space = space
        self.poison = poison
        self.timeline = timeline
        self.lock = BooksLock()
        self.counters = TierCounters()
        self.policy: EvictionPolicy = UnknownOrder() if policy is None else policy
        self._blocks: dict[int, Block] = {}
        self._census: Census = {state: {} for state in BlockState}
        self.is_away = self._census[BlockState.ON_NVME].__contains__
        self.is_empty = self._census[BlockState.EMPTY].__contains__
        self._resident: dict[int, Block] = {}
        self.static: set[int] = set()
        self.guards = Guards()
        disk_room = None if space is None else DiskRoom(space, self._blocks, self._census, self.static, self.guards)
        self.transfers = Transfers(space, self.counters, self._free_memory, self.discard, timeline, disk_room)
        self._compactor = Compactor(arena, self._resident, self.note_changes, self.counters, poison)
        self._ids = 0
        self.copies = copies
        self.room = RoomMaker(
            arena,
            self._resident,
            self.static,
            self.transfers,
            self._compactor,
            self.counters,
            self.policy,
            self.copies,
            disk_room,
            evict=self.evict,
            poison=poison,
        )

    # -- blocks ----------------------------------------------------------------------------------------------------

    def create(
        self,
        name: str,
        kind: BlockKind,
        nbytes: int,
        owner: BlockOwner | None = None,
        forms: tuple[Form, ...] = (),
        shown_nbytes: int | None = None,
    ) -> Block:
        """A new block without bytes; it takes memory when it is first acquired.

        Args:
            nbytes: that are stored.
            forms: of its tensors, where what is shown of them is something else.
            shown_nbytes: that are shown of it, where that is more than the forms reach to.

        Raises:
            UnsupportedError: tensors show the arena itself, so all is shown as it is stored.
        """
        if forms and self.copies is None:
            raise UnsupportedError(
                f"{name} is stored as {forms[0].encoding}, and tensors show the stored bytes themselves here: such a "
                "block needs a device with copies (device, or debug.copies for the CPU)"
            )
        with self.lock:
            self._ids += 1
            block = Block(self._ids, name, kind, nbytes, self._census, owner, forms, shown_nbytes)
            block.room_bytes = round_up(nbytes)
            self._blocks[block.id] = block
            return block

    def blocks(self) -> Iterable[Block]:
        return self._blocks.values()

    def all_stay(self) -> bool:
        """True when every block is static: nothing will ever be moved."""
        return len(self.static) == len(self._blocks)

    def resident(self) -> Iterable[Block]:
        """Blocks that have a range in the arena."""
        return self._resident.values()

    def unowned_bytes(self) -> int:
        """Of the arena, what belongs to no block: the way of gradients from a device, memory the program looks at."""
        return self.arena.used_bytes - sum(block.room_bytes for block in self._resident.values())

    def common_room_bytes(self, staying: Container[int]) -> int:
        """The room that more than half of the bytes come in, of blocks other than those that are ``staying``; a page
        when there is no such."""
        return common_size(b.room_bytes for b in self._blocks.values() if b.id not in staying) or PAGE_BYTES

    def passing(self, state: BlockState) -> list[Block]:
        """Blocks in a state that do not stay in memory for good, those first that came into it first."""
        static = self.static
        return [block for block_id, block in self._census[state].items() if block_id not in static]

    def block(self, block_id: int) -> Block:
        return self._blocks[block_id]

    def remove(self, block: Block) -> None:
        """Forget a block and give back its memory and its extent; its bytes are lost."""
        with self.lock:
            self.discard(block)
            if block.extent is not None and self.space is not None:
                self.space.free(block.extent)
                block.extent = None
            if self._blocks.pop(block.id, None) is not None:
                del self._census[block.state][block.id]
            self.static.discard(block.id)

    def shrink(self, block: Block, nbytes: int) -> None:
        """Give back the end of a resident block of which only the first ``nbytes`` are still wanted, before it is
        removed. Its tensors show their stand-ins from now on; nothing happens where the program refers to the bytes."""
        with self.lock:
            owner = host_view_owner(block)
            if block.offset is None or (owner is not None and not owner.can_release()):
                return
            self.will_change(block)
            if owner is not None:
                owner.release()
            if self.poison:
                start, end = block.offset + nbytes, block.offset + self.arena.size_of(block.offset)
                ctypes.memset(self.arena.address + start, 0xFF, end - start)
            self.arena.shrink(block.offset, nbytes)
            block.nbytes = nbytes
            block.room_bytes = self.arena.size_of(block.offset)

    def keep(self, block: Block) -> None:
        """From now on the block stays in memory once it is there, and needs no extent."""
        with self.lock:
            self.static.add(block.id)
            if block.extent is None or self.space is None or not block.resident:
                return
            self.will_change(block)  # memory alone is right from now on
            self.space.free(block.extent)
            block.extent = None

    def placed(self, placement: Placement, budget_for: BudgetFor | None = None) -> None:
        """The models have their placement: errors show it from now on, and name budgets that ``budget_for`` finds."""
        self.room.placement = placement
        self.room.budget_for = budget_for

    def room_bytes(self, block_id: int) -> int:
        """What a block takes in the arena; 0 for one that was removed (an old trace may still name it)."""
        block = self._blocks.get(block_id)
        return 0 if block is None else block.room_bytes

    def address(self, block: Block) -> int:
        """Memory address of a resident block."""
        if block.offset is None:
            raise RuntimeError(f"block {block.name} has no memory")
        return self.arena.address + block.offset

    # -- leases ----------------------------------------------------------------------------------------------------

    def acquire(self, block: Block, *, load: bool = True) -> None:
        """Make a block resident and keep it until :meth:`release`.

        Args:
            load: False when the caller overwrites all of it: nothing is read, and an empty block is not zeroed.

        Raises:
            ClosedError: the block was removed: its parameters are gone, or its engine is closed.
            BudgetError: leased and referenced blocks leave no room.
            IoFailure: the read failed; the block stays on NVMe and nothing is lost.
        """
        with self.lock:
            if block.id not in self._blocks:
                raise ClosedError(f"{block.name} ({block.kind.name.lower()}) is gone: its memory was given back")
            if self.copies is not None:
                self.copies.bring_home(block)
            thread = threading.get_ident()
            block.leased_by = thread if block.leases == 0 or block.leased_by == thread else 0
            block.leases += 1
            try:
                if not load and self.guards:
                    self.guards.before_change(block)
                if not block.resident:
                    self._bring(block, load)
                    if block.id in self.static and block.extent is not None:
                        self.keep(block)  # evicted while the model was built
            except BaseException:
                block.leases -= 1
                raise

    def release(self, block: Block) -> None:
        with self.lock:
            if block.leases <= 0:
                raise RuntimeError(f"block {block.name} released more often than acquired")
            block.leases -= 1

    def will_change(self, block: Block, *, by_device: bool = False) -> None:
        """Call before the bytes of a resident block change. Waits for a write-back in flight, then marks the block
        DIRTY. ``by_device``: the change is a copy from the device, which stays valid."""
        with self.lock:
            if block.copying and self.copies is not None:
                self.copies.end_copies(block)
            if self.copies is not None and not by_device:
                self.copies.outdated(block)
            try:
                if block.state is BlockState.WRITING:
                    self.transfers.settle_before_change(block)
            finally:
                if self.guards and not (by_device and self.copies is not None and self.copies.keeps(block)):
                    self.guards.before_change(block)
            if block.state is BlockState.CLEAN:
                block.to(BlockState.DIRTY)

    def _bring(self, block: Block, load: bool) -> None:
        if block.state is BlockState.READING:
            self.counters.waits += 1
            self.transfers.settle(block)
            return
        fresh = block.state is BlockState.EMPTY
        if not fresh and load:
            if block.id in self.policy.predicted:
                self.counters.waits += 1
            else:
                self.counters.faults += 1
        block.offset = self.room.find(block)
        self._resident[block.id] = block
        if fresh or not load:
            if fresh and load:
                ctypes.memset(self.address(block), 0, block.nbytes)
            block.to(BlockState.DIRTY)
            return
        self.transfers.start_read(block, self.address(block), urgent=True)
        self.transfers.settle(block)

    # -- eviction --------------------------------------------------------------------------------------------------

    def evict(self, block: Block) -> bool:
        """Take a block's memory away, writing it back first when it is dirty; False when it must stay."""
        with self.lock:
            if not self._may_go(block):
                return False
            self.note_changes(block)
            if block.state in (BlockState.WRITING, BlockState.READING):
                self.transfers.settle(block)
                if block.offset is None:
                    return True  # nobody wanted its bytes any more
            if block.state is BlockState.DIRTY:
                if self.space is None:
                    return False
                self.transfers.start_write(block, self.address(block))
                self.transfers.settle(block)
            owner = host_view_owner(block)
            if owner is not None:
                owner.release()
            block.to(BlockState.ON_NVME)
            self._free_memory(block)
            self.counters.evictions += 1
            return True

    def discard(self, block: Block) -> None:
        """Forget a block's bytes on every tier; its extent stays reserved for it."""
        with self.lock:
            if self.guards:
                self.guards.before_loss(block)
            if self.copies is not None:
                self.copies.forget(block)
            if block.state in (BlockState.WRITING, BlockState.READING):
                self.transfers.give_up(block)
            if block.state is BlockState.EMPTY:
                return
            if block.offset is not None:
                owner = host_view_owner(block)
                aliases = owner.aliases() if owner is not None else []
                if owner is not None:
                    owner.release()
                self._free_memory(block, aliases)
            block.to(BlockState.EMPTY)

    def shed(self, block: Block) -> None:
        """Forget the host's bytes of a block that nobody leases here: the device's copy is right."""
        with self.lock:
            if block.state in (BlockState.WRITING, BlockState.READING):
                self.transfers.settle(block)
            if block.leases == 0 and block.state is not BlockState.EMPTY:
                if block.offset is not None:
                    self._free_memory(block)
                block.to(BlockState.EMPTY)

    def evictable(self, block: Block) -> bool:
        """True when a prefetch may take this block's memory without waiting for anything."""
        if block.state is not BlockState.CLEAN or not self._may_go(block):
            return False
        self.note_changes(block)
        return block.state is BlockState.CLEAN

    def note_changes(self, block: Block) -> None:
        owner = host_view_owner(block)
        if owner is not None and block.offset is not None and owner.changed():
            self.will_change(block)

    def evict_all(self) -> None:
        """Evict every block that may leave (used at the end of construction and by the tests' strictest mode)."""
        with self.lock:
            for block in list(self._resident.values()):
                self.evict(block)

    def _may_go(self, block: Block) -> bool:
        if block.offset is None or block.leases or block.id in self.static:
            return False
        owner = host_view_owner(block)
        return owner is None or owner.can_release()

    def _free_memory(self, block: Block, aliases: list[Alias] | None = None) -> None:
        offset = block.offset
        if offset is None:
            raise RuntimeError(f"block {block.name} has no memory to give back")
        block.offset = None
        del self._resident[block.id]
        self.room.give_back(offset, aliases)

    # -- transfers -------------------------------------------------------------------------------------------------

    def has_bytes(self, block: Block) -> bool:
        """True for a block that has bytes on any tier, a device's memory included."""
        return block.state is not BlockState.EMPTY or (self.copies is not None and self.copies.shows(block))

    def prefetch(self, block: Block, *, compact: bool = False) -> bool:
        """Start reading a block if there is room right now; a prefetch never waits and never evicts.

        Args:
            compact: slide other blocks together when there is room only in pieces.
        """
        with self.lock:
            if block.state is not BlockState.ON_NVME:
                return False
            high, nbytes = block.kind is BlockKind.STATE, block.room_bytes
            offset = self.arena.allocate(nbytes, high=high)
            if offset is None and compact and self._compactor.compact(nbytes, SLIDE_WORTH * nbytes):
                offset = self.arena.allocate(nbytes, high=high)
            if offset is None:
                return False
            block.offset = offset
            self._resident[block.id] = block
            self.transfers.start_read(block, self.address(block), urgent=False)
            self.counters.prefetches += 1
            return True

    def write_behind(self, block: Block) -> bool:
        """Start writing a dirty block that nobody uses, for its memory to be taken later without waiting; or refuse."""
        with self.lock:
            if block.state is not BlockState.DIRTY or self.space is None or not self._may_go(block):
                return False
            self.note_changes(block)  # later ones are told from the bytes that are written now
            return self.transfers.write_if_room(block, self.address(block))

    def poll(self) -> None:
        """Collect what has completed. Raises the first :class:`IoFailure` of them when all are collected (a block whose
        write failed is dirty again)."""
        with self.lock:
            self.transfers.settle_all(self.transfers.done())

    def merge_holes(self, granule_bytes: int) -> None:
        """Slide blocks together once where splinters between them add up to ``granule_bytes``, if that is cheap."""
        with self.lock:
            if self.arena.free_bytes - self.arena.whole_bytes(granule_bytes) >= granule_bytes:
                self._compactor.compact(granule_bytes, SLIDE_WORTH * granule_bytes)

    def in_flight_bytes(self, state: BlockState) -> int:
        """Bytes of the blocks that are being read, or written."""
        return sum(block.nbytes for block in self._census[state].values())

    # -- report and end --------------------------------------------------------------------------------------------

    def resident_bytes(self, kind: BlockKind) -> int:
        return sum(b.nbytes for b in self._resident.values() if b.kind is kind)

    def close(self) -> None:
        """Wait for what is in flight, then drop blocks and arena. The swap space is closed by its owner. Idempotent."""
        with self.lock:
            for block in self.transfers.in_flight():
                self.transfers.give_up(block)
            for block in list(self._resident.values()):
                owner = host_view_owner(block)
                if owner is not None:
                    owner.release()
                block.offset = None
            for block in self._blocks.values():
                block.state = BlockState.EMPTY  # from every state: nobody holds any bytes now
            self._resident.clear()
            self._blocks.clear()
            for blocks in self._census.values():
                blocks.clear()
            self.static.clear()
            self.arena.close()
