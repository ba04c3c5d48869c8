"""``initialize``: the training engine gives the numbers of the loops it stands for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.deepspeed.engine import TrainingEngine
from tests.runtime.conftest import initialized
from tests.support.loops import assert_same_bits, relative_difference, weights_of
from tests.support.models import FAMILIES, batch, mlp, next_token_loss, rows
from tests.support.paging import plain as seeded

STEPS, ACCUMULATE, CLIP = 3, 2, 0.5
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}

Make = Callable[[], nn.Module]


@pytest.fixture
def config(nvme_path: Path) -> dict[str, Any]:
    return {
        "host_budget": "1MiB",
        "nvme_path": str(nvme_path),
        "step_overlap": "none",
        "debug": {"poison": True},
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": CLIP,
    }


def losses_of(engine: TrainingEngine) -> list[Tensor]:
    """A DeepSpeed loop."""
    torch.manual_seed(7)
    engine.train()
    losses = []
    for micro in range(STEPS * ACCUMULATE):
        loss = next_token_loss(engine, batch(micro))
        losses.append(engine.backward(loss).detach())
        engine.step()
    return losses


def plain_losses(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None = CLIP) -> list[Tensor]:
    """The same in plain PyTorch."""
    torch.manual_seed(7)
    model.train()
    losses = []
    for step in range(STEPS):
        for micro in range(ACCUMULATE):
            loss = next_token_loss(model, batch(step * ACCUMULATE + micro)) / ACCUMULATE
            loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_a_torch_optimizer_gives_the_bits_of_plain_pytorch(family: str, config: dict[str, Any]) -> None:
    plain = seeded(FAMILIES[family])
    expected = plain_losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    model = seeded(FAMILIES[family])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with initialized(model=model, optimizer=optimizer, config=config) as engine:
        assert engine.optimizer is optimizer
        assert_same_bits(expected, losses_of(engine))
        assert_same_bits(weights_of(plain), weights_of(model))


@pytest.mark.parametrize("precision", ["keep", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_configured_optimizer_gives_the_bits_of_a_loop_with_ours(
    family: str, precision: str, config: dict[str, Any]
) -> None:
    config = {**config, "precision": precision}
    config.pop("gradient_accumulation_steps")
    with deepoffload.offload_context(config) as context:
        looped = seeded(FAMILIES[family])
    ours = deepoffload.CPUAdamW(looped.parameters(), lr=1e-3, weight_decay=0.01, max_grad_norm=CLIP)
    expected = plain_losses(looped, ours, clip=None)
    weights = weights_of(looped)
    context.engine.close()
    config = {**config, "gradient_accumulation_steps": ACCUMULATE, "optimizer": ADAMW}
    with initialized(model=seeded(FAMILIES[family]), config=config) as engine:
        assert type(engine.optimizer) is deepoffload.CPUAdam
        assert_same_bits(expected, losses_of(engine))
        assert_same_bits(weights, weights_of(engine.module))
        assert engine.get_global_grad_norm() == ours.grad_norm


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configured_optimizer_agrees_with_torch(family: str, config: dict[str, Any]) -> None:
    plain = seeded(FAMILIES[family])
    initial = weights_of(plain)
    expected = plain_losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01))
    with initialized(model=seeded(FAMILIES[family]), config={**config, "optimizer": ADAMW}) as engine:
        losses = losses_of(engine)
        assert_same_bits(expected[:ACCUMULATE], losses[:ACCUMULATE])
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        got = weights_of(engine.module)
        assert relative_difference(initial.values(), weights_of(plain).values(), got.values()) < 1e-2


def test_a_model_from_a_context_and_one_built_before_train_alike(config: dict[str, Any]) -> None:
    config["optimizer"] = ADAMW
    with deepoffload.offload_context(config):
        inside = seeded(FAMILIES["gpt"])
    with initialized(model=inside) as engine:
        expected = losses_of(engine)
        weights = weights_of(inside)
    with initialized(model=seeded(FAMILIES["gpt"]), config=config) as engine:
        assert_same_bits(expected, losses_of(engine))
        assert_same_bits(weights, weights_of(engine.module))


def test_adam_of_the_configuration_follows_its_mode(config: dict[str, Any]) -> None:
    for mode, reference in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        plain = seeded(mlp)
        adam = reference(plain.parameters(), lr=1e-2, weight_decay=0.1)
        section = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": mode}}
        settings = {**config, "gradient_accumulation_steps": 1, "gradient_clipping": 0, "optimizer": section}
        with initialized(model=seeded(mlp), config=settings) as engine:
            for step in range(3):
                for model, update in ((plain, adam.step), (engine, engine.step)):
                    loss = model(rows(seed=step)).square().mean()
                    loss.backward()
                    update()
                adam.zero_grad()
            got = weights_of(engine.module)
        torch.testing.assert_close(got, weights_of(plain), rtol=1e-4, atol=1e-6)


# -- clipping and non-finite gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "limit"), [(None, 1.0), (0.25, 0.25), (0, None)])
@pytest.mark.parametrize("own", [True, False])
def test_clipping_defaults_to_one_and_zero_is_off(
    said: float | None, limit: float | None, own: bool, config: dict[str, Any]
) -> None:
    config.pop("gradient_clipping")
    if said is not None:
        config["gradient_clipping"] = said
    config["gradient_accumulation_steps"] = 1
    model = seeded(mlp)
    optimizer = deepoffload.CPUAdamW(model.parameters()) if own else torch.optim.SGD(model.parameters(), lr=1.0)
    with initialized(model=model, optimizer=optimizer, config=config) as engine:
        before = weights_of(model)
        engine.backward(engine(rows()).square().sum())
        gradients = [p.grad.clone() for p in model.parameters()]
        norm = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]).double()))
        assert norm > 1.0
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
        if own:
            assert optimizer.max_grad_norm == limit
        else:
            went = torch.cat([(before[n] - p.data).flatten() for n, p in model.named_parameters()])
            assert float(went.double().norm()) == pytest.approx(limit or norm, rel=1e-4)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [0, 1.0])
@pytest.mark.parametrize("optimizer", ["ours", "torch"])
def test_non_finite_gradients_skip_the_step(
    bad: float, clip: float, optimizer: str, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config |= {"gradient_clipping": clip, "gradient_accumulation_steps": 2}
    model = seeded(mlp)
    make = deepoffload.CPUAdamW if optimizer == "ours" else torch.optim.AdamW
    with initialized(
        model=model,
        optimizer=lambda params: make(params, lr=1e-2),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        config=config,
    ) as engine:

        def step(factor: float) -> None:
            for micro in range(2):
                engine.backward(engine(rows(seed=micro)).square().mean() * (factor if micro == 0 else 1.0))
                engine.step()

        step(1.0)
        assert engine.was_step_applied() and engine.get_lr() == [5e-3]
        weights = weights_of(model)
        step(bad)
        assert not engine.was_step_applied()
        assert_same_bits(weights, weights_of(model))
        assert engine.get_lr() == [5e-3], "a skipped step does not count for the schedule"
        assert (engine.global_steps, engine.skipped_steps, engine.micro_steps) == (2, 1, 4)
        assert engine.stats()["overflow_steps"] == 1
        assert "step 2 was skipped" in caplog.text
        assert all(p.grad is None for p in model.parameters())
        step(1.0)
        assert engine.was_step_applied()
        assert all(bool(torch.isfinite(p.data).all()) for p in model.parameters())
        assert not torch.equal(weights["0.weight"], model[0].weight.data)


# -- accumulation ----------------------------------------------------------------------------------------------------


def test_updates_happen_at_the_boundary_only(config: dict[str, Any]) -> None:
    config |= {"gradient_accumulation_steps": 3, "optimizer": ADAMW}
    with initialized(model=seeded(mlp), config=config) as engine:
        weights = weights_of(engine.module)
        for micro in range(6):
            assert engine.is_gradient_accumulation_boundary() == (micro % 3 == 2)
            loss = engine(rows(seed=micro)).square().mean()
            assert torch.equal(engine.backward(loss), loss / 3)
            engine.step()
            changed = not torch.equal(weights["0.weight"], engine.module[0].weight.data)
            assert changed == (micro >= 2)
            assert engine.was_step_applied() == (micro % 3 == 2)
        assert (engine.micro_steps, engine.global_steps) == (6, 2)


def test_the_boundary_can_be_said(config: dict[str, Any]) -> None:
    config |= {"gradient_accumulation_steps": 1, "optimizer": ADAMW}
    with initialized(model=seeded(mlp), config=config) as engine:
        for said, applied in ((False, False), (False, False), (True, True), (None, True)):
            engine.set_gradient_accumulation_boundary(said)
            with engine.no_sync():
                engine.backward(engine(rows()).square().mean())
            engine.step()
            assert engine.was_step_applied() is applied
        assert engine.global_steps == 2


def test_the_loss_may_be_left_unscaled(config: dict[str, Any]) -> None:
    with initialized(model=seeded(mlp), config={**config, "optimizer": ADAMW}) as engine:
        loss = engine(rows()).square().mean()
        assert engine.backward(loss, scale_wrt_gas=False, retain_graph=True) is loss
        whole = [p.grad.clone() for p in engine.parameters()]
        engine.zero_grad()
        engine.backward(loss)
        for got, expected in zip(engine.parameters(), whole, strict=True):
            torch.testing.assert_close(got.grad.clone() * ACCUMULATE, expected)


# -- telling about it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("built_in_context", [False, True])
def test_what_is_probably_not_meant_so_is_said_once(
    built_in_context: bool, config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of several engines with one configuration; another one is another text."""
    said = {"train_batch_size": "auto", "_comment": "copied", "host_budgte": "1GiB"}

    def initialize(name: str, **more: str) -> list[str]:
        if built_in_context:
            with deepoffload.offload_context(config):
                model = mlp(depth=2)
        else:
            model = mlp(depth=2)
        file = tmp_path / name
        file.write_text(json.dumps({**said, **({} if built_in_context else config), **more}))
        caplog.clear()
        engine, *_ = deepoffload.initialize(model=model, config=str(file))
        engine.close()
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        return [warning.removeprefix(f"configuration {file}: ") for warning in warnings]

    warnings = initialize("one.json")
    assert [warning.split(" ")[0] for warning in warnings] == ["_comment:", "host_budgte:", '"auto"']
    assert "train_batch_size became unknown (only the trainer" in warnings[2]
    assert initialize("one.json") == []
    (warning,) = initialize("one.json", train_micro_batch_size_per_gpu="auto")
    assert "train_micro_batch_size_per_gpu became unknown" in warning
    assert initialize("two.json") == warnings


def test_progress_is_logged(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    config |= {"optimizer": ADAMW, "steps_per_print": 2, "wall_clock_breakdown": True, "gradient_accumulation_steps": 1}
    with initialized(model=seeded(mlp), config=config) as engine, caplog.at_level(logging.INFO, "deepoffload"):
        for _ in range(4):
            engine.backward(engine(rows()).square().mean())
            engine.step()
    assert [line for line in caplog.messages if "lr=" in line] == [
        "step=2, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]",
        "step=4, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]",
    ]
    assert sum("forward" in line and "backward" in line for line in caplog.messages) == 4
