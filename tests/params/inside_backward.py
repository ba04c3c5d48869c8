"""Layers whose backward runs the program's own code, which uses weights: functions that keep one, hooks that read one,
parts that run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.functions import KeepsWeight, Recomputes

WIDTH = 32


class Layer(nn.Module):
    """A residual layer; what it adds is said by ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inside = INSIDE.get(kind, product)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.linear = nn.Linear(WIDTH, WIDTH)
        put_on = HOOKS.get(kind)
        if put_on is not None:
            put_on(self)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(self, x)


def product(layer: Layer, x: Tensor) -> Tensor:
    return layer.linear(torch.tanh(x @ layer.weight))


def tensor_hook(layer: Layer, x: Tensor) -> Tensor:
    y = x @ layer.weight
    y.register_hook(lambda grad: grad * layer.weight.detach().abs().mean())
    return torch.tanh(y)


def node_hooks(layer: Layer, x: Tensor) -> Tensor:
    y = torch.tanh(x @ layer.weight)
    y.grad_fn.register_prehook(lambda grads: (grads[0] * layer.linear.weight.abs().mean(),))
    y.grad_fn.register_hook(lambda inner, outer: (inner[0] + layer.weight.sum(),))
    return y


def multi_grad_hook(layer: Layer, x: Tensor) -> Tensor:
    y, z = x @ layer.weight, layer.linear(x)

    def complete(grads: Any) -> None:
        layer.seen = layer.weight.detach().mean()

    torch.autograd.graph.register_multi_grad_hook((y, z), complete)
    x.register_hook(lambda grad: grad * (1 + layer.seen))
    return y + z


def slope(layer: Layer, x: Tensor) -> Tensor:
    """A derivative inside a forward: in the layer's window, by a weight of it and by what it is called with."""
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        by_x, by_weight = torch.autograd.grad(
            torch.tanh(z @ layer.weight).square().sum(), (z, layer.weight), create_graph=True
        )
    return by_x + x @ by_weight


INSIDE: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "checkpointed function": lambda layer, x: checkpoint(
        lambda y: torch.tanh(y @ layer.weight), x, use_reentrant=False
    ),
    "checkpointed module": lambda layer, x: checkpoint(layer.linear, x, use_reentrant=False),
    "reentrant checkpoint": lambda layer, x: checkpoint(layer.linear, x @ layer.weight, use_reentrant=True),
    "keeps its weight": lambda layer, x: KeepsWeight.apply(x, layer.weight),
    "runs again": lambda layer, x: Recomputes.apply(x, layer.weight),
    "tensor hook": tensor_hook,
    "node hooks": node_hooks,
    "multi-grad hook": multi_grad_hook,
    "slope": slope,
}


def full_backward_hook(read: Callable[[Layer], Tensor]) -> Callable[[Layer], None]:
    return lambda layer: layer.linear.register_full_backward_hook(
        lambda module, inner, outer: tuple(None if g is None else g * read(module).abs().mean() for g in inner)
    )


HOOKS: dict[str, Callable[[Layer], Any]] = {
    "full hook, detach": full_backward_hook(lambda module: module.weight.detach()),
    "full hook, data": full_backward_hook(lambda module: module.weight.data),
    "full hook, sum": full_backward_hook(lambda module: module.weight.sum()),
    "full hook of the layer": lambda layer: layer.register_full_backward_hook(
        lambda module, inner, outer: tuple(None if g is None else g * module.weight.mean() for g in inner)
    ),
    "full pre-hook": lambda layer: layer.linear.register_full_backward_pre_hook(
        lambda module, outer: (outer[0] * module.weight.norm(),)
    ),
    "hook of the parameter": lambda layer: layer.weight.register_hook(
        lambda grad: grad + layer.linear.weight.detach().t()
    ),
}

KINDS = ("product", *INSIDE, *HOOKS)
