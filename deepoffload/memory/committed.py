"""Blocks as they were at one moment, each on its way to an extent that nobody overwrites.

Nothing is copied. A block whose bytes are on NVMe keeps its extent: it is held, so the next write goes to another one.
A block that is right in memory only is written before it next changes, in most cases in the background long before.

A change that no door sees (in a module's window, through an alias) is noticed afterwards. What the block held is then
*lost*: the caller is told, and has to do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from deepoffload.errors import BudgetError, IoFailure
from deepoffload.io.extents import Extent
from deepoffload.memory.block import Block, can_hide, host_view_owner
from deepoffload.memory.tier_manager import TierManager
from deepoffload.schedule.block_state import BlockState

WRITES_AHEAD = 4
"""Blocks that stay in memory are written so many at a time, and only while fewer reads than these are under way.
Forward, which brings the state for its updates, reads more than that; backward leaves the disk mostly idle."""

_ON_DISK = (BlockState.CLEAN, BlockState.ON_NVME, BlockState.READING)


class CommittedBlock:
    """What a block held when it was frozen.

    Attributes:
        extent: where it lies, held until :meth:`CommittedBlocks.release`; None while it is not written, and for a block
            that had no bytes.
        done: it is written, or was empty, or is lost.
        lost: why it cannot be had any more; None while it can.
    """

    __slots__ = ("block", "extent", "done", "lost", "_edits")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.extent: Extent | None = None
        self.done = block.state is BlockState.EMPTY
        self.lost: str | None = None
        self._edits = edits_of(block)

    def is_untouched(self) -> bool:
        """Whether the program has not changed the block since without being seen before."""
        return edits_of(self.block) == self._edits


def edits_of(block: Block) -> int:
    """How often a change of the bytes in memory was noticed after it had been made."""
    owner = host_view_owner(block)
    return 0 if owner is None else owner.edits()


class CommittedBlocks:
    """The frozen blocks of one tier manager that are not written yet; one of its ``guards``. Called under its lock.

    Args:
        updated: told of each block whose update is made.
        give_up: called when there is no room on NVMe for both a frozen block and what comes after it.
        in_call: whether a call of a module runs on this thread.
    """

    def __init__(
        self,
        tiers: TierManager,
        updated: Callable[[Block], None],
        give_up: Callable[[], None],
        in_call: Callable[[], bool],
    ) -> None:
        self._tiers = tiers
        self._in_call = in_call
        self._updated = updated
        self._give_up = give_up
        self._open: dict[int, CommittedBlock] = {}
        tiers.guards.add(self)

    def freeze(self, block: Block, *, at_once: bool = False) -> CommittedBlock:
        """From now on what the block holds will not be lost. One that the program holds views of, or uses in this
        moment, is written at once, because nobody will tell of the next change, and so is one ``at_once``.

        Raises:
            IoFailure: such a block cannot be written. BudgetError: there is no room for it.
        """
        self._tiers.note_changes(block)
        frozen = CommittedBlock(block)
        if not frozen.done:
            self._open[block.id] = frozen
            self._look(frozen)
        if not frozen.done:
            owner = host_view_owner(block)
            if at_once or (owner is not None and (block.leases or not can_hide(owner))):
                self._write_now(frozen)
            elif owner is not None:
                owner.release()  # so that the next who wants to see the bytes is noticed
        return frozen

    def release(self, frozen: CommittedBlock) -> None:
        """It is wanted no more, or somebody else holds its extent."""
        self._open.pop(frozen.block.id, None)
        extent, frozen.extent = frozen.extent, None
        if extent is not None and self._tiers.space is not None:
            self._tiers.space.free(extent)

    def pump(self) -> None:
        """Take what is written, and start to write blocks that stay in memory while the disk has little to do: others
        are written by those that need their memory."""
        writing = self._tiers.transfers.reads_under_way()
        for frozen in list(self._open.values()):
            self._look(frozen)
            state = frozen.block.state
            if state is BlockState.DIRTY and frozen.block.id in self._tiers.static and writing < WRITES_AHEAD:
                self._start(frozen)
            writing += frozen.block.state is BlockState.WRITING and not frozen.done

    def start_all(self) -> None:
        """Start to write the rest.

        Raises:
            IoFailure, BudgetError: a write cannot be started.
        """
        for frozen in list(self._open.values()):
            self._start(frozen)

    def write_all(self) -> None:
        """Write the rest, and wait for it.

        Raises:
            IoFailure: the first that failed, when all others are written. BudgetError: there is no room for one.
        """
        problem: IoFailure | BudgetError | None = None
        try:
            self.start_all()
        except (IoFailure, BudgetError) as error:
            problem = error
        for frozen in list(self._open.values()):
            try:
                self._write_now(frozen)
            except (IoFailure, BudgetError) as error:
                problem = problem or error
        if problem is not None:
            raise problem

    # -- what the tier manager tells -----------------------------------------------------------------------------------

    def before_change(self, block: Block) -> None:
        frozen = self._open.get(block.id)
        if frozen is None:
            return
        try:
            self._write_now(frozen)
        except (IoFailure, BudgetError) as error:  # the program can have its change; the step cannot be had
            self._lose(frozen, str(error))

    before_loss = before_change

    def before_device_change(self, block: Block) -> None:
        """What lives on a device is brought home and written when it is frozen."""

    def before_showing(self, block: Block) -> None:
        """A program that asks for a weight may change it without a word. A module that computes with it hardly does:
        its call need not wait for the write, and a change is noticed (:meth:`CommittedBlock.is_untouched`)."""
        if block.id in self._open and not self._in_call():
            self.before_change(block)

    def updated(self, block: Block) -> None:
        self._updated(block)

    def finish(self) -> None:
        """The engine finishes the step itself, and says what went wrong."""

    def make_room(self, block: Block) -> bool:
        if block.extent is None or self._tiers.space is None or not self._tiers.space.is_frozen(block.extent):
            return False
        self._give_up()
        return not self._tiers.space.is_frozen(block.extent)

    # -- one block -----------------------------------------------------------------------------------------------------

    def _start(self, frozen: CommittedBlock) -> None:
        block, tiers = frozen.block, self._tiers
        tiers.note_changes(block)
        if not frozen.done and block.state is BlockState.DIRTY:
            if tiers.copies is not None:
                tiers.copies.end_copies(block)
            tiers.transfers.start_write(block, tiers.address(block))

    def _write_now(self, frozen: CommittedBlock) -> None:
        """Write it, if it is not written, and wait for it."""
        self._tiers.note_changes(frozen.block)
        if frozen.done:
            return
        if not frozen.is_untouched():
            self._lose(frozen, f"{frozen.block.name} was changed inside of a module's call")
            return
        if frozen.block.state is BlockState.DIRTY:
            self._start(frozen)
        if not frozen.done and frozen.block.state is BlockState.WRITING:
            self._tiers.transfers.settle(frozen.block)
        self._look(frozen)

    def _look(self, frozen: CommittedBlock) -> None:
        """Take the extent of one that is written."""
        block = frozen.block
        if frozen.done or block.state not in _ON_DISK:
            return
        self._tiers.note_changes(block)
        if frozen.done:
            return
        if not frozen.is_untouched():
            self._lose(frozen, f"{block.name} was changed inside of a module's call")
        elif block.extent is not None and self._tiers.space is not None:
            self._tiers.space.hold(block.extent)
            frozen.extent, frozen.done = block.extent, True
            del self._open[block.id]

    def _lose(self, frozen: CommittedBlock, why: str) -> None:
        frozen.lost, frozen.done = why, True
        self._open.pop(frozen.block.id, None)


def lost_ones(blocks: Iterable[CommittedBlock]) -> list[str]:
    """Why each of those that are lost is."""
    return [frozen.lost for frozen in blocks if frozen.lost is not None]
