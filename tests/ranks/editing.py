"""What ranks do in the tests of edits: the same with the same data, one rank later than the others; or what they must
not, each rank something else."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepoffload import CPUAdamW
from deepoffload.errors import RankError, UsageError
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, plain
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
        be_late(late)
        nn.init.constant_(model[2].weight, 0.25)  # it gives its arguments by name
        nn.functional.threshold(model[0].weight, 0.0, 0.5, inplace=True)
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


def assign_gradient(weight: nn.Parameter, rank: int) -> None:
    weight.grad = None
    weight.grad = torch.full_like(weight, 0.5 * rank)


def assign_data(weight: nn.Parameter, rank: int) -> None:
    weight.data = torch.full_like(weight, float(rank))


def write_past_the_door(weight: nn.Parameter, rank: int) -> None:
    if rank == 1:
        weight.data.add_(1.0)


@torch.library.custom_op("deepoffload_tests::scale_unseen", mutates_args=("values",))
def scale_unseen(values: Tensor, factor: float) -> None:
    """Its name does not say that it writes to its argument."""
    values.mul_(factor)


OTHER_VALUES: dict[str, Callable[[nn.Parameter, int], Any]] = {
    "in place": lambda weight, rank: weight.add_(rank),
    "init": lambda weight, rank: nn.init.constant_(weight, float(rank)),
    "flag": lambda weight, rank: nn.functional.threshold(weight, 9.0, float(rank), inplace=True),
    "operator": lambda weight, rank: torch.ops.aten.mul_.Tensor(weight, 1.0 + rank),
    "unknown operator": lambda weight, rank: scale_unseen(weight, 1.0 + rank),
    "data": assign_data,
    "gradient of init": lambda weight, rank: nn.init.constant_(weight.grad, float(rank)),  # type: ignore[arg-type]
    "gradient": lambda weight, rank: weight.grad.mul_(1.0 + rank),  # type: ignore[union-attr]
    "assigned gradient": assign_gradient,
    "past the door": lambda weight, rank: weight.data.mul_(1.0 + rank),
    "past the door of one rank": write_past_the_door,
}
"""Edits of a weight or its gradient that differ from rank to rank."""


def edit_differently(how: str, transport: str, directory: str) -> str:
    """Returns what the edit, or the step after it, raises."""
    paging = RankPaging(Path(directory), transport)
    model = paging.build(build, RESIDENT)
    optimizer = CPUAdamW(model.parameters(), lr=1e-2)
    model(rows(width=WIDTH)).square().sum().backward()
    rank = dist.get_rank()
    try:
        with torch.no_grad():
            model[0].weight.mul_(0.5)  # the same on all ranks
            OTHER_VALUES[how](model[2].weight, rank)
        optimizer.step()
        return "nothing was raised"
    except (RankError, UsageError) as error:
        return str(error)
    finally:
        with suppress(RankError):
            paging.close()
