"""The fp32 master and the arrays of optimizer state of one paged parameter, read and written.

For programs that look at single values. Whole states go through ``state_dict`` and checkpoints. With several ranks a
rank that reads gathers the others' parts, and all ranks write together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import UsageError
from deepoffload.native import cpu_adam
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.gradient_state import GradientSlot
from deepoffload.optim.handles import gradients_of
from deepoffload.optim.paged_state import ArrayCopy, copy_arrays, write_state
from deepoffload.optim.rank_gradients import shared_state_of
from deepoffload.optim.rank_state import has_state
from deepoffload.optim.rule import step_count
from deepoffload.optim.state import LAYOUTS, MASTER_PART_KEYS
from deepoffload.optim.threads import num_threads
from deepoffload.params.pager import Pager
from deepoffload.params.slot import TensorSlot
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import ParamHandle


def read_master(param: Tensor, handle: ParamHandle) -> Tensor:
    """The exact fp32 value of a weight: an ordinary tensor on the weight's device.

    Raises:
        ClosedError, UsageError: the engine was closed, or its context has not ended. RankError: another rank has gone.
    """
    pager = _ready(handle)
    with torch.no_grad():
        weight = param.clone().detach()
    lead = _lead(handle)
    if lead is None or handle.master_stale:
        return weight.float()
    dtype = torch.int16 if lead == "remainder" else torch.float32
    with outside_user_modes():
        target = torch.empty_strided(handle.shape, handle.stride, dtype=dtype, device="cpu")
        _copy(pager, handle, {lead: ArrayCopy("", target)})
        if lead == "master":
            return target.to(weight.device)
        high = weight.view(torch.int16).to(torch.int32) << 16
        return (high + target.to(weight.device, torch.int32)).view(torch.float32)


def write_master(param: Tensor, handle: ParamHandle, value: Tensor) -> None:
    """Make ``value`` the exact fp32 value of a weight, which shows it rounded to its type.

    Raises:
        UsageError: another shape.
    """
    pager = _ready(handle)
    value = _values(value, handle, "the fp32 value")
    lead = _lead(handle)
    if lead is None:
        with torch.no_grad():
            param.copy_(value)
        return
    if lead == "master":
        weight, part = value.to(handle.dtype), value
    else:
        weight = torch.empty(value.shape, dtype=torch.bfloat16, device="cpu")
        part = torch.empty(value.shape, dtype=torch.int16, device="cpu")
        cpu_adam.split_fp32(
            value.data_ptr(), weight.data_ptr(), part.data_ptr(), value.numel(), num_threads=num_threads()
        )
    with torch.no_grad():
        param.copy_(weight)
    _write(pager, handle, {lead: part}, {})


def read_array(handle: ParamHandle, param: Tensor, key: str) -> Tensor | None:
    """An array of optimizer state in fp32, on the weight's device; None where no optimizer of ours updates it.

    Before the first step it is what the array will start with.

    Raises:
        UsageError: the optimizer has no such array, or another optimizer has taken over.
    """
    found = _owner(handle, param)
    if found is None:
        return None
    optimizer, group = found
    pager, field = _ready(handle), _field(optimizer, group, handle, param, key)
    with outside_user_modes():
        target = torch.empty_strided(handle.shape, handle.stride, dtype=torch.float32, device="cpu")
        if handle in optimizer._held:
            _copy(pager, handle, {key: ArrayCopy(field, target)})
        else:
            target.fill_(optimizer._initial(group).get(key, 0.0))
        return target.to(handle.device)


def write_array(handle: ParamHandle, param: Tensor, key: str, value: Tensor) -> None:
    """Replace an array of optimizer state. Before the first step the others get what they start with.

    Raises:
        UsageError: another shape; no optimizer of ours updates the parameter, or it has no such array.
    """
    found = _owner(handle, param)
    if found is None:
        raise UsageError(
            f"{handle.name} has no optimizer state here: it is frozen, or its optimizer is not one of deepoffload; "
            "then optimizer.state[param] has it"
        )
    optimizer, group = found
    pager, field = _ready(handle), _field(optimizer, group, handle, param, key)
    values = {key: _values(value, handle, key)}
    fields = {key: field}
    if handle not in optimizer._held:
        for other, its_field in optimizer._arrays_of(param, group).items():
            fields[other] = its_field
            start = optimizer._initial(group).get(other, 0.0)
            values.setdefault(other, torch.full(handle.shape, start, dtype=torch.float32, device="cpu"))
        if optimizer.rule.counts_steps:
            optimizer.state[param].setdefault("step", step_count(0))
    _write(pager, handle, values, fields)
    optimizer._held.take(handle)


def own_part(handle: ParamHandle) -> slice:
    """Which elements of a parameter this rank owns, in the order of its memory: all with one rank."""
    return slice(0, handle.numel) if handle.cut is None else handle.cut.own_elements()


@contextmanager
def edited_in_parts(handle: ParamHandle) -> Iterator[None]:
    """Inside it each rank writes its part of a weight, among other values that count for nothing. When it ends, all
    ranks show what all have written.

    Raises:
        RankError: another rank has gone or failed, or does not come.
    """
    pager = handle.pager
    if pager.link is None or handle.unit is None:
        yield
        return
    pager.link.notices.meet(f"setting parts of {handle.name}")
    handle.edited_alone += 1
    try:
        yield
        with pager.lock:
            if handle.unit.owner.changed():
                pager.memory.will_change(handle.unit.weights)
            pager.memory.settle(handle.unit.weights)
    finally:
        handle.edited_alone -= 1
    _show_all_parts(handle)


def set_own_gradient(slot: GradientSlot, values: Tensor) -> None:
    """Replace this rank's part of a gradient; all ranks do so.

    Args:
        values: fp32, flat, contiguous, on the CPU: as many as the rank owns.

    Raises:
        RankError: another rank has gone or failed, or does not come.
    """
    pager, block, cut = slot.pager, slot.block, slot.cut
    assert pager.link is not None and block is not None and cut is not None, "several ranks have parts of it"
    pager.link.notices.meet(f"setting parts of {slot.name}")
    with pager.lock:
        pager.memory.settle(block)
        run = cut.run()
        if run is not None:
            pager.tiers.acquire(block)
            try:
                pager.tiers.will_change(block)
                cpu_adam.copy(slot.element_address(run.start), values.data_ptr(), values.nbytes, num_threads())
            finally:
                pager.tiers.release(block)
        slot.record.forget_sum()
    _show_all_parts(slot)


def _show_all_parts(slot: TensorSlot) -> None:
    """Each rank has stored its part of a tensor: all show what all have stored."""
    pager, block = slot.pager, slot.block
    if pager.link is None or block is None:
        return
    pager.link.notices.meet(f"the end of setting parts of {slot.name}")
    with pager.lock:
        pager.memory.refresh(block)
    pager.memory.finish_rewrites()


def _copy(pager: Pager, handle: ParamHandle, copies: Mapping[str, ArrayCopy]) -> None:
    """Copy arrays, of all ranks."""
    shared = shared_state_of(pager)
    if shared is None:
        copy_arrays(pager, handle, copies)
    else:
        shared.copy_arrays(handle, copies)


def _write(pager: Pager, handle: ParamHandle, values: Mapping[str, Tensor], fields: Mapping[str, str]) -> None:
    """Put values into the pieces; with several ranks each has its part of them."""
    shared = shared_state_of(pager)
    if shared is not None:
        shared.meet(f"setting state of {handle.name}")  # what another rank still reads does not change
    write_state(pager, {handle: values}, {handle: fields})
    if shared is not None:
        shared.meet(f"the end of setting state of {handle.name}")


def _ready(handle: ParamHandle) -> Any:
    """The pager, when the parameter's unit has made its update."""
    gradients_of(handle.pager, handle.name)
    handle.pager.catch_up(handle.unit)
    return handle.pager


