"""Casts of weights that the program makes and edits: fake quantization, masks, straight-through estimators. Autograd
goes backward with what was computed with, or raises as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.loops import gradients_of, weights_of
from tests.support.models import rows
from tests.support.paging import EVICTING, TIGHT, Paging, Same, Setting, plain

WIDTH = 32
KEPT: list[Tensor] = []
"""Casts that outlive their forward."""


def clamp_data(cast: Tensor) -> None:
    cast.data.clamp_(-0.1, 0.1)


def clamp_without_grad(cast: Tensor) -> None:
    with torch.no_grad():
        cast.clamp_(-0.1, 0.1)


def mask_bits(cast: Tensor) -> None:
    cast.detach().view(torch.int16).bitwise_and_(-256)


def zero_a_row_of_memory(cast: Tensor) -> None:
    cast.detach().view(torch.int16).numpy()[0] = 0


def keep(cast: Tensor) -> None:
    KEPT.append(cast)


def do_nothing(cast: Tensor) -> None:
    pass


EDITS = [do_nothing, clamp_data, clamp_without_grad, mask_bits, zero_a_row_of_memory, keep]


class Quantized(nn.Module):
    """Computes with a cast of its weight; ``before`` is done to the cast before it is used, ``after`` afterwards."""

    def __init__(self, before: Callable[[Tensor], None], after: Callable[[Tensor], None], trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5, requires_grad=trained)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.before = before
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        cast = self.weight.to(torch.bfloat16)
        self.before(cast)
        y = x.to(torch.bfloat16) @ cast
        self.after(cast)
        return x + torch.tanh(y.float() + self.bias)


def quantized(
    before: Callable[[Tensor], None], after: Callable[[Tensor], None] = do_nothing, *, trained: bool = True
) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Quantized(before, after, trained) for _ in range(4)])


def training(model: nn.Module, between: Callable[[], None] = lambda: None, *, autocast: bool = False) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
    seen = []
    for seed in range(3):
        KEPT.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(rows(width=WIDTH, seed=seed)).float().square().mean()
        between()
        loss.backward()
        seen.append((loss.detach(), gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    KEPT.clear()
    return seen, weights_of(model)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_an_edited_cast_is_what_backward_uses(same: Same, edit: Any, trained: bool) -> None:
    def program(model: nn.Module) -> Any:
        return training(model), training(model, autocast=True)

    same(quantized(edit, trained=trained), program, key=f"quantized {trained}")


def zero_data_of_kept() -> None:
    for cast in KEPT:
        cast.data.zero_()


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_a_kept_cast_that_is_edited_without_trace_is_what_backward_uses(same: Same, trained: bool) -> None:
    same(quantized(keep, trained=trained), lambda model: training(model, zero_data_of_kept), key=f"quantized {trained}")


@pytest.mark.parametrize("setting", [EVICTING, TIGHT], ids=str)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
def test_a_cast_edited_after_its_use_is_refused_as_in_plain_pytorch(
    paging: Paging, setting: Setting, trained: bool, kept: bool
) -> None:
    def edit(cast: Tensor) -> None:
        clamp_without_grad(cast)
        if kept:
            KEPT.append(cast)

    build = quantized(do_nothing, edit, trained=trained)
    messages = []
    for model in (plain(build), paging.build(build, setting, key=f"quantized {trained}")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            training(model)
        messages.append(str(caught.value).replace("ToCopyBackward0", "ToCopy"))  # torch 2.11 names it so
    KEPT.clear()
    assert messages[0] == messages[1]
