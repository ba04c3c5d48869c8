"""Updates on a guess where a device computes backward: the host, which is idle then, updates units meanwhile.

A gradient is in host memory when its copy from the device has ended, which a later call notices. So a unit that has all
its gradients waits, and is updated when one of another unit lands and those of its own have come. ``step()`` has to
wait for all gradients: it makes the guesses that are left as they come, while the device computes the others.

State that stays in memory is written to another place in memory, so that nothing is copied.
"""

from __future__ import annotations

from deepoffload.memory.block import Block
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.speculation.port import GuessingOptimizer
from deepoffload.optim.speculation.speculation import Speculation
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.schedule.speculation import FIRST_SHARE_ON_DEVICE


class DeviceSpeculation(Speculation):
    """The guesses of one pager with a device. Arguments and attributes as above."""

    def __init__(self, pager: Pager, gradients: Gradients, disk_bytes_per_s: float, *, asked_for: bool = True) -> None:
        super().__init__(pager, gradients, disk_bytes_per_s, asked_for=asked_for, first_share=FIRST_SHARE_ON_DEVICE)
        self.in_memory = True
        self._coming: dict[Unit, list[Block]] = {}

    def landed(self, handle: ParamHandle) -> None:
        """A gradient is on its way to its unit's block. If it was the last one of its unit, this one is updated later;
        those are updated now whose gradients have come."""
        self.choice.in_backward()
        unit = handle.unit
        for other, blocks in list(self._coming.items()):
            if not any(block.copying for block in blocks):
                del self._coming[other]
                self._complete(other)
        if unit is None or (unit.gradients is not None and self._pager.memory.keeps(unit.gradients)):
            return  # its update is made on the device, and to know its norm now would keep the host waiting
        if self._last.landed(handle):
            self._coming[unit] = self._gradients.blocks_in_use(unit.handles)

    def backward_ended(self, optimizer: GuessingOptimizer) -> None:
        """The step waits for all gradients: what has waited for its own is updated when they have come."""
        copies = self._tiers.copies
        mine = set(self._units_of(optimizer)) if self._coming and copies is not None else set()
        for unit in [unit for unit in self._coming if unit in mine]:
            for block in self._coming.pop(unit, ()):
                if copies is not None:
                    copies.end_copies(block)
            self._complete(unit)
