"""``param.data = new`` and ``param.set_(new)`` give a parameter other values; views from before keep the old ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.params.torch_private import swap_memory
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, ROOMY, Paging, plain

ROOM = 5.0
"""Views of most weights are held at once."""

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "flat": lambda p: p.view(-1),
    "row": lambda p: p.detach()[0],
    "transposed": lambda p: p.detach().t(),
    "of a view": lambda p: p.data.view(-1)[3:9].view(2, 3),
    "itself": lambda p: p,
    "bytes": lambda p: p.detach().view(torch.int16),
}


def by_data(layer: nn.Module, name: str, value: Tensor) -> None:
    layer.get_parameter(name).data = value


def by_set(layer: nn.Module, name: str, value: Tensor) -> None:
    with torch.no_grad():
        layer.get_parameter(name).set_(value)


def by_data_in_a_call(layer: nn.Module, name: str, value: Tensor) -> None:
    """Inside a window no door sees it, the end of the window does."""
    attribute = "data"  # a hook whose code names it would have the window keep the doors
    handle = layer.register_forward_pre_hook(lambda module, _: setattr(module.get_parameter(name), attribute, value))
    try:
        with torch.no_grad():
            layer(rows())
    finally:
        handle.remove()


WAYS = {"data": by_data, "set_": by_set, "in a call": by_data_in_a_call}

EDITS: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(-2) if x.is_floating_point() else x.zero_(),
    "fill": lambda x: x.fill_(1),
    "items": lambda x: x.__setitem__(..., 3),
}

LOOK = st.tuples(st.just("look"), st.integers(0, 3), st.sampled_from(sorted(VIEWS)))
ASSIGN = st.tuples(st.just("assign"), st.integers(0, 3), st.sampled_from(sorted(WAYS)))
ACTION = st.one_of(
    LOOK,
    ASSIGN,
    st.tuples(st.just("swap back"), st.integers(0, 3), st.sampled_from(sorted(WAYS))),
    st.tuples(st.just("edit view"), st.integers(0, 7), st.sampled_from(sorted(EDITS))),
    st.tuples(st.just("edit"), st.integers(0, 3), st.sampled_from(sorted(EDITS))),
    st.tuples(st.just("train"), st.integers(0, 3), st.just("")),
    st.tuples(st.just("forget"), st.integers(0, 7), st.just("")),
)


def act(model: nn.Sequential, actions: list[Any]) -> list[Any]:
    places = [(model[0], "weight"), (model[0], "bias"), (model[2], "weight"), (model[4], "weight")]
    views: list[Tensor] = []
    generator = torch.Generator().manual_seed(3)
    found: list[Any] = []
    for kind, number, how in actions:
        layer, name = places[number % 4]
        param = layer.get_parameter(name)
        if kind == "look" and (how != "transposed" or param.dim() == 2):
            views.append(VIEWS[how](param))
        elif kind == "assign":
            WAYS[how](layer, name, torch.randn(param.shape, generator=generator))
        elif kind == "swap back":  # what a moving average does around an evaluation
            backup = param.data
            WAYS[how](layer, name, torch.randn(param.shape, generator=generator))
            found.append(model(rows()).detach())
            WAYS[how](layer, name, backup.clone())
        elif kind in ("edit view", "forget") and views:
            if kind == "edit view":
                with torch.no_grad():
                    EDITS[how](views[number % len(views)])
            else:
                del views[number % len(views)]
        elif kind == "edit":
            with torch.no_grad():
                EDITS[how](param)
        elif kind == "train":
            model.zero_grad()
            model(rows(seed=number) / 8).tanh().mean().backward()
            with torch.no_grad():
                for each in model.parameters():
                    each.sub_(each.grad)
        found.append([view.detach().clone() for view in views])
    return [found, weights_of(model), gradients_of(model)]


@pytest.mark.parametrize("setting", [EVICTING, ROOMY], ids=str)
def test_random_programs_of_views_and_new_data(paging: Paging, setting: Any) -> None:
    model = paging.build(mlp, replace(setting, room=ROOM), key="mlp")
    start = weights_of(model)
    reference = plain(mlp)

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(LOOK, st.lists(ACTION, max_size=3), ASSIGN, st.lists(ACTION, max_size=5))
    def same(look: Any, before: list[Any], assign: Any, after: list[Any]) -> None:
        actions = [look, *before, assign, *after]
        for each in (model, reference):
            each.zero_grad()
            with torch.no_grad():
                for name, value in start.items():
                    each.get_parameter(name).copy_(value)
        expected = act(reference, actions)
        try:
            assert_same_bits(expected, act(model, actions))
        except UnsupportedError as error:
            assert swap_memory is None and "the program holds views of the old values" in str(error)

    same()


def test_its_own_data_again_changes_nothing(paging: Paging) -> None:
    """Views stay views, and a graph goes backward."""
    found = []
    for model in (plain(mlp), paging.build(mlp, replace(EVICTING, room=ROOM), key="mlp")):
        view = model[0].weight.detach()
        output = model(rows()).square().mean()
        for param in model.parameters():
            param.data = param.data
        output.backward()
        view.zero_()
        found.append([weights_of(model), gradients_of(model)])
    assert_same_bits(found[0], found[1])


def test_what_is_no_dense_tensor_is_refused(paging: Paging) -> None:
    model = paging.build(mlp, EVICTING)
    before = weights_of(model)
    for value, error in ((None, TypeError), (3, TypeError), (torch.zeros(64, 64).to_sparse(), UnsupportedError)):
        with pytest.raises(error, match="Variable data has to be a tensor|to_dense"):
            model[0].weight.data = value
    assert_same_bits(before, weights_of(model))


def test_a_module_that_is_registered_below_itself(paging: Paging) -> None:
    class Circle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.me = self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    x = torch.ones(2, 64)
    seen = []
    for model in (plain(Circle), paging.build(Circle, EVICTING)):
        model(x).sum().backward()
        seen.append([param.grad.clone() for param in model.parameters()])
    assert_same_bits(*seen)
