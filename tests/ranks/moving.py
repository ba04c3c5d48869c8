"""What ranks do in the tests of the transports. Every rank can make every rank's bytes, so each checks what it gets."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepoffload.errors import RankError
from deepoffload.ranks.collectives import never_end, start_all_gather
from deepoffload.ranks.exchange import CHUNK_NUMEL, Exchange, PartsFlight, Reduction
from deepoffload.ranks.group import RankGroup, open_group
from deepoffload.ranks.transport import open_exchange
from tests.support.rank_processes import LONG_S, SOON_S
from tests.support.waiting import wait_until

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.int16)
PR_SET_DUMPABLE = 4
NOBODY = 65534


@contextmanager
def opened(transport: str, timeout_s: float = LONG_S) -> Iterator[tuple[RankGroup, Exchange]]:
    """A group and an exchange, which waits no longer than ``timeout_s``; when the program fails, the others are not
    waited for."""
    group = open_group(CPU, timeout_s=LONG_S)
    assert group is not None
    meet(group)  # on a busy machine a process may start late
    group.timeout_s = timeout_s
    exchange = open_exchange(group, transport)
    try:
        yield group, exchange
    except BaseException:
        exchange.abandon()
        raise
    exchange.close()
    group.close()


def random_bytes(numel: int, element_type: torch.dtype, *key: int) -> Tensor:
    """Any bytes, NaNs and infinities among them."""
    generator = torch.Generator().manual_seed(hash(key) % (1 << 31))
    raw = torch.randint(0, 256, (numel * element_type.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(element_type)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def taken(flight: PartsFlight, rank_count: int) -> list[Tensor]:
    """Each contributor's part, put together from its ranges."""
    parts: list[list[Tensor]] = [[] for _ in range(rank_count)]
    end = 0
    for start, chunk in flight.chunks():
        assert start == end and len(chunk) == rank_count
        end += chunk[0].numel()
        for row, part in zip(parts, chunk, strict=True):
            row.append(part.clone())
    return [torch.cat(row) for row in parts]


def gather(exchange: Exchange, numel: int, element_type: torch.dtype, seed: int, in_place: bool) -> None:
    rank, world_size = exchange.ranks.rank, exchange.ranks.world_size
    shards = [random_bytes(numel, element_type, seed, owner) for owner in range(world_size)]
    whole = torch.zeros(numel * world_size, dtype=element_type)
    own = whole[rank * numel : (rank + 1) * numel] if in_place else shards[rank].clone()
    own.copy_(shards[rank])
    flight = exchange.gather(own, whole, f"unit {seed}")
    flight.wait()
    assert flight.ready() and same_bytes(whole, torch.cat(shards))
    flight.release()
    own.zero_()


def gather_for(exchange: Exchange, takers: tuple[int, ...], numel: int, seed: int) -> None:
    rank, world_size = exchange.ranks.rank, exchange.ranks.world_size
    shards = [random_bytes(numel, torch.bfloat16, seed, owner) for owner in range(world_size)]
    whole = torch.zeros(numel * world_size, dtype=torch.bfloat16) if rank in takers else None
    flight = exchange.gather(shards[rank].clone(), whole, f"unit {seed}", takers)
    flight.release()
    assert whole is None or same_bytes(whole, torch.cat(shards))


def send_parts(
    exchange: Exchange, contributors: tuple[int, ...], numel: int, element_type: torch.dtype, seed: int
) -> None:
    rank, world_size = exchange.ranks.rank, exchange.ranks.world_size
    whole = {by: random_bytes(numel * world_size, element_type, seed, by) for by in contributors}
    reduction = Reduction(contributors, numel, element_type)
    scratch = torch.empty(exchange.scratch_bytes(reduction), dtype=torch.uint8)
    flight = exchange.send_parts(whole.get(rank), reduction, scratch, f"unit {seed}")
    parts = taken(flight, len(contributors))
    for by, part in zip(contributors, parts, strict=True):
        assert same_bytes(part, whole[by][rank * numel : (rank + 1) * numel])
    flight.release()
    if rank in whole:
        whole[rank].zero_()


