"""Which units are updated on a guess: a share of them, spread over backward, as long as guesses are right."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from deepoffload.memory.transfers import TierCounters
from deepoffload.params.unit import Unit
from deepoffload.schedule.speculation import FIRST_SHARE, BackwardShare, PhaseWaits, Trust, UnitPause, choose_evenly

log = logging.getLogger("deepoffload")


@dataclass(frozen=True)
class StepOutcome:
    """What a step says of the guesses that were made for it.

    Attributes:
        wrong: a guess was undone by the step, or would have been.
        confirms: a guess was right.
    """

    waits: PhaseWaits
    wrong: bool
    confirms: bool


class UnitChoice:
    """Chooses again only where the share or the model has changed: the planner knows the order of uses from the last
    step, so that order has to repeat.

    Args:
        counters: of the memory; tell how long the program waited.
        asked_for, first_share: see :class:`BackwardShare`.

    Attributes:
        backward_wait_s: how long the last backward waited for transfers.
    """

    def __init__(self, counters: TierCounters, *, asked_for: bool, first_share: float = FIRST_SHARE) -> None:
        self.backward_wait_s = 0.0
        self._counters = counters
        self._share = BackwardShare(asked_for=asked_for, first_share=first_share)
        self._trust = Trust()
        self._pauses: weakref.WeakKeyDictionary[Unit, UnitPause] = weakref.WeakKeyDictionary()
        self._order: dict[Unit, int] = {}
        self._known: dict[int, int] = {}  # what moves of each unit, in the order in which they have completed
        self._sizes: tuple[tuple[int, int], ...] = ()
        self._chosen: frozenset[int] = frozenset()
        self._step_began_s = time.perf_counter()
        self._waited_s = counters.wait_s
        self._waited_before_backward_s: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether guesses are made at all."""
        return self._trust.is_on

    @property
    def share(self) -> float:
        """Of the bytes of state that move, those that are to move in backward."""
        return self._share.share if self.is_on else 0.0

    def in_backward(self) -> None:
        """A gradient has landed."""
        if self._waited_before_backward_s is None:
            self._waited_before_backward_s = self._counters.wait_s

    def completed(self, unit: Unit, moving_bytes: int) -> bool:
        """A unit has all its gradients, and so much of its state moves. Whether to update it on a guess."""
        self._order[unit] = moving_bytes
        pause = self._pauses.get(unit)
        return self.is_on and unit.index in self._chosen and (pause is None or pause.is_over())

    def looked_at(self, unit: Unit) -> None:
        """The program looked at the unit, so that its guess was undone before the step."""
        self._pauses.setdefault(unit, UnitPause()).looked_at()

    def waits(self) -> PhaseWaits:
        """Of the step that is about to end."""
        waited = self._counters.wait_s
        before_backward = waited if self._waited_before_backward_s is None else self._waited_before_backward_s
        step_s = time.perf_counter() - self._step_began_s
        return PhaseWaits(step_s, before_backward - self._waited_s, waited - before_backward)

    def step_ended(self, confirmed: Mapping[Unit, object], outcome: StepOutcome) -> None:
        """A step is over, which has confirmed the guesses of some units."""
        self.backward_wait_s = outcome.waits.backward_s
        for unit, pause in self._pauses.items():
            pause.step_ended(confirmed=unit in confirmed)
        if self._order and self._trust.step_ended(wrong=outcome.wrong):
            self._tell()
        may_begin = self._order and not self._share.share and not outcome.wrong
        if (outcome.confirms or may_begin) and self._share.step_ended(outcome.waits):
            self._sizes = ()
            self._tell()
        self._choose()
        self._step_began_s, self._waited_s = time.perf_counter(), self._counters.wait_s
        self._waited_before_backward_s = None

    def _choose(self) -> None:
        """Units that a step leaves out, as layer drop does, change nothing."""
        self._known |= {unit.index: nbytes for unit, nbytes in self._order.items()}
        self._order = {}
        sizes = tuple(self._known.items())
        if sizes and sizes != self._sizes:
            self._sizes = sizes
            chosen = choose_evenly([nbytes for _, nbytes in sizes], self._share.share)
            self._chosen = frozenset(index for (index, _), taken in zip(sizes, chosen, strict=True) if taken)

    def _tell(self) -> None:
        if self.is_on:
            log.info("%.0f %% of the optimizer state is updated inside backward", 100 * self.share)
        else:
            log.info(
                "updates inside backward are off: of the last steps %.0f %% would have had to be repeated",
                100 * self._trust.wrong_share,
            )
