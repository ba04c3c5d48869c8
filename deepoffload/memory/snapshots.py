"""Blocks as they were at one moment, the *cut*, copied out while the program goes on to change them.

Nothing is copied at the cut: the blocks are *frozen*. The bytes of the cut are where they were, until the program is
about to change them. Then the snapshot, a :class:`~deepoffload.memory.guards.BlockGuard`, takes what it needs:

- A block whose extent has the bytes may change. The snapshot holds the extent, and the block's next write goes to a
  fresh one.
- A block of which memory alone has the bytes is copied out before it changes.

What is in memory is copied from there, also a piece of state that only came for its update, so that no byte is read
twice; what is not is read from its extent in ranges.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum
from typing import Protocol

from deepoffload.io.extents import Extent
from deepoffload.io.range_reader import RangeReader
from deepoffload.memory.block import Block, can_hide, host_view_owner
from deepoffload.memory.tier_manager import TierManager
from deepoffload.schedule.block_state import BlockState

STEP_BYTES = 1 << 20
"""Copied at a time under the memory's lock."""

_ON_EXTENT = frozenset({BlockState.ON_NVME, BlockState.READING, BlockState.CLEAN})
_IN_MEMORY = frozenset({BlockState.CLEAN, BlockState.DIRTY, BlockState.WRITING})


class FrozenState(Enum):
    """Who has the bytes of the cut."""

    COMING = "nobody yet: an update that was decided on before the cut is still to make them"
    PRESENT = "the block, where its state says"
    KEPT = "an extent that was the block's, which is held; the block has other bytes"
    COPIED = "where they were copied to"


class BlockSink(Protocol):
    """Where the bytes of one block go.

    Attributes:
        whole: it wants all of them in one call, from memory.
    """

    whole: bool

    def put(self, start: int, address: int, nbytes: int) -> None:
        """Take bytes of the block, from position ``start`` on. They may change when this returns. Raises IoFailure."""


class SnapshotOwner(Protocol):
    """Who wants the snapshot (implemented by :class:`deepoffload.checkpoint.copying.Copying`)."""

    def failed(self, error: Exception) -> None:
        """Something could not be copied. Nothing is needed any more, and the program's own call continues."""

    def may_ride(self) -> bool:
        """Whether a block that could be left to its extent may be copied from memory now, while the program waits."""

    def is_hurried(self) -> bool:
        """Whether somebody waits for the whole snapshot."""

    def finish(self) -> None:
        """Return when the snapshot has ended, well or badly."""

    def wake(self) -> None:
        """There is something to copy again."""


class FrozenBlock:
    """A block of a snapshot. ``copied_bytes`` of its ``nbytes`` have been copied, from the beginning on."""

    __slots__ = ("block", "sink", "state", "extent", "nbytes", "copied_bytes", "taking")

    def __init__(self, block: Block, sink: BlockSink, state: FrozenState) -> None:
        self.block = block
        self.sink = sink
        self.state = state
        self.extent: Extent | None = None
        self.nbytes = block.nbytes
        self.copied_bytes = 0
        self.taking = False

    def on_extent(self) -> bool:
        """Whether an extent has the bytes of the cut, and they are not just coming to memory."""
        at_rest = self.block.state in (BlockState.ON_NVME, BlockState.CLEAN)
        return self.state is FrozenState.KEPT or (self.state is FrozenState.PRESENT and at_rest)

    def is_on_device(self) -> bool:
        """Whether a device alone has them."""
        return self.state is FrozenState.PRESENT and self.block.state is BlockState.EMPTY

    def in_memory(self) -> bool:
        """Whether the arena has the bytes of the cut. While tensors show them there they may have changed unseen; then
        the extent has them, too."""
        if self.state is not FrozenState.PRESENT or self.block.state not in _IN_MEMORY:
            return False
        owner = host_view_owner(self.block)
        return owner is None or not owner.installed


