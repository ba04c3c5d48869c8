"""Building a model under a budget: parameters are adopted as they are registered, and become units when the context
ends.

While the model is built each parameter is a separate block and the least recently used ones are evicted. At the
end the units are found and placed, and each parameter's bytes move, once, into its unit's block, in the dtype it will
compute in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.io.mapped_origin import SourceRange
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native import cpu_adam
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.state import LAYOUTS, PieceView, whole_segment
from deepoffload.params.cut import Place, TensorCut
from deepoffload.params.layout import PieceSegment
from deepoffload.params.pager import Pager
from deepoffload.params.parameter import OffloadedParameter, plain_again
from deepoffload.params.shards import OwnedRun
from deepoffload.params.slot import dense_stride
from deepoffload.params.torch_private import get_data, outside_user_modes, version_of
from deepoffload.params.unit import PLAIN_FORMAT, ParamHandle, StateFormat, StatePiece, Unit, WeightView
from deepoffload.runtime.backing import backing_of, find_origin
from deepoffload.runtime.building import BuildingMemory, is_cut
from deepoffload.runtime.compute_types import KEEP_TYPES, ComputeTypes
from deepoffload.runtime.draft import UnitDraft, draft_unit
from deepoffload.schedule.placement import BlockKind, Placement


def adoptable(pager: Pager, param: Any) -> bool:
    """True for what paging takes: exactly ``nn.Parameter``, real bytes on the CPU or on the device that computes,
    dense, not complex."""
    return (
        type(param) is nn.Parameter
        and "_slot" not in param.__dict__
        and (param.device.type == "cpu" or param.device == pager.memory.device)
        and param.layout is torch.strided
        and not param.is_complex()
        and not param.is_quantized
        and param.numel() > 0
    )


def adopt(pager: Pager, param: Tensor, name: str, building: BuildingMemory | None = None) -> ParamHandle:
    """Make ``param`` a paged parameter in place: same object, its bytes copied into a separate block. ``building``:
    what several ranks keep while they build a model."""
    if pager.inference:
        param.requires_grad_(False)
    handle = ParamHandle(pager, name, param, param.dtype, dense_stride(param))
    origin = find_origin(pager.origins, param)
    if origin is not None:
        _lie_in(handle, origin)
        _show_stand_in(handle, param)
        handle.version = version_of(param)
        return handle
    memory, nbytes = pager.memory_on(param.device), handle.nbytes
    # On a device it stays what it is until the model is placed: modules fill it there, with that device's numbers.
    is_shared = building is not None and memory.device.type == "cpu" and is_cut(nbytes, building.world_size)
    if building is not None and is_shared:
        memory, nbytes = building, building.whole_nbytes(nbytes)
    owner = WeightView(pager, memory)
    owner.slots.append(handle)
    block = pager.tiers.create(name, BlockKind.WEIGHT, nbytes, owner)
    handle.bind_as_shown(block, 0)
    try:
        memory.acquire(block, load=False)
    except BaseException:
        _forget(handle)
        raise
    with outside_user_modes():
        handle.view().copy_(get_data(param))
    _show_stand_in(handle, param)
    owner.install()
    handle.version = version_of(param)
    memory.release(block)
    if building is not None and is_shared:
        building.registered(handle, block)
    return handle


def _show_stand_in(handle: ParamHandle, param: Tensor) -> None:
    """Give ``param`` the doors, and its stand-in."""
    with outside_user_modes():
        param.__class__ = OffloadedParameter
        param._slot = handle  # type: ignore[attr-defined]
        handle.uninstall()


def _lie_in(handle: ParamHandle, origin: SourceRange) -> None:
    """Give a parameter a block whose bytes a checkpoint has. None of them is read."""
    pager = handle.pager
    backing = backing_of([handle.name], [origin])
    if backing is None:
        raise RuntimeError(f"{handle.name}: one range of a file cannot overlap with itself")
    owner = WeightView(pager)
    owner.slots.append(handle)
    block = pager.tiers.create(handle.name, BlockKind.WEIGHT, backing.nbytes, owner)
    handle.origin = origin
    handle.bind_as_shown(block, backing.offsets[0])
    pager.tiers.transfers.back(block, backing.extent)


def move_to_checkpoint(handle: ParamHandle, origin: SourceRange) -> bool:
    """Drop the bytes of a registered parameter: a checkpoint has those that it is to have. False where it is part of a
    unit already, or where the program holds views of what would go; nothing is changed then."""
    old, tiers = handle.block, handle.pager.tiers
    if old is None or handle.unit is not None or handle.tensor is None:
        return False
    with handle.pager.lock, outside_user_modes():
        owner = old.owner
        if old.leases or handle.given() or handle.displaced() or owner is None or not owner.can_release():
            return False
        tiers.remove(old)
        _lie_in(handle, origin)
        handle.rewritten()
        handle.count_update()  # graphs that have kept the old values must not go on
    return True


def give_back(handle: ParamHandle, value: Tensor | None = None) -> None:
    """Undo an adoption: the parameter is an ordinary one again, its values in ordinary memory. Its block is left.
    ``value``: these values, where the program's memory still has them."""
    param, pager = handle.tensor, handle.pager
    if param is None:
        return
    if value is None:
        with outside_user_modes():
            pager.pin(handle)
            try:
                value = handle.view().clone()
            finally:
                pager.unpin(handle)
    pager.forget_storage(handle)
    plain_again(param, value)
    handle.storage = None
    handle.let_go()
    pager.life.parameter_dropped(None)


