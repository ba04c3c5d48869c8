"""The memory of contributions: slots in the arena in which they are filled and sent, and room for what arrives."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepoffload.errors import BudgetError
from deepoffload.memory.block import Block
from deepoffload.memory.detour import read_in, write_out
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native import cpu_adam
from deepoffload.native.aio import round_up
from deepoffload.optim.contribution import Contribution
from deepoffload.optim.contribution_layout import CARRIER, MORE, PRESENT, RESUMED, ContributionLayout, Stretch
from deepoffload.optim.gradients_out import GradientsOut
from deepoffload.optim.threads import num_threads
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.ranks.exchange import Reduction, TransferSizes
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.placement import BlockKind

SLOTS_MIN = 2
"""One contribution is being filled while another is on its way."""
SLOTS_MAX = 4
SLOTS_SHARE = 16
"""More than ``SLOTS_MIN`` slots take at most this part of the host budget."""
SCRATCHES = {"group": 1, "memory": 2}
"""Reductions that may have arrived and not landed. By collectives each takes as much memory as a contribution."""


class SlotSizes(NamedTuple):
    """How many slots and scratch ranges there are, and the bytes of each."""

    slots: int = 0
    slot_bytes: int = 0
    scratches: int = 0
    scratch_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Of all together."""
        return self.slots * self.slot_bytes + self.scratches * self.scratch_bytes


