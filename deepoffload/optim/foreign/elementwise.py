"""Classes whose step of one element needs nothing of the others: they may be stepped run by run, in any cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from deepoffload.optim.foreign.muon_step import MuonWithAdamW
from deepoffload.params.layout import ALIGNMENT_NUMEL, PieceSegment

RUN_NUMEL = 3 << 18
"""Elements of a run whose fp32 copies stay in the processor's cache: weight and gradient take 6 MiB. With runs of 1.5 M
elements a fused AdamW over bf16 weights took 1.08 times as long, with 3 M 1.1 times that. A call of a class costs 100
us, so there is something to lose by shorter ones, too."""

ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Those that are known to be. Classes derived from them may be anything, and no trial over small tensors would tell: a
limit for the norm of a parameter's update may be met by large ones alone."""


def is_elementwise(made_class: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> bool:
    """Whether elements that a class steps with these settings are independent of each other."""
    if made_class is MuonWithAdamW:
        return not settings["use_muon"]
    return made_class in ELEMENTWISE


def runs_of(part: PieceSegment, run_numel: int) -> Iterator[PieceSegment]:
    """A segment in equal runs of at most ``run_numel`` elements, rounded up to whole lines of the cache: there loops
    over vectors begin and end where those over the whole parameter do."""
    count = -(-part.numel // run_numel)
    most = -(-part.numel // count // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL
    for begin in range(0, part.numel, most):
        numel = min(most, part.numel - begin)
        yield replace(part, start=part.start + begin, numel=numel, piece_start=part.piece_start + begin)
