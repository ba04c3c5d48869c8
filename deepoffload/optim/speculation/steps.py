"""What a step of an optimizer does about guesses, on every pager that makes some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepoffload.optim.handles import speculation_of
from deepoffload.optim.rule import UpdateJob
from deepoffload.optim.speculation.port import GuessingOptimizer
from deepoffload.optim.update import HostUpdate
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle


def backward_ended(optimizer: GuessingOptimizer, pagers: Iterable[Pager]) -> None:
    """Before the step looks at the gradients: guess what has waited for them."""
    for pager in pagers:
        speculation = speculation_of(pager)
        if speculation is not None:
            with pager.lock:
                speculation.backward_ended(optimizer)


def settle(
    optimizer: GuessingOptimizer,
    pagers: Iterable[Pager],
    jobs: Mapping[ParamHandle, UpdateJob],
    factor: float | None,
) -> None:
    """Before a step begins: undo the guesses that differ from it, all where it is skipped (``factor`` is None).

    Raises:
        IoFailure, BudgetError: something cannot be undone. The next call tries again.
    """
    for pager in pagers:
        speculation = speculation_of(pager)
        if speculation is not None:
            with pager.lock:
                speculation.settle(optimizer, jobs, factor)


def confirm(optimizer: GuessingOptimizer, update: HostUpdate) -> None:
    """The step begins: what was guessed is made. Under the pager's lock."""
    speculation = speculation_of(update.pager)
    if speculation is not None:
        speculation.confirm(optimizer, update)


def end_of_step(optimizer: GuessingOptimizer, pager: Pager) -> None:
    """The step is over."""
    speculation = speculation_of(pager)
    if speculation is not None:
        with pager.lock:
            speculation.end_of_step(optimizer)
