"""What ranks do in the tests of in-place edits: the same with the same data, one rank later than the others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, plain
from tests.support.rank_paging import RankPaging

WIDTH = 32
LATE_S = 0.1


def build() -> nn.Module:
    return mlp(WIDTH, 4)


def be_late(late: int | None) -> None:
    """Rank ``late`` comes later to what follows; None: plain PyTorch."""
    if late is not None and dist.get_rank() == late:
        time.sleep(LATE_S)


def clip(model: nn.Module, late: int | None) -> Any:
    """torch's own clipping: the norm of all gradients, and each times a factor."""
    model(rows(width=WIDTH)).square().sum().backward()
    be_late(late)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    be_late(late)
    return norm, gradients_of(model)


def scale(model: nn.Module, late: int | None) -> Any:
    """Weights that are changed by what they are, and are looked at."""
    seen = []
    with torch.no_grad():
        for param in model.parameters():
            be_late(late)
            param.mul_(2.0)
            param /= param.norm()
            seen.append(param.clone())
            param.data = param * 3.0
        be_late(late)
        seen.append(model(rows(width=WIDTH)))
    return seen, weights_of(model)


PROGRAMS = {"clip": clip, "scale": scale}


def edit(program: str, transport: str, directory: str, late: int) -> str:
    """Returns what differs from plain PyTorch."""
    expected = PROGRAMS[program](plain(build), None)
    paging = RankPaging(Path(directory), transport)
    model = paging.build(build, EVICTING)
    seen = PROGRAMS[program](model, late)
    paging.close()
    try:
        assert_same_bits(expected, seen)
    except AssertionError as error:
        return str(error)
    return ""
