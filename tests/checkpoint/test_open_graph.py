"""Saves and commits between a forward and its backward: autograd may have kept the weights themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from tests.support.disks import folder_on_disk

HELD = {"roomy": "64MiB", "tight": "200KiB"}


class Layer(nn.Module):
    """Its backward reads the weights of a norm and of a convolution from where autograd has kept them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.norm(self.linear(x)).unsqueeze(1)).squeeze(1)


def save(state: Any, folder: Path) -> None:
    state.save(folder / "saved")


def save_in_background(state: Any, folder: Path) -> Any:
    return state.save(folder / "saved", wait=False)


def commit(state: Any, folder: Path) -> None:
    state.commit()


def nothing(state: Any, folder: Path) -> None:
    pass


def run(between: Callable[[Any, Path], Any], folder: Path, held: str, overlap: str) -> list[Tensor]:
    """Gradients of three steps, with two micro-batches each, and the weights after them."""
    folder_on_disk(folder)
    durability = {"every": 1} if between is commit else False
    torch.manual_seed(0)
    with deepoffload.offload_context(
        host_budget=HELD[held], nvme_path=str(folder), step_overlap=overlap, durability=durability
    ) as context:
        model = nn.Sequential(*[Layer() for _ in range(6)])
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    state = deepoffload.TrainingState(model, optimizer)
    seen: list[Tensor] = []
    handle = None
    for step in range(3):
        for micro in range(2):
            torch.manual_seed(2 * step + micro)
            loss = model(torch.randn(4, 64)).square().mean()
            if step and not micro:
                handle = between(state, folder)
            loss.backward()
        seen += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    seen += [param.detach().clone() for param in model.parameters()]
    if handle is not None:
        handle.wait()
    assert context.engine is not None
    context.engine.close()
    return seen


@pytest.mark.parametrize("overlap", ["none", "deferred"])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("between", [save, save_in_background, commit], ids=lambda between: between.__name__)
def test_backward_finds_its_weights(
    between: Callable[[Any, Path], Any], held: str, overlap: str, tmp_path: Path
) -> None:
    expected = run(nothing, tmp_path / "plain", held, overlap)
    found = run(between, tmp_path / "run", held, overlap)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
