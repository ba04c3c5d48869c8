"""Parts of a block that is away, where a use needs no more: the block itself stays away."""

from __future__ import annotations

from collections.abc import Sequence

from deepoffload.io.extents import SourceExtent
from deepoffload.io.part_reads import PageRead, read_parts
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.schedule.block_state import BlockState
from deepoffload.timeline import Lane


def can_read_parts(tiers: TierManager, block: Block) -> bool:
    """Whether a block is away, on a disk that can be read in parts. (Checksums are those of whole blocks.)"""
    space, extent = tiers.space, block.extent
    if block.state is not BlockState.ON_NVME or space is None or extent is None:
        return False
    return isinstance(extent, SourceExtent) or not space.sums_of(extent)


def fetch_parts(tiers: TierManager, block: Block, parts: Sequence[PageRead]) -> None:
    """Read parts of a block that :func:`can_read_parts`, and wait for them.

    Raises:
        IoFailure: they could not be read; nothing is lost.
    """
    space, extent = tiers.space, block.extent
    if space is None or extent is None:
        raise RuntimeError(f"block {block.name} is on no disk")
    ticket = read_parts(space, extent, parts)
    tiers.transfers.await_apart(ticket, block, sum(part.nbytes for part in parts), Lane.READ)
    tiers.counters.partial_reads += 1
