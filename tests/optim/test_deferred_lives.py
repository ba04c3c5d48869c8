"""A step that is still to be made, and everything whose life ends, begins or goes elsewhere in between: optimizers,
parameters, modules, graphs, engines; and what the program had kept from before the step."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import deepoffload
from deepoffload.errors import ClosedError
from deepoffload.runtime.context import engine_of
from tests.optim.deferred import ADAMW, SETTINGS, Pair, Start, backward, build, finish, sorted_state, units_pending
from tests.support.inspect import pager_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import rows
from tests.support.paging import TIGHT, Paging


@pytest.fixture(params=SETTINGS, ids=lambda setting: f"{setting}-{setting.precision}")
def pair(request: pytest.FixtureRequest, paging: Paging) -> Pair:
    return Pair(paging, request.param)


def begun(start: Start) -> Any:
    """An optimizer that has made two steps, and the gradients of a third."""
    optimizer = start.make(start.model.parameters())
    for seed in range(2):
        optimizer.zero_grad()
        backward(start.model, seed)
        optimizer.step()
    optimizer.zero_grad()
    backward(start.model, 2)
    return optimizer


# -- kept from before the step -----------------------------------------------------------------------------------------


def test_views_of_weights_kept_over_the_step(pair: Pair) -> None:
    def program(start: Start) -> Any:
        optimizer = begun(start)
        model = start.model
        kept = [model[0].weight.detach(), model[2].weight.data[3:5], model[4].weight.detach().t()]
        optimizer.step()
        seen = [view.clone() for view in kept]
        kept[0].mul_(0.5)  # moves the version counter that all aliases have together
        seen += weights_of(model).values()
        del kept
        return seen, finish(model, optimizer)

    pair(program, room=4.0)


def test_state_dict_kept_over_steps(pair: Pair) -> None:
    def program(start: Start) -> Any:
        optimizer = begun(start)
        kept = start.model.state_dict()
        seen = []
        for _ in range(2):
            optimizer.step()
            seen.append({name: value.clone() for name, value in kept.items()})
        del kept
        return seen, finish(start.model, optimizer)

    pair(program, room=6.0)


def test_array_of_a_weight_kept_over_the_step(pair: Pair) -> None:
    def program(start: Start) -> Any:
        optimizer = begun(start)
        kept = start.model[2].bias.detach().view(torch.uint8).numpy()
        optimizer.step()
        seen = kept.tolist()
        del kept
        return seen, finish(start.model, optimizer)

    pair(program, room=4.0)


def test_gradient_objects_kept_over_the_step(pair: Pair) -> None:
    def program(start: Start) -> Any:
        optimizer = begun(start)
        model = start.model
        kept = [model[0].weight.grad, model[2].bias.grad]
        optimizer.step()
        kept[1].add_(3.0)
        optimizer.zero_grad()
        kept[0].add_(7.0)
        backward(model, 5)
        seen = [grad.clone() for grad in kept]
        del kept
        optimizer.step()
        return seen, gradients_of(model), finish(model, optimizer)

    pair(program, room=4.0)


def test_views_of_gradients_kept_over_the_step(pair: Pair) -> None:
    def program(start: Start) -> Any:
        optimizer = begun(start)
        model = start.model
        kept = [model[0].weight.grad.view(-1)[5:], model[2].weight.grad.detach(), model[4].bias.grad.data]
        optimizer.step()
        for view in kept:
            view.mul_(-100.0)  # the step has used the old values
        optimizer.zero_grad()
        kept[2].zero_()
        seen = [view.clone() for view in kept]
        seen += weights_of(model).values()
        del kept, view
        return seen, finish(model, optimizer)

    pair(program, room=4.0)


def test_own_gradient_changed_after_the_step(pair: Pair) -> None:
    def program(start: Start) -> Any:
        optimizer = begun(start)
        model = start.model
        mine = torch.full_like(model[2].weight, 0.5)
        model[2].weight.grad = mine
        optimizer.step()
        mine.fill_(-1e4)
        seen = weights_of(model)
        optimizer.step()
        return seen, finish(model, optimizer)

    pair(program)


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_graph_made_before_the_step(pair: Pair) -> None:
    """torch refuses a backward that needs a weight's old values, and makes one that does not."""

    def program(start: Start) -> Any:
        optimizer = begun(start)
        model = start.model
        x = rows(seed=9).to(model[0].weight.dtype)
        needed = model(x).float().sum()
        free = model[0](x).float().sum()  # the first layer's weight is not needed for its own gradient
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            needed.backward()
        optimizer.zero_grad()
        free.backward()
        return gradients_of(model), weights_of(model), finish(model, optimizer)

    pair(program)


