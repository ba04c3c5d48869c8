"""``param.data = value``: the values are copied into the parameter's own memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.memory.lock import SHIELD
from deepoffload.params.edits import after_edit, before_edit
from deepoffload.params.slot import TensorSlot
from deepoffload.params.torch_private import count_change, get_data, outside_user_modes, version_of
from deepoffload.params.unit import BlockView, ParamHandle


def set_new_data(tensor: Any, value: Any) -> None:
    """``tensor.data = value`` of a paged tensor adopts the value: its bytes are copied into the unit's block. Views
    that were taken before keep the old values.

    Raises:
        TypeError: no tensor, in torch's words.
        UnsupportedError: another shape, dtype, device or layout, unless the model is still being built.
    """
    slot = tensor._slot
    if value is tensor:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"Variable data has to be a tensor, but got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise UnsupportedError(
            f"{slot.name}.data = ...: a paged parameter is dense, and cannot take {value.layout}; use value.to_dense()"
        )
    if value.shape != slot.shape or value.dtype is not slot.dtype or value.device != tensor.device:
        if _may_become(slot, value):
            _become(tensor, slot, value)
            return
        raise UnsupportedError(
            f"{slot.name}.data = ...: a paged parameter keeps its shape, dtype and device ({tuple(slot.shape)}, "
            f"{slot.dtype}, {tensor.device}; given {tuple(value.shape)}, {value.dtype}, {value.device}). "
            f"Convert the model before offload_context ends (or set {_precision(value)}, or keep_fp32), or replace it "
            "with a new nn.Parameter"
        )
    with SHIELD:
        _copy_in(tensor, slot, value)


def _copy_in(tensor: Any, slot: TensorSlot, value: Any) -> None:
    slot.pager.pin(slot)
    try:
        slot.take_back_if_set(tensor)
        if slot.shows_the_same(value):
            return
        slot.part_from_views()
        before_edit(slot)
        slot.pager.will_change(slot)
        if isinstance(slot, ParamHandle) and slot.unit is None:
            slot.restride(value)  # still being built: channels_last and the like are taken over
        source = value.__dict__.get("_slot")
        if source is not None:
            source.pager.pin(source)
        try:
            with outside_user_modes():
                slot.copy_in(get_data(value))
        finally:
            if source is not None:
                source.pager.unpin(source)
        slot.taken()
        if isinstance(slot, ParamHandle):
            count_change(tensor)  # torch gives it other memory, and graphs keep the old; ours is written over
        after_edit(slot)
    finally:
        slot.pager.unpin(slot)


def _precision(value: Tensor) -> str:
    """The setting with which parameters have this dtype from the start."""
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(value.dtype)
    return "precision" if short is None else f'precision="{short}"'


def _may_become(slot: TensorSlot, value: Any) -> bool:
    """While the model is being built a parameter may still change dtype and shape (``model.bfloat16()`` in the
    context)."""
    building = isinstance(slot, ParamHandle) and slot.unit is None and slot.pager.life.closed_because is None
    plain = type(value) is Tensor or type(value) is nn.Parameter
    return building and plain and value.device == slot.device and value.numel() > 0 and not value.is_complex()


def _become(tensor: Any, slot: ParamHandle, value: Tensor) -> None:
    """Move a parameter that is still being built into a block of another size."""
    tiers = slot.pager.tiers
    with slot.pager.lock:
        old = slot.block
        if old is None:
            raise RuntimeError(f"{slot.name} has no block")
        new = tiers.create(slot.name, old.kind, value.numel() * value.element_size(), old.owner)
        memory = slot.pager.memory_of(new)
        memory.acquire(new, load=False)
        try:
            tiers.remove(old)  # its owner hides the bytes: the tensor shows a stand-in now
            slot.become(value)
            slot.bind_as_shown(new, 0)
            with outside_user_modes():
                slot.view().copy_(get_data(value))
            if isinstance(new.owner, BlockView):
                new.owner.install()
            slot.version = version_of(tensor)
        finally:
            memory.release(new)
