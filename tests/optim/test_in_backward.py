"""Updates inside backward: the bits of the serial step where they apply, and a clear refusal where they cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepoffload
from deepoffload.errors import ConfigError, UsageError
from deepoffload.runtime.context import engine_of
from tests.support.inspect import pager_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, batch, mlp, next_token_loss, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging

SETTINGS = (RESIDENT, TIGHT, EVICTING)


def early(setting: Any) -> Any:
    return replace(setting, step_overlap="in_backward")


def serial(setting: Any) -> Any:
    return replace(setting, step_overlap="none")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for step in range(steps):
        loss = next_token_loss(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["keep", "bf16"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_same_bits_as_the_serial_step(paging: Paging, setting: Any, precision: str) -> None:
    def run(chosen: Any) -> tuple[list[float], Any, Any]:
        model = paging.build(TinyGPT, replace(chosen, precision=precision), key="gpt")
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)
        losses = train(model, optimizer)
        return losses, weights_of(model), optimizer.state_dict()

    ours, reference = run(early(setting)), run(serial(setting))
    assert ours[0] == reference[0]
    assert_same_bits(ours[1], reference[1])
    assert_same_bits(*(dict(sorted(state["state"].items())) for state in (ours[2], reference[2])))


def test_gradients_take_no_memory_after_backward(paging: Paging) -> None:
    model = paging.build(mlp, early(RESIDENT), key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    model(rows()).square().mean().backward()
    assert engine_of(model).stats()["host_gradient_bytes"] == 0
    optimizer.step()


def test_units_without_all_their_gradients_are_updated_by_step(paging: Paging) -> None:
    def run(setting: Any) -> Any:
        model = paging.build(lambda: nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), setting, key="two")
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        for index in (0, 1, 0):
            weight, bias = model[index].weight, model[index].bias
            (rows(width=8) @ weight).sum().backward() if index else model[index](rows(width=8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert bias is model[index].bias
        return weights_of(model)

    assert_same_bits(run(early(TIGHT)), run(serial(TIGHT)))


def test_several_optimizers_and_frozen_parameters(paging: Paging) -> None:
    def run(setting: Any) -> Any:
        model = paging.build(mlp, setting, key="mlp")
        params = list(model.parameters())
        params[0].requires_grad_(False)
        optimizers = [deepoffload.CPUAdamW(params[::2], lr=1e-2), deepoffload.CPUAdamW(params[1::2], lr=3e-2)]
        for seed in range(3):
            model(rows(seed=seed)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return weights_of(model)

    assert_same_bits(run(early(TIGHT)), run(serial(TIGHT)))


def test_an_optimizer_made_inside_the_context_updates_too(paging: Paging) -> None:
    with paging.context(early(RESIDENT), 8 << 20):
        torch.manual_seed(0)
        model = mlp()
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    before = weights_of(model)
    for _ in range(2):
        model(rows()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(before[name], value) for name, value in weights_of(model).items())


def test_a_second_backward_before_the_step_is_refused(paging: Paging) -> None:
    model = paging.build(mlp, early(RESIDENT), key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    model(rows()).square().mean().backward()
    with pytest.raises(UsageError, match="another gradient arrived"):
        model(rows()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(rows()).square().mean().backward()
    optimizer.step()


def test_reentrant_checkpointing_of_a_shared_module_is_refused(paging: Paging) -> None:
    model = paging.build(mlp, early(RESIDENT), key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    x = rows().requires_grad_()
    hidden = checkpoint(model[0], x, use_reentrant=True) + checkpoint(model[0], x, use_reentrant=True)
    with pytest.raises(UsageError, match="reentrant"):
        hidden.sum().backward()
    assert optimizer is not None


def test_clipping_is_refused_before_and_after(paging: Paging) -> None:
    model = paging.build(mlp, early(RESIDENT), key="mlp")
    with pytest.raises(UsageError, match="max_grad_norm"):
        deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    model(rows()).square().mean().backward()
    with pytest.raises(UsageError, match="clipped"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())


def test_initialize_accumulates_and_refuses_its_default_clipping(paging: Paging) -> None:
    def run(overlap: str) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        config = {
            "host_budget": "1MiB",
            "nvme_path": str(paging.nvme_path),
            "step_overlap": overlap,
            "gradient_clipping": 0.0,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        }
        engine, *_ = deepoffload.initialize(model=TinyGPT(), config=config)
        losses = []
        for step in range(6):
            loss = next_token_loss(engine, batch(step))
            engine.backward(loss)
            if engine.core.gradients.early is not None:
                updated = map(engine.core.gradients.early.is_used, pager_of(engine.module).units[-1].handles)
                assert set(updated) == {step % 2 == 1}, "the last micro-batch updates, inside backward"
            engine.step()
            losses.append(loss.item())
        weights = weights_of(engine.module)
        engine.close()
        return losses, weights

    ours, reference = run("in_backward"), run("none")
    assert ours[0] == reference[0]
    assert_same_bits(ours[1], reference[1])
    with pytest.raises(ConfigError, match="cannot clip"):
        deepoffload.initialize(
            model=mlp(),
            config={
                "host_budget": "1MiB",
                "step_overlap": "in_backward",
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            },
        )


def test_settings_changed_after_backward_are_refused(paging: Paging) -> None:
    model = paging.build(mlp, early(RESIDENT), key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    model(rows()).square().mean().backward()
    optimizer.param_groups[0]["lr"] = 1e-3
    with pytest.raises(UsageError, match="between backward"):
        optimizer.step()


def test_after_an_interrupted_backward_zero_grad_begins_anew(paging: Paging, caplog: pytest.LogCaptureFixture) -> None:
    model = paging.build(mlp, early(RESIDENT), key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)

    def interrupt(grad: torch.Tensor) -> None:
        raise LookupError("in the middle of backward")

    output = model[0](rows())
    output.register_hook(interrupt)
    with pytest.raises(LookupError):
        model[1:](output).square().mean().backward()
    optimizer.zero_grad()
    assert "updated inside that backward" in caplog.text
    for _ in range(2):
        model(rows()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_zeros_in_the_place_of_gradients_are_refused(paging: Paging) -> None:
    model = paging.build(mlp, early(RESIDENT), key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    with pytest.raises(UsageError, match="set_to_none=False"):
        optimizer.zero_grad(set_to_none=False)


def test_a_scaled_loss_is_refused(paging: Paging) -> None:
    model = paging.build(mlp, early(RESIDENT), key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(rows()).sum()).backward()
    with pytest.raises(UsageError, match="in_backward.*unscaled"):
        scaler.step(optimizer)
