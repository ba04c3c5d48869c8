"""What a device holds, and when: budgets, errors that say what is enough, copies that nobody waits for, no growth."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from benchmarks.common.gpt import GPT, tokens_of
from deepoffload import stats
from deepoffload.config import parse_config
from deepoffload.errors import BudgetError, ConfigError, PlacementError
from deepoffload.estimate import Batch, MachineSpec, estimate, from_module
from deepoffload.runtime.choice import TRIMMED_BYTES_MIN
from deepoffload.schedule.events import Event
from deepoffload.timeline import Lane
from examples.gpt.model import Shape
from tests.support import cuda
from tests.support.gpu import Gpu, memory_of, on_cpu
from tests.support.inspect import disk_rates_of, handle_of, pager_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp

WIDTH = 128
deep = partial(mlp, WIDTH, 8)
LAYER_BYTES = 68 << 10
"""Of a layer of ``deep``, in whole pages."""


def rows(gpu: Gpu, seed: int = 0) -> Tensor:
    return gpu.put(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)))


def step(gpu: Gpu, model: nn.Module, optimizer: Any, seed: int) -> Tensor:
    loss = model(rows(gpu, seed)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def peak_of(gpu: Gpu, model: nn.Module, optimizer: Any) -> int:
    """Of the device's own allocator, over three steps, above what was there before the model."""
    gpu.module.synchronize()
    gpu.module.reset_peak_memory_stats()
    for seed in range(3):
        step(gpu, model, optimizer, seed)
    gpu.module.synchronize()
    return int(gpu.module.max_memory_allocated())


def test_no_more_than_the_budget_and_activations(gpu: Gpu) -> None:
    """Plain PyTorch needs activations next to weights and gradients, and one layer's gradients until they leave."""
    plain = gpu.plain(deep)
    for param in plain.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    before = gpu.module.memory_allocated()
    activations = peak_of(gpu, plain, torch.optim.SGD(plain.parameters(), lr=0.0)) - before
    del plain
    gc.collect()

    before = gpu.module.memory_allocated()
    budget = 3 * LAYER_BYTES
    model = gpu.paged(deep, budget)
    taken = peak_of(gpu, model, deepoffload.CPUAdamW(model.parameters(), lr=1e-3)) - before
    in_flight = 3 * LAYER_BYTES  # gradients are kept until they have left
    stand_ins = 64 * 512
    assert budget <= taken <= budget + activations + in_flight + stand_ins
    assert stats(model)["device_evictions"] > 0


def test_a_run_is_what_is_estimated(simulated_gpu: str, nvme_path: Path) -> None:
    """The same table, and peaks within a tenth: where the budget holds a part of the weights, and where it holds state,
    too; with a host budget that holds all, and with one that does not. (Before, the estimate was of two units with
    every budget, and gradients had the host's memory for their way on top of the budget.)"""
    module = torch.get_device_module(simulated_gpu)
    batch, seq, width = 2, 128, 256
    tokens, targets = tokens_of(0, batch, seq)
    with torch.device("meta"):
        subject = from_module(GPT(Shape(width, 4), seq), Batch(batch, seq), lambda call: call(tokens, tokens))
    for device_budget, host_budget in ((4 << 20, 24 << 20), (48 << 20, 256 << 20)):
        before = module.memory_allocated()
        config = {"device_budget": device_budget, "host_budget": host_budget, "precision": "bf16"}
        with deepoffload.offload_context(**config, nvme_path=str(nvme_path), device=simulated_gpu) as context:
            model = GPT(Shape(width, 4), seq)
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)
        module.reset_peak_memory_stats()
        for _ in range(2):
            model(tokens.to(simulated_gpu), targets.to(simulated_gpu)).backward()
            optimizer.step()
            optimizer.zero_grad()
        peak, engine, seen = module.max_memory_allocated() - before, context.engine, stats(model)
        assert engine is not None and engine.placement is not None
        disk = disk_rates_of(engine)
        spec = MachineSpec(
            host_memory_bytes=4 << 30, nvme_bytes=1 << 40, device_memory_bytes=1 << 30,
            nvme_read_bytes_per_s=disk.read_bytes_per_s, nvme_write_bytes_per_s=disk.write_bytes_per_s,
            nvme_mixed_bytes_per_s=disk.mixed_bytes_per_s, host_bytes_per_s=disk.memory_bytes_per_s,
        )  # fmt: skip
        found = estimate(subject, spec, replace(parse_config(config), nvme_budget=engine.budgets.nvme_bytes))
        assert found.memory is not None and found.blocks is not None
        assert found.blocks.table() == engine.placement.table()
        assert peak == pytest.approx(found.memory.device_bytes, rel=0.1)
        assert found.blocks.device_bytes == seen["device_budget_bytes"]
        # the host keeps room for what a device has of the state, in case that an optimizer needs it there
        state_bytes = max(0, device_budget - 2 * 7_375_104)
        assert seen["host_peak_bytes"] <= found.memory.pinned_bytes <= host_budget
        assert found.memory.pinned_bytes <= 1.1 * seen["host_peak_bytes"] + state_bytes
        engine.close()


