"""Updates inside backward with several ranks: each rank updates its runs of a unit when the sums of all have landed.

A landing may happen in the middle of something else, such as a launch. So a unit whose last gradient has landed only
gets a *decided* update as its ``pending``. It is made when autograd comes to the next gradient and no rank reads the
unit, at the step, or when somebody looks at the unit. A gather is a look, on every rank: it is launched after the same
reductions everywhere, so it shows the unit before its update on all ranks, or after it on all.

Whether more gradients come is said in the contributions, since one rank's program may be further than another's. Where
a sum lacks a rank that waits for it, that rank's part comes later.

A unit that has given all its gradients here is not gathered in advance before the step: when its update is made depends
on the other ranks, and ranks that differ in what they want agree in more rounds.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepoffload.memory.block import Block
from deepoffload.optim.in_backward import EarlyOptimizer, EarlyUpdates
from deepoffload.params.unit import ParamHandle, Unit


class RankEarlyUpdates(EarlyUpdates):
    """Which parameters are updated in this backward already. Attributes as above."""

    def __init__(self) -> None:
        super().__init__()
        self._given: list[Unit] = []

    def given(self, unit: Unit) -> None:
        """This rank has announced all its gradients of a unit."""
        if not self.paused:
            unit.awaits_step = True
            self._given.append(unit)

    def end_of_step(self, optimizer: EarlyOptimizer) -> int:
        """As above."""
        for unit in self._given:
            unit.awaits_step = False
        self._given.clear()
        return super().end_of_step(optimizer)

    def sums_landed(self, handles: Iterable[ParamHandle]) -> None:
        """The last gradients of these before the step have landed, of all ranks. A unit that has all of its gradients
        gets its update; one that several optimizers update is left to their steps."""
        for handle in handles:
            owned = self._completed_by(handle)
            if len(owned) != 1 or handle.unit is None:
                continue
            ((optimizer, complete),) = owned.items()
            self._used.update(complete)
            handle.unit.pending = _Decided(optimizer, complete)
            self.decided.append(handle.unit)


class _Decided:
    """A unit's update inside backward that has not begun (a :class:`~deepoffload.params.unit.PendingUpdate`)."""

    is_guess = False

    def __init__(self, optimizer: EarlyOptimizer, handles: list[ParamHandle]) -> None:
        self._optimizer = optimizer
        self._handles = handles

    def apply(self, unit: Unit) -> None:
        """Decide on it with the settings that the optimizer has now, and make it."""
        unit.pending = None
        begun = False
        try:
            self._optimizer.update_early(self._handles, wait=True)
            begun = True
        finally:
            if not begun and unit.pending is None:
                unit.pending = self  # it is tried again
        if unit.pending is not None:
            unit.pending.apply(unit)

    def needs(self, handle: ParamHandle) -> bool:
        """Whether it will use the gradient of ``handle``."""
        return handle in self._handles

    def blocks_to_change(self, unit: Unit) -> list[Block] | None:
        """Not known before it is decided on."""
        return None