def slot_sizes(part_bytes: int, exchange: TransferSizes, host_bytes: int) -> SlotSizes:
    """What contributions take of a rank's host budget.

    Args:
        part_bytes: the largest ``ContributionLayout.part_nbytes`` of any unit; 0 where nothing is trained.
        exchange: moves them.
        host_bytes: the rank's host budget.
    """
    if not part_bytes:
        return SlotSizes()
    world_size = exchange.ranks.world_size
    slot_bytes = part_bytes * world_size
    slots = min(max(host_bytes // SLOTS_SHARE // slot_bytes, SLOTS_MIN), SLOTS_MAX)
    scratch_bytes = exchange.scratch_bytes(reduction_of(part_bytes, tuple(range(world_size))))
    return SlotSizes(slots, slot_bytes, SCRATCHES[exchange.transport], scratch_bytes)


def reduction_of(part_bytes: int, contributors: tuple[int, ...]) -> Reduction:
    """A reduction as transports see it."""
    return Reduction(contributors, part_bytes // CARRIER.itemsize, CARRIER)


class ContributionSlots:
    """Slots and scratch memory in the arena, whose addresses other ranks know: they do not move. Guarded by the tier
    manager's lock. ``out``: brings gradients from the device that computes them; None for a CPU.

    Attributes:
        sizes: of what there is.
        free: offsets of slots in the arena.
        free_scratch: scratch memory, as uint8.
    """

    def __init__(self, tiers: TierManager, out: GradientsOut | None = None) -> None:
        self._tiers = tiers
        self._out = out
        self.sizes = SlotSizes()
        self.free: list[int] = []
        self.free_scratch: list[Tensor] = []
        self._ranges: list[int] = []
        self._outside_bytes = 0  # of contributions that are in blocks
        self._aside_bytes = 0  # of those that :meth:`bring_back` has brought

    def reserve(self, sizes: SlotSizes) -> None:
        """Take these, instead of those that were there. None may be in use.

        Raises:
            BudgetError: the host budget has no room for them. Those that were there are there again.
        """
        before = self.sizes
        try:
            self._take(sizes)
        except BudgetError:
            self._take(before)
            raise

    def _take(self, sizes: SlotSizes) -> None:
        while self._ranges:
            self._tiers.arena.free(self._ranges.pop())
        self.sizes = sizes
        self.free = [self._range(sizes.slot_bytes) for _ in range(sizes.slots)]
        scratch = [self._range(sizes.scratch_bytes) for _ in range(sizes.scratches)]
        self.free_scratch = [self.view(offset, torch.uint8, sizes.scratch_bytes) for offset in scratch]

    def view(self, offset: int, dtype: torch.dtype, nbytes: int) -> Tensor:
        """A part of the arena as a tensor with one dimension."""
        with outside_user_modes():
            buffer = self._tiers.arena.buffer
            return torch.frombuffer(buffer, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)

    def slot(self, offset: int, layout: ContributionLayout) -> Tensor:
        """A contribution in a slot, as transports see it."""
        return self.view(offset, CARRIER, layout.nbytes)

    def put(self, contribution: Contribution, number: int, grad: Tensor) -> None:
        """Copy a gradient, whose elements lie in memory as those of its parameter, into the contribution in a slot."""
        stretches = contribution.plan.layout.stretches(number)
        if self._out is None:
            self._copy(contribution.offset, stretches, grad)
        else:
            contribution.begin_s = contribution.begin_s or time.perf_counter()
            contribution.sources.append(self._out.put(contribution.offset, stretches, grad))
        contribution.present.add(number)
        contribution.was_resumed |= contribution.was_passed

    def _copy(self, offset: int, stretches: Sequence[Stretch], grad: Tensor) -> None:
        base, source, itemsize = self._tiers.arena.address + offset, grad.data_ptr(), grad.element_size()
        for start, numel, place in stretches:
            threads = 1 if numel <= cpu_adam.CHUNK else num_threads()
            cpu_adam.copy(base + place, source + start * itemsize, numel * itemsize, threads)

    def seal(self, contribution: Contribution) -> None:
        """Say in a contribution in a slot which gradients it has and which may still come, and fill the place of those
        that it lacks."""
        layout, dtypes = contribution.plan.layout, [handle.dtype for handle in contribution.plan.numbers]
        present, coming = contribution.present, contribution.coming
        for number, dtype in enumerate(dtypes):
            if number not in present:
                for _, numel, place in layout.stretches(number):
                    nothing = self.view(contribution.offset + place, dtype, numel * dtype.itemsize)
                    with outside_user_modes():
                        nothing.fill_(-0.0)
        resumed = RESUMED * contribution.was_resumed
        said = bytes(resumed | PRESENT * (n in present) | MORE * (n in coming) for n in range(len(dtypes)))
        for place in layout.presence_offsets():
            ctypes.memmove(self._tiers.arena.address + contribution.offset + place, said, len(said))

    def has_room_aside(self, contribution: Contribution) -> bool:
        """Whether a contribution in a block may be in memory outside of slots, together with those that are so now:
        next to all that a step needs at once."""
        if self._tiers.space is None:
            return True  # it is there already
        return self.has_spare(round_up(contribution.plan.layout.nbytes))

    def has_spare(self, nbytes: int) -> bool:
        """Whether memory has room for so much, and what is aside now, next to all that a step needs at once."""
        return self._aside_bytes + nbytes <= self._spare_bytes()

    def _spare_bytes(self) -> float:
        """What the budget has next to the blocks that stay, and to all that a step needs of the others at once."""
        placement = self._tiers.room.placement
        if placement is None:
            return math.inf
        window = placement.window
        ring_bytes = min(window.ring_pieces, 2) * window.ring_bytes // max(window.ring_pieces, 1)
        return placement.dynamic_bytes - window.weight_bytes - window.gradient_bytes - ring_bytes

    def move_out(self, contribution: Contribution, *, for_another: bool = False) -> bool:
        """Free the slot of a contribution that other ranks do not know yet. It goes into a block, which is paged like
        others; straight to NVMe where memory has no room for one. False, with nothing done, where NVMe has none either.

        Args:
            for_another: one that is brought back needs the slot, and gives its room. Else as much is left on NVMe, for
                when all slots are taken then.

        Raises:
            IoFailure: it could not be written. Nothing is done.
        """
        if contribution.block is not None:
            raise RuntimeError(f"a contribution to {contribution.plan.unit.name} is in no slot")
        if contribution.sources and self._out is not None:
            self._out.mark().synchronize()
            contribution.sources.clear()
        tiers, offset, nbytes = self._tiers, contribution.offset, contribution.plan.layout.nbytes
        block = tiers.create(f"a contribution to {contribution.plan.unit.name}", BlockKind.GRADIENT, nbytes)
        staying_bytes = 0 if tiers.space is not None else self._outside_bytes
        try:
            moved = tiers.transfers.spare_disk_bytes() >= (0 if for_another else self.sizes.slot_bytes) and (
                (staying_bytes + block.room_bytes <= self._spare_bytes() and self._copy_out(block, offset))
                or write_out(tiers, block, tiers.arena.address + offset)
            )
        except BaseException:
            tiers.remove(block)
            raise
        if not moved:
            tiers.remove(block)
            return False
        contribution.block = block
        self._outside_bytes += block.room_bytes
        self.free.append(offset)
        return True

    def _copy_out(self, block: Block, offset: int) -> bool:
        tiers = self._tiers
        try:
            tiers.acquire(block, load=False)
        except BudgetError:
            return False
        cpu_adam.copy(tiers.address(block), tiers.arena.address + offset, block.nbytes, num_threads())
        tiers.release(block)
        return True

    def move_in(self, contribution: Contribution) -> None:
        """The contribution in a block goes into a free slot, and the block goes.

        Raises:
            IoFailure: it could not be read. Nothing is done.
        """
        tiers, block, offset = self._tiers, _block_of(contribution), self.free[-1]
        if block.state is BlockState.ON_NVME:
            read_in(tiers, block, tiers.arena.address + offset)
        else:
            tiers.acquire(block)
            cpu_adam.copy(tiers.arena.address + offset, tiers.address(block), block.nbytes, num_threads())
            tiers.release(block)
        self._forget(block)
        contribution.offset, contribution.block = self.free.pop(), None
        contribution.memory = self.slot(contribution.offset, contribution.plan.layout)

    def bring_back(self, contribution: Contribution) -> None:
        """Have the contribution in a block in memory outside of slots, for transports, until :meth:`drop`.

        Raises:
            BudgetError: there is no room for it.
        """
        block = _block_of(contribution)
        self._tiers.acquire(block)
        block.copying += 1  # else it might move
        self._aside_bytes += block.room_bytes
        if block.offset is None:
            raise RuntimeError(f"{block.name} has no memory")
        contribution.memory = self.slot(block.offset, contribution.plan.layout)

    def drop(self, contribution: Contribution) -> None:
        """A contribution has been read by all: its slot is free, or the block that it was moved to goes."""
        block = contribution.block
        if block is None:
            self.free.append(contribution.offset)
            return
        block.copying -= 1
        self._aside_bytes -= block.room_bytes
        self._tiers.release(block)
        self._forget(block)

    def _forget(self, block: Block) -> None:
        self._outside_bytes -= block.room_bytes
        self._tiers.remove(block)

    def _range(self, nbytes: int) -> int:
        start = self._tiers.arena.allocate(nbytes, high=True)
        if start is None:
            start = self._tiers.room.reserve("gradients on their way to other ranks", nbytes)
        self._ranges.append(start)
        return start


def _block_of(contribution: Contribution) -> Block:
    if contribution.block is None:
        raise RuntimeError(f"a contribution to {contribution.plan.unit.name} is in its slot")
    return contribution.block