def test_the_workspaces_of_products_are_no_leak(gpu: Gpu) -> None:
    """The library keeps one for each thread and stream; the fixture, which asks whether all memory is free again at the
    end of each test, gives them back first."""
    before = gpu.module.memory_allocated()
    for stream in (gpu.module.current_stream(), gpu.module.Stream()):
        with gpu.module.stream(stream):
            weights = torch.ones(64, 64, device=gpu.device, requires_grad=True)
            (weights @ weights).sum().backward()  # backward runs on a thread of its own
            del weights
    gpu.module.synchronize()
    assert gpu.module.memory_allocated() > before
    gpu.forget_workspaces()
    assert gpu.module.memory_allocated() <= before
    assert cuda.visible({})["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_little_more_than_the_weights_when_nothing_is_said(gpu: Gpu) -> None:
    model = gpu.paged(deep)
    step(gpu, model, deepoffload.CPUAdamW(model.parameters()), 0)
    seen = stats(model)
    assert seen["device_peak_bytes"] <= 2 * 8 * LAYER_BYTES < seen["device_budget_bytes"] == TRIMMED_BYTES_MIN
    assert seen["device_evictions"] == 0


def test_a_budget_that_is_too_small_names_one_that_is_enough(gpu: Gpu) -> None:
    with pytest.raises(PlacementError, match="device_budget is 8.00 KiB") as caught:
        gpu.paged(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(WIDTH, WIDTH)), 8 << 10)
    assert caught.value.enough_bytes == LAYER_BYTES
    gpu.paged(deep, caught.value.enough_bytes)


def test_a_budget_beyond_the_device_is_refused(gpu: Gpu) -> None:
    free, total = gpu.module.mem_get_info()
    with pytest.raises(BudgetError, match="device_budget is .* free; lower it"):
        gpu.paged(deep, total + 1)


def test_the_share_of_the_process_is_respected(gpu: Gpu) -> None:
    _, total = gpu.module.mem_get_info()
    gpu.module.set_per_process_memory_fraction((64 << 20) / total)
    try:
        with pytest.raises(BudgetError, match="device_budget is"):
            gpu.paged(deep, 65 << 20)
    finally:
        gpu.module.set_per_process_memory_fraction(1.0)


def test_devices_that_do_not_exist(gpu: Gpu) -> None:
    kind = torch.device(gpu.device).type
    with pytest.raises(ConfigError, match=f"{kind}:63 does not exist"), gpu.context(device=f"{kind}:63"):
        pass


def test_views_of_everything_end_in_an_error_that_says_who_holds_what(gpu: Gpu) -> None:
    model = gpu.paged(deep, 3 * LAYER_BYTES)
    held: list[Tensor] = []
    with pytest.raises(BudgetError, match=r"views of it are held[\s\S]*Raise device_budget"):
        for param in model.parameters():
            held.append(param.detach())
    values = [on_cpu(view) for view in held]
    held.clear()
    step(gpu, model, deepoffload.CPUAdamW(model.parameters(), lr=0.0, weight_decay=0.0), 0)
    assert_same_bits(values, [on_cpu(param) for param, _ in zip(model.parameters(), values, strict=False)])