def _forget(handle: ParamHandle) -> None:
    """Drop what an adoption that failed has taken; the parameter has not been changed yet."""
    handle.let_go()
    handle.pager.life.parameter_dropped(None)
    if handle.block is not None:
        handle.pager.tiers.remove(handle.block)


def pin_residents(tiers: TierManager, placement: Placement) -> None:
    """From now on resident blocks stay. Not before: while bytes move into units, all memory is needed for that.

    They are brought to memory, where NVMe has no room for them next to the blocks that pass. Elsewhere each comes when
    it is first used. See [Note: room on NVMe] in ``schedule.nvme_room``.
    """
    for block_id in placement.resident:
        tiers.keep(tiers.block(block_id))
    space = tiers.space
    away = [tiers.block(number) for number in placement.resident if tiers.is_away(number)]
    if space is None or space.budget_bytes is None:
        return
    if placement.nvme_bytes + sum(block.room_bytes for block in away) > space.budget_bytes:
        for block in away:
            tiers.acquire(block)
            tiers.release(block)


@dataclass
class Taken:
    """Parameters that are being taken in.

    Attributes:
        values: with several ranks, the memory from which each was taken: no rank gives its part of what is undone.
        draft: of their unit, when it has been made.
    """

    handles: list[ParamHandle]
    values: list[Tensor | None] = field(default_factory=list)
    draft: UnitDraft | None = None

    @property
    def unit(self) -> Unit:
        """The unit that they have become."""
        if self.draft is None:
            raise RuntimeError("nothing has been taken in")
        return self.draft.unit