def test_graph_made_before_the_step_and_a_forward_in_between(pair: Pair) -> None:
    def program(start: Start) -> Any:
        optimizer = begun(start)
        model = start.model
        x = rows(seed=9).to(model[0].weight.dtype)
        needed = model(x).float().sum()
        optimizer.step()
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            needed.backward()
        optimizer.zero_grad()
        loss.backward()
        return gradients_of(model), finish(model, optimizer)

    pair(program)


def test_retained_graph_after_a_step_of_other_units(pair: Pair) -> None:
    """Only the first layer is trained, whose values no backward needs: the retained graph stays good."""

    def program(start: Start) -> Any:
        model = start.model
        optimizer = start.make(model[0].parameters())
        seen = []
        loss = model(rows(seed=9).to(model[0].weight.dtype)).float().square().mean()
        for _ in range(3):
            loss.backward(retain_graph=True)
            optimizer.step()
            seen.append(gradients_of(model))
            optimizer.zero_grad()
        model.zero_grad()
        return seen, weights_of(model), sorted_state(optimizer)

    pair(program)


def test_optimizers_in_backward(pair: Pair) -> None:
    """One optimizer per parameter, stepped by a hook as soon as its gradient is complete."""

    def program(start: Start) -> Any:
        model = start.model
        optimizers = {param: start.make([param]) for param in model.parameters()}

        def hook(param: Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(hook)
        losses = [backward(model, seed) for seed in range(3)]
        assert all(param.grad is None for param in model.parameters())
        return losses, weights_of(model), [sorted_state(optimizer) for optimizer in optimizers.values()]

    pair(program)


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_two_optimizers_over_one_unit(pair: Pair) -> None:
    def program(start: Start) -> Any:
        model = start.model
        weights = start.make([layer.weight for layer in model[::2]], lr=3e-2)
        biases = start.make([layer.bias for layer in model[::2]], max_grad_norm=None)
        losses = []
        for seed in range(3):
            losses.append(backward(model, seed))
            weights.step()
            if seed != 1:
                biases.step()
            (biases if seed else weights).zero_grad()
            (weights if seed else biases).zero_grad()
        return losses, weights_of(model), sorted_state(weights), sorted_state(biases)

    pair(program)


def test_two_optimizers_over_one_model(pair: Pair) -> None:
    def program(start: Start) -> Any:
        model = start.model
        lower, upper = start.make(model[:4].parameters()), start.make(model[4:].parameters(), lr=1e-3)
        losses = []
        for seed in range(4):
            losses.append(backward(model, seed))
            (lower if seed % 2 else upper).step()
            lower.zero_grad()
            if seed > 1:
                lower.step()
                upper.zero_grad()
        return losses, gradients_of(model), weights_of(model), sorted_state(lower), sorted_state(upper)

    pair(program)


def test_another_optimizer_takes_over(paging: Paging) -> None:
    def program(model: nn.Module) -> Any:
        first = deepoffload.CPUAdamW(model.parameters(), **ADAMW)
        backward(model, 1)
        first.step()
        second = deepoffload.CPULion(model.parameters(), lr=1e-3)
        second.step()
        del first
        return finish(model, second)

    twin, model = build(), paging.build(build, TIGHT, key="deferred")
    twin.load_state_dict(weights_of(model))
    assert_same_bits(program(twin), program(model))


def test_optimizer_deleted_right_after_the_step(pair: Pair) -> None:
    def program(start: Start) -> Any:
        optimizer = begun(start)
        optimizer.step()
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None, "a step that is still to be made holds the optimizer"
        seen = backward(start.model, 5), gradients_of(start.model), weights_of(start.model)
        return seen

    pair(program)


def test_parameter_group_added_after_the_step(pair: Pair) -> None:
    def program(start: Start) -> Any:
        model = start.model
        optimizer = start.make(model[2:].parameters())
        backward(model, 1)
        optimizer.step()
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 5e-2})
        return weights_of(model), finish(model, optimizer)

    pair(program, serial=True)


def test_units_that_the_next_steps_do_not_use(pair: Pair) -> None:
    def program(start: Start) -> Any:
        optimizer = start.stepped()
        model = start.model
        for seed in (5, 6):
            optimizer.zero_grad()
            model[2:](rows(seed=seed).to(model[0].weight.dtype)).float().square().mean().backward()
            optimizer.step()
        return gradients_of(model), finish(model, optimizer)

    pair(program)


