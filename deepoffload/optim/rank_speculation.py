"""Updates on a guess with several ranks: each updates its runs of a unit when the sums of all ranks have landed here.

Each rank guesses for itself. What other ranks get of a unit is gathered from what it stores, and a gather is a look: it
undoes the guess first (``WeightView.before_gather``), as does a part of a gradient that comes later. At the step all
ranks have the same norm, so all confirm what they have guessed, or all undo it. No call between ranks depends on a
guess.

A landing may happen in the middle of something else, such as a launch. So no guess is made there: a unit whose sums
have landed is guessed when autograd completes the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from deepoffload.optim.gradients import Gradients
from deepoffload.optim.rank_gradients import RankGradients
from deepoffload.optim.rule import UpdateJob
from deepoffload.optim.speculation.on_device import DeviceSpeculation
from deepoffload.optim.speculation.port import GuessingOptimizer
from deepoffload.optim.speculation.speculation import Speculation, StepSoFar
from deepoffload.optim.speculation.unit_choice import StepOutcome
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.schedule.speculation import PhaseWaits

LANDS_WITHIN_S = 0.1
"""So long a rank waits for the other ranks' part of a unit that it is about to guess, once all have agreed on the sum.
Where that is not enough it waits no more before the next step: another rank's program is elsewhere."""
_OUTCOME = struct.Struct("<3d2?")
"""How a rank tells the others of its step."""


class RankSpeculation(Speculation):
    """The guesses of one rank. Arguments and attributes as above.

    All ranks choose the same units, as long as their programs are the same: what a step says of its guesses is that of
    all ranks together. Else one would wait for the other in each phase.
    """

    def __init__(
        self, pager: Pager, gradients: RankGradients, disk_bytes_per_s: float, *, asked_for: bool = True
    ) -> None:
        super().__init__(pager, gradients, disk_bytes_per_s, asked_for=asked_for)
        self._contributions = gradients.contributions
        self._link = gradients.link
        self._coming: dict[Unit, None] = {}
        self._waits = True

    def landed(self, handle: ParamHandle) -> None:
        """This rank's part of a gradient has been taken from autograd. If it was the last one of its unit, those that
        were complete before are updated as far as their sums have come."""
        unit = handle.unit
        self.choice.in_backward()
        if unit is None or not self._last.landed(handle):
            return
        guesses = self.choice.share > 0
        if not guesses:  # all ranks have these in the same order; in which they complete depends on the link
            self.choice.completed(unit, self._guessed_bytes(unit))
        for other in list(self._coming):
            if self._contributions.settle_within(other, LANDS_WITHIN_S if self._waits and guesses else 0.0):
                del self._coming[other]
                self._complete(other)
            else:
                self._waits = False
        self._coming[unit] = None
        unit.awaits_step = True

    def _guessed_bytes(self, unit: Unit) -> int:
        """As above. 0 where a rank has nothing to update: the others would be ready to use the unit before it is."""
        layout = unit.gradient_layout
        if layout is None or any(next(layout.runs(rank), None) is None for rank in range(layout.world_size)):
            return 0
        return super()._guessed_bytes(unit)

    def _make(self, unit: Unit, optimizer: GuessingOptimizer, handles: Sequence[ParamHandle]) -> bool:
        with self._link.hold():  # what other ranks want may need the update of another unit: not in the middle of this
            return super()._make(unit, optimizer, handles)

    def settle(self, optimizer: GuessingOptimizer, jobs: Mapping[ParamHandle, UpdateJob], factor: float | None) -> None:
        """As above; the ranks have met, and agree on what the step says of the guesses."""
        super().settle(optimizer, jobs, factor)
        step = self._steps.setdefault(optimizer, StepSoFar())
        waits = self.choice.waits()
        mine = _OUTCOME.pack(waits.step_s, waits.forward_s, waits.backward_s, step.wrong, bool(self._of(optimizer)))
        said = [_OUTCOME.unpack(message) for message in self._link.exchange_messages(mine)]
        step_s, forward_s, backward_s, wrong, confirms = map(max, zip(*said, strict=True))
        step.agreed = StepOutcome(PhaseWaits(step_s, forward_s, backward_s), wrong, confirms)

    def _end(self, optimizer: object) -> None:
        """As above."""
        super()._end(optimizer)
        self._waits = True
        for unit in self._units_of(optimizer):
            unit.awaits_step = False


def speculate(pager: Pager, gradients: Gradients, disk_bytes_per_s: float, *, asked_for: bool = True) -> Speculation:
    """From now on units are updated on guesses. Arguments as those of :class:`Speculation`."""
    kind: Any = Speculation if gradients.from_device is None else DeviceSpeculation
    if isinstance(gradients, RankGradients):
        kind = RankSpeculation
    made: Speculation = kind(pager, gradients, disk_bytes_per_s, asked_for=asked_for)
    return made
