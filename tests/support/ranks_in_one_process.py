"""Several ranks' parts of one model in one process: each has an arena, units and optimizer state, and finds the others'
shards in a list. What is real is all but the way between the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.config import Config, GradientDtype
from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.copies.cpu_device import CpuDevice
from deepoffload.copies.host_link import HostLink, host_offset
from deepoffload.io.engine import IoEngine
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.optim.gradients import Gradients
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.pager import Pager
from deepoffload.params.shards import ShardLayout
from deepoffload.params.slot import TensorSlot
from deepoffload.params.torch_private import outside_user_modes, storage_at
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.params.use_order import UseOrder
from deepoffload.ranks.places import RankMap
from deepoffload.runtime.construct import adopt
from deepoffload.runtime.plan import NO_DISK, plan_model
from tests.support.pager_owner import PagerOwner


class NeighbouringShards:
    """Shows what the shards of all ranks say together; keeps this rank's ranges of what the program writes."""

    def __init__(self, peers: list[RankParts], rank: int, link: HostLink) -> None:
        self._peers = peers
        self._rank = rank
        self._link = link

    def bring(self, block: Block, shown: Tensor) -> None:
        for rank, peer in enumerate(self._peers):
            unit, layout = peer.unit_of(block.name)
            peer.pager.catch_up(unit)
            own = peer.stored(unit.weights if layout is unit.layout else unit.gradients)
            for whole, part in _ranges(layout, rank):
                shown[whole].copy_(own[part])

    def take_back(self, block: Block, shown: Tensor) -> None:
        _, layout = self._peers[self._rank].unit_of(block.name)
        for whole, part in _ranges(layout, self._rank):
            self._link.take(shown[whole], host_offset(block) + part.start)

    def check_take_back(self, block: Block) -> None:
        """Always possible."""


def _ranges(layout: ShardLayout, rank: int) -> Iterator[tuple[slice, slice]]:
    """Of each section, a rank's range of the whole copy, and where it lies in the shard."""
    for section in layout.sections:
        begin, nbytes = section.whole_offset + rank * section.range_nbytes, section.range_nbytes
        yield slice(begin, begin + nbytes), slice(section.shard_offset, section.shard_offset + nbytes)


