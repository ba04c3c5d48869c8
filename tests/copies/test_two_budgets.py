"""The host's budget and the device's, both small: more of one is never refused, and one refusal says all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload import offload_context
from deepoffload.errors import BudgetError, PlacementError
from deepoffload.optim.device_landing import SLOT_BYTES_MIN, SLOTS

WIDTH = 64
LAYER_BYTES = 20 << 10
"""Of weights and bias, in whole pages."""


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(8)))


def paged(build: Callable[[], nn.Module], path: Path, host_budget: int, device_budget: int) -> nn.Module:
    with offload_context(
        device="cpu",
        device_budget=device_budget,
        host_budget=host_budget,
        nvme_path=str(path),
        debug={"copies": True, "poison": True},
    ):
        torch.manual_seed(0)
        return build()


def train(model: nn.Module) -> None:
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_more_host_memory_is_never_refused(tmp_path: Path) -> None:
    """A larger host budget suggests larger units. A call shows all of one, and the device budget is small."""
    device_budget = LAYER_BYTES
    for host_budget in (1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 24, 1 << 26):
        train(paged(deep, tmp_path, host_budget, device_budget))


@pytest.mark.parametrize("host_budget", [1 << 20, 1 << 26])
def test_the_device_budget_that_is_named_is_the_least(tmp_path: Path, host_budget: int) -> None:
    with pytest.raises(PlacementError, match="device_budget is 4.00 KiB") as refused:
        paged(deep, tmp_path, host_budget, 4096)
    assert refused.value.enough_bytes == LAYER_BYTES
    train(paged(deep, tmp_path, host_budget, LAYER_BYTES))


def test_both_budgets_too_small_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(PlacementError) as refused:
        paged(deep, tmp_path, SLOTS * SLOT_BYTES_MIN + 4096, 4096)
    assert refused.value.enough_bytes is not None
    (on_device,) = re.findall(
        r"device_budget is .*raise it to at least (\d+) bytes", str(refused.value).splitlines()[0]
    )
    assert f"to at least {refused.value.enough_bytes} bytes" in str(refused.value)
    train(paged(deep, tmp_path, refused.value.enough_bytes, int(on_device)))


@pytest.mark.parametrize("how", ["offload_context", "initialize"])
@pytest.mark.parametrize("host_budget", [4096, SLOTS * SLOT_BYTES_MIN - 4096, SLOTS * SLOT_BYTES_MIN])
def test_the_way_of_gradients_is_named_together_with_the_model(tmp_path: Path, host_budget: int, how: str) -> None:
    with pytest.raises(BudgetError) as refused:
        if how == "offload_context":
            paged(deep, tmp_path, host_budget, 1 << 20)
        else:
            config = {"device": "cpu", "device_budget": 1 << 20, "host_budget": host_budget, "nvme_path": str(tmp_path)}
            deepoffload.initialize(model=deep(), config=config | {"debug": {"copies": True}})
    enough = refused.value.enough_bytes
    assert enough is not None and f"to at least {enough} bytes" in str(refused.value)
    train(paged(deep, tmp_path, enough, 1 << 20))
    with pytest.raises(BudgetError):
        paged(deep, tmp_path, enough - 4096, 1 << 20)


def test_the_way_of_gradients_needs_room_for_a_model_that_comes_later(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="needed for gradients on their way"):
        paged(nn.Identity, tmp_path, 4096, 1 << 20)
