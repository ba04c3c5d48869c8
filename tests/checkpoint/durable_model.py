"""A small model that trains with durable steps, and what a death leaves of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.io.named_files import durable_path
from tests.checkpoint.training import snapshot
from tests.support.disks import folder_on_disk

WIDTH = 96
PLACES: dict[str, dict[str, Any]] = {
    "host": {"host_budget": "64MiB"},
    "half": {"host_budget": "600KiB"},
    "all": {"host_budget": "400KiB"},
    "copies": {"host_budget": "1MiB", "device": "cpu", "device_budget": "300KiB", "debug": {"copies": True}},
}


class Shrinking(nn.Linear):
    """Changes its weight inside of its call when it is told to, where no door sees it."""

    shrinks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.shrinks:
            with torch.no_grad():
                self.weight.mul_(0.75)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Shrinking(WIDTH, WIDTH) for _ in range(4)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 8)
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.head(nn.functional.dropout(self.norm(x @ self.table), 0.1))


class Run:
    """A model that trains, with what belongs to it."""

    def __init__(self, **said: Any) -> None:
        torch.manual_seed(0)
        with deepoffload.offload_context(**said) as context:
            self.model = Model()
        self.engine = context.engine
        self.optimizer = self.make_optimizer(**said.pop("optimizer", {}))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state = deepoffload.TrainingState(self.model, self.optimizer, schedule=self.schedule)
        self.views: list[Tensor] = []
        torch.manual_seed(1)

    def make_optimizer(self, **settings: Any) -> Any:
        return deepoffload.CPUAdamW(self.model.parameters(), lr=1e-2, **settings)

    def step(self) -> None:
        x = torch.randn(16, WIDTH).to(self.model.head.weight.dtype)
        self.model(x).float().square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def everything(self) -> dict[str, Any]:
        found = snapshot(self.model, self.optimizer)
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return {**found, "buffers": buffers, "schedule": self.schedule.state_dict(), "random": torch.get_rng_state()}

    def close(self) -> None:
        self.engine.close()


Make = Callable[..., Run]
"""The fixture ``make``: makes runs with a durable state, and closes them."""


def trained(make: Make, **said: Any) -> dict[str, Any]:
    """Two steps that are durable, of a run that is over; what it was."""
    run = make(**said)
    for _ in range(2):
        run.step()
        run.state.commit()
    expected = run.everything()
    run.close()
    return expected


def image(source: Path, target: Path) -> None:
    """What a death at this moment leaves: the durable file as it is now."""
    shutil.rmtree(target, ignore_errors=True)
    folder_on_disk(target)
    shutil.copyfile(durable_path(str(source)), durable_path(str(target)))
