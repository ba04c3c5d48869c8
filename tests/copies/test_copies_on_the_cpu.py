"""The CPU as a device with copies of its own (``debug.copies``): the same bits as plain PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload import offload_context, stats
from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.errors import BudgetError, PlacementError
from deepoffload.runtime.context import engine_of
from tests.support.inspect import pager_of, shown_memory_of, units_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import TinyGPT, batch, next_token_loss

HOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Setting:
    """How a model is paged. ``room``: the device budget as a multiple of the least."""

    name: str
    room: float
    nvme: bool = False
    prefetch: bool = True
    evict_always: bool = False
    step_overlap: str = "deferred"

    def __str__(self) -> str:
        return self.name


SETTINGS = (
    Setting("least", 1.0),
    Setting("some", 3.0),
    Setting("everything", 20.0),
    Setting("evicting", 2.0, nvme=True, prefetch=False, evict_always=True),
    Setting("serial", 1.5, prefetch=False, step_overlap="none"),
    Setting("in_backward", 2.0, step_overlap="in_backward"),
    Setting("speculative", 2.0, step_overlap="speculative"),
)


def paged(build: Callable[[], nn.Module], path: Path, device_budget: int, setting: Setting = SETTINGS[0]) -> Any:
    with offload_context(
        device="cpu",
        device_budget=device_budget,
        host_budget=HOST_BYTES,
        nvme_path=str(path),
        offload_param="nvme" if setting.nvme else None,
        prefetch=setting.prefetch,
        step_overlap=setting.step_overlap,
        debug={"copies": True, "poison": True, "evict_always": setting.evict_always},
    ):
        torch.manual_seed(0)
        return build()


def least_bytes(build: Callable[[], nn.Module], path: Path) -> int:
    with pytest.raises(PlacementError) as refused:
        paged(build, path, 4096)
    assert refused.value.enough_bytes is not None
    return refused.value.enough_bytes


def train(model: nn.Module, *, clip: float | None, steps: int = 3) -> list[Any]:
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    seen: list[Any] = [{name: weight.clone() for name, weight in weights_of(model).items()}]
    for step in range(steps):
        for micro in range(2 if clip is not None else 1):
            loss = next_token_loss(model, batch(10 * step + micro))
            loss.backward()
            seen.append(loss.detach())
        if clip is not None:
            seen += [{name: grad.clone() for name, grad in gradients_of(model).items()}]
            seen += [nn.utils.clip_grad_norm_(model.parameters(), clip)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, {name: weight.clone() for name, weight in weights_of(model).items()}]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_training_has_the_bits_of_plain_pytorch(tmp_path: Path, setting: Setting) -> None:
    build = partial(TinyGPT, depth=2)
    clip = None if setting.step_overlap == "in_backward" else 0.5
    torch.manual_seed(0)
    expected = train(build(), clip=clip)
    model = paged(build, tmp_path, int(least_bytes(build, tmp_path) * setting.room), setting)
    assert_same_bits(expected, train(model, clip=clip))
    numbers = stats(model)
    assert numbers["device_bytes_in"] > 0 and numbers["device_bytes_out"] > 0
    assert numbers["device_peak_bytes"] <= numbers["device_budget_bytes"]
    assert numbers["host_locked_bytes"] == 0
    if setting.room < 10:
        assert numbers["device_evictions"] > 0


def test_what_is_written_to_a_copy_reaches_the_stored_bytes(tmp_path: Path) -> None:
    model = paged(partial(nn.Linear, 16, 16), tmp_path, 1 << 16)
    memory, (unit,) = shown_memory_of(model), units_of(model)
    with torch.no_grad():
        model.weight.mul_(0).add_(7)
    memory.settle(unit.weights)
    (weight,) = [handle for handle in unit.handles if handle.tensor is model.weight]
    with pager_of(model).lock:
        assert torch.equal(weight.host_view(), torch.full((16, 16), 7.0))
    assert model.weight.data_ptr() != weight.address(), "the program is shown a copy"


def test_views_of_a_copy_keep_its_memory(tmp_path: Path) -> None:
    build = partial(TinyGPT, depth=2)
    model = paged(build, tmp_path, 2 * least_bytes(build, tmp_path))
    held = [param.detach() for param in list(model.parameters())[:2]]
    values = [view.clone() for view in held]
    memory = shown_memory_of(model)
    for seed in range(2):
        with torch.no_grad():
            next_token_loss(model, batch(seed))
        memory.evict_all(frozenset())
    assert_same_bits(values, held)
    with pytest.raises(BudgetError, match="views of it are held"):
        kept = [param.detach() for param in model.parameters()]
        del kept


def test_the_engine_gives_the_memory_back(tmp_path: Path) -> None:
    model = paged(partial(nn.Linear, 64, 64), tmp_path, 1 << 16)
    memory = shown_memory_of(model)
    assert isinstance(memory, CopyMemory)
    model(torch.ones(1, 64))
    engine_of(model).close()
    assert memory.arena._bytes is None
    del model
    gc.collect()
    assert list(tmp_path.iterdir()) == []
