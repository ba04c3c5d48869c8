"""The device tier: copies of blocks in the memory of a device, within its budget.

What the host stores and what the device shows are two things; a materialiser makes the one from the other. A copy is
either like the stored bytes or, after the program wrote to it, the only right one (``dirty``). It goes back to the host
before it leaves, and before the host's bytes are used (:meth:`CopyMemory.settle`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from deepoffload.copies.accelerator import ComputeDevice
from deepoffload.copies.fenced_arena import DeviceArena
from deepoffload.copies.gathered import Gathered, SectionPlace
from deepoffload.copies.host_link import HostLink
from deepoffload.copies.materialise import Materialiser
from deepoffload.copies.movement import Movement
from deepoffload.copies.residency import Residency
from deepoffload.copies.scratch import DeviceScratch
from deepoffload.io.checksums import crc32c
from deepoffload.memory.block import Block, DeviceCopies
from deepoffload.memory.tier_manager import TierManager


class CopyMemory:
    """Shows copies of blocks (a :class:`~deepoffload.copies.shown.ShownMemory`). Guarded by the tier manager's lock.

    It is what others ask, and decides nothing itself: :class:`Residency` knows which copies there are,
    :class:`Movement` moves their bytes.

    It makes the tier manager, because each asks the other. It has as many methods as there are questions of doors,
    windows, updates and the tier manager.

    Args:
        open_tiers: the tier manager over given copies; called once, while these copies can not yet be asked.
        capacity_bytes: the device budget.
        outside_user_modes: a context outside of the program's modes, in which bytes are moved.
        storage_at: makes a storage of an address, a device and a number of bytes, which it does not own.
        materialiser: made of the link to the arena; shows blocks that are not stored as they are shown.
        join: made of the same link; joins this rank with those that store other parts of what is shown.
        poison: fill what is taken back with 0xFF.
    """

    on_host = False

    def __init__(
        self,
        open_tiers: Callable[[DeviceCopies], TierManager],
        accelerator: ComputeDevice,
        capacity_bytes: int,
        *,
        outside_user_modes: Callable[[], AbstractContextManager[None]],
        storage_at: Callable[[int, torch.device, int], Any],
        materialiser: Callable[[HostLink], Materialiser] | None = None,
        join: Callable[[HostLink], Gathered] | None = None,
        poison: bool = False,
    ) -> None:
        self.tiers = tiers = open_tiers(self)
        self.accelerator = accelerator
        self.device = accelerator.device
        self.arena = DeviceArena(accelerator, capacity_bytes, outside_user_modes=outside_user_modes, poison=poison)
        self._scratch = DeviceScratch(accelerator, self.arena)
        self.link = HostLink(tiers, accelerator)
        self.transfers = self.link.transfers
        between = None if materialiser is None else materialiser(self.link)
        self._gathered = None if join is None else join(self.link)
        self._movement = Movement(self.link, self.arena, between, self._gathered, outside_user_modes)
        self._residency = Residency(tiers, self.arena, self._movement)
        self._outside_user_modes = outside_user_modes
        self._storage_at = storage_at
        if self.device.type != "cpu":  # the device of ranks refers to this memory, and would keep it
            # An engine that nobody closes goes: what is on its way reads and writes the memory that goes with it.
            weakref.finalize(self, accelerator.synchronize).atexit = False

    @property
    def capacity_bytes(self) -> int:
        return self.arena.capacity_bytes

    @property
    def device_bytes(self) -> int:
        """As above; 0 where the copies lie in the arena."""
        return self.capacity_bytes if self.accelerator.has_memory else 0

    def is_captured(self) -> bool:
        """Whether the program captures a graph of what it launches now."""
        return self.accelerator.is_capturing()

    def reserve(self, needed_bytes: int, scratch_bytes: int = 0, arriving_bytes: int = 0) -> None:
        """Take the memory now, no more of the budget than ``needed_bytes``, of which ``scratch_bytes`` are for updates
        there. ``arriving_bytes``: of the host's memory, for what comes from other ranks and goes on to the device.

        Raises:
            torch.OutOfMemoryError: the device does not have that much in one piece.
            BudgetError: the host budget has no room for what arrives.
        """
        arrivals = None if self._gathered is None else self._gathered.arrivals
        if arrivals is not None and arriving_bytes:
            with self.tiers.lock:
                arrivals.reserve(arriving_bytes)
        self.arena.trim(needed_bytes)
        self.arena.bytes()
        if scratch_bytes:
            with self.tiers.lock:
                self._scratch.keep(scratch_bytes)

    def scratch(self) -> Tensor:
        """What updates on the device need meanwhile: uint8, to be overwritten by what is launched now."""
        with self.tiers.lock:
            return self._scratch.take()

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
            copy = self._residency.need(block, load=load)
            thread = threading.get_ident()
            copy.leased_by = thread if copy.leases == 0 or copy.leased_by == thread else 0
            copy.leases += 1
            try:
                self._movement.use(copy)
            except BaseException:
                copy.leases -= 1
                raise

    def acquire_to_change(self, block: Block, *, load: bool = True) -> None:
        """The same where the caller launches changes of the copy now: they come after what other streams do with it."""
        with self.tiers.lock:
            self.acquire(block, load=load)
            self._movement.wait_for_others(self._residency.copies[block.id])

    def serve(
        self, block: Block, number: int, sections: Sequence[SectionPlace], tensor_names: Sequence[str] = ()
    ) -> None:
        """From now on ranks can gather a block of which each stores a part, under the same number on all of them.

        Args:
            sections: how it is cut.
            tensor_names: how errors call the tensors in it.
        """
        with self.tiers.lock:
            if self._gathered is None:
                raise RuntimeError(f"{block.name} is no part of what other ranks have")
            self._gathered.show(block, number, sections, tensor_names)

    def finish_rewrites(self) -> None:
        """Wait until copies that the program has views of show what is stored. Serves other ranks meanwhile."""
        with self.tiers.lock:
            if self._movement.from_ranks is not None:
                self._movement.from_ranks.finish_rewrites()

    def release(self, block: Block) -> None:
        with self.tiers.lock:
            copy = self._residency.copies[block.id]
            if copy.leases <= 0:
                raise RuntimeError(f"the device's copy of {block.name} was released more often than acquired")
            copy.leases -= 1

    def will_change(self, block: Block) -> None:
        with self.tiers.lock:
            if self.tiers.guards and self.keeps(block):
                self.tiers.guards.before_device_change(block)
            self._movement.will_change(self._residency.copies[block.id])

    def all_stay(self) -> bool:
        """Never: each update of a weight happens on the host."""
        return False

    def flat(self, block: Block, offset_bytes: int, dtype: torch.dtype, numel: int) -> Tensor:
        copy = self._residency.copies[block.id]
        memory = self.arena.bytes()
        # A separate storage tells who else refers to these bytes. It keeps the whole memory alive.
        address = memory.data_ptr() + copy.offset + offset_bytes
        storage = self._storage_at(address, self.device, numel * dtype.itemsize)
        storage.memory = memory
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, (numel,), (1,))

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.device and self.arena.holds(tensor.untyped_storage().data_ptr())

    def checksum(self, block: Block, offset_bytes: int, nbytes: int) -> int:
        copy, current = self._residency.copies[block.id], self.accelerator.current()
        if not copy.rewriting:
            self._movement.wait_for_all(copy, current)  # it may have been written on another stream
        with self._outside_user_modes():
            there = self._movement.shown_bytes(copy)[offset_bytes : offset_bytes + nbytes]
            there = there.cpu()
            return crc32c(there.data_ptr(), nbytes)

    def shows(self, block: Block) -> bool:
        """Whether there is a copy of what is stored of the block now."""
        return self._residency.shows(block)

    def is_idle(self, block: Block) -> bool:
        """Whether the copy of a block may be dropped now, if there is one: nobody uses it, the program has no views of
        it, and nothing of it is on its way."""
        with self.tiers.lock:
            self.transfers.poll()
            copy = self._residency.of(block)
            return copy is None or (not copy.leases and copy.coming is None and copy.may_go())

    def is_used_elsewhere(self, block: Block) -> bool:
        copy = self._residency.of(block)
        return copy is not None and copy.leases > 0 and copy.leased_by != threading.get_ident()

    def settle(self, block: Block) -> None:
        """The host's bytes are right when this returns: waits for what the program computes into the copy."""
        with self.tiers.lock:
            copy = self._residency.of(block)
            if copy is not None and copy.is_dirty():
                self._movement.copy_out(copy)
            if block.copying:
                self.transfers.end_changes(block)

    def is_awaited(self, block: Block) -> bool:
        """Whether another rank may still ask for the bytes that this one stores, as this one has asked."""
        with self.tiers.lock:
            return self._gathered is not None and self._gathered.is_awaited(block)

    def refresh(self, block: Block) -> None:
        with self.tiers.lock:
            if self._gathered is not None:
                self._gathered.changed(block)
            copy = self._residency.of(block)
            if copy is None:
                return
            copy.dirty = False
            if copy.coming is not None and copy.coming.flight is None:
                return  # it shows what is stored when its gather is launched
            if not copy.leases and copy.may_go():
                self._residency.outdate(copy)
            elif not copy.stale:
                self._movement.rewrite(copy)

    # -- optimizer state that lives here ---------------------------------------------------------------------------

    def keep(self, block: Block) -> None:
        """From now on a block of optimizer state lives on the device. What the host has of it goes there."""
        with self.tiers.lock:
            self._residency.staying.add(block.id)
            if not self.tiers.is_empty(block.id):
                self.acquire(block)
                self.will_change(block)
                self.release(block)
                self.let_host_go(block)

    def keeps(self, block: Block) -> bool:
        return block.id in self._residency.staying

    def keep_no_longer(self, block: Block) -> None:
        """The block lives on the host again."""
        with self.tiers.lock:
            self.bring_home(block)
            self._residency.staying.discard(block.id)

    def let_host_go(self, block: Block) -> None:
        """Free the host's bytes of a block that is kept on the device, where its copy is right."""
        with self.tiers.lock:
            if block.copying:
                self.transfers.end(block)
            copy = self._residency.of(block)
            if copy is not None:
                copy.dirty = True
                self.tiers.shed(block)

    def bring_home(self, block: Block) -> None:
        """Have the host's bytes right of a block that is kept on the device."""
        if self.keeps(block):
            self.settle(block)

    def outdated(self, block: Block) -> None:
        """The host's bytes of a kept block are about to change: the copy goes, the next update brings them."""
        copy = self._residency.of(block)
        if copy is not None and self.keeps(block):
            self._residency.drop(copy)

    # -- what is not needed now ------------------------------------------------------------------------------------

    def pump(self, upcoming: Iterable[tuple[int, int]], in_use: set[int] | frozenset[int]) -> None:
        """Start copies of the weights that are used next and are in host memory, as far as there is room."""
        self.transfers.poll()
        if self._movement.from_ranks is not None:
            if not self._movement.from_ranks.gathered.pump():
                return
            self._movement.from_ranks.finish_rewrites()
        self._movement.note_ends()
        self._residency.plan(upcoming, in_use)

    def evict_all(self, in_use: set[int] | frozenset[int]) -> None:
        """Evict what may be evicted (the tests' strictest mode)."""
        with self.tiers.lock:
            from_ranks = self._movement.from_ranks
            if from_ranks is not None and from_ranks.gathered.pump():
                from_ranks.finish_rewrites()
            self._residency.evict_all(in_use)
            self.transfers.end()

    def end_copies(self, block: Block) -> None:
        """Wait for the copies in flight from or to the host's bytes of ``block``."""
        self.transfers.end(block)

    def end_some_copies(self) -> bool:
        """Wait until one of the copies in flight has ended. False when there are none."""
        return self.transfers.end_some()

    def forget(self, block: Block) -> None:
        """Drop the copy of a block whose bytes are lost. What the program still has views of is kept for these."""
        copy = self._residency.of(block)
        if copy is not None:
            self._residency.drop(copy, block.owner.aliases() if block.owner is not None else [])
        if block.copying:
            self.transfers.end(block)

    # -- report and end --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        counters = self._residency.counters
        return {
            "device_budget_bytes": self.arena.capacity_bytes,
            "device_bytes": self.arena.used_bytes,
            "device_peak_bytes": self.arena.peak_bytes,
            "host_locked_bytes": self.link.pinned.locked_bytes,
            "device_bytes_in": self.transfers.in_bytes,
            "device_bytes_out": self.transfers.out_bytes,
            "device_faults": counters.faults,
            "device_prefetches": counters.prefetches,
            "device_evictions": counters.evictions,
        }

    def close(self) -> None:
        """Wait for the device, then drop all copies. Memory that the program has views of lives as long as these."""
        with self.tiers.lock:
            self.link.close()
            self._residency.close()
            self.arena.close()
