"""Moves blocks between the arena (host memory) and the swap space (NVMe), within the byte budget.

The arena is the budget: a block is resident only while it has a range there, so the budget cannot be exceeded. A block
that somebody leases, or whose memory somebody still refers to, stays. Everything else is evicted when room is needed,
farthest next use first (Belady's choice, on the order that the caller's ``next_use`` knows).

No thread of its own: transfers run in the I/O engine's native threads, and whoever calls in here also collects what has
completed. One re-entrant lock guards all of it; completions never need that lock, so waiting under it cannot deadlock.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deepoffload.errors import BudgetError, ClosedError, IoFailure
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.arena import Arena, round_up
from deepoffload.memory.block import Alias, Block, BlockOwner, BlockState
from deepoffload.memory.compaction import cheapest_run
from deepoffload.memory.lock import SHIELD, BooksLock
from deepoffload.schedule.placement import Kind
from deepoffload.timeline import Lane, Timeline

TRANSFER_LIMIT_S = 300.0
"""How long one transfer may take before the wait for it is given up with an error that names it."""


@dataclass
class TierCounters:
    """Running totals of one tier manager.

    faults: reads that were waited for at a use that no plan had foreseen. waits: foreseen uses whose read was not
    done in time. wait_s: seconds spent waiting for transfers of any kind.
    """

    faults: int = 0
    waits: int = 0
    wait_s: float = 0.0
    prefetches: int = 0
    evictions: int = 0
    compactions: int = 0


class TierManager:
    """Owner of arena, swap space and blocks.

    Args:
        arena: the memory; its capacity is the budget.
        space: where evicted blocks go; None when there is no NVMe path, then nothing dirty can be evicted.
        poison: fill every range that is taken back with 0xFF (NaN), so that a stale alias shows.
        timeline: where transfers and waits are recorded, if anywhere.
    """

    def __init__(
        self, arena: Arena, space: SwapSpace | None, *, poison: bool = False, timeline: Timeline | None = None
    ) -> None:
        self.arena = arena
        self.space = space
        self.poison = poison
        self.timeline = timeline
        self.lock = BooksLock()
        self.counters = TierCounters()
        self.next_use: Callable[[int], float] = lambda block_id: math.inf
        self.foreseen: frozenset[int] = frozenset()
        self.explain: Callable[[], str] = lambda: ""
        self._blocks: dict[int, Block] = {}
        self._resident: dict[int, Block] = {}
        self._in_flight: dict[int, Block] = {}
        self._threads: set[int] = set()
        self._limbo: list[tuple[int, list[Alias]]] = []
        self._ids = 0

    # -- blocks ----------------------------------------------------------------------------------------------------

    def create(self, name: str, kind: Kind, nbytes: int, owner: BlockOwner | None = None) -> Block:
        """A new block without bytes; it takes memory when it is first acquired."""
        with self.lock:
            self._ids += 1
            block = Block(self._ids, name, kind, nbytes, owner)
            self._blocks[block.id] = block
            return block

    def blocks(self) -> Iterable[Block]:
        return self._blocks.values()

    def resident(self) -> Iterable[Block]:
        """Blocks that have a range in the arena."""
        return self._resident.values()

    def block(self, block_id: int) -> Block:
        return self._blocks[block_id]

    def remove(self, block: Block) -> None:
        """Forget a block and give back its memory and its extent; its bytes are lost."""
        with self.lock:
            self.discard(block)
            if block.extent is not None and self.space is not None:
                self.space.free(block.extent)
                block.extent = None
            self._blocks.pop(block.id, None)

    def room_bytes(self, block_id: int) -> int:
        """What a block takes in the arena; 0 for one that was removed (an old trace may still name it)."""
        block = self._blocks.get(block_id)
        return 0 if block is None else round_up(block.room_bytes)

    def is_away(self, block_id: int) -> bool:
        """True for a block that exists and whose bytes are on NVMe only."""
        block = self._blocks.get(block_id)
        return block is not None and block.state is BlockState.ON_NVME

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
            block.leases += 1
            self._threads.add(threading.get_ident())
            try:
                if not block.resident:
                    self._bring(block, load)
            except BaseException:
                block.leases -= 1
                raise

    def release(self, block: Block) -> None:
        with self.lock:
            if block.leases <= 0:
                raise RuntimeError(f"block {block.name} released more often than acquired")
            block.leases -= 1

    def will_change(self, block: Block) -> None:
        """Call before the bytes of a resident block change: a write in flight ends first, then memory alone is
        right."""
        with self.lock:
            if block.state is BlockState.WRITING:
                self._settle(block)
            if block.state is BlockState.CLEAN:
                block.to(BlockState.DIRTY)

    def _bring(self, block: Block, load: bool) -> None:
        if block.state is BlockState.READING:
            self.counters.waits += 1
            self._settle(block)
            return
        fresh = block.state is BlockState.EMPTY
        if not fresh and load:
            if block.id in self.foreseen:
                self.counters.waits += 1
            else:
                self.counters.faults += 1
        block.offset = self._make_room(block)
        self._resident[block.id] = block
        if fresh or not load:
            if fresh and load:
                ctypes.memset(self.address(block), 0, block.nbytes)
            block.to(BlockState.DIRTY)
            return
        self._start_read(block, urgent=True)
        self._settle(block)

    # -- eviction --------------------------------------------------------------------------------------------------

    def evict(self, block: Block) -> bool:
        """Take a block's memory away, writing it back first when it is dirty; False when it must stay."""
        with self.lock:
            if not self._may_go(block):
                return False
            self._note_changes(block)
            if block.state is BlockState.DIRTY:
                if self.space is None:
                    return False
                self._start_write(block)
            if block.state in (BlockState.WRITING, BlockState.READING):
                self._settle(block)
            if block.owner is not None:
                block.owner.release()
            block.to(BlockState.ON_NVME)
            self._free_memory(block)
            self.counters.evictions += 1
            return True

    def discard(self, block: Block) -> None:
        """Forget a block's bytes on every tier; its extent stays reserved for it."""
        with self.lock:
            if block.state in (BlockState.WRITING, BlockState.READING):
                with contextlib.suppress(IoFailure):  # of bytes that nobody wants any more
                    self._settle(block, interruptible=False)
            if block.state is BlockState.EMPTY:
                return
            if block.offset is not None:
                aliases = block.owner.aliases() if block.owner is not None else []
                if block.owner is not None:
                    block.owner.release()
                self._free_memory(block, aliases)
            block.to(BlockState.EMPTY)

    def evictable(self, block: Block) -> bool:
        """True when a prefetch may take this block's memory without waiting for anything."""
        if block.state is not BlockState.CLEAN or not self._may_go(block):
            return False
        self._note_changes(block)
        return block.state is BlockState.CLEAN

    def _note_changes(self, block: Block) -> None:
        if block.owner is not None and block.offset is not None and block.owner.changed():
            self.will_change(block)

    def evict_all(self) -> None:
        """Evict whatever may be evicted (used at the end of construction and by the tests' strictest mode)."""
        with self.lock:
            for block in list(self._resident.values()):
                self.evict(block)

    def _may_go(self, block: Block) -> bool:
        if block.offset is None or block.leases or block.static:
            return False
        return block.owner is None or block.owner.can_release()

    def _make_room(self, block: Block) -> int:
        """An arena offset for ``block``; evicts, waits and moves others for it as far as that goes."""
        nbytes = round_up(block.room_bytes)
        high = block.kind is Kind.STATE
        collected = False
        while True:
            offset = self.arena.allocate(nbytes, high=high)
            if offset is not None:
                return offset
            if self._limbo and self._empty_limbo():
                continue
            if self._compact(nbytes) or self._evict_farthest(block):
                continue
            if self._in_flight:
                self.drain()
                continue
            if not collected:
                # Aliases in reference cycles, or in the traceback of a caught exception, hold memory until collected.
                collected = True
                gc.collect()
                continue
            raise BudgetError(self._no_room(block))

    def _evict_farthest(self, wanted: Block) -> bool:
        candidates = [b for b in self._resident.values() if b.leases == 0 and not b.static and b is not wanted]
        candidates.sort(key=lambda b: (self.next_use(b.id), b.state is BlockState.CLEAN, b.id), reverse=True)
        failure: IoFailure | None = None
        for candidate in candidates:
            try:
                if self.evict(candidate):
                    return True
            except IoFailure as error:  # it could not be written and stays; another may be clean
                failure = failure or error
        if failure is not None:
            raise failure
        return False

    def _no_room(self, block: Block) -> str:
        what = f"{block.name} ({block.kind.name.lower()}, {block.nbytes:,} bytes)"
        if round_up(block.room_bytes) > self.arena.capacity_bytes:
            return (
                f"{what} alone is larger than the budget of {self.arena.capacity_bytes:,} bytes. A step needs the "
                "largest weight, its gradient and pieces of its optimizer state at once: raise host_budget to "
                f"{3 * block.nbytes:,} bytes or more.{self.explain()}"
            )
        if self.space is None:
            return (
                f"no room for {what}: the budget is {self.arena.capacity_bytes:,} bytes and nothing can leave memory "
                f"without NVMe; set nvme_path, or raise host_budget.{self.explain()}"
            )
        held = [b for b in self._resident.values() if b.leases or not self._may_go(b)]
        held.sort(key=lambda b: -b.nbytes)
        lines = "\n".join(
            f"  {b.name} ({b.kind.name.lower()}): {b.nbytes:,} bytes, "
            + ("in use" if b.leases else "static" if b.static else "still referred to by the program")
            for b in held[:8]
        )
        held_bytes = sum(b.nbytes for b in held)
        return (
            f"no room for {what}: {self.arena.capacity_bytes:,} bytes are budgeted and {held_bytes:,} must stay:\n"
            f"{lines}\n"
            "One call may need many weights at once (foreach optimizers, torch.save, a held state_dict()): use "
            "deepoffload.CPUAdamW or foreach=False, save with deepoffload.save_pretrained, drop references to weights, "
            f"or raise host_budget.{self.explain()}"
        )

    def _free_memory(self, block: Block, aliases: list[Alias] | None = None) -> None:
        offset = block.offset
        if offset is None:
            raise RuntimeError(f"block {block.name} has no memory to give back")
        block.offset = None
        del self._resident[block.id]
        if aliases:
            self._limbo.append((offset, aliases))  # the program still looks at it: reused when nobody does
        else:
            self._free_range(offset)

    def _free_range(self, offset: int) -> None:
        if self.poison:
            ctypes.memset(self.arena.address + offset, 0xFF, self.arena.size_of(offset))
        self.arena.free(offset)

    def _empty_limbo(self) -> bool:
        """Take back memory of discarded blocks whose last alias has gone; True when some came back."""
        gone = [entry for entry in self._limbo if not any(alias() for alias in entry[1])]
        for entry in gone:
            self._limbo.remove(entry)
            self._free_range(entry[0])
        return bool(gone)

    def _compact(self, nbytes: int) -> bool:
        """Merge holes into one of ``nbytes`` by sliding the fewest bytes between them; False when that cannot be
        done."""
        if self.arena.free_bytes < nbytes:
            return False
        run = cheapest_run(self.arena.layout(), {b.offset: b for b in self._resident.values()}, nbytes, self._may_move)
        if run is None:
            return False
        self.counters.compactions += 1
        for block in run:
            self._slide(block)
        return True

    def _may_move(self, block: Block) -> bool:
        """A block can move while nobody refers to its memory: between two operations of one thread a lease is no
        obstacle,
        since whoever leases takes addresses only when all its blocks are there."""
        if block.state not in (BlockState.CLEAN, BlockState.DIRTY) or (block.leases and len(self._threads) > 1):
            return False
        return block.owner is None or block.owner.can_release()

    def _slide(self, block: Block) -> None:
        self._note_changes(block)
        old = block.offset
        new = self.arena.slide_down(old) if old is not None else None
        if old is None or new is None:
            raise RuntimeError(f"block {block.name} has nothing below it to slide into")
        ctypes.memmove(self.arena.address + new, self.arena.address + old, block.nbytes)
        block.offset = new
        if block.owner is not None:
            block.owner.relocate(new)
        if self.poison:
            size = self.arena.size_of(new)
            start = max(old, new + size)
            ctypes.memset(self.arena.address + start, 0xFF, old + size - start)

    # -- transfers -------------------------------------------------------------------------------------------------

    def is_empty(self, block_id: int) -> bool:
        """True for a block that exists and has no bytes anywhere yet."""
        block = self._blocks.get(block_id)
        return block is not None and block.state is BlockState.EMPTY

    def prefetch(self, block: Block, *, compact: bool = False) -> bool:
        """Start reading a block if there is room right now; a prefetch never waits and never evicts.

        Args:
            compact: slide other blocks together when there is room only in pieces.
        """
        with self.lock:
            if block.state is not BlockState.ON_NVME:
                return False
            high = block.kind is Kind.STATE
            offset = self.arena.allocate(block.room_bytes, high=high)
            if offset is None and compact and self._compact(round_up(block.room_bytes)):
                offset = self.arena.allocate(block.room_bytes, high=high)
            if offset is None:
                return False
            block.offset = offset
            self._resident[block.id] = block
            self._start_read(block, urgent=False)
            self.counters.prefetches += 1
            return True

    def write_behind(self, block: Block) -> bool:
        """Start writing a dirty block that nobody uses, so that its memory can be taken later without waiting."""
        with self.lock:
            if block.state is not BlockState.DIRTY or self.space is None or not self._may_go(block):
                return False
            self._start_write(block)
            return True

    def poll(self) -> None:
        """Collect what has completed. Raises the first :class:`IoFailure` of them when all are collected (a block whose
        write failed is dirty again)."""
        with self.lock:
            self._settle_all([b for b in self._in_flight.values() if b.ticket is not None and b.ticket.done()])

    def drain(self) -> None:
        """Wait for everything in flight. Raises as :meth:`poll` does."""
        with self.lock:
            self._settle_all(list(self._in_flight.values()))

    def _settle_all(self, blocks: list[Block]) -> None:
        failure: IoFailure | None = None
        for block in blocks:
            try:
                self._settle(block)
            except IoFailure as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def in_flight_bytes(self, state: BlockState) -> int:
        return sum(b.nbytes for b in self._in_flight.values() if b.state is state)

    def _start_read(self, block: Block, *, urgent: bool) -> None:
        if self.space is None or block.extent is None:
            raise RuntimeError(f"block {block.name} is on NVMe without an extent")
        block.to(BlockState.READING)
        try:
            block.ticket = self.space.read(block.extent, self.address(block), urgent=urgent)
        except BaseException:
            block.to(BlockState.ON_NVME)
            self._free_memory(block)
            raise
        self._in_flight[block.id] = block

    def _start_write(self, block: Block) -> None:
        if self.space is None:
            raise RuntimeError("there is no swap space")
        if block.extent is None:
            block.extent = self.space.allocate(block.nbytes)
        block.to(BlockState.WRITING)
        try:
            block.ticket = self.space.write(block.extent, self.address(block))
        except BaseException:
            block.to(BlockState.DIRTY)
            raise
        self._in_flight[block.id] = block

    def _settle(self, block: Block, *, interruptible: bool = True) -> None:
        """Wait for a block's transfer and take its result. On failure nothing is lost: the right copy stays right.

        Ctrl-C may end an ``interruptible`` wait; the transfer then is still in flight, as the books say.
        """
        ticket = block.ticket
        if ticket is None:
            raise RuntimeError(f"block {block.name} has no transfer in flight")
        reading = block.state is BlockState.READING
        if not ticket.done():
            started = time.perf_counter()
            try:
                if interruptible:
                    SHIELD.outside(ticket.wait, TRANSFER_LIMIT_S)
                else:
                    ticket.wait(TRANSFER_LIMIT_S)
            except IoFailure:
                pass  # taken below, after the books are right
            ended = time.perf_counter()
            self.counters.wait_s += ended - started
            if self.timeline is not None:
                what = f"{'read' if reading else 'write'} {block.kind.name.lower()}: {block.name}"
                self.timeline.add(Lane.WAIT, what, started, ended)
        del self._in_flight[block.id]
        block.ticket = None
        try:
            ticket.wait(0.0)
            if self.timeline is not None:
                lane = Lane.READ if reading else Lane.WRITE
                self.timeline.add(lane, block.name, ticket.started_s, ticket.finished_s, block.nbytes)
        except IoFailure as failure:
            if reading:
                block.to(BlockState.ON_NVME)
                self._free_memory(block)
            else:
                block.to(BlockState.DIRTY)
            raise IoFailure.about(block.name, failure) from failure
        block.to(BlockState.CLEAN)

    # -- report and end --------------------------------------------------------------------------------------------

    def resident_bytes(self, kind: Kind) -> int:
        return sum(b.nbytes for b in self._resident.values() if b.kind is kind)

    def close(self) -> None:
        """Wait for what is in flight, then drop blocks and arena. The swap space is closed by its owner. Idempotent."""
        with self.lock:
            for block in list(self._in_flight.values()):
                with contextlib.suppress(IoFailure):  # the bytes are being dropped anyway
                    self._settle(block, interruptible=False)
            for block in list(self._resident.values()):
                if block.owner is not None:
                    block.owner.release()
                block.offset = None
            for block in self._blocks.values():
                block.state = BlockState.EMPTY  # from whatever it was: nobody holds any bytes now
            self._resident.clear()
            self._blocks.clear()
            self.arena.close()
