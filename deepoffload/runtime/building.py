"""What each of several ranks keeps of a model while it is built: of most parameters, its part.

A parameter is registered whole, and modules write its first values after that. So those that came last stay whole, up
to a quarter of the memory. Of one that is *put away* each rank keeps an equal range of its bytes, as a block that can
go to NVMe like any other. A program that looks at it again gets it whole: the ranks meet, gather it, and meet again.
So nobody changes it before all have it. All ranks build the same model, so all put the same parameters away, and meet.

What a rank writes to a whole parameter reaches the others only as far as it keeps that part, so all ranks have to write
the same. A checksum of the whole value, taken when it is put away, tells whether they do. Where rank 0's values are for
all, a parameter gets them before it is put away, or when it is placed.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from deepoffload.copies.payload_numbers import BUILT_NUMBER, FIRST_BUILDING_NUMBER
from deepoffload.copies.rank_device import GatherFlight
from deepoffload.copies.rank_link import RankLink
from deepoffload.copies.shown import HostMemory
from deepoffload.io.checksums import crc32c
from deepoffload.memory.block import Block
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.aio import round_up
from deepoffload.params.unit import ParamHandle, WeightView
from deepoffload.ranks.edited import Edited
from deepoffload.runtime.rank_0_values import Rank0Values
from deepoffload.schedule.placement import BlockKind

WINDOW_SHARE = 4
"""Whole parameters take this part of the memory for blocks, where that is enough for the last few."""
RECENT = 4
"""So many stay whole in twice as much: a module registers its weights first, and then fills them."""
SMALL_SHARE = 16
"""A model of at most this part of the memory stays whole until it is placed."""
RANGE_BYTES = 64
"""Ranges are multiples of this: whole elements of every type."""


def range_nbytes(nbytes: int, world_size: int) -> int:
    """What each rank keeps of a parameter of so many bytes; the last range is padded."""
    return round_up(nbytes, RANGE_BYTES * world_size) // world_size


def kept_bytes(nbytes: int, world_size: int) -> int:
    """The memory that a rank's part takes. What is no larger as a whole is kept whole."""
    return min(round_up(range_nbytes(nbytes, world_size)), round_up(nbytes))


def is_cut(nbytes: int, world_size: int) -> bool:
    """Whether ranks keep parts of a parameter of so many bytes."""
    return kept_bytes(nbytes, world_size) < round_up(nbytes)


def shares_of(sizes: Iterable[int], capacity_bytes: int, world_size: int) -> int:
    """In how many parts the parameters of a model are when it is placed: 1 where they are whole. ``sizes``: of each,
    in bytes."""
    return world_size if sum(map(round_up, sizes)) > capacity_bytes // SMALL_SHARE else 1


class KeptPart(NamedTuple):
    """What this rank keeps of a parameter that was put away: ``nbytes`` bytes of it from ``start`` on, in ``block``."""

    block: Block
    start: int
    nbytes: int


class _Share:
    """One parameter.

    Attributes:
        whole: its block, which has no bytes while it is put away.
        kept: this rank's part, once there is one.
        away: whether only the parts are right.
        fact: what ranks compare of its values; "" where it was never put away.
        flight: the gather that this rank takes, once it is launched. given: all that it has given its part to.
    """

    def __init__(self, memory: BuildingMemory, handle: ParamHandle, whole: Block, number: int, nbytes: int) -> None:
        self.handle = handle
        self.whole = whole
        self.number = number
        self.range_nbytes = nbytes
        self.kept: Block | None = None
        self.away = False
        self.fact = ""
        self.flight: GatherFlight | None = None
        self.given: list[GatherFlight] = []
        self._memory = memory

    @property
    def has_gone(self) -> bool:
        """Whether the parameter is gone, or has another block: its type has changed."""
        return self.handle.tensor is None or self.handle.block is not self.whole

    def serve(self, takers: tuple[int, ...]) -> GatherFlight:
        """Launch a gather, as all ranks do now."""
        return self._memory.launch(self, takers)


