"""What the rest of the optimizers sees of speculation, and what it sees of them: imports go one way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from deepoffload.optim.rule import Rule, UpdateJob
from deepoffload.params.unit import ParamHandle

if TYPE_CHECKING:
    from deepoffload.optim.speculation.guess import GuessedStep
    from deepoffload.optim.update import HostUpdate


class GuessingOptimizer(Protocol):
    """What an optimizer offers (implemented by :class:`deepoffload.optim.base.HostOptimizer`)."""

    rule: ClassVar[Rule]

    def guess_step(self, handles: Sequence[ParamHandle]) -> GuessedStep:
        """What the step will be for these, if nothing clips. Raises what ``step()`` would raise."""

    def surely_clips(self, squares: int) -> bool:
        """Whether the step clips for certain, given the sum of squares of some of its gradients."""


class SpeculationPort(Protocol):
    """The guesses of one pager (implemented by :class:`~deepoffload.optim.speculation.speculation.Speculation`). All of
    it is called under the pager's lock."""

    @property
    def is_asked_for(self) -> bool:
        """Whether the user asks for guesses."""

    def announce(self, is_last: bool | None) -> None:
        """The next backward is the last one before ``step()``, or is not; None: nobody says so any more."""

    def landed(self, handle: ParamHandle) -> None:
        """A gradient has landed in its unit's block."""

    def backward_ended(self, optimizer: GuessingOptimizer) -> None:
        """The step of ``optimizer`` is about to wait for all gradients."""

    def settle(self, optimizer: GuessingOptimizer, jobs: Mapping[ParamHandle, UpdateJob], factor: float | None) -> None:
        """Undo the guesses that differ from the step of ``optimizer``. Those that are left are right.

        Args:
            factor: what gradients are multiplied by; None: the step is skipped.

        Raises:
            IoFailure, BudgetError: something cannot be undone. The step has not begun.
        """

    def confirm(self, optimizer: GuessingOptimizer, update: HostUpdate) -> None:
        """``update`` is the step that was settled: what is left of the guesses of its units is part of it."""

    def end_of_step(self, optimizer: GuessingOptimizer) -> None:
        """A step of ``optimizer`` is over, made or skipped."""

    def forget(self, optimizer: GuessingOptimizer) -> None:
        """``zero_grad()``: the gradients so far are for no step. Raises as :meth:`settle`."""

    def stats(self) -> dict[str, float]:
        """Numbers so far."""