class Assembly:
    """Turns adopted parameters into units with weights, gradient and state blocks.

    Args:
        types: what parameters compute in from now on; not said: in what they have.
        piece_bytes: about the most that a piece of optimizer state may take.
        state_format: the arrays of optimizer state that pieces are planned with.

    Attributes:
        on_value: called for each parameter before it moves, with the host address of its registered value, which is
            all there.
        building: what several ranks keep of the model while it is built.
        typical_bytes: of the weights of most units of the model, if there are such: pieces of other units are made
            as large, so that each fits where another was.
    """

    def __init__(
        self,
        pager: Pager,
        gradients: Gradients,
        piece_bytes: int,
        types: ComputeTypes = KEEP_TYPES,
        state_format: StateFormat = PLAIN_FORMAT,
    ) -> None:
        self.pager = pager
        self.tiers: TierManager = pager.tiers
        self.gradients = gradients
        self.types = types
        self.piece_bytes = gradients.piece_bytes = piece_bytes
        self.state_format = state_format
        self.typical_bytes: int | None = None
        self.on_value: Callable[[ParamHandle, int], None] | None = None
        self.building: BuildingMemory | None = None

    def target_nbytes(self, param: Tensor) -> int:
        """Bytes of a parameter in the dtype it will compute in."""
        return param.numel() * self.types.of(param).itemsize

    def declare(self, name: str, handles: list[ParamHandle]) -> UnitDraft:
        """The blocks of a unit, still without bytes."""
        draft = draft_unit(self.pager, self.types, name, handles)
        self.make(draft)
        return draft

    def make(self, draft: UnitDraft) -> None:
        """Declare the blocks of a drafted unit."""
        unit = draft.make(self.pager, self.gradients, self.piece_bytes, self.state_format, self.typical_bytes)
        self.pager.units.append(unit)

    def discard(self, draft: UnitDraft) -> None:
        """Undo :meth:`make`: forget the unit and its blocks."""
        unit = draft.unit
        self.pager.units.remove(unit)
        self.gradients.forget(unit)
        for block in unit.blocks():
            self.tiers.remove(block)

    def take_in(self, name: str, params: Iterable[tuple[str, Tensor]]) -> Taken:
        """Adopt parameters that came after construction, as one new unit. All of them or none.

        Raises:
            BudgetError: there is no room now; the parameters stay ordinary ones, and the next call tries again.
        """
        taken = self.bring_in(name, params)
        self.track(taken)
        return taken

    def bring_in(self, name: str, params: Iterable[tuple[str, Tensor]]) -> Taken:
        """:meth:`take_in`, which :meth:`undo` undoes until :meth:`track` is called."""
        self.pager.undo_guesses()
        handles: list[ParamHandle] = []
        taken = Taken(handles)
        try:
            for key, param in params:
                with outside_user_modes():
                    value = None if self.pager.link is None else get_data(param)
                handles.append(adopt(self.pager, param, key))
                taken.values.append(value)
            if handles:
                taken.draft = self.declare(name, handles)
                self.fill(taken.draft)
        except BaseException:
            self.undo(taken)
            raise
        return taken

    def track(self, taken: Taken) -> None:
        """From now on autograd's gradients of these are taken."""
        for handle in taken.handles:
            self.gradients.track(handle)

    def undo(self, taken: Taken) -> None:
        """Make these parameters ordinary again."""
        own = [handle.block for handle in taken.handles if handle.unit is None and handle.block is not None]
        for handle, value in zip(taken.handles, taken.values, strict=True):
            give_back(handle, value)
        if taken.draft is not None:
            self.discard(taken.draft)
        for block in own:
            self.tiers.remove(block)

    def fill(self, draft: UnitDraft) -> None:
        """Move the bytes of a unit's parameters into its block, converting them."""
        unit, registered = draft.unit, [handle.block for handle in draft.handles if handle.block is not None]
        if draft.backing is not None:
            names = tuple(handle.name for handle in draft.handles)
            self.tiers.transfers.back(unit.weights, replace(draft.backing.extent, tensors=names))
            for index, handle in enumerate(draft.handles):
                if handle.block is not None:
                    self.tiers.remove(handle.block)
                handle.bind_at(unit.weights, draft.place(index))
                handle.unit = unit
                unit.owner.slots.append(handle)
            return
        self.tiers.acquire(unit.weights, load=False)
        try:
            ctypes.memset(self.tiers.address(unit.weights), 0, unit.weights.nbytes)
            for index, handle in enumerate(draft.handles):
                self._move(unit, handle, draft.place(index), draft.dtypes[index])
        finally:
            self.tiers.release(unit.weights)
        if self.building is not None:
            self.building.placed(registered)

    def _move(self, unit: Unit, handle: ParamHandle, place: Place, dtype: torch.dtype) -> None:
        old = handle.block
        if old is None:
            raise RuntimeError(f"{handle.name} has no block")
        if self.building is not None:
            self.building.bring(old)
        take_edits(self.pager, handle, old)
        if isinstance(place, TensorCut):
            run = place.run()
        else:
            run = OwnedRun(len(unit.owner.slots), 0, handle.numel, place, place)
        self.tiers.acquire(old)
        try:
            if self.on_value is not None:
                self.on_value(handle, handle.address())
            if run is not None:
                self._move_run(unit, handle, run, dtype)
        finally:
            self.tiers.release(old)
        # The state holds the fp32 value now. The master of a weight that came in fp16 is made at the first step.
        handle.master_stale = dtype is torch.float16 and handle.dtype is torch.float16
        self.tiers.remove(old)
        if dtype is not handle.dtype:
            handle.retype(dtype)
        handle.bind_at(unit.weights, place)
        handle.unit = unit
        if handle.device != self.pager.memory.device:
            with outside_user_modes():
                handle.move_to(self.pager.memory.device)
            tensor = handle.tensor
            handle.version = version_of(tensor) if tensor is not None else 0
        unit.owner.slots.append(handle)

    def _move_run(self, unit: Unit, handle: ParamHandle, run: OwnedRun, dtype: torch.dtype) -> None:
        """Bring a run of what is registered to where the unit's block stores it."""
        if dtype is handle.dtype:
            source = handle.element_address(run.start)
            ctypes.memmove(self.tiers.address(unit.weights) + run.shard_offset, source, run.numel * handle.itemsize)
        elif handle.dtype is torch.float32 and dtype is torch.bfloat16 and _has_state(unit, handle):
            self._split(unit, handle, run)
        else:
            self._convert(unit, handle, run, dtype)
            if dtype is torch.float16:
                self._fill_master(unit, handle)

    def _split(self, unit: Unit, handle: ParamHandle, run: OwnedRun) -> None:
        """fp32 to bf16 as ``Tensor.to`` does it; what rounding leaves over goes into the optimizer state, so that the
        fp32 value stays the master."""
        threads = torch.get_num_threads()
        for piece, part in parts_to_fill(unit, handle, torch.bfloat16):
            self.tiers.acquire(piece.block)
            try:
                self.tiers.will_change(piece.block)
                offset = run.shard_offset + (part.start - run.start) * 2
                cpu_adam.split_fp32(  # addresses are taken now: to make room for the piece, others may have moved
                    handle.element_address(part.start),
                    self.tiers.address(unit.weights) + offset,
                    PieceView(self.tiers, piece).lead(part),
                    part.numel,
                    num_threads=threads,
                )
            finally:
                self.tiers.release(piece.block)
            self._done_from(handle, part.start)

    def _fill_master(self, unit: Unit, handle: ParamHandle) -> None:
        """The fp32 master of an fp16 weight is the value that the weight was registered with."""
        for piece, part in parts_to_fill(unit, handle, torch.float16):
            self.tiers.acquire(piece.block)
            try:
                self.tiers.will_change(piece.block)
                buffer, base = self.tiers.arena.buffer, self.tiers.arena.address
                start = handle.element_address(part.start) - base
                target = PieceView(self.tiers, piece).lead(part) - base
                with outside_user_modes():
                    value = torch.frombuffer(buffer, dtype=handle.dtype, count=part.numel, offset=start)
                    torch.frombuffer(buffer, dtype=torch.float32, count=part.numel, offset=target).copy_(value)
            finally:
                self.tiers.release(piece.block)
            self._done_from(handle, part.start)

    def _done_from(self, handle: ParamHandle, start: int) -> None:
        """The elements from ``start`` on have moved into the unit: the room of what was registered goes to the rest."""
        if handle.block is not None:
            self.tiers.shrink(handle.block, start * handle.itemsize)

    def _convert(self, unit: Unit, handle: ParamHandle, run: OwnedRun, dtype: torch.dtype) -> None:
        """Any other change of dtype, as ``Tensor.to`` does it."""
        with outside_user_modes():
            buffer, base, numel = self.tiers.arena.buffer, self.tiers.arena.address, run.numel
            target = self.tiers.address(unit.weights) + run.shard_offset - base
            source = handle.element_address(run.start) - base
            value = torch.frombuffer(buffer, dtype=handle.dtype, count=numel, offset=source)
            torch.frombuffer(buffer, dtype=dtype, count=numel, offset=target).copy_(value)


