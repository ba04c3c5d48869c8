"""Deferring a step changes no bit: losses, weights and optimizer state of plain PyTorch, of the serial step and of the
deferred one, over budgets, precisions, clipping, accumulation and dropout."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import IoFailure
from deepoffload.io.engine import IoEngine
from deepoffload.runtime import disk as disk_module
from tests.optim.deferred import ADAMW, Start, backward, finish, sorted_state, train_on_text, units_pending
from tests.support.inspect import io_of
from tests.support.loops import assert_same_bits, relative_difference, weights_of
from tests.support.models import TinyGPT, mlp, rows
from tests.support.paging import EVICTING, RESIDENT, ROOMY, TIGHT, Paging, Setting

BUDGETS = (RESIDENT, TIGHT, EVICTING)
WAYS = {
    "plain": {},
    "accumulated": {"accumulate": 3},
    "all": {"clip": 0.05, "accumulate": 2, "dropout": 0.2, "checkpointing": False},
}


def gpt(dropout: float = 0.0, checkpointing: bool | None = None) -> TinyGPT:
    return TinyGPT(width=32, depth=2, num_heads=2, dropout=dropout, checkpointing=checkpointing)


def run(model: nn.Module, optimizer: Any, accumulate: int, steps: int = 3) -> Any:
    """Losses of a training that looks at nothing between its steps, and all that it leaves."""
    torch.manual_seed(7)
    losses = train_on_text(model, optimizer, steps, accumulate)
    return losses, weights_of(model), sorted_state(optimizer)


@pytest.mark.parametrize("precision", ["keep", "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_same_bits(paging: Paging, way: str, precision: str) -> None:
    options = dict(WAYS[way])
    accumulate, clip = int(options.pop("accumulate", 1)), options.pop("clip", None)
    build = partial(gpt, **options)
    settings = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": clip}
    expected = None
    serial = BUDGETS[list(WAYS).index(way)]  # each budget with another way: the order that is not new here
    for budget in BUDGETS:
        for overlap in ("none", "deferred") if budget is serial else ("deferred",):
            setting = replace(budget, step_overlap=overlap, precision=precision)
            model = paging.build(build, setting, key=f"deferred {way}")
            optimizer = deepoffload.CPUAdamW(model.parameters(), **settings)
            if expected is None:
                twin = build().to(next(model.parameters()).dtype)
                twin.load_state_dict(weights_of(model), strict=False)  # the tied head has one name
                plain = deepoffload.CPUAdamW(twin.parameters(), **settings)
                plain.load_state_dict(optimizer.state_dict())
                expected = run(twin, plain, accumulate)
            assert_same_bits(expected, run(model, optimizer, accumulate), f"{setting} {overlap} ")
            assert (deepoffload.stats(model)["evictions"] > 0) == (budget.room is not None)
            del model, optimizer


def test_as_torchs_own_optimizer(paging: Paging) -> None:
    """The reference of all other tests is ours on ordinary parameters; that one follows torch's."""

    def trained(model: nn.Module, optimizer: Any) -> Any:
        for seed in range(4):
            optimizer.zero_grad()
            backward(model, seed)
            optimizer.step()
        return weights_of(model).values()

    model, twin = paging.build(partial(mlp, depth=4), TIGHT, key="deferred"), mlp(depth=4)
    start = weights_of(model)
    twin.load_state_dict(start)
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    got = trained(model, deepoffload.CPUAdamW(model.parameters(), **settings))
    expected = trained(twin, torch.optim.AdamW(twin.parameters(), **settings))
    assert relative_difference(start.values(), expected, got) < 1e-4


def test_only_deferred_steps_are_to_come(paging: Paging) -> None:
    for setting, expected in ((TIGHT, 4), (replace(TIGHT, step_overlap="none"), 0)):
        model = paging.build(partial(mlp, depth=4), setting, key="deferred")
        optimizer = deepoffload.CPUAdamW(model.parameters(), **ADAMW)
        backward(model, 1)
        optimizer.step()
        assert units_pending(model) == expected
        model[2].weight.sum()
        assert units_pending(model) == max(0, expected - 1), "one unit's use made the step of others"
        optimizer.zero_grad()
        del model, optimizer


