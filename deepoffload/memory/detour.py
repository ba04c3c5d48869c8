"""Blocks that go to NVMe from memory which is no block's, and come back there, without a range of their own between.

So contributions to other ranks leave their slots where memory has no room for one more block.
"""

from __future__ import annotations

from deepoffload.errors import BudgetError
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.schedule.block_state import BlockState
from deepoffload.timeline import Lane


def write_out(tiers: TierManager, block: Block, address: int) -> bool:
    """Let an empty block have the bytes at ``address``, which is as aligned as memory of the arena: NVMe has them, and
    memory does not. Waits for that. Called under the memory's lock, by who knows that NVMe can spare the room
    (:meth:`~deepoffload.memory.transfers.Transfers.spare_disk_bytes`). Returns False, with nothing done, where there is
    no NVMe, or its files cannot grow.

    Raises:
        IoFailure: the write has failed. The block is empty.
    """
    space = tiers.space
    if space is None:
        return False
    try:
        extent = space.allocate(block.nbytes)
    except BudgetError:
        return False
    try:
        ticket = space.write(extent, address, urgent=True)
        tiers.transfers.await_apart(ticket, block, block.nbytes, Lane.WRITE)
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
    ticket = tiers.space.read(block.extent, address, urgent=True)
    tiers.transfers.await_apart(ticket, block, block.nbytes, Lane.READ)
