"""What autograd saves of a weight: right bit for bit, under other hooks, too, and
whenever the graph is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from deepoffload.params.torch_private import swap_memory
from tests.support.inspect import units_of
from tests.support.loops import assert_same_bits, gradients_of
from tests.support.models import TinyGPT, batch, llama, mlp, next_token_loss, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Same, Setting, plain

HOLDING = 4.0
"""Room for programs that keep most weights alive themselves, as attributes or in graphs that see no hooks."""


def backward(model: nn.Module, output: Tensor) -> list[Any]:
    output.square().mean().backward()
    return [output.detach().clone(), gradients_of(model)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoint_of_modules(same: Same, use_reentrant: bool) -> None:
    def program(model: TinyGPT) -> Any:
        loss = next_token_loss(model, batch(1))
        loss.backward()
        return loss.detach(), gradients_of(model)

    same(lambda: TinyGPT(checkpointing=use_reentrant, depth=3), program, key="checkpointed gpt")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoint_of_a_function_that_uses_weights(same: Same, use_reentrant: bool) -> None:
    """No module is called, so no module hook runs: neither in the forward nor when it is run again."""

    def program(model: nn.Sequential) -> Any:
        def run(x: Tensor) -> Tensor:
            for layer in model[::2]:
                x = torch.tanh(x @ layer.weight.t() + layer.bias)
            return x

        return backward(model, checkpoint(run, rows().requires_grad_(), use_reentrant=use_reentrant))

    same(mlp, program, room=HOLDING)


class ChecksItself(nn.Module):
    """A unit that runs a part of itself behind a checkpoint: in forward inside its window, in backward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(
            lambda y: self.second(nn.functional.gelu(self.first(y))), x * self.scale, use_reentrant=False
        )


def test_checkpoint_inside_a_unit(same: Same) -> None:
    same(
        lambda: nn.Sequential(*[ChecksItself() for _ in range(4)]),
        lambda model: backward(model, model(rows().requires_grad_())),
        key="checks itself",
    )


