"""Optimizers on paged parameters: the bits of the same optimizer on ordinary ones, state that leaves and returns."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import ClosedError, UnsupportedError, UsageError
from deepoffload.params.state_dict_values import LazyValue
from tests.optim.kinds import KINDS, STORED, VARIANTS, Kind
from tests.support.inspect import engine_of_param, handle_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Setting, plain

PRECISIONS = ["keep", "bf16"]


def small() -> nn.Sequential:
    return mlp(depth=4)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        dtype = next(model.parameters()).dtype
        model(rows(seed=step).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    """The state through a file, as a program keeps it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def like(model: nn.Module) -> nn.Module:
    """A plain model with the weights of a paged one."""
    twin = small().to(next(model.parameters()).dtype)
    twin.load_state_dict(weights_of(model))
    return twin


@pytest.mark.parametrize(
    "setting",
    [RESIDENT, TIGHT, replace(RESIDENT, precision="bf16"), replace(EVICTING, precision="bf16")],
    ids=lambda setting: f"{setting}-{setting.precision}",
)
@pytest.mark.parametrize("kind", (*KINDS, *STORED), ids=str)
def test_same_bits_as_on_ordinary_parameters(paging: Paging, kind: Kind, setting: Setting) -> None:
    model = paging.build(small, setting)
    twin = like(model)
    optimizer, reference = kind.ours(model.parameters()), kind.ours(twin.parameters())
    # Before the first step the state of a model made in fp32 is what its bf16 weights left over.
    start = optimizer.state_dict()
    if setting.precision == "bf16":
        assert set(start["state"]) == set(range(8)) and "remainder" in start["state"][0]
        arrays = [value for key, value in start["state"][0].items() if key in kind.arrays]
        assert all(type(value) is LazyValue for value in arrays), "zeros took memory"
    else:
        assert start["state"] == {}
    reference.load_state_dict(copy_of(start))
    train(model, optimizer, range(4))
    train(twin, reference, range(4))
    assert_same_bits(weights_of(twin), weights_of(model))
    expected = {number: dict(sorted(entry.items())) for number, entry in reference.state_dict()["state"].items()}
    got = {number: dict(sorted(entry.items())) for number, entry in sorted(optimizer.state_dict()["state"].items())}
    assert_same_bits(expected, got)
    assert (deepoffload.stats(model)["evictions"] > 0) == (setting.room is not None)


@pytest.mark.parametrize("kind", [k for k in VARIANTS if k not in KINDS], ids=str)
def test_variants_have_the_same_bits(paging: Paging, kind: Kind) -> None:
    model = paging.build(small, TIGHT)
    twin = like(model)
    train(model, kind.ours(model.parameters()), range(3))
    train(twin, kind.ours(twin.parameters()), range(3))
    assert_same_bits(weights_of(twin), weights_of(model))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", (*KINDS, *STORED), ids=str)
def test_a_round_trip_goes_on_bit_for_bit(paging: Paging, kind: Kind, precision: str) -> None:
    """Out of one engine, through a file, into another one with a different budget."""
    model = paging.build(small, replace(TIGHT, precision=precision))
    optimizer = kind.ours(model.parameters())
    train(model, optimizer, range(3))
    saved = copy_of(optimizer.state_dict())
    weights = weights_of(model)
    train(model, optimizer, range(3, 6))
    expected = weights_of(model)

    other = paging.build(small, replace(EVICTING, precision=precision), seed=9)
    again = kind.ours(other.parameters(), lr=123.0)
    train(other, again, range(1))  # what was there before must not shine through
    other.load_state_dict(weights)
    again.load_state_dict(saved)
    train(other, again, range(3, 6))
    assert_same_bits(expected, weights_of(other))

    model.load_state_dict(weights)  # and back in time
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(3, 6))
    assert_same_bits(expected, weights_of(model))


