"""Layers that are unfrozen while a model trains need memory that the plan has not predicted: what was to stay in memory
leaves for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from tests.support.inspect import tiers_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import RESIDENT, Paging, plain

BUDGETS = (160 << 10, 210 << 10)
"""For 98 KiB of frozen weights: gradients and states of the last layer are moved, or stay."""


def mostly_frozen() -> nn.Sequential:
    model = mlp()
    model[:-2].requires_grad_(False)
    return model


def step(model: nn.Module, seed: int) -> None:
    optimizer = deepoffload.CPUAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(rows(seed=seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def gradually(model: Any) -> Any:
    """One layer more in every step, from the last to the first."""
    for number, layer in enumerate(reversed(model[::2])):
        layer.requires_grad_(True)
        step(model, number)
    model(rows()).sum().backward()
    return weights_of(model), gradients_of(model)


def with_an_open_graph(model: Any) -> Any:
    """The graph is from before: it goes backward right, or not at all."""
    step(model, 0)
    open_graph = model(rows().requires_grad_()).sum()
    model.requires_grad_(True)
    step(model, 1)
    try:
        open_graph.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    model.zero_grad()
    step(model, 2)
    return weights_of(model)


def within_one_backward(model: Any) -> Any:
    """Unfrozen between a forward and its backward."""
    step(model, 0)
    loss = model(rows().requires_grad_()).sum()
    model.requires_grad_(True)
    (loss + model(rows(seed=7)).square().sum()).backward()
    return gradients_of(model)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "program", [gradually, with_an_open_graph, within_one_backward], ids=lambda program: program.__name__
)
def test_as_in_plain_pytorch(paging: Paging, program: Any, budget: int) -> None:
    expected = program(plain(mostly_frozen))
    with paging.context(RESIDENT, budget):
        torch.manual_seed(0)
        model = mostly_frozen()
    assert tiers_of(model).all_stay() == (budget == BUDGETS[1]), "this would test something else"
    assert_same_bits(expected, program(model))
    assert deepoffload.stats(model)["evictions"] > 0
