"""The pager: brings the bytes of units when the program uses them.

It is what the doors and windows talk to. It owns the units and composes the parts that paging consists of: the order of
uses, what runs now, autocast's casts, life and death, the prefetcher. The bytes themselves belong to the tier manager.

[Note: deferred updates] ``optimizer.step()`` need not update a weight; it can decide on the update. Each unit that has
gradients then gets a ``pending`` update, with the learning rate, the clip factor and the step count of that moment, and
makes it right before its next use. Weights are then read from NVMe once for both, and the update of one unit overlaps
with the transfers of the next. For example, with layers 0 to 9::

    optimizer.step()              # decides: layers 0 to 9 have a pending update; nothing is read
    optimizer.zero_grad()         # the gradients are handed over: the program sees none, the updates still do
    model(batch)                  # entering layer 0: read it, update it, compute with it; then layer 1, ...
    print(model.layers[9].weight) # its update would come later; the door makes it first

So nobody can tell a deferred update from one that was made at once, except by the time it takes. That rests on one
rule: *everything* through which a program could see or change a unit's weights, gradients or state calls
:meth:`Pager.catch_up` first. These are ``pin``, ``use_forward``, the forward door, gradients that land or are
assigned, and copies for state dicts; the next step and an optimizer's ``state_dict()`` call ``catch_up_all``. The
weight's version moves when the update is decided on, so that graphs that autograd keeps are refused as if it had been
made (``ParamHandle.count_update``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from deepoffload.copies.shown import HostMemory, ShownMemory
from deepoffload.errors import BudgetError, UnsupportedError
from deepoffload.io.mapped_origin import MappedOrigins
from deepoffload.machine import FreedMemory
from deepoffload.memory.block import Block
from deepoffload.memory.lock import SHIELD
from deepoffload.memory.no_room import BudgetFor
from deepoffload.memory.tier_manager import TierManager
from deepoffload.params.casts import CastCache
from deepoffload.params.graph_modes import refuse_capture
from deepoffload.params.held import HeldUntilStep
from deepoffload.params.hook_stack import HookStack
from deepoffload.params.layout import ALIGNMENT_BYTES, DEVICE_ALIGNMENT_BYTES
from deepoffload.params.lifetime import Lifetime
from deepoffload.params.mapped import MappedCopies
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.ports import CommitPort, GradientDoor, PagerOwner, RankPort
from deepoffload.params.prefetcher import Prefetcher
from deepoffload.params.slot import TensorSlot
from deepoffload.params.unit import BlockView, ParamHandle, Unit
from deepoffload.params.use_order import UseOrder, phase_name
from deepoffload.schedule.events import Event, Phase, UseKey
from deepoffload.schedule.placement import Placement
from deepoffload.schedule.small import is_small


class Pager:
    """Composes what paging consists of, and is what doors, windows and updates call.

    It has more attributes than other classes, because each of these parts is one.

    Args:
        tiers: the arena and the blocks.
        order: of uses, by which ``tiers`` decides what leaves.
        graphs: those of autograd, which ``order`` tells of what leaves.
        memory: in which tensors show their bytes; the arena when None.
        engine: whose models these are; None for a pager that only plans.
        prefetch: False for the serial reference: every transfer is waited for where it is needed.
        evict_always: evict everything that may leave after every use (tests).
        defer_updates: an optimizer step updates each unit right before its next use, instead of all at once.
        link: joins this rank with the others, of which each keeps a part of every unit; None with one rank.
        inference: nothing is trained: every parameter is frozen when it is adopted, and stays so.

    Attributes:
        alignment_bytes: each weight of a unit begins at a multiple of these.
        units: of all models.
        storages: the slots whose tensors show their bytes now, by the address of the storage.
        gradients: what stands behind ``param.grad``; None while the models are being built.
        hooks: what runs now on each thread.
        casts: what autocast's cache may hold.
        freed: gives memory back while backward goes on; None where nothing lives long between what is let go of.
        life: what is alive, and whether all is over.
        commits: what makes steps durable; None where nothing does.
        origins: find what is registered in checkpoints; None where all is copied.
        partial: ids of blocks of which only some bytes are in memory, for a call that needs no others.
        routed: ids of blocks of which the last call needed a few experts. They are not fetched ahead.
        mapped_copies: of weights, for values of state dicts that were asked for an address.
    """

    def __init__(
        self,
        tiers: TierManager,
        order: UseOrder,
        graphs: OpenGraphs,
        memory: ShownMemory | None = None,
        engine: PagerOwner | None = None,
        *,
        prefetch: bool = True,
        evict_always: bool = False,
        defer_updates: bool = False,
        link: RankPort | None = None,
        inference: bool = False,
    ) -> None:
        self.tiers = tiers
        self.lock = tiers.lock
        self._arena = HostMemory(tiers)
        self.memory: ShownMemory = self._arena if memory is None else memory
        self.alignment_bytes = ALIGNMENT_BYTES if self.memory.device.type == "cpu" else DEVICE_ALIGNMENT_BYTES
        self.order = order
        self.graphs = graphs
        self.engine = engine
        self.prefetch = prefetch
        self.evict_always = evict_always
        self.defer_updates = defer_updates
        self.link = link
        self.inference = inference
        self.origins: MappedOrigins | None = None
        self.partial: set[int] = set()
        self.routed: set[int] = set()
        self.units: list[Unit] = []
        self.storages: dict[int, TensorSlot] = {}
        self.gradients: GradientDoor | None = None
        self.life = Lifetime(tiers.lock, engine)
        self.casts = CastCache()
        self.freed: FreedMemory | None = None
        self.hooks = HookStack(self, self.memory, tiers.lock, graphs)
        not_ahead = self.routed if inference else None
        self.prefetcher = Prefetcher(tiers, order.trace, order.next_use, self.units, not_ahead=not_ahead)
        self.commits: CommitPort | None = None
        self.mapped_copies = MappedCopies(None if tiers.space is None else str(tiers.space.paths[0]))
        self.held = HeldUntilStep(self.memory_of)

    # -- life ------------------------------------------------------------------------------------------------------

    def assembled(self) -> None:
        """The models are built: from now on their gradients land. What construction used and freed goes back to the
        system."""
        if not self.tiers.poison:
            self.tiers.arena.give_back_holes()
        if self.engine is not None:
            self.gradients = self.engine.gradients

    def placed(self, placement: Placement, budget_for: BudgetFor | None = None) -> None:
        """The models have their placement: the memory's errors show it, and name budgets that ``budget_for`` finds; and
        plans follow it."""
        self.tiers.placed(placement, budget_for)
        self.prefetcher.placed(placement)

    def adopt_late(self, param: Tensor, name: str) -> ParamHandle | None:
        """Page a parameter that no registration hook has seen; None when that cannot be done."""
        return None if self.engine is None else self.engine.adopt_late(param, name)

    def close(self, because: str) -> None:
        """The bytes go: every use of a parameter raises ClosedError from now on, and open graphs are refused."""
        self.hooks.close_leaked()
        self.life.close(because)
        self.life.ignore_deaths()
        self.graphs.refuse_all(self.units)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def memory_of(self, block: Block | None) -> ShownMemory:
        """In which memory a block's tensors show its bytes: the pager's, except while a model is built on the CPU that
        is to compute elsewhere."""
        owner = block.owner if block is not None else None
        return owner.memory if isinstance(owner, BlockView) else self.memory

    def memory_on(self, device: torch.device) -> ShownMemory:
        """The memory in which a tensor on ``device`` is shown."""
        return self._arena if device == self._arena.device else self.memory

    def pin(self, slot: TensorSlot, together: Sequence[TensorSlot] = ()) -> None:
        """Make a tensor's bytes resident, visible and immovable until :meth:`unpin`.

        Raises:
            BudgetError: there is no room. The budget that it names holds all that are pinned ``together``.
            UnsupportedError: the program captures a graph of the device.
        """
        pinned = False
        if not self.memory.on_host:
            refuse_capture(self.memory)
        try:
            with self.lock:
                self.catch_up(slot.unit)
                block = self._block_of(slot)
                self.refuse_partial(block)
                self.order.stamp(block)
                if together:
                    with self.order.taking(together):
                        self.memory_of(block).acquire(block)
                else:
                    self.memory_of(block).acquire(block)
                pinned = True
                owner = block.owner
                if isinstance(owner, BlockView):
                    owner.install()
        except BaseException:
            if pinned:  # an interrupt that was held back: the caller will not unpin what it never got
                self.unpin(slot)
            raise

    def refuse_partial(self, block: Block) -> None:
        """Raise where only the experts that a running call of their module needs are in memory."""
        if block.id in self.partial:
            raise UnsupportedError(
                f"{block.name} is used while a call of its module is running for which only the routed experts were "
                "read: by another thread, or from a hook of a module in it"
            )

    def unpin(self, slot: TensorSlot) -> None:
        with self.lock:
            if slot.block is not None and self.life.closed_because is None:
                self.memory_of(slot.block).release(slot.block)

    def will_change(self, slot: TensorSlot) -> None:
        """Call before the resident bytes of a slot change."""
        with self.lock:
            block = self._block_of(slot)
            self.memory_of(block).will_change(block)

    def hold_until_step(self, slot: TensorSlot) -> None:
        """Keep a tensor resident until the step that updates it, where autograd saves it by reference and no door sees
        it."""
        with self.lock:
            self.catch_up(slot.unit)
            block = self._block_of(slot)
            self.held.take(slot, block)
            if isinstance(block.owner, BlockView):
                block.owner.install()

    def _block_of(self, slot: TensorSlot) -> Block:
        if self.life.closed_because is not None:
            self.life.refuse_closed(slot.name)
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
        if unit is not None and unit.pending is not None and self.life.closed_because is None:
            with self.lock:
                self._await_readers(unit)
                pending = unit.pending  # asked again: another thread may have made the step meanwhile
                alive = [handle.tensor for handle in unit.handles]  # held, so that none dies during its update
                if pending is not None and any(tensor is not None for tensor in alive):
                    # What another rank wants may need the update of another unit: not in the middle of this one.
                    with nullcontext() if self.link is None else self.link.hold():
                        pending.apply(unit)
                else:
                    unit.pending = None

    def _await_readers(self, unit: Unit) -> None:
        """Other ranks may be reading a unit that is about to change. What has been launched lands meanwhile, which it
        cannot do in the middle of an update."""
        if self.link is not None and not self.link.is_held and self.tiers.copies is not None:
            for block in unit.blocks():
                if block.copying:
                    self.tiers.copies.end_copies(block)

    def catch_up_all(self, *, guesses: bool = True) -> None:
        """Make what is left of every optimizer step. ``guesses``: also undo updates for which no step was asked yet."""
        for unit in list(self.units):
            if guesses or not unit.is_guessed:
                self.catch_up(unit)

    def undo_guesses(self) -> None:
        """Undo the updates for which no step was asked yet. They keep disk space, which new blocks may need."""
        for unit in list(self.units):
            if unit.is_guessed:
                self.catch_up(unit)

    def use_forward(self, units: list[Unit], *, is_call: bool = True) -> None:
        """The program enters the forward of ``units``, or looks at a weight (``is_call`` is False)."""
        key = Phase.FORWARD, tuple(unit.index for unit in units)
        if self.link is not None:
            self.link.on_forward(key[1])
        if is_call and self.defer_updates and key != self.order.last_key:
            self._catch_up_left_out(key)
        for unit in units:
            if unit.pending is not None:
                self.catch_up(unit)
        if self.is_fully_resident():
            return
        self._event(key, tuple(u.weights.id for u in units))

    def _catch_up_left_out(self, comes: UseKey) -> None:
        """Make the updates of units that were to run before this one, and do not in this step, where their state has
        come ahead: it would have to leave, and to come once more at the end of the step."""
        if not self.prefetch or self.evict_always or self.link is not None or self.hooks.turns is not None:
            return
        left_out = self.order.trace.left_out_before(comes)
        if not left_out:
            return
        units = [unit for unit in self.units if unit.index in left_out and self._has_come_ahead(unit)]
        if units:
            with self.lock:
                self.order.trace.leave_out(comes, [unit.index for unit in units])
        for unit in units:
            with suppress(BudgetError):  # then it comes at the end of the step
                self.catch_up(unit)

    def _has_come_ahead(self, unit: Unit) -> bool:
        """Whether a unit has an update to make, and its state has been read for that, or is being read."""
        if unit.pending is None or unit.is_guessed:
            return False
        blocks = [piece.block.id for piece in unit.pieces if piece.block.id not in self.tiers.static]
        return any(not self.tiers.is_away(block) for block in blocks)

    def expect(self, calls: Iterable[Sequence[Unit]]) -> None:
        """No order of uses is known yet. The units of each call are probably used in this order: fetch them so. Small
        ones that stay come first: norms are seldom registered where they are used."""
        if not self.prefetch or self.evict_always:
            return
        events: list[Event] = []
        largest_bytes = max((unit.weights.room_bytes for unit in self.units), default=0)
        for every in calls:
            units = []
            for unit in every:
                if unit.weights.id in self.tiers.static and is_small(unit.weights.room_bytes, largest_bytes):
                    self.tiers.prefetch(unit.weights)
                else:
                    units.append(unit)
            event = Event((Phase.FORWARD, tuple(u.index for u in units)), tuple(u.weights.id for u in units))
            if units and (not events or events[-1].key != event.key):
                events.append(event)
        if len(events) > 1 and events[0].key == events[-1].key:
            events.pop()  # the next pass begins with the same use: that is no event
        with self.lock:
            self.order.trace.guess(events)
            self.pump()
            if self.memory.all_stay():
                for block in list(self.tiers.blocks()):  # nobody plans for them any more
                    self.tiers.prefetch(block)

    def note_use(self, slot: TensorSlot) -> None:
        """The program uses a weight outside of any window."""
        self.hooks.shared_by_threads()
        if isinstance(slot, ParamHandle) and slot.unit is not None:
            self.use_forward([slot.unit], is_call=False)

    def pin_for_backward(self, handle: ParamHandle) -> None:
        """Pin a weight for backward, noting the order of use."""
        if handle.unit is not None:
            self.use_backward(handle.unit)
        self.pin(handle)

    def use_backward(self, unit: Unit) -> None:
        """Backward comes to a unit, or a gradient of it lands."""
        if self.freed is not None:
            self.freed.look()
        if self.casts.left:
            self.casts.forget()
        if unit is self.order.backward_of or self.is_fully_resident():
            return
        grad = unit.gradients
        gradients = () if grad is None or self.memory.keeps(grad) else (grad.id,)
        self._event((Phase.BACKWARD, (unit.index,)), (unit.weights.id, *gradients), backward_of=unit)

    def use_update(self, unit: Unit, piece: int, blocks: tuple[int, ...]) -> None:
        """The optimizer comes to a piece of a unit's state."""
        self._event((Phase.UPDATE, (unit.index, piece)), blocks)

    def end_of_step(self, optimizer: object) -> None:
        """A step of ``optimizer`` is finished: the recorded order becomes the cycle."""
        with self.lock:
            self.held.end_of_step(optimizer)
            if self.tiers.timeline is not None:
                self.tiers.timeline.end_of_step()
            self.order.end_of_step()
            SHIELD.refresh()
            if self.life.closed_because is None:
                self.pump()
                self.prefetcher.end_of_step()

    def updates_hide_nothing(self) -> bool:
        """Whether a deferred update would overlap with no transfer: everything stays in memory, where the CPU computes.
        With several ranks that is said of what this rank owns: what is updated at once can be gathered before it is
        used."""
        in_arena = self.link is not None and not self.memory.device_bytes
        return self.tiers.all_stay() if in_arena else self.memory.all_stay()

    def is_fully_resident(self) -> bool:
        """True when an event teaches nothing, because nothing ever moves."""
        return self.memory.all_stay() and self.tiers.timeline is None and not self.life.deaths and not self.evict_always

    def _event(self, key: UseKey, blocks: tuple[int, ...], backward_of: Unit | None = None) -> None:
        if key == self.order.last_key:
            return
        if self.hooks.turns is not None and key == self.order.key_before:
            return  # micro-batches that take turns go into their last unit and out of it, one after the other
        with self.lock:
            if self.life.closed_because is not None:
                return
            if self.life.deaths and self.link is None:  # several ranks forget a unit together
                self.life.free_dead_units(self.units, self.tiers, self.gradients)
            if self.tiers.timeline is not None:
                self.tiers.timeline.phase(phase_name(key, self.units))
            self.order.observe(key, blocks, backward_of)
            self.pump(set(blocks))

    def pump(self, in_use: set[int] | frozenset[int] = frozenset()) -> None:
        """Collect what completed, write behind, fetch ahead. Called at every event; costs microseconds."""
        tiers = self.tiers
        if self.evict_always:
            self.memory.evict_all(in_use)
            for block in [one for one in tiers.blocks() if one.offset is not None and one.id not in in_use]:
                tiers.evict(block)
            return
        if not self.prefetch or (self.memory.all_stay() and not tiers.transfers.in_flight()):
            if self.link is not None:
                self.memory.pump((), in_use)  # other ranks are served, and nothing is brought
            return  # the serial reference; or everything stays in memory
        self.prefetcher.pump(in_use)
        if self.commits is not None:
            self.commits.pump()
        self.memory.pump(self.order.trace.upcoming(), in_use)
