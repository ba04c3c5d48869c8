"""What ``deepoffload.paged`` refuses: before anything changes, and with a sentence that says what to do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import UnsupportedError, UsageError
from tests.optim import foreign_kinds
from tests.optim.foreign_kinds import ScheduleFree
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, TIGHT, Paging


def small() -> nn.Sequential:
    return mlp(depth=4)


def closing_over(value: Any) -> type[torch.optim.Optimizer]:
    class Closing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            value.parameters()
            super().step()

    return Closing


SURROUNDING = nn.Linear(2, 2)


class UsesGlobal(torch.optim.SGD):
    """A decorated step, as most are, that uses a model of its module."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        SURROUNDING.parameters()
        super().step()


class OwnList(torch.optim.SGD):
    """As many published ones: the constructor keeps what it was given."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        self.every = list(params)
        super().__init__(self.every, lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.every:
            if param.grad is not None:
                param.data.sub_(param.grad)


AT_ONCE = {
    "LBFGS": (torch.optim.LBFGS, {}, "LBFGS does not look at one parameter at a time"),
    "GlobalNorm": (foreign_kinds.GlobalNorm, {}, "gives other values where it steps parameters one by one"),
    "RandomNoise": (foreign_kinds.RandomNoise, {}, "draws random numbers"),
    "CountsCalls": (foreign_kinds.CountsCalls, {}, "counts its own calls"),
    "CountsCallsForLater": (foreign_kinds.CountsCallsForLater, {}, r"counts its own calls .*\(self\.calls\)"),
    "CountsInState": (foreign_kinds.CountsInState, {}, "keeps other state of all parameters together"),
    "ClipsTogether": (foreign_kinds.ClipsTogether, {}, "uses a statistic of all"),
    "no class": (torch.optim.Adam.step, {}, "takes a class of optimizers"),
    "a model of the module": (UsesGlobal, {}, r"UsesGlobal\.step uses 'SURROUNDING', a module .* of its surroundings"),
    "its own list": (OwnList, {}, r"keeps parameters in self\.every.* Go through self\.param_groups instead"),
    "a model": (torch.optim.AdamW, {"extra": {"model": nn.Linear(2, 2)}}, "is given a module or a parameter"),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_refused_when_it_is_made(paging: Paging, case: str) -> None:
    made, arguments, message = AT_ONCE[case]
    model = paging.build(small, TIGHT, key="foreign")
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=message):
        deepoffload.paged(made, model.parameters(), **arguments)
    assert torch.equal(before, torch.get_rng_state())
    for value in (model, list(model.parameters())):
        with pytest.raises(UnsupportedError, match=r"step uses 'value', .*Let it go through self\.param_groups"):
            deepoffload.paged(closing_over(value), model.parameters())


IN_STEP = {
    "KeepsHistory": (foreign_kinds.KeepsHistory, r"second step than after the first \(history \(64x64, 64x64\), and"),
    "ChangesShape": (foreign_kinds.ChangesShape, "after the second step than after the first"),
    "KeepsDict": (foreign_kinds.KeepsDict, "keeps a dict as 'parts'"),
}


@pytest.mark.parametrize("case", IN_STEP)
def test_refused_in_the_first_step(paging: Paging, case: str) -> None:
    """Nothing has changed then, and another optimizer goes on."""
    made, message = IN_STEP[case]
    model = paging.build(small, TIGHT, key="foreign")
    optimizer = deepoffload.paged(made, [p for p in model.parameters() if p.dim() == 2])
    model(rows()).square().mean().backward()
    before = weights_of(model)
    with pytest.raises(UnsupportedError, match=message):
        optimizer.step()
    assert_same_bits(before, weights_of(model))
    assert not optimizer.state_dict()["state"]
    deepoffload.paged(torch.optim.SGD, model.parameters(), lr=0.1).step()
    assert not torch.equal(next(iter(before.values())), next(model.parameters()).detach())


def test_a_change_of_shapes_that_comes_late(paging: Paging) -> None:
    """It is noticed in the step that makes it, and no step is made twice."""
    model = paging.build(small, replace(TIGHT, step_overlap="none"), key="foreign")
    optimizer = deepoffload.paged(foreign_kinds.ChangesShapeLate, model.parameters())
    for step in range(4):
        model(rows(seed=step)).square().mean().backward()
        if step == 3:
            for _ in range(2):
                with pytest.raises(UnsupportedError, match=r"ChangesShapeLate over .*: after this step its state is"):
                    optimizer.step()
            break
        optimizer.step()
        optimizer.zero_grad()


def test_an_error_of_the_class(paging: Paging) -> None:
    """It is the program's to see, once; what comes after it says why nothing goes on."""
    model = paging.build(small, replace(TIGHT, step_overlap="none"), key="foreign")
    optimizer = deepoffload.paged(foreign_kinds.FailsLate, model.parameters())
    for step in range(3):
        model(rows(seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(rows()).square().mean().backward()
    with pytest.raises(ArithmeticError, match="singular"):
        optimizer.step()
    for use in (optimizer.step, lambda: model(rows())):
        with pytest.raises(
            UsageError, match=r"failed in the step of .*, with ArithmeticError: a matrix.*build it again"
        ):
            use()


def test_settings_that_ask_for_other_state(paging: Paging) -> None:
    model = paging.build(small, TIGHT, key="foreign")
    optimizer = deepoffload.paged(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        model(rows(seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = weights_of(model)
    optimizer.param_groups[0]["momentum"] = 0.0
    model(rows()).square().mean().backward()
    with pytest.raises(UnsupportedError, match="make a new optimizer with these settings"):
        optimizer.step()
    assert_same_bits(before, weights_of(model))
    optimizer.param_groups[0]["momentum"] = 0.8
    optimizer.step()


def test_settings_and_states_that_do_not_fit(paging: Paging) -> None:
    model = paging.build(small, TIGHT, key="foreign")
    params = list(model.parameters())
    with pytest.raises(ValueError, match="Invalid learning rate"):
        deepoffload.paged(torch.optim.NAdam, params, lr=-1.0)
    with pytest.raises(ValueError, match="only supports 2D"):
        deepoffload.paged(torch.optim.Muon, params)
    with pytest.raises(TypeError):
        deepoffload.paged(torch.optim.NAdam, params, unknown=1)
    with pytest.raises(ValueError, match="state_dtype must be 'fp32' or 'bf16'"):
        deepoffload.paged(torch.optim.NAdam, params, state_dtype="8bit")
    with pytest.raises(UnsupportedError, match="only fp32 ones are stepped"):
        deepoffload.paged(torch.optim.NAdam, [*params, nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))])
    with pytest.raises(UsageError, match="is a int, not a tensor"):
        deepoffload.paged(torch.optim.NAdam, [3])
    ordinary = list(mlp(depth=1).parameters())
    for made in (partial(deepoffload.paged, torch.optim.NAdam), deepoffload.CPUAdamW):
        for twice in (params + params[:1], ordinary + ordinary[:1]):
            with pytest.warns(UserWarning, match="duplicate"), pytest.raises(UsageError, match="in its group twice"):
                made(twice)
    with pytest.raises(AttributeError, match="NAdam has no train"):
        deepoffload.paged(torch.optim.NAdam, params).train()
    assert not hasattr(deepoffload.Muon(model), "eval"), "accelerate calls what is there"
    optimizer = deepoffload.paged(torch.optim.Adafactor, params)
    other = deepoffload.paged(torch.optim.RMSprop, mlp(depth=4).parameters())
    other_state = other.state_dict()
    other_state["state"] = {0: {"step": torch.tensor(1.0), "square_avg": torch.zeros(64, 64)}}
    with pytest.raises(UnsupportedError, match="Adafactor: a step over small tensors fails"):
        optimizer.load_state_dict(other_state)  # settings of another class
    other_state["param_groups"] = optimizer.state_dict()["param_groups"]
    with pytest.raises(ValueError, match="another kind of optimizer"):
        optimizer.load_state_dict(other_state)
    wrong = other.state_dict() | {"state": {0: {"step": torch.tensor(1.0), "square_avg": torch.zeros(3)}}}
    with pytest.raises(ValueError, match=r"state\[0\]: square_avg has shape \(3,\)"):
        other.load_state_dict(wrong)


def test_overlaps_that_cannot_be(paging: Paging) -> None:
    guessing = paging.build(small, replace(EVICTING, step_overlap="speculative"), key="foreign")
    with pytest.raises(UnsupportedError, match="cannot be undone; use step_overlap='deferred'"):
        deepoffload.paged(torch.optim.NAdam, guessing.parameters())
    early = paging.build(small, replace(EVICTING, step_overlap="in_backward"), key="foreign")
    with pytest.raises(UsageError, match="max_grad_norm clips"):
        deepoffload.paged(torch.optim.NAdam, early.parameters(), max_grad_norm=1.0)
    with pytest.raises(UnsupportedError, match="makes a step in parts"):
        deepoffload.paged(ScheduleFree, early.parameters())