def move_everything(transport: str) -> dict[str, Any]:
    """Gathers and parts of all types, sizes, takers and contributors; several under way at once."""
    with opened(transport) as (_, exchange):
        world_size = exchange.ranks.world_size
        seed = 0
        for element_type in DTYPES:
            for numel in (1, 3, 256, 4099):
                seed += 1
                gather(exchange, numel, element_type, seed, in_place=bool(seed % 2))
                everybody = tuple(range(world_size))
                for contributors in (everybody, everybody[1:], everybody[:1], everybody[::2]):
                    seed += 1
                    send_parts(exchange, contributors, numel, element_type, seed)
        send_parts(exchange, tuple(range(world_size)), CHUNK_NUMEL + 5, torch.bfloat16, seed + 1)
        gather(exchange, 1 << 20, torch.bfloat16, seed + 2, in_place=False)
        for takers in ((0,), (world_size - 1,), tuple(range(0, world_size, 2)), tuple(range(world_size))):
            seed += 3
            gather_for(exchange, takers, 1025, seed)
        many_under_way(exchange, 150)
        return {
            "transport": exchange.transport,
            "gather_bytes": exchange.gather_bytes,
            "part_bytes": exchange.part_bytes,
            "hosts": exchange.ranks.hosts,
        }


def many_under_way(exchange: Exchange, count: int) -> None:
    """More transfers than the board has slots, each waited for late, in another order than they were started."""
    rank, world_size = exchange.ranks.rank, exchange.ranks.world_size
    shards = [[random_bytes(64, torch.float32, n, owner) for owner in range(world_size)] for n in range(count)]
    wholes = [torch.zeros(64 * world_size) for _ in range(count)]
    flights = []
    for n in range(count):
        flights.append(exchange.gather(shards[n][rank], wholes[n], f"transfer {n}"))
        if n % 8 == 7:
            for late in range(n, n - 8, -1):
                flights[late].wait()
    for n, flight in enumerate(flights):
        flight.wait()
        assert same_bytes(wholes[n], torch.cat(shards[n]))


def die_while_others_read(transport: str, after_s: float) -> tuple[int, float]:
    """Rank 1 is killed at some moment of many gathers. Rank 0 says how many it got, and checks each of them."""
    complete, numel = 0, 1 << 20
    with opened(transport) as (group, exchange):
        meet(group)
        if group.ranks.rank == 1:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        begin = time.monotonic()
        try:
            while time.monotonic() - begin < 30:
                shard = torch.full((numel,), complete * 10 + group.ranks.rank, dtype=torch.int64)
                whole = torch.full((2 * numel,), -1, dtype=torch.int64)
                flight = exchange.gather(shard, whole, "layer 3")
                flight.wait()
                assert torch.equal(whole.view(2, -1).amin(1), torch.tensor([complete * 10, complete * 10 + 1]))
                assert torch.equal(whole.view(2, -1).amax(1), torch.tensor([complete * 10, complete * 10 + 1]))
                flight.release()
                complete += 1
        except Exception as error:
            error.args = (f"{complete} complete; {error}",)
            raise
    return complete, time.monotonic() - begin


def stay_away(transport: str, timeout_s: float) -> None:
    """Rank 1 does not come to a gather until rank 0 has given up."""
    with opened(transport, timeout_s) as (group, exchange):
        shard, whole = torch.ones(8), torch.zeros(16)
        exchange.gather(shard, whole, "layer 0").release()
        if group.ranks.rank == 1:
            wait_for(group, "rank 0 has given up")
            return
        try:
            exchange.gather(shard, whole, "layer 1").wait()
        finally:
            say(group.client("the test"), "rank 0 has given up")


def wait_for_a_stopped_rank(transport: str, timeout_s: float) -> float:
    """Rank 1 is stopped in the middle of transfers, and killed when rank 0 has found that out. Returns how long that
    took."""
    numel = 1 << 18
    with opened(transport, timeout_s) as (group, exchange):
        pids = group.gather_objects(os.getpid(), "the test")
        shard, whole = torch.ones(numel), torch.zeros(2 * numel)
        begin = time.monotonic()
        try:
            for turn in range(1 << 20):
                if turn == 20 and group.ranks.rank == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
                begin = time.monotonic()
                exchange.gather(shard, whole, "layer 2").release()
        except RankError as error:
            os.kill(pids[1], signal.SIGKILL)
            assert f"to it within {timeout_s:g} s" in str(error) and "rank 0 at gather of layer 2" in str(error), error
            exchange.abandon()
            assert exchange.idle()
            return time.monotonic() - begin
    raise AssertionError("nobody was stopped")


