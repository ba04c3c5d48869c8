"""The transfers of blocks: started, waited for, and their results taken.

On failure nothing is lost: the copy that was right stays right.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deepoffload.errors import BudgetError, IoFailure
from deepoffload.io.extents import Extent
from deepoffload.io.swap_space import SwapSpace
from deepoffload.io.ticket import Ticket
from deepoffload.memory.block import Block
from deepoffload.memory.disk_room import DiskRoom
from deepoffload.memory.lock import SHIELD
from deepoffload.schedule.block_state import BlockState
from deepoffload.timeline import Lane, Timeline

TRANSFER_LIMIT_S = 300.0
"""How long one transfer may take before the wait for it is given up with an error that names it."""

UNFINISHED_MAX = 3
"""With so many unfinished transfers of one direction in sight, those behind them are not looked at."""


@dataclass
class TierCounters:
    """Running totals of one tier manager.

    faults: reads that were waited for at a use that no plan had predicted. waits: predicted uses whose read was not
    done in time. wait_s: seconds spent waiting for transfers of any kind. lent: blocks that got the memory of several
    holes. partial_reads: uses of a block that is away for which a part of it was read.
    """

    faults: int = 0
    waits: int = 0
    wait_s: float = 0.0
    prefetches: int = 0
    evictions: int = 0
    compactions: int = 0
    lent: int = 0
    partial_reads: int = 0


class Transfers:
    """Every block that is ``READING`` or ``WRITING``, and nothing else. Called under the memory's lock.

    Args:
        free_memory: takes the memory of a block away whose read has failed.
        discard: forgets the bytes of a block.
        disk_room: finds the extents that blocks are written to; None where there is no swap space.

    Attributes:
        settled: how many have ended so far.
    """

    def __init__(
        self,
        space: SwapSpace | None,
        counters: TierCounters,
        free_memory: Callable[[Block], None],
        discard: Callable[[Block], None],
        timeline: Timeline | None,
        disk_room: DiskRoom | None,
    ) -> None:
        self._disk_room = disk_room
        self._space = space
        self._counters = counters
        self._free_memory = free_memory
        self._discard = discard
        self._timeline = timeline
        self._reading: dict[int, Block] = {}
        self._writing: dict[int, Block] = {}
        self._overtaken: set[int] = set()
        self._unwanted: set[int] = set()
        self.settled = 0

    def in_flight(self) -> list[Block]:
        """Blocks on their way; in each direction the oldest first."""
        return [*self._writing.values(), *self._reading.values()]

    def reads_under_way(self) -> int:
        return len(self._reading)

    def are_many(self, count: int) -> bool:
        """Whether at least ``count`` blocks are on their way in each direction."""
        return len(self._reading) >= count and len(self._writing) >= count

    def done(self) -> list[Block]:
        """Those of them whose transfer has ended, well or badly.

        Transfers end about in the order in which they were started, so those far behind ones that have not ended are
        not asked: they are taken with a later call, or when somebody needs them.
        """
        found = []
        for blocks in (self._writing, self._reading):
            unfinished = 0
            for block in blocks.values():
                if block.ticket is not None and block.ticket.done():
                    found.append(block)
                else:
                    unfinished += 1
                    if unfinished == UNFINISHED_MAX:
                        break
        return found

    def is_busy(self) -> bool:
        """Whether the disk has something to do for the program. Also without the lock."""
        tickets = [block.ticket for block in (*self._writing.values(), *self._reading.values())]
        return any(ticket is not None and not ticket.done() for ticket in tickets)

    def back(self, block: Block, extent: Extent) -> None:
        """The bytes of an empty block are those that lie in ``extent``, of somebody else's file or its own."""
        block.extent = extent
        block.to(BlockState.ON_NVME)

    def spare_disk_bytes(self) -> float:
        """Of ``nvme_budget``, what is left next to all that may have to leave memory."""
        return math.inf if self._disk_room is None else self._disk_room.spare_bytes()

    def start_read(self, block: Block, address: int, *, urgent: bool) -> None:
        """Begin to fill ``block.nbytes`` bytes at ``address`` from its extent."""
        if self._space is None or block.extent is None:
            raise RuntimeError(f"block {block.name} is on NVMe without an extent")
        block.to(BlockState.READING)
        try:
            block.ticket = self._space.read(block.extent, address, urgent=urgent)
        except BaseException:
            block.to(BlockState.ON_NVME)
            self._free_memory(block)
            raise
        self._reading[block.id] = block

    def start_write(self, block: Block, address: int) -> None:
        """Begin to write the bytes at ``address`` to its extent, or to a fresh one where that is frozen or missing.

        Raises:
            BudgetError: there is no disk space for a fresh one.
        """
        if self._space is None or self._disk_room is None:
            raise RuntimeError("there is no swap space")
        extent = self._disk_room.extent(block)
        block.to(BlockState.WRITING)
        try:
            block.ticket = self._space.write(extent, address)
        except BaseException:
            block.to(BlockState.DIRTY)
            raise
        self._writing[block.id] = block

    def write_if_room(self, block: Block, address: int) -> bool:
        """:meth:`start_write`; False where NVMe is full. Who has to have the block's memory then says so."""
        try:
            self.start_write(block, address)
        except BudgetError:
            return False
        return True

    def settle_all(self, blocks: Iterable[Block]) -> None:
        """Take the results of several; raises the first :class:`IoFailure` when all are taken."""
        failure: IoFailure | None = None
        for block in blocks:
            try:
                self.settle(block)
            except IoFailure as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def settle_before_change(self, block: Block) -> None:
        """Wait for the write of a block whose bytes change now, or have changed already. Where Ctrl-C ends the wait,
        nobody may ask again: what is being written counts as wrong from here on."""
        self._unwanted.discard(block.id)
        try:
            self.settle(block)
        finally:
            if block.state is BlockState.WRITING:
                self._overtaken.add(block.id)

    def give_up(self, block: Block) -> None:
        """End the transfer of a block whose bytes nobody wants: what has not begun of it does not begin."""
        if block.ticket is not None:
            block.ticket.cancel()
        with contextlib.suppress(IoFailure):
            self.settle(block, interruptible=False)

    def discard_soon(self, block: Block) -> None:
        """Discard a block without waiting: one that is being written goes when that has ended. Until then its bytes are
        nobody's. Who takes the block before, to overwrite them, keeps it."""
        if block.state is BlockState.WRITING:
            self._unwanted.add(block.id)
        else:
            self._discard(block)

    def settle(self, block: Block, *, interruptible: bool = True) -> None:
        """Wait for a block's transfer and take its result.

        Ctrl-C may end an ``interruptible`` wait; the transfer then is still in flight, as the books say.
        """
        ticket = block.ticket
        if ticket is None:
            raise RuntimeError(f"block {block.name} has no transfer in flight")
        reading = block.state is BlockState.READING
        if not ticket.done():
            self._wait(block, reading, interruptible)
        del (self._reading if reading else self._writing)[block.id]
        self.settled += 1
        block.ticket = None
        overtaken, unwanted = block.id in self._overtaken, block.id in self._unwanted and not block.leases
        self._overtaken.discard(block.id)
        self._unwanted.discard(block.id)
        try:
            ticket.wait(0.0)
        except IoFailure as failure:
            if reading:
                block.to(BlockState.ON_NVME)
                self._free_memory(block)
            else:
                block.to(BlockState.DIRTY)
            if unwanted:
                self._discard(block)
                return
            raise IoFailure.about(block.name, failure) from failure
        block.to(BlockState.DIRTY if overtaken else BlockState.CLEAN)
        if self._timeline is not None:
            lane = Lane.READ if reading else Lane.WRITE
            self._timeline.add(lane, block.name, ticket.started_s, ticket.finished_s, block.nbytes)
        if unwanted:
            self._discard(block)

    def await_apart(self, ticket: Ticket, block: Block, nbytes: int, lane: Lane) -> None:
        """Wait for a transfer of ``nbytes`` bytes of a block that does not change who holds its bytes.

        Raises:
            IoFailure: it has failed.
        """
        begin_s = time.perf_counter()
        try:
            SHIELD.outside(ticket.wait, TRANSFER_LIMIT_S)
        except IoFailure as failure:
            raise IoFailure.about(block.name, failure) from failure
        finally:
            if not ticket.done():  # Ctrl-C: the memory is still being read or written
                ticket.wait(TRANSFER_LIMIT_S)
        end_s = time.perf_counter()
        self._counters.wait_s += end_s - begin_s
        if self._timeline is not None:
            what = block.name if nbytes == block.nbytes else f"parts of {block.name}"
            self._timeline.add(lane, what, begin_s, end_s, nbytes)
            self._timeline.add(Lane.WAIT, f"{lane.value} {what}", begin_s, end_s)

    def _wait(self, block: Block, reading: bool, interruptible: bool) -> None:
        if block.ticket is None:
            return
        if reading:
            block.ticket.promote()  # of what is still queued behind other prefetches
        begin_s = time.perf_counter()
        try:
            if interruptible:
                SHIELD.outside(block.ticket.wait, TRANSFER_LIMIT_S)
            else:
                block.ticket.wait(TRANSFER_LIMIT_S)
        except IoFailure:
            pass  # taken by the caller, when the books are right
        end_s = time.perf_counter()
        self._counters.wait_s += end_s - begin_s
        if self._timeline is not None:
            what = f"{'read' if reading else 'write'} {block.kind.name.lower()}: {block.name}"
            self._timeline.add(Lane.WAIT, what, begin_s, end_s)
