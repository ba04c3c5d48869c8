"""Where everything stays in memory, weights are saved by autograd itself: no hooks of ours, and the same errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deepoffload
from deepoffload.params.torch_private import top_saved_tensors_hooks
from deepoffload.runtime.context import engine_of
from tests.support.inspect import pager_of, tiers_of, units_of
from tests.support.loops import assert_same_bits, gradients_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, Paging, Setting, plain


class Asks(nn.Module):
    """Notes whether saved-tensor hooks are on while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.hooked: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hooked.append(top_saved_tensors_hooks(True) is not None)
        return torch.tanh(x @ self.weight)


def resident(paging: Paging, build: Callable[[], Any], setting: Setting = RESIDENT) -> Any:
    model = paging.build(build, setting)
    assert tiers_of(model).all_stay(), "this would test nothing"
    return model


def asking() -> nn.Sequential:
    return nn.Sequential(*[Asks() for _ in range(4)])


def test_no_hooks_where_nothing_moves(paging: Paging) -> None:
    staying, evicting = resident(paging, asking), paging.build(asking, EVICTING)
    for model in (staying, evicting):
        model(rows()).sum().backward()
    assert not any(layer.hooked[0] for layer in staying)
    assert all(layer.hooked[0] for layer in evicting)
    with torch.autocast("cpu", torch.bfloat16):
        staying(rows())
    assert all(layer.hooked[1] for layer in staying), "autocast's copies of the weights would be kept"


@pytest.mark.parametrize("step_overlap", ["none", "deferred"])
def test_step_between_forward_and_backward_is_refused(paging: Paging, step_overlap: str) -> None:
    """As with torch's optimizers, also while the update itself is still to come."""
    model = resident(paging, mlp, replace(RESIDENT, step_overlap=step_overlap))
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=0.1)
    before = model(rows())
    model(rows(seed=5)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.sum().backward()
    optimizer.zero_grad()
    model(rows(seed=6)).sum().backward()
    optimizer.step()


def test_updates_are_no_edits(paging: Paging) -> None:
    """The version that an update moves is not taken for the program's: the bf16 weights keep their fp32 masters."""

    model = resident(paging, mlp, replace(RESIDENT, precision="bf16"))
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-4)
    for seed in range(3):
        model(rows(seed=seed).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    handles = [handle for unit in units_of(model) for handle in unit.handles]
    pager_of(model).catch_up_all()
    assert not any(handle.changed() or handle.master_stale for handle in handles)


def test_a_closed_engine_refuses_its_open_graphs(paging: Paging) -> None:
    model = resident(paging, mlp)
    loss = model(rows()).sum()
    engine_of(model).close()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def double(model: nn.Module) -> Any:
    loss = model(rows()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients_of(model)


def penalty(model: nn.Module) -> Any:
    x = rows().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return gradients_of(model)


def recomputed(model: nn.Sequential) -> Any:
    x = rows().requires_grad_()
    for index, layer in enumerate(model):
        x = checkpoint(layer, x, use_reentrant=bool(index % 2))
    x.sum().backward()
    return gradients_of(model)


def gradient_in_a_loss(model: nn.Sequential) -> Any:
    """The graph keeps what ``.grad`` has shown, which the next backward replaces."""
    model(rows()).sum().backward()
    factor = torch.ones(64, 64, requires_grad=True)
    loss = (model[0].weight.grad * factor).sum()
    model.zero_grad()
    model(rows(seed=8)).sum().backward()
    loss.backward()
    return [factor.grad, *gradients_of(model)]


def edited_in_between(model: nn.Sequential) -> Any:
    loss = model(rows()).sum()
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    model(rows()).sum().backward()
    return gradients_of(model)


def frozen_in_between(model: nn.Sequential) -> Any:
    model[2].requires_grad_(False)
    loss = model(rows()).sum()
    model[2].requires_grad_(True)
    loss.backward()
    model(rows()).sum().backward()
    return gradients_of(model)


def replaced_in_between(model: nn.Sequential) -> Any:
    loss = model(rows()).sum()
    torch.manual_seed(4)
    model[4] = nn.Linear(64, 64)
    model.append(nn.Linear(64, 64))
    (loss + model(rows()).sum()).backward()
    return gradients_of(model)


PROGRAMS = [
    double, penalty, recomputed, gradient_in_a_loss, edited_in_between, frozen_in_between, replaced_in_between
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_as_plain(paging: Paging, program: Callable[[Any], Any]) -> None:
    expected = program(plain(mlp))
    assert_same_bits(expected, program(resident(paging, mlp)))


class CastsInside(nn.Module):
    """Enters autocast by itself, where nobody sees it before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512) / 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, self.weight).float()


def allocated_bytes() -> int:
    class Mallinfo2(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b uordblks c d".split()]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def test_autocast_inside_a_module_keeps_no_copies(paging: Paging) -> None:
    model = resident(paging, lambda: nn.Sequential(*[CastsInside() for _ in range(6)]))
    x = torch.randn(2, 512)
    model(x).sum().backward()
    before = allocated_bytes()
    out = model(x)
    held = allocated_bytes() - before
    assert out.grad_fn is not None
    assert held < 512 * 512 * 2 * 2, f"{held >> 10} KiB are held: narrow copies of the weights"


class Scaled(nn.Module):
    """Autograd saves the weight itself, and it is so small that other state may take more of whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(0.5)), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def checkpointed() -> nn.Module:
    return Checkpointed(*[Scaled() for _ in range(4)])


def test_a_checkpoint_runs_again_where_not_everything_stays_any_more(paging: Paging) -> None:
    """Updates inside a backward give the state of their units a third array, for which there is no room."""

    def trained(model: nn.Module) -> Any:
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, amsgrad=True)
        for seed in range(3):
            model(rows(seed=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]

    setting = replace(RESIDENT, step_overlap="in_backward")
    enough_bytes = engine_of(resident(paging, checkpointed, setting)).placement.resident_bytes
    with paging.context(setting, enough_bytes):
        torch.manual_seed(0)
        model = checkpointed()
    tiers = tiers_of(model)
    assert tiers.all_stay()
    found = trained(model)
    assert not tiers.all_stay(), "this tested nothing"
    assert_same_bits(trained(resident(paging, checkpointed)), found)


@pytest.mark.parametrize("settings", [{"kind": "CPULion"}, {"amsgrad": True}, {"state_dtype": "8bit"}], ids=str)
def test_everything_still_stays_with_state_of_another_format(paging: Paging, settings: dict[str, Any]) -> None:
    others = {key: value for key, value in settings.items() if key != "kind"}
    kind = getattr(deepoffload, settings.get("kind", "CPUAdamW"))
    model = resident(paging, checkpointed, replace(RESIDENT, precision="bf16"))
    optimizer = kind(model.parameters(), lr=1e-2, **others)
    model(rows().bfloat16()).float().square().mean().backward()
    optimizer.step()
    assert tiers_of(model).all_stay()
