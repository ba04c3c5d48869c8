"""``weight.set_()`` and edits inside a forward whose saved tensors the program's own hooks keep: the gradients of plain
PyTorch, or an error that names the parameter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.paging import EVICTING, TIGHT, Paging, Setting, plain

WIDTH = 24
HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "identity": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "save_on_cpu": save_on_cpu,
}
PLANS = [plan for plan in product(("matmul", "linear", "set", "scale"), repeat=3) if plan.count("set") == 1]


class Layer(nn.Module):
    plan: tuple[str, ...] = ("matmul",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.plan:
            if part == "matmul":
                x = torch.tanh(x @ self.weight)
            elif part == "linear":
                x = torch.tanh(F.linear(x, self.weight))
            else:
                with torch.no_grad():
                    self.weight.set_(torch.eye(WIDTH) + 0.1) if part == "set" else self.weight.mul_(1.5)
        return x


def build() -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(8)))


def train(model: Any, hooks: str, plan: tuple[str, ...]) -> Any:
    """Every tensor that it ends with, or the error."""
    model[2].plan = model[5].plan = plan
    x = torch.ones(2, WIDTH, requires_grad=True)
    with HOOKS[hooks]():
        loss = model(x).square().sum()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return x.grad, gradients_of(model), weights_of(model)


def no_hook(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("setting", [TIGHT, EVICTING], ids=str)
@pytest.mark.parametrize("hooks", [lambda: saved_tensors_hooks(torch.clone, no_hook), save_on_cpu], ids=["own", "cpu"])
def test_hooks_that_copy_have_no_copy_of_a_weight(paging: Paging, hooks: Any, setting: Setting) -> None:
    """Plain PyTorch continues with the clone. Ours says why it cannot, keeps the gradients that it had, and goes on."""

    def forward(model: Any) -> Tensor:
        with hooks():
            return model(torch.ones(2, WIDTH)).square().sum()

    model, reference = paging.build(build, setting, key="layers"), plain(build)
    losses = [forward(model), forward(reference)]
    with torch.no_grad():
        model[4].weight.mul_(1.5)
        reference[4].weight.mul_(1.5)
    losses[1].backward()
    with pytest.raises(RuntimeError, match=r"inplace operation: parameter 4.weight .*no copy of the old values: call"):
        losses[0].backward()
    del losses
    model.zero_grad(), reference.zero_grad()
    forward(model).backward(), forward(reference).backward()
    assert_same_bits(gradients_of(reference), gradients_of(model))


def test_without_hooks_no_hooks_are_mentioned(paging: Paging) -> None:
    model = paging.build(build, TIGHT, key="layers")
    loss = model(torch.ones(2, WIDTH)).square().sum()
    with torch.no_grad():
        model[4].weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="after the forward pass that saved it$"):
        loss.backward()


@pytest.mark.parametrize("hooks", HOOKS)
def test_equal_or_refused(paging: Paging, hooks: str) -> None:
    equal = 0
    for plan in PLANS:
        expected = train(plain(build), hooks, plan)
        got = train(paging.build(build, TIGHT, key="layers"), hooks, plan)
        if isinstance(got, str):
            assert "parameter 5.weight" in got or "parameter 2.weight" in got
        else:
            assert_same_bits(expected, got)
            equal += 1
    assert equal >= len(PLANS) // 4, "hardly anything was compared"