class RankParts(PagerOwner):
    """One rank's part of ``model``, which is paged in place.

    Args:
        rank: None for the only one, which has no copies.

    Attributes:
        handles: of the parameters, in the order of the model.
        set_up: by how much the memory in use grew at most, and until the end, while each unit was filled.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        peers: list[RankParts],
        rank: int | None,
        world_size: int,
        *,
        host_bytes: int,
        defer_updates: bool,
        nvme_path: Path | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.rank = rank or 0
        graphs = OpenGraphs()
        order = UseOrder(graphs, prefetch=False)
        arena = Arena(host_bytes, lends=rank is None)
        space = None
        if nvme_path is not None:
            io = IoEngine()
            self._last.callback(io.close)
            space = SwapSpace(io, [nvme_path])
            self._last.callback(space.close)
        memory = None
        if rank is None:
            tiers = TierManager(arena, space, order, poison=True)
        else:
            memory = CopyMemory(
                lambda copies: TierManager(arena, space, order, copies=copies, poison=True),
                CpuDevice(),
                64 << 20,
                outside_user_modes=outside_user_modes,
                storage_at=storage_at,
                materialiser=partial(NeighbouringShards, peers, rank),
                poison=True,
            )
            tiers = memory.tiers
        self.tiers = tiers
        self._last.callback(tiers.close)
        if memory is not None:
            self._last.callback(memory.close)
        link: Any = None
        if rank is not None:
            link = SimpleNamespace(
                ranks=RankMap(rank, (0,) * world_size),
                exchange=None,
                rates=None,
                is_held=False,
                hold=nullcontext,
                meet_edit=lambda number, edited: None,
                on_forward=lambda units: None,
            )
        self.pager = Pager(tiers, order, graphs, memory, self, prefetch=False, defer_updates=defer_updates, link=link)
        self.gradients = Gradients(self.pager)
        self.handles = handles = [adopt(self.pager, param, name) for name, param in model.named_parameters()]
        self.plan = plan_model(
            self.pager,
            self.gradients,
            config,
            [model],
            handles,
            capacity_bytes=host_bytes,
            nvme_bytes=None if nvme_path is None else 1 << 30,
            bandwidths=NO_DISK,
        )
        self.set_up: list[tuple[int, int]] = []
        for draft in self.plan.drafts:
            before = arena.peak_bytes = arena.used_bytes
            self.plan.assembly.fill(draft)
            self.set_up.append((arena.peak_bytes - before, arena.used_bytes - before))
        self.pager.assembled()
        for unit in self.pager.units:
            for handle in unit.handles:
                self.gradients.track(handle)

    def unit_of(self, block_name: str) -> tuple[Unit, ShardLayout]:
        """Whose block of weights or gradients this is, and how it is cut."""
        for unit in self.units:
            for block, layout in ((unit.weights, unit.layout), (unit.gradients, unit.gradient_layout)):
                if block is not None and block.name == block_name and layout is not None:
                    return unit, layout
        raise KeyError(block_name)

    def stored(self, block: Block | None) -> Tensor:
        """A copy of the bytes that a block stores."""
        assert block is not None
        return self.stored_bytes(block)

    def own_elements(self, slot: TensorSlot) -> tuple[int, Tensor]:
        """Where this rank's run of a tensor begins, and a view of it in the arena, where its block must be held."""
        run = (0, slot.numel) if slot.cut is None else _run(slot)
        if not run[1]:
            return 0, torch.empty(0, dtype=slot.dtype)
        offset = slot.element_address(run[0]) - self.tiers.arena.address
        return run[0], torch.frombuffer(self.tiers.arena.buffer, dtype=slot.dtype, count=run[1], offset=offset)

    def set_gradient(self, handle: ParamHandle, value: Tensor) -> None:
        """Put a mean gradient (fp32, in the order of the weight's memory) where this rank keeps its part of it."""
        self.pager.catch_up(handle.unit)
        record = self.gradients._record(handle)
        slot = record.slot
        assert slot is not None and slot.block is not None
        with self.held(slot.block):
            self.tiers.will_change(slot.block)
            start, elements = self.own_elements(slot)
            elements.copy_(value[start : start + elements.numel()])
        record.landed(None)

    def catch_up(self) -> None:
        """Make every update that is still to come."""
        self.pager.catch_up_all()

    def step(self, optimizer: Any) -> None:
        """This rank's part of a step: what comes after the ranks have met and agreed."""
        self.catch_up()
        with torch.no_grad():
            for update in optimizer._decide([self.pager], 1.0, False, False, None):
                update.run(defer=self.pager.defer_updates)
        optimizer._finish_step([self.pager])


def _run(slot: TensorSlot) -> tuple[int, int]:
    run = slot.cut.run() if slot.cut is not None else None
    return (0, 0) if run is None else (run.start, run.numel)


class InOneProcess:
    """The same model on one rank, and on ``world_size`` others together. All land gradients in fp32."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        world_size: int,
        config: Config | None = None,
        *,
        host_bytes: int = 64 << 20,
        defer_updates: bool = True,
        nvme_path: Path | None = None,
    ) -> None:
        self.ranks: list[RankParts] = []
        self._last = ExitStack()
        config = replace(config or Config(), gradient_dtype=GradientDtype.FP32)

        def part(rank: int | None) -> RankParts:
            nbytes = 64 << 20 if rank is None else host_bytes
            made = RankParts(
                build(),
                config,
                self.ranks,
                rank,
                world_size,
                host_bytes=nbytes,
                defer_updates=defer_updates,
                nvme_path=None if rank is None else nvme_path,
            )
            self._last.callback(made.close)
            return made

        try:
            for rank in range(world_size):
                self.ranks.append(part(rank))
            self.one = part(None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._last.close()
