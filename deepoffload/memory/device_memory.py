"""The device tier: copies of blocks in the memory of a device, within its budget.

A copy is either like the host's bytes or, after the program wrote to it, the only right one (``dirty``); it goes back
to the host before it leaves, and before the host's bytes are used (:meth:`DeviceMemory.settle`). Nothing is allocated
while training: one tensor of exactly the budget, and the arena's allocator over it.

Order on the device: a copy that comes in is waited for by the streams that use it. A range is used again when what was
launched on these streams until the copy left is done: events recorded then (``_fences``), for which whatever comes next
waits on the device. Python's last reference says only when the *host* is done with a tensor.
"""

from __future__ import annotations

import gc
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import BudgetError
from deepoffload.memory.accelerator import Accelerator
from deepoffload.memory.arena import Ranges
from deepoffload.memory.block import Alias, Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.schedule.placement import Kind
from deepoffload.schedule.planner import MoveKind, plan_prefetch
from deepoffload.timeline import Lane


@dataclass
class DeviceCounters:
    """Running totals. ``faults``: copies that were made when they were needed, which no prefetch had brought."""

    faults: int = 0
    prefetches: int = 0
    evictions: int = 0
    in_bytes: int = 0
    out_bytes: int = 0


@dataclass(eq=False)
class _Copy:
    """A block's bytes on the device.

    ``ready``: the event of its coming, until it is known to have happened. ``streams``: on which it has been used.
    """

    block: Block
    offset: int
    leases: int = 0
    dirty: bool = False
    ready: Any = None
    streams: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Fence:
    """A range that was given back, and the event after which it may be written."""

    start: int
    end: int
    event: Any


@dataclass(frozen=True, eq=False)
class _Launched:
    """A copy from or to the host's bytes of a block, which are leased until it is done; ``then`` is called then."""

    event: Any
    block: Block
    then: Callable[[], None] | None
    lane: Lane
    nbytes: int
    begin_s: float


