"""What ranks do in the tests of groups."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from deepoffload.config import parse_config
from deepoffload.errors import DeepOffloadError, RankError
from deepoffload.ranks.exchange import Exchange
from deepoffload.ranks.group import RankGroup, open_group
from deepoffload.ranks.transport import open_exchange
from deepoffload.runtime.ranks import RankChoice
from tests.support.rank_processes import LONG_S

CPU = torch.device("cpu")


def sum_of_ranks(exchange: Exchange) -> list[int]:
    """The ranks as each says it, in the default group's numbers."""
    whole = torch.zeros(exchange.ranks.world_size, dtype=torch.int64)
    flight = exchange.gather(torch.tensor([int(os.environ["RANK"])]), whole, "the ranks")
    flight.release()
    return [int(rank) for rank in whole]


def members(group: RankGroup | None, transport: str = "auto") -> list[int]:
    assert group is not None
    exchange = open_exchange(group, transport)
    found = sum_of_ranks(exchange)
    exchange.close()
    group.close()
    return found


def error_of(**arguments: Any) -> str:
    """What opening a group raises."""
    try:
        open_group(CPU, timeout_s=LONG_S, **arguments)
    except DeepOffloadError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def start_by_environment() -> tuple[bool, list[int], bool]:
    """Twice in one process: the second finds the default group that the first has started."""
    before = dist.is_initialized()
    first = open_group(CPU, timeout_s=LONG_S)
    assert first is not None
    second = open_group(CPU, timeout_s=LONG_S)
    first.close()
    first.close()
    return before, members(second), dist.is_initialized()


def use_the_programs_group() -> list[int]:
    dist.init_process_group("gloo")
    found = members(open_group(CPU, timeout_s=LONG_S))
    dist.barrier()
    dist.destroy_process_group()
    return found


def be_on_two_hosts() -> tuple[tuple[int, ...], int, tuple[int, ...], str]:
    """As two launchers would say it that have started two processes each."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    group = open_group(CPU, timeout_s=LONG_S)
    assert group is not None
    exchange = open_exchange(group)
    assert sum_of_ranks(exchange) == [0, 1, 2, 3]
    try:
        open_exchange(group, "memory")
    except DeepOffloadError as error:
        assert "the ranks run on 2 hosts" in str(error), error
    else:
        raise AssertionError("memory of another host has been read")
    return group.ranks.hosts, group.ranks.local_rank, group.ranks.host_ranks, exchange.transport


def choice_of(**given: Any) -> str:
    """What a program raises that gives this, and opens what it says."""
    try:
        group = RankChoice(**given).open(parse_config({}, host_budget="1MiB", ranks={"timeout_s": LONG_S}))
    except DeepOffloadError as error:
        return f"{type(error).__name__}: {error}"
    assert group is not None
    group.close()
    return "nothing"


def start_again(folder: str) -> list[list[int]]:
    """The default group is ended and started again, with another file for its store."""
    found = []
    for number in range(2):
        where = f"file://{folder}/{number}"
        dist.init_process_group("gloo", init_method=where, rank=int(os.environ["RANK"]), world_size=2)
        found.append(members(open_group(CPU, timeout_s=LONG_S)))
        dist.destroy_process_group()
    return found


def share_the_program_in_two() -> tuple[list[int], list[int], str, str, list[str], float]:
    """Four ranks: a group of every second one, and the rows of a mesh, twice; a group and meshes that do not fit. Then
    rank 1 gives something else than rank 3, with which it trains: a mesh of two dimensions, a group without it, and
    what is right. Last how long that has taken."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    by_group = members(open_group(CPU, group=pairs[rank % 2], timeout_s=LONG_S))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    once = open_group(CPU, mesh=mesh["data"], timeout_s=LONG_S)
    assert once is not None
    once.new_private_group("more")
    once.close()
    by_mesh = members(open_group(CPU, mesh=mesh["data"], timeout_s=LONG_S), "group")
    not_a_member, two_dimensions = error_of(group=pairs[1 - rank % 2]), error_of(mesh=mesh)
    begun, own = time.monotonic(), pairs[rank % 2]
    others: list[dict[str, Any]] = [{"mesh": mesh}, {"group": pairs[0]}, {"group": own}]
    told = [choice_of(**(other if rank == 1 else {"group": own})) for other in others]
    return by_group, by_mesh, not_a_member, two_dimensions, told, time.monotonic() - begun


def give_both() -> str:
    dist.init_process_group("gloo")
    found = error_of(group=dist.group.WORLD, mesh=init_device_mesh("cpu", (2,)))
    dist.barrier()
    return found


def start_alone_under_a_launcher() -> tuple[str, str]:
    """A program that makes a group of one in each of two processes."""
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    return error_of(), error_of(group=dist.group.WORLD)


def have_no_backend_for_the_cpu() -> str:
    store, rank, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=world_size)
    found = error_of()
    store.set(f"rank {rank} has been refused", "")  # no rank ends while another still connects to it
    store.wait([f"rank {other} has been refused" for other in range(world_size)], timedelta(seconds=LONG_S))
    return found


def sit_in_a_barrier() -> list[int]:
    """One rank starts a barrier of the program's before our transfers, the other one after them."""
    dist.init_process_group("gloo")
    group = open_group(CPU, timeout_s=LONG_S)
    assert group is not None
    exchange = open_exchange(group, "group")
    barrier = dist.barrier(async_op=True) if group.ranks.rank == 0 else None
    found = sum_of_ranks(exchange)
    if barrier is None:
        dist.barrier()
    else:
        barrier.wait()
    return found


def never_connect(limit_s: float) -> str:
    """Rank 1 comes to where the ranks meet, and cannot be reached from there on. Rank 0 begins when it has come."""
    rank = int(os.environ["RANK"])
    store = next(dist.rendezvous("env://", rank, 2))[0]
    come = dist.PrefixStore("deepoffload has come", store)
    if rank == 1:
        come.set("1", "")
        store.wait(["it is over"], timedelta(seconds=LONG_S))
        return ""
    come.wait(["1"], timedelta(seconds=LONG_S))
    try:
        open_group(CPU, timeout_s=limit_s)
    except RankError as error:
        return str(error)
    finally:
        store.set("it is over", "")
    return "nothing was raised"


def main() -> None:
    """Under torchrun."""
    group = open_group(CPU, timeout_s=LONG_S)
    assert group is not None
    ranks = group.ranks
    text = f"rank {ranks.rank} of {ranks.world_size}, host ranks {ranks.host_ranks}, {members(group)}\n"
    os.write(1, text.encode())


if __name__ == "__main__":
    main()
