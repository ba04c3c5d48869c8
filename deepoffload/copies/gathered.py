"""Whole copies of units of which each rank stores a shard: gathered when wanted, served when another rank wants them.

A gather begins with a want, when the room of the copy is reserved (:meth:`Gathered.request`). It is launched when all
ranks have agreed on it, on every rank. Only then does this rank's shard have to be in memory; it is leased until the
others have read it. A rank that has not asked gives its shard and takes nothing.

What the program writes to a copy goes back to the shard as far as this rank owns it.

Ranks give each other what is in host memory. So a copy for a device arrives there first (:class:`Arrivals`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from deepoffload.copies.arrivals import Arrivals
from deepoffload.copies.host_link import HostLink, host_offset
from deepoffload.copies.rank_device import Coming, GatherFlight, Served
from deepoffload.copies.rank_link import RankLink
from deepoffload.memory.block import Block
from deepoffload.memory.form import SHARD
from deepoffload.native.aio import round_up
from deepoffload.ranks.exchange import Flight
from deepoffload.timeline import Lane


def is_shard(block: Block) -> bool:
    """Whether a block stores one rank's part of what it shows."""
    return bool(block.forms) and block.forms[0].encoding == SHARD


class SectionPlace(Protocol):
    """Where a section of a unit lies, in bytes (``params.shards.Section``): in the whole copy, a rank's range of it in
    its shard, and how long that is."""

    @property
    def whole_offset(self) -> int: ...

    @property
    def shard_offset(self) -> int: ...

    @property
    def range_nbytes(self) -> int: ...


class _Shown:
    """One block, under its number among those that ranks ask for.

    Attributes:
        asked: copies that this rank has asked for, and whose gather has not been launched.
        taken: how often each rank has taken the bytes that are stored now.
    """

    def __init__(self, gathered: Gathered, block: Block, number: int, sections: Sequence[SectionPlace]) -> None:
        self.block = block
        self.number = number
        self.sections = sections
        self.asked: deque[Coming] = deque()
        self.taken = [0] * gathered.world_size
        self._gathered = gathered

    def serve(self, takers: tuple[int, ...]) -> GatherFlight:
        """Launch a gather of the block, as all ranks do now."""
        return self._gathered.launch(self, takers)


