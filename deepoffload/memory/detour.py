"""Blocks that go to NVMe from memory which is no block's, and come back there, without a range of their own between.

So contributions to other ranks leave their slots where memory has no room for one more block.
"""

from __future__ import annotations

import time

from deepoffload.errors import BudgetError, IoFailure
from deepoffload.io.ticket import Ticket
from deepoffload.memory.block import Block
from deepoffload.memory.lock import SHIELD
from deepoffload.memory.tier_manager import TierManager
from deepoffload.memory.transfers import TRANSFER_LIMIT_S
from deepoffload.schedule.block_state import BlockState
from deepoffload.timeline import Lane


def write_out(tiers: TierManager, block: Block, address: int) -> bool:
    """Let an empty block have the bytes at ``address``, which is as aligned as memory of the arena: NVMe has them, and
    memory does not. Waits for that. Called under the memory's lock. Returns False, with nothing done, where there is no
    NVMe, or no room on it next to all that may have to leave memory.

    Raises:
        IoFailure: the write has failed. The block is empty.
    """
    space = tiers.space
    # What the block itself may take is counted already.
    if space is None or tiers.transfers.spare_disk_bytes() < 0:
        return False
    try:
        extent = space.allocate(block.nbytes)
    except BudgetError:
        return False
    try:
        _finish(tiers, block, space.write(extent, address, urgent=True), Lane.WRITE)
    except BaseException:
        space.free(extent)
        raise
    tiers.transfers.back(block, extent)
    return True


def read_in(tiers: TierManager, block: Block, address: int) -> None:
    """Fill memory at ``address`` with what a block holds that is ON_NVME; it stays so. Waits for that.

    Raises:
        IoFailure: the read has failed; nothing is lost.
    """
    if tiers.space is None or block.extent is None or block.state is not BlockState.ON_NVME:
        raise RuntimeError(f"{block.name} is on no disk")
    _finish(tiers, block, tiers.space.read(block.extent, address, urgent=True), Lane.READ)


def _finish(tiers: TierManager, block: Block, ticket: Ticket, lane: Lane) -> None:
    begin_s = time.perf_counter()
    try:
        SHIELD.outside(ticket.wait, TRANSFER_LIMIT_S)
    except IoFailure as failure:
        raise IoFailure.about(block.name, failure) from failure
    finally:
        if not ticket.done():  # Ctrl-C: the memory is still being read or written
            ticket.wait(TRANSFER_LIMIT_S)
    end_s = time.perf_counter()
    tiers.counters.wait_s += end_s - begin_s
    if tiers.timeline is not None:
        tiers.timeline.add(lane, block.name, begin_s, end_s, block.nbytes)
        tiers.timeline.add(Lane.WAIT, f"{lane.value} {block.name}", begin_s, end_s)
