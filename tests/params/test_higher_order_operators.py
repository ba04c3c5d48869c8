"""torch.cond, while_loop, scan and map compile the functions that they are given, and have to capture all of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.loops import assert_same_bits, gradients_of
from tests.support.paging import RESIDENT, TIGHT, Paging, plain

WIDTH = 64


def cond(model: Branching, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x * model.scale, lambda x: x - model.scale, (x,))


def cond_with_an_operand(model: Branching, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x, w: x * w, lambda x, w: x - w, (x, model.scale))


def cond_with_modules(model: Branching, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: model.left(x), lambda x: model.right(x), (x,))


def while_loop(model: Branching, x: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    def body(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, torch.tanh(x * model.scale)

    return while_loop(lambda count, x: count < 3, body, (torch.tensor(0), x))[1]


def scan(model: Branching, x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan

    return scan(lambda carry, row: (carry + row * model.scale, carry * row), torch.zeros(WIDTH), x)[1]


def mapped(model: Branching, x: Tensor) -> Tensor:
    from torch._higher_order_ops.map import map

    return map(lambda row, w: row * w, x, model.scale)


OPERATORS = (cond, cond_with_an_operand, cond_with_modules, while_loop, scan, mapped)

Operator = Callable[["Branching", Tensor], Tensor]


class Branching(nn.Module):
    """``layers`` are what the budget splits it for."""

    def __init__(self, operator: Operator, layers: int = 12) -> None:
        super().__init__()
        self.operator = operator
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.operator(self, x))


def program(model: nn.Module) -> tuple[Tensor, dict[str, Any]]:
    y = model(torch.linspace(-1, 1.5, 4 * WIDTH).view(4, WIDTH))
    y.square().sum().backward()
    return y.detach(), gradients_of(model)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_weights_of_a_split_module_are_refused_with_the_reason(paging: Paging, operator: Operator) -> None:
    def build() -> Branching:
        return Branching(operator)

    program(plain(build))  # works
    model = paging.build(build, TIGHT)
    with pytest.raises(RuntimeError, match=r"the bytes of a paged weight come and go.*weight\.clone\(\)"):
        program(model)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_in_a_module_that_is_one_unit_they_work(paging: Paging, operator: Operator) -> None:
    def build() -> nn.Module:
        parts = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        return nn.Sequential(*parts, Branching(operator, layers=1), nn.Linear(WIDTH, 16 * WIDTH))

    expected = program(plain(build))
    with paging.context(RESIDENT, 1 << 20):
        torch.manual_seed(0)
        model = build()
    assert_same_bits(expected, program(model))


def chosen(model: Branching, x: Tensor) -> Tensor:
    return model.left(x) if x.sum() > 0 else model.right(x)


def given_a_clone(model: Branching, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x, w: x * w, lambda x, w: x - w, (x, model.scale.clone()))


@pytest.mark.parametrize(("remedy", "instead_of"), [(chosen, cond_with_modules), (given_a_clone, cond)])
def test_what_the_reason_says_works(paging: Paging, remedy: Operator, instead_of: Operator) -> None:
    shown, _ = program(plain(lambda: Branching(instead_of)))
    expected = program(plain(lambda: Branching(remedy)))
    found = program(paging.build(lambda: Branching(remedy), TIGHT))
    assert_same_bits(expected, found)
    assert_same_bits(shown, found[0])
