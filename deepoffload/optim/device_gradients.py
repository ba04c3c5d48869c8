"""Gradients of units whose optimizer state is kept on the device: they stay there, too.

They are accumulated by torch's own operators, with the bits of the host's landing. Their sums of squares are taken when
a step asks for them, all at once: the host waits for the device once per step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deepoffload.copies.shown import ShownMemory
from deepoffload.memory.block import Block
from deepoffload.optim.device_sums import block_sums, exact_total
from deepoffload.optim.gradient_state import GradientRecord, GradientSlot, GradientState, place_of, slot_of
from deepoffload.params.torch_private import outside_user_modes


def land(memory: ShownMemory, slot: GradientSlot, grad: Tensor, *, accumulate: bool) -> None:
    """Take over what autograd has made, dense and in the slot's order of elements, on the current stream.

    Raises:
        BudgetError: views that the program holds leave no room on the device.
    """
    block, owner = place_of(slot)
    memory.acquire_to_change(block, load=owner.holds_any())
    try:
        memory.will_change(block)
        with outside_user_modes():
            source = grad.as_strided((slot.numel,), (1,))
            target = _flat(memory, slot, block)
            if accumulate:
                target.add_(source)
            else:
                target.copy_(source)
    finally:
        memory.release(block)
    memory.let_host_go(block)


def measure(memory: ShownMemory, records: Iterable[GradientRecord]) -> None:
    """Find the sums of squares of all landed gradients among ``records`` that are kept on the device and whose sum is
    not known. Waits for the device once."""
    waiting: list[tuple[GradientRecord, Tensor]] = []
    for record in records:
        if record.state is not GradientState.LANDED or record.sum_sq is not None:
            continue
        slot = slot_of(record)
        block, _ = place_of(slot)
        if memory.keeps(block):
            memory.acquire_to_change(block)
            try:
                with outside_user_modes():
                    waiting.append((record, block_sums(_flat(memory, slot, block), memory.scratch())))
            finally:
                memory.release(block)
    if waiting:
        with outside_user_modes():
            counts = [sums.numel() for _, sums in waiting]
            found = torch.cat([sums for _, sums in waiting]).cpu().split(counts)
        for (record, _), sums in zip(waiting, found, strict=True):
            record.measured(*exact_total(sums))


def _flat(memory: ShownMemory, slot: GradientSlot, block: Block) -> Tensor:
    return memory.flat(block, slot.form.offset_shown, slot.dtype, slot.numel)
