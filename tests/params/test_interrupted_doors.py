"""Ctrl-C in the middle of a door, of a question that is asked past the doors, or of an assignment: all or nothing of it
has happened, and the doors are as they were. Every place is tried at which Python code of ours can be interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.params import torch_private
from deepoffload.params.parameter import OffloadedParameter
from tests.runtime.lifecycle_program import interrupted_at
from tests.support.inspect import tiers_of
from tests.support.paging import Paging


def paged_pair(paging: Paging) -> tuple[Any, nn.Parameter, nn.Parameter]:
    """A context, and two weights of its model. Gradients land, because everything is recorded."""
    with deepoffload.offload_context(
        host_budget="1MiB", nvme_path=str(paging.nvme_path), debug={"poison": True}, timeline=True
    ) as context:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    context.kept = model
    first, second = model.parameters()
    return context, first, second


def at_every_place(call: Callable[[], Any]) -> Iterator[str]:
    """Interrupt ``call`` at one place after the other, and yield each when that is done."""
    for nth in count():
        with interrupted_at(nth) as places, suppress(KeyboardInterrupt):
            call()
        if not places:
            return
        yield places[0]


def in_modes(first: Any, second: Any) -> None:
    with torch_private.outside_user_modes():
        torch_private.get_data(first)


def set_other_memory(first: Any, second: Any) -> None:
    with torch.no_grad():
        first.set_(torch.ones(3, 3))


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "data past the doors": lambda first, second: torch_private.get_data(first),
    "gradient past the doors": lambda first, second: torch_private.get_grad(first),
    "version past the doors": lambda first, second: torch_private.version_of(first),
    "outside of modes": in_modes,
    "metadata": lambda first, second: first.is_floating_point(),
    "operation": lambda first, second: first + second,
    "operator": lambda first, second: torch.ops.aten.add.Tensor(first, second),
    "data": lambda first, second: first.data,
    "new data": lambda first, second: setattr(first, "data", torch.ones(3, 3)),
    "in place": lambda first, second: first.detach().add_(0.0),
    "set_": set_other_memory,
}


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_leaves_the_doors_as_they_were(paging: Paging, call: str) -> None:
    context, first, second = paged_pair(paging)
    with torch.no_grad():
        first.fill_(1.0)
        second.fill_(1.0)
    interrupted = 0
    for place in at_every_place(lambda: CALLS[call](first, second)):
        interrupted += 1
        assert torch._C._is_torch_function_enabled() and torch.is_grad_enabled(), place
        assert type(first) is type(second) is OffloadedParameter, place
        assert torch.equal(first.detach().clone(), torch.ones(3, 3)), place
        assert [block.name for block in tiers_of(context.engine).blocks() if block.leases] == [], place
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, place
    assert interrupted > 5


def test_ctrl_c_in_an_assignment_leaves_the_old_gradient_or_the_new_one(paging: Paging) -> None:
    context, first, second = paged_pair(paging)
    x, given = torch.ones(1, 3), torch.full((3, 3), 5.0)

    def backward() -> None:
        (first * x).sum().backward()

    def assign() -> None:
        first.grad = given.clone()

    first.grad = None
    backward()
    for place in at_every_place(assign):
        grad: Tensor | None = first.grad
        assert grad is not None
        before = grad.clone()
        assert torch.equal(before, given) or torch.equal(before, torch.ones(3, 3)), place
        backward()
        assert torch.equal(first.grad, before + 1), place
        first.grad = None
        backward()
    assert torch.equal(first.grad, given)
    del context
