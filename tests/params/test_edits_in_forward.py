"""Modules whose weights are changed while their forward runs, in the ways that move no version counter,
train as in plain PyTorch, in every way of writing the edit."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import UsageError
from deepoffload.params.code_scan import may_bypass_hooks
from deepoffload.params.torch_private import swap_memory
from tests.support.loops import gradients_of, weights_of
from tests.support.models import rows
from tests.support.paging import Same


def clamp(weight: Tensor) -> None:
    weight.data.clamp_(-0.05, 0.05)


def clamp_by_name(weight: Tensor) -> None:
    getattr(weight, "data").clamp_(-0.05, 0.05)  # noqa: B009


def clamp_further_down(weight: Tensor) -> None:
    clamp(weight)


HELPERS = types.ModuleType("helpers_of_a_program")
HELPERS.clamp = clamp  # type: ignore[attr-defined]
PACKAGE = types.ModuleType("package_of_a_program")
PACKAGE.helpers = HELPERS  # type: ignore[attr-defined]


class Clamper:
    def __call__(self, weight: Tensor) -> None:
        clamp(weight)


class Limits:
    """An object that is no function; what edits is its method."""

    def apply(self, weight: Tensor) -> None:
        clamp(weight)


LIMITS = Limits()
HELPERS.limits = LIMITS  # type: ignore[attr-defined]


class Clamped:
    """A descriptor whose function edits."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function

    def __get__(self, layer: Any, owner: type) -> Callable[[], None]:
        clamp(layer.weight)
        return functools.partial(self.function, layer)


class ClampFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: Tensor) -> Tensor:
        weight.data.clamp_(-0.05, 0.05)
        return weight.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        return grad


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.05, 0.05)
        return super().forward(x)


class Assigned(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.05, 0.05)
        return super().forward(x)


class AssignedTransposed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.t()
        return super().forward(x)


