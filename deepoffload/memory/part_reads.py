"""Parts of a block that is away, where a use needs no more: the block itself stays away."""

from __future__ import annotations

import time
from collections.abc import Sequence

from deepoffload.errors import IoFailure
from deepoffload.io.extents import SourceExtent
from deepoffload.io.part_reads import PageRead, read_parts
from deepoffload.memory.block import Block
from deepoffload.memory.lock import SHIELD
from deepoffload.memory.tier_manager import TierManager
from deepoffload.memory.transfers import TRANSFER_LIMIT_S
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
    begin_s = time.perf_counter()
    try:
        ticket = read_parts(space, extent, parts)
        try:
            SHIELD.outside(ticket.wait, TRANSFER_LIMIT_S)
        finally:
            if not ticket.done():  # Ctrl-C: the memory is still being written to
                ticket.wait(TRANSFER_LIMIT_S)
    except IoFailure as failure:
        raise IoFailure.about(block.name, failure) from failure
    end_s = time.perf_counter()
    tiers.counters.partial_reads += 1
    tiers.counters.wait_s += end_s - begin_s
    if tiers.timeline is not None:
        nbytes = sum(part.nbytes for part in parts)
        tiers.timeline.add(Lane.READ, f"parts of {block.name}", begin_s, end_s, nbytes)
        tiers.timeline.add(Lane.WAIT, f"read parts of {block.name}", begin_s, end_s)
