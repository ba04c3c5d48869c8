"""Where nothing is ever moved, small gradients stay tensors of autograd's own; they must count, clip and go like all
others. And a gradient that is not in our memory must outlive a step that failed half-way."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import IoFailure
from deepoffload.io.engine import IoEngine
from deepoffload.optim.gradients import LIGHT_BYTES, LIGHT_NUMEL
from deepoffload.params.parameter import OffloadedGradient
from deepoffload.runtime import disk as disk_module
from tests.support.inspect import io_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import RESIDENT, SERIAL, Paging, plain


def mixed() -> nn.Sequential:
    """Weights of 4096 and of 32768 elements, and biases."""
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))


def test_only_small_ones_stay_with_autograd(paging: Paging) -> None:
    model = paging.build(mixed, RESIDENT)
    model(rows()).sum().backward()
    for param in model.parameters():
        assert (type(param.grad) is OffloadedGradient) == (param.numel() > LIGHT_NUMEL)
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_their_memory_is_bounded(paging: Paging) -> None:
    model = paging.build(lambda: nn.Sequential(*[nn.Linear(128, 128) for _ in range(48)]), RESIDENT)
    model(rows(width=128)).sum().backward()
    outside = sum(p.grad.nbytes for p in model.parameters() if type(p.grad) is torch.Tensor)
    landed = sum(p.grad.nbytes for p in model.parameters() if type(p.grad) is OffloadedGradient)
    assert 0 < outside <= LIGHT_BYTES and outside + landed == sum(p.nbytes for p in model.parameters())
    assert deepoffload.stats(model)["host_gradient_bytes"] >= landed


def inputs(model: nn.Module, seed: int = 3) -> torch.Tensor:
    return rows(seed=seed).to(model[0].weight.dtype)


def accumulated_and_clipped(model: nn.Module) -> Any:
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
    norms = []
    for seed in range(3):
        for micro in range(3):
            model(inputs(model, 10 * seed + micro)).square().sum().backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad(set_to_none=seed == 1)
    return weights_of(model), norms


def clipped_by_torch(model: nn.Module) -> Any:
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    norms = []
    for seed in range(3):
        model(rows(seed=seed)).square().sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        model.zero_grad()
    return weights_of(model), norms


def overflown(model: nn.Module) -> Any:
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    optimizer.skip_non_finite = True
    applied = []
    for bad in (False, True, False):
        model(inputs(model)).sum().backward()
        if bad:
            model[0].weight.grad[3, 4] = float("inf")
        optimizer.step()
        applied.append(optimizer.applied)
        optimizer.zero_grad()
    assert applied == [True, False, True]
    return weights_of(model)


def shared_gradients(model: nn.Module) -> Any:
    """One that was kept over ``zero_grad``, one that was replaced, one that another parameter shares."""
    model(rows()).sum().backward()
    kept = model[0].weight.grad
    model.zero_grad()
    model(rows(seed=5)).sum().backward()
    model[2].bias.grad = model[2].bias.grad * 2
    model[0].bias.grad = model[4].bias.grad
    model(rows(seed=6)).sum().backward()
    return kept, gradients_of(model)


@pytest.mark.parametrize("program", [accumulated_and_clipped, overflown], ids=lambda program: program.__name__)
@pytest.mark.parametrize("precision", ["keep", "bf16"])
def test_as_where_all_gradients_land(paging: Paging, program: Callable[[Any], Any], precision: str) -> None:
    programs = [
        program(paging.build(mixed, setting, key="mixed"))
        for setting in (replace(RESIDENT, precision=precision), replace(SERIAL, precision=precision))
    ]
    assert_same_bits(programs[1], programs[0])


@pytest.mark.parametrize("program", [clipped_by_torch, shared_gradients], ids=lambda program: program.__name__)
def test_as_in_plain_pytorch(paging: Paging, program: Callable[[Any], Any]) -> None:
    assert_same_bits(program(plain(mixed)), program(paging.build(mixed, RESIDENT)))


def own_gradients(paging: Paging) -> tuple[Any, range, bool]:
    """A step of gradients that the program has set itself. When the disk fails in it, the program drops the gradients
    and goes on. Returns the weights, the chunks moved in the step, and whether it failed."""
    model = paging.build(mlp, SERIAL, key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    for index, param in enumerate(model.parameters()):
        param.grad = torch.full(param.shape, 0.1 * (index + 1))
    io = io_of(model)
    assert io is not None
    start = io.stats()["chunks_done"]
    failed = False
    try:
        optimizer.step()
    except IoFailure:
        failed = True
    end = io.stats()["chunks_done"]
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    model(rows())
    return weights_of(model), range(start + 1, end), failed


def test_a_failed_step_keeps_the_gradients_that_it_needs(paging: Paging, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, chunks, _ = own_gradients(paging)
    failures = 0
    for place in chunks[:: len(chunks) // 5]:
        monkeypatch.setattr(disk_module, "IoEngine", partial(IoEngine, fault_script=f"nth={place} errno={errno.EIO}"))
        got, _, failed = own_gradients(paging)
        failures += failed
        assert_same_bits(expected, got)
    assert failures, "nothing has failed: this tested nothing"
