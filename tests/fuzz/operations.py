"""What random programs do with a model: each function does one thing and keeps what it sees.

Every operation runs on a plain and on a paged model alike. The numbers that it draws come from ``subject.draw``, which
is the same on both.
"""

from __future__ import annotations

import copy
import gc
import io
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.blocks import WIDTH
from tests.fuzz.subject import ROWS, Subject
from tests.support.loops import gradients_of, weights_of

Operation = Callable[[Subject], Any]

OPERATIONS: dict[str, Operation] = {}

USUAL = ("train", "train", "accumulate", "backward", "step", "zero_grad", "evaluate")
"""Mixed into every program, so that there is something to look at."""

FOR_IN_BACKWARD = frozenset(
    {"train", "evaluate", "inference", "read_weights", "edit_mul", "edit_copy", "edit_data", "state_dict", "deep_copy"}
    | {"collect", "schedule", "freeze", "toggle_mode", "save_and_load", "hold_view"}
)
"""What programs do whose updates happen inside backward: one backward for each step, and no clipping."""


NOT_REENTRANT = frozenset({"autograd_grad", "backward_inputs", "gradient_penalty", "hessian_vector", "input_gradient"})
"""What torch refuses where a reentrant checkpoint is involved."""


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = function
    return function


def some(subject: Subject) -> nn.Parameter:
    """One of the model's parameters."""
    params = list(subject.model.parameters())
    return params[subject.draw.randrange(len(params))]


def trained(subject: Subject) -> list[nn.Parameter]:
    return [param for param in subject.model.parameters() if param.requires_grad]


# -- loops -------------------------------------------------------------------------------------------------------------


@operation
def train(subject: Subject) -> Any:
    subject.optimizer.zero_grad()
    loss = subject.loss()
    loss.backward()
    subject.optimizer.step()
    return loss.detach()


@operation
def train_clipped(subject: Subject) -> Any:
    subject.optimizer.zero_grad()
    subject.loss().backward()
    norm = nn.utils.clip_grad_norm_(subject.model.parameters(), 0.05)
    subject.optimizer.step()
    return norm


@operation
def backward(subject: Subject) -> Any:
    loss = subject.loss()
    loss.backward()
    return loss.detach(), gradients_of(subject.model)


@operation
def accumulate(subject: Subject) -> Any:
    losses = [subject.loss(number) / 3 for number in range(1)]
    losses[0].backward()
    for number in range(1, 3):
        losses.append(subject.loss(number) / 3)
        losses[-1].backward()
    return [loss.detach() for loss in losses]


@operation
def two_graphs(subject: Subject) -> Any:
    first, second = subject.loss(0), subject.loss(1)
    first.backward()
    second.backward()
    return first.detach(), second.detach()


@operation
def summed_losses(subject: Subject) -> Any:
    loss = subject.loss(0) + subject.loss(1)
    loss.backward()
    return loss.detach()


@operation
def backward_twice(subject: Subject) -> Any:
    loss = subject.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients_of(subject.model)


@operation
def step(subject: Subject) -> Any:
    subject.optimizer.step()


@operation
def zero_grad(subject: Subject) -> Any:
    subject.optimizer.zero_grad(set_to_none=subject.draw.random() < 0.5)


@operation
def evaluate(subject: Subject) -> Any:
    with torch.no_grad():
        return subject.loss()


@operation
def inference(subject: Subject) -> Any:
    with torch.inference_mode():
        loss = float(subject.loss())
    return loss


@operation
def schedule(subject: Subject) -> Any:
    for group in subject.optimizer.param_groups:
        group["lr"] *= 0.5


@operation
def toggle_mode(subject: Subject) -> Any:
    subject.model.train(not subject.model.training)


@operation
def new_optimizer(subject: Subject) -> Any:
    subject.optimizer = subject.new_optimizer()


@operation
def scaled_loss(subject: Subject) -> Any:
    (subject.loss() * 128).backward()
    with torch.no_grad():
        for param in trained(subject):
            if param.grad is not None:
                param.grad.div_(128)
    return gradients_of(subject.model)


@operation
def failing_forward(subject: Subject) -> Any:
    """A batch that raises in the middle of the model; the program goes on."""

    def fail(module: nn.Module, args: Any) -> None:
        raise KeyError("a bad batch")

    handle = subject.layer().register_forward_pre_hook(fail)
    try:
        subject.loss()
    except KeyError:
        pass
    finally:
        handle.remove()


# -- gradients ---------------------------------------------------------------------------------------------------------


@operation
def clip_norm(subject: Subject) -> Any:
    return nn.utils.clip_grad_norm_(subject.model.parameters(), 0.1, foreach=subject.draw.random() < 0.5)


@operation
def clip_value(subject: Subject) -> Any:
    nn.utils.clip_grad_value_(subject.model.parameters(), 1e-3)
    return gradients_of(subject.model)


