"""A ring of staging slots: bytes of a device that go into no block as they are come through it into host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepoffload.copies.host_link import HostLink
from deepoffload.errors import BudgetError
from deepoffload.memory.block import Block
from deepoffload.native.aio import round_up
from deepoffload.timeline import Lane

INLINE_BYTES = 64 << 10
"""Fewer bytes are used where their arrival is noticed: to hand them to another thread would take longer."""

PACK_SHARE = 4
"""What takes at most this part of a slot leaves together with other such parts."""

PART_ALIGNMENT_BYTES = 64


class Receiver(Protocol):
    """What becomes of bytes that arrive."""

    def use(self, address: int, start: int, nbytes: int) -> Any:
        """Use the bytes at ``address``, ``nbytes`` from byte ``start`` of the source on. It runs on another thread and
        without the lock: it takes nothing of ours but the bytes, and the block, which stays where it is."""

    def used(self, result: Any) -> None:
        """Called under the lock afterwards, with what :meth:`use` has returned."""


@dataclass(frozen=True)
class _SlotPart:
    at: int
    start: int
    nbytes: int
    whose: Receiver


class _Arrival:
    """Happens when what was copied into a slot has been used. Guarded by the lock; it looks like a device's event.

    A pack has no copy yet while more may come to it: it is launched when somebody waits for it.
    """

    def __init__(self, ring: StagingRing, block: Block, slot: int) -> None:
        self._ring = ring
        self.block = block
        self.slot = slot
        self.parts: list[_SlotPart] = []
        self.nbytes = 0
        self.keep: Tensor | None = None
        self._event: Any = None
        self._using: Future[list[Any]] | None = None
        self._results: list[Any] | None = None

    @property
    def launched(self) -> bool:
        return self._event is not None

    def add(self, start: int, nbytes: int, whose: Receiver) -> None:
        """One more part, at the end of the slot."""
        self.parts.append(_SlotPart(self.nbytes, start, nbytes, whose))
        self.nbytes = round_up(self.nbytes + nbytes, PART_ALIGNMENT_BYTES)

    def launch(self, event: Any) -> None:
        """The copy is launched, and has ended when ``event`` has happened."""
        self._event = event

    def begin(self) -> bool:
        """Whether the bytes have come; then they are being used, or have been."""
        if self._results is not None or self._using is not None:
            return True
        if self._event is None or not self._event.query():
            return False
        self._start()
        return True

    def query(self) -> bool:
        """Whether it has happened. Never waits."""
        return self.begin() and (self._using is None or self._using.done())

    def synchronize(self) -> None:
        """Wait for it."""
        if self._event is None:
            self._ring.launch_pack()
        if not self.begin():
            self._event.synchronize()
            self._start()
        if self._using is not None:
            self._results, self._using = self._using.result(), None

    def _start(self) -> None:
        if self.nbytes <= INLINE_BYTES and self._ring.is_idle():
            self._results = self._use()
        else:
            self._using = self._ring.submit(self._use)

    def _use(self) -> list[Any]:
        address = self._ring.address_of(self.slot)
        return [part.whose.use(address + part.at, part.start, part.nbytes) for part in self.parts]

    def end(self) -> None:
        """Tell who used the bytes, and give the slot back."""
        try:
            self.synchronize()
            for part, result in zip(self.parts, self._results or (), strict=True):
                part.whose.used(result)
        finally:
            self._ring.give_back(self.slot)


class _Pack:
    """Small parts for one block that leave in one copy: what they are on the device, until that is launched."""

    def __init__(self, arrival: _Arrival) -> None:
        self.arrival = arrival
        self.sources: list[Tensor] = []
        self.streams: list[Any] = []


class StagingRing:
    """Slots in the arena, page-locked. Guarded by the tier manager's lock.

    A slot is used again when its copy is done and what arrived in it has been used, on a thread that does nothing else:
    the program's threads launch on. When all slots are on their way, the next user waits for the oldest; the timeline
    names that wait.

    Args:
        what: passes through it, for errors and the timeline.
        outside_user_modes: a context outside of the program's modes, in which bytes are moved.

    Attributes:
        nbytes: what it takes of the arena.

    Raises:
        BudgetError: the host budget has no room for it.
    """

    def __init__(
        self,
        link: HostLink,
        what: str,
        slot_bytes: int,
        slots: int,
        outside_user_modes: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._link = link
        self._outside_user_modes = outside_user_modes
        self._tiers = link.tiers
        self._what = what
        self._slot_bytes = slot_bytes
        self._pack: _Pack | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._last: Future[list[Any]] | None = None
        self.nbytes = slots * slot_bytes
        arena = link.tiers.arena
        start = arena.allocate(self.nbytes)
        if start is None:
            raise BudgetError(
                f"host_budget is {arena.capacity_bytes} bytes; {self.nbytes} are needed for {what} on their way "
                f"from {link.accelerator.device} alone. Raise host_budget"
            )
        link.at_close.append(self.close)
        link.pinned.lock(start, self.nbytes)  # before all else: who waits for such a copy holds up the device
        self._free = [start + index * slot_bytes for index in range(slots)]

    def worker(self) -> ThreadPoolExecutor:
        """The thread that uses what has arrived. It ends with the ring."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, f"deepoffload {self._what}")
            weakref.finalize(self, self._worker.shutdown, wait=False)
        return self._worker

    def submit(self, use: Callable[[], list[Any]]) -> Future[list[Any]]:
        """Have the thread use what has arrived, after all that has arrived before."""
        self._last = self.worker().submit(use)
        return self._last

    def is_idle(self) -> bool:
        """Whether the thread has used all that it was given. What comes next may belong to the same bytes."""
        return self._last is None or self._last.done()

    def close(self) -> None:
        """End the thread. Nothing is under way any more."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def address_of(self, slot: int) -> int:
        return self._tiers.arena.address + slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def parts_of(self, nbytes: int) -> int:
        """In how many parts so many bytes pass through."""
        return -(-nbytes // self._slot_bytes)

    def take(self, source: Tensor, block: Block, whose: Receiver, *, may_wait: bool = False) -> None:
        """Start taking ``source`` (uint8, on the device, complete on the current stream) to the host, part by part. To
        be called outside of the program's modes.

        Args:
            block: for which it comes. It is resident, and leased until the last part has arrived.
            whose: is told of each part. ``source`` lives until it was told of all.
            may_wait: what is small may leave together with what comes next for the same block.
        """
        if self._pack is not None and self._pack.arrival.block is not block:
            self.launch_pack()  # its unit is complete, as far as that shows
        if may_wait and source.numel() <= self._slot_bytes // PACK_SHARE:
            self._add_to_pack(source, block, whose)
            return
        accelerator = self._link.accelerator
        stream = accelerator.copy_out
        stream.wait_event(accelerator.event(accelerator.current()))
        for start in range(0, source.numel(), self._slot_bytes):
            part = source[start : start + self._slot_bytes]
            arrival = self._arrival(block)
            arrival.add(start, part.numel(), whose)
            try:
                with accelerator.on(stream):
                    self._link.take(part, arrival.slot)
                self._tiers.acquire(block)
            except BaseException:
                self.give_back(arrival.slot)  # launches into it precede the next copy of this stream
                raise
            arrival.launch(accelerator.event(stream))
            self._link.transfers.launched(
                Lane.FROM_DEVICE, arrival, block, part.numel(), arrival.end, begin=arrival.begin
            )

    # -- packs ---------------------------------------------------------------------------------------------------------

    def _add_to_pack(self, source: Tensor, block: Block, whose: Receiver) -> None:
        pack = self._pack
        if pack is not None and pack.arrival.nbytes + source.numel() > self._slot_bytes:
            self.launch_pack()
            pack = None
        if pack is None:
            arrival = self._arrival(block)  # it has its slot already: to launch it waits for none
            try:
                self._tiers.acquire(block)
            except BaseException:
                self.give_back(arrival.slot)
                raise
            pack = self._pack = _Pack(arrival)
            self._link.transfers.launched(Lane.FROM_DEVICE, arrival, block, 0, arrival.end, begin=arrival.begin)
        pack.arrival.add(0, source.numel(), whose)
        pack.sources.append(source)
        pack.streams.append(self._link.accelerator.current())
        self._link.transfers.out_bytes += source.numel()

    def launch_pack(self) -> None:
        """Start the copy of what has been packed so far, if there is any."""
        pack, self._pack = self._pack, None
        if pack is None:
            return
        accelerator, arrival = self._link.accelerator, pack.arrival
        out = accelerator.copy_out
        with self._outside_user_modes():
            try:
                arrival.keep = self._put_together(pack)
            except torch.OutOfMemoryError:  # they leave all the same, each in a copy of its own
                for stream in {s.stream_id: s for s in pack.streams}.values():
                    out.wait_event(accelerator.event(stream))
            with accelerator.on(out):
                if arrival.keep is not None:
                    self._link.take(arrival.keep, arrival.slot)
                else:
                    for part, source in zip(arrival.parts, pack.sources, strict=True):
                        self._link.take(source, arrival.slot + part.at)
            arrival.launch(accelerator.event(out))

    def _put_together(self, pack: _Pack) -> Tensor:
        """What was packed, in one piece of the device's memory, for which the stream of copies waits.

        Raises:
            torch.OutOfMemoryError: the device is full; nothing has been launched.
        """
        accelerator, arrival = self._link.accelerator, pack.arrival
        together = torch.empty(arrival.nbytes, dtype=torch.uint8, device=accelerator.device)
        current = accelerator.current()
        others = {s.stream_id: s for s in pack.streams if s.stream_id != current.stream_id}
        for stream in others.values():
            current.wait_event(accelerator.event(stream))
        parts = [together[part.at : part.at + part.nbytes] for part in arrival.parts]
        torch._foreach_copy_(parts, pack.sources)
        gathered = accelerator.event(current)
        for stream in others.values():
            stream.wait_event(gathered)  # the sources go now, and their memory is used again there
        accelerator.copy_out.wait_event(gathered)
        return together

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _arrival(self, block: Block) -> _Arrival:
        self._link.transfers.poll()
        while not self._free:
            if not self._link.transfers.end_oldest(Lane.FROM_DEVICE, f"the ring of {self._what} is full"):
                raise RuntimeError(f"the ring of {self._what} is full, and nothing is on its way")
        return _Arrival(self, block, self._free.pop())
