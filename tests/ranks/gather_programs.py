"""What ranks do in the tests of whole copies."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from deepoffload.errors import BudgetError, RankError
from deepoffload.memory.lock import SHIELD
from tests.ranks.gather_side import SIZES, Side, side
from tests.support.rank_processes import own_group
from tests.support.waiting import wait_until


def read_everything(transport: str) -> dict[str, float]:
    """Twice: the second time every copy is there."""
    with side(transport) as one:
        for _ in range(2):
            for index in range(len(SIZES)):
                one.check(index)
        stats = one.memory.stats() | one.link.stats()
        one.link.meet_step()
        assert all(block.leases == 0 or block.copying for block in one.blocks)
        one.memory.transfers.end()
        assert all(block.leases == 0 and not block.copying for block in one.blocks)
        return stats


def edit(transport: str) -> None:
    """All ranks write the same to their copies; each stores what it owns, and the copies are gathered again."""
    with side(transport) as one:
        for index, block in enumerate(one.blocks):
            with one.whole(index) as whole:
                one.memory.will_change(block)
                for rank, part in enumerate(one.layouts[index].sections):
                    del rank
                    end = part.whole_offset + part.range_nbytes * one.world_size
                    whole[part.whole_offset : end] = (
                        torch.arange(end - part.whole_offset).remainder(251).to(torch.uint8)
                    )
                expected = whole.clone()
            mine = one.parts(index, expected)[one.rank]
            assert torch.equal(one.stored(index), mine)
            one.memory.refresh(block)
            assert not one.memory.shows(block)
            with one.whole(index) as again:
                assert torch.equal(again, expected)
        one.link.meet_step()


def be_served_what_was_written(transport: str) -> int:
    """The last rank writes to its copy and stores nothing itself; a gather of the others finds what it owns."""
    with side(transport) as one:
        last = one.world_size - 1
        one.check(0)
        one.link.meet_step()
        if one.rank == last:
            with one.whole(0) as whole:
                one.memory.will_change(one.blocks[0])
                whole.fill_(99)
        one.link.meet_step()
        one.memory.refresh(one.blocks[0]) if one.rank != last else None
        with one.whole(0) as whole:
            for rank, part in enumerate(one.parts(0, whole)):
                own = one.rank == last or rank == last
                assert bool((part == (99 if own else one.value(rank, 0, 0))).all())
        one.link.meet_step()
        return one.owners[0].gathers


def prefetch(transport: str) -> dict[str, float]:
    """Steps in the order of a trace."""
    with side(transport) as one:
        for version in range(4):
            for index in range(len(SIZES)):
                one.use(index)
                one.check(index, version)
            one.link.meet_step()
            for index, block in enumerate(one.blocks):
                one.fill(index, version + 1)
                one.memory.refresh(block)
        return one.memory.stats() | one.link.stats()


def have_little_room(transport: str, path: str, copy_bytes: int, host_bytes: int) -> dict[str, float]:
    """Room for few copies; shards go to NVMe and come back."""
    with side(transport, copy_bytes=copy_bytes, host_bytes=host_bytes, path=path) as one:
        dice = random.Random(7)
        for version in range(3):
            order = list(range(len(SIZES)))
            dice.shuffle(order)
            for index in order + order[::-1]:
                one.use(index)
                one.check(index, version)
            one.link.meet_step()
            for index, block in enumerate(one.blocks):
                one.fill(index, version + 1)
                one.memory.refresh(block)
        stats = one.memory.stats() | one.link.stats() | {"evicted": float(one.tiers.counters.evictions)}
        one.memory.evict_all(set())
        assert not any(one.memory.shows(block) for block in one.blocks)
        return stats


def need_more_than_there_is(transport: str) -> str:
    """Copies in use leave no room: an error here, and nothing is lost."""
    with side(transport, copy_bytes=4096 * 24, sizes=([700], [700], [90_000])) as one:
        with one.whole(0), one.whole(1):
            try:
                one.memory.acquire(one.blocks[2])
            except BudgetError as error:
                said = str(error)
            else:
                raise AssertionError("there is no such room")
        one.check(0)
        one.link.meet_step()
        return said


def read_alone(transport: str, path: str) -> dict[str, float]:
    """Rank 0 reads everything while the others are in their own barrier, or compute."""
    own_group(f"{path}/own")
    with side(transport) as one:
        if one.rank == 0:
            for index in range(len(SIZES)):
                one.check(index)
                one.memory.refresh(one.blocks[index])
        dist.barrier()
        one.check(1)
        one.link.meet_step()
        return one.memory.stats() | one.link.stats() | {"gathers": float(one.owners[0].gathers)}


def hold_views(transport: str) -> int:
    """A program that has views of a copy sees what is stored after the next event, and only once."""
    with side(transport) as one:
        with one.whole(3) as view:
            one.owners[3].views = 1
        for version in range(1, 4):
            one.link.meet_step()
            one.fill(3, version)
            one.memory.refresh(one.blocks[3])
            one.memory.refresh(one.blocks[3])
            one.use(3)
            for rank, part in enumerate(one.parts(3, view)):
                assert bool((part == one.value(rank, 3, version)).all())
        one.owners[3].views = 0
        one.link.meet_step()
        return one.owners[3].rewrites


def update_when_served(transport: str, path: str) -> None:
    """Updates that are still to come are made before a shard is given, also for a program that is elsewhere. One of
    them rewrites a copy that the program has views of."""
    own_group(f"{path}/own")
    with side(transport) as one:
        with one.whole(0) as view:
            one.owners[0].views = one.rank
        one.link.meet_step()
        for index, owner in enumerate(one.owners):
            owner.later = True
            owner.update = lambda index=index: _update(one, index)
        if one.rank == 0:
            for index, owner in enumerate(one.owners):
                owner.before_gather()
                one.check(index, 1)
        dist.barrier()
        assert all(owner.update is None for owner in one.owners)
        one.memory.finish_rewrites()
        if one.rank:
            for rank, part in enumerate(one.parts(0, view)):
                assert bool((part == one.value(rank, 0, 1)).all())
        one.owners[0].views = 0
        one.link.meet_step()


def _update(one: Side, index: int) -> None:
    with one.link.hold():
        one.fill(index, 1)
        one.memory.refresh(one.blocks[index])
        one.owners[index].later = False


def forget_what_comes(transport: str) -> None:
    """Blocks whose bytes are lost while their copies are on their way."""
    with side(transport, copy_bytes=40 * 4096) as one:
        for turn in range(3):
            one.use(0)
            for index in (0, 1, 2):
                one.tiers.discard(one.blocks[index])
                assert not one.memory.shows(one.blocks[index])
                one.fill(index, turn)
            for index in (0, 1, 2):
                one.link.pump()
                one.check(index, turn)
            one.link.meet_step()
            for index in (0, 1, 2):
                one.memory.refresh(one.blocks[index])


def lose_a_rank(transport: str, what: str) -> tuple[str, str, float]:
    """The last rank goes in the middle of gathers."""
    begin = time.monotonic()
    try:
        with side(transport) as one:
            for turn in range(1000):
                if turn == 3:
                    begin = time.monotonic()
                    if one.rank == one.world_size - 1:
                        if what == "SIGKILL":
                            os.kill(os.getpid(), signal.SIGKILL)
                        raise ValueError("the batch is empty")
                for index, block in enumerate(one.blocks):
                    one.use(index)
                    one.check(index)
                    one.memory.refresh(block)
    except (RankError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    raise AssertionError("a thousand turns without a rank")


def interrupt(transport: str, path: str) -> float:
    """Ctrl-C on rank 0, which waits with the lock held for rank 1, whose lock keeps everybody from serving. Says how
    long after it the program has heard of it; then all go on."""
    SHIELD.engage()
    locked, heard = Path(path, "locked"), Path(path, "heard")
    heard_s = 0.0
    with side(transport) as one:
        one.link.meet_step()
        if one.rank == 0:
            wait_until(locked.exists)
            begin = time.monotonic()
            try:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                with one.tiers.lock, one.whole(0):
                    pass
            except KeyboardInterrupt:
                heard_s = time.monotonic() - begin - 0.5
            assert heard_s > 0
            heard.touch()
        else:
            with one.tiers.lock:
                locked.touch()
                wait_until(heard.exists)
        for index in range(len(SIZES)):
            one.check(index)
        one.link.meet_step()
        return heard_s


def do_anything(transport: str, path: str, seeds: Sequence[int], host_bytes: int) -> None:
    """Each rank does what its dice say: reads, prefetches, updates its shard, forgets copies, holds the lock, sleeps.
    What it reads is of one version of each rank's shard, and never an older one than before."""
    own_group(f"{path}/own")
    for seed in seeds:
        _do_anything(transport, path, seed, host_bytes)