# -- parameters and modules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "zero"), [(0, False), (4, False), (6, True)])
@pytest.mark.parametrize("first", ["weights", "state"])
def test_module_replaced_after_the_step(pair: Pair, number: int, zero: bool, first: str) -> None:
    """With nothing else holding the old parameters, their unit goes, and with it the step that it was to make."""

    def program(start: Start) -> Any:
        optimizer = start.stepped()
        model = start.model
        if zero:
            optimizer.zero_grad()
        del optimizer  # nothing holds the old parameters any more
        torch.manual_seed(3)
        model[number] = nn.Linear(64, 64).to(model[2].weight.dtype)
        fresh = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        seen = sorted_state(fresh) if first == "state" else weights_of(model)
        if not zero:
            fresh.zero_grad()
        losses = [backward(model, 5)]
        fresh.step()
        losses.append(backward(model, 6))
        return seen, losses, gradients_of(model), weights_of(model)

    pair(program, serial=True)


def test_bias_deleted_after_the_step(pair: Pair) -> None:
    """A part of a unit is gone; the rest of it is updated."""

    def program(start: Start) -> Any:
        optimizer = start.stepped()
        model = start.model
        state = sorted_state(optimizer)
        optimizer.step()
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not model[2].bias and p is not model[0].bias]
        for layer in (model[0], model[2]):
            optimizer.state.pop(layer.bias)
            layer.bias = None
        return state, weights_of(model), finish(model, optimizer)

    pair(program)


def test_parametrization_after_the_step(pair: Pair) -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    def program(start: Start) -> Any:
        optimizer = start.stepped()
        parametrize.register_parametrization(start.model[2], "weight", Half())
        return start.model[2].weight.detach().clone(), finish(start.model, optimizer)

    pair(program)


class Adapted(nn.Module):
    """A linear layer with a low-rank term next to it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.a = nn.Parameter(torch.randn(4, 64, dtype=inner.weight.dtype) * 0.1)
        self.b = nn.Parameter(torch.zeros(64, 4, dtype=inner.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.a.t() @ self.b.t()


def test_adapters_put_on_after_the_step(pair: Pair) -> None:
    def program(start: Start) -> Any:
        optimizer = start.stepped()
        model = start.model
        optimizer.zero_grad()
        torch.manual_seed(3)
        model.requires_grad_(False)
        for number in (0, 4):
            model[number] = Adapted(model[number])
        fresh = deepoffload.CPUAdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
        losses = []
        for seed in range(3):
            losses.append(backward(model, seed))
            fresh.step()
            fresh.zero_grad()
        with torch.no_grad():  # merged again, with a step still to be made
            for number in (0, 4):
                model[number].inner.weight.add_(model[number].b @ model[number].a)
                model[number] = model[number].inner
        model.requires_grad_(True)
        return losses, weights_of(model), backward(model, 7), gradients_of(model)

    pair(program, room=4.0)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_closed_with_a_step_to_come(paging: Paging) -> None:
    model = paging.build(build, TIGHT, key="deferred")
    optimizer = Start(model, {}).stepped()
    assert units_pending(model) == 4
    engine_of(model).close()
    for use in (model[0].weight.norm, optimizer.step, optimizer.state_dict, model.state_dict, lambda: model(rows())):
        with pytest.raises(ClosedError):
            use()


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_deleted_with_a_step_to_come(paging: Paging, order: str) -> None:
    """Everything goes at once: no transfer is made for a step that nobody will see."""
    model = paging.build(build, TIGHT, key="deferred")
    optimizer = Start(model, {}).stepped()
    engine = engine_of(model)
    assert units_pending(model) == 4
    if order == "model first":
        del model
        weight = optimizer.param_groups[0]["params"][3].detach().sum().item()
        assert weight == weight and pager_of(engine).life.closed_because is None
        del optimizer
    else:
        del optimizer, model
    assert pager_of(engine).life.closed_because is not None
    assert list(paging.nvme_path.iterdir()) == []


def test_save_pretrained(paging: Paging, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = paging.build(build, TIGHT, key="deferred")
    twin = build()
    twin.load_state_dict(weights_of(model))
    for start in (Start(twin, {}), Start(model, {})):
        start.stepped()
    assert units_pending(model) == 4
    deepoffload.save_pretrained(model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    saved = load_file(file)
    assert_same_bits(weights_of(twin), {name: saved[name] for name in weights_of(twin)})