class Numpy(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.detach().numpy()[0] = 0.1
        return super().forward(x)


class SetUnderscore(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.set_(self.weight.clamp(-0.05, 0.05))
        return super().forward(x)


class Helper(Layer):
    def forward(self, x: Tensor) -> Tensor:
        clamp(self.weight)
        return super().forward(x)


class HelperOfHelper(Layer):
    def forward(self, x: Tensor) -> Tensor:
        clamp_further_down(self.weight)
        return super().forward(x)


class HelperByName(Layer):
    def forward(self, x: Tensor) -> Tensor:
        clamp_by_name(self.weight)
        return super().forward(x)


class HelperInModule(Layer):
    def forward(self, x: Tensor) -> Tensor:
        HELPERS.clamp(self.weight)
        return super().forward(x)


class HelperKept(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.edit = Clamper()

    def forward(self, x: Tensor) -> Tensor:
        self.edit(self.weight)
        return super().forward(x)


class HelperPartial(HelperKept):
    def __init__(self) -> None:
        super().__init__()
        self.edit = functools.partial(clamp)  # type: ignore[assignment]


class HelperObject(Layer):
    def __init__(self, limits: Limits = LIMITS) -> None:
        super().__init__()
        self.limits = limits

    def forward(self, x: Tensor) -> Tensor:
        self.limits.apply(self.weight)
        return super().forward(x)


class HelperObjectOfAll(Layer):
    def forward(self, x: Tensor) -> Tensor:
        LIMITS.apply(self.weight)
        return super().forward(x)


class HelperObjectInModule(Layer):
    def forward(self, x: Tensor) -> Tensor:
        HELPERS.limits.apply(self.weight)
        return super().forward(x)


class HelperOfPackage(Layer):
    def forward(self, x: Tensor) -> Tensor:
        PACKAGE.helpers.clamp(self.weight)
        return super().forward(x)


class HelperImportedInside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        from tests.support.weight_edits import clamp_imported

        clamp_imported(self.weight)
        return super().forward(x)


class HelperModuleImportedInside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        import tests.support.weight_edits as edits

        edits.clamp_imported(self.weight)
        return super().forward(x)


class Descriptor(Layer):
    @Clamped
    def edit(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        self.edit()
        return super().forward(x)


class CachedProperty(Layer):
    @functools.cached_property
    def once(self) -> None:
        clamp(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__.pop("once", None)
        assert self.once is None
        return super().forward(x)


class Function(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ ClampFunction.apply(self.weight))


KINDS = [
    InPlace, Assigned, AssignedTransposed, Numpy, SetUnderscore, Helper, HelperOfHelper, HelperByName, HelperInModule,
    HelperKept, HelperPartial, HelperObject, HelperObjectOfAll, HelperObjectInModule, HelperOfPackage,
    HelperImportedInside, HelperModuleImportedInside, Descriptor, CachedProperty, Function,
]  # fmt: skip
if swap_memory is None:  # before torch 2.12 a view of the old values is a reason to refuse new ones
    KINDS.remove(AssignedTransposed)


def trained(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for seed in range(3):
        loss = model(rows(seed=seed)).square().mean()
        loss.backward()
        losses.append((loss.detach(), gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights_of(model)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_edits_by_a_module(same: Same, kind: type[Layer]) -> None:
    same(lambda: nn.Sequential(*[kind() for _ in range(6)]), trained, key="edited layers")


def hook_on_layers(model: nn.Sequential) -> list[Any]:
    return [layer.register_forward_pre_hook(lambda module, args: clamp(module.weight)) for layer in model]


def hook_on_everything(model: nn.Sequential) -> list[Any]:
    def edit(module: nn.Module, args: Any) -> None:
        if isinstance(module, Layer):
            module.weight.data.clamp_(-0.05, 0.05)

    return [nn.modules.module.register_module_forward_pre_hook(edit)]


def hook_after_layers(model: nn.Sequential) -> list[Any]:
    return [layer.register_forward_hook(lambda module, args, output: clamp(module.weight)) for layer in model]


def forward_replaced(model: nn.Sequential) -> list[Any]:
    for layer in model:

        def forward(x: Tensor, layer: nn.Module = layer) -> Tensor:
            clamp(layer.weight)
            return torch.tanh(x @ layer.weight)

        layer.forward = forward
    return []


@pytest.mark.parametrize("put_on", [hook_on_layers, hook_after_layers, hook_on_everything, forward_replaced])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after-the-first-call"])
def test_edits_by_hooks(same: Same, put_on: Callable[[Any], list[Any]], late: bool) -> None:
    def program(model: nn.Sequential) -> Any:
        if late:
            model(rows()).sum().backward()
            model.zero_grad()
        hooks = put_on(model)
        try:
            return trained(model)
        finally:
            for hook in hooks:
                hook.remove()

    same(lambda: nn.Sequential(*[Layer() for _ in range(6)]), program, key="edited layers")


EDITS = {"clamp": clamp}


class HelperInDictionary(Layer):
    def forward(self, x: Tensor) -> Tensor:
        EDITS["clamp"](self.weight)
        return super().forward(x)


def marked_layers(model: nn.Module) -> None:
    for layer in model.children():
        deepoffload.careful(layer)


@pytest.mark.parametrize("mark", [marked_layers, deepoffload.careful], ids=["layers", "model"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after-the-first-call"])
def test_edits_that_the_program_announces(same: Same, mark: Callable[[nn.Module], None], late: bool) -> None:
    assert not may_bypass_hooks(HelperInDictionary()), "this would be found without an announcement"

    def program(model: nn.Sequential) -> Any:
        if late:
            with torch.no_grad():
                model(rows())
                for layer in model:
                    layer.weight.clamp_(-0.05, 0.05)  # which an unseen edit of that call may or may not have done
        mark(model)
        return trained(model)

    same(lambda: nn.Sequential(*[HelperInDictionary() for _ in range(6)]), program, key="edited layers")


def test_a_model_is_announced_before_it_is_paged(same: Same) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*[HelperInDictionary() for _ in range(6)])
        deepoffload.careful(model)
        return model

    same(build, trained, key="announced layers")


def test_careful_takes_a_module_and_marks_it_once() -> None:
    layer = HelperInDictionary()
    for _ in range(2):
        assert deepoffload.careful(layer) is layer
    assert len(layer._forward_pre_hooks) == 1
    assert may_bypass_hooks(nn.Sequential(layer))
    with pytest.raises(UsageError, match="not Parameter; pass the layer"):
        deepoffload.careful(layer.weight)  # type: ignore[arg-type]


def test_ordinary_modules_are_not_suspected() -> None:
    """Doors in a window cost several microseconds for every use of a weight."""
    from tests.support.models import TRANSFORMERS, TinyGPT

    assert not any(may_bypass_hooks(block) for block in TinyGPT().blocks)
    for build in TRANSFORMERS.values():
        for layer in build().base_model.modules():
            if layer.__class__.__name__.endswith(("Layer", "Block", "Attention", "MLP")):
                assert not may_bypass_hooks(layer), type(layer)
