"""``gradient_dtype="fp32"``: micro-batches of a bf16 model are added without rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from tests.support.loops import assert_same_bits, nudge
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Setting, plain

MICRO_BATCHES = 5


def small() -> nn.Module:
    return mlp(depth=4)


def loss_of(model: nn.Module, number: int) -> Tensor:
    return model(rows(seed=number).bfloat16()).float().square().mean() / MICRO_BATCHES


def sums_in_fp32(model: nn.Module, step: int) -> dict[str, Tensor]:
    """What plain PyTorch's gradients of the micro-batches add up to."""
    sums: dict[str, Tensor] = {}
    for micro in range(MICRO_BATCHES):
        loss_of(model, 10 * step + micro).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            sums[name] = param.grad.float() if name not in sums else sums[name] + param.grad.float()
            param.grad = None
    return sums


BUDGETS = {RESIDENT: 64 << 20, TIGHT: 200 << 10, EVICTING: 300 << 10}


@pytest.mark.parametrize("setting", BUDGETS, ids=str)
def test_sums_and_steps_are_those_of_fp32(paging: Paging, setting: Setting) -> None:
    reference = plain(small, precision="bf16")
    torch.manual_seed(0)
    with paging.context(replace(setting, precision="bf16"), BUDGETS[setting], gradient_dtype="fp32") as context:
        model = small()
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    masters = list(reference.fp32_masters.values())
    expected = torch.optim.AdamW(masters, lr=1e-2)
    for step in range(2):
        sums = sums_in_fp32(reference, step)
        for micro in range(MICRO_BATCHES):
            loss_of(model, 10 * step + micro).backward()
        shown = {name: param.grad for name, param in model.named_parameters()}
        assert all(grad is not None and grad.dtype is torch.float32 for grad in shown.values())
        assert_same_bits(sums, {name: grad.clone() for name, grad in shown.items() if grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        for master, grad in zip(masters, sums.values(), strict=True):
            master.grad = grad
        expected.step()
        with torch.no_grad():
            for weight, master in zip(reference.parameters(), masters, strict=True):
                nudge(master)
                weight.copy_(master)
        for (name, weight), ours in zip(reference.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), weight.detach(), rtol=2**-7, atol=1e-6, msg=name)
    assert context.engine is not None and (setting is RESIDENT or context.engine.stats()["evictions"] > 0)