@pytest.mark.parametrize("setting", [RESIDENT, ROOMY], ids=str)
def test_dropped_gradients_give_their_memory_back(paging: Paging, setting: Setting) -> None:
    """After zero_grad nothing of a gradient is kept longer than the step that still needs it: none at all where
    everything stays, since nothing is put off there."""
    model = paging.build(partial(mlp, depth=4), setting)
    optimizer = deepoffload.CPUAdamW(model.parameters(), **ADAMW)
    assert deepoffload.stats(model)["host_gradient_bytes"] == 0
    backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    left = deepoffload.stats(model)["host_gradient_bytes"]
    assert left == 0 if setting is RESIDENT else 0 < left <= sum(p.nbytes for p in model.parameters())
    with torch.no_grad():
        model(rows())
    assert deepoffload.stats(model)["host_gradient_bytes"] == 0


def chunks_of(model: nn.Module) -> int:
    io = io_of(model)
    assert io is not None
    return io.stats()["chunks_done"]


@pytest.mark.parametrize(
    ("precision", "look"),
    [("keep", "weights"), ("bf16", "weights"), ("bf16", "state"), ("bf16", "step"), ("bf16", "zero_grad")],
)
def test_disk_error_while_catching_up(
    paging: Paging, monkeypatch: pytest.MonkeyPatch, precision: str, look: str
) -> None:
    """What failed is still to be made: the program catches the error, asks again, and has the same bits."""

    def again(call: Any) -> Any:
        try:
            return call(), 0
        except IoFailure:
            return call(), 1

    def train() -> tuple[Any, range, int]:
        setting = replace(TIGHT, prefetch=False, precision=precision)
        model = paging.build(partial(mlp, depth=4), setting, key="deferred")
        optimizer = Start(model, {}).stepped()
        before = chunks_of(model)
        looks = {
            "weights": lambda: weights_of(model),
            "state": lambda: sorted_state(optimizer),
            "step": optimizer.step,
            "zero_grad": lambda: optimizer.zero_grad(set_to_none=False),
        }
        seen, failed = again(looks[look])
        after = chunks_of(model)
        return (seen, finish(model, optimizer)), range(before + 1, after), failed

    expected, chunks, _ = train()
    failures = 0
    for place in range(3):
        chunk = chunks[(1 + place) * (len(chunks) - 1) // 4]
        with monkeypatch.context() as patch:
            patch.setattr(disk_module, "IoEngine", partial(IoEngine, fault_script=f"nth={chunk} errno={errno.EIO}"))
            got, _, failed = train()
        failures += failed
        assert_same_bits(expected, got)
    assert failures, "nothing has failed: this tested nothing"


def test_disk_error_in_the_middle_of_a_unit_that_the_program_has_a_view_of(
    paging: Paging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces that were updated before the error are not taken for edits by the program, which would cost bf16
    weights the rest of their masters."""
    setting = replace(TIGHT, prefetch=False, precision="bf16", room=3.0)

    def train() -> tuple[Any, range, int]:
        model = paging.build(partial(mlp, depth=4), setting, key="deferred")
        optimizer = Start(model, {}).stepped()
        weights_of(model)  # brings the weights, so that most of the state has to be read by the update
        optimizer.zero_grad()
        backward(model, 7)
        view = model[2].weight.detach()
        before, failed = chunks_of(model), 0
        try:
            optimizer.step()
        except IoFailure:
            failed = 1
            optimizer.step()
        after = chunks_of(model)
        del view
        return (weights_of(model), finish(model, optimizer)), range(before + 1, after), failed

    expected, chunks, _ = train()
    failures = 0
    for chunk in chunks:
        with monkeypatch.context() as patch:
            patch.setattr(disk_module, "IoEngine", partial(IoEngine, fault_script=f"nth={chunk} errno={errno.EIO}"))
            got, _, failed = train()
        failures += failed
        assert_same_bits(expected, got)
    assert failures, "nothing has failed: this tested nothing"