def test_no_growth_over_a_thousand_steps(gpu: Gpu) -> None:
    model = gpu.paged(partial(mlp, 16, 3), 8 << 10, host_budget=1 << 20)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-4)
    inputs = gpu.put(torch.ones(1, 16))

    def steps(count: int) -> tuple[int, int, int]:
        for _ in range(count):
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        gpu.module.synchronize()
        memory_of(model).transfers.poll()
        return (
            gpu.module.memory_allocated(),
            gpu.module.memory_reserved(),
            sum(type(o) is not Event for o in gc.get_objects()),
        )

    allocated, reserved, objects = steps(50)
    after = steps(1000 if not gpu.simulated else 200)
    assert after[0] <= allocated
    assert after[1] <= reserved
    assert after[2] < objects + 200


# -- streams


def slow(gpu: Gpu, model: nn.Module) -> None:
    """Keep both streams of copies busy for a while. (The simulated GPU does copies when somebody waits, no sooner.)"""
    if not gpu.simulated:
        accelerator = memory_of(model).accelerator
        for stream in (accelerator.copy_in, accelerator.copy_out):
            with accelerator.on(stream):
                torch.cuda._sleep(100_000_000)


def test_the_host_does_not_wait_for_copies_to_the_device(gpu: Gpu) -> None:
    model = gpu.paged(deep, 8 * LAYER_BYTES)
    memory, block = memory_of(model), handle_of(model[0].weight).block
    slow(gpu, model)
    memory.acquire(block)
    memory.release(block)
    assert not memory.transfers._in_flight[Lane.TO_DEVICE][-1].event.query()
    assert block.leases == block.copying == 1, "the lease of the host's bytes ends when the copy has"
    assert_same_bits(on_cpu(gpu.plain(deep)(rows(gpu))), on_cpu(model(rows(gpu))))
    gpu.module.synchronize()
    memory.transfers.poll()
    assert block.leases == block.copying == 0


def test_the_host_does_not_wait_for_gradients(gpu: Gpu) -> None:
    model = gpu.paged(partial(mlp, WIDTH, 2), 4 * LAYER_BYTES)
    plain = gpu.plain(partial(mlp, WIDTH, 2))
    plain(rows(gpu)).sum().backward()
    slow(gpu, model)
    model(rows(gpu)).sum().backward()
    in_flight = memory_of(model).transfers._in_flight[Lane.FROM_DEVICE]
    assert any(copy.then is not None and not copy.event.query() for copy in in_flight)
    assert_same_bits(on_cpu(gradients_of(plain)), on_cpu(gradients_of(model)))


def test_memory_is_used_again_only_when_its_stream_is_through(gpu: Gpu) -> None:
    """The next layer's weights come into the memory of those that a busy stream still uses."""
    plain, model = gpu.plain(deep), gpu.paged(deep, LAYER_BYTES + (8 << 10))
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    reference = deepoffload.CPUAdamW(plain.parameters(), lr=1e-2)
    for seed in range(3):
        slow(gpu, model)
        if not gpu.simulated:
            torch.cuda._sleep(20_000_000)
        assert_same_bits(on_cpu(step(gpu, plain, reference, seed)), on_cpu(step(gpu, model, optimizer, seed)))
    assert_same_bits(on_cpu(weights_of(plain)), on_cpu(weights_of(model)))