class BuildingMemory(HostMemory):
    """The arena, while a model is built in it by several ranks.

    Args:
        capacity_bytes: of memory, for what is registered.

    Attributes:
        rank_0: gives rank 0's values to all; None where ranks have to build the same ones.
    """

    def __init__(self, tiers: TierManager, link: RankLink, capacity_bytes: int) -> None:
        super().__init__(tiers)
        self.acquire = self._acquire
        self.world_size, self._rank = link.ranks.world_size, link.ranks.rank
        self._tiers = tiers
        self._link = link
        self.rank_0 = Rank0Values(link) if link.values_of_rank_0 else None
        self._in_parts = False
        self._capacity_bytes = capacity_bytes
        self._numbers = itertools.count(FIRST_BUILDING_NUMBER)
        self._shares: dict[int, _Share] = {}
        self._window: deque[_Share] = deque()
        self._held: list[_Share] = []  # out of the window, but the program has views of them

    # -- what is registered ----------------------------------------------------------------------------------------

    def whole_nbytes(self, nbytes: int) -> int:
        """Of the block of a parameter that is cut: its bytes and the padding of the last range."""
        return range_nbytes(nbytes, self.world_size) * self.world_size

    def make_room(self, nbytes: int) -> None:
        """A parameter of so many bytes is coming: put those away that came first, as far as that is needed."""
        with self._tiers.lock:
            limit_bytes = self._capacity_bytes // WINDOW_SHARE
            recent_bytes = 2 * limit_bytes
            if self._tiers.space is None:
                kept = sum(kept_bytes(share.handle.nbytes, self.world_size) for share in self._shares.values())
                limit_bytes = min(limit_bytes, self._capacity_bytes - kept - round_up(nbytes))
                recent_bytes = limit_bytes
            self._held = [share for share in self._held if not self._put_away(share)]
            whole_bytes = sum(share.whole.room_bytes for share in self._window) + round_up(nbytes)
            while self._window and whole_bytes > limit_bytes:
                if len(self._window) < RECENT and whole_bytes <= recent_bytes:
                    break
                whole_bytes -= self._window[0].whole.room_bytes
                self._leave_window()

    def put_all_away(self) -> bool:
        """Put away what can go. Returns whether there was anything."""
        with self._tiers.lock:
            had = bool(self._window)
            while self._window:
                self._leave_window()
            return had

    def _leave_window(self) -> None:
        share = self._window.popleft()
        self._take_value_of_rank_0(share)
        if not self._put_away(share):
            self._held.append(share)

    def _take_value_of_rank_0(self, share: _Share) -> None:
        """All ranks do so with the same parameters: these leave the window in the order in which they came."""
        if self.rank_0 is None:
            return
        self._link.meet_edit(share.number, Edited(0))
        if share.has_gone:
            self.rank_0.give(None)
            return
        self._tiers.acquire(share.whole)
        try:
            owner = share.whole.owner
            assert isinstance(owner, WeightView), "the owner of every parameter that is registered"
            owner.install()
            owner.changed()
            self._tiers.will_change(share.whole)
            if self.rank_0.give(self._bytes(self._tiers.address(share.whole), share.handle.nbytes)):
                share.handle.count_update()
        finally:
            self._tiers.release(share.whole)

    def registered(self, handle: ParamHandle, block: Block) -> None:
        """A parameter has come, whole."""
        with self._tiers.lock:
            number = next(self._numbers)
            share = _Share(self, handle, block, number, range_nbytes(handle.nbytes, self.world_size))
            self._shares[block.id] = share
            self._link.show(number, handle.name, share)
            self._is_whole(share)

    def _is_whole(self, share: _Share) -> None:
        share.away = False
        self._tiers.keep(share.whole)
        self._window.append(share)

    # -- going -----------------------------------------------------------------------------------------------------

    def _put_away(self, share: _Share) -> bool:
        """Keep this rank's part alone. Returns False where the program refers to the values; they stay whole."""
        block, tiers = share.whole, self._tiers
        if share.has_gone:
            self._forget(share)
            return True
        if share.away or block.leases:
            return share.away
        owner = block.owner
        assert isinstance(owner, WeightView), "the owner of every parameter that is registered"
        tiers.acquire(block)
        try:
            owner.install()  # what the program has put in the place of the values comes in
            owner.changed()
            if not owner.can_release():
                return False
            share.fact = f"{crc32c(tiers.address(block), share.handle.nbytes):08x}"
            self._store(share)
        finally:
            tiers.release(block)
        tiers.static.discard(block.id)
        tiers.discard(block)
        share.away = True
        return True

    def _store(self, share: _Share) -> None:
        """Copy this rank's part of what is whole."""
        tiers = self._tiers
        if share.kept is None:
            share.kept = tiers.create(share.handle.name, BlockKind.WEIGHT, share.range_nbytes)
        tiers.acquire(share.kept, load=False)
        try:
            tiers.will_change(share.kept)
            source = tiers.address(share.whole) + self._rank * share.range_nbytes
            ctypes.memmove(tiers.address(share.kept), source, share.range_nbytes)
        finally:
            tiers.release(share.kept)

    # -- coming ----------------------------------------------------------------------------------------------------

    def _acquire(self, block: Block, *, load: bool = True) -> None:
        """As :meth:`TierManager.acquire`. What was put away comes from all ranks.

        Raises:
            RankError: another rank does not look at it now.
        """
        share = self._shares.get(block.id)
        if share is None or not share.away:
            self._tiers.acquire(block, load=load)
            return
        with self._tiers.lock:
            self.make_room(block.room_bytes)
            if not load:
                self._tiers.acquire(block, load=False)
                self._is_whole(share)
                return
            self._link.meet_edit(share.number, Edited(0))
            self._gather(share)
            self._link.meet_edit(share.number, Edited(0))
            self._release_given(share)

    def _gather(self, share: _Share) -> None:
        """Have the whole value, and a lease of it."""
        self._tiers.acquire(share.whole, load=False)
        share.whole.copying += 1  # else it might move
        try:
            share.flight = None
            self._link.post_gather(share.number)
            self._link.wait_launched(share.number)
            assert share.flight is not None, "it was launched, and this rank takes it"
            self._link.wait_gathered(share.number, share.flight, serve=True)
        except BaseException:
            self._tiers.release(share.whole)
            raise
        finally:
            share.whole.copying -= 1
        self._is_whole(share)

    def launch(self, share: _Share, takers: tuple[int, ...]) -> GatherFlight:
        """Start a gather that all ranks start now."""
        tiers, kept = self._tiers, share.kept
        if kept is None:
            raise RuntimeError(f"{share.handle.name} is whole on rank {self._rank}, and another rank has put it away")
        tiers.acquire(kept)
        kept.copying += 1
        shard, whole = self._bytes(tiers.address(kept), share.range_nbytes), None
        if self._rank in takers:
            whole = self._bytes(tiers.address(share.whole), share.range_nbytes * self.world_size)
        flight = GatherFlight([self._link.exchange.gather(shard, whole, share.handle.name, takers)], _nothing)
        share.given.append(flight)
        if whole is not None:
            share.flight = flight
        return flight

    def _bytes(self, address: int, nbytes: int) -> Tensor:
        arena = self._tiers.arena
        return torch.frombuffer(arena.buffer, dtype=torch.uint8, count=nbytes, offset=address - arena.address)

    def _release_given(self, share: _Share) -> None:
        """All ranks have what they asked for."""
        for flight in share.given:
            flight.release()
            if share.kept is not None:
                share.kept.copying -= 1
                self._tiers.release(share.kept)
        share.given.clear()
        share.flight = None

    # -- placing the model -----------------------------------------------------------------------------------------

    def meet_at_end(self) -> None:
        """Return when all ranks have built the model. Raises RankError where another one still looks at a parameter."""
        self._link.meet_edit(BUILT_NUMBER, Edited(0))

    def begin_placing(self, handles: Iterable[ParamHandle]) -> None:
        """The model is built. From now on parameters come whole one by one (:meth:`bring`), or all are whole."""
        with self._tiers.lock:
            sizes = [handle.nbytes for handle in handles if handle.tensor is not None]
            was_cut = any(share.away for share in self._shares.values())
            self._in_parts = was_cut or shares_of(sizes, self._capacity_bytes, self.world_size) > 1
            if self._in_parts:
                for share in self._window:
                    self._take_value_of_rank_0(share)
            for share in list(self._shares.values()):
                self._tiers.static.discard(share.whole.id)
                if self._in_parts and not self._put_away(share):
                    self._store(share)  # views keep it whole here; the other ranks take this part
            self._window.clear()
            self._held.clear()

    def bring(self, block: Block) -> None:
        """Have a parameter whole in memory, if it was put away. All ranks do so in the same order."""
        share = self._shares.get(block.id)
        if share is not None and share.away:
            with self._tiers.lock:
                self._gather(share)
                self._tiers.release(block)

    def placed(self, blocks: Iterable[Block]) -> None:
        """The parameters of a unit have been moved into it. Returns when all ranks have moved theirs."""
        with self._tiers.lock:
            moved = [share for share in map(self._shares.get, [b.id for b in blocks]) if share is not None]
            if any(share.kept is not None for share in moved):
                self._link.meet_edit(moved[0].number, Edited(0))
            for share in moved:
                self._release_given(share)
                self._forget(share)

    def take_value_of_rank_0(self, block: Block, address: int, nbytes: int) -> None:
        """Let a whole value that is about to be placed be rank 0's, where it is not yet. All ranks do so in the same
        order."""
        if self.rank_0 is not None and not (self._in_parts and block.id in self._shares):
            self.rank_0.give(self._bytes(address, nbytes))

    def fact(self, block: Block) -> str:
        """What ranks compare of a parameter's values; "" where its value has been whole since it was registered."""
        share = self._shares.get(block.id)
        return "" if share is None else share.fact

    def _forget(self, share: _Share) -> None:
        self._tiers.remove(share.whole)
        if share.kept is not None:
            self._tiers.remove(share.kept)
        self._link.show_no_longer(share.number)
        del self._shares[share.whole.id]

    # -- loading ---------------------------------------------------------------------------------------------------

    def part_to_load(self, block: Block) -> KeptPart | None:
        """Put a parameter away whose values are going to be overwritten, this rank's part by this rank; None where it
        stays whole."""
        with self._tiers.lock:
            share = self._shares.get(block.id)
            if share is None or not self._put_away(share):
                return None
            self._window = deque(other for other in self._window if other is not share)
            self._held = [other for other in self._held if other is not share]
            start = min(self._rank * share.range_nbytes, share.handle.nbytes)
            assert share.kept is not None, "it was put away"
            return KeptPart(share.kept, start, min(share.range_nbytes, share.handle.nbytes - start))

    def loaded(self, block: Block, source: str) -> None:
        """All ranks have written their parts. ``source``: where all of them have these from."""
        self._shares[block.id].fact = source


def _nothing() -> None:
    """What was gathered is there."""
