"""A checkpoint of a model with other layers: what both have is loaded, and what only one side has stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import UsageError
from tests.checkpoint.training import adamw
from tests.support.loops import assert_same_bits
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, Paging

Entry = dict[str, Any]
Optimizer = torch.optim.Optimizer


class Run:
    """A model that has made steps; its state by name of the parameter."""

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], Optimizer], steps: int) -> None:
        self.model = model
        self.optimizer = make(model)
        self.train(steps)
        self.state = deepoffload.TrainingState(model, self.optimizer)

    def train(self, steps: int) -> list[Tensor]:
        losses = []
        for step in range(steps):
            inputs = rows(seed=step).to(next(self.model.parameters()).dtype)
            loss = self.model(inputs).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def entries(self) -> dict[str, Entry]:
        names = {id(param): name for name, param in self.model.named_parameters()}
        order = [names[id(param)] for group in self.optimizer.param_groups for param in group["params"]]
        saved = self.optimizer.state_dict()["state"]
        return {order[number]: copied(entry) for number, entry in saved.items()}

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def copied(entry: Entry) -> Entry:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in sorted(entry.items())}


def eight_bit(model: nn.Module) -> Optimizer:
    return adamw(model, state_dtype="8bit")


def of_torch(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def by_layer(model: nn.Module) -> Optimizer:
    layers = [layer for layer in model.children() if isinstance(layer, nn.Linear)]
    groups = [{"params": list(layer.parameters()), "lr": 1e-3 * index} for index, layer in enumerate(layers, 1)]
    return deepoffload.CPUAdamW(groups)


MAKERS = [adamw, eight_bit, of_torch, by_layer]


@pytest.fixture(params=["evicting", "resident", "plain"])
def build(request: pytest.FixtureRequest, paging: Paging) -> Callable[[int, int], nn.Module]:
    """A model of so many layers, paged or not."""

    def made(depth: int, seed: int) -> nn.Module:
        if request.param != "plain":
            setting = replace(EVICTING, precision="bf16") if request.param == "evicting" else RESIDENT
            return paging.build(lambda: mlp(depth=depth), setting, seed=seed, key=depth)
        torch.manual_seed(seed)
        return mlp(depth=depth).bfloat16()

    return made


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("saved_depth", "depth"), [(4, 3), (3, 4)], ids=["fewer layers", "more layers"])
def test_the_argument_that_the_error_names_is_enough(
    build: Callable[[int, int], nn.Module],
    make: Callable[[nn.Module], Optimizer],
    saved_depth: int,
    depth: int,
    tmp_path: Path,
) -> None:
    saved, run = Run(build(saved_depth, 0), make, 2), Run(build(depth, 1), make, 3)
    saved.state.save(tmp_path)
    before, weights = run.entries(), run.weights()
    with pytest.raises(UsageError, match=r"it (lacks|also has) 6\.bias, 6\.weight; load_module_strict=False"):
        run.state.load(tmp_path)
    assert_same_bits([before, weights], [run.entries(), run.weights()])
    run.state.load(tmp_path, load_module_strict=False)
    common = saved.entries().keys() & run.entries().keys()
    assert len(common) == 6 and len(run.entries()) == 2 * depth
    expected = {**before, **{name: entry for name, entry in saved.entries().items() if name in common}}
    assert_same_bits(dict(sorted(expected.items())), dict(sorted(run.entries().items())))
    now = {**weights, **{name: value for name, value in saved.weights().items() if name in common}}
    assert_same_bits(now, run.weights())
    settings = [group["lr"] for group in run.optimizer.param_groups]
    assert settings == [group["lr"] for group in make(run.model).param_groups]
    assert all(loss.isfinite() for loss in run.train(2))
    steps = {name: int(entry["step"]) for name, entry in run.entries().items()}
    assert steps == {name: 4 if name in common else 5 for name in steps}


def test_what_strict_does_not_concern_still_says_what_is_enough(paging: Paging, tmp_path: Path) -> None:
    """Other groups of the same parameters."""
    saved = Run(paging.build(lambda: mlp(depth=4), RESIDENT), by_layer, 1)
    saved.state.save(tmp_path)
    run = Run(paging.build(lambda: mlp(depth=3), RESIDENT, seed=1), adamw, 1)
    before = run.entries()
    with pytest.raises(UsageError, match="3 parameter groups, the optimizer 1; load_optimizer_states=False"):
        run.state.load(tmp_path, load_module_strict=False)
    run.state.load(tmp_path, load_module_strict=False, load_optimizer_states=False)
    assert_same_bits(before, run.entries())


def test_a_parameter_that_was_frozen_is_no_other_layer(paging: Paging, tmp_path: Path) -> None:
    def without_first(model: nn.Module) -> Optimizer:
        return adamw(model[1:])  # type: ignore[index]

    saved = Run(paging.build(lambda: mlp(depth=3), RESIDENT), without_first, 1)
    saved.optimizer.zero_grad()
    saved.model.zero_grad()
    saved.state.save(tmp_path)
    run = Run(paging.build(lambda: mlp(depth=3), RESIDENT, seed=1), adamw, 1)
    for strict in (True, False):
        with pytest.raises(UsageError, match=r"the checkpoint lacks 0\.bias, 0\.weight; load_optimizer_states=False"):
            run.state.load(tmp_path, load_module_strict=strict)
