"""Gradients land in their unit's block as soon as autograd has made them. ``param.grad`` shows them until the step.

A gradient is touched once on its way: one native pass accumulates it into the block (rounding as torch does), sums its
squares and notes non-finite values. Each landing replaces the parameter's sum of squares.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.memory.block import Block
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType
from deepoffload.optim import device_gradients, outside_gradient
from deepoffload.optim.device_landing import DeviceLandings
from deepoffload.optim.dtypes import NATIVE_DTYPES
from deepoffload.optim.gradient_state import (
    IN_BLOCK,
    GradientOwner,
    GradientRecord,
    GradientSlot,
    GradientState,
    place_of,
    slot_of,
)
from deepoffload.optim.in_backward import EarlyUpdates
from deepoffload.optim.speculation.port import SpeculationPort
from deepoffload.optim.state import PIECE_BYTES, make_pieces
from deepoffload.optim.threads import num_threads
from deepoffload.params.cut import Place
from deepoffload.params.pager import Pager
from deepoffload.params.parameter import OffloadedGradient, show_stand_in
from deepoffload.params.reference_counts import LONE
from deepoffload.params.slot import make_stand_in
from deepoffload.params.torch_compiler import leave_to_python
from deepoffload.params.torch_private import (
    call_when_accumulated,
    get_data,
    get_grad,
    make_subclass,
    outside_user_modes,
    set_data,
    set_grad,
)
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.placement import BlockKind
from deepoffload.timeline import Lane

LIGHT_NUMEL = 1 << 14
LIGHT_BYTES = 2 << 20
"""So small gradients, and so many bytes of them, may stay out of their blocks where nothing moves: landing costs."""


class Gradients:
    """All gradients of one pager's parameters.

    It has many methods, because it alone changes gradients. What is known of a gradient lies in ``gradient_state``.

    Args:
        early: where units are updated inside backward, what knows of these.
        from_device: brings gradients to host memory; None where the CPU computes them.

    Attributes:
        piece_bytes: about the most that a piece of optimizer state may take (set when the units are made).
        in_fp32: gradients of 16-bit weights are accumulated in fp32 (set before the units are made).
        changes: counts landings and assignments, for :meth:`changed_since`.
        speculation: updates units on a guess when their last gradient has landed; None where nothing does.
    """

    def __init__(
        self, pager: Pager, *, early: EarlyUpdates | None = None, from_device: DeviceLandings | None = None
    ) -> None:
        self.pager = pager
        self.tiers = pager.tiers
        self.piece_bytes = PIECE_BYTES
        self.changes = 0
        self.sums_landed = 0
        self.in_fp32 = False
        self.early = early
        self.speculation: SpeculationPort | None = None
        self.from_device = from_device
        self._records: dict[ParamHandle, GradientRecord] = {}
        self._light_bytes = 0

    # -- set-up ----------------------------------------------------------------------------------------------------

    def landing_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """In which dtype the gradients of weights land."""
        return torch.float32 if self.in_fp32 and weight_dtype in NATIVE_DTYPES else weight_dtype

    def give_block(
        self, block: Block, handles: list[ParamHandle], places: Sequence[Place], dtypes: list[torch.dtype]
    ) -> None:
        """Say where the gradients of ``handles`` land, and in which dtype."""
        owner = GradientOwner(self.pager)
        block.owner = owner
        for handle, place, dtype in zip(handles, places, dtypes, strict=True):
            record = self._record(handle)
            record.slot = slot = GradientSlot(record, dtype)
            slot.bind_at(block, place)
            owner.add(slot)

    def _record(self, handle: ParamHandle) -> GradientRecord:
        record = self._records.get(handle)
        if record is None:
            record = self._records[handle] = GradientRecord(handle)
        return record

    def forget(self, unit: Unit) -> None:
        """The unit is gone, or was never finished."""
        for handle in unit.handles:
            record = self._records.pop(handle, None)
            if record is not None and record.light:
                self._light_bytes -= handle.nbytes

    def track(self, handle: ParamHandle) -> None:
        """Have autograd call us when a parameter's gradient is complete. A frozen one cannot be tracked yet."""
        param, record = handle.tensor, self._record(handle)
        if param is None or record.hook is not None or not param.requires_grad:
            return
        if handle.dtype not in NATIVE_DTYPES:
            return  # complex, float64: autograd keeps such gradients itself
        if record.slot is None:
            self.pager.undo_guesses()
            self._late(handle)
        small = handle.numel <= LIGHT_NUMEL and self._light_bytes + handle.nbytes <= LIGHT_BYTES
        if small and self.landing_dtype(handle.dtype) is handle.dtype:
            self._light_bytes += handle.nbytes
            record.light = True
        record.hook = call_when_accumulated(param, _landed)

    def is_tracked(self, handle: ParamHandle) -> bool:
        """Whether :meth:`track` has nothing to do any more."""
        return self._record(handle).hook is not None

    def _late(self, handle: ParamHandle) -> None:
        """Room for the gradient and the optimizer state of a parameter that was frozen when its unit was made."""
        dtype = self.landing_dtype(handle.dtype)
        block = self.tiers.create(f"{handle.name}.grad", BlockKind.GRADIENT, handle.numel * dtype.itemsize)
        self.give_block(block, [handle], [0], [dtype])
        if handle.unit is not None:
            trained = [(handle, handle.dtype)]
            handle.unit.late_gradients.append(block)
            handle.unit.pieces += make_pieces(self.tiers, handle.unit, trained, self.piece_bytes)
        handle.master_stale = True  # frozen weights have no remainder: the master starts as what the weight is

    # -- landing ---------------------------------------------------------------------------------------------------

    def land(self, param: Tensor, handle: ParamHandle) -> None:
        """Take over what autograd has just put into ``param.grad``. Where it goes depends on who holds the gradient."""
        record, unit, pager = self._records[handle], handle.unit, self.pager
        record.changed_at = self.changes = self.changes + 1
        if record.light and record.state is GradientState.EMPTY and self.early is None and self.from_device is None:
            if pager.is_fully_resident() and pager.hooks.turns is None:  # else whose turn it is decides when it lands
                if pager.casts.left:
                    pager.casts.forget()
                record.left_to_program()
                return
        if self.early is not None:
            self.early.refuse_more(handle)
        if unit is not None and unit.pending is not None:
            pager.catch_up(unit)  # what was handed over is used up then
        grad = get_grad(param)
        if grad is None or record.slot is None or record.state is GradientState.USER:
            return  # autograd has accumulated into the program's tensor: it is the truth
        dtype = NATIVE_DTYPES.get(grad.dtype)
        if dtype is None or grad.grad_fn is not None or grad.layout is not torch.strided:
            self._leave_with_autograd(param, record, grad)
            return
        with pager.lock:
            if unit is not None:
                pager.use_backward(unit)
            if not self._take_over(record, record.slot, grad, dtype):
                record.left_to_program()
                return
            set_grad(param, None)
            if self.early is not None:
                self.early.landed(handle)
                self._make_decided(self.early)
            elif self.speculation is not None:
                self.speculation.landed(handle)
            if pager.evict_always:
                pager.pump()

    def _take_over(self, record: GradientRecord, slot: GradientSlot, grad: Tensor, dtype: DType) -> bool:
        """Bring what autograd has made into the block: the first gradient, or one more.

        Returns False, with nothing done, where the program has views of a gradient that was there before: its memory
        stays as it is.
        """
        block, owner = place_of(slot)
        accumulate = record.state is GradientState.LANDED
        if not accumulate and owner.retired and owner.looked_at():
            return False
        on_device = self.from_device is not None and self.pager.memory.keeps(block)
        if not (on_device or block.resident):
            self.tiers.acquire(block, load=owner.holds_any())
            self.tiers.release(block)  # as long as we have the lock it stays
        if not (on_device or block.state is BlockState.DIRTY):
            self.tiers.will_change(block)
        source = (
            grad if grad.stride() == slot.stride and not grad.is_neg() else outside_gradient.with_stride(grad, slot)
        )
        if self.from_device is not None:
            record.forget_sum()
            if on_device:
                device_gradients.land(self.pager.memory, slot, source, accumulate=accumulate)
            else:
                self.from_device.take(slot, source, dtype, accumulate=accumulate, measured=record.measured_later())
            record.landed(None)
        else:
            timeline = self.tiers.timeline
            begin_s = time.perf_counter() if timeline is not None else 0.0
            sums = cpu_adam.land(
                self.tiers.address(block) + slot.form.offset_stored,
                source.data_ptr(),
                slot.numel,
                dst_dtype=dtype if slot.dtype is source.dtype else NATIVE_DTYPES[slot.dtype],
                src_dtype=dtype,
                accumulate=accumulate,
                num_threads=1 if slot.numel <= cpu_adam.CHUNK else num_threads(),
            )
            record.landed(sums)
            if timeline is not None:
                timeline.add(Lane.LANDING, slot.name, begin_s, time.perf_counter(), slot.nbytes)
        if accumulate:
            slot.added_to()
        return True

    def _make_decided(self, early: EarlyUpdates) -> None:
        """Make the updates inside backward whose gradients have come from the device meanwhile."""
        while early.decided and not any(
            block.copying for block in early.decided[0].blocks() if block.kind is BlockKind.GRADIENT
        ):
            self.pager.catch_up(early.decided.popleft())

    def _leave_with_autograd(self, param: Tensor, record: GradientRecord, grad: Tensor) -> None:
        """A sparse gradient, or one with a graph: autograd's tensor stays the truth, with what had landed."""
        if record.state is GradientState.LANDED:
            set_grad(param, (grad + self._show(record)).to(grad.dtype))
            self._drop(record)
        record.left_to_program()

    # -- the .grad door --------------------------------------------------------------------------------------------

    def read(self, handle: ParamHandle) -> Tensor | None:
        """What ``param.grad`` shows."""
        param = handle.tensor
        if param is None:
            return None
        if self.early is not None and self.early.is_used(handle):
            raise UsageError(
                f"{handle.name}.grad has gone into the update already (step_overlap='in_backward'), so it cannot be "
                "clipped, unscaled or looked at; use step_overlap='deferred'"
            )
        raw, record = get_grad(param), self._records.get(handle)
        if raw is not None or record is None or record.state is not GradientState.LANDED:
            return raw
        return self._show(record)

    def _show(self, record: GradientRecord) -> Tensor:
        """The object that shows a landed gradient; made when first asked for."""
        slot = slot_of(record)
        with self.pager.lock:
            if slot.shown is None:
                with outside_user_modes():
                    stand_in = make_stand_in(slot.shape, slot.dtype, slot.device)
                    shown = make_subclass(OffloadedGradient, stand_in)  # no view, as autograd's own is none
                show_stand_in(shown, slot, OffloadedGradient)
                slot.show(shown)
                return shown
            return slot.shown

    def assign(self, handle: ParamHandle, value: Tensor | None) -> None:
        """``param.grad = value``; None drops the gradient."""
        param = handle.tensor
        if param is None:
            return
        record = self._records.get(handle) or self._record(handle)  # without the call where there is one
        if value is not None:
            if record.slot is not None and value is record.slot.shown:
                return
            if type(value) is OffloadedGradient:
                value = self._as_ordinary(value)
        unit = handle.unit
        with self.pager.lock:
            if value is not None or record.state is GradientState.USER or (unit is not None and unit.is_guessed):
                self.pager.catch_up(unit)  # what was handed over, or a tensor of the program's, is used up then
            set_grad(param, value)  # torch checks shape, dtype and device before anything else changes
            record.changed_at = self.changes = self.changes + 1
            if record.state is GradientState.USER:
                if value is None:
                    record.dropped()
                return
            if record.state is GradientState.LANDED:
                self.pager.life.refuse_torn(handle.name)
                try:
                    self._drop(record)
                except BaseException:  # the program keeps the gradient object, and its bytes could not be read
                    set_grad(param, None)
                    raise
            if value is not None:
                record.left_to_program()

    def _as_ordinary(self, shown: Tensor) -> Tensor:
        """Another parameter's landed gradient becomes autograd's own tensor, so that the two can share it."""
        slot: GradientSlot = shown._slot  # type: ignore[attr-defined]
        with self.pager.lock:
            self.pager.catch_up(slot.unit)  # an update that is still to come takes it as it is now
            self._drop(slot.record)
            if (param := slot.handle.tensor) is not None:
                set_grad(param, shown)
            slot.record.left_to_program()
        return shown

    def _drop(self, record: GradientRecord) -> None:
        """The program sees a landed gradient no more."""
        slot, unit = slot_of(record), record.handle.unit
        if slot.shown is not None:
            self._forget_shown(slot)
        pending = unit.pending if unit is not None else None
        if pending is not None and pending.needs(record.handle):
            record.handed_over()
        else:
            self._empty(record)

    def _empty(self, record: GradientRecord) -> None:
        record.dropped()
        block, owner = place_of(slot_of(record))
        if not owner.holds_any():
            self.tiers.transfers.discard_soon(block)

    def used(self, handle: ParamHandle) -> None:
        """A deferred update has used the gradient; if the program had dropped it meanwhile, its memory goes now."""
        record = self._records[handle]
        if record.state is GradientState.HANDED_OVER:
            self._empty(record)

    def _forget_shown(self, slot: GradientSlot) -> None:
        """The gradient object goes; if the program keeps it, it becomes an ordinary tensor with the same values."""
        if slot.shown is None:
            return
        if LONE.tensor_is_shared(slot):
            shown = slot.shown
            self.pager.pin(slot)
            try:
                with outside_user_modes():
                    values = get_data(shown).clone()
            finally:
                self.pager.unpin(slot)
            slot.hide()
            shown.__class__ = Tensor
            shown.__dict__.pop("_slot", None)
            set_data(shown, values)
        else:
            slot.hide()

    def changed_since(self, changes: int, handles: Iterable[ParamHandle]) -> bool:
        """Whether a gradient of one of these landed or was assigned after the count was ``changes``."""
        return any(self._record(handle).changed_at > changes for handle in handles)

    def is_users(self, handle: ParamHandle) -> bool:
        """Whether the gradient is a tensor of the program, or one that autograd keeps."""
        return self._records[handle].state is GradientState.USER

    # -- the step --------------------------------------------------------------------------------------------------

    def present(self, handle: ParamHandle) -> bool:
        """True when the parameter has a gradient, landed or the user's own."""
        record, param = self._records.get(handle), handle.tensor
        if record is not None and record.state is GradientState.LANDED:
            return True
        return param is not None and get_grad(param) is not None

    def sum_of_squares(self, handle: ParamHandle) -> tuple[int, bool]:
        """Sum of squares of one parameter's gradient (see :func:`~deepoffload.native.cpu_adam.land`), and whether it
        holds a non-finite value."""
        record = self._record(handle)
        if record.state is not GradientState.LANDED:
            return outside_gradient.sum_of_squares(handle)
        slot = slot_of(record)
        block, _ = place_of(slot)
        if slot.written():
            self.pager.will_change(slot)  # a device's copy alone is right
        if record.sum_sq is None and self.from_device is not None and self.pager.memory.keeps(block):
            device_gradients.measure(self.pager.memory, self.from_device.kernels, self._records.values())
        if record.sum_sq is None:
            self.pager.memory.settle(block)  # what is still on its way knows its sum then
        if record.sum_sq is None:
            self.tiers.acquire(block)
            try:
                record.measured(*self._measure(slot))
            finally:
                self.tiers.release(block)
        return record.sum_sq or 0, record.non_finite

    def _measure(self, slot: GradientSlot) -> tuple[int, bool]:
        dtype = NATIVE_DTYPES[slot.dtype]
        return cpu_adam.sum_of_squares(slot.address(), slot.numel, dtype=dtype, num_threads=num_threads())

    def is_watched(self, handles: Iterable[ParamHandle]) -> bool:
        """Whether the program may change the gradient of one of these at any time: it has a view of it, or it is a
        tensor of the program's own."""
        for handle in handles:
            record = self._records[handle]
            if record.state is not GradientState.LANDED or not place_of(slot_of(record))[1].can_release():
                return True
        return False

    def blocks_in_use(self, handles: Iterable[ParamHandle]) -> list[Block]:
        """The blocks in which gradients of these are now."""
        blocks = [slot.block for handle in handles if (slot := self.in_block(handle)) is not None]
        return list({block.id: block for block in blocks if block is not None}.values())

    def in_block(self, handle: ParamHandle) -> GradientSlot | None:
        """Where the gradient lies, when it is in the unit's block."""
        record = self._records[handle]
        return record.slot if record.state in IN_BLOCK else None

    def address(self, handle: ParamHandle, start: int, keep: list[Tensor]) -> tuple[int, DType]:
        """Address and type of a gradient from element ``start`` on, in the order of the weight's bytes, in a resident
        block. ``keep`` holds a copy alive if one is needed."""
        record = self._records[handle]
        if record.state in IN_BLOCK:
            slot = slot_of(record)
            return slot.element_address(start), NATIVE_DTYPES[slot.dtype]
        address, dtype = outside_gradient.address(handle, keep)
        return address + start * (4 if dtype is DType.FP32 else 2), dtype


def _landed(param: Tensor) -> None:
    """Post-accumulate hook of every tracked parameter."""
    handle: ParamHandle | None = param.__dict__.get("_slot")
    if handle is not None:
        pager = handle.pager
        gradients = pager.gradients
        if isinstance(gradients, Gradients) and pager.life.closed_because is None:
            if pager.hooks.turns is None:
                gradients.land(param, handle)
            else:
                pager.hooks.turns.land(param, handle, gradients)


leave_to_python(_landed, "a gradient lands in Python")
