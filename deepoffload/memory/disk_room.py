"""Room on NVMe for a block that leaves memory, and what is said when there is none."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping

from deepoffload.errors import BudgetError
from deepoffload.io.extents import Extent
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.block import Block, Census, is_backed
from deepoffload.memory.guards import Guards
from deepoffload.native.aio import round_up
from deepoffload.schedule.block_state import BlockState


class DiskRoom:
    """Finds extents. Called under the memory's lock.

    An extent that nobody needs gives its room where there is no other: that of an empty block, and that of one whose
    bytes are in memory, which is dirty from then on. A block that stays in memory for good has none at all.

    Args:
        blocks: all of them, by id. census: the same ones by state.
        static: ids of those that stay in memory for good.
        guards: who may hold extents. While there are any, they may count on that of a clean block.
    """

    def __init__(
        self,
        space: SwapSpace,
        blocks: Mapping[int, Block],
        census: Census,
        static: Container[int],
        guards: Guards,
    ) -> None:
        self._space = space
        self._blocks = blocks
        self._census = census
        self._static = static
        self._guards = guards

    def extent(self, block: Block) -> Extent:
        """Give ``block`` an extent that may be written to: its own one, or a fresh one where that is frozen or missing.

        Raises:
            BudgetError: there is no disk space; ``enough_nvme_bytes`` is a budget for all blocks that there are.
        """
        while block.extent is None or self._space.is_frozen(block.extent):
            try:
                fresh = self._space.allocate(block.nbytes)
            except BudgetError as error:
                if self._take_spare() or self._guards.make_room(block):
                    continue
                raise self._no_room(block, error) from None
            if block.extent is not None:
                self._space.free(block.extent)
            block.extent = fresh
        return block.extent

    def may_take(self, block: Block) -> bool:
        """Whether ``nvme_budget`` leaves room for a block that was to stay in memory, next to all that may leave."""
        return round_up(block.nbytes) <= self.spare_bytes()

    def spare_bytes(self) -> float:
        """What ``nvme_budget`` leaves next to all that may leave memory; ``math.inf`` where there is no such limit."""
        limit = self._space.budget_bytes
        return math.inf if limit is None else limit - self._needed_bytes()

    def _take_spare(self) -> bool:
        """Free one extent that nobody needs; False when there is none."""
        block = next(self._with_spare_extent(), None)
        if block is None or block.extent is None:
            return False
        if block.state is BlockState.CLEAN:
            block.to(BlockState.DIRTY)
        self._space.free(block.extent)
        block.extent = None
        return True

    def _with_spare_extent(self) -> Iterator[Block]:
        states = (BlockState.EMPTY,) if self._guards else (BlockState.EMPTY, BlockState.CLEAN)
        for state in states:
            for block in self._census[state].values():
                if block.extent is not None and not self._space.is_frozen(block.extent):
                    yield block

    def _needed_bytes(self) -> int:
        """When each block that may leave memory has an extent, and everybody keeps what is held."""
        extents = [block.extent for block in self._blocks.values() if block.extent is not None]
        own: set[Extent] = {extent for extent in extents if not self._space.is_frozen(extent)}
        held_bytes = self._space.used_bytes - sum(round_up(extent.nbytes) for extent in own)
        own_room = (b for b in self._blocks.values() if b.id not in self._static and not is_backed(b))
        return held_bytes + sum(round_up(block.nbytes) for block in own_room)

    def _no_room(self, block: Block, error: BudgetError) -> BudgetError:
        what = f"no room on NVMe for {block.name} ({block.kind.name.lower()}, {block.nbytes:,} bytes), which must leave"
        enough_bytes = self._needed_bytes()
        limit = self._space.budget_bytes
        if limit is not None and enough_bytes > limit:
            return BudgetError(
                f"{what} memory. {error} All that may be there at once takes {enough_bytes} bytes: raise nvme_budget "
                f"to at least {enough_bytes} bytes, or raise host_budget so that less goes there. (Parameters that "
                "were unfrozen or added later, and optimizers with more state than was planned for, take more than "
                "what was counted when the model was built.)",
                enough_nvme_bytes=enough_bytes,
            )
        return BudgetError(f"{what} memory. {error}")
