"""Runs that are cut in two by a save and a load, and compared with runs that are not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepoffload
from tests.support.models import TinyGPT, batch, next_token_loss

STEPS = 3
"""Before the save, and after it."""

ALL = os.environ.get("CHECKPOINTS") == "all"
"""Every combination, in minutes; else each choice at least once."""

Optimizer = torch.optim.Optimizer


def adamw(model: nn.Module, **settings: Any) -> Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return deepoffload.CPUAdamW(params, **{"lr": 3e-3, "weight_decay": 0.1, **settings})


def gpt() -> nn.Module:
    return TinyGPT(width=32, depth=2)


def steps(model: nn.Module, optimizer: Optimizer, first: int, count: int = STEPS, accumulate: int = 1) -> list[Tensor]:
    """``count`` steps from number ``first`` on; the losses."""
    losses = []
    for step in range(first, first + count):
        for micro in range(accumulate):
            loss = next_token_loss(model, batch(100 * step + micro)) / accumulate
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Copies of weights and optimizer state (with masters)."""
    state = optimizer.state_dict()
    return {
        "weights": {name: param.detach().clone() for name, param in model.named_parameters()},
        "state": {
            number: {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
            for number, entry in sorted(state["state"].items())
        },
        "groups": [dict(sorted(group.items())) for group in state["param_groups"]],
    }


def masters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The exact fp32 values of the weights, from ``state_dict()``; of a frozen one, its own."""
    names = {id(param): name for name, param in model.named_parameters()}
    state = optimizer.state_dict()["state"]
    found = {}
    for number, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
        entry, weight = state.get(number, {}), param.detach()
        if "remainder" in entry:
            bits = (weight.view(torch.int16).int() << 16) + entry["remainder"].int()
            found[names[id(param)]] = bits.view(torch.float32)
        else:
            found[names[id(param)]] = entry.get("master", weight).float().clone()
    return found


Build = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]


def straight_and_saved(build: Build, make: MakeOptimizer, directory: Path, **run: Any) -> dict[str, Any]:
    """Train some steps, save, train as many more; what the second half showed."""
    model = build()
    optimizer = make(model)
    torch.manual_seed(3)
    steps(model, optimizer, 0, **run)
    before = torch.get_rng_state()
    deepoffload.TrainingState(model, optimizer).save(directory)
    assert torch.equal(before, torch.get_rng_state())
    losses = steps(model, optimizer, STEPS, **run)
    return {"losses": losses, **snapshot(model, optimizer)}


def resumed(build: Build, make: MakeOptimizer, directory: Path, **run: Any) -> dict[str, Any]:
    """A fresh model that loads and trains on."""
    model = build()
    optimizer = make(model)
    torch.manual_seed(99)  # another one than the saved run's: loading has to set it
    deepoffload.TrainingState(model, optimizer).load(directory)
    losses = steps(model, optimizer, STEPS, **run)
    return {"losses": losses, **snapshot(model, optimizer)}
