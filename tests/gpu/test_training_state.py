"""Training states of a device with separate memory, saved and loaded into the host, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepoffload
from tests.checkpoint.background import Throttle
from tests.checkpoint.training import adamw, snapshot
from tests.gpu.test_state_on_device import loss_of, paged
from tests.support.gpu import on_cpu
from tests.support.loops import assert_same_bits


def steps(model: Any, optimizer: Any, first: int, device: str) -> list[float]:
    losses = []
    for number in range(first, first + 2):
        loss = loss_of(model, number, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "in_the_background"])
@pytest.mark.parametrize("tier", ["nvme", "device"])
def test_into_the_host_and_back(simulated_gpu: str, tier: str, wait: bool, tmp_path: Path) -> None:
    on_device = {"precision": "bf16", "device_budget": 1 << 21, "offload_optimizer": tier}
    swap = tmp_path / "swap"
    swap.mkdir()
    model, engine = paged(simulated_gpu, swap, **on_device)
    optimizer = adamw(model)
    steps(model, optimizer, 0, simulated_gpu)
    with Throttle().in_force():
        handle = deepoffload.TrainingState(model, optimizer).save(tmp_path / "first", wait=wait)
        saved = on_cpu(snapshot(model, optimizer))
        expected = [steps(model, optimizer, 2, simulated_gpu), on_cpu(snapshot(model, optimizer))]
        if not isinstance(handle, str):
            handle.wait()
    assert (engine.stats()["host_state_bytes"] == 0) == (tier == "device")
    engine.close()

    model, engine = paged("cpu", swap, precision="bf16")
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    optimizer = adamw(model)
    state = deepoffload.TrainingState(model, optimizer)
    state.load(tmp_path / "first")
    assert_same_bits(saved, snapshot(model, optimizer))
    state.save(tmp_path / "second")
    engine.close()

    model, engine = paged(simulated_gpu, swap, **on_device)
    optimizer = adamw(model)
    deepoffload.TrainingState(model, optimizer).load(tmp_path / "second")
    assert_same_bits(saved, on_cpu(snapshot(model, optimizer)))
    found = [steps(model, optimizer, 2, simulated_gpu), on_cpu(snapshot(model, optimizer))]
    assert_same_bits(expected, found)
    engine.close()
