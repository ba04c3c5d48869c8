"""Modules that change their weights inside forward, in the ways that move no version counter, train as in plain
PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload


class Editing(nn.Module):
    """A layer that edits its weight before it uses it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            self.weight.data.clamp_(-0.5, 0.5)
        elif self.how == "assigned":
            self.weight.data = self.weight.data.clamp(-0.5, 0.5)
        elif self.how == "numpy":
            self.weight.detach().numpy()[0] = 0.1
        else:
            with torch.no_grad():
                self.weight.set_(self.weight.clamp(-0.5, 0.5))
        return torch.tanh(x @ self.weight)


def _train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    x = torch.linspace(-1, 1, 3 * 64).view(3, 64)
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("evict_always", [False, True])
@pytest.mark.parametrize("how", ["in place", "assigned", "numpy", "set_"])
def test_edits_inside_forward_are_kept(tmp_path: Path, how: str, evict_always: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[Editing(how) for _ in range(6)])

    plain = build()
    debug = {"poison": True, "evict_always": evict_always}
    with deepoffload.offload_context(host_budget="60KiB", nvme_path=tmp_path, debug=debug):
        paged = build()
    expected = _train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert _train(paged, torch.optim.SGD(paged.parameters(), lr=0.1)) == expected
    for one, other in zip(plain.parameters(), paged.parameters(), strict=True):
        assert torch.equal(one, other.data)
