"""Several ranks as the estimators plan for them: one rank's plan, by the same functions as in the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deepoffload.config import Config
from deepoffload.config.several_ranks import check_several_ranks
from deepoffload.errors import ConfigError
from deepoffload.estimate.machine import MachineSpec
from deepoffload.ranks.places import RankMap
from deepoffload.ranks.planned import PlannedExchange
from deepoffload.ranks.transport import GROUP, MEMORY, why_not_memory
from deepoffload.runtime.choice import ChosenCut
from deepoffload.runtime.whole_copies import contribution_bytes, contribution_layouts, contribution_sizes
from deepoffload.schedule.cost_model import LinkRates, RankTraffic
from deepoffload.schedule.uses import UnitBlocks
from deepoffload.schedule.whole_copies import WholeCopies


@dataclass(frozen=True)
class PlannedLink:
    """Rank 0 of a group that nobody has started (a :class:`deepoffload.params.ports.PlanningPort`)."""

    ranks: RankMap
    exchange: PlannedExchange
    rates: LinkRates


def planned_link(machine: MachineSpec, config: Config) -> PlannedLink | None:
    """The ranks of a machine; None where there is one. They exchange what host memory has, also where devices compute.

    Raises:
        ConfigError: the neighbours' memory is asked for, and there are several nodes.
        UnsupportedError: what the engine cannot do with several ranks.
    """
    if machine.ranks == 1:
        return None
    check_several_ranks(config, {}, "", machine.ranks)
    ranks = RankMap(0, tuple(rank // machine.ranks_per_node for rank in range(machine.ranks)))
    obstacle = why_not_memory(ranks, torch.device("cpu"))
    if config.ranks.transport == MEMORY and obstacle is not None:
        raise ConfigError(f"ranks.transport asks for 'memory', but {obstacle}. Ask for 'auto' or 'group'")
    by_memory = config.ranks.transport != GROUP and obstacle is None
    return PlannedLink(ranks, PlannedExchange(MEMORY if by_memory else GROUP, ranks), machine.link_rates())


@dataclass(frozen=True)
class RankShare:
    """What one rank has in addition to the blocks that it stores.

    Attributes:
        arena_bytes: its host budget, of which blocks get what copies and gradients on their way leave.
        device_bytes: what it takes of a device's memory, for whole copies of units; 0 where the CPU computes.
        copies_bytes: of host memory, for whole copies of units, or for those on their way to the device. taken_bytes:
            what these take at most, where the program looks at no gradient. (Of what is page-locked for a device, all.)
        way_bytes: memory for gradients on their way to other ranks. slots_bytes: of it, where a device's gradients
            arrive.
        whole_bytes: of each unit's whole copy, by its number. shard_bytes: of its weights, what each rank stores.
        contribution_bytes: of each trained unit's gradients, whole, as they go to other ranks. gradient_bytes: the
            same as autograd makes them.
        table: the placement as the engine logs it.
    """

    link: PlannedLink
    arena_bytes: int
    device_bytes: int
    copies_bytes: int
    taken_bytes: int
    way_bytes: int
    slots_bytes: int
    whole_bytes: Mapping[int, int]
    shard_bytes: Mapping[int, int]
    contribution_bytes: Mapping[int, int]
    gradient_bytes: Mapping[int, int]
    table: str

    @property
    def world_size(self) -> int:
        return self.link.ranks.world_size

    def gathered_bytes(self, unit: int) -> int:
        """What comes from the others for a whole copy."""
        return (self.world_size - 1) * self.shard_bytes[unit]

    def reduced_bytes(self, unit: int) -> int:
        """What comes from the others of a unit's gradients."""
        return (self.world_size - 1) * self.contribution_bytes.get(unit, 0) // self.world_size

    def reduce_s(self, unit: int) -> float:
        """Seconds in which a unit's gradients are added up over the ranks."""
        return self.link.rates.seconds(RankTraffic(0, self.reduced_bytes(unit)))

    def copies(self, units: Mapping[int, UnitBlocks], round_s: float) -> WholeCopies:
        """The whole copies that the program sees, in simulated time. ``round_s``: until the ranks have agreed on a
        gather."""
        others = {blocks.weights: self.gathered_bytes(unit) for unit, blocks in units.items()}
        return WholeCopies(
            {blocks.weights: self.whole_bytes[unit] for unit, blocks in units.items()},
            self.device_bytes or self.copies_bytes,
            {block: round_s + self.link.rates.seconds(RankTraffic(nbytes, 0)) for block, nbytes in others.items()},
            others,
            {blocks.weights: self.world_size * self.shard_bytes[unit] for unit, blocks in units.items()},
        )


def rank_share(
    choice: ChosenCut, link: PlannedLink, capacity_bytes: int, device_bytes: int, accumulation_steps: int
) -> RankShare:
    """``capacity_bytes``: the rank's host budget. ``device_bytes``: what it takes of a device's memory."""
    drafts = choice.cut.division.drafts
    slots = contribution_sizes(drafts, link.exchange, capacity_bytes)
    whole = {draft.index: unit.whole_weight_bytes for draft, unit in zip(drafts, choice.sizes, strict=True)}
    return RankShare(
        link=link,
        arena_bytes=capacity_bytes,
        device_bytes=device_bytes,
        copies_bytes=choice.copies_bytes,
        taken_bytes=choice.copies_bytes if device_bytes else min(choice.copies_bytes, sum(whole.values())),
        way_bytes=contribution_bytes(drafts, link.exchange, capacity_bytes),
        slots_bytes=slots.slots * slots.slot_bytes,
        whole_bytes=whole,
        shard_bytes={draft.index: draft.layout.shard_nbytes for draft in drafts if draft.layout is not None},
        contribution_bytes={draft.index: layout.nbytes for draft, layout in contribution_layouts(drafts)},
        gradient_bytes={
            draft.index: sum(handle.numel * dtype.itemsize for handle, dtype in draft.trained) for draft in drafts
        },
        table=choice.table(len(link.ranks.host_ranks), accumulation_steps, link.rates),
    )
