"""How parameters come under the pager: in place, as part of any object, also when they come late."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import deepoffload
from deepoffload.errors import UsageError
from deepoffload.params.parameter import OffloadedParameter
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Same


def backward(model: nn.Module, output: Tensor | None = None) -> list[Any]:
    output = model(rows()) if output is None else output
    output.square().mean().backward()
    return [output.detach().clone(), gradients_of(model)]


def paged(model: nn.Module) -> bool:
    return all(isinstance(p, OffloadedParameter) for p in model.parameters())


def test_same_objects_and_marks(paging: Paging) -> None:
    seen: list[Any] = []

    def build() -> nn.Module:
        model = mlp()
        seen[:] = list(model.parameters())
        seen[0].my_mark = "kept"
        seen.append(weakref.ref(seen[1]))
        return model

    model = paging.build(build, TIGHT)
    assert all(a is b for a, b in zip(seen[:-1], model.parameters(), strict=True))
    assert seen[0].my_mark == "kept" and seen[-1]() is seen[1]
    assert paged(model) and all(isinstance(p, nn.Parameter) for p in model.parameters())


class Tied(nn.Module):
    """One raw parameter registered in two modules, a module used twice, one never used, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.a.weight = weight
        self.b.weight = weight
        self.twice = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.twice(self.a(x)))
        return self.scale * torch.tanh(self.twice(self.b(x))) + self.one


