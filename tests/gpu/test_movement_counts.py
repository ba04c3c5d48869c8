"""How much is done, counted, where the time that it takes is a device's: copies, places, waits. Each count has what it
was before there was a better way."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.copies.fenced_arena import DeviceArena
from deepoffload.memory.block import Block
from deepoffload.timeline import Lane
from tests.support.gpu import Gpu, memory_of, on_cpu
from tests.support.inspect import units_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp

WIDTH, LAYERS = 64, 6
build = partial(mlp, WIDTH, LAYERS)


def rows(gpu: Gpu, seed: int = 0) -> Tensor:
    return gpu.put(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)))


def step(gpu: Gpu, model: nn.Module, optimizer: Any, seed: int = 0) -> None:
    model(rows(gpu, seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def addresses(gpu: Gpu, model: nn.Module) -> list[int]:
    found: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: found.append(layer.weight.data_ptr()))
        for layer in model
        if isinstance(layer, nn.Linear)
    ]
    model(rows(gpu))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("step_overlap", ["none", "deferred", "in_backward"])
def test_updated_weights_come_into_the_same_range(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, step_overlap: str) -> None:
    """Where all fit, no range is allocated after the first step. (Before, one for each unit and step.)"""
    model, plain = gpu.paged(build, step_overlap=step_overlap), gpu.plain(build)
    mine, other = (deepoffload.CPUAdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    step(gpu, model, mine)
    step(gpu, plain, other)
    taken: list[int] = []

    def allocate(self: DeviceArena, nbytes: int, *, high: bool = False) -> int | None:
        taken.append(nbytes)
        return real(self, nbytes, high=high)

    before, real = addresses(gpu, model), DeviceArena.allocate
    monkeypatch.setattr(DeviceArena, "allocate", allocate)
    for seed in range(3):
        step(gpu, model, mine, seed)
        step(gpu, plain, other, seed)
        assert addresses(gpu, model) == before
    assert taken == []
    assert_same_bits(on_cpu(weights_of(plain)), on_cpu(weights_of(model)))


class Happens:
    """An event that happens when the test says so."""

    def __init__(self) -> None:
        self.has = False

    def query(self) -> bool:
        return self.has

    def synchronize(self) -> None:
        self.has = True


def test_a_copy_that_waits_for_the_device_holds_up_none_from_it(gpu: Gpu) -> None:
    """Gradients that have arrived land while a weight is still on its way (before, none of them did), but not while the
    bytes that they change are."""
    model = gpu.paged(build)
    memory, tiers = memory_of(model), memory_of(model).tiers
    first, *others = (unit.weights for unit in units_of(model))
    late, ended = Happens(), []

    def launch(lane: Lane, event: Any, block: Block) -> None:
        tiers.acquire(block)
        memory.transfers.launched(lane, event, block, block.nbytes, lambda: ended.append((lane, block)))

    gpu.module.synchronize()
    memory.transfers.end()
    launch(Lane.TO_DEVICE, late, first)
    come = [Happens() for _ in (*others, first)]
    for event, block in zip(come, (*others, first), strict=True):
        launch(Lane.FROM_DEVICE, event, block)
        event.has = True
    memory.transfers.poll()
    assert ended == [(Lane.FROM_DEVICE, block) for block in others]
    assert first.copying == 2 and not late.has
    assert memory.transfers.end_oldest(Lane.FROM_DEVICE, "the test waits")
    assert ended[len(others) :] == [(Lane.TO_DEVICE, first), (Lane.FROM_DEVICE, first)] and late.has
    assert not memory.transfers.end_oldest(Lane.FROM_DEVICE, "nothing is left")


def test_weights_are_aligned_as_matrix_products_ask(gpu: Gpu) -> None:
    """To 256 bytes: cuBLASLt looks at so much, and plain PyTorch's allocator gives 512. (Before, to 64.)"""
    model = gpu.paged(lambda: nn.Sequential(*(nn.Linear(width, 24) for width in (24, 24, 24)), nn.LayerNorm(24)))
    seen: list[int] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda layer, args: seen.extend(p.data_ptr() % 256 for p in layer.parameters()))
    model(gpu.put(torch.ones(2, 24)))
    assert seen == [0] * 8
