"""What one of several ranks owns of an optimizer's state, as its own state dict, and back.

``state_dict(shards=True)`` has torch's layout. Each array of a paged parameter is flat: the consecutive elements that
this rank owns, in the order of the weight's memory, perhaps none. Under ``"shards"`` it says of which rank it is and
where the elements belong, so that no other rank, and no model that is cut otherwise, takes them for its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from deepoffload.errors import UsageError
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle

SHARDS = "shards"
"""The key of a state dict that says whose elements it has."""

_REMEDY = "what TrainingState, or optimizer.state_dict() without shards=True, saves is for any number and any budget"


class ShardEntry(dict[str, Any]):
    """What a state dict with shards says of one parameter."""


def own_elements(handle: ParamHandle) -> slice | None:
    """The elements of a parameter that this rank owns, in the order of its memory; None where it is not cut."""
    return None if handle.cut is None else handle.cut.own_elements()


def own_shape(handle: ParamHandle) -> torch.Size:
    """The shape of an array with these elements."""
    own = own_elements(handle)
    return handle.shape if own is None else torch.Size((own.stop - own.start,))


def record_of(handles: Mapping[int, ParamHandle | None]) -> dict[str, Any] | None:
    """Whose elements these are: what :func:`check_record` compares; None where nothing is cut.

    Args:
        handles: of the paged parameters, by their numbers in the state dict; None for the others.
    """
    cuts = {number: handle.cut for number, handle in handles.items() if handle is not None and handle.cut is not None}
    if not cuts:
        return None
    first = next(iter(cuts.values()))
    runs = {number: (own.start, own.stop) for number, cut in cuts.items() for own in (cut.own_elements(),)}
    return {"rank": first.rank, "world_size": first.layout.world_size, "elements": runs}


def check_record(saved: Any, handles: Mapping[int, ParamHandle | None]) -> None:
    """Raise UsageError where a loaded state has not the elements that this rank owns."""
    mine = record_of(handles) or {"rank": 0, "world_size": 1, "elements": {}}
    try:
        rank, world_size, elements = saved["rank"], saved["world_size"], dict(saved["elements"])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"the loaded state has no {SHARDS!r} as state_dict(shards=True) writes them") from None
    if world_size != mine["world_size"]:
        raise UsageError(
            f"the loaded state is rank {rank}'s part of {world_size}, and {_ranks(mine['world_size'])} now: shards are "
            f"for as many ranks as have saved them. Start {world_size}, or save the whole state ({_REMEDY})"
        )
    if rank != mine["rank"]:
        raise UsageError(
            f"the loaded state is what rank {rank} has saved, and this is rank {mine['rank']}: each rank loads its own"
        )
    for number, handle in handles.items():
        own, other = mine["elements"].get(number), elements.get(number)
        if handle is not None and own is not None and (other is None or tuple(other) != own):
            there = "none" if other is None else f"those from {other[0]} to {other[1]}"
            raise UsageError(
                f"{handle.name}: this rank owns the elements from {own[0]} to {own[1]}, and the loaded state has "
                f"{there}: the model was cut otherwise when it was saved (other parameters, or another budget). Use "
                f"what it was saved with, or save the whole state ({_REMEDY})"
            )


@contextmanager
def all_fail_together(pagers: Iterable[Pager], what: str) -> Iterator[None]:
    """What fails inside on one rank is raised on all, with that rank's text."""
    with ExitStack() as stack:
        for link in {id(pager.link): pager.link for pager in pagers if pager.link is not None}.values():
            stack.enter_context(link.tasks.begin(what).together())
        yield


def _ranks(count: int) -> str:
    return "one process trains" if count == 1 else f"{count} ranks train"
