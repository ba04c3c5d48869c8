"""Weights that autograd keeps where no door sees it (``disable_saved_tensors_hooks``) stay until the step that ends
their use, with all that other optimizers do meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload import stats
from tests.support.inspect import leases_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import rows
from tests.support.paging import Paging, plain


class Product(nn.Module):
    """Autograd keeps its weight by reference. (Of a linear layer it keeps a view, which holds the memory by itself.)"""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(*(Product() for _ in range(3))) for _ in range(2))


def here(call: Callable[[], Any]) -> None:
    call()


def elsewhere(call: Callable[[], Any]) -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


Where = Callable[[Callable[[], Any]], None]


def held_forward(model: nn.Module, seed: int) -> Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return model(rows(seed=seed)).square().mean()


class Trained:
    """A model with two parts; each is trained by its own optimizer, ``where`` the second one."""

    def __init__(self, model: Two, where: Where, frozen: bool) -> None:
        self.model, self.where = model, where
        if frozen:
            for layer in (model.first[0], model.first[2]):
                layer.requires_grad_(False)
        self.first = deepoffload.CPUAdamW([p for p in model.first.parameters() if p.requires_grad], lr=1e-2)
        self.second = deepoffload.CPUAdamW(model.second.parameters(), lr=1e-2)

    def step_second(self) -> None:
        for seed in (5, 6):
            self.second.zero_grad()
            self.model.second(rows(seed=seed)).square().mean().backward()
            self.second.step()

    def run(self) -> Any:
        seen = []
        for seed in range(3):
            self.first.zero_grad()
            loss = held_forward(self.model.first, seed)
            self.where(self.step_second)
            loss.backward()
            seen += [loss.detach().clone(), gradients_of(self.model.first)]
            self.first.step()
        return seen, weights_of(self.model)


@pytest.fixture(params=["tight", "evicting"])
def build(request: pytest.FixtureRequest, paging: Paging) -> Callable[[], Two]:
    def make() -> Two:
        torch.manual_seed(0)
        with deepoffload.offload_context(
            host_budget=200 << 10,
            nvme_path=str(paging.nvme_path),
            precision="keep",
            debug={"poison": True, "evict_always": request.param == "evicting"},
        ):
            return Two()

    return make


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "partly frozen"])
@pytest.mark.parametrize("where", [here, elsewhere])
def test_another_optimizers_step(build: Callable[[], Two], where: Where, frozen: bool) -> None:
    expected = Trained(plain(Two), where, frozen).run()
    model = build()
    assert_same_bits(expected, Trained(model, where, frozen).run())
    assert stats(model)["evictions"] > 0, "nothing was evicted: this tested nothing"


def leases(model: nn.Module) -> int:
    return leases_of(model)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "partly frozen"])
@pytest.mark.parametrize("where", [here, elsewhere])
def test_the_own_step_ends_it(build: Callable[[], Two], where: Where, frozen: bool) -> None:
    model = build()
    trained = Trained(model, here, frozen)
    before = leases(model)

    def forward() -> None:
        for seed in range(2):
            held_forward(model.first, seed).backward()

    where(forward)
    assert leases(model) > before
    trained.first.step()
    assert leases(model) == before


def test_what_no_optimizer_updates_is_let_go_by_any_step(build: Callable[[], Two]) -> None:
    model = build()
    trained = Trained(model, here, frozen=False)
    model.second.requires_grad_(False)
    before = leases(model)
    held_forward(model.second, 0)
    assert leases(model) > before
    del trained.second
    held_forward(model.first, 0).backward()
    trained.first.step()
    assert leases(model) == before


def test_the_same_weights_are_held_once(build: Callable[[], Two]) -> None:
    """An optimizer that does not step for long lets its leases not grow in number."""
    model = build()
    trained = Trained(model, here, frozen=False)
    held_forward(model.second, 0)
    held = leases(model)
    for seed in range(5):
        held_forward(model.second, seed)
        trained.first.step()
    assert leases(model) == held
    trained.second.step()
    assert leases(model) < held