@operation
def edit_gradient(subject: Subject) -> Any:
    param = some(subject)
    if param.grad is not None:
        param.grad.mul_(0.5)
        param.grad[0 if param.dim() else ...] = 0.25
    return None if param.grad is None else param.grad.clone()


@operation
def assign_gradient(subject: Subject) -> Any:
    param = some(subject)
    if param.requires_grad:
        param.grad = torch.full_like(param, 0.01)


@operation
def drop_gradient(subject: Subject) -> Any:
    if subject.draw.random() < 0.5:
        some(subject).grad = None
    else:
        del some(subject).grad
    return gradients_of(subject.model)


@operation
def keep_gradient(subject: Subject) -> Any:
    """Holds a gradient object over what comes next, and looks at it again later."""
    kept = some(subject).grad
    if kept is not None:
        subject.kept.append(kept)


@operation
def flat_gradients(subject: Subject) -> Any:
    grads = [param.grad.flatten() for param in trained(subject) if param.grad is not None]
    return torch.cat(grads).norm() if grads else None


@operation
def autograd_grad(subject: Subject) -> Any:
    return torch.autograd.grad(subject.loss(), trained(subject), allow_unused=True)


@operation
def backward_inputs(subject: Subject) -> Any:
    params = trained(subject)
    subject.loss().backward(inputs=params[: len(params) // 2 + 1])
    return gradients_of(subject.model)


@operation
def gradient_penalty(subject: Subject) -> Any:
    loss = subject.loss()
    grads = torch.autograd.grad(loss, trained(subject), create_graph=True, allow_unused=True)
    (loss + 0.1 * sum(grad.pow(2).sum() for grad in grads if grad is not None)).backward()
    return gradients_of(subject.model)


@operation
def hessian_vector(subject: Subject) -> Any:
    params = trained(subject)
    grads = torch.autograd.grad(subject.loss(), params, create_graph=True, allow_unused=True)
    total = sum(grad.sum() for grad in grads if grad is not None)
    if not isinstance(total, Tensor) or not total.requires_grad:
        return None
    return torch.autograd.grad(total, params, allow_unused=True)


@operation
def input_gradient(subject: Subject) -> Any:
    hidden = torch.randn(2, 5, WIDTH).to(subject.model.head.weight.dtype).requires_grad_()
    output = subject.layer()(hidden)
    return torch.autograd.grad(output.square().mean(), hidden, allow_unused=True)


@operation
def through_functional_call(subject: Subject) -> Any:
    values = {name: param.detach() * 1.0 for name, param in subject.model.named_parameters()}
    with torch.no_grad():
        return torch.func.functional_call(subject.model, values, (subject.tokens(0),), tie_weights=False)


# -- weights -----------------------------------------------------------------------------------------------------------


@operation
def read_weights(subject: Subject) -> Any:
    return weights_of(subject.model)


@operation
def sum_weights(subject: Subject) -> Any:
    with torch.no_grad():
        return [param.float().square().sum() for param in subject.model.parameters()]


@operation
def weights_in_loss(subject: Subject) -> Any:
    (subject.loss() + 1e-3 * sum(param.square().sum() for param in trained(subject))).backward()
    return gradients_of(subject.model)


@operation
def edit_mul(subject: Subject) -> Any:
    with torch.no_grad():
        some(subject).mul_(0.9)


@operation
def edit_copy(subject: Subject) -> Any:
    param = some(subject)
    with torch.no_grad():
        param.copy_(param.detach().flip(0) if param.dim() else param)


@operation
def edit_index(subject: Subject) -> Any:
    param = some(subject)
    with torch.no_grad():
        param[0 if param.dim() else ...] = 0.125


@operation
def edit_data(subject: Subject) -> Any:
    some(subject).data.mul_(1.1)


@operation
def edit_view(subject: Subject) -> Any:
    view = some(subject).detach().view(-1)
    view[:1].add_(0.5)


@operation
def assign_data(subject: Subject) -> Any:
    param = some(subject)
    param.data = torch.full_like(param, 0.05)


@operation
def assign_data_under_view(subject: Subject) -> Any:
    param = some(subject)
    before = param.detach()
    param.data = param.detach() * 2
    return before.clone(), param.detach().clone()


@operation
def swap_data(subject: Subject) -> Any:
    one = some(subject)
    same = [other for other in subject.model.parameters() if other.shape == one.shape and other is not one]
    if same:
        one.data, same[0].data = same[0].data.clone(), one.data.clone()


@operation
def initialise(subject: Subject) -> Any:
    torch.manual_seed(3)
    nn.init.normal_(some(subject), std=0.1)


@operation
def edit_numpy(subject: Subject) -> Any:
    values = some(subject).detach()
    if values.dtype is not torch.bfloat16:  # numpy has no such type
        values.numpy()[...] *= 0.5


@operation
def moving_average(subject: Subject) -> Any:
    with torch.no_grad():
        averages = [param.detach().clone() for param in subject.model.parameters()]
        torch._foreach_lerp_(averages, [param.detach() * 2 for param in subject.model.parameters()], 0.1)
    return averages


@operation
def through_a_vector(subject: Subject) -> Any:
    flat = nn.utils.parameters_to_vector(subject.model.parameters()).detach()
    nn.utils.vector_to_parameters(flat * 0.95, subject.model.parameters())


@operation
def hold_view(subject: Subject) -> Any:
    """Keeps an alias of a weight over what comes next, and looks at it again later."""
    subject.kept.append(some(subject).detach()[..., :1])


@operation
def drop_kept(subject: Subject) -> Any:
    seen = [kept.clone() for kept in subject.kept]
    subject.kept.clear()
    return seen


@operation
def freeze(subject: Subject) -> Any:
    param = some(subject)
    param.requires_grad_(not param.requires_grad)


# -- graphs and hooks --------------------------------------------------------------------------------------------------


@operation
def open_graph(subject: Subject) -> Any:
    """A forward whose backward comes later, or never."""
    subject.open = subject.loss()
    return subject.open.detach()


@operation
def close_graph(subject: Subject) -> Any:
    loss, subject.open = subject.open, None
    if loss is not None:
        loss.backward()
    return gradients_of(subject.model)


@operation
def forward_hook(subject: Subject) -> Any:
    def look(module: nn.Module, args: Any, output: Any) -> None:
        seen.extend(param.detach().sum() for param in module.parameters(recurse=False))

    seen: list[Tensor] = []
    handle = subject.layer().register_forward_hook(look)
    subject.loss().backward()
    handle.remove()
    return seen


@operation
def backward_hook(subject: Subject) -> Any:
    def look(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        seen.extend(param.detach().sum() for param in module.parameters())

    seen: list[Tensor] = []
    handle = subject.layer().register_full_backward_hook(look)
    try:
        subject.loss().backward()
    finally:
        handle.remove()
    return seen


@operation
def parameter_hook(subject: Subject) -> Any:
    param = some(subject)
    if not param.requires_grad:
        return None
    handle = param.register_hook(lambda gradient: gradient * 0.5)
    subject.loss().backward()
    handle.remove()
    return gradients_of(subject.model)


@operation
def accumulated_hook(subject: Subject) -> Any:
    param = some(subject)
    if not param.requires_grad:
        return None
    seen: list[Any] = []
    handle = param.register_post_accumulate_grad_hook(
        lambda param: seen.append(None if param.grad is None else param.grad.detach().clone())
    )
    subject.loss().backward()
    subject.loss(1).backward()
    handle.remove()
    return seen


@operation
def packed_activations(subject: Subject) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
        loss = subject.loss()
    loss.backward()
    return gradients_of(subject.model)


@operation
def activations_on_cpu(subject: Subject) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = subject.loss()
    loss.backward()
    return gradients_of(subject.model)


@operation
def detect_anomaly(subject: Subject) -> Any:
    with torch.autograd.detect_anomaly(check_nan=False):
        subject.loss().backward()
    return gradients_of(subject.model)


@operation
def autocast(subject: Subject) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = subject.loss()
    loss.backward()
    return loss.detach(), gradients_of(subject.model)


# -- copies and life ---------------------------------------------------------------------------------------------------


@operation
def state_dict(subject: Subject) -> Any:
    values = {name: value.clone() for name, value in subject.model.state_dict().items()}
    edit_mul(subject)
    subject.model.load_state_dict(values)
    return values


@operation
def save_and_load(subject: Subject) -> Any:
    file = io.BytesIO()
    torch.save(subject.model.state_dict(), file)
    file.seek(0)
    values = torch.load(file)
    subject.model.load_state_dict(values)
    return values


@operation
def optimizer_state(subject: Subject) -> Any:
    state = copy.deepcopy(subject.optimizer.state_dict())
    subject.optimizer.load_state_dict(state)
    return state["state"]


@operation
def deep_copy(subject: Subject) -> Any:
    other = copy.deepcopy(subject.model)
    with torch.no_grad():
        return other(subject.tokens(0)), weights_of(other)


@operation
def replace_layer(subject: Subject) -> Any:
    """A new head, as in fine-tuning: late parameters, and old ones that go."""
    torch.manual_seed(5)
    subject.model.head = nn.Linear(WIDTH, ROWS)
    subject.optimizer = subject.new_optimizer()


@operation
def collect(subject: Subject) -> Any:
    gc.collect()


def pick(draw: random.Random, count: int, allowed: frozenset[str]) -> list[str]:
    """Names of the operations of a random program."""
    names = sorted(allowed)
    usual = [name for name in USUAL if name in allowed]
    return [draw.choice(usual) if draw.random() < 0.4 else draw.choice(names) for _ in range(count)]