class DeviceMemory:
    """Shows blocks on a device (a :class:`~deepoffload.memory.shown.ShownMemory`). Guarded by the tier manager's lock.

    Args:
        capacity_bytes: the device budget.
        poison: fill what is taken back with 0xFF.
    """

    on_host = False

    def __init__(
        self, tiers: TierManager, accelerator: Accelerator, capacity_bytes: int, *, poison: bool = False
    ) -> None:
        self.tiers = tiers
        self.accelerator = accelerator
        self.device = accelerator.device
        self.poison = poison
        self.ranges = Ranges(capacity_bytes, "device_budget")
        self.counters = DeviceCounters()
        self._bytes: Tensor | None = None
        self._copies: dict[int, _Copy] = {}
        self._fences: list[_Fence] = []
        self._in_flight: deque[_Launched] = deque()
        self._limbo: list[tuple[int, list[Alias]]] = []
        tiers.copies = self

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
        memory = self._memory()
        # A storage of its own tells who else refers to these bytes. It keeps the whole memory alive.
        storage: Any = torch._C._construct_storage_from_data_pointer(
            memory.data_ptr() + copy.offset + offset_bytes, self.device, numel * dtype.itemsize
        )
        storage.memory = memory
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, (numel,), (1,))

    def holds(self, tensor: Tensor) -> bool:
        if self._bytes is None or tensor.device != self.device:
            return False
        return 0 <= tensor.untyped_storage().data_ptr() - self._bytes.data_ptr() < self.ranges.capacity_bytes

    def checksum(self, block: Block, offset_bytes: int, nbytes: int) -> int:
        start = self._copies[block.id].offset + offset_bytes
        return zlib.crc32(self._memory()[start : start + nbytes].cpu().numpy().data)

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
                self.end_copies(block)

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

    # -- prefetch --------------------------------------------------------------------------------------------------

    def pump(self, upcoming: Iterable[tuple[int, int]], in_use: set[int] | frozenset[int]) -> None:
        """Start copies of the weights that are used next and are in host memory, as far as there is room."""
        self.poll()
        weights = [(distance, block) for distance, block in upcoming if self._is_weight(block)]
        moves = plan_prefetch(
            weights,
            is_resident=lambda b: b in self._copies or not self._is_loadable(b),
            nbytes=self.tiers.room_bytes,
            free_bytes=self.ranges.free_bytes,
            evictable=(c.block.id for c in list(self._copies.values()) if self._is_idle(c, in_use)),
            next_use=self.tiers.next_use,
            lookahead_bytes=self.ranges.capacity_bytes,
        )
        for move in moves:
            if move.kind is MoveKind.EVICT:
                self._evict(self._copies[move.block])
            elif not self._prefetch(self.tiers.block(move.block)):
                break

    def evict_all(self, in_use: set[int] | frozenset[int]) -> None:
        """Evict what may be evicted (the tests' strictest mode)."""
        with self.tiers.lock:
            for copy in list(self._copies.values()):
                if copy.block.id not in in_use:
                    self._evict(copy)
            self.end_copies()

    def _prefetch(self, block: Block) -> bool:
        offset = self.ranges.allocate(block.room_bytes)
        if offset is None:
            return False
        copy = self._copies[block.id] = _Copy(block, offset)
        self._copy_in(copy)
        self.counters.prefetches += 1
        return True

    def _is_weight(self, block_id: int) -> bool:
        return self.tiers.room_bytes(block_id) > 0 and self.tiers.block(block_id).kind is Kind.WEIGHT

    def _is_loadable(self, block_id: int) -> bool:
        """In host memory, where no update of it is still to come."""
        block = self.tiers.block(block_id)
        owner = block.owner
        return block.resident and owner is not None and not owner.on_host and not owner.update_to_come()

    def _is_idle(self, copy: _Copy, in_use: set[int] | frozenset[int]) -> bool:
        return copy.block.id not in in_use and not copy.leases and self._may_go(copy) and not self._is_dirty(copy)

    # -- copies ----------------------------------------------------------------------------------------------------

    def _memory(self) -> Tensor:
        if self._bytes is None:
            self._bytes = torch.empty(self.ranges.capacity_bytes, dtype=torch.uint8, device=self.device)
        return self._bytes

    def _bring(self, block: Block, load: bool) -> _Copy:
        if block.copying:
            self.end_copies(block)  # a gradient may be landing in it
        copy = _Copy(block, self._make_room(block))
        self._copies[block.id] = copy
        try:
            if load:
                self._copy_in(copy)
            else:
                copy.dirty = True
                current = self.accelerator.current()
                for event in self._take_fences(copy):
                    current.wait_event(event)
        except BaseException:
            del self._copies[block.id]
            self.ranges.free(copy.offset)
            raise
        return copy

    def _use(self, copy: _Copy) -> None:
        """What the current stream does from now on with the copy comes after its coming, and before its going."""
        stream = self.accelerator.current()
        copy.streams[stream.stream_id] = stream
        if copy.ready is not None:
            stream.wait_event(copy.ready)
            if copy.ready.query():
                copy.ready = None

    def _copy_in(self, copy: _Copy, after: Iterable[Any] = ()) -> None:
        """Start bringing the host's bytes. They are leased until that is done."""
        block, stream = copy.block, self.accelerator.copy_in
        self.tiers.acquire(block)
        for event in (*self._take_fences(copy), *after):
            stream.wait_event(event)
        with torch.no_grad(), self.accelerator.on(stream):
            self._shown(copy).copy_(self._host(block), non_blocking=True)
        copy.ready = self.accelerator.event(stream)
        self.launched(Lane.TO_DEVICE, copy.ready, block, block.nbytes)

    def _copy_out(self, copy: _Copy) -> None:
        """Start taking what the program wrote to the host. Whoever then uses the host's bytes waits for it."""
        block, stream = copy.block, self.accelerator.copy_out
        self.tiers.acquire(block, load=False)
        self.tiers.will_change(block)
        for event in self._events(copy):
            stream.wait_event(event)
        with torch.no_grad(), self.accelerator.on(stream):
            self._host(block).copy_(self._shown(copy), non_blocking=True)
        copy.streams[stream.stream_id] = stream
        self.launched(Lane.FROM_DEVICE, self.accelerator.event(stream), block, block.nbytes)
        copy.dirty = False

    def launched(
        self, lane: Lane, event: Any, block: Block, nbytes: int, then: Callable[[], None] | None = None
    ) -> None:
        """A copy into the host's bytes of a leased ``block``, or from them, is under way until ``event``. Whoever comes
        to use them waits; the lease ends with ``then``, which runs where the end of the copy is noticed."""
        block.copying += 1
        self._in_flight.append(_Launched(event, block, then, lane, nbytes, time.perf_counter()))
        if lane is Lane.TO_DEVICE:
            self.counters.in_bytes += nbytes
        else:
            self.counters.out_bytes += nbytes

    def _events(self, copy: _Copy) -> list[Any]:
        """When these have happened, nothing that was launched until now uses the copy."""
        events = [self.accelerator.event(stream) for stream in copy.streams.values()]
        return events if copy.ready is None else [*events, copy.ready]

    def _shown(self, copy: _Copy) -> Tensor:
        return self._memory()[copy.offset : copy.offset + copy.block.nbytes]

    def _host(self, block: Block) -> Tensor:
        if block.offset is None:
            raise RuntimeError(f"block {block.name} has no memory")
        return torch.frombuffer(self.tiers.arena.buffer, dtype=torch.uint8, count=block.nbytes, offset=block.offset)

    # -- the end of copies -----------------------------------------------------------------------------------------

    def poll(self) -> None:
        """End what is done, oldest first."""
        while self._in_flight and self._in_flight[0].event.query():
            self._end(self._in_flight[0])

    def end_copies(self, block: Block | None = None) -> bool:
        """Wait for the copies in flight from or to the host's bytes of ``block``, or for all."""
        with self.tiers.lock:
            waited = [copy for copy in self._in_flight if block is None or copy.block is block]
            for copy in waited:
                self._end(copy)
            return bool(waited)

    def end_oldest(self) -> bool:
        """Wait for the copy that was launched first; False when none is in flight."""
        with self.tiers.lock:
            if not self._in_flight:
                return False
            self._end(self._in_flight[0])
            return True

    def _end(self, copy: _Launched) -> None:
        self._wait(copy)
        self._in_flight.remove(copy)
        copy.block.copying -= 1
        try:
            if copy.then is not None:
                copy.then()
        finally:
            self.tiers.release(copy.block)

    def _wait(self, copy: _Launched) -> None:
        timeline, begin_s = self.tiers.timeline, time.perf_counter()
        if not copy.event.query():
            copy.event.synchronize()
            if timeline is not None:
                what = f"copy {copy.lane.value} {copy.block.kind.name.lower()}: {copy.block.name}"
                timeline.add(Lane.WAIT, what, begin_s, time.perf_counter())
        if timeline is not None:
            timeline.add(copy.lane, copy.block.name, copy.begin_s, time.perf_counter(), copy.nbytes)

    # -- room ------------------------------------------------------------------------------------------------------

    def _make_room(self, block: Block) -> int:
        collected = False
        while True:
            offset = self.ranges.allocate(block.room_bytes)
            if offset is not None:
                return offset
            if self._empty_limbo() or self._evict_farthest():
                continue
            if not collected:
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
        if copy.leases or not self._may_go(copy):
            return False
        if self._is_dirty(copy):
            self._copy_out(copy)
        self._drop(copy)
        self.counters.evictions += 1
        return True

    def forget(self, block: Block) -> None:
        """Drop the copy of a block whose bytes are lost. What the program still has views of is kept for these."""
        copy = self._copies.get(block.id)
        if copy is not None:
            self._drop(copy, block.owner.aliases() if block.owner is not None else [])
        if block.copying:
            self.end_copies(block)

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
        events = self._events(copy)
        if aliases:
            self._limbo.append((copy.offset, aliases))
        else:
            self._free(copy.offset, events)

    def _free(self, offset: int, events: list[Any]) -> None:
        start, end = offset, offset + self.ranges.size_of(offset)
        if self.poison and self._bytes is not None:
            current = self.accelerator.current()
            for event in events:
                current.wait_event(event)
            self._bytes[start:end].fill_(0xFF)
            events = [self.accelerator.event(current)]
        self.ranges.free(offset)
        self._fences += [_Fence(start, end, event) for event in events]

    def _empty_limbo(self) -> bool:
        gone = [entry for entry in self._limbo if not any(alias() for alias in entry[1])]
        for entry in gone:
            self._limbo.remove(entry)
            # Whatever the last view was used for has been launched on the stream that is current now.
            self._free(entry[0], [self.accelerator.event(self.accelerator.current())])
        return bool(gone)

    def _take_fences(self, copy: _Copy) -> list[Any]:
        """Events that have to happen before the copy's range is written. Fences that hold nobody up are dropped."""
        start, end = copy.offset, copy.offset + self.ranges.size_of(copy.offset)
        self._fences = [fence for fence in self._fences if not fence.event.query()]
        return [fence.event for fence in self._fences if fence.start < end and start < fence.end]

    def _no_room(self, block: Block) -> str:
        held = [
            f"  {copy.block.name}: {copy.block.room_bytes} bytes, {'in use' if copy.leases else 'views of it are held'}"
            for copy in self._copies.values()
            if copy.leases or not self._may_go(copy)
        ]
        return (
            f"{block.name} needs {block.room_bytes} bytes on {self.device}, whose device_budget of "
            f"{self.ranges.capacity_bytes} bytes is held by\n" + "\n".join(held[:20]) + "\nRaise device_budget, or let "
            "go of views of weights and gradients (CPUAdam instead of torch's optimizers)"
        )

    # -- report and end --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        counters = self.counters
        return {
            "device_budget_bytes": self.ranges.capacity_bytes,
            "device_bytes": self.ranges.used_bytes,
            "device_peak_bytes": self.ranges.peak_bytes,
            "device_bytes_in": counters.in_bytes,
            "device_bytes_out": counters.out_bytes,
            "device_faults": counters.faults,
            "device_prefetches": counters.prefetches,
            "device_evictions": counters.evictions,
        }

    def trim(self, needed_bytes: int) -> None:
        """Take no more than ``needed_bytes`` of the budget, where nothing was taken yet."""
        if self._bytes is None and needed_bytes < self.ranges.capacity_bytes:
            self.ranges = Ranges(max(needed_bytes, 1 << 12), "device_budget")

    def close(self) -> None:
        """Wait for the device, then drop all copies. Memory that the program has views of lives as long as these."""
        with self.tiers.lock:
            self.accelerator.synchronize()
            self.end_copies()
            for copy in list(self._copies.values()):
                if copy.block.owner is not None:
                    copy.block.owner.release()
            self._copies.clear()
            self._fences.clear()
            self._limbo.clear()
            self._bytes = None
            self.accelerator.unregister()
