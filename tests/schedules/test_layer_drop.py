"""A layer that is left out costs nothing: equal numbers, a fault at most, and no bytes for what does not run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.schedules import layer_drop
from tests.schedules.long import trained
from tests.schedules.models import DroppingGPT, DroppingLayers
from tests.support.loops import PlainAdamW, assert_same_bits, train
from tests.support.models import batch, llama, mixtral, next_token_loss
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Setting, plain

THETA = 0.5


class Dropped(nn.Module):
    """What :func:`next_token_loss` calls: the model with the arguments of a schedule."""

    def __init__(self, model: nn.Module, theta: float) -> None:
        super().__init__()
        self.model = model
        self.theta = theta

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, progressive_layer_drop=True, pld_theta=self.theta)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return next_token_loss(Dropped(model, THETA), tokens)


GUESSING = Setting("guessing", 2.5, step_overlap="speculative")
LEAVING = {"offload_activations": "nvme", "activation_budget": 16 << 10}
EVERYTHING_LEAVES = {**LEAVING, "offload_activations_above": 1, "activation_budget": 64 << 10}


@pytest.mark.parametrize(
    ("setting", "checkpointing", "config"),
    [
        (RESIDENT, True, {}),
        (TIGHT, None, {}),
        (TIGHT, False, {}),
        (TIGHT, True, LEAVING),
        (EVICTING, None, EVERYTHING_LEAVES),
        (EVICTING, False, LEAVING),
        (EVICTING, True, {}),
        (GUESSING, None, {}),
        (GUESSING, True, {}),
    ],
    ids=str,
)
def test_losses_gradients_and_weights_are_those_of_the_plain_model(
    paging: Paging, setting: Setting, checkpointing: bool | None, config: dict[str, Any]
) -> None:
    build = partial(DroppingGPT, checkpointing=checkpointing, depth=4)
    run: Callable[..., Any] = partial(train, steps=5, accumulate=2, clip=0.5, loss_of=loss_of)
    model = plain(build)
    expected = run(model, PlainAdamW(model, lr=1e-3))
    if config:
        budget = paging.least_bytes(build, setting, key=("dropping", checkpointing)) * (setting.room or 1)
        with paging.context(setting, int(budget) + config["activation_budget"], **config):
            torch.manual_seed(0)
            paged = build()
    else:
        paged = paging.build(build, setting, key=("dropping", checkpointing))
    got = run(paged, deepoffload.CPUAdamW(paged.parameters(), lr=1e-3))
    assert model.left_out == paged.left_out > 5
    assert not config or deepoffload.stats(paged)["activation_bytes_written"] > 0
    assert_same_bits(expected.losses[:2], got.losses[:2])
    assert_same_bits(expected.first_gradients, got.first_gradients)
    for one, other in zip(expected.losses, got.losses, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "checkpointing", "setting"), [(llama, False, TIGHT), (llama, True, EVICTING), (mixtral, True, TIGHT)]
)
def test_layers_of_transformers(
    paging: Paging, build: Callable[..., nn.Module], checkpointing: bool, setting: Setting
) -> None:
    make = partial(DroppingLayers, build, checkpointing)
    found = []
    for model in (plain(make), paging.build(make, setting, key=("dropping", build, checkpointing))):
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        found.append((vars(train(model, optimizer, steps=5, accumulate=2, loss_of=loss_of)), model.left_out))
        assert model.left_out > 5
    assert_same_bits(*found)


def test_with_a_curriculum_and_tiles(tmp_path: Path) -> None:
    """``python -m tests.schedules.long`` makes a thousand steps of these."""
    found = trained(12, str(tmp_path), total_curriculum_step=6, gamma=0.2, depth=4)
    assert found["apart"] == 0.0, "other losses than in memory"
    assert found["left_out"] == found["left_out_by_plain"] > 4
    assert found["faults"] <= 2 * found["left_out"], found


class Counted:
    """What steps of a paged model have cost."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)
        self.seed = 0

    def steps(self, count: int, theta: float, accumulate: int = 1) -> dict[str, float]:
        before, left_out = deepoffload.stats(self.model), self.model.left_out  # type: ignore[attr-defined]
        for _ in range(count):
            for _ in range(accumulate):
                self.seed += 1
                next_token_loss(Dropped(self.model, theta), batch(self.seed)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        after = deepoffload.stats(self.model)
        found = {name: after[name] - before[name] for name in ("faults", "order_mismatches", "disk_bytes_read")}
        return {**found, "left_out": self.model.left_out - left_out}  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlap", ["deferred", "none"])
def test_a_layer_that_is_left_out_costs_a_fault_at_most_and_its_bytes_are_not_read(
    paging: Paging, overlap: str
) -> None:
    build = partial(DroppingGPT, width=48)
    model = paging.build(build, Setting("some", 3.0, step_overlap=overlap), key="dropping 48")
    counted = Counted(model)
    torch.manual_seed(3)
    counted.steps(3, 1.0)
    whole = counted.steps(2, 1.0)
    assert whole["faults"] == whole["order_mismatches"] == 0
    some = counted.steps(16, THETA)
    assert some["left_out"] > 24
    assert some["order_mismatches"] <= some["left_out"]
    assert some["faults"] <= some["left_out"]
    share = 1 - some["left_out"] / (16 * 8)
    ahead = 0.15  # what was read ahead of a layer, and had to leave again before its next use
    assert some["disk_bytes_read"] / 16 <= (share + ahead) * whole["disk_bytes_read"] / 2


def test_from_the_first_step_on(paging: Paging) -> None:
    """No step has all layers, and micro-batches leave out different ones: the whole order is known all the same."""
    build = partial(DroppingGPT, width=48)
    model = paging.build(build, Setting("some", 3.0, step_overlap="none"), key="dropping 48")
    counted = Counted(model)
    torch.manual_seed(3)
    counted.steps(4, THETA, accumulate=2)
    some = counted.steps(8, THETA, accumulate=2)
    assert some["left_out"] > 20
    assert max(some["faults"], some["order_mismatches"]) <= some["left_out"], some


@pytest.mark.parametrize("accumulate", [1, 2])
def test_guesses_go_on_where_layers_are_left_out(paging: Paging, accumulate: int) -> None:
    """Which units a step leaves out changes neither what is guessed nor when a unit's last gradient is there."""
    build = partial(DroppingGPT, width=48, depth=6)
    model = paging.build(build, Setting("guessing", 3.0, step_overlap="speculative"), key="dropping 48, 6")
    counted = Counted(model)
    torch.manual_seed(3)
    counted.steps(4, 1.0, accumulate)
    guessed = deepoffload.stats(model)["speculated"]
    some = counted.steps(12, THETA, accumulate)
    after = deepoffload.stats(model)
    assert some["left_out"] > 12 and after["speculated"] > guessed
    assert after["rolled_back"] <= 6, "once for each unit, when it is left out for the first time"
    assert some["order_mismatches"] <= 3 * some["left_out"], some  # a change of what is guessed costs some


def test_the_formula_of_theta() -> None:
    assert [layer_drop(step, theta=0.5, gamma=0.001) for step in (0, 1)] == [1.0, 1.0]
    assert layer_drop(1001, theta=0.5, gamma=0.001) == pytest.approx(0.5 * 2.718281828459045**-1 + 0.5)
    assert layer_drop(10**9, theta=0.25) == 0.25
    for wrong in ({"theta": 1.5}, {"gamma": -1.0}):
        with pytest.raises(deepoffload.errors.UsageError, match="expected a step"):
            layer_drop(0, **wrong)
    with pytest.raises(deepoffload.errors.UsageError, match="expected a step"):
        layer_drop(-1)
