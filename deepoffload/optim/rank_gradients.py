"""Gradients with several ranks: each rank's go into contributions, and the sums land in the ranks' shards.

Autograd's gradient of a parameter is this rank's part of it. What stands behind ``param.grad`` is the mean over ranks:
the parts of all ranks, added up in fp32 in the order of ranks, each times 1 / ranks. Each rank keeps its runs of it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.copies.payload_numbers import FIRST_LATE_INDEX, gradients_number, late_index
from deepoffload.copies.rank_link import RankLink
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.memory.block import Block
from deepoffload.native import cpu_adam
from deepoffload.optim import outside_gradient
from deepoffload.optim.contribution_layout import CARRIER, MORE, PRESENT, RESUMED, ContributionLayout
from deepoffload.optim.contributions import Contributions
from deepoffload.optim.dtypes import NATIVE_DTYPES
from deepoffload.optim.gradient_state import GradientOwner, GradientRecord, GradientSlot, GradientState
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.gradients_out import GradientsOut
from deepoffload.optim.lands import owner_of, trained_of
from deepoffload.optim.rank_in_backward import RankEarlyUpdates
from deepoffload.optim.rank_state import RankState
from deepoffload.optim.state import ensure_pieces
from deepoffload.optim.threads import num_threads
from deepoffload.params.cut import Place, cuts_of
from deepoffload.params.pager import Pager
from deepoffload.params.shards import FlatTensor, shard_layout
from deepoffload.params.torch_private import get_grad, set_grad
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.ranks.exchange import PartsFlight
from deepoffload.ranks.sums import mean_scale
from deepoffload.schedule.placement import BlockKind
from deepoffload.timeline import Lane


def shared_state_of(pager: Pager) -> RankState | None:
    """The optimizer state of several ranks; None with one."""
    gradients = pager.gradients
    return gradients.shared_state if isinstance(gradients, RankGradients) else None


@dataclass
class _Sum:
    """Of the squares of what one parameter's landing has left in this rank's shard."""

    total: int = 0
    non_finite: bool = False


class RankGradients(Gradients):
    """All gradients of one pager's parameters, of which this rank keeps its runs. It has many methods, because its base
    has: some are done otherwise, and some are what contributions ask.

    Args:
        in_backward: units are updated inside backward.

    Attributes:
        contributions: this rank's gradients on their way to their owners.
        stepped: the parameters whose gradient has made a step, and has not begun again since.
        has_joined: this rank has no batches, and serves the others. [Note: joined] in ``joined_steps``.
        has_warned_of_idle: it has been said that a rank makes a step without a backward.
        met_before: what this rank holds since it met the others for a step of theirs; None where it meets them itself.
        frozen_elsewhere: then, names of the parameters that they have frozen.
        shared_state: what the ranks have of the optimizer's state.
    """

    def __init__(self, pager: Pager, link: RankLink, *, in_backward: bool = False) -> None:
        early = RankEarlyUpdates() if in_backward else None
        super().__init__(pager, early=early)
        self.early: RankEarlyUpdates | None = early
        self.in_fp32 = True
        self.link = link
        self.ranks = link.ranks
        memory = pager.memory
        out = GradientsOut(memory.link) if isinstance(memory, CopyMemory) and memory.device_bytes else None
        self.contributions = Contributions(link, pager.tiers, self, out)
        self.stepped: set[ParamHandle] = set()
        self.has_joined = False
        self.has_warned_of_idle = False
        self.met_before: ExitStack | None = None
        self.frozen_elsewhere: frozenset[str] = frozenset()
        self.shared_state = RankState(pager, link)
        self._dropped: dict[int, Block] = {}  # gradients that slower ranks may still look at, by the block's id

    # -- set-up ----------------------------------------------------------------------------------------------------

    def track(self, handle: ParamHandle) -> None:
        """As above.

        Raises:
            UnsupportedError: the parameter is trained, and its gradient cannot be added up over ranks.
        """
        param = handle.tensor
        if param is not None and param.requires_grad and handle.dtype not in NATIVE_DTYPES:
            raise UnsupportedError(
                f"{handle.name} is {handle.dtype}: with several ranks the gradients of float32, bfloat16 and float16 "
                "parameters are added up. Freeze it (requires_grad_(False)), or convert it"
            )
        is_new = not self.is_tracked(handle)
        super().track(handle)
        unit, record = handle.unit, self._record(handle)
        if is_new and record.hook is not None and unit is not None and record.slot is not None:
            if record.slot.block in unit.late_gradients:
                ensure_pieces(self.tiers, handle)
                handle.master_stale = True  # frozen weights have no remainder: the master starts as what the weight is

    def give_block(
        self, block: Block, handles: list[ParamHandle], places: Sequence[Place], dtypes: list[torch.dtype]
    ) -> None:
        """As above; a gather of the block shows what has been reduced before."""
        super().give_block(block, handles, places, dtypes)
        if isinstance(block.owner, GradientOwner):
            block.owner.lands = lambda: self.contributions.land_before_gather(block)

    def forget(self, unit: Unit) -> None:
        """As above."""
        super().forget(unit)
        self.stepped.difference_update(unit.handles)
        self.contributions.forget(unit)

    def _late(self, handle: ParamHandle) -> None:
        """Room for the gradients of all parameters that were frozen when the unit was made. They are cut as the weights
        are, so that each rank has the gradients of what it updates: a part of them alone would be cut otherwise."""
        unit = handle.unit
        if unit is None or unit.layout is None:
            raise RuntimeError(f"{handle.name} is not cut for several ranks")
        handles = [h for h in unit.handles if self._record(h).slot is None and h.dtype in NATIVE_DTYPES]
        tensors = [FlatTensor(h.numel, torch.float32.itemsize, h.dtype) for h in handles]
        layout = shard_layout(tensors, self.ranks.world_size)
        cuts = cuts_of(layout, self.ranks.rank)
        forms = tuple(cut.form() for cut in cuts)
        name = f"{unit.name}.late_gradients"
        block = self.tiers.create(name, BlockKind.GRADIENT, layout.shard_nbytes, None, forms, layout.whole_nbytes)
        self.give_block(block, handles, cuts, [torch.float32] * len(handles))
        names = [f"{h.name}.grad" for h in unit.handles]
        assert isinstance(self.pager.memory, CopyMemory), "it shows what several ranks store"
        try:
            self.pager.memory.serve(block, gradients_number(late_index(unit.index)), layout.sections, names)
            self.contributions.reserve_late(unit, block, layout)
        except BaseException:
            for h in handles:
                self._record(h).slot = None
            self.tiers.remove(block)
            raise
        unit.late_gradients.append(block)

    def not_trained(self, unit_index: int) -> UnsupportedError:
        """What is raised where another rank has a gradient of what is frozen here."""
        unit = next((unit for unit in self.pager.units if unit.index == unit_index % FIRST_LATE_INDEX), None)
        frozen = () if unit is None else (handle.name for handle in unit.handles if not self.is_tracked(handle))
        name = next(iter(frozen), f"block {unit_index}")
        return UnsupportedError(
            f"{name} is frozen on rank {self.ranks.rank}, and another rank trains it or a parameter next to it: "
            "unfreeze (requires_grad_(True)) the same parameters on all ranks, in the same place of the program"
        )

    # -- landing ---------------------------------------------------------------------------------------------------

    def land(self, param: Tensor, handle: ParamHandle) -> None:
        """Take what autograd has just put into ``param.grad`` as this rank's part of the gradient.

        Raises:
            UnsupportedError: ``.grad`` holds a tensor of the program's, or the gradient is sparse, of another type than
                the parameter, or has a graph.
            UsageError: the parameter was updated in this backward already.
        """
        record, unit, pager = self._records[handle], handle.unit, self.pager
        grad = get_grad(param)
        if grad is None or unit is None:
            return
        self._check(record, grad)
        if self.early is not None and self.early.is_used(handle):
            self._refuse_more(self.early, handle)
        record.changed_at = self.changes = self.changes + 1
        if unit.pending is not None:
            pager.catch_up(unit)
        with pager.lock:
            pager.use_backward(unit)
            is_complete = self.contributions.take(handle, grad)
            set_grad(param, None)
            if self.early is not None:
                if is_complete:
                    self.early.given(unit)
                self._make_undisturbed(self.early)
            elif self.speculation is not None:
                self.speculation.landed(handle)
            if pager.evict_always:
                pager.pump()

    def _make_undisturbed(self, early: RankEarlyUpdates) -> None:
        """Make the updates inside backward of units that no other rank reads now. The others are made later, so that
        backward does not wait for readers."""
        if early.decided and isinstance(self.pager.memory, CopyMemory):
            self.pager.memory.transfers.poll()
        while early.decided and not any(block.copying for block in early.decided[0].blocks()):
            self.pager.catch_up(early.decided.popleft())

    def _refuse_more(self, early: RankEarlyUpdates, handle: ParamHandle) -> None:
        """Raise on all ranks what one process raises where its last gradient was not the last one."""
        try:
            early.refuse_more(handle)
        except UsageError as error:
            self.link.fail(str(error))
            raise

    @staticmethod
    def _check(record: GradientRecord, grad: Tensor) -> None:
        handle, why = record.handle, ""
        if record.state is GradientState.USER:
            why = "is a tensor that the program has assigned: set it to None before backward"
        elif grad.layout is not torch.strided:
            why = "is sparse: make it dense (nn.Embedding(sparse=False))"
        elif grad.grad_fn is not None:
            why = "has a graph: leave create_graph=True out of backward"
        elif grad.dtype is not handle.dtype:
            why = f"is {grad.dtype}, and the parameter {handle.dtype}: let autograd choose the type"
        if why:
            raise UnsupportedError(f"{handle.name}.grad {why}. With several ranks gradients are added up over ranks")

    @property
    def adds_up(self) -> bool:
        """Whether this rank's program has said that another backward follows this one before the step."""
        return self.early is not None and self.early.paused

    @property
    def takes_turns(self) -> bool:
        """Whether micro-batches are in vertical order: their gradients of a unit come one after the other."""
        return self.pager.hooks.turns is not None

    def parts_come(self, block: Block) -> None:
        """Parts are on their way: the block is used next, though its event in backward may be over by then."""
        self.pager.order.landing.add(block.id)

    def before_landing(self, unit: Unit, block: Block) -> None:
        """Parts of a unit are about to land: what came before is used up, and what the program wrote is in the
        shard."""
        self.pager.catch_up(unit)
        if self.has_joined:
            self.drop_stepped(trained_of(block))
        self.pager.memory.settle(block)

    def land_parts(self, block: Block, layout: ContributionLayout, parts: PartsFlight, *, is_partial: bool) -> bool:
        """Add the parts of this rank's shard up in rank order, and note whose gradients were in them. Returns whether a
        rank says that others came between them."""
        owner = owner_of(block)
        sums = [_Sum() for _ in owner.records]
        there = bytearray(len(owner.records))
        begin_s = time.perf_counter()
        self.tiers.acquire(block, load=owner.holds_any())
        try:
            self.tiers.will_change(block)
            shard = self.tiers.address(block)
            for start, chunk in parts.chunks():
                begin = start * CARRIER.itemsize
                self._land_chunk(layout, owner.records, shard, begin, chunk, sums)
                first, last, offset = layout.presence_between(begin, begin + chunk[0].numel() * CARRIER.itemsize)
                for part in chunk:
                    said = ctypes.string_at(part.data_ptr() + offset - begin, last - first)
                    for number, present in enumerate(said, first):
                        there[number] |= present
        finally:
            self.tiers.release(block)
        if self.tiers.timeline is not None:
            self.tiers.timeline.add(Lane.LANDING, block.name, begin_s, time.perf_counter(), block.nbytes)
        self.changes += 1
        self.sums_landed += 1
        for record, found, bits in zip(owner.records, sums, there, strict=True):
            if bits & PRESENT:
                self._note(record, found)
        if self.early is not None and not is_partial:
            pairs = zip(owner.records, there, strict=True)
            self.early.sums_landed([r.handle for r, bits in pairs if bits & (PRESENT | MORE) == PRESENT])
        return any(bits & RESUMED for bits in there)

    def _land_chunk(
        self,
        layout: ContributionLayout,
        records: Sequence[GradientRecord],
        shard: int,
        begin: int,
        chunk: Sequence[Tensor],
        sums: Sequence[_Sum],
    ) -> None:
        sources = [part.data_ptr() - begin for part in chunk]
        for run in layout.runs_between(begin, begin + chunk[0].numel() * CARRIER.itemsize):
            total, non_finite = cpu_adam.land_parts(
                shard + run.shard_offset,
                [source + run.part_offset for source in sources],
                run.numel,
                dtype=run.dtype,
                scale=mean_scale(self.ranks.world_size),
                accumulate=records[run.tensor].state is GradientState.LANDED,
                num_threads=1 if run.numel <= cpu_adam.CHUNK else num_threads(),
            )
            sums[run.tensor].total += total
            sums[run.tensor].non_finite |= non_finite

    def _note(self, record: GradientRecord, found: _Sum) -> None:
        """One rank at least had a gradient of the parameter, so it has one on all of them."""
        if self.early is not None:
            self.early.refuse_more(record.handle)
        if record.state is GradientState.USER:
            raise UnsupportedError(
                f"{record.handle.name}.grad is a tensor that the program on rank {self.ranks.rank} has assigned, and "
                "another rank's backward adds to it: assign on all ranks or on none"
            )
        accumulated = record.state is GradientState.LANDED
        if not accumulated:
            self.stepped.discard(record.handle)
        record.landed((found.total, found.non_finite))
        record.changed_at = self.changes
        if accumulated and record.slot is not None:
            record.slot.added_to()

    def after_landing(self, block: Block, *, more_come: bool) -> None:
        """Parts of a unit have landed: copies of what was there before are wrong."""
        if not more_come:
            self.pager.order.landing.discard(block.id)
        self.pager.memory.refresh(block)

    # -- the .grad door --------------------------------------------------------------------------------------------

    def read(self, handle: ParamHandle) -> Tensor | None:
        """What ``param.grad`` shows: the mean over ranks. Waits for the parts of the others."""
        self._settle(handle)
        return super().read(handle)

    def assign(self, handle: ParamHandle, value: Tensor | None) -> None:
        """``param.grad = value``; None drops the gradient. What is under way of it lands before, on all ranks. Of one
        that an update inside backward uses all has landed."""
        if self.early is None or not self.early.is_used(handle):
            self._settle(handle)
        super().assign(handle, value)

    def _empty(self, record: GradientRecord) -> None:
        """As above. `[Note: dropped gradients]` A rank that is slower may look at them later, as this one did, and has
        to find this rank's part. So that stays until others land in its place, or all ranks are at a step."""
        memory, block = self.pager.memory, record.slot.block if record.slot is not None else None
        if block is None or not isinstance(memory, CopyMemory) or not memory.is_awaited(block):
            super()._empty(record)
            return
        record.dropped()
        if not owner_of(block).holds_any():
            memory.settle(block)
            memory.forget(block)
            self._dropped[block.id] = block

    def await_sums(self, handles: Iterable[ParamHandle]) -> None:
        """Return when all that is on its way of these gradients has landed, and has been used where it is used inside
        backward."""
        for handle in handles:
            self._settle(handle)
        self.make_decided()

    def make_decided(self) -> None:
        """Make the updates inside backward whose gradients have landed."""
        if self.early is not None:
            with self.pager.lock:
                self._make_decided(self.early)

    def all_launched(self) -> None:
        """All ranks are at a step, and have announced all gradients: land those, and make the updates that only waited
        for them."""
        self.contributions.land_launched()
        self.contributions.end_of_step()
        dropped, self._dropped = self._dropped, {}
        for block in dropped.values():
            if not owner_of(block).holds_any():
                self.tiers.transfers.discard_soon(block)
        self.make_decided()

    def _settle(self, handle: ParamHandle) -> None:
        if handle.unit is not None and self.pager.life.closed_because is None:
            self.contributions.settle(handle.unit)

    def is_coming(self, handle: ParamHandle) -> bool:
        """Whether a gradient of its unit has been taken from autograd, on this rank or another, and has not landed
        yet."""
        unit = handle.unit
        return unit is not None and self.pager.life.closed_because is None and self.contributions.is_under_way(unit)

    # -- without batches -------------------------------------------------------------------------------------------

    def drop_stepped(self, handles: Iterable[ParamHandle | None]) -> None:
        """Clear the gradients of those of ``handles`` that have made a step, as the other ranks' programs do."""
        for handle in handles:
            if handle is not None and handle in self.stepped:
                self.stepped.discard(handle)
                super().assign(handle, None)

    def state_of(self, handle: ParamHandle) -> GradientState:
        """Who holds the gradient."""
        return self._record(handle).state

    def was_edited(self, handle: ParamHandle) -> bool:
        """Whether the program has, or may have, changed a gradient that has landed."""
        record = self._record(handle)
        if record.slot is not None and record.slot.written():
            self.pager.will_change(record.slot)  # as where the squares are summed
        return record.state is GradientState.LANDED and record.sum_sq is None

    # -- the step --------------------------------------------------------------------------------------------------

    def sum_of_squares(self, handle: ParamHandle) -> tuple[int, bool]:
        """As above, of what this rank owns."""
        record = self._record(handle)
        if record.state is GradientState.LANDED:
            return super().sum_of_squares(handle)
        cut = record.slot.cut if record.slot is not None else None
        if cut is None:
            raise UnsupportedError(f"{handle.name}.grad cannot be shared between ranks: it was frozen at the start")
        run = cut.run()
        if run is None or get_grad(handle.tensor) is None:  # type: ignore[arg-type]
            return 0, False
        keep: list[Tensor] = []
        address, dtype = outside_gradient.address(handle, keep)
        address += run.start * keep[0].element_size()
        return cpu_adam.sum_of_squares(address, run.numel, dtype=dtype, num_threads=num_threads())

    def _measure(self, slot: GradientSlot) -> tuple[int, bool]:
        run = slot.cut.run() if slot.cut is not None else None
        if run is None:
            return 0, False
        address = slot.element_address(run.start)
        return cpu_adam.sum_of_squares(address, run.numel, dtype=NATIVE_DTYPES[slot.dtype], num_threads=num_threads())