def test_torchs_state_goes_in_and_out(paging: Paging) -> None:
    model = paging.build(small, TIGHT)
    twin = like(model)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train(twin, theirs, range(3))
    model.load_state_dict(twin.state_dict())
    optimizer = deepoffload.CPUAdamW(model.parameters())
    optimizer.load_state_dict(theirs.state_dict())
    train(model, optimizer, range(3, 5))
    train(twin, theirs, range(3, 5))
    for name, value in weights_of(twin).items():
        torch.testing.assert_close(weights_of(model)[name], value, rtol=1e-5, atol=1e-6)
    third = like(model)
    back = torch.optim.AdamW(third.parameters())
    back.load_state_dict(optimizer.state_dict())
    train(third, back, range(5, 7))
    train(model, optimizer, range(5, 7))
    for name, value in weights_of(third).items():
        torch.testing.assert_close(weights_of(model)[name], value, rtol=1e-5, atol=1e-6)


def test_a_new_optimizer_starts_with_a_new_state(paging: Paging) -> None:
    """As in torch; and the one whose state was given up says so, and comes back by loading."""
    model = paging.build(small, EVICTING)
    twin = like(model)
    outcomes = []
    for net in (model, twin):
        first = deepoffload.CPUAdamW(net.parameters(), lr=1e-2)
        train(net, first, range(3))
        saved = copy_of(first.state_dict())
        second = deepoffload.CPULion(net.parameters(), lr=1e-3)
        train(net, second, range(3, 5))
        if net is model:
            before = weights_of(model)
            with pytest.raises(UsageError, match="another optimizer"):
                train(model, first, range(1))
            with pytest.raises(UsageError, match="another optimizer"):
                first.state_dict()
            first.zero_grad()
            assert_same_bits(before, weights_of(model))
        first.load_state_dict(saved)
        train(net, first, range(5, 7))
        outcomes.append(weights_of(net))
    assert_same_bits(outcomes[1], outcomes[0])


def test_two_optimizers_share_a_model(paging: Paging) -> None:
    """Each over its own parameters, some of them in one unit and one piece of state."""
    model = paging.build(small, TIGHT)
    twin = like(model)
    for net in (model, twin):
        weights = [p for p in net.parameters() if p.dim() == 2]
        biases = [p for p in net.parameters() if p.dim() == 1]
        one, other = deepoffload.CPUAdamW(weights, lr=1e-2), deepoffload.CPUSGD(biases, lr=0.1, momentum=0.9)
        for step in range(4):
            net(rows(seed=step)).square().mean().backward()
            one.step()
            other.step()
            net.zero_grad()
        assert set(one.state_dict()["state"]) == set(other.state_dict()["state"]) == set(range(4))
    assert_same_bits(weights_of(twin), weights_of(model))


