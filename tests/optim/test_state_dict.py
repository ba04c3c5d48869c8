"""``state_dict`` of ordinary parameters: torch's layout, to torch and back, and through files, pickles and copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from tests.optim.kinds import KINDS, STORED, VARIANTS, Kind, gradient
from tests.support.loops import assert_same_bits


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((13, 7), (29,), ())]


def run(optimizer: Any, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for index, param in enumerate(params):
            param.grad = gradient(param, 100 * step + index)
        optimizer.step()


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", (*VARIANTS, *STORED), ids=str)
def test_a_round_trip_goes_on_bit_for_bit(kind: Kind, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = kind.ours(params, lr=torch.tensor(kind.settings["lr"]))
    run(optimizer, params, range(3))
    again = copies(params)
    other = kind.ours(again, lr=0.5)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert set(optimizer.state_dict()["state"].get(0, {})) - {"step", "remainder", "master"} == set(kind.arrays)
    run(optimizer, params, range(3, 6))
    run(other, again, range(3, 6))
    assert_same_bits([p.detach() for p in params], [p.detach() for p in again])


@pytest.mark.parametrize("kind", [kind for kind in VARIANTS if "lion" not in kind.name], ids=str)
def test_into_torch_and_back(kind: Kind) -> None:
    """Torch takes our state and settings, we take torch's: the two train on alike from either."""
    params = parameters()
    optimizer = kind.ours(params)
    run(optimizer, params, range(3))
    theirs, back = copies(params), copies(params)
    reference = kind.reference(theirs)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch takes arrays over as they are
    run(reference, theirs, range(3, 5))
    run(optimizer, params, range(3, 5))
    torch.testing.assert_close([p.detach() for p in params], [p.detach() for p in theirs], rtol=1e-5, atol=1e-6)
    returned = kind.make(back)
    returned.load_state_dict(reference.state_dict())
    for key in set(kind.settings) & set(reference.param_groups[0]):
        assert returned.param_groups[0][key] == kind.settings[key]
    with torch.no_grad():
        for param, value in zip(back, theirs, strict=True):
            param.copy_(value)
    run(reference, theirs, range(5, 7))
    run(returned, back, range(5, 7))
    torch.testing.assert_close([p.detach() for p in back], [p.detach() for p in theirs], rtol=1e-5, atol=1e-6)


