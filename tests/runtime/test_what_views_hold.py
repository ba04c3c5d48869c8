"""Views of weights that the program keeps: the error says who holds the room and what is enough, and that trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import BudgetError
from tests.runtime.test_least_budget import built, least, trained

WIDTH = 192


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


@pytest.mark.parametrize("kept", [3, 24])
def test_large_views_are_named_and_the_budget_that_is_named_trains(tmp_path: Path, kept: int) -> None:
    """Views that are kept from step to step; more of them than the error has lines for, too."""
    x = torch.randn(2, WIDTH)
    torch.manual_seed(0)
    expected = layers(32)
    trained(expected, x)
    budget, errors = least(tmp_path, lambda: layers(32)), 0
    while True:
        model = built(budget, tmp_path, lambda: layers(32))
        held = []
        try:
            held = [layer.weight.detach() for layer in list(model)[:kept]]
            trained(model, x)
        except BudgetError as error:
            said_budget, staying = map(number, re.findall(r"([\d,]+) bytes are budgeted and ([\d,]+)", str(error))[0])
            named = {name: number(size) for name, size in re.findall(r"^  (.+): ([\d,]+) bytes", str(error), re.M)}
            assert said_budget == deepoffload.stats(model)["host_budget_bytes"] and sum(named.values()) == staying, (
                error
            )
            viewed = re.findall(
                r"^  (\d+) \(weight\): [\d,]+ bytes, still referred to by the program", str(error), re.M
            )
            assert viewed and all(int(name) < kept for name in viewed), error
            assert error.enough_bytes is not None and error.enough_bytes > budget
            grown = error.enough_bytes - said_budget
            assert f"or raise host_budget by {grown:,} bytes, to {error.enough_bytes} bytes" in str(error)
            assert "fragmented" not in str(error)
            budget, errors = error.enough_bytes, errors + 1
            assert errors < 24
        else:
            break
        del held, model
    assert errors > 0
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def number(text: str) -> int:
    return int(text.replace(",", ""))
