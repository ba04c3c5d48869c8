"""Real processes that form a group of ranks, started as a launcher does: the environment tells them who they are.

They are forked from a server that has imported torch and nothing else, so one costs about a tenth of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any


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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launcher_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set on one host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _child(answer: Connection, environment: dict[str, str], program: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)  # names of torch that are on their way out
    try:
        answer.send((program(*arguments), None, ""))
    except BaseException as error:
        answer.send((None, type(error).__name__, traceback.format_exc()))


def run_ranks(program: Callable[..., Any], world_size: int, *arguments: Any, limit_s: float = 90.0) -> list[Ended]:
    """Run ``program(*arguments)``, a function of a module, on every rank, and return how each ended, in rank order.

    A rank that has not ended within ``limit_s`` is killed, and the test fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    port = free_port()
    begin = time.monotonic()
    processes, answers = [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        environment = launcher_environment(rank, world_size, port)
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


def values_of(program: Callable[..., Any], world_size: int, *arguments: Any, limit_s: float = 90.0) -> list[Any]:
    """What the ranks return, each of which ends well."""
    ended = run_ranks(program, world_size, *arguments, limit_s=limit_s)
    assert all(one.error is None and one.exit_code == 0 for one in ended), "\n".join(one.text for one in ended)
    return [one.value for one in ended]
