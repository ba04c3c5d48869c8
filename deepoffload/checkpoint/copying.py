"""Copies frozen blocks into files, at the rate of the disk or at a share of it, while the program goes on or waits."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from deepoffload.checkpoint.cut import BlockSpan, CutContent
from deepoffload.checkpoint.file_set import FileSet
from deepoffload.errors import IoFailure, IoTimeout
from deepoffload.memory.snapshots import Snapshot
from deepoffload.memory.tier_manager import TierManager
from deepoffload.params.pager import Pager
from deepoffload.params.unit import PendingUpdate, Unit

WAIT_S = 0.05
"""How long nothing is looked at when nothing can be copied, unless somebody says that something can."""

IDLE_S = 1.0
"""A program that has done nothing for so long is not going to make the updates that are still to come."""

STALL_S = 300.0
"""Waiting is given up when nothing has moved for so long."""

ZEROS_BYTES = 1 << 20


class Pace:
    """How much may be copied: ``share`` of all bytes that move while the program itself has transfers, and anything
    while it has none. Counted in bytes, so that it is the same on a busy machine.

    Args:
        copied_bytes: read and written so far for the copy.
        read_bytes: those of them that the swap spaces have counted, too.
    """

    def __init__(
        self,
        tiers: Sequence[TierManager],
        share: float,
        copied_bytes: Callable[[], int],
        read_bytes: Callable[[], int],
    ) -> None:
        self._tiers = [tier for tier in tiers if tier.space is not None]
        self._share = share
        self._copied_bytes = copied_bytes
        self._read_bytes = read_bytes
        self._since = (0, 0)

    def is_shared(self) -> bool:
        """Whether the program has transfers now. Safe from any thread."""
        return self._share < 1.0 and any(tier.transfers.is_busy() for tier in self._tiers)

    def may_go(self) -> bool:
        """Whether more may be copied now."""
        program_bytes, copied_bytes = self._program_bytes(), self._copied_bytes()
        if not self.is_shared():
            self._since = (program_bytes, copied_bytes)
            return True
        before_program, before_copied = self._since
        allowed = (program_bytes - before_program) * self._share / (1.0 - self._share)
        return copied_bytes - before_copied < allowed

    def _program_bytes(self) -> int:
        spaces = (tier.space for tier in self._tiers if tier.space is not None)
        return sum(space.bytes_read + space.bytes_written for space in spaces) - self._read_bytes()


class Copying:
    """Copies what a cut consists of into the files of one save (the owner of its snapshots).

    :meth:`run` copies in the thread that calls it. Where the program is about to change bytes that nobody has kept, its
    own thread copies these first.

    Args:
        share: of the disk, see :class:`Pace`.
        alive: called now and then.

    Attributes:
        thread: the one that was started for :meth:`run`; None where the program waits.
    """

    def __init__(self, files: FileSet, share: float, alive: Callable[[], None]) -> None:
        self._files = files
        self._alive = alive
        self._share = share
        self._work = threading.Lock()
        self._cut = CutContent()
        self._snapshots: list[Snapshot] = []
        self._pace = Pace((), share, lambda: 0, lambda: 0)
        self._coming: list[tuple[Pager, Unit, PendingUpdate]] = []
        self._zeros: list[BlockSpan] = []
        self._error: Exception | None = None
        self._hurried = False
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._runs_in = 0
        self._has_copied = False
        self.thread: threading.Thread | None = None
        self._activity: tuple[object, ...] = ()
        self._active_s = time.monotonic()

    def freeze(self, cut: CutContent, pagers: Sequence[Pager]) -> None:
        """Take the blocks as they are. Inside :func:`~deepoffload.checkpoint.cut.held_still`."""
        self._cut = cut
        for pager in pagers:
            snapshot = Snapshot(pager.tiers, self._work, self)
            self._snapshots.append(snapshot)
            for unit in pager.units:
                update = unit.pending
                coming = None if update is None else update.blocks_to_change(unit)
                if update is not None:
                    self._coming.append((pager, unit, update))
                for block in (unit.weights, *(piece.block for piece in unit.pieces)):
                    if not cut.is_of(block):
                        continue
                    if pager.tiers.has_bytes(block):
                        snapshot.freeze(block, cut.sink(block, self._files), coming=block in (coming or ()))
                    else:  # the next user gets zeros
                        self._zeros += cut.spans.get(block, ())
        self._pace = Pace([pager.tiers for pager in pagers], self._share, self._copied_bytes, self._read_bytes)
        for snapshot in self._snapshots:
            snapshot.begin()

    @contextlib.contextmanager
    def borrowing_locks(self) -> Iterator[None]:
        """Around a copy that runs while the program does. A program that waits for that of another rank has the locks,
        and that rank may wait for the copy."""
        with contextlib.ExitStack() as locks:
            for snapshot in self._snapshots:
                locks.enter_context(snapshot.tiers.lock.borrowing())
            yield

    def run(self, *, with_headers: bool) -> None:
        """Copy everything to the files, which have still to be finished.

        Args:
            with_headers: False: another rank writes these.

        Raises:
            IoFailure: a transfer failed. IoTimeout: nothing moves any more. Or what an update raises that had to be
            made for this.
        """
        self._runs_in = threading.get_ident()
        self._put_the_rest(with_headers=with_headers)
        while any(snapshot.left for snapshot in self._snapshots) and self._error is None:
            self._alive()
            if not self.is_hurried() and not self._pace.may_go():
                self._woken.wait(WAIT_S)
                self._woken.clear()
                continue
            with self._work:
                self._files.wait_for_room(alone=self.is_hurried())
            if not any(snapshot.step() for snapshot in self._snapshots) and self._error is None:
                self._wait_for_more()
        self.raise_failure()
        self._has_copied = True

    def raise_failure(self) -> None:
        """Raise what :meth:`failed` was told, also when all was copied before it was."""
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """Before each write: raise what ends the save."""
        self.raise_failure()
        if self._has_copied and threading.get_ident() == self._runs_in:  # else :meth:`run` does, without locks
            self._alive()

    def end(self) -> None:
        """Nothing is needed any more. Idempotent."""
        for snapshot in self._snapshots:
            snapshot.end()
        with self._work:
            self._files.close()
        self._ended.set()

    def hurry(self) -> None:
        """Somebody waits: take all of the disk, and make updates that are still to come."""
        self._hurried = True
        self._woken.set()

    # -- what the snapshots ask (SnapshotOwner) --------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """The rest is not copied: :meth:`run` or :meth:`raise_failure` raises this error."""
        self._error = self._error or error
        self._woken.set()

    def may_ride(self) -> bool:
        return self.is_hurried() or (self._pace.is_shared() and self._pace.may_go())

    def is_hurried(self) -> bool:
        """Also when the main thread has ended: the process waits for this one only."""
        return self._hurried or not threading.main_thread().is_alive()

    def finish(self) -> None:
        """Hurry, and return when all is over, also the thread.

        Raises:
            IoTimeout: nothing moves any more.
        """
        if threading.get_ident() == self._runs_in:
            return
        self.hurry()
        moved, since_s = -1, time.monotonic()
        while not self._ended.wait(WAIT_S):
            if moved != self._copied_bytes():
                moved, since_s = self._copied_bytes(), time.monotonic()
            elif time.monotonic() - since_s > STALL_S:
                raise IoTimeout(f"a checkpoint that is being saved has not moved for {STALL_S:g} s")
        if self.thread is not None:
            self.thread.join(STALL_S)

    def wake(self) -> None:
        self._woken.set()

    # -- copying ---------------------------------------------------------------------------------------------------

    def _put_the_rest(self, *, with_headers: bool) -> None:
        """What lies in no block, and what no block has yet."""
        if with_headers:
            with self._work:
                self._files.put_headers()
        for run in self._cut.in_memory:
            position = run.position
            for values in run.pieces():
                self._alive()
                with self._work:
                    self._files.put_tensor(run.file, position, values)
                position += values.nbytes
                del values  # a view of a weight: the next one may need its room
        self._cut.in_memory.clear()
        zeros = ctypes.create_string_buffer(ZEROS_BYTES if self._zeros else 1)
        for span in self._zeros:
            for start in range(0, span.nbytes, ZEROS_BYTES):
                self._alive()
                nbytes = min(ZEROS_BYTES, span.nbytes - start)
                with self._work:
                    self._files.put(span.file, span.position + start, ctypes.addressof(zeros), nbytes)

    def _wait_for_more(self) -> None:
        """Nothing can be copied before updates are made, or blocks have come that are on their way."""
        if not self.is_hurried() and not self._is_idle():
            self._woken.wait(WAIT_S)
            self._woken.clear()
            return
        while self._coming:
            pager, unit, update = self._coming[0]
            if unit.pending is update:
                pager.catch_up(unit)
                return
            del self._coming[0]
        for snapshot in self._snapshots:
            with snapshot.tiers.lock, contextlib.suppress(IoFailure):  # told again when the program needs the block
                snapshot.tiers.poll()
        if time.monotonic() - self._active_s > STALL_S:
            raise IoTimeout(f"a checkpoint that is being saved has not moved for {STALL_S:g} s")
        time.sleep(0.001)

    def _is_idle(self) -> bool:
        """Whether the program has done nothing for a while."""
        activity: tuple[object, ...] = tuple(
            (snapshot.tiers.transfers.settled, snapshot.tiers.arena.used_bytes, snapshot.tiers.counters.evictions)
            for snapshot in self._snapshots
        )
        if activity != self._activity:
            self._activity, self._active_s = activity, time.monotonic()
        return time.monotonic() - self._active_s > IDLE_S

    def _copied_bytes(self) -> int:
        return self._files.put_bytes + self._read_bytes()

    def _read_bytes(self) -> int:
        return sum(snapshot.read_bytes for snapshot in self._snapshots)
