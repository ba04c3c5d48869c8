"""A program that ends with paged models still alive, each held by another module: ``SWAP_DIRECTORY``.

The interpreter empties its modules one after the other, so that the models die in many states of it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import deepoffload

HOLDERS = ("__main__", "os", "sys", "deepoffload.memory.lock")


class Paused(nn.Module):
    """Its forward waits in the middle of another module's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.inner:
            x = layer(x)
            yield x


def build(kind: Callable[[], nn.Module] | None = None, **changes: Any) -> Any:
    settings: dict[str, Any] = {"host_budget": "256KiB", "nvme_path": sys.argv[1]}
    with deepoffload.offload_context(**(settings | changes)):
        if kind is None:
            return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        return kind()


def trained(model: Any = None) -> Any:
    """Every weight has moved, and the last update is still to come."""
    model = build() if model is None else model
    optimizer = deepoffload.CPUAdamW(model.parameters(), max_grad_norm=1.0)
    for _ in range(2):
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def graph() -> Any:
    """Only the graph holds the parameters."""
    return build()(torch.ones(2, 64)).sum()


def gradients() -> Any:
    model = build()
    model(torch.ones(2, 64)).sum().backward()
    return [param.grad[:1] for param in model.parameters()]


def paused_call() -> Any:
    model = build(Paused)
    call = model(torch.ones(1, 8))
    next(call)
    return call


def interrupted_call() -> Any:
    """An error inside a forward holds the frames of the call."""
    model = build()
    try:
        model(torch.ones(2, 63))
    except RuntimeError as error:
        return error
    raise AssertionError("the shapes fit")


def closed() -> Any:
    model, optimizer = trained()
    deepoffload.runtime.context.engine_of(model).close()
    return model, optimizer


def in_a_cycle() -> Any:
    model, optimizer = trained()
    holder: list[Any] = [model, optimizer]
    holder.append(holder)
    return holder


def one_weight() -> Any:
    return next(build().parameters()), build().state_dict()


KINDS: tuple[Callable[[], Any], ...] = (
    lambda: build(small, nvme_path=None),
    trained,
    lambda: trained(build(step_overlap="none", timeline=True)),
    graph,
    gradients,
    paused_call,
    interrupted_call,
    closed,
    in_a_cycle,
    one_weight,
)


def small() -> nn.Module:
    return nn.Linear(4, 1)


if __name__ == "__main__":
    gc.disable()
    gc.freeze()  # engines collect garbage before they open: what has been imported is none
    torch.set_num_threads(1)
    for holder in HOLDERS:
        for number, kind in enumerate(KINDS):
            setattr(sys.modules[holder], f"{'_' * (number % 2)}held_{number}", kind())
