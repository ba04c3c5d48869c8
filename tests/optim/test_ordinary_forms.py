"""Ordinary parameters that are complex, and steps inside modes of the program."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import UnsupportedError
from tests.optim.kinds import KINDS, STORED, VARIANTS, Kind, gradient
from tests.support.loops import assert_same_bits


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


@pytest.mark.parametrize(
    "mode", [lambda: torch.device("meta"), lambda: torch.inference_mode()], ids=["device", "inference"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", (*KINDS, *STORED), ids=str)
def test_modes_of_the_program_do_not_reach_the_state(kind: Kind, dtype: torch.dtype, mode: Any) -> None:
    """A default device, or inference mode, around the first step: the state is an ordinary one on the CPU."""
    one, other = parameter(300, dtype=dtype), parameter(300, dtype=dtype)
    optimizer, reference = kind.ours([one]), kind.ours([other])
    for step in range(4):
        one.grad, other.grad = gradient(one, step), gradient(other, step)
        with mode() if step < 2 else contextlib.nullcontext():
            optimizer.step()
            if step == 1 and not torch.is_inference_mode_enabled():
                optimizer.load_state_dict(optimizer.state_dict())
        reference.step()
    assert_same_bits(other.detach(), one.detach())
    arrays = [value for value in optimizer.state[one].values() if isinstance(value, Tensor)]
    assert all(value.device.type == "cpu" and not value.is_inference() for value in arrays)


@pytest.mark.parametrize("kind", VARIANTS, ids=str)
def test_complex_parameters_are_pairs_of_real_ones(kind: Kind) -> None:
    """As with torch's optimizers: real and imaginary parts are updated as separate numbers."""
    pairs = parameter(9, 5, 2)
    weight = nn.Parameter(torch.view_as_complex(pairs.detach().clone()))
    optimizer, reference = kind.ours([weight], max_grad_norm=3.0), kind.ours([pairs], max_grad_norm=3.0)
    for step in range(6):
        pairs.grad = gradient(pairs, step)
        weight.grad = torch.view_as_complex(pairs.grad.clone())
        if step == 3:
            weight.grad = weight.grad.conj().resolve_conj().conj()  # lazily conjugated
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        reference.step()
        assert optimizer.grad_norm == reference.grad_norm
    assert_same_bits(pairs.detach(), torch.view_as_real(weight.detach()))
    state = optimizer.state_dict()["state"].get(0, {})
    assert all(state[key].dtype is torch.complex64 for key in kind.arrays)


@pytest.mark.parametrize("kind", [kind for kind in VARIANTS if "lion" not in kind.name], ids=str)
def test_complex_parameters_to_torch_and_back(kind: Kind) -> None:
    weight = nn.Parameter(torch.view_as_complex(parameter(9, 5, 2).detach()))
    theirs = nn.Parameter(weight.detach().clone())
    plain = {"fused": False} if "fused" in kind.reference_only else {}  # torch's fused ones take no complex weights
    ours, reference = kind.ours([weight]), kind.theirs([theirs], **plain)
    for step in range(6):
        if step == 3:
            saved = ours.state_dict()
            ours.load_state_dict(copy.deepcopy(reference.state_dict()))
            reference.load_state_dict(copy.deepcopy(saved))
        weight.grad = torch.view_as_complex(gradient(parameter(9, 5, 2), step))
        theirs.grad = weight.grad.clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(weight.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_complex_parameters_have_fp32_states() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(UnsupportedError, match="complex64.*state_dtype='fp32'"):
        deepoffload.CPUAdamW([weight], state_dtype="8bit").step()


def losses_of(kind: Kind, *, compiled: bool, closure: bool) -> list[float]:
    torch.manual_seed(0)
    model, data = nn.Linear(7, 3), torch.randn(5, 7)
    optimizer = kind.ours(model.parameters())

    def backward() -> Tensor:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    def train() -> Tensor:
        if closure:
            return optimizer.step(backward)
        loss = backward()
        optimizer.step()
        return loss

    step = torch.compile(train, backend="eager") if compiled else train
    return [step().item() for _ in range(4)]


@pytest.mark.parametrize(("kind", "closure"), [(kind, bool(turn % 2)) for turn, kind in enumerate(KINDS)], ids=str)
def test_a_training_step_that_is_compiled_as_a_whole(kind: Kind, closure: bool) -> None:
    assert losses_of(kind, compiled=True, closure=closure) == losses_of(kind, compiled=False, closure=closure)


def _strided(grad: Tensor) -> Tensor:
    return grad.t().contiguous().t() if grad.dim() == 2 else torch.stack([grad, grad], -1)[..., 0]


def _negative(grad: Tensor) -> Tensor:
    result = torch.complex(torch.zeros_like(grad), -grad).conj().imag
    assert result.is_neg()
    return result


@pytest.mark.parametrize("change", [_strided, _negative], ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_gradients_of_other_forms(change: Callable[[Tensor], Tensor], max_grad_norm: float | None) -> None:
    """A gradient with strides, or one that torch negates lazily, counts as its values."""
    changed, plain = [[parameter(7, 5), parameter(130, seed=1)] for _ in range(2)]
    ours = deepoffload.CPUAdamW(changed, max_grad_norm=max_grad_norm)
    other = deepoffload.CPUAdamW(plain, max_grad_norm=max_grad_norm)
    for seed in range(4):
        for mine, theirs in zip(changed, plain, strict=True):
            theirs.grad = gradient(theirs, seed)
            mine.grad = change(theirs.grad) if seed == 2 else theirs.grad.clone()
        ours.step()
        other.step()
        assert ours.grad_norm == other.grad_norm
    assert_same_bits(changed, plain)
    assert_same_bits(ours.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_copied_optimizer_has_its_own_weights_and_state(kind: Kind) -> None:
    def step(optimizer: Any, seed: int) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = gradient(param, seed)
        optimizer.step()

    def values(optimizer: Any) -> Any:
        return copy.deepcopy((optimizer.param_groups[0]["params"], optimizer.state_dict()["state"]))

    original = kind.ours([parameter(7, 5), parameter(130, seed=1)])
    for seed in range(2):
        step(original, seed)
    copied, before = copy.deepcopy(original), values(original)
    step(copied, 2)
    assert_same_bits(values(original), before)
    step(original, 2)
    assert_same_bits(values(copied), values(original))
