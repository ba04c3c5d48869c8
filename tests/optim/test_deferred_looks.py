"""A program that looks at anything, or changes anything, between ``step()`` and the next forward sees what plain
PyTorch shows it.

Every case runs on plain parameters and on paged ones whose last step is still to be made (``step_overlap="deferred"``),
and wants the same bits of what it saw, and of two more steps after it.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.optim.deferred import SETTINGS, Pair, Start, backward, finish, sorted_state, units_pending
from tests.support.inspect import pager_of
from tests.support.loops import gradients_of, weights_of
from tests.support.models import rows
from tests.support.paging import Paging


@pytest.fixture(params=SETTINGS, ids=lambda setting: f"{setting}-{setting.precision}")
def pair(request: pytest.FixtureRequest, paging: Paging) -> Pair:
    return Pair(paging, request.param)


Look = Callable[[Any, Any], Any]
LOOKS: dict[str, Look] = {}


def look(function: Look) -> Look:
    LOOKS[function.__name__] = function
    return function


# -- reading weights and state -----------------------------------------------------------------------------------------


@look
def norms(model: Any, optimizer: Any) -> Any:
    return [p.detach().float().norm() for p in model.parameters()], model[0].weight.norm().detach().clone()


@look
def foreach_norms(model: Any, optimizer: Any) -> Any:
    return [n.clone() for n in torch._foreach_norm([p.detach() for p in model.parameters()])]


@look
def data(model: Any, optimizer: Any) -> Any:
    return [p.data.clone() for p in reversed(list(model.parameters()))]


@look
def one_weight_of_the_last_unit(model: Any, optimizer: Any) -> Any:
    return model[6].bias[3].item(), model[6].weight[5, 5].item()


@look
def numpy_array(model: Any, optimizer: Any) -> Any:
    return model[2].weight.detach().float().numpy().sum().item(), model[0].bias.tolist()


@look
def printed(model: Any, optimizer: Any) -> Any:
    return str(model[4].bias.detach()), f"{model[6].weight[0, 0].item():.9f}", model[0].bias.sum().item()


@look
def vector(model: Any, optimizer: Any) -> Any:
    return parameters_to_vector(model[:3].parameters()).detach().clone()


@look
def state_dict(model: Any, optimizer: Any) -> Any:
    return {name: value.clone() for name, value in model[4:].state_dict().items()}


@look
def saved_and_loaded(model: Any, optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save({"model": weights_of(model), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return loaded["model"]


@look
def optimizer_state_dict(model: Any, optimizer: Any) -> Any:
    return sorted_state(optimizer)


@look
def deepcopied_model(model: Any, optimizer: Any) -> Any:
    twin = copy.deepcopy(model)
    return weights_of(twin), backward(twin, 5), gradients_of(twin)


@look
def deepcopied_optimizer(model: Any, optimizer: Any) -> Any:
    return sorted_state(copy.deepcopy(optimizer))


@look
def deepcopied_together(model: Any, optimizer: Any) -> Any:
    return finish(*copy.deepcopy((model, optimizer)))


@look
def pickled(model: Any, optimizer: Any) -> Any:
    return finish(*pickle.loads(pickle.dumps((model, optimizer))))


@look
def evaluation(model: Any, optimizer: Any) -> Any:
    with torch.no_grad():
        return model(rows(seed=5).to(model[0].weight.dtype)).clone()


@look
def inference_mode(model: Any, optimizer: Any) -> Any:
    with torch.inference_mode():
        seen = model(rows(seed=5).to(model[0].weight.dtype)) + model[0].bias
    return seen.clone()


@look
def functional_call(model: Any, optimizer: Any) -> Any:
    given = {"0.weight": model[2].weight, "2.bias": model[0].bias}
    with torch.no_grad():
        return torch.func.functional_call(model, given, (rows(seed=5).to(model[0].weight.dtype),)).clone()


@look
def autograd_grad(model: Any, optimizer: Any) -> Any:
    loss = model(rows(seed=5).to(model[0].weight.dtype)).float().square().mean()
    return [grad.clone() for grad in torch.autograd.grad(loss, [model[0].weight, model[6].bias])]


@look
def half_of_the_units(model: Any, optimizer: Any) -> Any:
    """As a program that generates, or trains only a part."""
    dtype = model[0].weight.dtype
    with torch.no_grad():
        seen = [model[:3](rows(seed=seed).to(dtype)).clone() for seed in range(3)]
    optimizer.zero_grad()
    model[4:](rows(seed=6).to(dtype)).float().square().mean().backward()
    seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return seen


@look
def units_in_another_order(model: Any, optimizer: Any) -> Any:
    x = rows(seed=6).to(model[0].weight.dtype)
    for layer in (model[6], model[0], model[4], model[0]):
        x = layer(x).tanh()
    optimizer.zero_grad()
    x.float().square().mean().backward()
    seen = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return seen


@look
def exception_in_forward(model: Any, optimizer: Any) -> Any:
    def fail(*_: Any) -> None:
        raise KeyError("in the middle of the forward")

    handle = model[4].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(rows(seed=5).to(model[0].weight.dtype))
    handle.remove()
    return weights_of(model)


@look
def wrong_input(model: Any, optimizer: Any) -> Any:
    with pytest.raises(RuntimeError):
        model(rows(seed=5)[:, :7].to(model[0].weight.dtype))
    return backward(model, 5)


# -- gradients ---------------------------------------------------------------------------------------------------------


@look
def gradients(model: Any, optimizer: Any) -> Any:
    return gradients_of(model)


@look
def gradients_after_zero_grad(model: Any, optimizer: Any) -> Any:
    optimizer.zero_grad()
    return gradients_of(model), backward(model, 7), gradients_of(model)


@look
def accumulation_over_a_step(model: Any, optimizer: Any) -> Any:
    """No zero_grad: the next backward adds to what the step used."""
    seen = backward(model, 7), gradients_of(model)
    optimizer.step()
    return seen


@look
def gradients_set_to_zero(model: Any, optimizer: Any) -> Any:
    optimizer.zero_grad(set_to_none=False)
    seen = [gradients_of(model)]
    optimizer.step()
    seen.append(gradients_of(model))
    backward(model, 7)
    return seen, gradients_of(model)


@look
def gradients_zeroed_one_by_one(model: Any, optimizer: Any) -> Any:
    for number, param in enumerate(model.parameters()):
        if number % 2:
            param.grad.zero_()
    backward(model, 7)
    return gradients_of(model)


@look
def model_zero_grad_twice(model: Any, optimizer: Any) -> Any:
    model.zero_grad()
    optimizer.zero_grad()
    model.zero_grad(set_to_none=False)
    seen = gradients_of(model)
    optimizer.step()  # without gradients: nothing happens
    return seen, weights_of(model)


@look
def gradients_deleted(model: Any, optimizer: Any) -> Any:
    model[0].weight.grad = None
    del model[2].bias.grad
    del model[6].weight.grad
    seen = gradients_of(model)
    optimizer.step()
    return seen


@look
def gradients_dropped_one_by_one_within_a_unit(model: Any, optimizer: Any) -> Any:
    model[2].weight.grad = None
    model[2].bias.grad.mul_(3)
    model[2].weight.grad = torch.ones_like(model[2].weight)
    seen = gradients_of(model)
    optimizer.step()
    return seen


@look
def gradients_assigned(model: Any, optimizer: Any) -> Any:
    for number, param in enumerate(model.parameters()):
        if number % 3 == 0:
            param.grad = torch.full_like(param, 0.25)
    optimizer.step()
    return gradients_of(model)


@look
def gradients_assigned_after_zero_grad(model: Any, optimizer: Any) -> Any:
    optimizer.zero_grad()
    model[4].weight.grad = torch.full_like(model[4].weight, 0.25)
    backward(model, 8)
    optimizer.step()
    return gradients_of(model)


@look
def shared_gradient_changed(model: Any, optimizer: Any) -> Any:
    model[0].weight.grad = model[2].weight.grad
    model[0].weight.grad.zero_()
    return gradients_of(model)


@look
def gradient_of_another_parameter(model: Any, optimizer: Any) -> Any:
    model[0].weight.grad = model[2].weight.grad
    model[4].bias.grad = model[4].bias.grad.clone()
    optimizer.step()
    seen = gradients_of(model)
    optimizer.zero_grad()
    return seen


@look
def gradient_objects_kept(model: Any, optimizer: Any) -> Any:
    kept = [p.grad for p in model.parameters()]
    kept[0].add_(1.0)
    optimizer.zero_grad()
    first = [g.clone() for g in kept]
    kept[0].add_(1.0)
    return first, gradients_of(model), backward(model, 7), gradients_of(model), [g.clone() for g in kept]


@look
def gradient_objects_kept_and_stepped_again(model: Any, optimizer: Any) -> Any:
    kept = [p.grad for p in model.parameters()]
    optimizer.step()
    kept[3].mul_(2.0)
    optimizer.step()
    kept[3].mul_(2.0)
    kept[4].zero_()
    return [g.clone() for g in kept], gradients_of(model)


@look
def gradients_written_after_the_step(model: Any, optimizer: Any) -> Any:
    model[0].weight.grad.add_(100.0)
    model[2].weight.grad.data.mul_(-5.0)
    model[4].weight.grad[2:3] = 1e3
    seen = [p.detach().clone() for p in model.parameters()], gradients_of(model)
    optimizer.step()
    return seen


@look
def clipped_after_the_step(model: Any, optimizer: Any) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-4).clone(), gradients_of(model), weights_of(model)


# -- writing weights ---------------------------------------------------------------------------------------------------


@look
def weights_added_to(model: Any, optimizer: Any) -> Any:
    with torch.no_grad():
        model[0].weight.add_(0.5)
        model[2].bias[1] = 7.0
        model[4].weight.data.mul_(0.5)
        model[6].weight.data[3].zero_()
    return weights_of(model)


@look
def weights_copied_into(model: Any, optimizer: Any) -> Any:
    with torch.no_grad():
        model[0].weight.copy_(torch.full_like(model[0].weight, 0.25))
    model[2].weight.data.copy_(torch.full_like(model[2].weight, 0.125))
    model[4].weight.data = torch.full_like(model[4].weight, 0.0625)
    model[6].weight.detach().fill_(0.03125)
    return weights_of(model)


@look
def weights_initialised_again(model: Any, optimizer: Any) -> Any:
    torch.manual_seed(5)
    model[2].reset_parameters()
    nn.init.ones_(model[0].bias)
    return weights_of(model)


@look
def weights_swapped(model: Any, optimizer: Any) -> Any:
    with torch.no_grad():
        kept = model[0].weight.clone()
        model[0].weight.copy_(model[6].weight)
        model[6].weight.copy_(kept)
    return weights_of(model)


@look
def weights_loaded(model: Any, optimizer: Any) -> Any:
    given = {name: torch.full_like(p, 0.01) for name, p in model.named_parameters() if not name.startswith("2")}
    model.load_state_dict(given, strict=False)
    return weights_of(model)


@look
def weights_from_a_vector(model: Any, optimizer: Any) -> Any:
    layers = model[4:]
    vector_to_parameters(parameters_to_vector(layers.parameters()).detach() * 0.5, layers.parameters())
    return weights_of(model)


@look
def moving_average(model: Any, optimizer: Any) -> Any:
    average = [torch.zeros_like(p) for p in model.parameters()]
    for seed in (11, 12):
        with torch.no_grad():
            for mean, param in zip(average, model.parameters(), strict=True):
                mean.lerp_(param, 0.25)
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()
    return average


@look
def averaged_model(model: Any, optimizer: Any) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    optimizer.zero_grad()
    backward(model, 11)
    optimizer.step()
    average.update_parameters(model)
    return weights_of(average)


@look
def frozen(model: Any, optimizer: Any) -> Any:
    model[0].weight.requires_grad_(False)
    model[4].requires_grad_(False)
    optimizer.zero_grad()
    backward(model, 7)
    optimizer.step()
    seen = weights_of(model)
    optimizer.zero_grad()
    model.requires_grad_(True)
    return seen


@look
def frozen_and_thawed_at_once(model: Any, optimizer: Any) -> Any:
    model.requires_grad_(False)
    model.requires_grad_(True)
    return gradients_of(model), weights_of(model)


# -- the optimizer -----------------------------------------------------------------------------------------------------


@look
def settings_changed(model: Any, optimizer: Any) -> Any:
    """A scheduler: what is still to be made must use the old ones."""
    for group in optimizer.param_groups:
        group.update(lr=123.0, betas=(0.0, 0.0), weight_decay=50.0, eps=10.0)
    seen = weights_of(model), sorted_state(optimizer)
    for group in optimizer.param_groups:
        group.update(lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1, eps=1e-8)
    return seen


@look
def clip_norm_changed(model: Any, optimizer: Any) -> Any:
    optimizer.max_grad_norm = None
    seen = weights_of(model)
    optimizer.step()
    return seen


@look
def scheduler(model: Any, optimizer: Any) -> Any:
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    losses = []
    for seed in range(4):
        optimizer.zero_grad()
        losses.append(backward(model, seed))
        optimizer.step()
        schedule.step()
    return losses


@look
def stepped_three_times(model: Any, optimizer: Any) -> Any:
    optimizer.step()
    optimizer.step()
    return gradients_of(model)


@look
def stepped_with_a_closure(model: Any, optimizer: Any) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model, 9)

    return [optimizer.step(closure).clone() for _ in range(2)]


@look
def older_state_loaded(model: Any, optimizer: Any) -> Any:
    older = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(older)
    return weights_of(model)


@look
def skipped_for_a_nan(model: Any, optimizer: Any) -> Any:
    optimizer.skip_non_finite = True
    model[2].weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert not optimizer.applied
    optimizer.zero_grad()
    return weights_of(model)


@look
def step_inside_forward(model: Any, optimizer: Any) -> Any:
    """The whole training step is made by the forward of a module around the model."""

    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, seed: int) -> Tensor:
            optimizer.zero_grad()
            loss = backward(self.inner, seed)
            optimizer.step()
            return loss + self.inner[0].weight.detach().float().sum()

    trainer = Trainer()
    return [trainer(seed).clone() for seed in (11, 12)]


@pytest.mark.parametrize("name", LOOKS)
def test_between_step_and_forward(pair: Pair, name: str) -> None:
    def program(start: Start) -> Any:
        optimizer = start.stepped()
        if type(start.model[0].weight) is not nn.Parameter and pager_of(start.model).defer_updates:
            assert units_pending(start.model) == 4, "no step was to come: this tests nothing"
        seen = LOOKS[name](start.model, optimizer)
        return seen, finish(start.model, optimizer)

    pair(program, room=4.0 if name in HOLDS_MUCH else None, serial=name in WRITES_BY_DATA)


HOLDS_MUCH = (
    "state_dict",
    "gradient_objects_kept",
    "gradient_objects_kept_and_stepped_again",
    "vector",
    "foreach_norms",
    "averaged_model",
)
"""What refers to much of the model at once, so that the budget needs room for that next to the update."""

WRITES_BY_DATA = ("weights_added_to", "weights_copied_into", "weights_from_a_vector")
"""What writes weights in ways that move no version counter, which the fp32 master of a plain bf16 weight does not
follow."""