def _lead(handle: ParamHandle) -> str | None:
    """What completes the weight to its master; None where the weight is all there is."""
    if not has_state(handle):
        return None
    layout = LAYOUTS.get(handle.dtype)
    return None if layout is None else MASTER_PART_KEYS.get(layout)


def _owner(handle: ParamHandle, param: Tensor) -> tuple[HostOptimizer, Mapping[str, Any]] | None:
    """The optimizer that updates the parameter, with the parameter's group: the one whose state the pieces hold, or the
    only one."""
    found = []
    for optimizer in handle.pager.held.updaters(handle):
        if isinstance(optimizer, HostOptimizer):
            optimizer._held.move_into_pieces(optimizer)
            mine = [group for known, group in optimizer._each() if known is param]
            if mine:
                found.append((optimizer, mine[0]))
    holding = [pair for pair in found if pair[0]._held.holds(handle)]
    if holding:
        return holding[0]
    if len(found) > 1:
        raise UsageError(f"{handle.name} is in {len(found)} optimizers, and none has updated it yet")
    if found:
        found[0][0]._held.refuse_lost(handle)
    return found[0] if found else None


def _field(optimizer: HostOptimizer, group: Mapping[str, Any], handle: ParamHandle, param: Tensor, key: str) -> str:
    arrays = optimizer._arrays_of(param, group)
    if optimizer.rule.foreign and handle not in optimizer._held:
        raise UsageError(f"{handle.name} has no optimizer state {key!r} yet: its class makes it in the first step")
    if key not in arrays:
        known = ", ".join(repr(name) for name in arrays) or "none"
        raise UsageError(f"{handle.name} has no optimizer state {key!r}; {type(optimizer).__name__} keeps {known}")
    return arrays[key]


def _values(value: Tensor, handle: ParamHandle, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise UsageError(f"{what} of {handle.name} has to be a tensor, not a {type(value).__name__}")
    if value.shape != handle.shape:
        raise UsageError(
            f"{what} of {handle.name} has to have the parameter's shape {tuple(handle.shape)}, not {tuple(value.shape)}"
        )
    return value.detach().to(device="cpu", dtype=torch.float32).clone(memory_format=torch.contiguous_format)
