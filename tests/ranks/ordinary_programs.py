"""Ordinary parameters that several ranks train next to a model that they share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepoffload import offload_context
from deepoffload.params.torch_private import optimizer_step_hooks
from deepoffload.runtime.context import engine_of
from tests.ranks.setting_up import warnings_of


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def warned_of(place: str, averaged: bool, frozen: bool) -> list[str]:
    """What is said while a prompt in front of the model, or a head behind it, is trained for three steps.

    Args:
        place: of the ordinary module, "prompt" or "head"; "none": torch's optimizer has the model alone.
        averaged: the program averages its gradients over the ranks.
        frozen: the model is.
    """
    return warnings_of(lambda: _train(place, averaged, frozen))


def _train(place: str, averaged: bool, frozen: bool) -> None:
    torch.manual_seed(1)
    with offload_context(host_budget="64MiB"):
        base = Base()
    base.requires_grad_(not frozen)
    ordinary = nn.Linear(16, 16)
    trained: list[nn.Parameter] = [] if frozen else list(base.parameters())
    if place != "none":
        trained += ordinary.parameters()
    optimizer = torch.optim.SGD(trained, lr=1e-2)
    model = {"prompt": [ordinary, base], "head": [base, ordinary], "none": [base]}[place]
    for step in range(3):
        torch.manual_seed(10 * step + int(os.environ["RANK"]))
        optimizer.zero_grad()
        nn.Sequential(*model)(torch.randn(4, 16)).square().mean().backward()
        if averaged:
            _average(ordinary.parameters())
        optimizer.step()
        dist.barrier()  # who comes last has seen the others
    engine_of(base).close()
    assert not optimizer_step_hooks


def _average(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def leave_no_hooks() -> int:
    """How many hooks are left of a model that was deleted when another one has ended."""
    with offload_context(host_budget="64MiB"):
        base = Base()
    first = engine_of(base)
    del base
    gc.collect()
    first.close()
    assert len(optimizer_step_hooks) == 1  # it does nothing
    with offload_context(host_budget="64MiB"):
        base = Base()
    engine_of(base).close()
    return len(optimizer_step_hooks)
