"""What blocks hold, kept while they change, so that it can be had back exactly: for an update that may be undone.

It is the shadow paging of durable steps and background saves (``memory.committed``, ``memory.snapshots``) with one
difference: the change itself is what may be given up. So the block gets a fresh extent at once, and the old one is set
aside. A block of which memory alone has the bytes is copied into a *journal*, a block like any other: it may be written
to NVMe where its memory is needed.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from deepoffload.io.extents import Extent
from deepoffload.memory.block import Block, host_view_owner
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native import cpu_adam
from deepoffload.schedule.block_state import BlockState


class KeptBlock:
    """What one block held before its change: in ``extent``, or in ``journal``."""

    __slots__ = ("block", "extent", "journal")

    def __init__(self, block: Block, extent: Extent | None, journal: Block | None) -> None:
        self.block = block
        self.extent = extent
        self.journal = journal


class KeptBytes:
    """What some blocks of one tier manager hold now. Called under its lock.

    Each block takes one extent more, for its new bytes or for its journal. All are taken here, so that nothing fails
    for want of disk space later. A journal of what stays in memory stays there, too, and takes none.

    Args:
        blocks: those that are about to change.
        staying: ids of those of them whose journals stay in memory.

    Raises:
        BudgetError: there is no disk space for them. IoFailure: a swap file cannot grow. Nothing is taken then.
    """

    def __init__(
        self, tiers: TierManager, blocks: Sequence[Block], num_threads: int, staying: Container[int] = ()
    ) -> None:
        self._tiers = tiers
        self._num_threads = num_threads
        self._unchanged = {block.id for block in blocks}
        self._spare: dict[int, Extent] = {}
        self._kept: list[KeptBlock] = []
        try:
            for block in blocks:
                if tiers.space is not None and block.id not in staying:
                    self._spare[block.id] = tiers.space.allocate(block.nbytes)
        except BaseException:
            self._free_spare()
            raise

    def includes(self, block: Block) -> bool:
        """Whether this is one of the blocks, or a journal of one."""
        return block.id in self._unchanged or any(block in (kept.block, kept.journal) for kept in self._kept)

    def is_at_hand(self) -> bool:
        """Whether :meth:`restore` reads nothing and takes no memory."""
        return all(kept.journal is None or (kept.journal.resident and kept.block.resident) for kept in self._kept)

    def will_change(self, block: Block) -> None:
        """Call in place of :meth:`TierManager.will_change`, the first time and every time. The block is leased.

        Raises:
            IoFailure: a write of the block that was in flight has failed. BudgetError: there is no room for its
            journal. The block has not changed then.
        """
        if block.id not in self._unchanged:
            self._tiers.will_change(block)
            return
        if block.state is BlockState.WRITING:
            self._tiers.transfers.settle(block)
        spare = self._spare.get(block.id)
        if block.state is BlockState.CLEAN and spare is not None:
            old = block.extent
            self._tiers.will_change(block)
            self._kept.append(KeptBlock(block, old, None))
            block.extent = spare
        else:
            self._kept.append(KeptBlock(block, None, self._journal(block, spare)))
            self._tiers.will_change(block)
        self._unchanged.discard(block.id)
        self._spare.pop(block.id, None)

    def _journal(self, block: Block, extent: Extent | None) -> Block:
        tiers = self._tiers
        journal = tiers.create(f"{block.name} before its update", block.kind, block.nbytes)
        journal.room_bytes = block.room_bytes
        if extent is None:
            tiers.keep(journal)
        try:
            tiers.acquire(journal, load=False)
        except BaseException:
            tiers.remove(journal)
            raise
        cpu_adam.copy(tiers.address(journal), tiers.address(block), block.nbytes, self._num_threads)
        journal.extent = extent
        tiers.release(journal)
        return journal

    def restore(self) -> None:
        """The blocks hold again what they held. To be called again where it fails: what is restored stays so.

        Raises:
            IoFailure, BudgetError: a journal that was written to NVMe cannot be brought back.
        """
        while self._kept:
            kept = self._kept[-1]
            if kept.journal is None:
                self._back_to_extent(kept.block, kept.extent)
            else:
                self._back_from(kept.journal, kept.block)
                self._tiers.remove(kept.journal)
            self._kept.pop()
        self._free_spare()

    def _back_to_extent(self, block: Block, extent: Extent | None) -> None:
        owner = host_view_owner(block)
        if owner is not None and owner.installed:
            raise RuntimeError(f"{block.name} is shown, with bytes of an update that is not certain")
        self._tiers.discard(block)
        if block.extent is not None and self._tiers.space is not None:
            self._tiers.space.free(block.extent)
        block.extent = extent
        block.to(BlockState.ON_NVME)

    def _back_from(self, journal: Block, block: Block) -> None:
        tiers = self._tiers
        tiers.acquire(journal)
        try:
            tiers.acquire(block)
            try:
                tiers.will_change(block)
                cpu_adam.copy(tiers.address(block), tiers.address(journal), block.nbytes, self._num_threads)
            finally:
                tiers.release(block)
        finally:
            tiers.release(journal)

    def forget(self) -> list[Block]:
        """What the blocks hold now is right. Returns the journals, which the caller removes when they are not being
        written any more (:meth:`TierManager.remove` would wait for that)."""
        journals = []
        for kept in self._kept:
            if kept.journal is not None:
                journals.append(kept.journal)
            elif kept.extent is not None and self._tiers.space is not None:
                self._tiers.space.free(kept.extent)
        self._kept = []
        self._free_spare()
        return journals

    def _free_spare(self) -> None:
        for extent in self._spare.values():
            if self._tiers.space is not None:
                self._tiers.space.free(extent)
        self._spare = {}
