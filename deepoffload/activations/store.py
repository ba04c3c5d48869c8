"""Activations away from where they were made: the books of what has left.

When each comes back is said by [Note: the order of return] in ``activations/order_of_return.py``.
"""

from __future__ import annotations

import math
from collections import deque

from torch import Tensor

from deepoffload.activations.copies import Brought, Way, all_bytes
from deepoffload.activations.interrupted import forget_interrupted_graphs
from deepoffload.activations.order_of_return import Call, Kept, OrderOfReturn
from deepoffload.config.units import format_bytes
from deepoffload.device import Tier
from deepoffload.errors import BudgetError, ClosedError
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.aio import round_up
from deepoffload.params.saved import share_counter
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.cost_model import BlockKind


class ActivationStore:
    """Takes the bytes of saved tensors, and gives them back. It has no thread: each call collects what has ended.

    Args:
        tiers: blocks and memory of the store alone: its arena is the activations' part of the host budget.
        way: between that memory and where the program computes.
        order: the policy of ``tiers``.
        evict_always: everything leaves at once (tests).
    """

    def __init__(self, tiers: TierManager, way: Way, order: OrderOfReturn, *, evict_always: bool = False) -> None:
        self.tiers = tiers
        self._way = way
        self._order = order
        self._evict_always = evict_always
        self._every: dict[int, Kept] = {}
        self._by_storage: dict[int, Kept] = {}
        self._unwritten: deque[Kept] = deque()
        self._dead: deque[tuple[Kept, int]] = deque()
        self._shared: Kept | None = None
        self._number = 0
        self._closed = False
        self._held_bytes = self._peak_bytes = 0
        self._expected_bytes: float = math.inf
        self._taken = self._taken_bytes = self._written_bytes = self._read_bytes = 0

    # -- what hooks call -------------------------------------------------------------------------------------------

    def take(self, tensor: Tensor, call: Call) -> tuple[Kept, int]:
        """Keep the bytes of ``tensor``'s storage, once for all tensors that show it and are saved in one call of the
        model. Returns them with the number that is given to the saved tensor; :meth:`drop` gives both back.

        Raises:
            BudgetError: there is no room for it in ``activation_budget``, or on NVMe. Nothing has been kept.
            IoFailure: a write has failed, of this or of another one. Nothing is lost, and nothing has been kept.
            ClosedError: the engine is closed.
        """
        with self.tiers.lock:
            self._collect()
            kept = self._known(tensor, call)
            if kept is None:
                kept = self._leave(tensor, call)
            self._number += 1
            kept.numbers.add(self._number)
            self._order.comes(self._number, kept)
            self._write_behind()
            return kept, self._number

    def bring(self, kept: Kept, number: int) -> Tensor:
        """All bytes of a storage (uint8), where the program computes.

        Raises:
            IoFailure: they could not be read; they are still on NVMe.
            ClosedError: the engine is closed.
        """
        with self.tiers.lock:
            self._collect()
            if number not in self._order.to_come:
                self._order.again(number, list(self._every.values()))
            self._order.used(number, kept)
            if self._shared is not None and self._shared is not kept:
                self._shared.whole = None
                self._shared = None
            whole = kept.whole
            if whole is None:
                whole = self._brought(kept)
                if len(kept.numbers) > 1:
                    self._shared, kept.whole = kept, whole
            self._read_ahead()
            return whole.here()

    def drop(self, kept: Kept, number: int) -> None:
        """A saved tensor is gone. May be called anywhere, in any thread: it only takes a note."""
        self._dead.append((kept, number))

    # -- leaving ---------------------------------------------------------------------------------------------------

    def _known(self, tensor: Tensor, call: Call) -> Kept | None:
        """The same storage, saved before and not changed since. Between two calls of a model a program may change it
        in ways that move no counter: numpy shares memory with it, or it is ``x.data`` that is edited."""
        address = tensor.untyped_storage()._cdata
        kept = self._by_storage.get(address)
        if kept is None:
            return None
        if not kept.storage.expired() and kept.version == tensor._version and share_counter(kept.counter, tensor):
            if kept.call() is not None and kept.call() is call():
                return kept
        del self._by_storage[address]
        return None

    def _leave(self, tensor: Tensor, call: Call) -> Kept:
        nbytes = tensor.untyped_storage().nbytes()
        name = f"activation {self._number + 1} {list(tensor.shape)}"
        if round_up(nbytes) > self.tiers.arena.capacity_bytes:
            raise BudgetError(
                f"{name} takes {nbytes:,} bytes, and activation_budget is {self.tiers.arena.capacity_bytes:,} bytes: "
                f"raise activation_budget to at least {2 * round_up(nbytes)} bytes, which hold this one and the next"
            )
        block = self.tiers.create(name, BlockKind.ACTIVATION, nbytes)
        kept = Kept(block, tensor, call)
        try:
            self._acquire_empty(block)
            try:
                with outside_user_modes():
                    self._way.take(all_bytes(tensor), block)
            finally:
                self.tiers.release(block)
        except BaseException:
            self._way.forget(block)
            self.tiers.remove(block)
            raise
        self._every[block.id] = kept
        self._by_storage[kept.address] = kept
        self._taken += 1
        self._taken_bytes += nbytes
        self._held_bytes += block.room_bytes
        self._peak_bytes = max(self._peak_bytes, self._held_bytes)
        if self.tiers.space is not None and not self._will_stay(block):
            self._unwritten.append(kept)
        return kept

    def _acquire_empty(self, block: Block) -> None:
        forgotten = False
        while True:
            try:
                self.tiers.acquire(block, load=False)
                return
            except BudgetError as error:
                if self._way.end_some():
                    continue  # what leaves the device had its lease until now
                if forgotten:
                    raise self._no_room(block, error) from error
            forget_interrupted_graphs()
            forgotten = True
            self._collect()

    def _will_stay(self, block: Block) -> bool:
        """Whether memory will hold the block until backward needs it, by what came after it the last time."""
        after_bytes = self._expected_bytes - self._held_bytes
        return not self._evict_always and after_bytes + block.room_bytes <= self.tiers.arena.capacity_bytes

    def _write_behind(self) -> None:
        """Begin to write what has come to memory whole and will have to leave it."""
        while self._unwritten and not self._unwritten[0].block.leases:
            block = self._unwritten.popleft().block
            if block.state is BlockState.DIRTY:
                self.tiers.write_behind(block)
                if self._evict_always:
                    self.tiers.evict(block)

    # -- coming back -----------------------------------------------------------------------------------------------

    def _brought(self, kept: Kept) -> Brought:
        block = kept.block
        if block.state is BlockState.ON_NVME:
            self._read_bytes += block.nbytes
        self.tiers.acquire(block)
        try:
            with outside_user_modes():
                whole = self._way.bring(block)
        finally:
            self.tiers.release(block)
        if not self._order.is_to_come(kept) and block.state is BlockState.CLEAN:
            self.tiers.evict(block)  # NVMe has it, should a graph go backward once more
        return whole

    def _read_ahead(self) -> None:
        """Read what comes next as far as there is room, and have the next one copied to the device."""
        first = True
        for kept in reversed(self._order.to_come.values()):
            block = kept.block
            if block.state is BlockState.ON_NVME:
                if self._evict_always or not self.tiers.prefetch(block, compact=True):
                    return
                self._read_bytes += block.nbytes
            elif first and block.resident and kept.whole is None:
                with outside_user_modes():
                    self._way.bring_ahead(block)
            first = False

    # -- the end of tensors ----------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take the results of what has ended, and give back what nobody will ask for.

        Raises:
            IoFailure: a transfer has failed.
        """
        if self._closed:
            raise ClosedError("activations are gone: the engine that kept them for backward is closed")
        self._way.poll()
        while self._dead:
            kept, number = self._dead.popleft()
            kept.numbers.discard(number)
            self._order.used(number, kept)
            if not kept.numbers:
                self._forget(kept)
        self._write_behind()
        self.tiers.poll()

    def _forget(self, kept: Kept) -> None:
        block = kept.block
        if self._every.pop(block.id, None) is None:
            return
        if self._by_storage.get(kept.address) is kept:
            del self._by_storage[kept.address]
        if self._shared is kept:
            self._shared = None
        kept.whole = None
        self._way.forget(block)
        self._held_bytes -= block.room_bytes
        self._written_bytes += block.nbytes if block.extent is not None else 0
        if not self._every:  # backward is over: next time as much comes as this time
            self._expected_bytes, self._peak_bytes = self._peak_bytes, 0
        self.tiers.remove(block)

    def _no_room(self, block: Block, error: BudgetError) -> BudgetError:
        part_bytes = self.tiers.arena.capacity_bytes
        what = f"no room for {block.name}, {block.nbytes:,} bytes, which is kept for backward"
        if self.tiers.space is not None:
            return BudgetError(f"{what}: {error}", enough_nvme_bytes=error.enough_nvme_bytes)
        enough_bytes = self._held_bytes + block.room_bytes
        return BudgetError(
            f"{what}: the {len(self._every)} before it take {format_bytes(self._held_bytes)} of activation_budget, "
            f"which is {format_bytes(part_bytes)}. Raise activation_budget to at least {enough_bytes} bytes, for what "
            f'has been kept until here, or say offload_activations = "{Tier.NVME.value}"'
        )

    # -- report and end --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Bytes in the part of the budget and on NVMe, and waits."""
        with self.tiers.lock:
            if not self._closed:
                self._collect()
            counters, arena = self.tiers.counters, self.tiers.arena
            written = sum(kept.block.nbytes for kept in self._every.values() if kept.block.extent is not None)
            return {
                "activation_budget_bytes": arena.capacity_bytes,
                "activation_host_bytes": arena.used_bytes,
                "activation_host_peak_bytes": arena.peak_bytes,
                "activation_bytes": sum(kept.block.nbytes for kept in self._every.values()),
                "activations_taken": self._taken,
                "activation_bytes_taken": self._taken_bytes,
                "activation_bytes_written": self._written_bytes + written,
                "activation_bytes_read": self._read_bytes,
                "activation_faults": counters.faults,
                "activation_waits": counters.waits,
                "activation_wait_s": counters.wait_s,
            }

    def close(self) -> None:
        """Wait for what is under way, and give back memory and extents. A backward that comes later raises ClosedError.
        Idempotent."""
        with self.tiers.lock:
            if self._closed:
                return
            self._closed = True
            self._way.close()
            for kept in list(self._every.values()):
                kept.whole = None
                self.tiers.remove(kept.block)
            self._every.clear()
            self._by_storage.clear()
            self._order.to_come.clear()
            self._unwritten.clear()
            self.tiers.close()
