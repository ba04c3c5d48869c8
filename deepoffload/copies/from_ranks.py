"""The coming of whole copies of what several ranks store: asked for, gathered, and sent on to a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from deepoffload.copies.arrivals import Arrivals
from deepoffload.copies.block_copy import BlockCopy
from deepoffload.copies.fenced_arena import DeviceArena
from deepoffload.copies.gathered import Gathered
from deepoffload.copies.host_link import HostLink
from deepoffload.copies.rank_device import Coming, await_event


class FromRanks:
    """Guarded by the tier manager's lock.

    Args:
        shown_bytes: of a copy, on the device.
        outside_user_modes: a context outside of the program's modes, in which bytes are moved.
    """

    def __init__(
        self,
        gathered: Gathered,
        link: HostLink,
        arena: DeviceArena,
        shown_bytes: Callable[[BlockCopy], Tensor],
        outside_user_modes: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.gathered = gathered
        self._link = link
        self._accelerator = link.accelerator
        self._arena = arena
        self._shown_bytes = shown_bytes
        self._outside_user_modes = outside_user_modes
        self._rewriting: list[BlockCopy] = []

    def ask(self, copy: BlockCopy, after: Iterable[Any] = ()) -> None:
        """Ask for the bytes of a copy. They come when all ranks have agreed on that, to a device when ``after`` has
        happened there."""
        copy.ready = coming = self.gathered.request(copy.block, self._shown_bytes(copy))
        if self.gathered.arrivals is not None:
            coming.send = partial(self._send, copy, coming, self.gathered.arrivals, tuple(after))

    def _send(self, copy: BlockCopy, coming: Coming, arrivals: Arrivals, after: tuple[Any, ...]) -> None:
        """A whole copy has arrived in host memory: start bringing it to its range on the device."""
        stream, there = self._accelerator.copy_in, self._shown_bytes(copy)
        used = list(copy.streams.values()) if copy.rewriting else []
        before = [self._accelerator.event(one) for one in used]
        for event in (*self._arena.events_before(copy.offset), *after, *before):
            stream.wait_event(event)
        with self._outside_user_modes(), self._accelerator.on(stream):
            self._link.bring(there, arrivals.offset_of(coming))
        done = self._accelerator.event(stream)
        arrivals.sent(coming, done, copy.block.name)
        self._link.transfers.in_bytes += there.numel()
        for one in used:  # the program has views of it, and may use them there
            one.wait_event(done)
        if copy.ready is coming:
            copy.ready = done

    # -- copies that the program has views of ----------------------------------------------------------------------

    def ask_again(self, copy: BlockCopy) -> None:
        """Other bytes are stored now: have these. They are there after :meth:`finish_rewrites`."""
        coming = copy.coming
        if coming is not None and coming.flight is None:
            return  # it shows what is stored when it is launched
        if coming is not None:
            coming.synchronize()
        self.ask(copy)
        copy.rewriting = True
        copy.ready.then = partial(self._rewritten, copy)
        self._rewriting.append(copy)

    def _rewritten(self, copy: BlockCopy) -> None:
        copy.rewriting = False
        self._rewriting.remove(copy)
        if copy.block.owner is not None:
            copy.block.owner.rewritten()

    def finish_rewrites(self) -> None:
        """Wait until copies that the program has views of show what is stored. Serves other ranks meanwhile."""
        while self._rewriting:
            await_event(self._accelerator.current(), self._rewriting[0].ready)

    # -- going -----------------------------------------------------------------------------------------------------

    def let_arrive(self, copy: BlockCopy) -> bool:
        """Wait until a copy that comes can go. Serves other ranks meanwhile; False where nobody may."""
        if copy.coming is not None:
            if not self.gathered.may_serve():
                return False
            copy.coming.await_served()
        return True

    def end_on_host(self, copy: BlockCopy, coming: Coming) -> None:
        """The copy goes before it has come. What arrives does not go on to a device, where the program may still read
        what was there before."""
        if self.gathered.arrivals is not None:
            coming.send = partial(self._forget, copy, coming, self.gathered.arrivals)

    @staticmethod
    def _forget(copy: BlockCopy, coming: Coming, arrivals: Arrivals) -> None:
        arrivals.forget(coming)
        if copy.ready is coming:
            copy.ready = None

    def no_longer_rewritten(self, copy: BlockCopy) -> None:
        """The copy goes."""
        if copy.rewriting:
            copy.rewriting = False
            self._rewriting.remove(copy)