class Snapshot:
    """The frozen blocks of one tier manager, from :meth:`begin` to :meth:`end`.

    States change under the tiers' lock, and ``copied_bytes`` under ``work``. The tiers' lock is never taken inside
    ``work``.

    Args:
        work: held while something is put into a sink; the same for all snapshots with one destination.

    Attributes:
        left: blocks that are not copied yet.
        read_bytes: read from extents so far.
    """

    def __init__(self, tiers: TierManager, work: threading.Lock, owner: SnapshotOwner) -> None:
        self.tiers = tiers
        self.left = 0
        self.read_bytes = 0
        self._work = work
        self._owner = owner
        self._frozen: dict[int, FrozenBlock] = {}
        self._order: list[FrozenBlock] = []
        self._kept: deque[FrozenBlock] = deque()
        self._riding: FrozenBlock | None = None
        self._reading: FrozenBlock | None = None
        self._reader = None if tiers.space is None else RangeReader(tiers.space)

    # -- the cut ---------------------------------------------------------------------------------------------------

    def freeze(self, block: Block, sink: BlockSink, *, coming: bool) -> None:
        """Add a block, in the order of use. Under the lock that is held until :meth:`begin` has returned.

        Args:
            coming: the bytes of the cut are those after the update that the block's unit has still to make.
        """
        entry = FrozenBlock(block, sink, FrozenState.COMING if coming else FrozenState.PRESENT)
        self._frozen[block.id] = entry
        self.left += 1
        if not coming:
            self._order.append(entry)

    def begin(self) -> None:
        """From here on the program may change what it wants. What its tensors show is hidden, so that they come to
        :meth:`before_showing`; what it has views of is copied now."""
        self.tiers.guards.add(self)
        for entry in list(self._frozen.values()):
            self._hide(entry)

    def end(self) -> None:
        """Nothing is needed any more. Idempotent."""
        with self.tiers.lock:
            self.tiers.guards.remove(self)
            entries = list(self._frozen.values())
            self._frozen = {}
            self.left = 0
            with self._work:
                for entry in entries:
                    entry.state = FrozenState.COPIED
                self._riding = self._reading = None
                if self._reader is not None:
                    self._reader.close()
            for entry in entries:
                self._let_go(entry)

    # -- what the program does (BlockGuard) ------------------------------------------------------------------------

    def before_change(self, block: Block) -> None:
        if block.state is not BlockState.EMPTY:  # else a device alone has the bytes
            self._move_on(self._frozen.get(block.id))

    def before_loss(self, block: Block) -> None:
        entry = self._frozen.get(block.id)
        if entry is not None and entry.state is FrozenState.COMING:
            self._fail(RuntimeError(f"{block.name} was given up before its update was made"))
        self._move_on(entry)

    def before_device_change(self, block: Block) -> None:
        self._move_on(self._frozen.get(block.id))

    def before_showing(self, block: Block) -> None:
        entry = self._frozen.get(block.id)
        if entry is not None and entry.state is FrozenState.PRESENT and not entry.taking:
            if block.state is not BlockState.CLEAN or entry.sink.whole:
                self._take_now(entry)

    def updated(self, block: Block) -> None:
        entry = self._frozen.get(block.id)
        if entry is None or entry.state is not FrozenState.COMING:
            return
        entry.state = FrozenState.PRESENT
        if self._owner.is_hurried():
            self._take_now(entry)
            return
        self._order.append(entry)
        self._hide(entry)
        self._owner.wake()

    def make_room(self, block: Block) -> bool:
        entry = self._frozen.get(block.id)
        if entry is None or entry.extent is None or entry.extent != block.extent:
            entry = next((kept for kept in self._kept if kept.state is FrozenState.KEPT), None)
        if entry is None:
            return False
        try:
            while entry.copied_bytes < entry.nbytes:
                self._read_some(entry)
            self._complete(entry)
        except Exception as error:
            self._fail(error)
        return True

    def finish(self) -> None:
        self._owner.finish()

    def _hide(self, entry: FrozenBlock) -> None:
        block = entry.block
        owner = host_view_owner(block)
        if owner is None or not owner.installed or entry.state is not FrozenState.PRESENT:
            return
        if owner.changed():
            self.tiers.will_change(block)
        elif block.leases or not can_hide(owner):
            self._take_now(entry)
        else:
            owner.release()

    def _move_on(self, entry: FrozenBlock | None) -> None:
        """The block is about to have other bytes."""
        if entry is None or entry.state is not FrozenState.PRESENT or entry.taking:
            return
        block = entry.block
        if entry.sink.whole or block.state not in _ON_EXTENT:
            self._take_now(entry)
        elif entry.in_memory() and (entry.copied_bytes or self._owner.may_ride()):
            self._take_now(entry)
        else:
            self._hold(entry)
            entry.state = FrozenState.KEPT
            self._kept.append(entry)
            self._owner.wake()

    # -- copying ---------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Copy a part of one block; how many bytes. 0: there is nothing to copy until the program has gone on."""
        try:
            with self.tiers.lock:
                entry = self._choose()
                if entry is None:
                    return 0
                before_bytes = entry.copied_bytes
                if entry.sink.whole or entry.is_on_device():
                    self._take_now(entry)
                    return entry.nbytes - before_bytes
                if entry.in_memory():
                    self._riding = entry
                    with self._work:
                        self._put(entry, STEP_BYTES)
                    if entry.copied_bytes == entry.nbytes:
                        self._complete(entry)
                    return entry.copied_bytes - before_bytes
                self._hold(entry)
            self._read_some(entry)
            if entry.copied_bytes == entry.nbytes:
                with self.tiers.lock:
                    self._complete(entry)
            return entry.copied_bytes - before_bytes
        except Exception as error:
            self._fail(error)
            return 0

    def _choose(self) -> FrozenBlock | None:
        """What is in memory comes first, for it may leave; then what was begun; then extents that are held for us; then
        blocks on NVMe that the program uses last."""
        if self._riding is not None and self._riding.in_memory():
            return self._riding
        self._riding = None
        staying = None
        for block in self.tiers.resident():
            entry = self._frozen.get(block.id)
            if entry is not None and entry.in_memory():
                if block.id not in self.tiers.static:
                    return entry
                staying = staying or entry
        if staying is not None or (self._reading is not None and self._reading.on_extent()):
            return staying or self._reading
        while self._kept and self._kept[0].state is not FrozenState.KEPT:
            self._kept.popleft()
        if self._kept:
            return self._kept[0]
        while self._order and self._order[-1].state is not FrozenState.PRESENT:
            self._order.pop()
        waiting = (entry for entry in reversed(self._order) if entry.state is FrozenState.PRESENT)
        return next((entry for entry in waiting if entry.on_extent() or entry.is_on_device()), None)

    def _put(self, entry: FrozenBlock, most_bytes: int) -> None:
        """Copy from memory. Under both locks."""
        nbytes = min(most_bytes, entry.nbytes - entry.copied_bytes)
        entry.sink.put(entry.copied_bytes, self.tiers.address(entry.block) + entry.copied_bytes, nbytes)
        entry.copied_bytes += nbytes

    def _take_now(self, entry: FrozenBlock) -> None:
        """Copy all that is left of a block, in memory."""
        block = entry.block
        on_device = entry.is_on_device()
        entry.taking = True
        try:
            self.tiers.acquire(block)
            try:
                with self._work:
                    self._put(entry, entry.nbytes)
            finally:
                self.tiers.release(block)
            if on_device and self.tiers.copies is not None:
                self.tiers.copies.keep(block)
            self._complete(entry)
        except Exception as error:
            self._fail(error)
        finally:
            entry.taking = False

    def _read_some(self, entry: FrozenBlock) -> None:
        """Copy a range from the extent that is held."""
        reader = self._reader
        with self._work:
            if entry.extent is None or reader is None or entry.copied_bytes == entry.nbytes:
                return  # the program's thread, which needed it, was faster
            if self._reading is not entry:
                reader.open(entry.extent, entry.copied_bytes)
                self._reading = entry
            reader.alone = self._owner.is_hurried()
            try:
                part = reader.read()
            except BaseException:
                self._reading = None  # another thread may try before this one has told that it failed
                raise
            if part is None:
                raise RuntimeError(f"{entry.block.name}: {entry.copied_bytes} of {entry.nbytes} bytes were read")
            known = entry.copied_bytes - part.start
            entry.sink.put(entry.copied_bytes, part.address + known, part.nbytes - known)
            entry.copied_bytes = part.start + part.nbytes
            self.read_bytes += part.nbytes

    def _complete(self, entry: FrozenBlock) -> None:
        if entry.state is FrozenState.COPIED:
            return
        entry.state = FrozenState.COPIED
        self.left -= 1
        with self._work:
            if self._reading is entry and self._reader is not None:
                self._reader.end()
                self._reading = None
        self._let_go(entry)

    def _hold(self, entry: FrozenBlock) -> None:
        extent, space = entry.block.extent, self.tiers.space
        if entry.extent is None and extent is not None and space is not None:
            space.hold(extent)
            entry.extent = extent

    def _let_go(self, entry: FrozenBlock) -> None:
        if entry.extent is not None and self.tiers.space is not None:
            self.tiers.space.free(entry.extent)
            entry.extent = None

    def _fail(self, error: Exception) -> None:
        self._owner.failed(error)  # first: without blocks that are left, the copy would count as complete
        self.end()
