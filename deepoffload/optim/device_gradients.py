"""Gradients of units whose optimizer state is kept on the device: they stay there, too.

They are accumulated by torch's own operators, with the bits of the host's landing. Their sums of squares are taken when
a step asks for them, all at once: the host waits for the device once per step.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor

from deepoffload.copies.shown import ShownMemory
from deepoffload.memory.block import Block
from deepoffload.native.cpu_adam import SUM_BLOCK
from deepoffload.optim.device_kernels import DeviceKernels
from deepoffload.optim.device_sums import blocks_of, exact_total
from deepoffload.optim.gradient_state import GradientRecord, GradientSlot, GradientState, place_of, slot_of
from deepoffload.params.torch_private import outside_user_modes

SUMS_SHARE = 8
"""Of the scratch memory, this part is for sums of squares on their way to the host."""


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


def measure(memory: ShownMemory, kernels: DeviceKernels, records: Iterable[GradientRecord]) -> None:
    """Find the sums of squares of all landed gradients among ``records`` that are kept on the device and whose sum is
    not known. The sums come to the host together: it waits for the device once, or more often where the scratch memory
    has no room for all of them."""
    with ExitStack() as leases:
        waiting: list[tuple[GradientRecord, Tensor]] = []
        for record in records:
            if record.state is not GradientState.LANDED or record.sum_sq is not None:
                continue
            slot = slot_of(record)
            block, _ = place_of(slot)
            if memory.keeps(block):
                memory.acquire_to_change(block)
                leases.callback(memory.release, block)
                waiting.append((record, _flat(memory, slot, block)))
        if waiting:
            with outside_user_modes():
                found = _totals(memory, kernels, [values for _, values in waiting])
            for (record, _), (sum_sq, non_finite) in zip(waiting, found, strict=True):
                record.measured(sum_sq, non_finite)


def _totals(memory: ShownMemory, kernels: DeviceKernels, gradients: list[Tensor]) -> list[tuple[int, bool]]:
    """Of each gradient the exact sum of its squares, and whether one is not finite."""
    scratch = memory.scratch()
    sums_bytes = scratch.numel() // SUMS_SHARE // 256 * 256
    sums, rest = scratch[:sums_bytes].view(torch.float64), scratch[sums_bytes:]
    totals = [(0, False)] * len(gradients)
    parts: list[tuple[int, Tensor]] = []
    left = sums.numel()

    def fetch() -> None:
        counts = [blocks_of(part.numel()) for _, part in parts]
        kernels.block_sums([part for _, part in parts], sums[: sum(counts)], rest)
        found = sums[: sum(counts)].cpu().split(counts)
        for (number, _), of_part in zip(parts, found, strict=True):
            sum_sq, non_finite = exact_total(of_part)
            before, was = totals[number]
            totals[number] = before + sum_sq, was or non_finite
        parts.clear()

    for number, values in enumerate(gradients):
        begin = 0
        while begin < values.numel():
            part = values[begin : begin + left * SUM_BLOCK]
            parts.append((number, part))
            begin += part.numel()
            left -= blocks_of(part.numel())
            if not left:
                fetch()
                left = sums.numel()
    if parts:
        fetch()
    return totals


def _flat(memory: ShownMemory, slot: GradientSlot, block: Block) -> Tensor:
    return memory.flat(block, slot.form.offset_shown, slot.dtype, slot.numel)
