"""When the bytes of copies come and go: which stream waits for what, and when a use of a copy is over.

Streams wait for the copy-in event before they use a copy. The range of an evicted copy is reused only after all kernels
that those streams launched before the eviction have finished: a dropped Python reference does not tell us that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from deepoffload.copies.block_copy import BlockCopy
from deepoffload.copies.fenced_arena import DeviceArena
from deepoffload.copies.from_ranks import FromRanks
from deepoffload.copies.gathered import Gathered, is_shard
from deepoffload.copies.host_link import HostLink
from deepoffload.copies.materialise import Materialiser, SameBytes, TakesBack
from deepoffload.copies.rank_device import Coming, await_event
from deepoffload.errors import UnsupportedError
from deepoffload.memory.block import Alias, Block
from deepoffload.timeline import Lane


class Movement:
    """Moves the bytes of copies and orders what uses them. Guarded by the tier manager's lock.

    Args:
        materialiser: of blocks that are not stored as they are shown.
        gathered: of blocks that are one rank's part of what is shown.
        outside_user_modes: a context outside of the program's modes, in which bytes are moved.

    Attributes:
        from_ranks: brings those; None with one rank.
    """

    def __init__(
        self,
        link: HostLink,
        arena: DeviceArena,
        materialiser: Materialiser | None,
        gathered: Gathered | None,
        outside_user_modes: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._link = link
        self._tiers = link.tiers
        self._accelerator = link.accelerator
        self._arena = arena
        self._same_bytes = SameBytes(link)
        self._materialiser = materialiser
        self._outside_user_modes = outside_user_modes
        self.from_ranks = (
            None if gathered is None else FromRanks(gathered, link, arena, self.shown_bytes, outside_user_modes)
        )
        self._used: dict[int, BlockCopy] = {}

    # -- uses ------------------------------------------------------------------------------------------------------

    def use(self, copy: BlockCopy) -> None:
        """What the current stream does from now on with the copy comes after its coming, and before its going."""
        stream = self._accelerator.current()
        self._begin_use(copy, stream)
        while (ready := copy.ready) is not None:
            await_event(stream, ready)
            if copy.ready is not ready:  # it has arrived, and is on its way to the device; or it comes once more
                continue
            if ready.query():
                copy.ready = None
            elif not isinstance(ready, Coming):  # the stream waits, and the host does not
                break

    def _begin_use(self, copy: BlockCopy, stream: Any) -> None:
        copy.streams[stream.stream_id] = stream
        copy.over = None
        self._used[copy.block.id] = copy

    def wait_for_all(self, copy: BlockCopy, stream: Any) -> None:
        """What is launched on ``stream`` from now on comes after the coming of a copy, and all its uses so far."""
        if copy.coming is not None:
            copy.coming.await_served()  # from where it has arrived it may go on to the device
        for event in self.events(copy):
            await_event(stream, event)

    def wait_for_others(self, copy: BlockCopy) -> None:
        """The current stream waits for what the others do with a copy."""
        current = self._accelerator.current()
        for stream in copy.streams.values():
            if stream.stream_id != current.stream_id:
                current.wait_event(self._accelerator.event(stream))

    def note_ends(self) -> None:
        """Record where uses that are over have ended. A copy that leaves later, when more has been launched, need not
        wait for that."""
        for copy in [copy for copy in self._used.values() if not copy.leases and copy.may_go()]:
            copy.over = [self._accelerator.event(stream) for stream in copy.streams.values()]
            del self._used[copy.block.id]

    def events(self, copy: BlockCopy) -> list[Any]:
        """When these have happened, nothing that was launched until now uses the copy."""
        events = copy.over
        if events is None:
            events = [self._accelerator.event(stream) for stream in copy.streams.values()]
        return events if copy.ready is None else [*events, copy.ready]

    # -- bytes -----------------------------------------------------------------------------------------------------

    def shown_bytes(self, copy: BlockCopy) -> Tensor:
        """The bytes on the device, uint8."""
        with self._outside_user_modes():
            return self._arena.bytes()[copy.offset : copy.offset + copy.block.shown_nbytes]

    def _between(self, block: Block) -> Materialiser:
        if not block.forms:
            return self._same_bytes
        if self._materialiser is None:
            raise UnsupportedError(
                f"{block.name} is stored as {block.forms[0].encoding}, and nothing here makes what is shown of it"
            )
        return self._materialiser

    def _back(self, block: Block) -> TakesBack:
        return self.from_ranks.gathered if self.from_ranks is not None and is_shard(block) else self._between(block)

    def copy_in(self, copy: BlockCopy, after: Iterable[Any] = ()) -> None:
        """Start bringing the host's bytes, when ``after`` has happened. They are leased until that is done. Those of
        other ranks come when all have agreed on that."""
        if self.from_ranks is not None and is_shard(copy.block):
            self.from_ranks.ask(copy, after)
            return
        block, stream, there = copy.block, self._accelerator.copy_in, self.shown_bytes(copy)
        self._tiers.acquire(block)
        with self._link.lease_kept(block, stream):
            for event in (*self._arena.events_before(copy.offset), *after):
                stream.wait_event(event)
            with self._outside_user_modes(), self._accelerator.on(stream):
                self._between(block).bring(block, there)
            copy.ready = self._accelerator.event(stream)
        self._link.transfers.launched(Lane.TO_DEVICE, copy.ready, block, block.nbytes)

    def give_up(self, copy: BlockCopy) -> None:
        """Give the range of a new copy back that could not be filled; what was launched for it comes first."""
        self._arena.free(copy.offset, [self._accelerator.event(self._accelerator.copy_in)])

    def rewrite(self, copy: BlockCopy) -> None:
        """The same for a copy that somebody holds views of, who may look at any time. What comes from other ranks is
        there after :meth:`FromRanks.finish_rewrites`."""
        if self.from_ranks is not None and is_shard(copy.block):
            self.from_ranks.ask_again(copy)
            return
        self.copy_in(copy, after=self.events(copy))
        self.use(copy)

    def outdate(self, copy: BlockCopy) -> None:
        """Other bytes are stored from now on. The range stays, so that its addresses do; nothing shows it until it is
        filled again."""
        copy.over = self._arena.spoil(copy.offset, self.events(copy))
        copy.ready = None
        copy.stale = True
        self._used.pop(copy.block.id, None)

    def fill_again(self, copy: BlockCopy, *, load: bool) -> None:
        """Bring the stored bytes into the range of a stale copy, when its last uses are over; without ``load`` the
        current stream is about to write all of it."""
        over = copy.over or []
        try:
            if load:
                self.copy_in(copy, after=over)
            else:
                self.overwrite(copy, after=over)
        except BaseException:
            copy.over = [*over, self._accelerator.event(self._accelerator.copy_in)]
            raise
        copy.streams.clear()
        copy.over = None
        copy.stale = False

    def overwrite(self, copy: BlockCopy, after: Iterable[Any] = ()) -> None:
        """The current stream is about to write all of a new copy, which nothing is brought for, when ``after`` has
        happened. Raises as :meth:`will_change`."""
        self._back(copy.block).check_take_back(copy.block)
        copy.dirty = True
        self._arena.bytes()
        current = self._accelerator.current()
        for event in (*self._arena.events_before(copy.offset), *after):
            current.wait_event(event)

    def will_change(self, copy: BlockCopy) -> None:
        """The program is about to write to a copy, or has written to it: it alone is right.

        Raises:
            UnsupportedError: what is shown cannot be taken back. The copy shows what is stored again.
        """
        try:
            self._back(copy.block).check_take_back(copy.block)
        except UnsupportedError:
            copy.dirty = False
            self.rewrite(copy)
            raise
        copy.dirty = True

    def copy_out(self, copy: BlockCopy) -> None:
        """Start taking what the program wrote to the host. The next use of the host's bytes waits for it. Raises as
        :meth:`will_change`."""
        self.will_change(copy)  # where no door saw it, nobody has asked yet
        copy.dirty = False  # it is not asked for again while it is on its way
        try:
            self._take_back(copy)
        except BaseException:
            copy.dirty = True
            raise

    def _take_back(self, copy: BlockCopy) -> None:
        block, stream = copy.block, self._accelerator.copy_out
        self._tiers.acquire(block, load=False)
        with self._link.lease_kept(block, stream):
            self._tiers.will_change(block, by_device=True)
            self.wait_for_all(copy, stream)
            with self._outside_user_modes(), self._accelerator.on(stream):
                self._back(block).take_back(block, self.shown_bytes(copy))
            self._begin_use(copy, stream)
            done = self._accelerator.event(stream)
        self._link.transfers.launched(Lane.FROM_DEVICE, done, block, block.nbytes)

    def end_copies(self, block: Block) -> None:
        """Wait for what reads or writes the host's bytes of a block."""
        if block.copying:
            self._link.transfers.end(block)

    def free(self, copy: BlockCopy, aliases: list[Alias] | None = None) -> None:
        """Give the range of a copy back, which ``aliases`` still show."""
        self._used.pop(copy.block.id, None)
        if self.from_ranks is not None:
            self.from_ranks.no_longer_rewritten(copy)
        coming = copy.coming
        if coming is not None and self.from_ranks is not None:
            self.from_ranks.end_on_host(copy, coming)
        if coming is not None and coming.flight is None:
            coming.then = partial(self.free, copy, aliases)  # the gather that was asked for comes all the same
            return
        if coming is not None:
            coming.then = None
            coming.synchronize()
        self._arena.free(copy.offset, self.events(copy), aliases)

    def forget_all(self) -> None:
        """No copy is used any more: the device has been waited for."""
        self._used.clear()
