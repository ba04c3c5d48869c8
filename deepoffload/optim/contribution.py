"""What is known of a rank's gradients of one unit on their way to the ranks that own them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from deepoffload.copies.payload_numbers import gradients_number
from deepoffload.memory.block import Block
from deepoffload.optim.contribution_layout import ContributionLayout
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.ranks.exchange import PartsFlight
from deepoffload.ranks.rounds import Want, WantKind
from deepoffload.timeline import Lane, Timeline


@dataclass(eq=False)
class Contribution:
    """This rank's gradients of a unit, in a slot of the arena or in a block.

    Attributes:
        memory: where they lie, as transports see it; meaningless while they wait in a block.
        block: where they lie when their slot was needed for others before their reduction could start.
        present: numbers of the parameters that it has. coming: of those that this rank may give more of.
        was_passed: gradients of another unit have begun to come since. was_resumed: and more of these came then.
        may_have_more: another one may follow in the same backward, as this rank knows.
        sources: gradients on a device from which it is copied, since ``begin_s``.
        left: the event of the end of that, once it is complete.
    """

    plan: ContributionPlan
    offset: int
    memory: Tensor
    was_passed: bool = False
    was_resumed: bool = False
    may_have_more: bool = False
    present: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)
    block: Block | None = None
    sources: list[Tensor] = field(default_factory=list)
    begin_s: float = 0.0
    left: Any = None

    def await_left(self, timeline: Timeline | None) -> None:
        """Wait until all of it has come from the device."""
        self.left.synchronize()
        if timeline is not None:
            nbytes, end_s = sum(source.numel() for source in self.sources), time.perf_counter()
            timeline.add(Lane.FROM_DEVICE, self.plan.unit.name, self.begin_s, end_s, nbytes)
        self.sources.clear()


@dataclass(eq=False)
class ContributionPlan:
    """A unit and what is under way of it, or of its parameters that were unfrozen later: these have another one.

    Attributes:
        index: by which the ranks know it.
        block: in which it lands.
        numbers: of its trained parameters, in the order of the gradient layout.
        open: what is being filled.
        posted: what has been announced and not been launched, in order.
        has_landed: gradients of it have. was_cut: on some rank they came in several parts in one backward.
        comes_whole: in the steps before that was never so, on any rank; None where nothing of it has landed in them.
    """

    index: int
    unit: Unit
    block: Block
    layout: ContributionLayout
    numbers: dict[ParamHandle, int]
    open: Contribution | None = None
    posted: deque[Contribution] = field(default_factory=deque)
    has_landed: bool = False
    was_cut: bool = False
    comes_whole: bool | None = None

    @property
    def want(self) -> Want:
        """What this rank waits for where it waits for a reduction of the unit."""
        return Want(WantKind.REDUCE, gradients_number(self.index))


class Reducing:
    """A reduction that has been launched, as rounds know it. ``given`` is this rank's part in it, if it has one; where
    it ``is_partial``, other ranks may give theirs later. ``land``: lands it, and those before it."""

    def __init__(
        self,
        land: Callable[[Reducing], None],
        plan: ContributionPlan,
        flight: PartsFlight,
        given: Contribution | None,
        scratch: Tensor,
    ) -> None:
        self._land = land
        self.plan, self.flight, self.given, self.scratch = plan, flight, given, scratch
        self.is_partial = False
        self.ready = flight.ready
        self.ready_within = flight.ready_within

    def arrive(self) -> None:
        """Land it, and those before it. For rounds, which tell all ranks when this raises. Idempotent."""
        self._land(self)
