"""Updates on a guess where a device computes backward: the host, which is idle then, updates units meanwhile.

A gradient is in host memory when its copy from the device has ended, which a later call notices. So a unit that has all
its gradients waits, and is updated when one of another unit lands and those of its own have come.
"""

from __future__ import annotations

from deepoffload.memory.block import Block
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.speculation.speculation import Speculation
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, Unit


class DeviceSpeculation(Speculation):
    """The guesses of one pager with a device. Arguments and attributes as above."""

    def __init__(self, pager: Pager, gradients: Gradients, disk_bytes_per_s: float, *, asked_for: bool = True) -> None:
        super().__init__(pager, gradients, disk_bytes_per_s, asked_for=asked_for)
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