def _do_anything(transport: str, path: str, seed: int, host_bytes: int) -> None:
    with side(transport, copy_bytes=130 * 4096, host_bytes=host_bytes, path=path) as one:
        dice = random.Random(seed * 10 + one.rank)
        versions = [0] * len(SIZES)
        seen = [[0] * one.world_size for _ in SIZES]
        for _ in range(3):
            for _ in range(40):
                index = dice.randrange(len(SIZES))
                operation = dice.choice(("read", "read", "read", "event", "update", "forget", "lock", "sleep", "views"))
                if operation == "event":
                    one.use(index)
                elif operation == "update":
                    versions[index] += 1
                    with one.tiers.lock, one.link.hold():
                        one.fill(index, versions[index])
                        one.memory.refresh(one.blocks[index])
                elif operation == "forget":
                    with one.tiers.lock:
                        one.memory.refresh(one.blocks[index])
                elif operation == "sleep":
                    time.sleep(dice.random() * 0.02)
                elif operation == "views":
                    one.owners[index].views = dice.randrange(2) * one.memory.shows(one.blocks[index])
                elif operation == "lock":
                    with one.tiers.lock:
                        _read_any(one, index, versions, seen)
                else:
                    _read_any(one, index, versions, seen)
            for owner in one.owners:
                owner.views = 0
            dist.barrier()
            one.link.meet_step()
            for index, block in enumerate(one.blocks):
                one.memory.refresh(block)
                _read_any(one, index, versions, seen)
            one.link.meet_step()


def _read_any(one: Side, index: int, versions: list[int], seen: list[list[int]]) -> None:
    try:
        _read_one(one, index, versions, seen)
    except BudgetError:  # views hold memory
        for owner in one.owners:
            owner.views = 0
        one.memory.evict_all(set())
        _read_one(one, index, versions, seen)


def _read_one(one: Side, index: int, versions: list[int], seen: list[list[int]]) -> None:
    with one.whole(index) as whole:
        for rank, part in enumerate(one.parts(index, whole)):
            value = int(part[0])
            assert bool((part == value).all()), ("torn", index, rank, part.unique().tolist())
            if rank == one.rank:
                assert value == one.value(rank, index, versions[index]), ("stale", index)
            candidates = range(seen[index][rank], seen[index][rank] + 251)
            found = [version for version in candidates if one.value(rank, index, version) == value]
            assert found and found[0] - seen[index][rank] < 125, ("older", index, rank, seen[index][rank], value)
            seen[index][rank] = found[0]
