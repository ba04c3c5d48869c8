"""One rank in the tests of whole copies: blocks of which each rank stores a shard, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.copies.host_link import host_offset
from deepoffload.copies.payload_numbers import weights_number
from deepoffload.errors import RankError
from deepoffload.io.engine import IoEngine
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Alias, Block
from deepoffload.memory.eviction import UnknownOrder
from deepoffload.params.cut import TensorCut
from deepoffload.params.shards import FlatTensor, shard_layout
from deepoffload.ranks.group import open_group
from deepoffload.runtime.device import open_rank_memory
from deepoffload.schedule.placement import BlockKind
from tests.support.rank_processes import LONG_S

CPU = torch.device("cpu")
LARGE = 1 << 20
SIZES = ([700], [5000, 3, 1], [256] * 4, [90_000], [1])
"""Elements of the tensors of each unit. Every second unit has a second section, in another type."""


class Shower:
    """Shows a block to a program: counts what it is asked."""

    on_host = False
    installed = False

    def __init__(self, memory: CopyMemory) -> None:
        self.memory = memory
        self.block: Block | None = None
        self.views = 0
        self.gathers = 0
        self.rewrites = 0
        self.later = False
        self.update: Callable[[], None] | None = None

    def can_release(self) -> bool:
        return self.views == 0

    def may_be_read_unseen(self) -> bool:
        return False

    def update_to_come(self) -> bool:
        return self.later

    def changed(self) -> bool:
        return False

    def edits(self) -> int:
        return 0

    def aliases(self) -> list[Alias]:
        return [lambda: self.views > 0] if self.views else []

    def release(self) -> None:
        """Nothing shows it."""

    def relocate(self, offset: int) -> None:
        """Nothing shows it."""

    def before_gather(self) -> None:
        self.gathers += 1
        update, self.update = self.update, None
        if update is not None:
            update()
        if self.block is not None:
            self.memory.settle(self.block)

    def rewritten(self) -> None:
        self.rewrites += 1


class Policy(UnknownOrder):
    """Blocks are used in the order of ``uses``, again and again; ``at``: how many uses there were."""

    def __init__(self) -> None:
        self.uses: list[int] = []
        self.at = 0

    def next_use(self, block_id: int) -> float:
        ahead = self.uses[self.at % max(1, len(self.uses)) :] + self.uses
        return ahead.index(block_id) if block_id in ahead else float("inf")

    def upcoming(self) -> Iterator[tuple[int, int]]:
        for distance in range(len(self.uses)):
            yield distance, self.uses[(self.at + distance) % len(self.uses)]


class Side:
    """One rank: its shards, and the copies that it has."""

    def __init__(
        self,
        transport: str,
        last: ExitStack,
        *,
        copy_bytes: int = LARGE,
        host_bytes: int = 4 * LARGE,
        path: str | None = None,
        timeout_s: float = LONG_S,
        sizes: Any = SIZES,
    ) -> None:
        group = open_group(CPU, timeout_s=timeout_s)
        assert group is not None
        last.callback(group.close)
        self.rank, self.world_size = group.ranks.rank, group.ranks.world_size
        space = None
        if path is not None:
            io = IoEngine()
            last.callback(io.close)
            space = SwapSpace(io, [Path(path)])
            last.callback(space.close)
        self.policy = Policy()
        self.tiers, self.memory, self.link = open_rank_memory(
            Arena(host_bytes),
            space,
            self.policy,
            group,
            transport=transport,
            timeout_s=timeout_s,
            poison=True,
            timeline=None,
        )
        last.callback(self.tiers.close)
        last.callback(self.memory.close)
        last.callback(self.link.close)
        self.memory.reserve(copy_bytes)
        self.layouts = []
        self.blocks: list[Block] = []
        self.owners: list[Shower] = []
        for index, numels in enumerate(sizes):
            self._create(index, numels)
        self.policy.uses = [block.id for block in self.blocks]
        group.gather_objects(None, "the test")  # nobody asks for blocks that another rank has still to create

    def _create(self, index: int, numels: list[int]) -> None:
        tensors = [FlatTensor(numel, 2, "trained") for numel in numels]
        if index % 2:
            tensors.append(FlatTensor(300, 4, "frozen"))
        layout = shard_layout(tensors, self.world_size)
        forms = tuple(TensorCut(layout, n, self.rank).form() for n in range(len(tensors)))
        owner = Shower(self.memory)
        block = self.tiers.create(
            f"layer {index}", BlockKind.WEIGHT, layout.shard_nbytes, owner, forms, shown_nbytes=layout.whole_nbytes
        )
        owner.block = block
        self.layouts.append(layout)
        self.blocks.append(block)
        self.owners.append(owner)
        self.fill(index, 0)
        self.memory.serve(block, weights_number(index), layout.sections)

    # -- shards -----------------------------------------------------------------------------------------------------
    def value(self, rank: int, index: int, version: int) -> int:
        """What fills a rank's shard of a unit."""
        return (rank * 100 + index * 7 + version * 13) % 251

    def fill(self, index: int, version: int) -> None:
        """An update of the shard: the copy shows it afterwards."""
        block = self.blocks[index]
        self.tiers.acquire(block)
        try:
            self.tiers.will_change(block)
            self.shard(index).fill_(self.value(self.rank, index, version))
        finally:
            self.tiers.release(block)

    def shard(self, index: int) -> Tensor:
        arena = torch.frombuffer(self.tiers.arena.buffer, dtype=torch.uint8)
        start = host_offset(self.blocks[index])
        return arena[start : start + self.blocks[index].nbytes]

    def stored(self, index: int) -> Tensor:
        """A copy of the shard's bytes."""
        block = self.blocks[index]
        with self.tiers.lock:
            self.memory.settle(block)
            self.tiers.acquire(block)
            try:
                return self.shard(index).clone()
            finally:
                self.tiers.release(block)

    # -- whole copies -----------------------------------------------------------------------------------------------
    @contextmanager
    def whole(self, index: int) -> Iterator[Tensor]:
        """The whole copy, leased."""
        block = self.blocks[index]
        self.memory.acquire(block)
        try:
            yield self.memory.flat(block, 0, torch.uint8, block.shown_nbytes)
        finally:
            self.memory.release(block)

    def use(self, index: int) -> None:
        """As an event of the program: plans, then uses."""
        if self.blocks[index].id in self.policy.uses:
            self.policy.at = self.policy.uses.index(self.blocks[index].id)
        with self.tiers.lock:
            self.memory.pump(self.policy.upcoming(), {self.blocks[index].id})

    def parts(self, index: int, whole: Tensor) -> list[Tensor]:
        """What each rank's shard looks like in a whole copy, by rank."""
        found: list[Tensor] = []
        for rank in range(self.world_size):
            pieces = []
            for section in self.layouts[index].sections:
                start = section.whole_offset + rank * section.range_nbytes
                pieces.append(whole[start : start + section.range_nbytes])
            found.append(torch.cat(pieces))
        return found

    def check(self, index: int, version: int = 0) -> None:
        """Read a unit, and compare all of it."""
        with self.whole(index) as whole:
            for rank, part in enumerate(self.parts(index, whole)):
                expected = self.value(rank, index, version)
                assert bool((part == expected).all()), (index, rank, expected, part[:8].tolist())


@contextmanager
def side(transport: str, **arguments: Any) -> Iterator[Side]:
    """A rank that closes with the others at the end, or tells them that it has failed."""
    with ExitStack() as last:
        one = Side(transport, last, **arguments)
        try:
            yield one
        except RankError:
            raise
        except BaseException as error:
            one.link.fail(f"{type(error).__name__}: {error}")
            raise
