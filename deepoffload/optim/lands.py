"""What lands the gradients of all ranks, as contributions see it."""

from __future__ import annotations

from typing import Protocol

from deepoffload.memory.block import Block
from deepoffload.optim.contribution_layout import ContributionLayout
from deepoffload.optim.gradient_state import GradientOwner
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.ranks.exchange import PartsFlight


class Lands(Protocol):
    """What lands parts (implemented by :class:`~deepoffload.optim.rank_gradients.RankGradients`)."""

    @property
    def adds_up(self) -> bool:
        """Whether this rank's program has said that another backward follows this one before the step."""

    @property
    def takes_turns(self) -> bool:
        """Whether gradients of several micro-batches come by turns, in one backward."""

    def parts_come(self, block: Block) -> None:
        """Parts are on their way that will land in a block."""

    def before_landing(self, unit: Unit, block: Block) -> None:
        """Parts of a unit are about to land in its block ``block``."""

    def land_parts(self, block: Block, layout: ContributionLayout, parts: PartsFlight, *, is_partial: bool) -> bool:
        """Take all parts of this rank's shard. ``is_partial``: other ranks may give theirs later. Returns whether a
        rank says that other units' gradients came between those of this one."""

    def after_landing(self, block: Block, *, more_come: bool) -> None:
        """They have landed. ``more_come``: others are on their way."""

    def not_trained(self, unit_index: int) -> Exception:
        """Another rank has a gradient of something that this rank does not train."""


class Reading:
    """A reduction that has landed here, for a wait until the other ranks have read this rank's part."""

    def __init__(self, flight: PartsFlight) -> None:
        self.ready_within = flight.releasable_within

    def ready(self) -> bool:
        return self.ready_within(0.0)

    def arrive(self) -> None:
        """All has been taken."""


class Offered:
    """A reduction that is in flight, for a wait until its parts can be read. Who waits lands it."""

    def __init__(self, flight: PartsFlight) -> None:
        self.ready, self.ready_within = flight.ready, flight.ready_within

    def arrive(self) -> None:
        """Who waits takes them."""


def owner_of(block: Block) -> GradientOwner:
    """The owner of a block in which gradients land."""
    if not isinstance(block.owner, GradientOwner):
        raise RuntimeError(f"{block.name} holds no gradients")
    return block.owner


def trained_of(block: Block) -> list[ParamHandle]:
    """The parameters whose gradients land in a block, in the order of its layout."""
    return [record.handle for record in owner_of(block).records]
