"""What is saved of a model that several ranks train."""

from __future__ import annotations

from torch import nn

from deepoffload.optim.optimizer_parts import pagers_of
from deepoffload.params.ports import RankPort


def link_of(module: nn.Module) -> RankPort | None:
    """What joins this rank with the others that train ``module``; None where it trains alone."""
    return next((pager.link for pager in pagers_of(list(module.parameters())) if pager.link is not None), None)


def leaves_it_to_rank_0(module: nn.Module) -> bool:
    """Whether another rank writes the weights. It gets this rank's part of them also while this rank does something
    else, so nobody has to wait."""
    link = link_of(module)
    return link is not None and link.ranks.rank != 0
