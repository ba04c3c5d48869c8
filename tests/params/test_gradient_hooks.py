"""Hooks on parameters see, and may change, the gradient that they do in plain PyTorch: registered before a parameter is
paged or after, on a layer that comes late, and where they hold an optimizer that steps inside backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.hooks import RemovableHandle

import deepoffload
from deepoffload.runtime.context import engine_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, Paging, Same

Watched = tuple[list[Any], list[Any]]
"""What hooks have seen, and what has to live as long as they do."""


def each(register: Callable[[Tensor, Watched], Any]) -> Callable[[nn.Module, Watched], None]:
    """Put hooks on every parameter of a model."""

    def install(model: nn.Module, watched: Watched) -> None:
        for param in model.parameters():
            watched[1].append(register(param, watched))

    return install


def sees(param: Tensor, watched: Watched) -> Any:
    return param.register_post_accumulate_grad_hook(
        lambda p: watched[0].append(None if p.grad is None else p.grad.clone())
    )


def sees_what_was_there_before(param: Tensor, watched: Watched) -> Any:
    return param.register_hook(lambda g: watched[0].append([g.clone(), None if param.grad is None else +param.grad]))


def scales(param: Tensor, watched: Watched) -> Any:
    param.register_hook(lambda g: g * 2)
    return param.register_post_accumulate_grad_hook(lambda p: shift(p, 0.75, 0.0))


def shift(param: Tensor, factor: float, by: float) -> None:
    param.grad.mul_(factor).add_(by)


def assigns(param: Tensor, watched: Watched) -> Any:
    def assign(p: Tensor) -> None:
        p.grad = p.grad * 0.5

    return param.register_post_accumulate_grad_hook(assign)


def drops(param: Tensor, watched: Watched) -> Any:
    def drop(p: Tensor) -> None:
        watched[0].append(p.grad.sum())
        p.grad = None

    return param.register_post_accumulate_grad_hook(drop)


def steps(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[Tensor, Watched], Any]:
    """torch's tutorial of an optimizer step inside backward."""

    def register(param: Tensor, watched: Watched) -> Any:
        optimizer = make([param])

        def step(p: Tensor) -> None:
            if p.grad is not None:
                optimizer.step()
                optimizer.zero_grad()

        return param.register_post_accumulate_grad_hook(step)

    return register


def node(param: Tensor, watched: Watched) -> Any:
    """A hook on the node that accumulates, as wrappers that average gradients put it."""
    accumulator = param.expand_as(param).grad_fn.next_functions[0][0]
    return accumulator, accumulator.register_hook(lambda *_: watched[0].append(+param.grad))


def library(model: nn.Module, watched: Watched) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.9, "foreach": False})
    watched[1].append([param.view_as(param).grad_fn.next_functions[0][0] for param in model.parameters()])


KINDS: dict[str, Callable[[nn.Module, Watched], None]] = {
    "sees": each(sees),
    "sees what was there before": each(sees_what_was_there_before),
    "scales": each(scales),
    "assigns": each(assigns),
    "drops": each(drops),
    "steps by SGD": each(steps(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False))),
    "steps by AdamW": each(steps(lambda params: torch.optim.AdamW(params, lr=0.1))),
    "steps by ours": each(steps(lambda params: deepoffload.CPUAdamW(params, lr=0.1))),
    "node": each(node),
    "library": library,
}


def run(model: nn.Module, seed: int) -> None:
    model(rows(seed=seed)).square().mean().backward()


@pytest.mark.parametrize("before", [True, False])
def test_kinds_of_hooks(paging: Paging, before: bool) -> None:
    """Two gradients add up, the hooks of half of the parameters go or rest, and two more add up."""
    for kind in KINDS:
        watched: Watched = ([], [])

        def build(kind: str = kind, watched: Watched = watched) -> nn.Sequential:
            model = mlp()
            if before:
                KINDS[kind](model, watched)
            return model

        def program(model: nn.Sequential, kind: str = kind, watched: Watched = watched) -> Any:
            if not before:
                KINDS[kind](model, watched)
            for seed in range(2):
                run(model, seed)
            for handle in watched[1][::2]:
                if isinstance(handle, RemovableHandle):
                    handle.remove()
            model[2].weight.requires_grad_(False)
            run(model, 2)
            model[2].weight.requires_grad_(True)
            run(model, 3)
            seen = list(watched[0])
            watched[0].clear()
            watched[1].clear()
            return [kind, seen, gradients_of(model), weights_of(model)]

        Same(paging, EVICTING)(build, program, key="mlp with hooks")


def test_late_layers(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        watched: Watched = ([], [])
        run(model, 0)
        torch.manual_seed(5)
        late = nn.Linear(64, 64)
        each(sees)(late, watched)
        each(scales)(late, watched)
        model.append(late)
        for seed in range(2):
            run(model, seed)
        each(sees)(late, watched)
        run(model, 2)
        return watched[0], gradients_of(model)

    same(mlp, program)


def test_order_of_hooks(same: Same) -> None:
    """They are called in the order of their registration, whenever that was."""

    def build() -> nn.Sequential:
        model = mlp()
        for number in range(3):
            model[0].weight.register_post_accumulate_grad_hook(lambda p, n=number: shift(p, 0.5, n))
        return model

    def program(model: nn.Sequential) -> Any:
        seen: list[Any] = []
        model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        model[0].weight.register_post_accumulate_grad_hook(lambda p: shift(p, 1.0, 7.0))
        for seed in range(2):
            run(model, seed)
        return seen, gradients_of(model)

    same(build, program, key="ordered hooks")


def test_initialize_of_a_model_that_has_hooks(paging: Paging) -> None:
    def program(page: bool) -> Any:
        torch.manual_seed(0)
        model: Any = mlp()
        watched: Watched = ([], [])
        each(sees)(model, watched)
        if page:
            settings = {
                "host_budget": 120 << 10,
                "nvme_path": str(paging.nvme_path),
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "debug": {"poison": True},
            }
            deepoffload.initialize(model=model, config=settings)
            assert engine_of(model).stats()["evictions"] > 0, "nothing was evicted: this tested nothing"
        for seed in range(2):
            run(model, seed)
        return watched[0], gradients_of(model)

    assert_same_bits(program(False), program(True))