def test_moments_of_16_bit_parameters_stay_fp32() -> None:
    params = parameters(torch.bfloat16)
    optimizer = deepoffload.CPUAdamW(params)
    run(optimizer, params, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state[params[0]]
    assert state["exp_avg"].dtype is torch.float32 and state["remainder"].dtype is torch.int16


def test_l2_and_decoupled_decay_travel() -> None:
    params = parameters()
    for make, decoupled in ((torch.optim.Adam, False), (torch.optim.AdamW, True)):
        theirs = make(params, weight_decay=0.1)
        run(theirs, params, range(1))
        if "decoupled_weight_decay" not in theirs.state_dict()["param_groups"][0]:
            pytest.skip("this torch does not write decoupled_weight_decay")
        ours = deepoffload.CPUAdam(params)
        ours.load_state_dict(theirs.state_dict())
        assert ours.param_groups[0]["adamw_mode"] is decoupled
        assert ours.state_dict()["param_groups"][0]["decoupled_weight_decay"] is decoupled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", (*KINDS, *STORED), ids=str)
def test_copies_and_pickles(kind: Kind, duplicate: Callable[[Any], Any], dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = kind.ours(params, max_grad_norm=0.7)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    run(optimizer, params, range(3))
    schedule.step()
    twin = duplicate(optimizer)
    assert type(twin) is type(optimizer) and twin.max_grad_norm == 0.7
    twins = twin.param_groups[0]["params"]
    assert all(a is not b for a, b in zip(params, twins, strict=True))
    run(optimizer, params, range(3, 5))
    run(twin, twins, range(3, 5))
    assert_same_bits([p.detach() for p in params], [p.detach() for p in twins])


def test_loading_copies() -> None:
    params = parameters()
    optimizer = deepoffload.CPUAdamW(params)
    run(optimizer, params, range(2))
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved["state"])
    other = deepoffload.CPUAdamW(copies(params))
    other.load_state_dict(saved)
    run(other, other.param_groups[0]["params"], range(2))
    assert_same_bits(before, saved["state"])


def test_hooks_see_and_change_the_state() -> None:
    params = parameters()
    optimizer = deepoffload.CPUAdamW(params)
    run(optimizer, params, range(1))
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: called.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    state = optimizer.state_dict()
    assert called == ["pre"] and state["extra"] == 1
    optimizer.register_load_state_dict_pre_hook(lambda o, state: {**state, "state": {}})
    optimizer.register_load_state_dict_post_hook(lambda o: called.append("loaded"))
    optimizer.load_state_dict(state)
    assert called == ["pre", "loaded"] and not optimizer.state


def test_named_parameters_keep_their_names() -> None:
    model = nn.Linear(3, 2)
    optimizer = deepoffload.CPUAdamW(model.named_parameters())
    state = optimizer.state_dict()
    assert state["param_groups"][0]["param_names"] == ["weight", "bias"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def _wrong_shape(state: dict[str, Any]) -> None:
    state["state"][1]["exp_avg"] = torch.zeros(5)


def _other_kind(state: dict[str, Any]) -> None:
    del state["state"][0]["exp_avg_sq"]


def _fewer_groups(state: dict[str, Any]) -> None:
    state["param_groups"] = []


def _fewer_parameters(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


def _bad_lr(state: dict[str, Any]) -> None:
    state["param_groups"][0]["lr"] = -1.0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_wrong_shape, r"state\[1\]: exp_avg has shape \(5,\), the parameter \(29,\)"),
        (_other_kind, r"state\[0\]: the entry has no exp_avg_sq"),
        (_fewer_groups, "0 groups, the optimizer 1"),
        (_fewer_parameters, "2 parameters, the optimizer 3"),
        (_bad_lr, "lr must not be negative"),
        (lambda state: state.pop("param_groups"), "no 'param_groups'"),
        (lambda state: state["state"][1].update(step=torch.tensor(float("nan"))), r"state\[1\]: step is nan"),
        (lambda state: state["state"][1].update(step=-3), r"state\[1\]: step is -3"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil: Callable[[dict[str, Any]], object], message: str) -> None:
    params = parameters()
    optimizer = deepoffload.CPUAdamW(params)
    run(optimizer, params, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    spoil(state)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_same_bits(before, optimizer.state_dict())


@pytest.mark.parametrize("stored", ["8bit", "bf16"])
def test_stored_states_go_into_torch_and_back(stored: str) -> None:
    """They are shown in fp32, which torch trains on with; what it gives back is stored as before."""
    params = parameters()
    optimizer = deepoffload.CPUAdamW(params, lr=1e-2, state_dtype=stored)
    run(optimizer, params, range(3))
    saved = optimizer.state_dict()
    assert all(entry["exp_avg"].dtype is torch.float32 for entry in saved["state"].values())
    assert all(set(entry) == {"step", "exp_avg", "exp_avg_sq"} for entry in saved["state"].values())
    theirs = copies(params)
    reference = torch.optim.AdamW(theirs, lr=1e-2)
    reference.load_state_dict(copy.deepcopy(saved))
    run(optimizer, params, range(3, 4))
    run(reference, theirs, range(3, 4))
    torch.testing.assert_close([p.detach() for p in params], [p.detach() for p in theirs], rtol=1e-5, atol=1e-6)
    optimizer.load_state_dict(reference.state_dict())
    run(optimizer, params, range(4, 5))
    assert optimizer.state[params[0]]["exp_avg"].dtype is {"8bit": torch.int8, "bf16": torch.bfloat16}[stored]