def test_tied_twice_used_unused_scalar_and_empty_parameters(same: Same) -> None:
    def program(model: Tied) -> Any:
        assert model.a.weight is model.b.weight
        first = backward(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        optimizer.step()
        assert model.a.weight is model.b.weight
        return first, weights_of(model)

    same(Tied, program)


def test_tied_after_paging(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        model[4].weight = model[0].weight
        return backward(model), backward(model)

    same(mlp, program)


@pytest.mark.parametrize("where", ["module", "parameter", "submodule"])
def test_late_arrivals(same: Same, where: str) -> None:
    """Adopted when their model is next called; gradients from the first call on."""

    def program(model: nn.Sequential) -> Any:
        backward(model)
        torch.manual_seed(5)
        if where == "module":
            model.append(nn.Linear(64, 8))
        elif where == "parameter":
            model[2].weight = nn.Parameter(torch.randn(64, 64) / 8)
        else:
            model[4] = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
        model.zero_grad()
        return backward(model), backward(model), weights_of(model)

    same(mlp, program)


def test_late_arrivals_are_trained(paging: Paging) -> None:
    model = paging.build(mlp, EVICTING)
    model(rows())
    model.append(nn.Linear(64, 8))
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    before = weights_of(model)
    for _ in range(2):
        model(rows()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(value, before[name]) for name, value in weights_of(model).items())


def test_lazy_modules(same: Same) -> None:
    """Materialised inside the context or at the first call after it."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(64), nn.Tanh(), mlp(), nn.LazyLinear(4))
        model[0](rows())
        return model

    def program(model: nn.Module) -> Any:
        torch.manual_seed(2)
        return backward(model), backward(model)

    same(build, program)


def test_new_parameters_from_paged_ones(same: Same) -> None:
    """``nn.Parameter(p)`` and ``type(p)(data, requires_grad=...)``, as parametrizations, accelerate and peft write
    it."""

    def program(model: nn.Sequential) -> Any:
        made = nn.Parameter(model[0].weight)
        kind = type(model[2].weight)
        other = kind(torch.full((64, 64), 0.01), requires_grad=True)
        frozen = kind(model[4].weight.data.clone(), requires_grad=False)
        assert all(isinstance(p, nn.Parameter) for p in (made, other, frozen))
        flags = [p.requires_grad for p in (made, other, frozen)]
        model[2].weight = other
        model[4].weight = frozen
        return flags, made.detach().clone(), backward(model)

    same(mlp, program, room=4.0)


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
    ],
    ids="weight spectral orthogonal old-weight old-spectral".split(),
)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_parametrizations(same: Same, wrap: Any, late: bool) -> None:
    def apply(model: nn.Sequential) -> nn.Sequential:
        torch.manual_seed(4)
        for index in (0, 4):
            wrap(model[index])
        return model

    def program(model: nn.Sequential) -> Any:
        if late:
            apply(model)
        torch.manual_seed(6)
        return backward(model), backward(model)

    same(mlp if late else lambda: apply(mlp()), program, key=None if late else wrap, room=4.0)


def test_pruning(same: Same) -> None:
    from torch.nn.utils import prune

    def program(model: nn.Sequential) -> Any:
        prune.l1_unstructured(model[0], "weight", amount=0.3)
        result = backward(model)
        prune.remove(model[0], "weight")
        return result, backward(model)

    same(mlp, program, room=4.0)


def test_parameters_on_meta_are_refused_at_exit(paging: Paging) -> None:
    with pytest.raises(UsageError, match=r"still on the meta device.*weight"):
        with paging.context(RESIDENT, 1 << 20):
            model = nn.Sequential(nn.Linear(8, 8, device="meta"))
    assert model[0].weight.is_meta


def test_built_on_meta_and_materialised(same: Same) -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            model = mlp()
        model.to_empty(device="cpu")
        torch.manual_seed(9)
        for param in model.parameters():
            nn.init.normal_(param, std=0.1)
        return model

    same(build, backward)


@pytest.mark.parametrize("load", ["to_empty", "assign"])
def test_built_by_init_empty_weights(same: Same, load: str) -> None:
    """accelerate makes each new parameter from the class and the attributes of the registered one."""
    from accelerate import init_empty_weights

    values = {name: torch.randn_like(param) for name, param in mlp().named_parameters()}

    def build() -> nn.Module:
        with init_empty_weights():
            model = mlp()
        assert all(param.is_meta for param in model.parameters())
        if load == "to_empty":
            model.to_empty(device="cpu")
        model.load_state_dict({name: value.clone() for name, value in values.items()}, assign=load == "assign")
        return model

    same(build, backward)


def test_materialised_parameters_are_placed(paging: Paging) -> None:
    """``to_empty`` registers nothing; what it made is still part of the units and of the placement table."""
    with paging.context(RESIDENT, 1 << 20) as context:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model.to_empty(device="cpu")
    assert deepoffload.stats(model)["units"] == 2
    assert deepoffload.stats(model)["host_weight_bytes"] >= 2 * (64 * 64 + 64) * 4
    assert context.engine.placement.resident


def test_initialisation_and_dtype_changes_while_building(same: Same) -> None:
    def build() -> nn.Module:
        model = mlp()
        for layer in model[::2]:
            nn.init.orthogonal_(layer.weight)
            layer.bias.data.fill_(0.25)
            layer.bias.data = layer.bias.data * 2
        model.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)
        with torch.no_grad():
            model[0].weight[0] = 1.0
        return model

    same(build, backward)


def test_two_models_in_one_context(paging: Paging) -> None:
    """A teacher and a student share budget and swap file."""

    def build() -> tuple[nn.Module, nn.Module]:
        return mlp().requires_grad_(False), mlp()

    def program(teacher: nn.Module, student: nn.Module) -> Any:
        for seed in range(2):
            loss = (student(rows(seed=seed)) - teacher(rows(seed=seed))).square().mean()
            loss.backward()
        return gradients_of(student), gradients_of(teacher)

    torch.manual_seed(0)
    expected = program(*build())
    for setting in (EVICTING, TIGHT):
        assert_same_bits(expected, program(*paging.build(build, setting)))


def test_two_models_in_sequence_and_side_by_side(paging: Paging) -> None:
    first = paging.build(mlp, TIGHT)
    second = paging.build(mlp, TIGHT, seed=1)
    one, other = backward(first), backward(second)
    del first
    third = paging.build(mlp, TIGHT)
    assert_same_bits(one, backward(third))
    second.zero_grad()
    assert_same_bits(other, backward(second))


def test_values_put_in_the_place_of_evicted_ones_survive_the_change_of_type(paging: Paging) -> None:
    """``Tensor.set_`` has no door, and parametrizations use it while the model is built."""

    def build() -> nn.Sequential:
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        with torch.no_grad():
            for layer in model:
                layer.weight.set_(torch.full((32, 32), 2.0))
        return model

    model = paging.build(build, replace(EVICTING, precision="bf16"))
    assert all(bool((layer.weight == 2.0).all()) for layer in model)
