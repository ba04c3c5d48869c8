"""How much is done, counted, where the time that it takes is a device's: copies, places, waits. Each count has what it
was before there was a better way."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.copies import ring
from deepoffload.copies.fenced_arena import DeviceArena
from deepoffload.copies.in_flight import DeviceTransfers
from deepoffload.copies.ring import INLINE_BYTES
from deepoffload.memory.block import Block
from deepoffload.native import cpu_adam
from deepoffload.optim.threads import num_threads
from deepoffload.runtime.context import engine_of
from deepoffload.timeline import Lane
from tests.support.gpu import Gpu, memory_of, on_cpu
from tests.support.inspect import units_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
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


def blocks_of(width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)) for _ in range(LAYERS))
    )


def gradient_copies(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, width: int, **said: Any) -> tuple[int, int, int]:
    """Copies in one backward, gradients and units; losses and weights are those of plain PyTorch."""
    model, plain = gpu.paged(partial(blocks_of, width), **said), gpu.plain(partial(blocks_of, width))
    mine, other = (deepoffload.CPUAdamW(each.parameters(), lr=1e-2, max_grad_norm=0.1) for each in (model, plain))
    launched: list[Lane] = []

    def launch(self: DeviceTransfers, lane: Lane, *rest: Any, **more: Any) -> None:
        launched.append(lane)
        real(self, lane, *rest, **more)

    real = DeviceTransfers.launched
    inputs = gpu.put(torch.randn(3, width, generator=torch.Generator().manual_seed(1)))
    for number in range(3):
        for each, optimizer in ((model, mine), (plain, other)):
            for _ in range(2):  # the second one is added to the first
                each(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:
            monkeypatch.setattr(DeviceTransfers, "launched", launch)
    monkeypatch.undo()
    assert_same_bits(on_cpu(weights_of(plain)), on_cpu(weights_of(model)))
    copies = launched.count(Lane.FROM_DEVICE)
    assert copies % 2 == 0
    return copies // 2, len(list(model.parameters())), len(units_of(model))


def test_small_gradients_of_a_unit_leave_in_one_copy(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """(Before, each one had a copy and a slot.)"""
    copies, gradients, units = gradient_copies(gpu, monkeypatch, 32)
    assert (copies, gradients) == (units, 6 * LAYERS)
    copies, gradients, units = gradient_copies(gpu, monkeypatch, 128, device_budget=1 << 20, host_budget=8 << 20)
    assert units <= copies < gradients, "those of weights have copies of their own"


class FullDevice:
    """``torch``, which has no memory left."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("the device is full")


def test_small_gradients_leave_a_full_device(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a separate copy. (Before, the model was lost, to programs that go on after such an error, too.)"""
    monkeypatch.setattr(ring, "torch", FullDevice())
    copies, _, units = gradient_copies(gpu, monkeypatch, 32)
    assert copies == units, "they are still one pack"


def test_large_gradients_land_on_a_thread_that_does_nothing_else(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not on autograd's, which launches for the device meanwhile. (Before, all did.)"""
    seen: list[tuple[bool, bool, int]] = []

    def land(*rest: Any, num_threads: int, **more: Any) -> Any:
        numel = rest[2]
        mine = threading.current_thread().name.startswith("deepoffload gradients")
        seen.append((4 * numel > INLINE_BYTES, mine, num_threads))
        return real(*rest, num_threads=num_threads, **more)

    real = cpu_adam.land
    monkeypatch.setattr(cpu_adam, "land", land)
    budgets = {"device_budget": 4 << 20, "host_budget": 32 << 20}
    model, plain = gpu.paged(partial(blocks_of, 256), **budgets), gpu.plain(partial(blocks_of, 256))
    inputs = gpu.put(torch.randn(3, 256, generator=torch.Generator().manual_seed(1)))
    for each in (model, plain):
        each(inputs).square().mean().backward()
    assert_same_bits(on_cpu(gradients_of(plain)), on_cpu(gradients_of(model)))
    assert {mine for large, mine, _ in seen if large} == {True} and {large for large, *_ in seen} == {True, False}
    assert max(threads for *_, threads in seen) <= max(1, num_threads() - 2)
    engine_of(model).close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deepoffload gradients")]
