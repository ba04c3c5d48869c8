"""The pager: brings the bytes of units when the program uses them, and keeps the order of uses.

It is what the doors and windows talk to. It owns the units, the trace of their use and the prefetcher's decisions; the
bytes themselves belong to the tier manager.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from deepoffload.copies.shown import HostMemory, ShownMemory
from deepoffload.errors import ClosedError
from deepoffload.memory.block import Block
from deepoffload.memory.lock import SHIELD
from deepoffload.memory.tier_manager import TierManager
from deepoffload.params.mapped import MappedCopies
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.ports import GradientDoor
from deepoffload.params.prefetcher import Prefetcher
from deepoffload.params.saved import SavedTensorHooks
from deepoffload.params.slot import TensorSlot
from deepoffload.params.torch_private import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_enabled,
    top_saved_tensors_hooks,
)
from deepoffload.params.unit import BlockView, ParamHandle, Unit
from deepoffload.params.use_order import UseOrder, phase_name
from deepoffload.schedule.trace import Phase, UseKey


class _ThreadState(threading.local):
    """What this thread has opened, innermost last."""

    def __init__(self) -> None:
        self.pushed: list[SavedTensorHooks] = []
        self.opened: list[Any] = []


class Pager:
    """Args:
    tiers: the arena and the blocks.
    order: of uses, by which ``tiers`` decides what leaves.
    graphs: those of autograd, which ``order`` tells of what leaves.
    memory: in which tensors show their bytes; the arena when None.
    prefetch: False for the serial reference: every transfer is waited for where it is needed.
    evict_always: evict whatever may be evicted after every use (tests).
    defer_updates: an optimizer step updates each unit right before its next use, instead of all at once.
    """

    def __init__(
        self,
        tiers: TierManager,
        order: UseOrder,
        graphs: OpenGraphs,
        memory: ShownMemory | None = None,
        *,
        prefetch: bool = True,
        evict_always: bool = False,
        defer_updates: bool = False,
    ) -> None:
        self.tiers = tiers
        self.lock = tiers.lock
        self._arena = HostMemory(tiers)
        self.memory: ShownMemory = self._arena if memory is None else memory
        self.order = order
        self.graphs = graphs
        self.prefetch = prefetch
        self.evict_always = evict_always
        self.defer_updates = defer_updates
        self.units: list[Unit] = []
        self.storages: dict[int, TensorSlot] = {}
        self.gradients: GradientDoor | None = None
        self.adopt_late: Callable[[Tensor, str], ParamHandle | None] | None = None
        self.closed_because: str | None = None
        self._held: list[Block] = []
        self._local = _ThreadState()
        self._opened_by: dict[int, list[Any]] = {}
        self._shared = False
        self.cast_by: set[int] = set()
        self.casts_are_shared = False
        self.casts_of: int | None = None
        self._hooks_alone = SavedTensorHooks(self, None)
        self.engine: Any = None
        self.mapped_copies: MappedCopies | None = None
        self.on_all_dead: Callable[[], None] | None = None
        self.minds_deaths = True
        self._alive = 0
        self._deaths = 0
        self._unit_count = 0
        self.prefetcher = Prefetcher(tiers, order.trace, order.next_use, self.units)

    # -- life ------------------------------------------------------------------------------------------------------

    def parameter_registered(self) -> None:
        with self.lock:
            self._alive += 1

    def parameter_dropped(self, _: Any) -> None:
        """A parameter was deleted. May run at any time, in any thread: only count, and end a pager that shows
        nothing."""
        self._alive -= 1
        self._deaths += 1
        if self._alive == 0 and self.on_all_dead is not None and self.lock.acquire_idle():
            try:
                self.on_all_dead()
            finally:
                self.lock.release()

    def ignore_deaths(self) -> None:
        """From now on nothing happens when parameters, modules or calls die: the engine has ended, or the process ends.

        The interpreter empties modules on its way out, in an order of its own. What runs when an object dies then finds
        None in the place of every function and class.
        """
        self.on_all_dead = None
        self.minds_deaths = False

    def new_unit_index(self) -> int:
        """A number that no unit of this pager ever had."""
        self._unit_count += 1
        return self._unit_count - 1

    def _free_dead_units(self) -> None:
        """Give back what units hold of which every parameter was deleted (a replaced head, merged adapters)."""
        self._deaths = 0
        for unit in list(self.units):
            blocks = unit.blocks()
            if any(handle.tensor is not None for handle in unit.handles) or any(block.leases for block in blocks):
                continue
            self.units.remove(unit)
            if self.gradients is not None:
                self.gradients.forget(unit)
            for block in blocks:
                self.tiers.remove(block)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def memory_of(self, block: Block | None) -> ShownMemory:
        """In which memory a block's tensors show its bytes: the pager's, except while a model is built on the CPU that
        is to compute elsewhere."""
        owner = block.owner if block is not None else None
        return owner.memory if isinstance(owner, BlockView) else self.memory

    def memory_on(self, device: torch.device) -> ShownMemory:
        """The memory in which a tensor on ``device`` is shown."""
        return self._arena if device == self._arena.device else self.memory

    def pin(self, slot: TensorSlot) -> None:
        """Make a tensor's bytes resident, visible and immovable until :meth:`unpin`."""
        pinned = False
        try:
            with self.lock:
                self.catch_up(slot.unit)
                block = self._block_of(slot)
                self.order.stamp(block)
                self.memory_of(block).acquire(block)
                pinned = True
                owner = block.owner
                if isinstance(owner, BlockView):
                    owner.install()
        except BaseException:
            if pinned:  # an interrupt that was held back: the caller will not unpin what it never got
                self.unpin(slot)
            raise

    def unpin(self, slot: TensorSlot) -> None:
        with self.lock:
            if slot.block is not None and self.closed_because is None:
                self.memory_of(slot.block).release(slot.block)

    def will_change(self, slot: TensorSlot) -> None:
        """Call before the resident bytes of a slot change."""
        with self.lock:
            block = self._block_of(slot)
            self.memory_of(block).will_change(block)

    def hold_until_step(self, slot: TensorSlot) -> None:
        """Keep a tensor resident until the step ends, where autograd saves it by reference and no door sees it."""
        with self.lock:
            self.catch_up(slot.unit)
            block = self._block_of(slot)
            self.memory_of(block).acquire(block)
            self._held.append(block)
            if isinstance(block.owner, BlockView):
                block.owner.install()

    def release_held(self) -> None:
        with self.lock:
            for block in self._held:
                self.memory_of(block).release(block)
            self._held.clear()

    def _block_of(self, slot: TensorSlot) -> Block:
        if self.closed_because is not None:
            raise ClosedError(f"{slot.name} belongs to a closed engine: {self.closed_because}")
        if slot.block is None:
            raise RuntimeError(f"{slot.name} has no block")
        return slot.block

    def remember_storage(self, slot: TensorSlot) -> None:
        if slot.storage is not None:
            self.storages[slot.storage._cdata] = slot

    def forget_storage(self, slot: TensorSlot) -> None:
        if slot.storage is not None:
            self.storages.pop(slot.storage._cdata, None)

    # -- order of uses ---------------------------------------------------------------------------------------------

    def catch_up(self, unit: Unit | None) -> None:
        """Make the optimizer step that a unit may still have to make. Every use of its weights begins with this."""
        if unit is not None and unit.pending is not None and self.closed_because is None:
            with self.lock:
                pending = unit.pending  # asked again: another thread may have made the step meanwhile
                alive = [handle.tensor for handle in unit.handles]  # held, so that the unit is not buried meanwhile
                if pending is not None and any(tensor is not None for tensor in alive):
                    pending.apply(unit)
                else:
                    unit.pending = None

    def catch_up_all(self) -> None:
        """Make what is left of every optimizer step."""
        for unit in list(self.units):
            self.catch_up(unit)

    def use_forward(self, units: list[Unit]) -> None:
        """The program enters the forward of ``units``."""
        for unit in units:
            if unit.pending is not None:
                self.catch_up(unit)
        if self.is_fully_resident():
            return
        self._event((Phase.FORWARD, tuple(u.index for u in units)), tuple(u.weights.id for u in units))

    def note_use(self, slot: TensorSlot) -> None:
        """The program uses a weight outside of any window."""
        self.shared_by_threads()
        if isinstance(slot, ParamHandle) and slot.unit is not None:
            self.use_forward([slot.unit])

    def pin_for_backward(self, handle: ParamHandle) -> None:
        """Pin a weight for backward, noting the order of use."""
        if handle.unit is not None:
            self.use_backward(handle.unit)
        self.pin(handle)

    def forget_casts(self) -> None:
        """A backward is running: what casts weights from now on is another forward."""
        if self.cast_by:
            self.cast_by.clear()

    def use_backward(self, unit: Unit) -> None:
        self.forget_casts()
        if unit is self.order.backward_of or self.is_fully_resident():
            return
        gradients = () if unit.gradients is None else (unit.gradients.id,)
        self._event((Phase.BACKWARD, (unit.index,)), (unit.weights.id, *gradients), backward_of=unit)

    def use_update(self, unit: Unit, piece: int, blocks: tuple[int, ...]) -> None:
        """The optimizer comes to a piece of a unit's state."""
        self._event((Phase.UPDATE, (unit.index, piece)), blocks)

    def end_of_step(self) -> None:
        """An optimizer step is finished: the recorded order becomes the cycle."""
        with self.lock:
            self.release_held()
            if self.tiers.timeline is not None:
                self.tiers.timeline.end_of_step()
            self.order.end_of_step()
            SHIELD.refresh()
            if self.closed_because is None:
                self.pump()
                self.prefetcher.end_of_step()

    def is_fully_resident(self) -> bool:
        """True when an event teaches nothing, because nothing ever moves."""
        return self.memory.all_stay() and self.tiers.timeline is None and not self._deaths and not self.evict_always

    def _event(self, key: UseKey, blocks: tuple[int, ...], backward_of: Unit | None = None) -> None:
        if key == self.order.last_key:
            return
        with self.lock:
            if self.closed_because is not None:
                return
            if self._deaths:
                self._free_dead_units()
            if self.tiers.timeline is not None:
                self.tiers.timeline.phase(phase_name(key, self.units))
            self.order.observe(key, blocks, backward_of)
            self.pump(set(blocks))

    def pump(self, in_use: set[int] | frozenset[int] = frozenset()) -> None:
        """Collect what completed, write behind, fetch ahead. Called at every event; costs microseconds."""
        tiers = self.tiers
        if self.evict_always:
            self.memory.evict_all(in_use)
            for block in list(tiers.blocks()):
                if block.id not in in_use:
                    tiers.evict(block)
            return
        if not self.prefetch or (self.memory.all_stay() and not tiers.transfers.in_flight()):
            return  # the serial reference; or everything stays in memory
        self.prefetcher.pump(in_use)
        self.memory.pump(self.order.trace.upcoming(), in_use)

    # -- saved-tensor hooks ----------------------------------------------------------------------------------------

    def push_hooks(self, *, always: bool = False) -> bool | None:
        """Push our saved-tensor hooks unless they are on top.

        Nor where nothing will ever be moved: what autograd keeps of a weight then stays right without us, and an update
        moves the weight's version, by which autograd sees that it no longer is. Not so under autocast, whose narrower
        copies of weights are a second copy of the model.

        Args:
            always: also there: more than weights may be saved.

        Returns True when pushed, False when that is not needed, None when the program has disabled such hooks.
        """
        if not always and self.memory.all_stay() and not torch.is_autocast_enabled(self.memory.device.type):
            self.graphs.unhooked = True
            return False
        if not saved_tensors_hooks_enabled():
            return None
        top = top_saved_tensors_hooks(True)
        if top is None:
            hooks = self._hooks_alone
        else:
            mine = getattr(top[0], "__self__", None)
            if type(mine) is SavedTensorHooks and mine.pager is self:
                return False
            hooks = SavedTensorHooks(self, top)
        self._local.pushed.append(hooks)  # in this order: what an interrupt leaves is found and undone
        push_saved_tensors_hooks(hooks.pack, hooks.unpack)
        return True

    def pop_hooks(self) -> None:
        """Undo one :meth:`push_hooks` that returned True."""
        pop_saved_tensors_hooks()
        self._local.pushed.pop()

    def opened(self) -> list[Any]:
        """The windows that this thread is in, innermost last."""
        return self._local.opened

    def shared_by_threads(self) -> bool:
        """True from the moment on that one thread uses the models while another is in a window of theirs.

        Then no parameter is without its door again: inside a window the other thread would pass it unseen.
        """
        me = threading.get_ident()
        opened_by = self._opened_by
        opened_by[me] = self._local.opened
        if not self._shared and len(opened_by) > 1:
            others = [entry for thread, opened in opened_by.items() if thread != me for entry in opened]
            if others:
                with self.lock:
                    self._shared = True
                    for entry in others:
                        entry.window.show_doors(entry)
        return self._shared

    def close_leaked(self) -> None:
        """Close what an interrupted forward (Ctrl-C) left open on this thread; torch runs no post hooks for it.

        To be called where no forward of these models is running on this thread.
        """
        with self.lock:
            self._forget_foreign_hooks()
            while self._local.opened:
                entry = self._local.opened.pop()
                entry.window.close(entry)
            while self._local.pushed:
                self.pop_hooks()

    def close_stale(self) -> None:
        """The same where a forward may be running: close the calls whose frames are no longer on this thread's
        stack."""
        running = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        with self.lock:
            opened = self._local.opened
            while opened and (opened[-1].over or opened[-1].frame_id not in running):
                self._forget_foreign_hooks()
                entry = opened.pop()
                entry.window.close(entry)

    def _forget_foreign_hooks(self) -> None:
        if self._local.pushed and saved_tensors_hooks_enabled():
            top = top_saved_tensors_hooks(True)
            if top is None or getattr(top[0], "__self__", None) is not self._local.pushed[-1]:
                # Somebody else has tidied the stack already, or has pushed over ours: leave torch's stack alone.
                for entry in self._local.opened:
                    entry.pushed = False
                self._local.pushed.clear()

    def refuse_closed(self, name: str) -> None:
        raise ClosedError(f"{name or 'the model'} belongs to a closed engine: {self.closed_because}")