class Gathered:
    """The materialiser of blocks that are one rank's shard. Guarded by the tier manager's lock.

    Attributes:
        arrivals: where copies for a device arrive; None where the CPU computes, whose copies lie in the arena.
    """

    def __init__(self, host: HostLink, link: RankLink) -> None:
        self._host = host
        self._link = link
        self._tiers = host.tiers
        self.arrivals = Arrivals(host.tiers) if host.accelerator.has_memory else None
        self._shown: dict[int, _Shown] = {}

    @property
    def world_size(self) -> int:
        return self._link.ranks.world_size

    # -- what ranks may ask for ------------------------------------------------------------------------------------

    def show(
        self, block: Block, number: int, sections: Sequence[SectionPlace], tensor_names: Sequence[str] = ()
    ) -> None:
        """From now on this rank serves a block, and can ask for it. All ranks use the same number, and the same names
        for the tensors in it. Raises BudgetError where its whole copy can never come to the device."""
        if self.arrivals is not None:
            self.arrivals.check(block)
        shown = self._shown[block.id] = _Shown(self, block, number, sections)
        self._link.show(number, block.name, shown, tensor_names)

    # -- coming ----------------------------------------------------------------------------------------------------

    def request(self, block: Block, whole: Tensor) -> Coming:
        """Ask for the whole of a block. Launches nothing, and does not wait.

        Args:
            whole: gets it, uint8, ``(block.shown_nbytes,)``. Nobody else uses that memory before it has arrived. On a
                device nothing comes to it: what has arrived is in ``arrivals``, and is the caller's to send on
                (``Coming.send``).

        Returns:
            The event of its coming.

        """
        shown = self._shown.get(block.id)
        if shown is None:
            raise RuntimeError(f"{block.name} is one rank's part, and nothing says what the ranks call it")
        coming = Coming(self._link, shown.number, whole)
        self._link.post_gather(shown.number)
        shown.asked.append(coming)
        return coming

    def has_room(self, block: Block) -> bool:
        """Whether a copy may be asked for in advance: what was asked for before, and this one, come without waiting for
        the device. A wait for it in a launch keeps the other ranks waiting, too."""
        if self.arrivals is None:
            return True
        asked = sum(round_up(shown.block.shown_nbytes) * len(shown.asked) for shown in self._shown.values())
        return self.arrivals.has_room(asked + round_up(block.shown_nbytes))

    def is_awaited(self, block: Block) -> bool:
        """Whether a rank may still want the bytes that are stored now, because it has taken them less often than
        another one: with the same program on all ranks it is only slower. Also where this rank has asked for them."""
        shown = self._shown.get(block.id)
        return shown is not None and (bool(shown.asked) or min(shown.taken) < max(shown.taken))

    def changed(self, block: Block) -> None:
        """All ranks store other bytes from now on."""
        shown = self._shown.get(block.id)
        if shown is not None:
            shown.taken = [0] * self.world_size

    def may_serve(self) -> bool:
        """Whether one may wait here for what has still to be launched."""
        return not self._link.is_held

    def pump(self) -> bool:
        """Launch what the ranks have agreed on. Returns whether that may be done here."""
        if self._link.is_held:
            return False
        self._link.pump()
        if self.arrivals is not None:
            self.arrivals.poll()
        return True

    def launch(self, shown: _Shown, takers: tuple[int, ...]) -> GatherFlight:
        """Start a gather that all ranks start now; those that take it are ``takers``."""
        block, tiers = shown.block, self._tiers
        if block.owner is not None:
            block.owner.before_gather()
        if block.id not in tiers.static:
            self._link.before_gather(self._host.transfers.leased_bytes(Lane.GATHER) + block.room_bytes)
        coming = shown.asked.popleft() if self._link.ranks.rank in takers else None
        for rank in takers:
            shown.taken[rank] += 1
        tiers.acquire(block)
        try:
            if coming is not None and self.arrivals is not None:
                coming.whole = self.arrivals.take(coming, block.shown_nbytes)
            flights = [self._start(shown, section, coming, takers) for section in shown.sections]
        except BaseException:
            tiers.release(block)
            raise
        flight = GatherFlight(flights, _nothing if coming is None else coming.has_arrived)
        if coming is not None:
            coming.flight = flight
        served = Served(self._link, shown.number, flight)
        self._host.transfers.poll()
        self._host.transfers.launched(Lane.GATHER, served, block, block.nbytes, served.end)
        return flight

    def _start(self, shown: _Shown, section: SectionPlace, coming: Coming | None, takers: tuple[int, ...]) -> Flight:
        arena = torch.frombuffer(self._tiers.arena.buffer, dtype=torch.uint8)
        start = host_offset(shown.block) + section.shard_offset
        shard = arena[start : start + section.range_nbytes]
        whole = None
        if coming is not None:
            nbytes = section.range_nbytes * self.world_size
            whole = coming.whole[section.whole_offset : section.whole_offset + nbytes]
        return self._link.exchange.gather(shard, whole, shown.block.name, takers)

    # -- going back ------------------------------------------------------------------------------------------------

    def take_back(self, block: Block, whole: Tensor) -> None:
        """Overwrite this rank's shard with its ranges of a whole copy."""
        rank, offset = self._link.ranks.rank, host_offset(block)
        for section in self._shown[block.id].sections:
            start = section.whole_offset + rank * section.range_nbytes
            self._host.take(whole[start : start + section.range_nbytes], offset + section.shard_offset)

    def check_take_back(self, block: Block) -> None:
        """Always possible."""


def _nothing() -> None:
    """A gather has come of which this rank takes nothing."""
