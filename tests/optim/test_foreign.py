"""``deepoffload.paged``: the bits of a class of optimizers over ordinary parameters, with its state on the tiers."""

from __future__ import annotations

import copy
import io
import os
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.optim.foreign import run_by_run
from deepoffload.optim.foreign.elementwise import ELEMENTWISE
from tests.optim.deferred import backward
from tests.optim.deferred import build as small
from tests.optim.foreign_kinds import CountingAdam, PlainLoop, ScheduleFree
from tests.support.inspect import handle_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.paging import EVICTING, RESIDENT, SERIAL, TIGHT, Paging, Setting, plain


@dataclass(frozen=True)
class Kind:
    made: type[torch.optim.Optimizer]
    settings: dict[str, Any] = field(default_factory=dict)

    def paged(self, params: Any, **changes: Any) -> Any:
        return deepoffload.paged(self.made, params, **(self.settings | changes))

    def plain(self, params: Any) -> Any:
        return self.made(params, **self.settings)

    def __str__(self) -> str:
        return self.made.__name__ + "".join(sorted(self.settings.keys() - {"lr"}))[:20]


ADAFACTOR = Kind(torch.optim.Adafactor, {"lr": 0.05, "weight_decay": 0.1})
NADAM = Kind(torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.01})
KINDS = (
    Kind(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    Kind(torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    Kind(torch.optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    ADAFACTOR,
    NADAM,
    Kind(torch.optim.RAdam, {"lr": 0.01}),
    Kind(torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    Kind(torch.optim.Adamax, {"lr": 0.01}),
    Kind(torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.5}),
    Kind(torch.optim.Adadelta, {"lr": 0.5}),
    Kind(torch.optim.ASGD, {"lr": 0.05}),
    Kind(torch.optim.Rprop, {"lr": 0.01}),
    Kind(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    Kind(torch.optim.SGD, {"lr": 0.05}),
    Kind(CountingAdam, {"lr": 0.01}),
)
SETTINGS = (RESIDENT, SERIAL, EVICTING, replace(RESIDENT, precision="bf16"), replace(TIGHT, precision="bf16"))


def train(model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def pair(paging: Paging, setting: Setting, kind: Kind) -> tuple[nn.Module, Any, nn.Module, PlainLoop]:
    """A paged model with its optimizer, and the same in plain PyTorch."""
    model = paging.build(small, setting, key="foreign")
    twin = plain(small, precision=setting.precision)
    return model, kind.paged(model.parameters()), twin, PlainLoop(twin, kind.plain)


def shown(optimizer: Any) -> dict[Any, Any]:
    """The state in the order of the parameters, without what completes weights."""
    state = copy.deepcopy(optimizer.state_dict()["state"])
    found = {
        number: {key: value for key, value in sorted(entry.items()) if key not in ("remainder", "master")}
        for number, entry in sorted(state.items())
    }
    return {number: entry for number, entry in found.items() if entry}


def copy_of(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def chosen() -> list[tuple[Kind, Setting]]:
    """Each class in one setting; with FOREIGN=all each in all, in two minutes."""
    every = [(kind, setting) for kind in KINDS for setting in SETTINGS]
    return every if os.environ.get("FOREIGN") == "all" else every[:: len(SETTINGS) + 1] + every[4:5]


@pytest.mark.parametrize(("kind", "setting"), chosen(), ids=lambda value: str(value))
def test_same_bits_as_the_class_itself(paging: Paging, kind: Kind, setting: Setting) -> None:
    model, optimizer, twin, reference = pair(paging, setting, kind)
    assert_same_bits(train(twin, reference, range(4)), train(model, optimizer, range(4)))
    assert_same_bits(weights_of(twin), weights_of(model))
    assert_same_bits(shown(reference.inner), shown(optimizer))
    assert (deepoffload.stats(model)["evictions"] > 0) == (setting.room is not None)
    held = [handle_of(param) for param in model.parameters()]
    arrays = {tuple(piece.format.fields) for handle in held for piece in handle.unit.pieces}
    mine = [key for entry in optimizer.state.values() for key, value in entry.items() if torch.is_tensor(value)]
    assert not any(key in fields for fields in arrays for key in mine), "an array is in memory and in pieces"


def test_classes_whose_elements_are_independent_are_stepped_in_runs(
    paging: Paging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of whole parameters, and what stays in memory of the state counts the step once."""
    monkeypatch.setattr(run_by_run, "RUN_NUMEL", 192)
    kinds = [kind for kind in KINDS if kind.made in ELEMENTWISE]
    assert {kind.made for kind in kinds} == ELEMENTWISE
    for kind in kinds:
        model, optimizer, twin, reference = pair(paging, SETTINGS[3], kind)
        assert max(param.numel() for param in model.parameters()) > 3 * 192
        assert_same_bits(train(twin, reference, range(2)), train(model, optimizer, range(2)))
        assert_same_bits(weights_of(twin), weights_of(model))
        assert_same_bits(shown(reference.inner), shown(optimizer))


@pytest.mark.parametrize("kind", [KINDS[0], ADAFACTOR, NADAM, KINDS[14]], ids=str)
@pytest.mark.parametrize("precision", ["keep", "bf16"])
def test_a_round_trip_goes_on_bit_for_bit(paging: Paging, kind: Kind, precision: str) -> None:
    """Out of one engine, through a file, into another, into a pickled copy, and back in time."""
    model = paging.build(small, replace(TIGHT, precision=precision), key="foreign")
    optimizer = kind.paged(model.parameters())
    train(model, optimizer, range(3))
    weights, saved = weights_of(model), copy_of(optimizer.state_dict())
    train(model, optimizer, range(3, 6))
    expected = weights_of(model)

    other = paging.build(small, replace(EVICTING, precision=precision), key="foreign", seed=9)
    again = kind.paged(other.parameters(), lr=123.0)
    train(other, again, range(1))
    other.load_state_dict(weights)
    again.load_state_dict(saved)
    train(other, again, range(3, 6))
    assert_same_bits(expected, weights_of(other))

    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(3, 6))
    assert_same_bits(expected, weights_of(model))


def test_the_classes_own_state_goes_in_and_out(paging: Paging) -> None:
    for kind in (KINDS[0], ADAFACTOR, KINDS[8]):
        model, optimizer, twin, reference = pair(paging, TIGHT, kind)
        train(twin, reference, range(3))
        model.load_state_dict(twin.state_dict())
        optimizer.load_state_dict(copy_of(reference.inner.state_dict()))
        train(model, optimizer, range(3, 5))
        train(twin, reference, range(3, 5))
        assert_same_bits(weights_of(twin), weights_of(model))
        third = small()
        third.load_state_dict(weights_of(model))
        back = kind.plain(third.parameters())
        back.load_state_dict(copy_of(optimizer.state_dict()))
        train(third, back, range(5, 7))
        train(model, optimizer, range(5, 7))
        assert_same_bits(weights_of(third), weights_of(model))


def test_a_pickled_pair_goes_on_without_an_engine(paging: Paging) -> None:
    model = paging.build(small, TIGHT, key="foreign")
    optimizer = NADAM.paged(model.parameters())
    train(model, optimizer, range(2))
    twin, reference = pickle.loads(pickle.dumps((model, optimizer)))
    assert_same_bits(train(twin, reference, range(2, 4)), train(model, optimizer, range(2, 4)))
    assert_same_bits(weights_of(twin), weights_of(model))


def test_modes_of_schedule_free_optimizers(paging: Paging) -> None:
    """Its counts of steps are in the group: they move once per step, not once per parameter."""
    model, optimizer, twin, loop = pair(paging, EVICTING, Kind(ScheduleFree))
    reference = loop.inner
    backward(model, 0)
    with pytest.raises(RuntimeError, match="not in train mode"):
        optimizer.step()
    optimizer.zero_grad()
    for step in range(6):
        if step in (0, 3):
            optimizer.train()
            reference.train()
        assert_same_bits(train(twin, reference, range(step, step + 1)), train(model, optimizer, range(step, step + 1)))
        if step in (2, 5):
            optimizer.eval()
            reference.eval()
            assert_same_bits(weights_of(twin), weights_of(model))
    mine, theirs = optimizer.param_groups[0], reference.param_groups[0]
    assert {key: mine[key] for key in theirs if key != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    optimizer.load_state_dict(copy_of(optimizer.state_dict()))
    optimizer.train()
    reference.train()
    train(model, optimizer, range(6, 8))
    train(twin, reference, range(6, 8))
    assert_same_bits(weights_of(twin), weights_of(model))


def test_a_group_without_gradients_counts_the_step(paging: Paging) -> None:
    """As the class does it: its settings move where none of its parameters has a gradient, too."""

    def run(model: Any, make: Any) -> Any:
        layers = [list(layer.parameters()) for layer in model if isinstance(layer, nn.Linear)]
        rest = [param for layer in layers[1:] for param in layer]
        optimizer = make([{"params": layers[0], "lr": 0.1}, {"params": rest}, {"params": []}])
        optimizer.train()
        assert optimizer.param_groups[2]["train_mode"]
        losses = []
        for step in range(5):
            losses.append(backward(model, step))
            if step in (0, 2):
                for param in layers[0]:
                    param.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return losses, weights_of(model), [(group["k"], group["weight_sum"]) for group in optimizer.param_groups[:2]]

    kind = Kind(ScheduleFree)
    expected = run(plain(small), kind.plain)
    assert_same_bits(expected, run(paging.build(small, EVICTING, key="foreign"), kind.paged))


def test_schedules_of_other_settings_try_each_shape_once(paging: Paging) -> None:
    """``OneCycleLR`` changes betas in every step. A class is tried per shape then, not per parameter."""
    tried = []

    class Counted(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            tried.extend(p for group in self.param_groups for p in group["params"] if p.device.type == "meta")
            return super().step(closure)

    def run(model: nn.Module, optimizer: Any) -> Any:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=8)
        losses = []
        for step in range(4):
            losses += train(model, optimizer, range(step, step + 1))
            schedule.step()
        return losses, weights_of(model)

    twin, model = plain(small), paging.build(small, EVICTING, key="foreign")
    optimizer = deepoffload.paged(Counted, model.parameters(), lr=0.01)
    expected = run(twin, torch.optim.AdamW(twin.parameters(), lr=0.01))
    assert_same_bits(expected, run(model, optimizer))
    shapes = {param.shape for param in model.parameters()}
    assert len(shapes) < len(list(model.parameters()))
    assert len(tried) == 4 * 2 * len(shapes), "two trial steps"
