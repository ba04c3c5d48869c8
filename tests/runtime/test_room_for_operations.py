"""One operation that takes many weights at once, and views of many: the budget that an error names is enough."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import BudgetError, PlacementError
from tests.support.inspect import is_paged
from tests.support.loops import assert_same_bits

LAYERS = 24
Operation = Callable[[list[Tensor]], Tensor]

OPERATIONS: dict[str, Operation] = {
    "cat": torch.cat,
    "stack": torch.stack,
    "vstack": torch.vstack,
    "block_diag": lambda weights: torch.block_diag(*weights),
    "multi_dot": torch.linalg.multi_dot,
    "by name": lambda weights: torch.cat(tensors=weights, dim=1),
}


class Wide(nn.Module):
    """Layers that are used one by one, and all of their weights in one operation if ``operation`` is given."""

    def __init__(self, operation: Operation | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(LAYERS)])
        self.operation = operation

    def weights(self) -> list[Tensor]:
        return [layer.weight for layer in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if self.operation is None else x.sum() + self.operation(self.weights()).square().sum()


def program(model: Wide, operation: Operation, *, inside: bool) -> list[Tensor]:
    """Two steps; the operation in the forward, or outside of every module."""
    optimizer = (
        deepoffload.CPUSGD(model.parameters(), lr=1e-2)
        if is_paged(model)
        else torch.optim.SGD(model.parameters(), lr=1e-2)
    )
    seen = []
    for _ in range(2):
        loss = model(torch.ones(2, 64)).sum()
        if not inside:
            with torch.no_grad():
                seen.append(operation(model.weights()).clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


def built(swap: Path, budget_bytes: int, operation: Operation | None) -> tuple[Wide, Any]:
    torch.manual_seed(0)
    with deepoffload.offload_context(host_budget=budget_bytes, nvme_path=str(swap), debug={"poison": True}) as context:
        model = Wide(operation)
    return model, context.engine


def least_bytes(swap: Path) -> int:
    with pytest.raises(PlacementError) as refused:
        built(swap, 16 << 10, None)
    assert refused.value.enough_bytes is not None
    return refused.value.enough_bytes


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in a forward"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_named_budget_holds_all_that_one_operation_takes(tmp_path: Path, name: str, inside: bool) -> None:
    operation = OPERATIONS[name]
    torch.manual_seed(0)
    expected = program(Wide(operation if inside else None), operation, inside=inside)
    model, engine = built(tmp_path, least_bytes(tmp_path), operation if inside else None)
    with closing(engine), pytest.raises(BudgetError, match="the same operation takes [0-9]+ more") as refused:
        program(model, operation, inside=inside)
    named = refused.value.enough_bytes
    assert named is not None and f"to {named} bytes" in str(refused.value)
    model, engine = built(tmp_path, named, operation if inside else None)
    with closing(engine):
        assert_same_bits(expected, program(model, operation, inside=inside))


def test_gradients_that_one_operation_takes(tmp_path: Path) -> None:
    def gradients(model: Wide) -> Tensor:
        model(torch.ones(2, 64)).sum().backward()
        return torch.cat([layer.weight.grad for layer in model.layers])

    torch.manual_seed(0)
    expected = gradients(Wide())
    model, engine = built(tmp_path, least_bytes(tmp_path), None)
    with closing(engine), pytest.raises(BudgetError) as refused:
        gradients(model)
    assert refused.value.enough_bytes is not None
    model, engine = built(tmp_path, refused.value.enough_bytes, None)
    with closing(engine):
        assert_same_bits(expected, gradients(model))


def test_views_of_all_weights_have_a_budget_of_their_own_in_the_error(tmp_path: Path) -> None:
    """Which views a program is going to keep nobody knows. But all weights are the most."""
    model, engine = built(tmp_path, least_bytes(tmp_path), None)
    with closing(engine), pytest.raises(BudgetError, match="still referred to by the program") as refused:
        views = [param.detach() for param in model.parameters()]
    said = re.search(r"needs more: (\d+) bytes if of all weights", str(refused.value))
    assert said is not None
    model, engine = built(tmp_path, int(said[1]), None)
    with closing(engine):
        views = [param.detach() for param in model.parameters()]
        before = [view.clone() for view in views]
        program(model, torch.cat, inside=False)
        assert not any(torch.equal(view, value) for view, value in zip(views, before, strict=True)), "they see updates"
