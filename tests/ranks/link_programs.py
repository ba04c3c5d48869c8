"""What ranks do in the tests of the link between them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from deepoffload.copies.rank_link import RankLink
from deepoffload.errors import RankError, UsageError
from deepoffload.memory.lock import BooksLock
from deepoffload.ranks.group import open_group
from deepoffload.ranks.sums import SquareSum
from deepoffload.ranks.transport import open_exchange
from tests.support.rank_processes import LONG_S
from tests.support.waiting import wait_until


@contextmanager
def linked() -> Iterator[RankLink]:
    """A link that is closed at the end, together with the others'."""
    group = open_group(torch.device("cpu"), timeout_s=LONG_S)
    assert group is not None
    link = RankLink(group, open_exchange(group, "auto"), BooksLock(), timeout_s=LONG_S)
    try:
        yield link
    finally:
        link.close()
        group.close()


def add_up(turns: int) -> list[SquareSum]:
    """Every rank gives other sums, and meets the others before each."""
    found = []
    with linked() as link:
        for turn in range(turns):
            link.meet_step()
            found.append(link.exchange_sums(SquareSum(10**turn + (link.ranks.rank << 300), turn == link.ranks.rank)))
    return found


def lose_a_rank_at_sums(what: str) -> tuple[str, float]:
    """The last rank meets the others and gives no sum."""
    begin = time.monotonic()
    try:
        with linked() as link:
            link.meet_step()
            begin = time.monotonic()
            if link.ranks.rank == link.ranks.world_size - 1:
                if what == "SIGKILL":
                    os.kill(os.getpid(), signal.SIGKILL)
                link.fail("ValueError: the batch is empty")
            link.exchange_sums(SquareSum(1, False))
    except RankError as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("a sum without a rank")


def fail_together(times: int) -> list[bool]:
    """All ranks fail at the same moment, as they do where all of them lack memory."""
    quiet = []
    for _ in range(times):
        with linked() as link:
            link.meet_step()
            link.fail("BudgetError: no room")
            quiet.append(link.rounds.has_failed)
    return quiet


def fail_at_tasks(times: int, failed: Path) -> list[str]:
    """Rank 1 fails at tasks one after the other, and the others begin when it has. Then all do one together. Says what
    each rank has raised, and what it was given."""
    said = []
    with linked() as link:
        alone = link.ranks.rank == 1
        if not alone:
            wait_until(failed.exists)
        for number in range(times):
            try:
                with link.tasks.begin("a test").together():
                    if alone:
                        raise UsageError(f"it is number {number}")
            except UsageError as error:
                said.append(str(error))
        failed.touch()
        with link.tasks.begin("another").together() as task:
            said.append(str(task.gather(link.ranks.rank)))
    return said