class Mixture(nn.Module):
    """fp32 and bf16 layers, a frozen one, and one that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.short = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.seldom = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, use_all: bool) -> torch.Tensor:
        x = self.frozen(self.short(self.first(x).bfloat16()).float())
        return self.seldom(x) if use_all else x


@pytest.mark.parametrize("kind", (*KINDS, *STORED), ids=str)
def test_mixed_parameters_in_one_optimizer(paging: Paging, kind: Kind) -> None:
    """Paged and ordinary, fp32 and bf16, frozen, unfrozen in between, and without a gradient in some steps."""
    model = paging.build(Mixture, EVICTING)
    twin = Mixture()
    twin.load_state_dict(weights_of(model))
    for net in (model, twin):
        torch.manual_seed(4)
        outside = nn.Linear(64, 8)
        lr = kind.settings["lr"]
        groups = [
            {"params": [*net.first.parameters(), *net.short.parameters()]},
            {"params": [*net.frozen.parameters(), *net.seldom.parameters(), *outside.parameters()], "lr": lr / 2},
        ]
        optimizer = kind.ours(groups)
        for step in range(6):
            if step == 3:
                net.frozen.requires_grad_(True)
            outside(net(rows(seed=step), step % 2 == 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if net is model:
            got = weights_of(model) | weights_of(outside)
            state = optimizer.state_dict()["state"]
    assert_same_bits(weights_of(twin) | weights_of(outside), got)
    expected = optimizer.state_dict()["state"]
    assert_same_bits(
        {n: dict(sorted(expected[n].items())) for n in sorted(expected)},
        {n: dict(sorted(state[n].items())) for n in sorted(state)},
    )


def test_a_group_that_comes_later(paging: Paging) -> None:
    model = paging.build(small, TIGHT)
    twin = like(model)
    for net in (model, twin):
        optimizer = deepoffload.CPUAdamW(net[0].parameters(), lr=1e-2)
        train(net, optimizer, range(2))
        net.zero_grad()
        optimizer.add_param_group({"params": list(net[4].parameters()), "lr": 1e-3, "betas": (0.5, 0.9)})
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(2, 5):
            train(net, optimizer, range(step, step + 1))
            net.zero_grad()
            schedule.step()
    assert_same_bits(weights_of(twin), weights_of(model))


@pytest.mark.parametrize("kind", (*KINDS, *STORED), ids=str)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_deep_copy_is_an_ordinary_optimizer(paging: Paging, kind: Kind, steps: int) -> None:
    model = paging.build(small, replace(TIGHT, precision="bf16"))
    optimizer = kind.ours(model.parameters())
    train(model, optimizer, range(steps))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    train(model, optimizer, range(3, 5))
    train(twin, twin_optimizer, range(3, 5))
    assert_same_bits(weights_of(model), weights_of(twin))


@pytest.mark.parametrize("kind", (*KINDS, *STORED), ids=str)
def test_state_from_before_the_model_was_paged(paging: Paging, kind: Kind) -> None:
    model, twin = plain(small), plain(small)
    optimizer, reference = kind.ours(model.parameters()), kind.ours(twin.parameters())
    train(model, optimizer, range(2))
    train(twin, reference, range(4))
    config = {"host_budget": "64MiB", "nvme_path": str(paging.nvme_path), "gradient_clipping": 0.0}
    engine, _, _, _ = deepoffload.initialize(model=model, optimizer=optimizer, config=config)
    train(model, optimizer, range(2, 4))
    assert_same_bits(weights_of(twin), weights_of(model))
    assert not any(key in optimizer.state[p] for p in model.parameters() for key in kind.arrays)
    engine.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_amsgrad_may_come_later_and_go_again(paging: Paging, precision: str) -> None:
    """The pieces get one array more, and lose it, with all else as it was."""
    model = paging.build(small, replace(TIGHT, precision=precision))
    twin = like(model)
    optimizer, reference = (deepoffload.CPUAdamW(net.parameters(), lr=1e-2) for net in (model, twin))
    reference.load_state_dict(copy_of(optimizer.state_dict()))
    for steps, amsgrad in ((range(2), False), (range(2, 4), True), (range(4, 6), False)):
        for net, each in ((model, optimizer), (twin, reference)):
            each.param_groups[0]["amsgrad"] = amsgrad
            train(net, each, steps)
        assert_same_bits(weights_of(twin), weights_of(model))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_how_states_are_stored_may_change_at_any_time(paging: Paging, precision: str) -> None:
    model = paging.build(small, replace(TIGHT, precision=precision))
    twin = like(model)
    optimizer, reference = (deepoffload.CPUAdamW(net.parameters(), lr=1e-2) for net in (model, twin))
    reference.load_state_dict(copy_of(optimizer.state_dict()))
    for index, dtype in enumerate(("8bit", "fp32", "bf16", "8bit")):
        for net, each in ((model, optimizer), (twin, reference)):
            each.param_groups[0]["state_dtype"] = dtype
            train(net, each, range(2 * index, 2 * index + 2))
        assert_same_bits(weights_of(twin), weights_of(model))


def test_groups_may_store_their_states_differently(paging: Paging) -> None:
    """Weights in 8 bits, biases in fp32, in the same units; a loaded state leaves that as it is."""
    model = paging.build(small, EVICTING)
    twin = like(model)
    for net in (model, twin):
        groups = [
            {"params": [p for p in net.parameters() if p.ndim == 2], "state_dtype": "8bit"},
            {"params": [p for p in net.parameters() if p.ndim == 1]},
        ]
        optimizer = deepoffload.CPUAdamW(groups, lr=1e-2)
        train(net, optimizer, range(3))
        state = copy_of(optimizer.state_dict())
        optimizer.load_state_dict(
            {**state, "param_groups": [{**g, "state_dtype": "fp32"} for g in state["param_groups"]]}
        )
        assert [group["state_dtype"] for group in optimizer.param_groups] == ["8bit", "fp32"]
        train(net, optimizer, range(3, 5))
    assert_same_bits(weights_of(twin), weights_of(model))


def test_eight_bit_state_takes_less_than_half_of_the_disk(paging: Paging) -> None:
    """4 bytes and two scales per 256 elements instead of 10, read and written in every step."""
    written = {}
    for dtype in ("fp32", "8bit"):
        model = paging.build(small, replace(EVICTING, precision="bf16"))
        optimizer = deepoffload.CPUAdamW(model.parameters(), state_dtype=dtype)
        train(model, optimizer, range(2))
        pieces = {id(piece): piece for p in model.parameters() for piece in handle_of(p).unit.pieces}
        written[dtype] = sum(piece.block.nbytes for piece in pieces.values())
    assert written["8bit"] < 0.45 * written["fp32"]


def test_without_master_weights_is_refused_for_paged_parameters(paging: Paging) -> None:
    model = paging.build(small, replace(RESIDENT, precision="bf16"))
    with pytest.raises(UnsupportedError, match=r"0\.weight is paged.*master_weights=True"):
        deepoffload.CPUAdamW(model.parameters(), master_weights=False)


def test_a_state_that_does_not_fit_changes_nothing(paging: Paging) -> None:
    model = paging.build(small, EVICTING)
    optimizer = deepoffload.CPUAdamW(model.parameters())
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    spoiled = copy.deepcopy(before)
    spoiled["state"][7]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"state\[7\]: exp_avg has shape \(3,\)"):
        optimizer.load_state_dict(spoiled)
    assert_same_bits(before["state"], optimizer.state_dict()["state"])


def test_inside_the_context_and_after_the_end(paging: Paging) -> None:
    with paging.context(RESIDENT, 64 << 20):
        model = small()
        optimizer = deepoffload.CPUAdamW(model.parameters())
        saved = optimizer.state_dict()
        with pytest.raises(UsageError, match="after the context has ended"):
            optimizer.load_state_dict(saved)
    train(model, optimizer, range(1))
    engine_of_param(next(model.parameters())).close()
    for action in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(ClosedError, match="closed"):
            action()


def test_sgd_without_momentum_moves_no_state(paging: Paging) -> None:
    model = paging.build(small, TIGHT)
    optimizer = deepoffload.CPUSGD(model.parameters(), lr=0.1)
    train(model, optimizer, range(3))
    assert deepoffload.stats(model)["host_state_bytes"] == 0
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("when", ["before", "after", "itself"])
@pytest.mark.parametrize("setting", [RESIDENT, TIGHT, EVICTING], ids=str)
@pytest.mark.parametrize("overlap", ["none", "deferred"])
def test_a_weight_given_other_memory_around_the_step(paging: Paging, overlap: str, setting: Setting, when: str) -> None:
    """What ``set_`` puts in the place of a weight, evicted or not, is what the step starts from, or what it is after
    the step."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        weight = model[2].weight
        for seed in range(3):
            model(rows(seed=seed)).square().mean().backward()
            given = torch.linspace(-0.1, 0.1, weight.numel()).view(weight.shape) * (seed + 1)
            with torch.no_grad():
                if when == "before":
                    weight.set_(given)
                optimizer.step()
                if when == "after":
                    weight.set_(given)
                if when == "itself":
                    weight.set_(weight)
            optimizer.zero_grad()
        return weights_of(model)

    torch.manual_seed(0)
    twin = mlp()
    expected = train(twin, deepoffload.CPUAdamW(twin.parameters(), lr=1e-2))
    model = paging.build(mlp, replace(setting, step_overlap=overlap), key="mlp")
    assert_same_bits(expected, train(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2)))
