"""Gradients on their way from a device to their blocks in host memory.

A gradient leaves in parts, through a ring of staging slots in the arena: copied out on a stream of its own while the
backward runs on, then landed by the same native pass as on a CPU device. Small gradients of a unit leave in one copy.
The pass runs on a separate thread, from where the end of a copy is noticed on: at a later landing, at a use of the
block, or when the ring is full. Until then the gradient tensor is kept, so that its memory is not used for anything
else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.copies.ring import StagingRing
from deepoffload.errors import BudgetError
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType
from deepoffload.optim.device_kernels import DeviceKernels, OperatorKernels
from deepoffload.optim.dtypes import NATIVE_DTYPES
from deepoffload.optim.gradient_state import GradientSlot
from deepoffload.optim.threads import landing_threads
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.timeline import Lane, Timeline

SLOTS = 4
SLOTS_MAX = 32
"""Parts on their way at once. So far may the program run ahead of the device in backward: when the ring is full it
waits for the oldest, and what it would launch meanwhile is missing on the device later."""

SLOT_BYTES_MAX = 16 << 20
SLOT_BYTES_MIN = cpu_adam.CHUNK * 4
"""Whole chunks of any type fit in a slot, and so whole blocks of the sums of squares: parts do not change these."""

RING_SHARE = 32
"""The ring takes at most this part of the host budget, where the least that works is not more."""


@dataclass
class _Landing:
    """One gradient: what is known of it so far, and how many parts are still to come. ``source`` keeps its memory."""

    slot: GradientSlot
    source: Tensor
    dtype: DType
    itemsize: int
    accumulate: bool
    measured: Callable[[int, bool], None]
    parts_left: int
    timeline: Timeline | None
    sum_sq: int = 0
    non_finite: bool = False

    def use(self, address: int, start: int, nbytes: int) -> tuple[int, bool]:
        """Land a part. The block is leased, so its address stays."""
        slot, first, numel = self.slot, start // self.itemsize, nbytes // self.itemsize
        begin_s = time.perf_counter()
        found = cpu_adam.land(
            slot.address() + first * slot.itemsize,
            address,
            numel,
            dst_dtype=NATIVE_DTYPES[slot.dtype],
            src_dtype=self.dtype,
            accumulate=self.accumulate,
            num_threads=1 if numel <= cpu_adam.CHUNK else landing_threads(),
        )
        if self.timeline is not None:
            self.timeline.add(Lane.LANDING, slot.name, begin_s, time.perf_counter(), numel * slot.itemsize)
        return found

    def used(self, result: tuple[int, bool]) -> None:
        """A part has landed."""
        sum_sq, non_finite = result
        self.sum_sq += sum_sq
        self.non_finite |= non_finite
        self.parts_left -= 1
        if self.parts_left == 0:
            self.measured(self.sum_sq, self.non_finite)


def ring_of(host_bytes: int) -> tuple[int, int]:
    """Bytes of a slot, and how many there are, in a host budget of ``host_bytes``."""
    share_bytes = host_bytes // RING_SHARE
    slot_bytes = share_bytes // SLOTS // SLOT_BYTES_MIN * SLOT_BYTES_MIN
    slot_bytes = min(max(slot_bytes, SLOT_BYTES_MIN), SLOT_BYTES_MAX)
    return slot_bytes, min(max(share_bytes // slot_bytes, SLOTS), SLOTS_MAX)


class DeviceLandings:
    """Lands gradients through the ring. Guarded by the tier manager's lock.

    Attributes:
        kernels: what updates optimizer state that is kept on the device, and sums up the gradients that stay there.
        no_room: where the host budget does not hold the ring, the error that says so. Models that come then are only
            counted, so that one error names a budget for all.
    """

    def __init__(self, memory: CopyMemory) -> None:
        self._memory = memory
        self._tiers = memory.tiers
        self.no_room: BudgetError | None = None
        self.kernels: DeviceKernels = OperatorKernels()
        try:
            self._ring = StagingRing(
                memory.link, "gradients", *ring_of(memory.tiers.arena.capacity_bytes), outside_user_modes
            )
        except BudgetError as error:
            self.no_room = error

    @property
    def ring_bytes(self) -> int:
        """What the ring takes of the host budget, all of it where that does not hold the ring."""
        return self._ring.nbytes if self.no_room is None else self._tiers.arena.capacity_bytes

    def take(
        self,
        slot: GradientSlot,
        grad: Tensor,
        dtype: DType,
        *,
        accumulate: bool,
        measured: Callable[[int, bool], None],
    ) -> None:
        """Start bringing ``grad`` (dense, in the slot's order of elements) to its resident block.

        ``grad`` is complete on the current stream. The block is leased meanwhile; ``measured`` is told the sum of
        squares, and whether a value is not finite, when the last part has landed, which may be inside of this call.
        """
        with self._tiers.lock, outside_user_modes():
            block = slot.block
            if block is None:
                raise RuntimeError(f"{slot.name} has no block")
            shown = self._memory.shows(block)
            if shown:
                self._memory.settle(block)  # what the program has written into what it was shown of the gradients
            source = grad.as_strided((slot.numel,), (1,)).view(torch.uint8)
            parts = self._ring.parts_of(source.numel())
            landing = _Landing(
                slot, source, dtype, grad.element_size(), accumulate, measured, parts, self._tiers.timeline
            )
            self._ring.take(source, block, landing, may_wait=not shown)
            if shown:
                self._memory.transfers.end(block)
                self._memory.refresh(block)
