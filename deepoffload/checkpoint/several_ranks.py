"""What is saved of a model that several ranks train."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from deepoffload.optim.optimizer_parts import pagers_of
from deepoffload.params.ports import RankPort

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


def _nothing() -> None:
    """Nobody waits."""
