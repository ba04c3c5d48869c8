"""The device tier: copies of blocks in the memory of a device, within its budget.

A copy is either like the host's bytes or, after the program wrote to it, the only right one (``dirty``); it goes back
to the host before it leaves, and before the host's bytes are used (:meth:`DeviceMemory.settle`). The streams that use a
copy wait for its coming, and its range is used again when what was launched on them until it left is done: Python's
last reference says only when the *host* is done with a tensor.
"""

from __future__ import annotations

import gc
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepoffload.copies.accelerator import Accelerator
from deepoffload.copies.fenced_arena import DeviceArena
from deepoffload.copies.in_flight import DeviceTransfers
from deepoffload.copies.pinning import PinnedArena
from deepoffload.errors import BudgetError
from deepoffload.memory.block import Alias, Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.schedule.placement import BlockKind
from deepoffload.schedule.planner import MoveKind, plan_prefetch
from deepoffload.timeline import Lane


@dataclass
class DeviceCounters:
    """Running totals. ``faults``: copies that were made when they were needed, which no prefetch had brought."""

    faults: int = 0
    prefetches: int = 0
    evictions: int = 0


@dataclass(eq=False)
class _Copy:
    """A block's bytes on the device.

    ``ready``: the event of its coming, until it is known to have happened. ``streams``: on which it has been used.
    ``over``: events that were recorded when its last use was over, None while it is used.
    """

    block: Block
    offset: int
    leases: int = 0
    dirty: bool = False
    ready: Any = None
    streams: dict[int, Any] = field(default_factory=dict)
    over: list[Any] | None = None


