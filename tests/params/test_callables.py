"""torch functions that take a function of the program's and run it, with paged weights among their arguments: that
function may use any weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deepoffload.params.callables import BY_ELEMENT, UNASKED
from tests.support.loops import gradients_of
from tests.support.paging import EVICTING, TIGHT, Paging, Same

WIDTH = 24


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def build() -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(8)))


def weights(model: Any) -> list[Any]:
    return [layer.weight for layer in model]


def triplet(model: Any) -> Any:
    a, b, c, d, e, *_ = weights(model)

    def distance(x: Tensor, y: Tensor) -> Tensor:
        return ((x - y) @ d).abs().sum(-1) + e.square().mean() + x.mean() * a.mean()

    loss = F.triplet_margin_with_distance_loss(a, b, c, distance_function=distance, margin=0.5, swap=True)
    loss.backward()
    module = nn.TripletMarginWithDistanceLoss(distance_function=lambda x, y: (x @ e - y @ model[6].weight).norm(dim=-1))
    other = module(b, c, d)
    other.backward()
    return loss.detach(), other.detach(), gradients_of(model)


def triplet_in_a_module(model: Any) -> Any:
    model[5].scale = nn.PairwiseDistance(p=1.0)
    loss = F.triplet_margin_with_distance_loss(*weights(model)[:3], distance_function=model[5].scale)
    loss.backward()
    return loss.detach(), gradients_of(model)


def eigenvalues(model: Any) -> Any:
    a, b, *_ = weights(model)
    seen: list[Tensor] = []

    def track(worker: Any) -> None:
        seen.append(b.detach().sum().clone())

    with torch.no_grad():
        a.copy_(a @ a.t() + torch.eye(WIDTH))
        values, _ = torch.lobpcg(a, k=2, X=torch.eye(WIDTH, 2), tracker=track, niter=5)
    return values.clone(), seen


def by_element(model: Any) -> Any:
    model.requires_grad_(False)
    a, b, c, d, *_ = weights(model)
    with torch.no_grad():
        a[:2, :2].map_(b[:2, :2], lambda x, y: x + y * float(c[0, 0]))
        a.map_(b, lambda x, y: x - y * float(c[1, 1]))
        d.apply_(lambda x: x * float(c[2, 2]))
        b.map2_(c, a, lambda x, y, z: x + y * z + float(d[3, 3]))
    return [w.detach().clone() for w in weights(model)]


def checkpointed(model: Any) -> Any:
    a, b, c, *_ = weights(model)
    x = torch.ones(2, WIDTH, requires_grad=True)
    for reentrant in (False, True):
        checkpoint(lambda y, w: torch.tanh(y @ w) @ c, x @ b, a, use_reentrant=reentrant).sum().backward()
    return gradients_of(model), x.grad


def mapped(model: Any) -> Any:
    a, b, c, *_ = weights(model)
    rows = torch.vmap(lambda row: (row @ b).sum() + c.sum())(torch.tanh(a))
    rows.square().sum().backward()
    return rows.detach(), gradients_of(model)


def derived(model: Any) -> Any:
    a, b, *_ = (w.detach() for w in weights(model))
    slope = torch.func.grad(lambda w: (w @ b).square().sum() + model[4].weight.detach().sum())(a)
    _, along = torch.func.jvp(lambda w: torch.tanh(w @ b), (a,), (model[3].weight.detach(),))
    jacobian = torch.autograd.functional.jacobian(lambda row: torch.tanh(row @ model[6].weight), a[0])
    return slope.clone(), along.clone(), jacobian.detach().clone()


def operators(model: Any) -> Any:
    """An operator of the program's own, whose implementation looks at another weight."""
    a, b, c, *_ = weights(model)
    looked_at.append(c)
    try:
        y = scaled(a, b)
        y.square().sum().backward()
        return y.detach(), gradients_of(model)
    finally:
        looked_at.clear()


looked_at: list[Tensor] = []


@torch.library.custom_op("deepoffload_tests::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    (other,) = looked_at
    return x @ weight * other.detach().abs().mean()


def save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def scaled_backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = context.saved_tensors
    scale = looked_at[0].detach().abs().mean()
    return gradient @ weight.t() * scale, x.t() @ gradient * scale


scaled.register_autograd(scaled_backward, setup_context=save)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    function.__name__: function
    for function in (triplet, triplet_in_a_module, eigenvalues, by_element, checkpointed, mapped, derived, operators)
}


@pytest.mark.parametrize("setting", [EVICTING, TIGHT], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_same_as_plain(paging: Paging, setting: Any, program: str) -> None:
    Same(paging, setting)(build, PROGRAMS[program], key="layers", room=4.0)


def takes_a_function(function: Any, stand_in: Any) -> bool:
    for known in (function, stand_in):
        try:
            parameters = inspect.signature(known).parameters.values()
        except (TypeError, ValueError):
            continue
        if any("Callable" in str(p.annotation) or p.name in FUNCTION_NAMES for p in parameters):
            return True
    return False


FUNCTION_NAMES = {"callable", "callback", "distance_function", "f", "fn", "func", "function", "hook", "tracker"}

ELSEWHERE = {torch.sym_ite, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}
"""They take no tensor, or call the function later."""


def test_every_function_of_torch_that_takes_one_is_known() -> None:
    """Among those that come to the door. A new torch may have more."""
    overridable = torch.overrides.get_testing_overrides()
    found = {function for function, stand_in in overridable.items() if takes_a_function(function, stand_in)}
    assert found - ELSEWHERE == {*UNASKED, *BY_ELEMENT}
