"""Gradients on their way from a device to their blocks in host memory.

A gradient leaves in pieces, through a ring of staging slots in the arena: copied out on a stream of its own beside the
backward that goes on, then landed by the same native pass as on a CPU device. The pass runs where the end of a copy is
noticed: at a later landing, at a use of the block, or when the ring is full. Until then the gradient tensor is kept, so
that its memory is not used for anything else.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.errors import BudgetError
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType
from deepoffload.optim.dtypes import NATIVE_DTYPES
from deepoffload.optim.threads import num_threads
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import GradientSlot
from deepoffload.timeline import Lane

SLOTS = 4
SLOTS_MAX = 32
"""Pieces on their way at once. So far may the program run ahead of the device in backward: when the ring is full it
waits for the oldest, and what it would launch meanwhile is missing on the device later."""

SLOT_BYTES_MAX = 16 << 20
SLOT_BYTES_MIN = cpu_adam.CHUNK * 4
"""The pass adds sums of squares in chunks; whole chunks of any type fit in a slot, so pieces do not change the sums."""

RING_SHARE = 32
"""The ring takes at most this part of the host budget, where the least that works is not more."""


@dataclass
class _Landing:
    """One gradient: what is known of it so far, and how many pieces are still to come."""

    slot: GradientSlot
    source: Tensor
    dtype: DType
    accumulate: bool
    pieces_left: int
    sum_sq: float = 0.0
    non_finite: bool = False


def ring_of(host_bytes: int) -> tuple[int, int]:
    """Bytes of a slot, and how many there are, in a host budget of ``host_bytes``."""
    share_bytes = host_bytes // RING_SHARE
    slot_bytes = share_bytes // SLOTS // SLOT_BYTES_MIN * SLOT_BYTES_MIN
    slot_bytes = min(max(slot_bytes, SLOT_BYTES_MIN), SLOT_BYTES_MAX)
    return slot_bytes, min(max(share_bytes // slot_bytes, SLOTS), SLOTS_MAX)


class DeviceLandings:
    """The ring. Guarded by the tier manager's lock.

    Raises:
        BudgetError: the host budget has no room for it.
    """

    def __init__(self, memory: CopyMemory) -> None:
        self._memory = memory
        self._tiers = memory.tiers
        arena = memory.tiers.arena
        self._slot_bytes, slots = ring_of(arena.capacity_bytes)
        self.ring_bytes = slots * self._slot_bytes
        start = arena.allocate(self.ring_bytes)
        if start is None:
            raise BudgetError(
                f"host_budget is {arena.capacity_bytes} bytes; {self.ring_bytes} are needed for gradients on their way "
                f"from {memory.device} alone. Raise host_budget"
            )
        memory.link.pinned.lock(
            start, self.ring_bytes
        )  # before all else: a gradient that waits for its copy stops backward
        self._free = [start + index * self._slot_bytes for index in range(slots)]

    def take(self, slot: GradientSlot, grad: Tensor, dtype: DType, *, accumulate: bool) -> None:
        """Start bringing ``grad`` (dense, in the slot's order of elements) to its resident block.

        ``grad`` is complete on the current stream. The block is leased meanwhile; its sum of squares is unknown until
        the last piece has landed.
        """
        with self._tiers.lock, outside_user_modes():
            block = slot.block
            if block is None:
                raise RuntimeError(f"{slot.name} has no block")
            shown = self._memory.shows(block)
            if shown:
                self._memory.settle(block)  # what the program has written into what it was shown of the gradients
            slot.handle.grad_sum_sq = None
            flat = grad.as_strided((slot.numel,), (1,))
            step = self._slot_bytes // flat.element_size()
            landing = _Landing(slot, flat, dtype, accumulate, -(-slot.numel // step))
            accelerator = self._memory.accelerator
            stream = accelerator.copy_out
            stream.wait_event(accelerator.event(accelerator.current()))
            for start in range(0, slot.numel, step):
                numel = min(step, slot.numel - start)
                offset = self._take_slot()
                with accelerator.on(stream):
                    self._memory.link.take(flat[start : start + numel].view(torch.uint8), offset)
                self._tiers.acquire(block)
                then = partial(self._land, landing, offset, start, numel)
                nbytes = numel * flat.element_size()
                self._memory.transfers.launched(Lane.FROM_DEVICE, accelerator.event(stream), block, nbytes, then)
            if shown:
                self._memory.transfers.end(block)
                self._memory.refresh(block)

    def _take_slot(self) -> int:
        self._memory.transfers.poll()
        while not self._free:
            if not self._memory.transfers.end_oldest():
                raise RuntimeError("the staging ring is full, and nothing is on its way")
        return self._free.pop()

    def _land(self, landing: _Landing, offset: int, start: int, numel: int) -> None:
        slot, timeline = landing.slot, self._tiers.timeline
        begin_s = time.perf_counter()
        sum_sq, non_finite = cpu_adam.land(
            slot.address() + start * slot.itemsize,
            self._tiers.arena.address + offset,
            numel,
            dst_dtype=NATIVE_DTYPES[slot.dtype],
            src_dtype=landing.dtype,
            accumulate=landing.accumulate,
            num_threads=1 if numel <= cpu_adam.CHUNK else num_threads(),
        )
        self._free.append(offset)
        if timeline is not None:
            timeline.add(Lane.LANDING, slot.name, begin_s, time.perf_counter(), numel * slot.itemsize)
        landing.sum_sq += sum_sq
        landing.non_finite |= non_finite
        landing.pieces_left -= 1
        if landing.pieces_left == 0:
            slot.handle.grad_sum_sq, slot.handle.grad_non_finite = landing.sum_sq, landing.non_finite
