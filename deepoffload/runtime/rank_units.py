"""What the ranks have of the units of a model: each serves its part of every block to the others."""

from __future__ import annotations

from collections.abc import Sequence

from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.copies.payload_numbers import gradients_number, weights_number
from deepoffload.copies.shown import ShownMemory
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.rank_gradients import RankGradients
from deepoffload.params.unit import Unit


def join_units(memory: ShownMemory, gradients: Gradients, units: Sequence[Unit]) -> None:
    """Let other ranks gather the blocks of ``units``, and have memory for this rank's gradients on their way to them.
    Nothing to do with one rank.

    Raises:
        BudgetError: the host budget does not hold gradients on their way.
    """
    if not isinstance(gradients, RankGradients) or not isinstance(memory, CopyMemory):
        return
    for unit in units:
        names = [handle.name for handle in unit.handles]
        if unit.layout is not None:
            memory.serve(unit.weights, weights_number(unit.index), unit.layout.sections, names)
        if unit.gradients is not None and unit.gradient_layout is not None:
            names = [f"{name}.grad" for name in names]
            memory.serve(unit.gradients, gradients_number(unit.index), unit.gradient_layout.sections, names)
    gradients.contributions.reserve(units)
