"""What there is of each unit's contributions, by unit and by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepoffload.copies.payload_numbers import late_index
from deepoffload.memory.block import Block
from deepoffload.optim.contribution import ContributionPlan
from deepoffload.optim.contribution_layout import ContributionLayout
from deepoffload.optim.lands import trained_of
from deepoffload.params.shards import ShardLayout
from deepoffload.params.unit import ParamHandle, Unit


class ContributionPlans:
    """The plans of one rank, whose number is ``rank``."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._plans: dict[int, ContributionPlan] = {}
        self._plan_of: dict[ParamHandle, ContributionPlan] = {}
        # Units that forward has entered since the last backward: last, before others, after others, several times.
        self._entered: set[int] = set()
        self._left: set[int] = set()
        self._come_back_to: set[int] = set()
        self._entered_again: set[int] = set()

    def __iter__(self) -> Iterator[ContributionPlan]:
        return iter(tuple(self._plans.values()))

    def __contains__(self, index: int) -> bool:
        return index in self._plans

    def get(self, index: int) -> ContributionPlan | None:
        """The plan that all ranks know by this number."""
        return self._plans.get(index)

    def of(self, handle: ParamHandle) -> ContributionPlan:
        """The plan of a parameter."""
        return self._plan_of[handle]

    def of_unit(self, unit: Unit) -> list[ContributionPlan]:
        """The plan of a unit, and that of its parameters that were unfrozen later."""
        return [self._plans[index] for index in (unit.index, late_index(unit.index)) if index in self._plans]

    def add(self, index: int, unit: Unit, block: Block, gradients: ShardLayout) -> ContributionPlan:
        """Plan for the parameters whose gradients land in ``block``."""
        handles = trained_of(block)
        numbers = {handle: number for number, handle in enumerate(handles)}
        layout = ContributionLayout(gradients, [handle.dtype for handle in handles], self._rank)
        self._plans[index] = plan = ContributionPlan(index, unit, block, layout, numbers)
        self._plan_of.update(dict.fromkeys(handles, plan))
        return plan

    def drop(self, index: int) -> None:
        """Forget a plan, if there is one."""
        plan = self._plans.pop(index, None)
        for handle in () if plan is None else plan.numbers:
            del self._plan_of[handle]

    def largest_bytes(self) -> int:
        """The size of the largest part that another rank takes of a contribution."""
        return max((plan.layout.part_nbytes for plan in self), default=0)

    def enters(self, units: Sequence[int]) -> None:
        """The program enters the forward of units, by number."""
        now = set(units)
        self._entered_again |= now & (self._left | self._entered)
        self._come_back_to |= now & self._left
        self._left |= self._entered - now
        self._entered = now

    def comes_whole(self, plan: ContributionPlan) -> bool:
        """Whether no gradients of other units are expected between those of this one. [Note: when a unit is
        announced]"""
        return plan.comes_whole is True and plan.unit.index not in self._come_back_to

    def comes_again(self, plan: ContributionPlan) -> bool:
        """Whether all gradients of a unit may come once more in this backward, where that is one inside another."""
        if plan.comes_whole is None:
            return plan.unit.index in self._entered_again
        return not plan.comes_whole

    def end_of_backward(self) -> None:
        """Forwards that begin now belong to another one."""
        for entered in (self._entered, self._left, self._come_back_to, self._entered_again):
            entered.clear()

    def end_of_step(self) -> None:
        """All ranks know the same of how gradients came. [Note: when a unit is announced]"""
        for plan in self:
            if plan.has_landed:
                plan.comes_whole = not plan.was_cut
        self.end_of_backward()
