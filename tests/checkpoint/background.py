"""Saves that go on while the program does, held against waiting ones at the same steps of an equal run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.checkpoint import copying
from deepoffload.memory import snapshots

SAVE_THREAD = "deepoffload-save"


def saving_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == SAVE_THREAD]


class Throttle:
    """Lets saves copy as many steps of 4 KiB as it grants, and no more until somebody waits for them."""

    def __init__(self) -> None:
        self._granted = 0

    def grant(self, steps: int) -> None:
        self._granted += steps

    def may_go(self) -> bool:
        self._granted -= self._granted > 0
        return self._granted > 0

    @contextmanager
    def in_force(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(snapshots, "STEP_BYTES", 4096)
            patch.setattr(copying, "WAIT_S", 0.001)
            patch.setattr(copying.Pace, "may_go", lambda pace: self.may_go())
            yield


def contents(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint but the time at which it was written."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    manifest = json.loads(found.pop("manifest.json"))
    del manifest["saved_ns"], manifest[next(iter(manifest))]  # and the checksum, which comes first
    return {**found, "manifest": manifest}


def assert_same_checkpoints(expected: Path, found: Path) -> None:
    tags = sorted(path.name for path in expected.iterdir() if path.is_dir())
    assert tags and tags == sorted(path.name for path in found.iterdir() if path.is_dir())
    for tag in tags:
        one, other = contents(expected / tag), contents(found / tag)
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == other[name], (tag, name)


def mlp() -> nn.Module:
    """Several units, with a table, norms and a parameter of the root's."""
    return nn.Sequential(nn.Embedding(40, 32), *[Layer() for _ in range(4)], nn.Linear(32, 40))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = x + self.second(torch.relu(self.first(self.norm(x))))
        return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    tokens = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(number))
    tokens = tokens.to(next(model.parameters()).device)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


Program = Callable[[nn.Module, torch.optim.Optimizer, deepoffload.TrainingState, Path, bool], Any]
"""What is run twice: with saves that wait (True), and with saves that do not."""
