"""A device chosen for new tensors (``torch.set_default_device``, ``with torch.device(...)``) is none of paging's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.params.parameter import OffloadedParameter
from deepoffload.params.state_dict_values import LazyValue
from tests.support.loops import assert_same_bits
from tests.support.models import mlp
from tests.support.paging import TIGHT, Paging


def rows() -> torch.Tensor:
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(0))


def test_state_dicts_stay_lazy(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT)
    with torch.device("cpu"):
        state = model.state_dict()
    assert {type(value) for value in state.values()} == {LazyValue}


def test_a_parameter_of_a_parameter(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT)
    with torch.device("cpu"):
        copy = nn.Parameter(model[0].weight)
    assert type(copy) is OffloadedParameter
    assert torch.equal(copy, model[0].weight)


@pytest.mark.parametrize("precision", ["keep", "bf16"])
def test_the_state_of_optimizers_is_made_on_the_host(paging: Paging, precision: str) -> None:
    def trained(mode: str) -> list[torch.Tensor]:
        with paging.context(replace(TIGHT, precision=precision), 1 << 22):
            torch.manual_seed(0)
            model = mlp()
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=0.1, amsgrad=True)
        for _ in range(2):
            model(rows().to(model[0].weight.dtype)).float().square().mean().backward()
            with torch.device(mode):
                optimizer.step()
                model.zero_grad()
                optimizer.load_state_dict(optimizer.state_dict())
        return [param.detach().float().clone() for param in model.parameters()]

    assert_same_bits(trained("cpu"), trained("meta"))
