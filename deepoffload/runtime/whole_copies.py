"""How much of a rank's host budget is for whole copies of units, and for gradients on their way to other ranks.

What is left is for the blocks that the rank stores. Where these all stay in memory, copies get the rest, so that as
many units as possible stay whole. Where blocks go to NVMe, copies get a quarter, and at least what one call of a module
and one gradient take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deepoffload.config.units import format_bytes
from deepoffload.errors import PlacementError
from deepoffload.native.aio import PAGE_BYTES, round_up
from deepoffload.optim.contribution_layout import ContributionLayout
from deepoffload.optim.contribution_slots import SlotSizes, slot_sizes
from deepoffload.ranks.exchange import TransferSizes
from deepoffload.runtime.draft import UnitDraft
from deepoffload.runtime.sizes import UnitSizes
from deepoffload.schedule.cost_model import LinkRates, RankTraffic
from deepoffload.schedule.table import human_bytes

COPIES_SHARE = 4
"""Copies get this part of the budget where not everything stays in memory."""


def contribution_layouts(drafts: Iterable[UnitDraft]) -> Iterator[tuple[UnitDraft, ContributionLayout]]:
    """Those of the units that are trained."""
    for draft in drafts:
        if draft.gradient_layout is not None and draft.trained:
            yield draft, ContributionLayout(draft.gradient_layout, [dtype for _, dtype in draft.trained], draft.rank)


def contribution_sizes(drafts: Iterable[UnitDraft], exchange: TransferSizes, host_bytes: int) -> SlotSizes:
    """The memory of gradients on their way to other ranks, of a rank's host budget of ``host_bytes``."""
    largest = max((layout.part_nbytes for _, layout in contribution_layouts(drafts)), default=0)
    return slot_sizes(largest, exchange, host_bytes)


def contribution_bytes(drafts: Iterable[UnitDraft], exchange: TransferSizes, host_bytes: int) -> int:
    """What it takes of that."""
    sizes = contribution_sizes(drafts, exchange, host_bytes)
    return sizes.slots * round_up(sizes.slot_bytes) + sizes.scratches * round_up(sizes.scratch_bytes)


ARRIVING = 4
"""So many copies of the largest block may be on their way to a device at once: one comes from the ranks while others
wait for the device, and for the bus."""
ARRIVALS_SHARE = 8
"""They get at most this part of the budget, where the least that works is not more."""


@dataclass(frozen=True)
class CopySizes:
    """What whole copies need, for one cut of a model.

    Attributes:
        least_bytes: those of the largest call of a module, and the largest gradient, which the program may look at.
        most_bytes: those of all weights, and that gradient.
        stored_bytes: all blocks that the rank stores.
        largest_bytes: the largest copy of one block.
    """

    least_bytes: int
    most_bytes: int
    stored_bytes: int
    largest_bytes: int = 0

    @classmethod
    def of(cls, sizes: Sequence[UnitSizes], window_bytes: Iterable[int]) -> CopySizes:
        """``window_bytes``: the whole weights of each module that has a window."""
        gradient_bytes = max((unit.whole_gradient_bytes for unit in sizes), default=0)
        largest_bytes = max((unit.whole_weight_bytes for unit in sizes), default=0)
        return cls(
            max([largest_bytes, *window_bytes]) + gradient_bytes,
            sum(unit.whole_weight_bytes for unit in sizes) + gradient_bytes,
            sum(block.room_bytes * block.count for unit in sizes for block in unit.blocks),
            max(largest_bytes, gradient_bytes),
        )

    def arrivals(self, capacity_bytes: int) -> Iterator[int]:
        """How many bytes of ``capacity_bytes`` copies may get that go on to a device, the best choice first, the least
        one last."""
        wanted = min(ARRIVING * self.largest_bytes, capacity_bytes // ARRIVALS_SHARE // PAGE_BYTES * PAGE_BYTES)
        if wanted > self.largest_bytes:
            yield wanted
        yield self.largest_bytes

    def choices(self, capacity_bytes: int) -> Iterator[int]:
        """How many bytes copies may get of ``capacity_bytes``, the best choice first, the least one last."""
        rest_bytes = capacity_bytes - self.stored_bytes
        wanted = [rest_bytes] if rest_bytes >= self.least_bytes else []
        wanted.append(capacity_bytes // COPIES_SHARE // PAGE_BYTES * PAGE_BYTES)
        more = [min(self.most_bytes, nbytes) for nbytes in wanted]
        yield from dict.fromkeys(nbytes for nbytes in more if nbytes > self.least_bytes)
        yield self.least_bytes


ONE_RANK_HAS = "that one rank has"
"""Where an error says it, the host's figure is added (:class:`deepoffload.runtime.refusals.Refusals`)."""


def from_other_ranks(
    drafts: Sequence[UnitDraft], sizes: Sequence[UnitSizes], copies_bytes: int, accumulation_steps: int
) -> RankTraffic | None:
    """What a rank gets from the others in a step, of weights (at most) and of gradients; None for one rank. A whole
    copy is made again when its weights were updated; where copies have no room to stay, for each forward and each
    backward."""
    stay = copies_bytes >= CopySizes.of(sizes, ()).most_bytes
    gathered = reduced = 0
    for draft in drafts:
        if draft.layout is None:
            return None
        others = draft.layout.world_size - 1
        gathers = bool(draft.trained) if stay else 2 * accumulation_steps
        gathered += gathers * others * draft.layout.shard_nbytes
    for _, part in contribution_layouts(drafts):
        reduced += accumulation_steps * (part.nbytes - part.part_nbytes)
    return RankTraffic(gathered, reduced)


def in_words(traffic: RankTraffic, rates: LinkRates | None) -> str:
    """The same as a line for people. ``rates``: of the link, where it is known."""
    weights, gradients = format_bytes(traffic.gathered_bytes), format_bytes(traffic.reduced_bytes)
    seconds = "" if rates is None else f", {rates.seconds(traffic):.3g} s at the rate of the link"
    return f"from other ranks per step: weights {weights}, gradients {gradients}{seconds}"


def with_copies(
    error: PlacementError,
    copies_bytes: int,
    drafts: Sequence[UnitDraft],
    exchange: TransferSizes,
    capacity_bytes: int,
    least_bytes: int,
) -> PlacementError:
    """The same error, naming a budget that holds copies and contributions, too.

    Args:
        copies_bytes: the least that copies need.
        capacity_bytes: the rank's budget, which is too small.
        least_bytes: what contributions take of it.
    """
    if error.enough_bytes is None:
        return error
    others_bytes = copies_bytes + least_bytes
    for _ in range(64):  # a larger budget has more slots, never for more than a part of it
        enough_bytes = error.enough_bytes + others_bytes
        others_now = copies_bytes + contribution_bytes(drafts, exchange, enough_bytes)
        if others_now <= others_bytes:
            break
        others_bytes = others_now
    left_bytes = max(capacity_bytes - least_bytes - copies_bytes, 0)
    text = str(error).replace(
        f" ({left_bytes} bytes)",
        f" ({left_bytes} bytes), which is what whole copies of units and gradients on their way to other ranks leave "
        f"of the {human_bytes(capacity_bytes)} {ONE_RANK_HAS}",
        1,
    )
    text = text.replace(
        f"to at least {error.enough_bytes} bytes",
        f"to at least {enough_bytes} bytes, of which each rank takes {others_bytes} for whole copies and for gradients "
        "on their way to other ranks",
    )
    return PlacementError(text, enough_bytes, enough_nvme_bytes=error.enough_nvme_bytes)
