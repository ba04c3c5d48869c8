"""The transport between ranks of one host: each reads what it needs from the memory of the others.

A rank offers its bytes under the transfer's number, with their address, because blocks move between transfers. The
others read them when they need them, and say so; then the bytes may change. Nobody copies for anybody else, so a rank
that is late holds up only those who need its bytes.

[Note: whole transfers] Every failed read raises, and a transfer says that it has arrived only after the last one, so
half a unit is never taken for a whole one.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from torch import Tensor

from deepoffload.errors import RankError, UsageError
from deepoffload.native import cpu_adam
from deepoffload.native.neighbour import BOARD_SLOTS, NeighbourMemory, Offer
from deepoffload.ranks.exchange import (
    CHUNK_NUMEL,
    Exchange,
    Flight,
    PartsFlight,
    Reduction,
    chunk_ranges,
    memory_scratch_bytes,
)
from deepoffload.ranks.neighbour import Neighbours, failure
from deepoffload.ranks.places import RankMap
from deepoffload.ranks.words import layer_in_words

WAIT_SLICE_S = 1.0
"""A wait returns to Python this often, so that Ctrl-C is heard."""

GONE = (errno.ESRCH, errno.ESTALE, errno.ESHUTDOWN)
"""Errors of a neighbour that reads nothing any more."""


class _MemoryFlight(Flight):
    """One transfer: bytes that this rank offers (or none), and those that it reads.

    Attributes:
        waiting: who waits for what, for errors.
        arrived: this rank has read all that it wants.
    """

    def __init__(
        self,
        exchange: MemoryExchange,
        number: int,
        given: Tensor | None,
        sources: Collection[int],
        nbytes: int,
        waiting: str,
    ) -> None:
        self.waiting = waiting
        self.number = number
        self.arrived = False
        self._exchange = exchange
        self._given = given
        self._sources = [(rank, memory) for rank, memory in exchange.neighbours.others() if rank in sources]
        self._nbytes = nbytes
        self._offers: dict[int, Offer] = {}

    def ready(self) -> bool:
        return self.ready_within(0.0)

    def ready_within(self, limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        return self.arrived or all(
            self._offered_within(rank, memory, until - time.monotonic()) for rank, memory in self._sources
        )

    def releasable_within(self, limit_s: float) -> bool:
        if not self.arrived:
            return False
        until = time.monotonic() + limit_s
        return self._given is None or all(
            self._taken_within(rank, memory, until - time.monotonic())
            for rank, memory in self._exchange.neighbours.others()
        )

    def release(self) -> None:
        self.wait()
        self.await_readers()
        self._given = None

    def await_readers(self) -> None:
        """Return when no other rank reads what this one has given. A rank that has gone does not."""
        if self._given is not None:
            for rank, memory in self._exchange.neighbours.others():
                self._patiently(partial(self._taken_within, rank, memory), rank)
        self._exchange.forget(self)

    def _offer_of(self, rank: int, memory: NeighbourMemory) -> Offer:
        self._patiently(partial(self._offered_within, rank, memory), rank)
        return self._offers[rank]

    def _offered_within(self, rank: int, memory: NeighbourMemory, limit_s: float) -> bool:
        if rank in self._offers:
            return True
        try:
            offer = memory.await_offer(self.number, max(0, int(limit_s * 1000)))
        except TimeoutError:
            return False
        except OSError as error:
            raise failure(error, self.waiting, rank) from error
        if offer.nbytes != self._nbytes:
            raise RankError(
                f"{self.waiting}: rank {rank} offers {offer.nbytes} bytes, not {self._nbytes}: it is at something else"
            )
        self._offers[rank] = offer
        return True

    def _taken_within(self, rank: int, memory: NeighbourMemory, limit_s: float) -> bool:
        try:
            memory.await_taken(self.number, max(0, int(limit_s * 1000)))
        except TimeoutError:
            return False
        except OSError as error:
            if error.errno not in GONE:
                raise failure(error, self.waiting, rank) from error
        return True

    def _patiently(self, within: Callable[[float], bool], rank: int) -> None:
        """Wait for another rank until the limit is over."""
        timeout_s = self._exchange.timeout_s
        until = time.monotonic() + timeout_s
        while not within(min(WAIT_SLICE_S, until - time.monotonic())):
            if time.monotonic() >= until:
                raise RankError(f"{self.waiting}: rank {rank} has not come to it within {timeout_s:g} s")

    def _read(self, rank: int, memory: NeighbourMemory, source: int, target: int, nbytes: int) -> None:
        """Copy bytes from another rank. [Note: whole transfers]"""
        try:
            memory.read(source, target, nbytes)
        except OSError as error:
            raise failure(error, self.waiting, rank) from error

    def _arrive(self) -> None:
        self._exchange.neighbours.board.taken(self.number)
        self.arrived = True


class _MemoryGather(_MemoryFlight):
    def __init__(self, exchange: MemoryExchange, number: int, shard: Tensor, whole: Tensor | None, what: str) -> None:
        sources = range(exchange.ranks.world_size if whole is not None else 0)
        super().__init__(exchange, number, shard, sources, shard.numel() * shard.element_size(), what)
        self._whole = whole
        if whole is None:
            self._arrive()

    def wait(self) -> None:
        if self.arrived:
            return
        shard, whole, nbytes = self._given, self._whole, self._nbytes
        assert shard is not None and whole is not None, "a transfer that takes nothing arrives at once"
        own = whole.data_ptr() + self._exchange.ranks.rank * nbytes
        if own != shard.data_ptr():
            cpu_adam.copy(own, shard.data_ptr(), nbytes, self._exchange.num_threads)
        for rank, memory in self._sources:
            offer = self._offer_of(rank, memory)
            self._read(rank, memory, offer.address, whole.data_ptr() + rank * nbytes, nbytes)
        self._whole = None
        self._exchange.gather_bytes += nbytes * len(self._sources)
        self._arrive()


class _MemoryParts(_MemoryFlight, PartsFlight):
    def __init__(
        self, exchange: MemoryExchange, number: int, contribution: Tensor | None, reduction: Reduction, scratch: Tensor,
        what: str,
    ) -> None:  # fmt: skip
        nbytes = reduction.part_bytes * exchange.ranks.world_size
        super().__init__(exchange, number, contribution, reduction.contributors, nbytes, what)
        self._reduction = reduction
        self._scratch = scratch

    def wait(self) -> None:
        for rank, memory in self._sources:
            self._offer_of(rank, memory)

    def release(self) -> None:
        if not self.arrived:
            raise UsageError(f"{self.waiting}: its parts have not been taken, so the transfer has not ended")
        super().release()

    def chunks(self) -> Iterator[tuple[int, list[Tensor]]]:
        self.wait()
        for start, length in chunk_ranges(self._reduction.shard_numel):
            yield start, self._chunk(start, length)
        self._exchange.part_bytes += self._reduction.part_bytes * len(self._sources)
        self._arrive()

    def _chunk(self, start: int, length: int) -> list[Tensor]:
        reduction, own = self._reduction, self._exchange.ranks.rank
        itemsize = reduction.element_type.itemsize
        first = own * reduction.shard_numel + start
        row_bytes = min(CHUNK_NUMEL, reduction.shard_numel) * itemsize
        parts: list[Tensor] = []
        row = 0
        for rank in reduction.contributors:
            memory = self._exchange.neighbours.memories[rank]
            if memory is None:
                assert self._given is not None, "this rank contributes"
                parts.append(self._given[first : first + length])
                continue
            part = self._scratch[row : row + length * itemsize]
            source = self._offers[rank].address + first * itemsize
            self._read(rank, memory, source, part.data_ptr(), part.numel())
            parts.append(part.view(reduction.element_type))
            row += row_bytes
        return parts


class MemoryExchange(Exchange):
    """Transfers between ranks of one host. At most ``BOARD_SLOTS`` are under way: the next one waits until the others
    have taken the oldest. One thread at a time starts transfers.

    Attributes:
        neighbours: the other ranks, whose memory can be read.
        timeout_s: the limit of each wait for another rank.
        num_threads: of copies inside this rank's memory.
    """

    transport = "memory"
    ready_at_launch = True

    def __init__(self, ranks: RankMap, neighbours: Neighbours, timeout_s: float, num_threads: int = 1) -> None:
        super().__init__(ranks)
        self.neighbours = neighbours
        self.timeout_s = timeout_s
        self.num_threads = num_threads
        self._number = 0
        self._open: deque[_MemoryFlight] = deque()
        self._closed = False

    def gather(self, shard: Tensor, whole: Tensor | None, what: str, takers: Sequence[int] | None = None) -> Flight:
        self._check_gather(shard, whole, what, takers)
        number = self._next_number()
        self.neighbours.board.offer(number, shard.data_ptr(), shard.numel() * shard.element_size())
        flight = _MemoryGather(
            self, number, shard, whole, f"rank {self.ranks.rank} at gather of {layer_in_words(what)}"
        )
        self._open.append(flight)
        return flight

    def send_parts(self, contribution: Tensor | None, reduction: Reduction, scratch: Tensor, what: str) -> PartsFlight:
        self._check_parts(contribution, reduction, scratch, what)
        number = self._next_number()
        if contribution is not None:
            nbytes = reduction.part_bytes * self.ranks.world_size
            self.neighbours.board.offer(number, contribution.data_ptr(), nbytes)
        waiting = f"rank {self.ranks.rank} at reduction of {layer_in_words(what)}"
        flight = _MemoryParts(self, number, contribution, reduction, scratch, waiting)
        self._open.append(flight)
        return flight

    def scratch_bytes(self, reduction: Reduction) -> int:
        return memory_scratch_bytes(reduction, self.ranks.rank)

    def close(self) -> None:
        if self._closed:
            return
        try:
            for flight in self._open:
                self.neighbours.board.taken(flight.number)  # what has not been read here never will be
            while self._open:
                self._open[0].await_readers()
        finally:
            self.abandon()

    def abandon(self) -> None:
        self._closed = True
        self._open.clear()
        self.neighbours.board.close()

    def idle(self) -> bool:
        return self._closed or all(flight.arrived for flight in self._open)

    def forget(self, flight: _MemoryFlight) -> None:
        """A flight that has ended, for this rank and for the others."""
        if flight in self._open:
            self._open.remove(flight)

    def _next_number(self) -> int:
        if self._closed:
            raise UsageError("this exchange is closed")
        if len(self._open) >= BOARD_SLOTS:
            oldest = self._open[0]
            if not oldest.arrived:
                raise UsageError(f"{BOARD_SLOTS} transfers are under way, and {oldest.waiting} has not been waited for")
            oldest.release()
        self._number += 1
        return self._number
