"""Programs that run on plain parameters and on paged ones whose last optimizer step is still to be made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

import deepoffload
from tests.support.inspect import units_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import batch, mlp, next_token_loss, rows
from tests.support.paging import EVICTING, TIGHT, Paging, Setting

SETTINGS = (TIGHT, replace(EVICTING, precision="bf16"))
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.05}


def build() -> nn.Sequential:
    return mlp(depth=4)


def backward(model: nn.Module, seed: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    loss = model(rows(seed=seed).to(dtype)).float().square().mean()
    loss.backward()
    return loss.detach().clone()


def train_on_text(model: nn.Module, optimizer: Any, steps: int, accumulate: int) -> list[Tensor]:
    """The losses of a language model that is trained for some steps, and looked at by nobody meanwhile."""
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            loss = next_token_loss(model, batch(10 * step + micro)) / accumulate
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def sorted_state(optimizer: Any) -> dict[Any, Any]:
    state = copy.deepcopy(optimizer.state_dict()["state"])  # of ordinary parameters it shows no copies
    return {number: dict(sorted(state[number].items())) for number in sorted(state)}


def finish(model: nn.Module, optimizer: Any) -> Any:
    """Two more steps, and all that they have left."""
    losses = []
    for seed in (20, 21):
        optimizer.zero_grad()
        losses.append(backward(model, seed))
        optimizer.step()
    return losses, gradients_of(model), weights_of(model), sorted_state(optimizer)


def units_pending(model: nn.Module) -> int:
    return sum(unit.pending is not None for unit in units_of(model))


def units_guessed(model: nn.Module) -> int:
    """How many are updated already, on a guess."""
    return sum(unit.is_guessed for unit in units_of(model))


@dataclass
class Start:
    """A model, and how its optimizer is made; ``make`` gives plain bf16 parameters the masters that paged ones have."""

    model: nn.Sequential
    leads: dict[int, dict[str, Tensor]]

    def make(self, params: Any, **changes: Any) -> Any:
        optimizer = deepoffload.CPUAdamW(params, **(ADAMW | changes))
        numbers = {id(p): n for n, p in enumerate(self.model.parameters())}
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        leads = {n: self.leads.get(numbers.get(id(p), -1)) for n, p in enumerate(listed)}
        if any(leads.values()):
            saved = optimizer.state_dict()
            saved["state"] = {n: copy.deepcopy(entry) for n, entry in leads.items() if entry}
            optimizer.load_state_dict(saved)
        return optimizer

    def stepped(self) -> Any:
        """An optimizer that has made three steps, the last of them just now; the gradients are still there."""
        optimizer = self.make(self.model.parameters())
        for seed in range(3):
            optimizer.zero_grad()
            backward(self.model, seed)
            optimizer.step()
        return optimizer


Program = Callable[[Start], Any]


class Pair:
    """Runs a program on plain and on paged parameters and wants the same bits."""

    def __init__(self, paging: Paging, setting: Setting) -> None:
        self.paging = paging
        self.setting = setting

    def __call__(self, program: Program, *, room: float | None = None, serial: bool = False) -> None:
        """``room`` as in :class:`~tests.support.paging.Same`. ``serial``: compare bf16 weights with paged ones whose
        steps are not deferred, where plain ones have other masters."""
        setting = self.setting if room is None else replace(self.setting, room=room)
        model = self.paging.build(build, setting, key="deferred")
        if serial and setting.precision == "bf16":
            reference = self.paging.build(build, replace(setting, step_overlap="none"), key="deferred")
            assert_same_bits(program(Start(reference, {})), program(Start(model, {})))
            return
        leads = deepoffload.CPUAdamW(model.parameters()).state_dict()["state"]
        twin = build().to(next(model.parameters()).dtype)
        twin.load_state_dict(weights_of(model))
        expected = program(Start(twin, leads))
        assert_same_bits(expected, program(Start(model, {})))
