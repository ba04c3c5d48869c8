"""A dtype chosen for new tensors (``torch.set_default_dtype``; Lightning's ``bf16-true``) is none of paging's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import UnsupportedError
from tests.support.default_dtype import default_dtype
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import RESIDENT, TIGHT, Paging, Setting
from tests.support.programs import Programs

OTHERS = (torch.bfloat16, torch.float64)


def trained(model: nn.Module, dtype: torch.dtype, **settings: Any) -> Any:
    """Weights and state after steps, from step 256 on, which bf16 does not tell from step 257."""
    inputs = rows().to(model[0].weight.dtype)
    with default_dtype(dtype):
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=0.1, max_grad_norm=1.0, **settings)
        for _ in range(3):
            optimizer.load_state_dict(optimizer.state_dict())
            model(inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = optimizer.state_dict()
            for entry in state["state"].values():
                entry["step"] = entry["step"] + 256
            optimizer.load_state_dict(state)
        state = optimizer.state_dict()["state"]
        assert {entry["step"].item() for entry in state.values()} == {3 * 257.0}
    return weights_of(model), [value for entry in state.values() for value in entry.values()]


@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}, {"state_dtype": "8bit"}, {"state_dtype": "bf16"}], ids=str)
@pytest.mark.parametrize("precision", ["keep", "bf16", "ordinary"])
def test_the_state_of_optimizers_keeps_its_type(paging: Paging, precision: str, settings: dict[str, Any]) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        if precision == "ordinary":
            return mlp()
        return paging.build(mlp, replace(TIGHT, precision=precision))  # type: ignore[no-any-return]

    expected = trained(build(), torch.float32, **settings)
    for dtype in OTHERS:
        assert_same_bits(expected, trained(build(), dtype, **settings), f"{dtype} ")


def step(model: nn.Module, optimizer: Any, seed: int) -> torch.Tensor:
    """As Lightning's loop has it with ``bf16-true``: the forward under the other default, the rest not."""
    inputs = rows(seed=seed).to(torch.bfloat16)
    with default_dtype(torch.bfloat16):
        loss = model(inputs).mul(torch.ones(()) * 0.5).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("setting", [RESIDENT, TIGHT], ids=str)
@pytest.mark.parametrize("how", ["built under it", "converted in the context"])
def test_lightnings_bf16_true(paging: Paging, setting: Setting, how: str) -> None:
    def build() -> nn.Module:
        if how == "converted in the context":
            return mlp().to(torch.bfloat16)
        with default_dtype(torch.bfloat16):  # trainer.init_module()
            return mlp()

    def program(model: nn.Module) -> Any:
        model.to(dtype=torch.bfloat16)  # convert_module, which Lightning calls in fit()
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        return [step(model, optimizer, seed) for seed in range(3)], weights_of(model)

    torch.manual_seed(0)
    expected = program(build())
    assert_same_bits(expected, program(paging.build(build, setting, key=how)))


def test_lightnings_bf16_true_with_a_model_in_fp32(paging: Paging) -> None:
    """Lightning converts it when ``fit`` is called: ``precision="bf16"`` has done so, and kept the fp32 values."""
    model = paging.build(mlp, TIGHT)
    before = weights_of(model)
    with pytest.raises(UnsupportedError, match=r'precision="bf16"'):
        model.to(dtype=torch.bfloat16)
    assert_same_bits(before, weights_of(model))
    model = paging.build(mlp, replace(TIGHT, precision="bf16"))
    assert model.to(dtype=torch.bfloat16) is model
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, 0) for _ in range(8)]
    assert losses[-1] < losses[0]


def test_a_program_with_another_default_from_its_first_line(programs: Programs, nvme_path: Path) -> None:
    program = f"""
import torch
torch.set_default_dtype(torch.bfloat16)
torch.manual_seed(0)
import deepoffload
with deepoffload.offload_context(host_budget="1MiB", nvme_path={str(nvme_path)!r}):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    loss = model(torch.ones(2, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert model[0].weight.dtype is torch.bfloat16 and losses[2] < 0.9 * losses[0], losses
"""
    done = programs.run(program)
    assert done.returncode == 0, done.stderr
