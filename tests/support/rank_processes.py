"""Real processes that form a group of ranks, started as a launcher does: the environment tells them who they are.

They are forked from a server that has imported what they need (``rank_imports.py``), so one costs about a tenth of a
second.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

LONG_S = 1000.0
"""A limit that ranks give each other. No test waits for it: where an error is not told, ``run_ranks`` ends first."""

ENDS_WITHIN_S = 240.0
"""How long ``run_ranks`` waits for all ranks: also a machine that has much else to do is faster."""

SOON_S = 200.0
"""Within this an error is told that does not wait for a limit: on a busy machine, and long before ``LONG_S``."""


@dataclass(frozen=True)
class Ended:
    """How a rank's process has ended.

    Attributes:
        value: what its program returned.
        error: the class of what it raised, None when it returned.
        text: what it raised, with the stack.
        seconds: from its start to its end.
        exit_code: that of a process; minus the number of the signal that killed it.
    """

    value: Any
    error: str | None
    text: str
    seconds: float
    exit_code: int | None


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port on which rank 0 can listen, and nobody else.

    A socket that is bound and does not listen keeps the kernel from giving the port to another process. A second socket
    may still be bound to it and listen, when both are allowed to share it, as the sockets of torch's stores are.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def launcher_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher sets on one host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def own_group(file: str) -> None:
    """Start the default group of a rank's program, for its own barriers. ``file``: where the ranks meet."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=LONG_S),
    )


def _child(answer: Connection, environment: dict[str, str], program: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(environment)
    import torch

    import tests.support.rank_imports  # noqa: F401  here already, but where the server could not find it

    torch.set_num_threads(1)
    try:
        answer.send((program(*arguments), None, ""))
    except BaseException as error:
        answer.send((None, type(error).__name__, traceback.format_exc()))


@contextmanager
def meeting_point(rank_0_has_store: bool) -> Iterator[dict[str, str]]:
    """What a launcher adds to the environments of ranks: where they meet. The store is in this process, as with
    torchrun, so that any rank may end first; or in rank 0, as with launchers that leave it to the ranks."""
    if rank_0_has_store:
        with reserved_port() as port:
            yield {"MASTER_PORT": str(port)}
        return
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": str(True)}


def run_ranks(
    program: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    limit_s: float = ENDS_WITHIN_S,
    stops: int | None = None,
    rank_0_has_store: bool = False,
) -> list[Ended]:
    """Run ``program(*arguments)``, a function of a module, on every rank, and return how each ended, in rank order.

    A rank that has not ended within ``limit_s`` is killed, and the test fails.

    Args:
        stops: a rank that stops in the middle, and is killed when the others have ended.
        rank_0_has_store: the store in which the ranks meet ends with rank 0. Then no rank may need it any more, unless
            this is what is tested.
    """
    with meeting_point(rank_0_has_store) as where:
        return _run_ranks(program, world_size, arguments, limit_s, where, stops)


def _run_ranks(
    program: Callable[..., Any],
    world_size: int,
    arguments: tuple[Any, ...],
    limit_s: float,
    where: dict[str, str],
    stops: int | None,
) -> list[Ended]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.rank_imports"])
    begin = time.monotonic()
    processes, answers = [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        environment = launcher_environment(rank, world_size, 0) | where
        process = context.Process(target=_child, args=(there, environment, program, arguments), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        answers.append(here)
    said: dict[int, tuple[Any, str | None, str]] = {}
    ended: dict[int, Ended] = {}
    try:
        while len(ended) < world_size and time.monotonic() < begin + limit_s:
            # All answers are taken as they come: a rank that cannot send a large one cannot serve the others either.
            open_answers = {answers[rank]: rank for rank in range(world_size) if rank not in said}
            left = {processes[rank].sentinel: rank for rank in range(world_size) if rank not in ended}
            ready = wait([*open_answers, *left], timeout=1.0)
            for answer in ready:
                if isinstance(answer, Connection):
                    said[open_answers[answer]] = _said(answer)
            for rank in [left[sentinel] for sentinel in ready if isinstance(sentinel, int)]:
                if rank in said:
                    processes[rank].join()
                    ended[rank] = Ended(*said[rank], time.monotonic() - begin, processes[rank].exitcode)
            if stops is not None and stops not in ended and len(ended) == world_size - 1:
                processes[stops].kill()
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    late = [rank for rank in range(world_size) if rank not in ended]
    assert not late, f"ranks {late} have not ended within {limit_s} s; the others: {ended}"
    return [ended[rank] for rank in range(world_size)]


def _said(answer: Connection) -> tuple[Any, str | None, str]:
    try:
        said: tuple[Any, str | None, str] = answer.recv()
    except EOFError:
        return None, "killed", ""
    return said


def values_of(
    program: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    limit_s: float = ENDS_WITHIN_S,
    rank_0_has_store: bool = False,
) -> list[Any]:
    """What the ranks return, each of which ends well."""
    ended = run_ranks(program, world_size, *arguments, limit_s=limit_s, rank_0_has_store=rank_0_has_store)
    assert all(one.error is None and one.exit_code == 0 for one in ended), "\n".join(one.text for one in ended)
    return [one.value for one in ended]


def in_turn(program: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
    """What ``program`` returns, called with each of these arguments, one after the other in the same process."""
    return [program(*arguments) for arguments in calls]


def values_of_each(program: Callable[..., Any], world_size: int, calls: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """As :func:`values_of` of each of the calls, with processes that are started once for all of them."""
    limit_s = max(ENDS_WITHIN_S, 60.0 * len(calls))
    found = values_of(in_turn, world_size, program, list(calls), limit_s=limit_s)
    return [list(ranks) for ranks in zip(*found, strict=True)]
