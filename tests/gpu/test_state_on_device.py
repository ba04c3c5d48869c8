"""``offload_optimizer="device"``: optimizer state lives on the device and is updated there, as far as it has room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload import offload_context
from deepoffload.optim.device_update import split
from tests.native.every_split import BORDERS, UPPER_HALVES, numbers
from tests.native.every_split import split as host_split

STEPS = 6


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.LayerNorm(64))]
    return nn.Sequential(nn.Embedding(50, 64), *layers, nn.Linear(64, 50))


def loss_of(model: nn.Module, number: int, device: str) -> Tensor:
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(number)).to(device)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def paged(device: str, path: Path, **said: Any) -> tuple[nn.Module, Any]:
    config = {"device": device, "host_budget": "8MiB", "nvme_path": str(path), "debug": {"poison": True}}
    with offload_context({**config, **said}) as context:
        model = build()
    return model, context.engine


def train(
    model: nn.Module, optimizer: Any, device: str, meanwhile: Callable[[int], None] = lambda step: None
) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        meanwhile(step)
    return losses


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().float().cpu() for param in model.parameters()]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("budget", [1 << 21, 250_000], ids=["all", "part"])
def test_as_on_the_host(simulated_gpu: str, tmp_path: Path, precision: str, budget: int) -> None:
    results = []
    for tier in ("nvme", "device"):
        said = {"precision": precision, "device_budget": budget, "offload_optimizer": tier}
        model, engine = paged(simulated_gpu, tmp_path, **said)
        optimizer: Any = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)

        def meddle(step: int, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            if step == 2:
                with torch.no_grad():
                    model[-1].bias.add_(0.5)  # an edit is the master from now on, wherever that is
            if step == 3:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        losses = train(model, optimizer, simulated_gpu, meddle)
        stats = engine.stats()
        moments = [value["exp_avg"].clone() for value in optimizer.state_dict()["state"].values()]
        results.append((losses, values(model), moments, stats["host_state_bytes"], stats["device_peak_bytes"]))
        assert stats["device_peak_bytes"] <= budget
        engine.close()
    (losses, weights, moments, on_host, _), (losses_there, weights_there, moments_there, left, _) = results
    assert left == 0 if budget == 1 << 21 else 0 < left < on_host
    assert losses_there == pytest.approx(losses, rel=1e-3)
    for ours, theirs in zip((*weights_there, *moments_there), (*weights, *moments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7 if precision != "fp32" else 1e-4, atol=1e-4)


def test_a_split_is_that_of_the_host(simulated_gpu: str) -> None:
    """For every bf16 number at every border of rounding."""
    for bits in numbers(BORDERS, UPPER_HALVES // 4):
        hi, lo, _ = host_split(bits)
        master = torch.from_numpy(bits.view(np.float32)).to(simulated_gpu)
        weight = torch.zeros_like(master, dtype=torch.bfloat16)
        remainder = torch.zeros_like(master, dtype=torch.int16)
        split(weight, remainder, master)
        number = ~np.isnan(bits.view(np.float32))
        assert torch.equal(weight.isnan().cpu(), torch.from_numpy(~number))
        assert np.array_equal(weight.view(torch.int16).cpu().numpy()[number], hi.view(np.int16)[number])
        assert np.array_equal(remainder.cpu().numpy()[number], lo[number])


@pytest.mark.parametrize("overlap", ["none", "deferred", "in_backward"])
def test_the_same_bits_whenever_it_runs(simulated_gpu: str, tmp_path: Path, overlap: str) -> None:
    found = []
    for step_overlap in ("none", overlap):
        said = {"precision": "bf16", "offload_optimizer": "device", "step_overlap": step_overlap}
        model, engine = paged(simulated_gpu, tmp_path, **said)
        train(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2), simulated_gpu)
        found.append(values(model))
        engine.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["CPULion", "CPUSGD", "8bit", "amsgrad", "paged"])
def test_what_the_device_has_no_kernel_for_goes_to_the_host(simulated_gpu: str, tmp_path: Path, kind: str) -> None:
    def make(params: Any) -> Any:
        if kind in ("8bit", "amsgrad"):
            return deepoffload.CPUAdamW(params, lr=1e-2, **({"state_dtype": kind} if kind == "8bit" else {kind: True}))
        if kind == "paged":
            return deepoffload.paged(torch.optim.RMSprop, params, lr=1e-3)
        return getattr(deepoffload, kind)(params, lr=1e-3)

    found = []
    for tier in ("nvme", "device"):
        model, engine = paged(simulated_gpu, tmp_path, precision="bf16", offload_optimizer=tier)
        train(model, make(model.parameters()), simulated_gpu)
        found.append(values(model))
        engine.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