def test_streams_of_the_program(gpu: Gpu) -> None:
    """Forward and backward on a stream of the program's, and steps between them from another."""
    plain, model = gpu.plain(deep), gpu.paged(deep, 2 * LAYER_BYTES)
    seen = []
    for which in (plain, model):
        optimizer = deepoffload.CPUAdamW(which.parameters(), lr=1e-2)
        streams = [gpu.module.Stream() for _ in range(2)]
        for index in range(4):
            stream = streams[index % 2]
            stream.wait_stream(streams[index % 2 - 1])
            stream.wait_stream(gpu.module.current_stream())
            with gpu.module.stream(stream):
                seen.append(on_cpu(step(gpu, which, optimizer, index)))
            gpu.module.current_stream().wait_stream(stream)
        seen.append(on_cpu(weights_of(which)))
    assert_same_bits(seen[:5], seen[5:])


class Branches(nn.Module):
    """Two, each on a separate stream, which take turns in backward."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.module, self.streams = gpu.module, [gpu.module.Stream() for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        main, x = self.module.current_stream(), self.first(x) * 2
        values = [x, x]
        for stream in self.streams:
            stream.wait_stream(main)
            x.record_stream(stream)
        for depth in range(4):
            for number, stream in enumerate(self.streams):
                with self.module.stream(stream):
                    values[number] = torch.sigmoid(values[number]) if depth else values[number].square()
        for value, stream in zip(values, self.streams, strict=True):
            main.wait_stream(stream)
            value.record_stream(main)
        return self.last(values[0]) + self.last(values[1])


def test_activations_come_back_for_the_stream_that_uses_them(gpu: Gpu) -> None:
    """They were allocated on another one where the branch before has had them copied ahead, and both branches read the
    first ones. (Before, the next copy came into memory that a branch was still reading.)"""
    leave = {"offload_activations": "host", "offload_activations_above": 1024, "activation_budget": 1 << 20}
    build, inputs = partial(Branches, gpu), gpu.put(torch.ones(32, WIDTH))
    seen = []
    for model in (gpu.plain(build), gpu.paged(build, host_budget=8 << 20, **leave)):
        for _ in range(2):
            model(inputs).square().mean().backward()
        seen.append(on_cpu(gradients_of(model)))
    assert stats(model)["activations_taken"] >= 16
    assert_same_bits(*seen)


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_copies(gpu: Gpu, seed: int) -> None:
    """The simulated GPU in another mode: copies are done after random delays, by themselves."""
    if not gpu.simulated:
        pytest.skip("a real device has its own order")
    from tests.support.simulated_gpu import settings

    settings("random", seed=seed)
    plain, model = gpu.plain(deep), gpu.paged(deep, 2 * LAYER_BYTES, host_budget=1536 << 10)
    mine, other = (deepoffload.CPUAdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    for number in range(4):
        assert_same_bits(on_cpu(step(gpu, plain, other, number)), on_cpu(step(gpu, model, mine, number)))
    assert_same_bits(on_cpu(weights_of(plain)), on_cpu(weights_of(model)))


def different() -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for width in (WIDTH, 32, 32, WIDTH)))


def test_a_weight_on_its_way_to_the_host_is_not_brought_back_before_it_is_there(gpu: Gpu) -> None:
    wanted = on_cpu(gpu.plain(different)[2].weight.detach()) * 2
    budgets = {"device_budget": LAYER_BYTES + 2 * (8 << 10), "host_budget": "8MiB"}
    with deepoffload.offload_context(device=gpu.device, nvme_path=str(gpu.nvme_path), **budgets):  # poison waits
        torch.manual_seed(0)
        model = different()
    memory, order = memory_of(model), pager_of(model).order
    first, between, written, last = [handle_of(layer.weight).block for layer in model]
    memory.acquire(first)
    memory.acquire(between)
    with torch.no_grad():
        model[2].weight.mul_(2)
    slow(gpu, model)
    memory.release(first)
    order.stamp(first)
    memory.acquire(last)  # in the place of the first one, when that of the written one was not enough
    assert not memory.shows(written) and not memory.shows(first)
    for block in (last, between):
        memory.release(block)
        memory.refresh(block)  # its copy goes, and leaves room where the written one has not been
    memory.pump([(0, written.id)], frozenset())
    assert_same_bits(wanted, on_cpu(model[2].weight.detach()))
