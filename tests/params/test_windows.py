"""Windows end as they began, with all that happens in them: errors, recursion, several threads."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepoffload import stats
from deepoffload.errors import BudgetError, UnsupportedError
from deepoffload.params.parameter import OffloadedParameter
from deepoffload.runtime.context import engine_of
from tests.support.inspect import leases_of, pager_of, shown_memory_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, ROOMY, TIGHT, Paging, Same, Setting, plain


def leases(model: nn.Module) -> int:
    return leases_of(model)


def open_windows(model: nn.Module) -> int:
    return len(pager_of(model).hooks.opened())


class Stops(RuntimeError):
    pass


class Recursive(nn.Module):
    """Calls itself; at the bottom the call fails before its forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.depth = 0
        self.caught = False
        self.classes: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        if self.depth < 3:
            try:
                x = self(x)
            except Stops:
                self.caught = True
        self.classes.append(type(self.weight))
        return torch.tanh(x @ self.weight)


def test_failing_inner_call_leaves_the_outer_window_open(paging: Paging, monkeypatch: pytest.MonkeyPatch) -> None:
    model = paging.build(lambda: nn.Sequential(*[Recursive() for _ in range(4)]), EVICTING)
    engine = engine_of(model)
    acquire = shown_memory_of(engine).acquire
    calls = []

    def fails_once(block: Any, **options: Any) -> None:
        calls.append(block)
        if len(calls) == 3:
            raise Stops
        acquire(block, **options)

    monkeypatch.setattr(shown_memory_of(engine), "acquire", fails_once)
    with torch.no_grad():
        model[0](rows())
    assert model[0].caught and leases(model) == 0 and open_windows(model) == 0
    assert model[0].classes == [nn.Parameter, nn.Parameter], "the inner call has closed the outer one's window"
    assert type(model[0].weight) is OffloadedParameter


@pytest.mark.parametrize("where", ["forward", "pre-hook", "hook"])
def test_exception_in_a_window(same: Same, where: str) -> None:
    def program(model: nn.Sequential) -> Any:
        def stop(*_: Any) -> None:
            raise Stops

        if where == "forward":
            model.insert(6, nn.Linear(3, 3))  # the wrong size
        elif where == "pre-hook":
            hook = model[6].register_forward_pre_hook(stop)
        else:
            hook = model[6].register_forward_hook(stop)
        with pytest.raises((Stops, RuntimeError)):
            model(rows())
        if where == "forward":
            del model[6]
        else:
            hook.remove()
        model(rows()).sum().backward()
        return gradients_of(model)

    same(mlp, program)


@pytest.mark.parametrize("setting", [RESIDENT, TIGHT, EVICTING], ids=str)
def test_data_of_the_wrong_shape_is_refused_and_nothing_stays_shown(paging: Paging, setting: Setting) -> None:
    """Also by native code that no door sees, which wants the address of bytes that are away."""
    model = paging.build(mlp, setting)
    expected = weights_of(model)
    with torch.no_grad():
        if setting is EVICTING:
            with pytest.raises(RuntimeError, match="annot access data pointer"):
                torch.Tensor.set_(model[2].bias, torch.zeros(3))
        with pytest.raises(UnsupportedError, match=r"2\.bias was given data of shape \(3,\)"):
            model[2].bias.set_(torch.zeros(3))
    assert leases(model) == 0
    assert_same_bits(expected, weights_of(model))
    assert_same_bits(plain(mlp)(rows()).detach(), model(rows()).detach())


class Waits(nn.Module):
    """Lets another thread go on while it is in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        object.__setattr__(self, "inside", threading.Event())
        object.__setattr__(self, "go_on", threading.Event())

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        self.inside.set()
        self.go_on.wait(200)
        return torch.tanh(x @ self.weight)


def test_two_threads_use_one_model(paging: Paging) -> None:
    """One is inside a window, where parameters have no doors; the other uses the same weights by functions."""

    def build() -> nn.Module:
        return nn.Sequential(Waits(), mlp())

    def by_functions(model: nn.Sequential) -> Tensor:
        x = model[1][0](rows(seed=5))  # a module: from here on it is known that there are two
        for _ in range(2):
            x = torch.tanh(x @ model[0].weight)  # autograd keeps the parameter itself, not a view of it
            for layer in model[1][::2]:
                x = torch.tanh(nn.functional.linear(x, layer.weight, layer.bias))
        return x

    def run(model: nn.Sequential) -> Any:
        first = torch.autograd.grad(model(rows()).sum(), [*model.parameters()], allow_unused=True)
        other = torch.autograd.grad(by_functions(model).sum(), [*model.parameters()], allow_unused=True)
        return [g.clone() for g in (*first, *other) if g is not None]

    reference = plain(build)
    reference[0].go_on.set()
    expected = run(reference)

    for setting in (EVICTING, ROOMY):
        model = paging.build(build, setting)
        found: dict[str, Any] = {}

        def in_a_window(model: nn.Module = model, found: dict[str, Any] = found) -> None:
            grads = torch.autograd.grad(model(rows()).sum(), [*model.parameters()], allow_unused=True)
            found["first"] = [g.clone() for g in grads if g is not None]

        thread = threading.Thread(target=in_a_window)
        thread.start()
        assert model[0].inside.wait(200)
        loss = by_functions(model).sum()
        model[0].go_on.set()
        thread.join()
        grads = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        assert_same_bits(expected, found["first"] + [g.clone() for g in grads if g is not None])
        assert leases(model) == 0


def test_two_threads_run_the_whole_model_again_and_again(paging: Paging) -> None:
    reference = plain(mlp)
    model = paging.build(mlp, replace(EVICTING, room=4.0))
    wrong: list[str] = []

    def run(seed: int) -> None:
        try:
            for _ in range(10):
                with torch.no_grad():
                    assert_same_bits(reference(rows(seed=seed)), model(rows(seed=seed)))
        except Exception as error:  # noqa: BLE001 - told to the main thread
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert stats(model)["evictions"] > 0 and leases(model) == 0


def test_late_parameter_that_finds_no_room_can_be_tried_again(paging: Paging) -> None:
    """It stays an ordinary parameter with its values; when there is room, the next call adopts it."""
    model = paging.build(lambda: mlp(depth=12), TIGHT)
    expected = plain(lambda: mlp(depth=12))
    torch.manual_seed(8)
    adapters = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    expected.append(adapters)
    before = stats(model)
    held = []
    with pytest.raises(BudgetError):
        for param in model.parameters():
            held.append(param.detach())
    torch.manual_seed(8)
    late = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model.append(late)
    for _ in range(3):
        with pytest.raises(BudgetError):
            model(rows())
    assert [type(p) for p in late.parameters()] == [nn.Parameter] * 4
    after = stats(model)
    assert {key: after[key] for key in ("units", "parameters")} == {key: before[key] for key in ("units", "parameters")}
    held.clear()
    for net in (expected, model):
        net(rows()).sum().backward()
    assert all(type(p) is OffloadedParameter for p in late.parameters())
    assert_same_bits(gradients_of(expected), gradients_of(model))
    engine = engine_of(model)
    del model, late, net, param
    assert pager_of(engine).life.closed_because == "its model was deleted"
