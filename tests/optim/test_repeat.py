"""Steps that repeat what the one before found out: each has the bits of one that looks everything up, whatever the
program did in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import UnsupportedError
from tests.optim.kinds import KINDS, STORED, VARIANTS, Kind, gradient

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((7, 5), (130,), (1,), (0,))]


def forget(optimizer: Any) -> None:
    """The next step looks everything up."""
    optimizer._plan = None


def step(optimizer: Any, seed: int, only: slice = slice(None)) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        param.grad = None
        if index in range(len(params))[only]:
            param.grad = gradient(param, 100 * seed + index)
    optimizer.step()


def everything(optimizer: Any) -> dict[str, Any]:
    weights = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
    return copy.deepcopy({"weights": weights, "state": optimizer.state_dict()["state"]})


def assert_equal(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", (*VARIANTS, *STORED), ids=str)
def test_a_repeated_step_has_the_same_bits(kind: Kind, dtype: torch.dtype) -> None:
    repeated, fresh = kind.ours(parameters(dtype)), kind.ours(parameters(dtype))
    for seed in range(5):
        step(repeated, seed)
        forget(fresh)
        step(fresh, seed)
        assert repeated._plan is not None
    assert_equal(everything(repeated), everything(fresh))


def _new_data(optimizer: Any) -> None:
    param = optimizer.param_groups[0]["params"][1]
    param.data = param.data * 2.0


def _write(optimizer: Any) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].mul_(1.5)


def _other_dtype(optimizer: Any) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.data = param.data.bfloat16() if param.dtype is torch.float32 else param.data.float()


def _settings(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[0]["weight_decay"] = 0.25


def _lr_in_a_tensor(optimizer: Any) -> None:
    lr = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = torch.tensor(0.2) if isinstance(lr, float) else lr.mul_(0.5)


def _smaller_states(optimizer: Any) -> None:
    if optimizer.param_groups[0].get("state_dtype") == "fp32":
        optimizer.param_groups[0]["state_dtype"] = "bf16"


def _no_masters(optimizer: Any) -> None:
    if "master_weights" in optimizer.param_groups[0]:
        optimizer.param_groups[0]["master_weights"] = False


def _more(optimizer: Any) -> None:
    torch.manual_seed(1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(9))], "lr": 0.3})


def _fewer(optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop(0), None)


def _other_object(optimizer: Any) -> None:
    torch.manual_seed(2)
    optimizer.state.pop(optimizer.param_groups[0]["params"][1], None)
    optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.randn(130))


def _no_state(optimizer: Any) -> None:
    optimizer.state.clear()


def _own_array(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if key not in ("step", "remainder") and value.numel() == 130 and value.is_floating_point():
                state[key] = value * 0.5


def _array_elsewhere(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def _step_set(optimizer: Any) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(40.0)


def _step_replaced(optimizer: Any) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.tensor(7.0)


def _loaded(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _transposed(optimizer: Any) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.data = param.data.t().contiguous().t()


EVENTS: tuple[Callable[[Any], None], ...] = (
    _new_data,
    _write,
    _other_dtype,
    _settings,
    _lr_in_a_tensor,
    _smaller_states,
    _no_masters,
    _more,
    _fewer,
    _other_object,
    _no_state,
    _own_array,
    _array_elsewhere,
    _step_set,
    _step_replaced,
    _loaded,
    _transposed,
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__.strip("_"))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_the_program_changes_is_noticed(kind: Kind, dtype: torch.dtype, event: Callable[[Any], None]) -> None:
    repeated, fresh = kind.ours(parameters(dtype)), kind.ours(parameters(dtype))
    for optimizer in (repeated, fresh):
        for seed in range(6):
            if seed in (2, 4):
                event(optimizer)
            if optimizer is fresh:
                forget(optimizer)
            step(optimizer, seed)
    assert_equal(everything(repeated), everything(fresh))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradients_that_come_and_go(kind: Kind) -> None:
    repeated, fresh = kind.ours(parameters()), kind.ours(parameters())
    for optimizer in (repeated, fresh):
        for seed, only in enumerate((slice(None), slice(1, 3), slice(1, 3), slice(0, 2), slice(0, 0), slice(None))):
            if optimizer is fresh:
                forget(optimizer)
            step(optimizer, seed, only)
    assert_equal(everything(repeated), everything(fresh))


def _strided(grad: Tensor) -> Tensor:
    return grad.t().contiguous().t() if grad.dim() == 2 else torch.stack([grad, grad], -1)[..., 0]


def _negative(grad: Tensor) -> Tensor:
    result = torch.complex(torch.zeros_like(grad), -grad).conj().imag
    assert result.is_neg()
    return result


@pytest.mark.parametrize("change", [_strided, _negative, Tensor.clone], ids=lambda change: change.__name__)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_gradients_of_other_forms(change: Callable[[Tensor], Tensor], max_grad_norm: float | None) -> None:
    repeated = deepoffload.CPUAdamW(parameters()[:2], max_grad_norm=max_grad_norm)
    fresh = deepoffload.CPUAdamW(parameters()[:2], max_grad_norm=max_grad_norm)
    for seed in range(4):
        for optimizer in (repeated, fresh):
            for param in optimizer.param_groups[0]["params"]:
                grad = gradient(param, seed)
                param.grad = change(grad) if optimizer is repeated and seed == 2 else grad
        forget(fresh)
        repeated.step()
        fresh.step()
        assert repeated.grad_norm == fresh.grad_norm
    assert_equal(everything(repeated), everything(fresh))


def test_a_repeated_step_is_checked_as_the_first() -> None:
    params = parameters()[:2]
    optimizer = deepoffload.CPUAdamW(params)
    for seed in range(2):
        step(optimizer, seed)
    before = everything(optimizer)
    params[1].grad = torch.sparse_coo_tensor([[3]], [1.0], (130,))
    with pytest.raises(UnsupportedError, match="sparse"):
        optimizer.step()
    step_with_wrong_lr = pytest.raises(ValueError, match="^lr must not be negative")
    params[1].grad = gradient(params[1], 0)
    optimizer.param_groups[0]["lr"] = -1.0
    with step_with_wrong_lr:
        optimizer.step()
    assert_equal(before, everything(optimizer))


def test_a_repeated_step_skips_and_invalidates_graphs_too() -> None:
    params = parameters()[:2]
    optimizer = deepoffload.CPUAdamW(params)
    optimizer.skip_non_finite = True
    for seed in range(2):
        step(optimizer, seed)
    before = everything(optimizer)
    params[0].grad = torch.full_like(params[0], torch.inf)
    optimizer.step()
    assert not optimizer.applied
    assert_equal(before, everything(optimizer))
    params[0].grad = gradient(params[0], 3)
    loss = params[0].square().sum()
    optimizer.step()
    assert optimizer.applied
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", VARIANTS, ids=str)
def test_a_skipped_step_does_not_count(kind: Kind) -> None:
    repeated, fresh = kind.ours(parameters()), kind.ours(parameters())
    for optimizer in (repeated, fresh):
        optimizer.skip_non_finite = True
        for seed in range(6):
            if optimizer is fresh:
                forget(optimizer)
            if seed in (2, 3):
                for param in optimizer.param_groups[0]["params"]:
                    param.grad = torch.full_like(param, torch.nan)
                optimizer.step()
                assert not optimizer.applied
            else:
                step(optimizer, seed)
    assert_equal(everything(repeated), everything(fresh))


def test_copies_go_their_own_ways() -> None:
    original = deepoffload.CPUAdamW(parameters())
    for seed in range(2):
        step(original, seed)
    copied = copy.deepcopy(original)
    before = everything(original)
    step(copied, 2)
    assert_equal(before, everything(original))
    step(original, 2)
    assert_equal(everything(copied), everything(original))