def take_edits(pager: Pager, handle: ParamHandle, block: Block) -> None:
    """Let what the program has done to a parameter since it was registered reach the host's bytes."""
    memory = pager.memory_of(block)
    memory.acquire(block)
    try:
        if isinstance(block.owner, WeightView):
            block.owner.install()  # Tensor.set_ has no door: what stands in the place of the bytes comes in first
        if handle.changed():  # and what was put there while the bytes were shown
            memory.will_change(block)
    finally:
        memory.release(block)
    memory.settle(block)


def _has_state(unit: Unit, handle: ParamHandle) -> bool:
    return any(handle in piece.handles for piece in unit.pieces)


def fills_state(handle: ParamHandle, dtype: torch.dtype) -> bool:
    """Whether the state of a trained parameter gets something when its weights take ``dtype``."""
    split = handle.dtype is torch.float32 and dtype is torch.bfloat16
    return split or (dtype is torch.float16 and handle.dtype is not torch.float16)


def parts_to_fill(unit: Unit, handle: ParamHandle, dtype: torch.dtype) -> list[tuple[StatePiece, PieceSegment]]:
    """The parts of a parameter whose state gets something when its weights take ``dtype``, the last ones first: what
    was registered can then go part by part."""
    if not fills_state(handle, dtype):
        return []
    kind = LAYOUTS[dtype]
    pieces = [piece for piece in unit.pieces if piece.kind is kind and handle in piece.handles]
    parts = [(p, part) for p in pieces for part in whole_segment(p.layout, p.handles.index(handle))]
    return parts[::-1]
