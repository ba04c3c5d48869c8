"""Eight threads, each with its own model and optimizer, train as one after the other in plain PyTorch would."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from tests.support.inspect import leases_of, pager_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.paging import TIGHT, Paging

THREADS = 8
STEPS = 4


@pytest.fixture(autouse=True)
def often_switched() -> Iterator[None]:
    """Threads take turns a hundred times as often as Python's default has it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    yield
    sys.setswitchinterval(before)


def block(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))


def build() -> nn.Module:
    return nn.Sequential(*(block() for _ in range(4)))


def train(model: nn.Module, thread: int, overlap: str) -> list[float]:
    clipping = None if overlap == "in_backward" else 1.0
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=clipping)
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(STEPS * thread + step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def together(models: list[nn.Module], overlap: str) -> list[Any]:
    """What each thread's training gives, or the error that it ends with."""
    results: list[Any] = [None] * len(models)
    start = threading.Barrier(len(models))

    def run(thread: int) -> None:
        start.wait()
        try:
            results[thread] = train(models[thread], thread, overlap)
        except Exception as error:
            results[thread] = error

    threads = [threading.Thread(target=run, args=(thread,), daemon=True) for thread in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    return results


@pytest.mark.parametrize(
    ("contexts", "overlap"),
    [("one", "none"), ("one", "in_backward"), ("one each", "deferred"), ("one each", "in_backward")],
)
def test_equal_to_plain(paging: Paging, contexts: str, overlap: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = [build() for _ in range(THREADS)]
    expected = [train(model, thread, overlap) for thread, model in enumerate(plain)]

    def context(share: int) -> deepoffload.offload_context:
        return deepoffload.offload_context(
            host_budget=share * (160 << 10),
            nvme_path=str(paging.nvme_path),
            step_overlap=overlap,
            debug={"poison": True},
        )

    torch.manual_seed(0)
    models: list[nn.Module] = []
    if contexts == "one":
        with context(THREADS):
            models += [build() for _ in range(THREADS)]
    else:
        for _ in range(THREADS):
            with context(1):
                models.append(build())
    assert together(models, overlap) == expected
    assert_same_bits([weights_of(model) for model in plain], [weights_of(model) for model in models])
    assert deepoffload.stats(models[0])["evictions"] > 0, "nothing was evicted: this tested nothing"
    assert "before step()" not in caplog.text, "one optimizer's step was taken for another's"


def test_a_step_of_one_optimizer_does_not_end_that_of_another(paging: Paging) -> None:
    """A second backward into the same step is refused also when another model's optimizer has stepped meanwhile."""
    with deepoffload.offload_context(host_budget="4MiB", nvme_path=str(paging.nvme_path), step_overlap="in_backward"):
        first, second = build(), build()
    optimizers = [deepoffload.CPUAdamW(model.parameters()) for model in (first, second)]
    x = torch.ones(2, 32)
    for interfere in (lambda: optimizers[1].zero_grad(), lambda: optimizers[1].step()):
        optimizers[0].zero_grad()
        second(x).sum().backward()
        first(x).sum().backward()
        interfere()
        with pytest.raises(deepoffload.errors.UsageError, match="second backward before step"):
            first(x).sum().backward()


@pytest.mark.parametrize("read", ["weight", "state dict"])
def test_a_step_while_another_thread_begins_to_read_a_weight(paging: Paging, read: str) -> None:
    """The reader has been shown the weight, and stops before it reads. The step leaves it what it has been shown."""
    torch.manual_seed(0)
    plain, shown = build(), threading.Event()
    model = paging.build(build, replace(TIGHT, room=2.5), key="threads")
    optimizers = [deepoffload.CPUAdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    stepped, seen = threading.Event(), []

    def stop(frame: Any, event: str, argument: Any) -> None:
        is_call = frame.f_code.co_name == "past_doors" and not pager_of(model).lock.is_mine()
        if is_call and not shown.is_set() and leases_of(model):
            shown.set()
            assert stepped.wait(60)

    def reader() -> None:
        sys.settrace(stop)
        try:
            seen.append(values.sum())
        except Exception as error:
            seen.append(error)
        finally:
            sys.settrace(None)

    for step in range(3):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        for each in (plain, model):
            each(x).square().mean().backward()
        weight = model[2][1].weight
        values = weight if read == "weight" else model.state_dict()["2.1.weight"]
        shown.clear(), stepped.clear()
        thread = threading.Thread(target=reader, daemon=True)
        thread.start()
        assert shown.wait(60)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        stepped.set()
        thread.join(60)
        assert_same_bits(seen.pop(), plain[2][1].weight.sum())
    assert_same_bits(weights_of(plain), weights_of(model))
