"""Gradients land in their unit's block as soon as autograd has made them, and stand behind ``param.grad`` until the
step.

A gradient is touched once on its way: one native pass accumulates it into the block (rounding as torch does), sums its
squares and notes non-finite values. Each landing replaces the parameter's sum of squares.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.memory.block import Block, BlockState
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType
from deepoffload.optim.device_landing import DeviceLandings
from deepoffload.optim.dtypes import NATIVE_DTYPES
from deepoffload.optim.in_backward import EarlyUpdates
from deepoffload.optim.state import PIECE_BYTES, make_pieces
from deepoffload.optim.threads import num_threads
from deepoffload.params.pager import Pager
from deepoffload.params.parameter import OffloadedGradient, show_stand_in
from deepoffload.params.reference_counts import LONE
from deepoffload.params.slot import make_stand_in
from deepoffload.params.torch_private import (
    call_when_accumulated,
    get_data,
    get_grad,
    make_subclass,
    outside_user_modes,
    set_data,
    set_grad,
)
from deepoffload.params.unit import IN_BLOCK, GradientOwner, GradientSlot, GradientState, ParamHandle
from deepoffload.schedule.placement import BlockKind
from deepoffload.timeline import Lane

LIGHT_NUMEL = 1 << 14
LIGHT_BYTES = 2 << 20
"""Gradients of at most so many elements, and so many bytes in all, may stay outside of their blocks where nothing is
moved: to let one land costs more than its memory."""


class Gradients:
    """All gradients of one pager's parameters.

    Attributes:
        piece_bytes: about the most that a piece of optimizer state may take (set when the units are made).
        early: set where units make their step inside backward.
        in_fp32: gradients of 16-bit weights are accumulated in fp32 (set before the units are made).
        from_device: brings gradients to host memory; None where the CPU computes them.
        changes: counts landings and assignments, so that one can see whether anything happened in between.
    """

    def __init__(self, pager: Pager) -> None:
        self.pager = pager
        self.tiers = pager.tiers
        self.piece_bytes = PIECE_BYTES
        self.changes = 0
        self.in_fp32 = False
        self.early: EarlyUpdates | None = None
        self.from_device: DeviceLandings | None = None
        self._in_block: dict[int, list[ParamHandle]] = {}
        self._light: set[ParamHandle] = set()
        self._light_bytes = 0

    # -- set-up ----------------------------------------------------------------------------------------------------

    def landing_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """In which dtype the gradients of weights land."""
        return torch.float32 if self.in_fp32 and weight_dtype in NATIVE_DTYPES else weight_dtype

    def give_block(
        self, block: Block, handles: list[ParamHandle], offsets: list[int], dtypes: list[torch.dtype]
    ) -> None:
        """Say where the gradients of ``handles`` land, and in which dtype."""
        owner = GradientOwner(self.pager)
        block.owner = owner
        for handle, offset, dtype in zip(handles, offsets, dtypes, strict=True):
            slot = GradientSlot(handle, dtype)
            slot.bind(block, offset)
            handle.grad_slot = slot
            owner.slots.append(slot)
        self._in_block[block.id] = list(handles)

    def take_block(self, block: Block) -> None:
        """Undo :meth:`give_block`, where no gradient has landed yet."""
        self._in_block.pop(block.id, None)

    def track(self, handle: ParamHandle) -> None:
        """Have autograd call us when the gradient of a parameter is complete. A frozen parameter cannot be tracked
        yet."""
        param = handle.tensor
        if param is None or handle.grad_hook is not None or not param.requires_grad:
            return
        if handle.dtype not in NATIVE_DTYPES:
            return  # complex, float64: autograd keeps such gradients itself
        if handle.grad_slot is None:
            self._late(handle)
        small = handle.numel <= LIGHT_NUMEL and self._light_bytes + handle.nbytes <= LIGHT_BYTES
        if small and self.landing_dtype(handle.dtype) is handle.dtype:
            self._light_bytes += handle.nbytes
            self._light.add(handle)
        handle.grad_hook = call_when_accumulated(param, _landed)

    def _late(self, handle: ParamHandle) -> None:
        """Room for the gradient and the optimizer state of a parameter that was frozen when its unit was made."""
        dtype = self.landing_dtype(handle.dtype)
        block = self.tiers.create(f"{handle.name}.grad", BlockKind.GRADIENT, handle.numel * dtype.itemsize)
        self.give_block(block, [handle], [0], [dtype])
        if handle.unit is not None:
            trained = [(handle, handle.dtype)]
            handle.unit.pieces += make_pieces(self.tiers, handle.unit, trained, self.piece_bytes)
        handle.master_stale = True  # frozen weights have no remainder: the master starts as what the weight is

    # -- landing ---------------------------------------------------------------------------------------------------

    def land(self, param: Tensor, handle: ParamHandle) -> None:
        """Take over what autograd has just put into ``param.grad``.

        A small gradient stays autograd's own where nothing is ever moved.
        """
        self.changes += 1
        if handle in self._light and handle.grad_state is GradientState.EMPTY:
            if self.early is None and self.from_device is None and self.pager.is_fully_resident():
                self.pager.forget_casts()
                handle.grad_state = GradientState.USER
                return
        grad = get_grad(param)
        slot, unit = handle.grad_slot, handle.unit
        if self.early is not None:
            self.early.refuse_more(handle)
        if unit is not None and unit.pending is not None:
            self.pager.catch_up(unit)
        if grad is None or slot is None or handle.grad_state is GradientState.USER:
            return  # the user's own tensor: autograd has accumulated into it, it is the truth
        dtype = NATIVE_DTYPES.get(grad.dtype)
        if dtype is None or grad.grad_fn is not None or grad.layout is not torch.strided:
            self._leave_with_autograd(param, handle, grad)
            return
        with self.pager.lock:
            if unit is not None:
                self.pager.use_backward(unit)
            block = self._block(slot)
            owner: Any = block.owner
            first = handle.grad_state is GradientState.EMPTY
            if first and owner.retired and owner.looked_at():
                handle.grad_state = GradientState.USER  # the program has a view of the last one: it stays as it is
                return
            if not block.resident:
                self.tiers.acquire(block, load=self._any_landed(block))
                self.tiers.release(block)  # as long as we have the lock it stays
            if block.state is not BlockState.DIRTY:
                self.tiers.will_change(block)
            source = grad if grad.stride() == slot.stride and not grad.is_neg() else _with_stride(grad, slot)
            accumulate = handle.grad_state is GradientState.LANDED
            if self.from_device is None:
                self._land_here(slot, source, dtype, accumulate)
            else:
                self.from_device.take(slot, source, dtype, accumulate=accumulate)
            if accumulate:
                slot.added_to()
            handle.grad_state = GradientState.LANDED
            set_grad(param, None)
            if self.early is not None:
                self.early.landed(handle)
                self._make_decided(self.early)
            if self.pager.evict_always:
                self.pager.pump()

    def _make_decided(self, early: EarlyUpdates) -> None:
        """Make the updates inside backward whose gradients have come from the device meanwhile."""
        while early.decided and not any(
            handle.grad_slot is not None and handle.grad_slot.block is not None and handle.grad_slot.block.copying
            for handle in early.decided[0].handles
        ):
            self.pager.catch_up(early.decided.popleft())

    def _land_here(self, slot: GradientSlot, source: Tensor, dtype: DType, accumulate: bool) -> None:
        timeline, handle = self.tiers.timeline, slot.handle
        begin_s = time.perf_counter() if timeline is not None else 0.0
        handle.grad_sum_sq, handle.grad_non_finite = cpu_adam.land(
            slot.address(),
            source.data_ptr(),
            slot.numel,
            dst_dtype=dtype if slot.dtype is source.dtype else NATIVE_DTYPES[slot.dtype],
            src_dtype=dtype,
            accumulate=accumulate,
            num_threads=1 if slot.numel <= cpu_adam.CHUNK else num_threads(),
        )
        if timeline is not None:
            timeline.add(Lane.LANDING, slot.name, begin_s, time.perf_counter(), slot.nbytes)

    def _leave_with_autograd(self, param: Tensor, handle: ParamHandle, grad: Tensor) -> None:
        """A sparse gradient, or one with a graph of its own: autograd's tensor stays the truth, with what had
        landed."""
        if handle.grad_state is GradientState.LANDED:
            landed = self._show(handle)
            set_grad(param, (grad + landed).to(grad.dtype))
            self._drop(handle)
        handle.grad_state = GradientState.USER

    def _any_landed(self, block: Block) -> bool:
        for handle in reversed(self._in_block[block.id]):  # gradients are dropped from the first on: the last is there
            if handle.grad_state in IN_BLOCK:
                return True
        return False

    def _block(self, slot: GradientSlot) -> Block:
        if slot.block is None:
            raise RuntimeError(f"{slot.name} has no block")
        return slot.block

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
        raw = get_grad(param)
        if raw is not None or handle.grad_state is not GradientState.LANDED or handle.grad_slot is None:
            return raw
        return self._show(handle)

    def _show(self, handle: ParamHandle) -> Tensor:
        """The object that shows a landed gradient; made when first asked for."""
        slot = handle.grad_slot
        if slot is None:
            raise RuntimeError(f"{handle.name} has no gradient slot")
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
        if value is not None:
            if handle.grad_slot is not None and value is handle.grad_slot.shown:
                return
            if type(value) is OffloadedGradient:
                value = self._as_ordinary(value)
        if handle.grad_state is GradientState.USER:
            self.pager.catch_up(handle.unit)  # an update that failed half-way still needs it
        set_grad(param, value)  # torch checks shape, dtype and device before anything else changes
        self.changes += 1
        if value is None and handle.grad_state is GradientState.USER:
            handle.grad_state = GradientState.EMPTY
            return
        with self.pager.lock:
            if value is not None:
                self.pager.catch_up(handle.unit)
            if handle.grad_state is GradientState.LANDED:
                self._drop(handle)
            if handle.grad_state is not GradientState.HANDED_OVER:
                handle.grad_state = GradientState.EMPTY if value is None else GradientState.USER

    def _as_ordinary(self, shown: Tensor) -> Tensor:
        """Another parameter's landed gradient becomes autograd's own tensor, so that the two can share it."""
        handle = shown._slot.handle  # type: ignore[attr-defined]
        with self.pager.lock:
            self._drop(handle)
            set_grad(handle.tensor, shown)
            handle.grad_state = GradientState.USER
        return shown

    def _drop(self, handle: ParamHandle) -> None:
        if handle.grad_state is not GradientState.LANDED or handle.grad_slot is None:
            return
        if handle.grad_slot.shown is not None:
            self._forget_shown(handle.grad_slot)
        pending = handle.unit.pending if handle.unit is not None else None
        if pending is not None and pending.needs(handle):
            handle.grad_state = GradientState.HANDED_OVER
        else:
            self._empty(handle, handle.grad_slot)

    def _empty(self, handle: ParamHandle, slot: GradientSlot) -> None:
        handle.grad_state = GradientState.EMPTY
        handle.grad_sum_sq = None
        handle.grad_non_finite = False
        block = self._block(slot)
        if not self._any_landed(block):
            self.tiers.discard(block)

    def used(self, handle: ParamHandle) -> None:
        """A deferred update has used the gradient; if the program had dropped it meanwhile, its memory goes now."""
        if handle.grad_state is GradientState.HANDED_OVER and handle.grad_slot is not None:
            self._empty(handle, handle.grad_slot)

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

    # -- the step --------------------------------------------------------------------------------------------------

    def present(self, handle: ParamHandle) -> bool:
        """True when the parameter has a gradient, landed or the user's own."""
        if handle.grad_state is GradientState.LANDED:
            return True
        param = handle.tensor
        return param is not None and get_grad(param) is not None

    def sum_of_squares(self, handle: ParamHandle) -> tuple[float, bool]:
        """Sum of squares (float64) of one parameter's gradient, and whether it holds a non-finite value."""
        if handle.grad_state is not GradientState.LANDED:
            return self._user_sum_of_squares(handle)
        if handle.grad_slot is not None and handle.grad_slot.written():
            self.pager.will_change(handle.grad_slot)  # a device's copy alone is right
        if handle.grad_sum_sq is None and handle.grad_slot is not None:
            self.pager.memory.settle(self._block(handle.grad_slot))  # what is still on its way knows its sum then
        if handle.grad_sum_sq is None and handle.grad_slot is not None:
            slot = handle.grad_slot
            block = self._block(slot)
            self.tiers.acquire(block)
            try:
                handle.grad_sum_sq, handle.grad_non_finite = cpu_adam.sum_of_squares(
                    slot.address(), slot.numel, dtype=NATIVE_DTYPES[slot.dtype], num_threads=num_threads()
                )
            finally:
                self.tiers.release(block)
        return handle.grad_sum_sq or 0.0, handle.grad_non_finite

    def _user_sum_of_squares(self, handle: ParamHandle) -> tuple[float, bool]:
        param = handle.tensor
        raw = get_grad(param) if param is not None else None
        if raw is None:
            return 0.0, False
        plain = raw.layout is torch.strided and raw.dtype in NATIVE_DTYPES and raw.device.type == "cpu"
        if plain and raw.stride() == handle.stride:
            return cpu_adam.sum_of_squares(
                raw.data_ptr(), handle.numel, dtype=NATIVE_DTYPES[raw.dtype], num_threads=num_threads()
            )
        with outside_user_modes():
            total = float((raw.to_dense() if raw.is_sparse else raw).double().square().sum())
        return total, not math.isfinite(total)

    def user_gradient(self, handle: ParamHandle, keep: list[Tensor]) -> tuple[int, DType]:
        """Address and type of a gradient that the user assigned; ``keep`` holds a copy alive if one is needed."""
        param = handle.tensor
        raw = get_grad(param) if param is not None else None
        if raw is None or handle.grad_slot is None:
            raise RuntimeError(f"{handle.name} has no gradient")
        if raw.dtype not in NATIVE_DTYPES or raw.stride() != handle.stride or raw.is_neg():
            raw = _with_stride(raw if raw.dtype in NATIVE_DTYPES else raw.to(handle.dtype), handle.grad_slot)
        raw = raw.to("cpu")  # a copy where a device computes
        keep.append(raw)
        return raw.data_ptr(), NATIVE_DTYPES[raw.dtype]


def _landed(param: Tensor) -> None:
    """Post-accumulate hook of every tracked parameter."""
    handle: ParamHandle | None = param.__dict__.get("_slot")
    if handle is not None:
        pager = handle.pager
        gradients = pager.gradients
        if isinstance(gradients, Gradients) and pager.closed_because is None:
            gradients.land(param, handle)


def _with_stride(grad: Tensor, slot: GradientSlot) -> Tensor:
    with outside_user_modes():
        copy = torch.empty_strided(slot.shape, slot.stride, dtype=grad.dtype, device=grad.device)
        return copy.copy_(grad)
