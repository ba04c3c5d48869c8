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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from deepoffload.errors import RankError, UsageError
from deepoffload.native import cpu_adam
from deepoffload.native.neighbour import BOARD_SLOTS, NeighbourMemory, Offer
from deepoffload.ranks.exchange import CHUNK_NUMEL, Exchange, Flight, PartsFlight, Reduction, chunk_ranges
from deepoffload.ranks.neighbour import WAIT_SLICE_MS, Neighbours, failure
from deepoffload.ranks.places import RankMap

Found = TypeVar("Found")

GONE = (errno.ESRCH, errno.ESTALE, errno.ESHUTDOWN)
"""Errors of a neighbour that reads nothing any more."""


class _MemoryFlight(Flight):
    """One transfer: bytes that this rank offers (or none), and those that it reads."""

    def __init__(self, exchange: MemoryExchange, number: int, given: Tensor | None, waiting: str) -> None:
        self._exchange = exchange
        self._given = given
        self.number = number
        self.waiting = waiting
        self.arrived = False

    @property
    def gives(self) -> bool:
        """Whether others may read bytes of this rank."""
        return self._given is not None

    def release(self) -> None:
        self.wait()
        self._exchange.await_readers(self)
        self._given = None

    def _arrive(self) -> None:
        self._exchange.neighbours.board.taken(self.number)
        self.arrived = True


class _MemoryGather(_MemoryFlight):
    def __init__(self, exchange: MemoryExchange, number: int, shard: Tensor, whole: Tensor | None, what: str) -> None:
        super().__init__(exchange, number, shard, what)
        self._whole = whole
        if whole is None:
            self._arrive()

    def ready(self) -> bool:
        return self.arrived or self._exchange.offered(self.number, range(self._exchange.ranks.world_size))

    def wait(self) -> None:
        if self.arrived:
            return
        shard, whole, exchange = self._given, self._whole, self._exchange
        assert shard is not None and whole is not None, "a transfer that takes nothing arrives at once"
        nbytes = shard.numel() * shard.element_size()
        own = whole.data_ptr() + exchange.ranks.rank * nbytes
        if own != shard.data_ptr():
            cpu_adam.copy(own, shard.data_ptr(), nbytes, exchange.num_threads)
        for rank, memory in exchange.neighbours.others():
            offer = exchange.await_offer(self, rank, memory, nbytes)
            exchange.read(self, rank, memory, offer.address, whole.data_ptr() + rank * nbytes, nbytes)
        self._whole = None
        exchange.gather_bytes += nbytes * (exchange.ranks.world_size - 1)
        self._arrive()


class _MemoryParts(_MemoryFlight, PartsFlight):
    def __init__(
        self, exchange: MemoryExchange, number: int, contribution: Tensor | None, reduction: Reduction, scratch: Tensor,
        what: str,
    ) -> None:  # fmt: skip
        super().__init__(exchange, number, contribution, what)
        self._reduction = reduction
        self._scratch = scratch
        self._offers: dict[int, Offer] | None = None

    def ready(self) -> bool:
        return self._offers is not None or self._exchange.offered(self.number, self._reduction.contributors)

    def wait(self) -> None:
        if self._offers is None:
            exchange, nbytes = self._exchange, self._reduction.part_bytes * self._exchange.ranks.world_size
            self._offers = {
                rank: exchange.await_offer(self, rank, memory, nbytes)
                for rank, memory in exchange.neighbours.others()
                if rank in self._reduction.contributors
            }

    def release(self) -> None:
        if not self.arrived:
            raise UsageError(f"{self.waiting}: its parts have not been taken, so the transfer has not ended")
        super().release()

    def chunks(self) -> Iterator[tuple[int, list[Tensor]]]:
        self.wait()
        for start, length in chunk_ranges(self._reduction.shard_numel):
            yield start, self._chunk(start, length)
        self._exchange.part_bytes += self._reduction.part_bytes * len(self._offers or ())
        self._arrive()

    def _chunk(self, start: int, length: int) -> list[Tensor]:
        reduction, exchange = self._reduction, self._exchange
        itemsize = reduction.element_type.itemsize
        first = exchange.ranks.rank * reduction.shard_numel + start
        row_bytes = min(CHUNK_NUMEL, reduction.shard_numel) * itemsize
        parts: list[Tensor] = []
        row = 0
        for rank in reduction.contributors:
            memory = exchange.neighbours.memories[rank]
            if memory is None:
                assert self._given is not None, "this rank contributes"
                parts.append(self._given[first : first + length])
                continue
            assert self._offers is not None, "wait() has the offers"
            part = self._scratch[row : row + length * itemsize]
            source = self._offers[rank].address + first * itemsize
            exchange.read(self, rank, memory, source, part.data_ptr(), part.numel())
            parts.append(part.view(reduction.element_type))
            row += row_bytes
        return parts


