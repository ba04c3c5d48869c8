"""Derivatives by paged parameters that the program asks for itself: the same numbers, or the same refusal, as in plain
PyTorch, with anything that runs inside the backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

from deepoffload.runtime.context import engine_of
from tests.params.inside_backward import KINDS, WIDTH, Layer
from tests.support.inspect import units_of
from tests.support.loops import gradients_of
from tests.support.models import rows
from tests.support.paging import Same

Way = Callable[[nn.Module, list[nn.Parameter]], Any]


def inputs_of(seed: int) -> Tensor:
    return rows(seed=seed)[:, :WIDTH].clone().requires_grad_()


def loss_of(model: nn.Module, seed: int = 3) -> Tensor:
    return model(inputs_of(seed)).square().mean()


def copies(found: Any) -> list[Any]:
    return [None if grad is None else grad.detach().clone() for grad in found]


def backward_inputs(model: nn.Module, params: list[nn.Parameter]) -> Any:
    loss_of(model).backward(inputs=params)
    loss_of(model, 4).backward(inputs=params[3:5])
    return gradients_of(model)


def all_backward(model: nn.Module, params: list[nn.Parameter]) -> Any:
    losses = [loss_of(model), loss_of(model, 4)]
    torch.autograd.backward(losses, [torch.tensor(0.5), None], inputs=params, retain_graph=True)
    losses[0].backward(inputs=params[2])
    return gradients_of(model)


def grad(model: nn.Module, params: list[nn.Parameter]) -> Any:
    return copies(torch.autograd.grad(loss_of(model), params, allow_unused=True))


def grad_of_unused(model: nn.Module, params: list[nn.Parameter]) -> Any:
    return copies(torch.autograd.grad(loss_of(model[1:]), params, materialize_grads=True))


def one_by_one(model: nn.Module, params: list[nn.Parameter]) -> Any:
    loss = loss_of(model)
    return [copies(torch.autograd.grad(loss, param, retain_graph=True, allow_unused=True)) for param in params[::5]]


def several(model: nn.Module, params: list[nn.Parameter]) -> Any:
    output = model(inputs_of(5))
    many = torch.stack([torch.ones_like(output), output.detach()])
    return copies(torch.autograd.grad(output, params, many, is_grads_batched=True, allow_unused=True))


def penalty(model: nn.Module, params: list[nn.Parameter]) -> Any:
    loss = loss_of(model)
    grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    (loss + 0.1 * sum(grad.square().sum() for grad in grads if grad is not None)).backward()
    return gradients_of(model)


def hessian_vector(model: nn.Module, params: list[nn.Parameter]) -> Any:
    """The product that influence functions and conjugate gradients need, twice from one graph."""
    grads = torch.autograd.grad(loss_of(model), params, create_graph=True, allow_unused=True)
    known = [(grad, param) for grad, param in zip(grads, params, strict=True) if grad is not None]
    vectors = [grad.detach().clone() for grad, _ in known]
    found = []
    for _ in range(2):
        product = torch.stack([(grad * v).sum() for (grad, _), v in zip(known, vectors, strict=True)]).sum()
        found += copies(torch.autograd.grad(product, params, retain_graph=True, allow_unused=True))
    return found


def adapted(model: nn.Module, params: list[nn.Parameter]) -> Any:
    """MAML: an inner step with a graph, the outer loss with the new weights, its gradient by the old ones."""
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(loss_of(model), params, create_graph=True, materialize_grads=True)
    fast = {name: p - 0.1 * g for name, p, g in zip(names, params, grads, strict=True)}
    torch.func.functional_call(model, fast, (inputs_of(6),)).square().mean().backward()
    return gradients_of(model)


def from_weights(model: nn.Module, params: list[nn.Parameter]) -> Any:
    """Weights and landed gradients as what a backward starts with."""
    output = model[1].linear(inputs_of(7))
    square = (output.t() @ output) * 0.1
    loss_of(model).backward()
    starts = [model[2].weight, model[3].linear.weight.grad]
    found = []
    for start in starts:
        found += copies(torch.autograd.grad(square, params, start, allow_unused=True, retain_graph=True))
        square.backward(start, inputs=params[3:6], retain_graph=True)
    both = torch.stack([start.detach() for start in starts])
    found += copies(torch.autograd.grad([square], params, [both], is_grads_batched=True, allow_unused=True))
    curved = torch.autograd.grad([square, square], params[3:6], starts, create_graph=True, allow_unused=True)
    torch.stack([grad.square().sum() for grad in curved if grad is not None]).sum().backward()
    return found, gradients_of(model)


def by_ordinary(model: nn.Module, params: list[nn.Parameter]) -> Any:
    """Nothing is paged but what the backward starts with."""
    x = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).requires_grad_()
    (slope,) = torch.autograd.grad(x * x, x, model[2].weight, create_graph=True)
    loss_of(model).backward()
    slope.sum().backward()
    (2 * x).backward(model[3].weight)
    (2 * x).backward(gradient=model[1].weight.grad)
    torch.autograd.backward([x * x], [model[4].weight])
    return slope.detach(), x.grad, gradients_of(model)


def of_paged(model: nn.Module, params: list[nn.Parameter]) -> Any:
    """Paged tensors are differentiated themselves."""
    weight, other = model[1].weight, model[2].weight
    ones = torch.ones_like(weight)
    found = copies(torch.autograd.grad(weight, weight, ones))
    found += copies(torch.autograd.grad([weight, other * weight], [weight, other], [other, ones]))
    found += copies(torch.autograd.grad(loss_of(model), dict(model.named_parameters()), allow_unused=True).values())
    edges = [torch.autograd.graph.get_gradient_edge(param) for param in params[:3]]
    found += copies(torch.autograd.grad(loss_of(model), [*edges, *params[3:5]], allow_unused=True))
    weight.backward(other)
    weight.backward(gradient=ones, inputs=weight)
    return found, gradients_of(model)


WAYS: tuple[Way, ...] = (
    backward_inputs, all_backward, grad, grad_of_unused, one_by_one, several, penalty, hessian_vector, adapted,
    from_weights, by_ordinary, of_paged,
)  # fmt: skip


def outcome(way: Way, model: nn.Module) -> Any:
    """What a way finds, or how torch refuses it."""
    model.zero_grad()
    try:
        return way(model, list(model.parameters()))
    except RuntimeError as error:
        return type(error).__name__, str(error).splitlines()[0]


def every_way(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # create_graph with backward(), hooks of inputs without gradients
        return {way.__name__: outcome(way, model) for way in WAYS if not (way is adapted and runs_again(model))}


def runs_again(model: nn.Module) -> bool:
    """Whether a checkpoint runs a part of the model again with weights that ``functional_call`` has taken back."""
    return model[0].kind.startswith("checkpointed")


def layers(kind: str) -> nn.Sequential:
    return nn.Sequential(*[Layer(kind) for _ in range(5)])


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_runs_inside(same: Same, kind: str) -> None:
    same(lambda: layers(kind), every_way, key=("layers", kind), room=3.0)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_inner_steps_with_other_weights(same: Same, use_reentrant: bool | None) -> None:
    """MAML: two inner steps with a graph, layer by layer through ``functional_call``, and a loss after them."""

    def program(model: nn.Sequential) -> Any:
        names = [name for name, _ in model[0].named_parameters()]
        fast = [list(layer.parameters()) for layer in model]

        def run(x: Tensor) -> Tensor:
            for layer, weights in zip(model, fast, strict=True):

                def call(y: Tensor, *values: Tensor, layer: nn.Module = layer) -> Tensor:
                    return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (y,))

                x = call(x, *weights) if use_reentrant is None else again(call, x, *weights)
            return x.square().mean()

        def again(call: Any, *args: Tensor) -> Tensor:
            return checkpoint(call, *args, use_reentrant=use_reentrant)

        try:
            for _ in range(2):
                flat = [weight for weights in fast for weight in weights]
                grads = iter(torch.autograd.grad(run(inputs_of(1)), flat, create_graph=True))
                fast = [[weight - 0.1 * next(grads) for weight in weights] for weights in fast]
        except RuntimeError as error:
            return str(error).splitlines()[0]  # a reentrant checkpoint
        run(inputs_of(2)).backward()
        return gradients_of(model)

    same(lambda: layers("product"), program, key=("layers", "product"), room=3.0)


def test_other_weights_over_a_checkpoint_are_refused(same: Same) -> None:
    """The checkpoint runs again when ``functional_call`` is over, with the module's own weights: torch then finds wrong
    gradients, we nothing."""

    def program(model: nn.Sequential) -> Any:
        fast = {name: param * 2.0 for name, param in model.named_parameters()}
        loss = torch.func.functional_call(model, fast, (inputs_of(1),)).square().mean()
        if type(model[0].weight) is not nn.Parameter:
            with pytest.raises(CheckpointError, match="A different number of tensors was saved"):
                loss.backward()

    same(lambda: layers("checkpointed module"), program, key=("layers", "checkpointed module"), room=3.0)


def test_nothing_is_pinned_and_no_gradient_lands(same: Same) -> None:
    """Hooks on accumulated gradients stay quiet in ``torch.autograd.grad``, and hear ``backward(inputs=...)`` once."""

    def program(model: nn.Sequential) -> Any:
        heard: list[str] = []
        leases: list[int] = []
        engine = None if type(model[0].weight) is nn.Parameter else engine_of(model)
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))

        def look(grad: Tensor) -> None:
            if engine is not None:
                leases.append(sum(unit.weights.leases for unit in units_of(engine)))

        def loss() -> Tensor:
            x = inputs_of(1)
            x.register_hook(look)
            return model(x).square().mean()

        params = [param for name, param in model.named_parameters() if name != "4.weight"]
        torch.autograd.grad(loss(), params)
        assert heard == [] and all(param.grad is None for param in model.parameters())
        loss().backward(inputs=params)
        assert model[4].weight.grad is None and sum(leases) == 0
        return sorted(heard), gradients_of(model)

    same(lambda: layers("product"), program, key=("layers", "product"))


def test_products_and_matrices_of_derivatives(same: Same) -> None:
    """``torch.autograd.functional`` by inputs, by weights given to ``functional_call``, and by paged weights."""

    def program(model: nn.Sequential) -> Any:
        functional = torch.autograd.functional
        weight, bias = model[1].linear.weight, model[1].linear.bias
        names = ("linear.weight", "linear.bias")

        def by_weights(weight: Tensor, bias: Tensor) -> Tensor:
            values = dict(zip(names, (weight, bias), strict=True))
            return torch.func.functional_call(model[1], values, (model[0](x),)).square().sum()

        def by_bias(bias: Tensor) -> Tensor:
            return (torch.tanh(model[2].weight[:8] @ bias) * (bias @ model[3].weight)[:8]).exp()

        x, v = inputs_of(1)[:2].detach(), inputs_of(2)[:2].detach()
        found = [functional.vjp(model, x, v), functional.jvp(model, x, v, create_graph=True)]
        found.append(functional.jacobian(lambda y: model(y).square().sum(1), x, create_graph=True))
        found.append(functional.jacobian(by_bias, bias, vectorize=True))
        found.append(functional.hessian(lambda bias: by_bias(bias).sum(), bias))
        found.append(functional.hvp(by_weights, (weight, bias), (model[2].weight, bias)))
        found.append(functional.vhp(by_weights, (weight, bias), (weight, model[2].linear.bias)))
        found.append(functional.vjp(by_bias, bias, torch.ones(8), strict=True))
        found[1][1].square().sum().backward()
        return found, gradients_of(model)

    same(lambda: layers("product"), program, key=("layers", "product"), room=3.0)


@pytest.mark.parametrize("kind", ["product", "checkpointed module", "keeps its weight"])
def test_numerical_derivatives(same: Same, kind: str) -> None:
    def program(model: nn.Sequential) -> Any:
        layer, x = model[1], inputs_of(1)[:2, :4].detach().double().requires_grad_()

        def by_all(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return torch.tanh(layer(F.pad(x, (0, WIDTH - 4)) + (weight * bias).sum(1)))[:, :3]

        assert torch.autograd.gradcheck(by_all, (x, model[2].linear.weight, model[2].linear.bias), fast_mode=True)
        assert torch.autograd.gradcheck(
            lambda bias: (layer(x.detach().repeat(1, 8)) * bias).sum(1), (layer.linear.bias,)
        )
        return gradients_of(model)

    same(lambda: layers(kind).double(), program, key=("double", kind), room=3.0)
