"""What blocks hold, kept while they change, so that it can be had back exactly: for an update that may be undone.

It is the shadow paging of durable steps and background saves (``memory.committed``, ``memory.snapshots``) with one
difference: the change itself is what may be given up. So the block gets a fresh extent at once, and the old one is set
aside. A block of which memory alone has the bytes is copied into a *journal*, a block like any other: it may be written
to NVMe where its memory is needed.

Where memory has room to spare, nothing is copied: the journal gets the block's memory with all that is in it, and the
block gets the journal's. What changes it reads the old bytes there (:meth:`KeptBytes.elsewhere`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from deepoffload.io.extents import Extent
from deepoffload.memory.block import Block, host_view_owner
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native import cpu_adam
from deepoffload.native.aio import PAGE_BYTES, round_up
from deepoffload.native.cpu_adam import Elsewhere
from deepoffload.schedule.block_state import BlockState


class KeptBlock:
    """What one block held before its change: in ``extent``, or in ``journal``, which may have a part of it that begins
    at byte ``start``. ``in_turn``: those two have each other's memory. ``written``: then, where what is new of it
    begins, and its bytes, as long as the rest is not."""

    __slots__ = ("block", "start", "extent", "journal", "in_turn", "written")

    def __init__(self, block: Block, extent: Extent | None, journal: Block | None, start: int = 0) -> None:
        self.block = block
        self.start = start
        self.extent = extent
        self.journal = journal
        self.in_turn = False
        self.written: list[tuple[int, int]] | None = None


class KeptBytes:
    """What some blocks of one tier manager hold now. Called under its lock.

    Each block takes one extent more, for its new bytes or for its journal. All are taken here, so that nothing fails
    for want of disk space later. A journal of what stays in memory stays there, too, and takes none.

    Args:
        blocks: those that are about to change.
        staying: ids of those of them whose journals stay in memory.
        in_turn: whether blocks and journals may have each other's memory. Blocks that stay come to lie elsewhere then.
        in_parts: ids of those whose journals are made part by part, as :meth:`will_write` is told of it. What is not
            written needs none then, and memory is taken for a part at a time.

    Raises:
        BudgetError: there is no disk space for them. IoFailure: a swap file cannot grow. Nothing is taken then.
    """

    def __init__(
        self,
        tiers: TierManager,
        blocks: Sequence[Block],
        num_threads: int,
        staying: Container[int] = (),
        *,
        in_turn: bool = False,
        in_parts: Container[int] = (),
    ) -> None:
        self._tiers = tiers
        self._in_turn = in_turn
        self._in_parts = in_parts
        self._parted: Block | None = None
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
        elif block.id in self._in_parts:
            self._tiers.will_change(block)
            self._parted = block
            if spare is not None and self._tiers.space is not None:
                self._tiers.space.free(spare)
        else:
            kept = KeptBlock(block, None, self._journal(block, block.nbytes))
            self._kept.append(kept)
            self._tiers.will_change(block)
            self._keep_in(kept, spare)
        self._unchanged.discard(block.id)
        self._spare.pop(block.id, None)

    def will_write(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Call before bytes of a block that is kept in parts are written: their addresses, and how many. Blocks may
        slide to make room for what is kept: what writes the bytes takes their addresses afterwards.

        Raises:
            BudgetError, IoFailure: there is no room for them, in memory or on disk. Nothing is written then.
        """
        block, tiers = self._parted, self._tiers
        places = [] if block is None else list(ranges)
        if block is None or not places:
            return
        start = min(address for address, _ in places) - tiers.address(block)
        end = max(address + nbytes for address, nbytes in places) - tiers.address(block)
        if start < 0 or end > block.nbytes:
            start, end = 0, block.nbytes
        start, end = start - start % PAGE_BYTES, min(round_up(end), block.nbytes)
        mine = (kept for kept in self._kept if kept.block is block)
        there = [(kept.start, kept.journal.nbytes) for kept in mine if kept.journal is not None]
        for begin, nbytes in list(_gaps(there, start, end)):
            self._keep_part(block, begin, nbytes)

    def _keep_part(self, block: Block, start: int, nbytes: int) -> None:
        """Whole pages, of which none is kept yet."""
        tiers = self._tiers
        extent = None if tiers.space is None else tiers.space.allocate(nbytes)
        try:
            journal = self._journal(block, nbytes)
        except BaseException:
            if extent is not None and tiers.space is not None:
                tiers.space.free(extent)
            raise
        cpu_adam.copy(tiers.address(journal), tiers.address(block) + start, nbytes, self._num_threads)
        journal.extent = extent
        self._kept.append(KeptBlock(block, None, journal, start))
        tiers.release(journal)

    def elsewhere(self) -> list[Elsewhere]:
        """What is read in another place than where it is written: the blocks that are changing now, and have
        another memory than before."""
        address = self._tiers.address
        return [
            Elsewhere(address(kept.block), kept.block.nbytes, address(kept.journal))
            for kept in self._kept
            if kept.journal is not None and kept.written is not None
        ]

    def wrote(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Addresses and bytes of what is new in such blocks."""
        changing = [kept for kept in self._kept if kept.written is not None]
        for address, nbytes in ranges if changing else ():
            for kept in changing:
                start = address - self._tiers.address(kept.block)
                if kept.written is not None and 0 <= start < kept.block.nbytes:
                    kept.written.append((start, nbytes))

    def changed(self, block: Block) -> None:
        """The change of a block is over: what was not written of it is as it was."""
        self._parted = None if block is self._parted else self._parted
        for kept in self._kept:
            if kept.block is block and kept.journal is not None and kept.written is not None:
                new, old = self._tiers.address(block), self._tiers.address(kept.journal)
                for start, nbytes in _gaps(kept.written, 0, block.nbytes):
                    cpu_adam.copy(new + start, old + start, nbytes, self._num_threads)
                kept.written = None
                self._tiers.release(kept.journal)

    def _keep_in(self, kept: KeptBlock, extent: Extent | None) -> None:
        """Let the journal of a block have what it holds. It stays leased as long as the block gets new bytes."""
        tiers, block, journal = self._tiers, kept.block, kept.journal
        if journal is None:
            raise RuntimeError(f"{block.name} has no journal")
        if self._in_turn and _exchange(tiers, block, journal):
            kept.in_turn, kept.written = True, []
        else:
            cpu_adam.copy(tiers.address(journal), tiers.address(block), block.nbytes, self._num_threads)
            tiers.release(journal)
        journal.extent = extent

    def _journal(self, block: Block, nbytes: int) -> Block:
        """An empty one, leased."""
        tiers = self._tiers
        journal = tiers.create(f"{block.name} before its update", block.kind, nbytes)
        journal.room_bytes = block.room_bytes if nbytes == block.nbytes else round_up(nbytes)
        journal.is_brief = True
        if block.id not in self._spare and block is not self._parted:
            tiers.keep(journal)
        try:
            tiers.acquire(journal, load=False)
        except BaseException:
            tiers.remove(journal)
            raise
        return journal

    def drop_new(self) -> None:
        """The part of :meth:`restore` that takes no memory: the rest has all memory that it gives back."""
        for kept in list(self._kept):
            if kept.journal is None:
                self._back_to_extent(kept.block, kept.extent)
                self._kept.remove(kept)

    def fetch_journals(self) -> None:
        """Begin to read those that are on NVMe, as far as memory has room."""
        for kept in self._kept:
            if kept.journal is not None:
                self._tiers.prefetch(kept.journal)

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
                if kept.written is not None:
                    kept.written = None
                    self._tiers.release(kept.journal)
                self._back_from(kept, kept.journal)
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

    def _back_from(self, kept: KeptBlock, journal: Block) -> None:
        tiers, block, in_turn = self._tiers, kept.block, kept.in_turn
        tiers.acquire(journal)
        try:
            tiers.acquire(block)
            try:
                tiers.will_change(block)
                if in_turn:
                    tiers.will_change(journal)
                    in_turn = _exchange(tiers, block, journal)
                if not in_turn:
                    place = tiers.address(block) + kept.start
                    cpu_adam.copy(place, tiers.address(journal), journal.nbytes, self._num_threads)
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


def _gaps(ranges: list[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where what ``ranges`` leave of the bytes from ``begin`` to ``end`` begins, and how much it is."""
    for start, nbytes in sorted(ranges):
        if min(start, end) > begin:
            yield begin, min(start, end) - begin
        begin = max(begin, start + nbytes)
    if begin < end:
        yield begin, end - begin


def _exchange(tiers: TierManager, one: Block, other: Block) -> bool:
    """Let two resident blocks have each other's memory, without moving a byte: each then holds what the other one held.
    False, and nothing happens, where tensors show one of them, or their ranges differ in size. Both are leased, and
    about to change: no transfer of them is under way."""
    if one.offset is None or other.offset is None:
        raise RuntimeError(f"{one.name} and {other.name}: one of them has no memory")
    if any(host_view_owner(block) is not None for block in (one, other)):
        return False
    if tiers.arena.size_of(one.offset) != tiers.arena.size_of(other.offset):
        return False
    one.offset, other.offset = other.offset, one.offset
    return True