class MemoryExchange(Exchange):
    """Transfers between ranks of one host. At most ``BOARD_SLOTS`` are under way: the next one waits until the others
    have taken the oldest. One thread at a time uses it.

    Attributes:
        neighbours: the other ranks, whose memory can be read.
        num_threads: of copies inside this rank's memory.
    """

    transport = "memory"

    def __init__(self, ranks: RankMap, neighbours: Neighbours, timeout_s: float, num_threads: int = 1) -> None:
        super().__init__(ranks)
        self.neighbours = neighbours
        self.num_threads = num_threads
        self._timeout_s = timeout_s
        self._number = 0
        self._open: deque[_MemoryFlight] = deque()
        self._closed = False

    def gather(self, shard: Tensor, whole: Tensor | None, what: str, takers: Sequence[int] | None = None) -> Flight:
        self._check_gather(shard, whole, what, takers)
        number = self._next_number()
        self.neighbours.board.offer(number, shard.data_ptr(), shard.numel() * shard.element_size())
        flight = _MemoryGather(self, number, shard, whole, f"rank {self.ranks.rank} at gather of {what}")
        self._open.append(flight)
        return flight

    def send_parts(self, contribution: Tensor | None, reduction: Reduction, scratch: Tensor, what: str) -> PartsFlight:
        self._check_parts(contribution, reduction, scratch, what)
        number = self._next_number()
        if contribution is not None:
            nbytes = reduction.part_bytes * self.ranks.world_size
            self.neighbours.board.offer(number, contribution.data_ptr(), nbytes)
        waiting = f"rank {self.ranks.rank} at reduction of {what}"
        flight = _MemoryParts(self, number, contribution, reduction, scratch, waiting)
        self._open.append(flight)
        return flight

    def scratch_bytes(self, reduction: Reduction) -> int:
        rows = sum(rank != self.ranks.rank for rank in reduction.contributors)
        return rows * min(CHUNK_NUMEL, reduction.shard_numel) * reduction.element_type.itemsize

    def close(self) -> None:
        if self._closed:
            return
        try:
            for flight in self._open:
                self.neighbours.board.taken(flight.number)  # what has not been read here never will be
            while self._open:
                self.await_readers(self._open[0])
        finally:
            self.abandon()

    def abandon(self) -> None:
        self._closed = True
        self._open.clear()
        self.neighbours.board.close()

    def idle(self) -> bool:
        return self._closed or all(flight.arrived for flight in self._open)

    def offered(self, number: int, ranks: Sequence[int]) -> bool:
        """Whether all of these have offered their part of a transfer."""
        try:
            for rank in ranks:
                memory = self.neighbours.memories[rank]
                if memory is not None:
                    memory.await_offer(number, 0)
        except TimeoutError:
            return False
        except OSError:
            return True  # waiting for it raises the error
        return True

    def await_offer(self, flight: _MemoryFlight, rank: int, memory: NeighbourMemory, nbytes: int) -> Offer:
        """What another rank offers in a transfer.

        Raises:
            RankError: it has gone, does not come within the limit, or offers something else.
        """
        offer = self._awaited(partial(memory.await_offer, flight.number), rank, flight.waiting)
        if offer.nbytes != nbytes:
            raise RankError(
                f"{flight.waiting}: rank {rank} offers {offer.nbytes} bytes, not {nbytes}: it is at something else"
            )
        return offer

    def read(
        self, flight: _MemoryFlight, rank: int, memory: NeighbourMemory, source: int, target: int, nbytes: int
    ) -> None:
        """Copy bytes from another rank. [Note: whole transfers]"""
        try:
            memory.read(source, target, nbytes)
        except OSError as error:
            raise failure(error, flight.waiting, rank) from error

    def await_readers(self, flight: _MemoryFlight) -> None:
        """Return when no other rank reads what this one has given to a transfer. Who has gone does not read."""
        for rank, memory in self.neighbours.others() if flight.gives else ():
            try:
                self._awaited(partial(memory.await_taken, flight.number), rank, flight.waiting)
            except RankError as error:
                cause = error.__cause__
                if not (isinstance(cause, OSError) and cause.errno in GONE):
                    raise
        if flight in self._open:
            self._open.remove(flight)

    def _awaited(self, wait: Callable[[int], Found], rank: int, waiting: str) -> Found:
        until = time.monotonic() + self._timeout_s
        while True:
            left_ms = (until - time.monotonic()) * 1000
            try:
                return wait(max(0, min(WAIT_SLICE_MS, int(left_ms))))
            except TimeoutError as error:
                if left_ms <= WAIT_SLICE_MS:
                    raise RankError(
                        f"{waiting}: rank {rank} has not come to it within {self._timeout_s:g} s"
                    ) from error
            except OSError as error:
                raise failure(error, waiting, rank) from error

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