def wait_for_a_slow_rank(transport: str) -> None:
    """Rank 1 comes late, but within the limit; then they move much more."""
    with opened(transport) as (group, exchange):
        if group.ranks.rank == 1:
            wait_for(group, "rank 0 has waited")
        whole = torch.zeros(2 * (1 << 16))
        flight = exchange.gather(torch.full((1 << 16,), 1.0 + group.ranks.rank), whole, "layer 0")
        if group.ranks.rank == 0:
            assert not flight.ready_within(0.3) and not flight.ready()
            say(group.client("the test"), "rank 0 has waited")
        assert flight.ready_within(SOON_S) and flight.ready()
        flight.release()
        assert whole.tolist() == [1.0] * (1 << 16) + [2.0] * (1 << 16)
        for seed in range(20):
            gather(exchange, 4099, torch.bfloat16, seed, in_place=True)
            send_parts(exchange, (0, 1), 4099, torch.float16, seed)


def end_while_a_transfer_is_under_way(transport: str) -> tuple[bool, bool]:
    """Rank 0 gives up while rank 1 is away; then its memory is its own again, and rank 1 finds out at once."""
    group = open_group(CPU, timeout_s=LONG_S)
    assert group is not None
    exchange = open_exchange(group, transport)
    shard, whole = torch.ones(8), torch.zeros(16)
    exchange.gather(shard, whole, "layer 0").release()
    meet(group)
    if group.ranks.rank == 1:
        meet(group)
        try:
            exchange.gather(shard, whole, "layer 1").wait()
        finally:
            meet(group)
    exchange.gather(shard, whole, "layer 1")
    before = exchange.idle()
    exchange.abandon()
    wait_until(exchange.idle)
    meet(group)
    meet(group)
    return before, exchange.idle()


def keep_a_group() -> float:
    """Rank 0 drops a group with a collective under way, which rank 1 does not come to. Says how long that took."""
    group = open_group(CPU, timeout_s=LONG_S)
    assert group is not None
    private = group.new_private_group("a test")
    meet(group)
    begin = time.monotonic()
    store, waits = group.client("the test"), group.ranks.rank == 1
    if waits:
        wait_for(group, "rank 0 has dropped it")
    else:
        work = start_all_gather(torch.zeros(2, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), private)
        never_end(private)
        del work
    group.close()
    dist.destroy_process_group()
    del private, group
    gc.collect()
    if not waits:
        say(store, "rank 0 has dropped it")
    return time.monotonic() - begin


def interrupt(transport: str) -> float:
    """Ctrl-C on rank 0 while it waits for rank 1. Says how long after it the program heard of it."""
    with opened(transport) as (group, exchange):
        meet(group)
        if group.ranks.rank == 1:
            meet(group)
            return 0.0
        begin = time.monotonic()
        try:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            exchange.gather(torch.ones(8), torch.zeros(16), "layer 0").wait()
        except KeyboardInterrupt:
            heard_s = time.monotonic() - begin - 0.5
            exchange.abandon()
            meet(group)
            return heard_s
    raise AssertionError("nobody interrupted it")


def meet(group: RankGroup) -> None:
    group.gather_objects(None, "meeting in the test")


def say(store: dist.Store, what: str) -> None:
    """Let the rank go on that waits for it."""
    store.set(what, "")
    store.get(what)  # this process may end now: the other has heard it


def wait_for(group: RankGroup, what: str) -> None:
    group.client("the test").wait([what], timedelta(seconds=LONG_S))


def offer_something_else(transport: str) -> None:
    """Rank 1 is at a larger unit."""
    with opened(transport) as (group, exchange):
        numel = 8 + 8 * group.ranks.rank
        try:
            exchange.gather(torch.ones(numel), torch.zeros(2 * numel), "layer 1").wait()
        finally:
            meet(group)


def forbid_reading(transport: str) -> tuple[str, bool]:
    """No rank lets the others read its memory."""
    group = open_group(CPU, timeout_s=LONG_S)
    assert group is not None
    if os.geteuid() == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)  # root may read everything
    assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
    exchange = open_exchange(group, transport)
    gather(exchange, 1000, torch.float32, 1, in_place=False)
    exchange.close()
    group.close()
    return exchange.transport, True


def ask_for(*transports: str) -> str:
    """Each rank asks for another transport."""
    group = open_group(CPU, timeout_s=LONG_S)
    assert group is not None
    return open_exchange(group, transports[group.ranks.rank]).transport