class Scaled(nn.Module):
    """A layer that the budget splits, with its own weight; ``fails`` lets it raise at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 0.5))
        self.first = nn.Linear(64, 256)
        self.second = nn.Linear(256, 64)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(nn.functional.gelu(self.first(x))) * self.scale
        if self.fails:
            raise ArithmeticError
        return x


def scaled() -> nn.Sequential:
    return nn.Sequential(*[Scaled() for _ in range(4)])


def test_derivatives_of_derivatives_behind_checkpoints_around_split_layers(same: Same) -> None:
    """The checkpoint ends its second forward by an exception, in the middle of a node that then records a graph."""

    def program(model: nn.Module) -> Any:
        x = y = rows().requires_grad_()
        for layer in model:
            y = checkpoint(layer, y, use_reentrant=False)
        (first,) = torch.autograd.grad(y.sigmoid().sum(), x, create_graph=True)
        inputs = [x, *model[2].parameters()]
        second = torch.autograd.grad(first.square().sum(), inputs, create_graph=True)
        sum(part.square().sum() for part in second).backward()
        return [first, second, gradients_of(model)]

    same(scaled, program, room=2.0)


def test_a_split_layer_that_raises_leaves_no_hooks_to_who_catches_it(paging: Paging) -> None:
    model = paging.build(scaled, EVICTING, key="scaled")
    assert sum(unit.name.startswith("1.") for unit in units_of(model)) > 1, "this would test nothing"
    model[1].fails = True
    with pytest.raises(ArithmeticError):
        model(rows())
    try:
        model(rows())
    except ArithmeticError:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_transformers_layers_that_are_units(paging: Paging, use_reentrant: bool) -> None:
    """transformers puts the checkpoint around a layer's forward: inside its window, and in backward without it."""

    def build() -> Any:
        return llama(hidden_size=32, intermediate_size=48, num_hidden_layers=12)

    def program(model: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        model.train()
        torch.manual_seed(4)
        return backward(model, next_token_loss(model, batch(0)))

    expected = program(plain(build))
    with paging.context(EVICTING, 500_000):
        torch.manual_seed(0)
        model = build()
    assert any(unit.name == "model.layers.3" for unit in units_of(model)), "this would test nothing"
    assert_same_bits(expected, program(model))


def test_nested_and_sequential_checkpoints(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        def half(x: Tensor) -> Tensor:
            return checkpoint(model[:4], x, use_reentrant=False)

        x = checkpoint(half, rows().requires_grad_(), use_reentrant=False)
        return backward(model, checkpoint_sequential(model, 2, x, use_reentrant=True))

    same(mlp, program)


def test_selective_checkpoint(same: Same) -> None:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def program(model: nn.Sequential) -> Any:
        output = checkpoint(
            model, rows(), use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
        return backward(model, output)

    same(mlp, program)


def test_save_on_cpu_around_the_forward(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        with torch.autograd.graph.save_on_cpu():
            output = model(rows())
        return backward(model, output)

    same(mlp, program)


def test_hooks_of_the_program_see_activations_and_all_is_unpacked(same: Same) -> None:
    packed: list[int] = []

    def pack(tensor: Tensor) -> tuple[Tensor]:
        packed.append(tensor.numel())
        return (tensor,)

    def program(model: nn.Module) -> Any:
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value[0]):
            output = model(rows())
        assert packed, "the program's own hooks were never called"
        return backward(model, output)

    same(mlp, program)


def test_hooks_disabled_around_the_forward(same: Same) -> None:
    """Nobody may push hooks then: what autograd keeps by reference must stay until the step."""

    def program(model: nn.Module) -> Any:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            output = model(rows())
        return backward(model, output)

    same(mlp, program, room=HOLDING)


class _Reversible(torch.autograd.Function):
    """Calls its module in forward without a graph, and again in backward, as reversible networks do."""

    @staticmethod
    def forward(context: Any, x: Tensor, module: nn.Module) -> Tensor:
        context.module = module
        context.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = context.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            context.module(x).backward(grad)
        return x.grad, None


def test_module_called_inside_a_custom_backward(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        x = rows().requires_grad_()
        for layer in model:
            x = _Reversible.apply(x, layer)
        return backward(model, x)

    same(mlp, program)


class _Multiply(torch.autograd.Function):
    """Keeps a weight the wrong way round, as an attribute, and a view of it as another."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, how: str) -> Tensor:
        context.how = how
        if how == "saved":
            context.save_for_backward(x, weight)
        else:
            context.x, context.weight = x, weight
            context.transposed = weight.t()
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if context.how == "saved":
            x, weight = context.saved_tensors
            return grad @ weight, grad.t() @ x, None
        weight = context.weight if context.how == "attribute" else context.transposed.t()
        return grad @ weight, grad.t() @ context.x, None


@pytest.mark.parametrize("how", ["saved", "attribute", "view"])
def test_custom_functions(same: Same, how: str) -> None:
    def program(model: nn.Sequential) -> Any:
        x = rows().requires_grad_()
        for layer in model[::2]:
            x = torch.tanh(_Multiply.apply(x, layer.weight, how))
        return backward(model, x)

    same(mlp, program, room=None if how == "saved" else HOLDING)


def test_weights_in_the_loss(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        output = model(rows())
        penalty = sum(param.square().sum() for param in model.parameters())
        (output.square().mean() + 1e-2 * penalty).backward()
        return gradients_of(model)

    same(mlp, program)


def test_two_weights_saved_by_one_node(same: Same) -> None:
    """The node unpacks both before it uses either: fetching the second must not take the first one's memory."""

    def program(model: nn.Sequential) -> Any:
        product = model[0].weight @ model[2].weight @ model[4].weight
        solved = torch.linalg.solve(model[6].weight + 8 * torch.eye(64), model[0].weight)
        (product.square().sum() + solved.sum()).backward()
        return gradients_of(model)

    same(mlp, program)


def test_retain_graph_and_a_second_backward(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        loss = model(rows()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        first = gradients_of(model)
        model.zero_grad()
        loss.backward()
        return first, gradients_of(model)

    same(mlp, program)


def test_two_forwards_then_their_backwards(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        one, other = model(rows(seed=1)).sum(), model(rows(seed=2)).square().sum()
        one.backward()
        other.backward()
        return gradients_of(model)

    same(mlp, program)


def test_double_backward(same: Same) -> None:
    """A gradient penalty, whose own gradient goes through the first one's graph."""

    def program(model: nn.Module) -> Any:
        x = rows().requires_grad_()
        loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        return gradients_of(model)

    same(mlp, program)


def test_gradients_with_a_graph_in_a_loss(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        loss = model(rows()).square().mean()
        loss.backward(create_graph=True)
        penalty = sum(param.grad.square().sum() for param in model.parameters())
        shown = penalty.detach().clone()
        model.zero_grad()
        penalty.backward()
        return shown, gradients_of(model)

    same(mlp, program)


def test_weight_changed_between_two_backwards_is_refused(same: Same) -> None:
    """A graph that a backward has recorded describes weights, too."""

    def program(model: nn.Sequential) -> Any:
        x = rows().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with torch.no_grad():
            model[4].weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            slope.square().sum().backward()
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is None

    same(mlp, program)


def test_third_derivatives_and_functional_products(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        x = rows().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        second.square().sum().backward()
        products = torch.autograd.functional.hvp(lambda y: model(y).square().sum(), rows(), rows(seed=4))
        return gradients_of(model), x.grad, products

    same(mlp, program)


def test_autograd_grad_and_partial_backward(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        params = list(model.parameters())
        found = torch.autograd.grad(model(rows()).square().mean(), params)
        model(rows()).square().mean().backward(inputs=params[:3])
        return [g.clone() for g in found], gradients_of(model)

    same(mlp, program)


@pytest.mark.parametrize("edit", ["copy", "clamp", "step"])
def test_weight_changed_between_forward_and_backward_is_refused_as_torch_does(same: Same, edit: str) -> None:
    """torch cannot tell when saved-tensor hooks are there; without this the backward would use the new weights."""

    def program(model: nn.Sequential) -> Any:
        output = model(rows()).square().mean()
        with torch.no_grad():
            if edit == "copy":
                model[2].weight.copy_(model[0].weight)
            elif edit == "clamp":
                model[2].weight.clamp_(-0.01, 0.01)
            else:
                for param in model.parameters():
                    param.grad = torch.ones_like(param)
                torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()
        return []

    same(mlp, program)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(64, 64, 2))
        self.tail = mlp(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.pairs)
        return self.tail((x.to(weight.dtype) @ weight.conj()).imag + weight.real.sum())


def test_complex_views_of_a_weight(same: Same) -> None:
    same(Complex, lambda model: backward(model, model(rows())))


class ComplexWeight(Complex):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.to(torch.complex64) @ self.weight.conj()).real)


def test_complex_weights(same: Same) -> None:
    same(ComplexWeight, lambda model: backward(model, model(rows())))


def test_graph_that_is_dropped_leaves_nothing_behind(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        for _ in range(3):
            model(rows()).sum()  # the graph dies here
        return backward(model, model(rows()))

    same(mlp, program)


def test_backward_outside_of_everything_the_forward_was_in(same: Same) -> None:
    """Forward under autocast to bf16 with fp32 weights, backward outside."""

    def program(model: nn.Module) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(rows())
        return backward(model, output.float())

    same(mlp, program)


def test_anomaly_detection(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        with torch.autograd.detect_anomaly(check_nan=True):
            return backward(model, model(rows()))

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        same(mlp, program)


@pytest.mark.skipif(swap_memory is None, reason="torch 2.12 can let views keep the old values; an older one is refused")
@pytest.mark.parametrize("setting", [RESIDENT, TIGHT, EVICTING], ids=str)
def test_new_data_between_forward_and_backward(paging: Paging, setting: Setting) -> None:
    """torch keeps the old memory for backward; ours has been written over, so backward refuses."""
    model = paging.build(mlp, setting, key="mlp")
    loss = model(rows()).square().mean()
    model[2].weight.data = model[2].weight.data * 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model(rows()).square().mean().backward()
