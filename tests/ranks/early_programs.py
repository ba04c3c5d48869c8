"""What the ranks of the tests of updates inside backward do wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import nn

from deepoffload import CPUAdamW, offload_context
from deepoffload.errors import RankError, UsageError
from tests.support.models import mlp, rows

Call = Callable[[nn.Module, CPUAdamW], object]


def backward(model: nn.Module) -> None:
    model(rows(seed=int(os.environ["RANK"]))).square().mean().backward()


def backward_twice(model: nn.Module, optimizer: CPUAdamW) -> None:
    backward(model)
    backward(model)
    optimizer.step()


def change_the_rate(model: nn.Module, optimizer: CPUAdamW) -> None:
    backward(model)
    for param in model.parameters():
        with suppress(UsageError):
            assert param.grad is None  # waits for the other rank's part, and is refused
    optimizer.state_dict()  # all that is decided on is made
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def look_at_a_gradient(model: nn.Module, optimizer: CPUAdamW) -> None:
    backward(model)
    assert next(model.parameters()).grad is None, "it was shown"


def clip(model: nn.Module, optimizer: CPUAdamW) -> None:
    CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)


def have_other_rates(model: nn.Module, optimizer: CPUAdamW) -> None:
    optimizer.param_groups[0]["lr"] = 1e-2 * (1 + int(os.environ["RANK"]))
    backward(model)
    optimizer.step()


def make_no_step(model: nn.Module, optimizer: CPUAdamW) -> str:
    before = [param.detach().clone() for param in model.parameters()]
    backward(model)
    optimizer.zero_grad()
    changed = [not torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)]
    backward(model)
    optimizer.step()
    return "updated all the same" if all(changed) else f"{changed}"


MISTAKES: dict[str, Call] = {
    "two backwards": backward_twice,
    "another rate": change_the_rate,
    "a look": look_at_a_gradient,
    "clipping": clip,
    "other rates": have_other_rates,
    "no step": make_no_step,
}


def make_mistakes() -> dict[str, str]:
    """What each of them says, or raises, on this rank."""
    said = {}
    for name, mistake in MISTAKES.items():
        torch.manual_seed(3)
        context = offload_context(host_budget="32MiB", step_overlap="in_backward")
        with context:
            model = mlp()
        optimizer = CPUAdamW(model.parameters(), lr=1e-2)
        try:
            said[name] = str(mistake(model, optimizer))
        except (RankError, UsageError) as error:
            said[name] = str(error)
        with suppress(RankError):
            context.engine.close()
    return said
