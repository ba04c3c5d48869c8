"""Modules that edit their own weights in a forward that a checkpoint runs again: plain PyTorch compares no versions
there, and continues with the weights as they are then. Where it does compare, an edit is refused as there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.support.loops import gradients_of, weights_of
from tests.support.models import rows
from tests.support.paging import EVICTING, Same

WIDTH = 64

EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "clamp": lambda weight: weight.clamp_(-0.1, 0.1),
    "shrink": lambda weight: weight.mul_(0.9),
    "shrink unseen": lambda weight: weight.data.mul_(0.9),
}


class EditsItself(nn.Module):
    def __init__(self, edit: str, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8, requires_grad=trained)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.edit = EDITS[edit]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.edit(self.weight)
        return torch.tanh(F.linear(x, self.weight, self.bias))


class ChecksItself(EditsItself):
    """The checkpoint is inside of the module's own call."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def again(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(run, x, use_reentrant=False)


def to_the_end(layer: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return again(layer, x)


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "once": again,
    "twice in one": lambda layer, x: again(lambda y: layer(layer(y)), x),
    "twice": lambda layer, x: again(layer, again(layer, x)),
    "nested": lambda layer, x: again(lambda y: again(layer, y), x),
    "to the end": to_the_end,
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "weight used before": lambda layer, x: again(layer, x @ layer.weight),
    "weight used after": lambda layer, x: again(layer, x) @ layer.weight,
    "without a checkpoint": lambda layer, x: layer(x),
    "twice without a checkpoint": lambda layer, x: layer(layer(x)),
}


def steps(model: nn.Module, loss: Callable[[], Tensor]) -> Any:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    seen = []
    for _ in range(2):
        loss().backward()
        seen.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def edited_in_between(model: nn.Sequential, loss: Callable[[], Tensor]) -> Any:
    found = loss()
    with torch.no_grad():
        for layer in model[1:-1]:
            layer.weight.mul_(0.9)
    found.backward()
    return gradients_of(model)


def twice_backward(model: nn.Module, loss: Callable[[], Tensor]) -> Any:
    found = loss()
    found.backward(retain_graph=True)
    found.backward()
    return gradients_of(model)


def double_backward(model: nn.Module, loss: Callable[[], Tensor]) -> Any:
    params = [param for param in model.parameters() if param.requires_grad]
    grads = torch.autograd.grad(loss(), params, create_graph=True)
    torch.stack([grad.square().sum() for grad in grads]).sum().backward()
    return gradients_of(model)


def outcome(model: nn.Sequential, call: Callable[[nn.Module, Tensor], Tensor]) -> Any:
    def loss() -> Tensor:
        x = model[0](rows())
        for layer in model[1:-1]:
            x = call(layer, x)
        return model[-1](x).square().mean()

    start = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list[Any] = []
    for program in (steps, edited_in_between, twice_backward, double_backward):
        model.load_state_dict(start)
        model.zero_grad()
        try:
            seen.append((program(model, loss), weights_of(model)))
        except RuntimeError as error:
            seen.append(str(error).partition(":")[0])
    return seen


@pytest.mark.parametrize("kind", [EditsItself, ChecksItself])
@pytest.mark.parametrize("edit", EDITS)
def test_own_edits_in_a_forward_that_runs_again(same: Same, edit: str, kind: type[EditsItself]) -> None:
    def build(trained: bool) -> nn.Sequential:
        edited = [kind(edit, trained) for _ in range(2)]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *edited, nn.Linear(WIDTH, WIDTH))

    calls = CALLS if kind is EditsItself else {name: CALLS[name] for name in ("without a checkpoint", "once")}
    for trained in (True, False) if same.setting is EVICTING else (True,):

        def program(model: nn.Sequential) -> Any:
            return {name: outcome(model, call) for name, call in calls.items()}

        same(lambda trained=trained: build(trained), program, key=(kind, trained))
