"""What is saved of a model that several ranks train."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from deepoffload.checkpoint.file_layout import PlannedFile
from deepoffload.errors import UsageError
from deepoffload.optim.optimizer_parts import pagers_of
from deepoffload.params.ports import RankPort
from deepoffload.ranks.joint_task import JointTask
from deepoffload.ranks.words import ranks_in_words

log = logging.getLogger("deepoffload")

Alive = Callable[[], None]
"""To be called now and then by what takes long."""


def link_of(module: nn.Module) -> RankPort | None:
    """What joins this rank with the others that train ``module``; None where it trains alone, or does not any more."""
    pagers = [pager for pager in pagers_of(list(module.parameters())) if pager.life.closed_because is None]
    return next((pager.link for pager in pagers if pager.link is not None), None)


def on_rank_0(module: nn.Module, what: str, write: Callable[[Alive], None]) -> None:
    """Have rank 0 write what it gathers from all ranks. The others wait until it has, so that nothing changes
    meanwhile, and raise what it raises. Rank 0 does not wait for the others: it may be the only one that calls this.

    Args:
        what: the same on all ranks that call this.

    Raises:
        DeepOffloadError: what rank 0 has failed with. RankError: a rank has gone, or rank 0 does not come.
    """
    link = link_of(module)
    if link is None:
        write(_nothing)
    elif link.ranks.rank == 0:
        with link.notices.telling(what) as alive:
            write(alive)
    else:
        link.notices.await_told(what, by=0)


@contextmanager
def all_ranks(module: nn.Module, what: str) -> Iterator[JointTask | None]:
    """What every rank that trains ``module`` calls: all have come when it begins, and what fails on one fails on all.

    Yields:
        What they do together; None with one rank.

    Raises:
        DeepOffloadError: what another rank has failed with. RankError: a rank has gone, or does not come.
    """
    link = link_of(module)
    if link is None:
        yield None
        return
    with link.tasks.begin(what).together() as task:
        yield task


def meet(task: JointTask | None) -> None:
    """Return when all ranks are here. Raises as :func:`all_ranks`."""
    if task is not None:
        task.gather()


def of_rank_0(task: JointTask | None, mine: Any) -> Any:
    """What rank 0 gives."""
    return mine if task is None else task.gather(mine if task.rank == 0 else None)[0]


def same_arguments(task: JointTask | None, **given: object) -> None:
    """Compare what each rank's call was given.

    Raises:
        UsageError: on all ranks, where something differs; nothing has been written. Names what, and the ranks.
    """
    if task is None:
        return
    found = task.gather(given)
    for name in given:
        values = [said[name] for said in found]
        if any(value != values[0] for value in values):
            ranks_with = {repr(one): [rank for rank, other in enumerate(values) if other == one] for one in values}
            said = ", ".join(f"{name}={value} on {ranks_in_words(ranks)}" for value, ranks in ranks_with.items())
            task.refuse(
                UsageError(f"ranks call {task.what} with {said}: they do it together, so give the same on all of them")
            )


def tag_of_all(task: JointTask | None, mine: str, where_they_differ: str) -> str:
    """The tag of a checkpoint that all ranks save: rank 0's.

    Args:
        where_they_differ: ``"Warn"``, ``"Fail"`` or ``"Ignore"``.

    Raises:
        UsageError: on all ranks, where tags differ, with ``"Fail"``.
    """
    if task is None:
        return mine
    tags = task.gather(mine)
    if any(tag != tags[0] for tag in tags) and where_they_differ != "Ignore":
        given = ", ".join(f"{tag!r} on rank {rank}" for rank, tag in enumerate(tags))
        text = f"ranks give different tags for one checkpoint: {given}"
        if where_they_differ == "Fail":
            task.refuse(UsageError(f"{text}: give the same on all of them"))
        log.warning("%s; it gets rank 0's", text)
    return str(tags[0])


def refuse_other_plans(task: JointTask, planned: Sequence[PlannedFile]) -> None:
    """Raise UsageError on all ranks where they would not write the same files."""
    digest = hashlib.sha256()
    for file in planned:
        digest.update(file.name.encode() + b"\n" + file.header)
    found = task.gather(digest.hexdigest())
    other = next((rank for rank, text in enumerate(found) if text != found[0]), None)
    if other is not None:
        task.refuse(
            UsageError(
                f"rank {other} would save other tensors than rank 0: build the model and its optimizer in the same "
                "way on all ranks, and save with the same arguments"
            )
        )


def shared_folder(task: JointTask) -> str:
    """The folder that rank 0 has made.

    Raises:
        UsageError: this rank does not see it.
    """
    folder: str = of_rank_0(task, None)
    if not os.path.isdir(folder):
        raise UsageError(
            f"rank {task.rank} does not see {folder}, which rank 0 has made: all ranks write to one directory, on a "
            "file system that all of their hosts share"
        )
    return folder


def _nothing() -> None:
    """Nobody waits."""
