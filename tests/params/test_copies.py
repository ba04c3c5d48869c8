"""``copy.deepcopy`` while a model is built: copies are paged like what they are copied from, and inside the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepoffload
from deepoffload.params.parameter import OffloadedParameter
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Same, Setting, plain

BUDGET = 120 << 10
"""Holds one of two models of 98 KiB."""


def distilled(student: nn.Module, teacher: nn.Module) -> Any:
    """A teacher that follows its student."""
    teacher.requires_grad_(False)
    optimizer = deepoffload.CPUAdamW(student.parameters(), lr=1e-2)
    losses = []
    for seed in range(3):
        with torch.no_grad():
            wanted = teacher(rows(seed=seed + 10))
        loss = F.mse_loss(student(rows(seed=seed)), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                ours.lerp_(theirs, 0.5)
        losses.append(loss.detach())
    return losses, weights_of(student), weights_of(teacher)


def is_paged(model: nn.Module) -> bool:
    return all(type(param) is OffloadedParameter for param in model.parameters())


@pytest.mark.parametrize("setting", [EVICTING, TIGHT], ids=str)
def test_teacher_and_student_in_one_context(paging: Paging, setting: Setting) -> None:
    reference = plain(mlp)
    expected = distilled(reference, copy.deepcopy(reference))
    with paging.context(setting, BUDGET):
        torch.manual_seed(0)
        student = mlp()
        teacher = copy.deepcopy(student)
    assert is_paged(student) and is_paged(teacher)
    assert_same_bits(expected, distilled(student, teacher))
    numbers = deepoffload.stats(teacher)
    assert numbers["host_peak_bytes"] <= BUDGET and numbers["evictions"] > 0


def test_teacher_of_a_model_that_is_ready(paging: Paging) -> None:
    reference = plain(mlp)
    expected = distilled(reference, copy.deepcopy(reference))
    student = paging.build(mlp, TIGHT)
    with paging.context(TIGHT, BUDGET):
        teacher = copy.deepcopy(student)
    assert is_paged(teacher) and deepoffload.stats(teacher)["units"] > 3
    assert_same_bits(expected, distilled(student, teacher))


class Outside(nn.Module):
    """Copies of modules in a list, with a tied weight in them."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        first[2].weight = first[0].weight
        self.parts = nn.ModuleList(copy.deepcopy([first, nn.LayerNorm(64), first]))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 64, batch_first=True), 4)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.encoder(x[None])[0]


def test_clones_of_layers(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(3)
        for seed in range(2):
            model(rows(seed=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.state_dict()), weights_of(model)

    same(Outside, program)


def test_clones_stay_in_the_budget(paging: Paging) -> None:
    """``nn.TransformerEncoder`` takes copies of one layer: each leaves memory when the next one comes."""
    weights_when_built = []
    with paging.context(RESIDENT, 400 << 10) as context:
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 8)
        weights_when_built.append(is_paged(encoder))
        assert context.engine is not None
        numbers = context.engine.stats()
    assert weights_when_built == [True] and numbers["evictions"] > 0
    assert numbers["host_peak_bytes"] <= 400 << 10 < sum(param.nbytes for param in encoder.parameters())


def test_outside_of_a_context_a_copy_is_an_ordinary_model(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT)
    assert all(type(param) is nn.Parameter for param in copy.deepcopy(model).parameters())
