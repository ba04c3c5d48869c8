"""Random modules and random programs over them: shared weights, any order, freezing, edits, several graphs, and memory
from ample to the least; losses, gradients and weights as in plain PyTorch, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deepoffload
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import rows
from tests.support.paging import Paging, Setting, plain

WIDTH = 32

USES: dict[str, Callable[[Tensor, nn.Parameter, nn.Parameter], Tensor]] = {
    "linear": lambda x, weight, bias: torch.tanh(F.linear(x, weight, bias)),
    "transposed": lambda x, weight, bias: torch.tanh(x @ weight.t() + bias) + x,
    "product": lambda x, weight, bias: torch.tanh(x @ (weight @ weight.t())) * bias,
    "norm": lambda x, weight, bias: F.layer_norm(x, (WIDTH,), weight[0], bias),
    "slice": lambda x, weight, bias: x + torch.sigmoid(x[:, :16] @ weight[:16]) * weight.detach().mean(),
    "lookup": lambda x, weight, bias: x * F.embedding(x.argmax(-1), weight) + bias,
}
"""Ways to use a matrix and a vector; between them they are saved whole, as views, twice, and not at all."""


@dataclass(frozen=True)
class Shape:
    """A module: which layers share the weight of an earlier one (its index), and how each uses what it has."""

    uses: tuple[str, ...]
    weight_of: tuple[int, ...]
    checkpointed: tuple[bool | None, ...]
    frozen: tuple[bool, ...]


class Layer(nn.Module):
    def __init__(self, use: str, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.use = use
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) if weight is None else weight
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return USES[self.use](x, self.weight, self.bias)


class Random(nn.Module):
    """Layers that are called in the order they are asked for, some behind an activation checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList()
        for index, use in enumerate(shape.uses):
            first = shape.weight_of[index]
            self.layers.append(Layer(use, self.layers[first].weight if first < index else None))
        for param, frozen in zip(self.parameters(), shape.frozen, strict=False):
            param.requires_grad_(not frozen)

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            layer, how = self.layers[index % len(self.layers)], self.shape.checkpointed[index % len(self.layers)]
            x = layer(x) if how is None else checkpoint(layer, x, use_reentrant=how)
        return x


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    count = draw(st.integers(4, 8))
    each = {"min_size": count, "max_size": count}
    return Shape(
        tuple(draw(st.lists(st.sampled_from(sorted(USES)), **each))),
        tuple(draw(st.integers(0, index)) if draw(st.booleans()) else index for index in range(count)),
        tuple(draw(st.lists(st.sampled_from([None, None, False, True]), **each))),
        tuple(draw(st.lists(st.sampled_from([False, False, True]), min_size=2 * count, max_size=2 * count))),
    )


LARGEST = Shape(("linear",) * 8, tuple(range(8)), (None,) * 8, (False,) * 16)
"""Needs the most memory of all."""

ORDERS = st.lists(st.integers(0, 7), min_size=1, max_size=10).map(tuple)

ACTIONS = st.one_of(
    st.tuples(st.just("backward"), ORDERS),
    st.tuples(st.just("backward"), ORDERS),
    st.tuples(st.just("two graphs"), st.tuples(ORDERS, ORDERS)),
    st.tuples(st.just("backward twice"), ORDERS),
    st.tuples(st.just("evaluate"), ORDERS),
    st.tuples(st.just("step"), st.sampled_from([None, 0.1])),
    st.tuples(st.just("step"), st.none()),
    st.tuples(st.just("zero"), st.booleans()),
    st.tuples(st.just("freeze"), st.tuples(st.integers(0, 15), st.booleans())),
    st.tuples(st.just("edit"), st.tuples(st.integers(0, 15), st.sampled_from(["mul_", "data", "copy_"]))),
)


class Program:
    """Does a list of actions with a model, and keeps what it sees."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.optimizer = deepoffload.CPUAdamW(self.params, lr=1e-2)
        self.seen: list[Any] = []

    def run(self, actions: list[Any]) -> list[Any]:
        for name, argument in actions:
            getattr(self, f"do_{name.replace(' ', '_')}")(argument)
            self.seen.append((name, gradients_of(self.model)))
        return [*self.seen, weights_of(self.model)]

    def loss(self, order: tuple[int, ...]) -> Tensor:
        x = rows(width=WIDTH, seed=len(self.seen)).requires_grad_()
        loss: Tensor = self.model(x, order).square().mean()
        self.seen.append(loss.detach().clone())
        return loss

    def do_backward(self, order: tuple[int, ...]) -> None:
        self.loss(order).backward()

    def do_two_graphs(self, orders: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        first, second = (self.loss(order) for order in orders)
        first.backward()
        second.backward()

    def do_backward_twice(self, order: tuple[int, ...]) -> None:
        loss = self.loss(order)
        loss.backward(retain_graph=True)
        loss.backward()

    def do_evaluate(self, order: tuple[int, ...]) -> None:
        with torch.no_grad():
            self.loss(order)

    def do_step(self, clip: float | None) -> None:
        if clip is not None:
            self.seen.append(torch.nn.utils.clip_grad_norm_(self.params, clip))
        self.optimizer.step()

    def do_zero(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def do_freeze(self, which: tuple[int, bool]) -> None:
        index, frozen = which
        self.params[index % len(self.params)].requires_grad_(not frozen)

    def do_edit(self, what: tuple[int, str]) -> None:
        index, how = what
        param = self.params[index % len(self.params)]
        with torch.no_grad():
            if how == "mul_":
                param.mul_(0.5)
            elif how == "data":
                param.data = torch.full_like(param, 0.1)
            else:
                param.copy_(param.detach().flip(0))


@settings(max_examples=30)
@given(
    shape=shapes(),
    actions=st.lists(ACTIONS, min_size=2, max_size=10),
    room=st.sampled_from([1.25, 1.6, 2.5, 4.0]),
    evict_always=st.booleans(),
    prefetch=st.booleans(),
    step_overlap=st.sampled_from(["deferred", "deferred", "none"]),
    seed=st.integers(0, 3),
)
def test_as_plain_pytorch(
    shared_paging: Paging,
    shape: Shape,
    actions: list[Any],
    room: float,
    evict_always: bool,
    prefetch: bool,
    step_overlap: str,
    seed: int,
) -> None:
    setting = Setting("random", room, prefetch, evict_always, step_overlap)
    shared_paging.least_bytes(lambda: Random(LARGEST), setting, key=LARGEST)
    expected = Program(plain(lambda: Random(shape), seed=seed)).run(actions)
    model = shared_paging.build(lambda: Random(shape), setting, seed=seed, key=LARGEST)
    got = Program(model).run(actions)
    assert_same_bits(expected, got)
    del model
    gc.collect()
