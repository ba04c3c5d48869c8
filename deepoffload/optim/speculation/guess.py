"""One unit's update that was made inside backward, before anybody asked for the step."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deepoffload.memory.block import Block
from deepoffload.memory.kept_bytes import KeptBytes
from deepoffload.optim.rule import Rule, UpdateJob
from deepoffload.optim.update import HostUpdate
from deepoffload.params.unit import ParamHandle, Unit

UNDONE_AHEAD = 4
"""While one guess is undone, what so many need is read."""


class GuessState(enum.Enum):
    """What a unit's blocks hold."""

    MAKING = "what they held before, or partly what the update has made"
    MADE = "what the update has made; what they held before is kept"
    CONFIRMED = "what the update has made, for good"
    UNDONE = "what they held before"


_TRANSITIONS = {
    GuessState.MAKING: frozenset({GuessState.MADE, GuessState.UNDONE}),
    GuessState.MADE: frozenset({GuessState.CONFIRMED, GuessState.UNDONE}),
    GuessState.CONFIRMED: frozenset[GuessState](),
    GuessState.UNDONE: frozenset[GuessState](),
}


@dataclass(frozen=True)
class GuessedStep:
    """What a step will be for some parameters, if nothing clips, overflows or changes until then.

    Attributes:
        factor: what gradients are multiplied by: one over the loss scale.
    """

    jobs: Mapping[ParamHandle, UpdateJob]
    factor: float


class Guess:
    """The unit's ``pending`` update until the step: everything that looks at the unit undoes it.

    The update of a piece depends on nothing but gradients, weights, state, the jobs and the factor. Gradients, weights
    and state cannot change while the guess stands, because each change comes through :meth:`Pager.catch_up` first. So
    it is right if jobs and factor of the step are those that it was made with (:meth:`is_right`).

    Args:
        optimizer: whose step is guessed.
        pieces: numbers of those pieces of state that it updates. The others are left to the step.
        undone: told when it is undone.
    """

    is_guess = True

    def __init__(
        self,
        unit: Unit,
        optimizer: object,
        update: HostUpdate,
        pieces: tuple[int, ...],
        kept: KeptBytes,
        undone: Callable[[Guess], None],
    ) -> None:
        self.unit = unit
        self.optimizer = optimizer
        self.update = update
        self.pieces = pieces
        self.state = GuessState.MAKING
        self._kept = kept
        self._undone = undone

    def make(self) -> None:
        """Update the pieces. Under the pager's lock. Where it fails the caller undoes it.

        Raises:
            IoFailure: a transfer failed. BudgetError: there is no room for what is kept.
        """
        self.unit.pending = self
        self.unit.owner.release()
        self.update.make_pieces(self.unit, self.pieces, self._kept)
        self._become(GuessState.MADE)

    def is_right(self, step: GuessedStep, rule: Rule) -> bool:
        """Whether the update is exactly that of ``step``, which names the unit's parameters that have a gradient."""
        return (
            self.state is GuessState.MADE
            and self.update.rule is rule
            and self.update.jobs == step.jobs
            and self.update.grad_factor == step.factor
            and not any(handle.given() for handle in self.unit.handles)
        )

    def confirm(self) -> list[Block]:
        """The step is this one. Under the pager's lock. Returns journals for the caller to remove."""
        self._become(GuessState.CONFIRMED)
        self.unit.pending = None
        return self._kept.forget()

    def begin_undo(self) -> None:
        """What :meth:`apply` does without a transfer and without memory. Under the pager's lock."""
        if self.state is GuessState.MADE:
            self.state = GuessState.MAKING  # until all is undone it can no longer be right
        self._kept.drop_new()

    def fetch_kept(self) -> None:
        """Begin to read what :meth:`apply` will need."""
        self._kept.fetch_journals()

    def apply(self, unit: Unit) -> None:
        """Undo it (the name is that of every pending update). Under the pager's lock.

        Raises:
            IoFailure, BudgetError: a journal cannot be brought back from NVMe. The next call tries again.
        """
        self.begin_undo()
        self._kept.restore()
        self.update.memory.refresh(unit.weights)
        self._become(GuessState.UNDONE)
        unit.pending = None
        self._undone(self)

    def abandon(self) -> list[Block]:
        """The unit is gone, with its blocks. As :meth:`confirm`."""
        self.state = GuessState.UNDONE
        return self._kept.forget()

    def needs(self, handle: ParamHandle) -> bool:
        """The gradients are the step's, not the guess's."""
        return False

    def blocks_to_change(self, unit: Unit) -> None:
        """None: a save undoes it first."""

    def may_be_undone_for(self, block: Block) -> bool:
        """Whether it can be undone at once, without memory or transfers, while ``block`` is in use by someone else."""
        return self.state is GuessState.MADE and self._kept.is_at_hand() and not self._kept.includes(block)

    def _become(self, state: GuessState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"the guess of {self.unit.name}: no transition from {self.state.name} to {state.name}")
        self.state = state


def undo_all(guesses: Sequence[Guess]) -> None:
    """Undo them, with as many transfers at a time as there is memory for."""
    for guess in guesses:
        guess.begin_undo()
    for number, guess in enumerate(guesses):
        for later in guesses[number : number + UNDONE_AHEAD]:
            later.fetch_kept()
        guess.apply(guess.unit)