class DeviceMemory:
    """Shows blocks on a device (a :class:`~deepoffload.copies.shown.ShownMemory`). Guarded by the tier manager's lock.

    Args:
        capacity_bytes: the device budget.
        outside_user_modes: a context outside of the program's modes, in which bytes are moved.
        storage_at: makes a storage of an address, a device and a number of bytes, which it does not own.
        poison: fill what is taken back with 0xFF.
    """

    on_host = False

    def __init__(
        self,
        tiers: TierManager,
        accelerator: Accelerator,
        capacity_bytes: int,
        *,
        outside_user_modes: Callable[[], AbstractContextManager[None]],
        storage_at: Callable[[int, torch.device, int], Any],
        poison: bool = False,
    ) -> None:
        self.tiers = tiers
        self.accelerator = accelerator
        self.device = accelerator.device
        self.arena = DeviceArena(accelerator, capacity_bytes, outside_user_modes=outside_user_modes, poison=poison)
        self.transfers = DeviceTransfers(tiers)
        self.pinned = PinnedArena(accelerator, tiers.arena)
        self.counters = DeviceCounters()
        self._copies: dict[int, _Copy] = {}
        self._used: dict[int, _Copy] = {}
        self._arena_bytes: Tensor | None = None
        self._kept: set[int] = set()
        self._outside_user_modes = outside_user_modes
        self._storage_at = storage_at
        tiers.copies = self
        # An engine that goes without being closed: what is on its way reads and writes the memory that goes with it.
        weakref.finalize(self, accelerator.synchronize).atexit = False

    # -- what slots and doors ask ----------------------------------------------------------------------------------

    def acquire(self, block: Block, *, load: bool = True) -> None:
        """Have a copy on the device and keep it until :meth:`release`. The current stream waits for it; the host does
        not.

        Args:
            load: False when the caller overwrites all of it.

        Raises:
            BudgetError: copies in use leave no room. Else as :meth:`TierManager.acquire`.
        """
        with self.tiers.lock:
            copy = self._copies.get(block.id)
            if copy is None:
                copy = self._bring(block, load)
                self.counters.faults += load
            copy.leases += 1
            self._use(copy)

    def release(self, block: Block) -> None:
        with self.tiers.lock:
            copy = self._copies[block.id]
            if copy.leases <= 0:
                raise RuntimeError(f"the device's copy of {block.name} was released more often than acquired")
            copy.leases -= 1

    def will_change(self, block: Block) -> None:
        with self.tiers.lock:
            self._copies[block.id].dirty = True

    def all_stay(self) -> bool:
        """Never: each update of a weight happens on the host."""
        return False

    def flat(self, block: Block, offset_bytes: int, dtype: torch.dtype, numel: int) -> Tensor:
        copy = self._copies[block.id]
        memory = self.arena.bytes()
        # A storage of its own tells who else refers to these bytes. It keeps the whole memory alive.
        address = memory.data_ptr() + copy.offset + offset_bytes
        storage = self._storage_at(address, self.device, numel * dtype.itemsize)
        storage.memory = memory
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, (numel,), (1,))

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.device and self.arena.holds(tensor.untyped_storage().data_ptr())

    def checksum(self, block: Block, offset_bytes: int, nbytes: int) -> int:
        copy = self._copies[block.id]
        start, current = copy.offset + offset_bytes, self.accelerator.current()
        for event in self._events(copy):  # it may have been written on another stream
            current.wait_event(event)
        with self._outside_user_modes():
            return zlib.crc32(self.arena.bytes()[start : start + nbytes].cpu().numpy().data)

    def shows(self, block: Block) -> bool:
        """Whether there is a copy of the block."""
        return block.id in self._copies

    def settle(self, block: Block) -> None:
        """The host's bytes are right when this returns: waits for what the program computes into the copy."""
        with self.tiers.lock:
            copy = self._copies.get(block.id)
            if copy is not None and self._is_dirty(copy):
                self._copy_out(copy)
            if block.copying:
                self.transfers.end(block)

    def refresh(self, block: Block) -> None:
        with self.tiers.lock:
            copy = self._copies.get(block.id)
            if copy is None:
                return
            copy.dirty = False
            if not copy.leases and self._may_go(copy):
                self._drop(copy)
            else:  # somebody holds views of it, who may look at any time
                self._copy_in(copy, after=self._events(copy))
                self._use(copy)

    # -- what is kept ----------------------------------------------------------------------------------------------

    def keep(self, block: Block) -> None:
        """From now on a block of optimizer state lives on the device. What the host has of it goes there."""
        with self.tiers.lock:
            self._kept.add(block.id)
            if not self.tiers.is_empty(block.id):
                self.acquire(block)
                self.will_change(block)
                self.release(block)
                self.let_host_go(block)

    def keeps(self, block: Block) -> bool:
        return block.id in self._kept

    def keep_no_longer(self, block: Block) -> None:
        """The block lives on the host again."""
        with self.tiers.lock:
            self.bring_home(block)
            self._kept.discard(block.id)

    def let_host_go(self, block: Block) -> None:
        """Free the host's bytes of a block that is kept on the device, where its copy is right."""
        with self.tiers.lock:
            if block.copying:
                self.transfers.end(block)
            copy = self._copies.get(block.id)
            if copy is not None:
                copy.dirty = True
                self.tiers.shed(block)

    def bring_home(self, block: Block) -> None:
        """Have the host's bytes right of a block that is kept on the device."""
        if block.id in self._kept:
            self.settle(block)

    def outdated(self, block: Block) -> None:
        """The host's bytes of a kept block are about to change: the copy goes, the next update brings them."""
        if block.id in self._kept:
            copy = self._copies.get(block.id)
            if copy is not None:
                self._drop(copy)

    # -- prefetch --------------------------------------------------------------------------------------------------

    def pump(self, upcoming: Iterable[tuple[int, int]], in_use: set[int] | frozenset[int]) -> None:
        """Start copies of the weights that are used next and are in host memory, as far as there is room."""
        self.transfers.poll()
        self._note_ends()
        weights = [(distance, block) for distance, block in upcoming if self._is_weight(block)]
        moves = plan_prefetch(
            weights,
            is_resident=lambda b: b in self._copies or not self._is_loadable(b),
            nbytes=self.tiers.room_bytes,
            free_bytes=self.arena.free_bytes,
            evictable=(c.block.id for c in list(self._copies.values()) if self._is_idle(c, in_use)),
            next_use=self.tiers.next_use,
            lookahead_bytes=self.arena.capacity_bytes,
        )
        for move in moves:
            if move.kind is MoveKind.EVICT:
                self._evict(self._copies[move.block])
            elif not self._prefetch(self.tiers.block(move.block)):
                break

    def _note_ends(self) -> None:
        """Record where uses that are over have ended. A copy that leaves later, when more has been launched, need not
        wait for that."""
        for copy in [copy for copy in self._used.values() if not copy.leases and self._may_go(copy)]:
            copy.over = [self.accelerator.event(stream) for stream in copy.streams.values()]
            del self._used[copy.block.id]

    def _begin_use(self, copy: _Copy, stream: Any) -> None:
        copy.streams[stream.stream_id] = stream
        copy.over = None
        self._used[copy.block.id] = copy

    def evict_all(self, in_use: set[int] | frozenset[int]) -> None:
        """Evict what may be evicted (the tests' strictest mode)."""
        with self.tiers.lock:
            for copy in list(self._copies.values()):
                if copy.block.id not in in_use:
                    self._evict(copy)
            self.transfers.end()

    def _prefetch(self, block: Block) -> bool:
        offset = self.arena.allocate(block.room_bytes)
        if offset is None:
            return False
        copy = _Copy(block, offset)
        try:
            self._copy_in(copy)
        except BaseException:
            self.arena.free(offset, [])
            raise
        self._copies[block.id] = copy
        self.counters.prefetches += 1
        return True

    def _is_weight(self, block_id: int) -> bool:
        return self.tiers.room_bytes(block_id) > 0 and self.tiers.block(block_id).kind is BlockKind.WEIGHT

    def _is_loadable(self, block_id: int) -> bool:
        """In host memory, where no update of it is still to come."""
        block = self.tiers.block(block_id)
        owner = block.owner
        return block.resident and owner is not None and not owner.on_host and not owner.update_to_come()

    def _is_idle(self, copy: _Copy, in_use: set[int] | frozenset[int]) -> bool:
        if copy.block.id in in_use or copy.leases or copy.block.id in self._kept:
            return False
        return self._may_go(copy) and not self._is_dirty(copy)

    # -- copies ----------------------------------------------------------------------------------------------------

    def _bring(self, block: Block, load: bool) -> _Copy:
        if block.copying:
            self.transfers.end(block)  # a gradient may be landing in it
        copy = _Copy(block, self._make_room(block))
        self._copies[block.id] = copy
        try:
            if load:
                self._copy_in(copy)
            else:
                copy.dirty = True
                self.arena.bytes()
                current = self.accelerator.current()
                for event in self.arena.events_before(copy.offset):
                    current.wait_event(event)
        except BaseException:
            del self._copies[block.id]
            self.arena.free(copy.offset, [])
            raise
        return copy

    def _use(self, copy: _Copy) -> None:
        """What the current stream does from now on with the copy comes after its coming, and before its going."""
        stream = self.accelerator.current()
        self._begin_use(copy, stream)
        if copy.ready is not None:
            stream.wait_event(copy.ready)
            if copy.ready.query():
                copy.ready = None

    def _copy_in(self, copy: _Copy, after: Iterable[Any] = ()) -> None:
        """Start bringing the host's bytes. They are leased until that is done."""
        block, stream, there = copy.block, self.accelerator.copy_in, self._shown(copy)
        self.tiers.acquire(block)
        with self._lease_kept(block):
            for event in (*self.arena.events_before(copy.offset), *after):
                stream.wait_event(event)
            with self._outside_user_modes(), self.accelerator.on(stream):
                self.bring(there, self._host(block))
            copy.ready = self.accelerator.event(stream)
        self.transfers.launched(Lane.TO_DEVICE, copy.ready, block, block.nbytes)

    def _copy_out(self, copy: _Copy) -> None:
        """Start taking what the program wrote to the host. The next use of the host's bytes waits for it."""
        block, stream = copy.block, self.accelerator.copy_out
        copy.dirty = False  # it is not asked for again while it is on its way
        try:
            self.tiers.acquire(block, load=False)
        except BaseException:
            copy.dirty = True
            raise
        with self._lease_kept(block):
            self.tiers.will_change(block, by_device=True)
            for event in self._events(copy):
                stream.wait_event(event)
            with self._outside_user_modes(), self.accelerator.on(stream):
                self.take(self._shown(copy), self._host(block))
            self._begin_use(copy, stream)
            done = self.accelerator.event(stream)
        self.transfers.launched(Lane.FROM_DEVICE, done, block, block.nbytes)

    @contextmanager
    def _lease_kept(self, block: Block) -> Iterator[None]:
        """What is launched inside takes the lease of ``block`` over, if it is launched."""
        try:
            yield
        except BaseException:
            self.tiers.release(block)
            raise

    def _events(self, copy: _Copy) -> list[Any]:
        """When these have happened, nothing that was launched until now uses the copy."""
        events = copy.over
        if events is None:
            events = [self.accelerator.event(stream) for stream in copy.streams.values()]
        return events if copy.ready is None else [*events, copy.ready]

    def _shown(self, copy: _Copy) -> Tensor:
        with self._outside_user_modes():
            return self.arena.bytes()[copy.offset : copy.offset + copy.block.nbytes]

    def _host(self, block: Block) -> int:
        if block.offset is None:
            raise RuntimeError(f"block {block.name} has no memory")
        return block.offset

    def bring(self, there: Tensor, offset: int) -> None:
        """Start copying the arena's bytes from ``offset`` on to ``there`` (uint8, on the device), in the current
        stream. To be called outside of the program's modes."""
        for part, host in self._parts(there, offset):
            part.copy_(host, non_blocking=True)

    def take(self, there: Tensor, offset: int) -> None:
        """The other way round."""
        for part, host in self._parts(there, offset):
            host.copy_(part, non_blocking=True)

    def _parts(self, there: Tensor, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self._arena_bytes is None:
            self._arena_bytes = torch.frombuffer(self.tiers.arena.buffer, dtype=torch.uint8)
        for start, nbytes in self.pinned.lock(offset, there.numel()):
            yield there[start - offset :][:nbytes], self._arena_bytes[start : start + nbytes]

    # -- room ------------------------------------------------------------------------------------------------------

    def _make_room(self, block: Block) -> int:
        collected = False
        while True:
            offset = self.arena.allocate(block.room_bytes, high=block.id in self._kept)
            if offset is not None:
                return offset
            if self.arena.empty_limbo() or self._evict_farthest():
                continue
            if not collected and any(not copy.leases and not self._may_go(copy) for copy in self._copies.values()):
                collected = True
                gc.collect()  # views in reference cycles, or in the traceback of a caught exception
                continue
            raise BudgetError(self._no_room(block))

    def _evict_farthest(self) -> bool:
        for copy in sorted(self._copies.values(), key=lambda c: self.tiers.next_use(c.block.id), reverse=True):
            if self._evict(copy):
                return True
        return False

    def _evict(self, copy: _Copy) -> bool:
        if copy.leases or copy.block.id in self._kept or not self._may_go(copy):
            return False
        if self._is_dirty(copy):
            self._copy_out(copy)
        self._drop(copy)
        self.counters.evictions += 1
        return True

    def end_copies(self, block: Block | None = None) -> bool:
        """Wait for the copies in flight from or to the host's bytes of ``block``, or for all."""
        return self.transfers.end(block)

    def forget(self, block: Block) -> None:
        """Drop the copy of a block whose bytes are lost. What the program still has views of is kept for these."""
        copy = self._copies.get(block.id)
        if copy is not None:
            self._drop(copy, block.owner.aliases() if block.owner is not None else [])
        if block.copying:
            self.transfers.end(block)

    def _may_go(self, copy: _Copy) -> bool:
        return copy.block.owner is None or copy.block.owner.can_release()

    def _is_dirty(self, copy: _Copy) -> bool:
        owner = copy.block.owner
        if owner is not None and not copy.dirty and owner.changed():
            copy.dirty = True
        return copy.dirty

    def _drop(self, copy: _Copy, aliases: list[Alias] | None = None) -> None:
        if copy.block.owner is not None:
            copy.block.owner.release()
        del self._copies[copy.block.id]
        self._used.pop(copy.block.id, None)
        self.arena.free(copy.offset, self._events(copy), aliases)

    def _no_room(self, block: Block) -> str:
        held = [
            f"  {copy.block.name}: {copy.block.room_bytes} bytes, {'in use' if copy.leases else 'views of it are held'}"
            for copy in self._copies.values()
            if copy.leases or not self._may_go(copy)
        ]
        return (
            f"{block.name} needs {block.room_bytes} bytes on {self.device}, whose device_budget of "
            f"{self.arena.capacity_bytes} bytes is held by\n" + "\n".join(held[:20]) + "\nRaise device_budget, or let "
            "go of views of weights and gradients (CPUAdam instead of torch's optimizers)"
        )

    # -- report and end --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        counters = self.counters
        return {
            "device_budget_bytes": self.arena.capacity_bytes,
            "device_bytes": self.arena.used_bytes,
            "device_peak_bytes": self.arena.peak_bytes,
            "host_locked_bytes": self.pinned.locked_bytes,
            "device_bytes_in": self.transfers.in_bytes,
            "device_bytes_out": self.transfers.out_bytes,
            "device_faults": counters.faults,
            "device_prefetches": counters.prefetches,
            "device_evictions": counters.evictions,
        }

    def close(self) -> None:
        """Wait for the device, then drop all copies. Memory that the program has views of lives as long as these."""
        with self.tiers.lock:
            self.accelerator.synchronize()
            self.transfers.end()
            for copy in list(self._copies.values()):
                if copy.block.owner is not None:
                    copy.block.owner.release()
            self._copies.clear()
            self._used.clear()
            self.arena.close()
            self._arena_bytes = None
            self.pinned.release()
