"""fp16: scaled losses, fp32 masters, and steps that an overflow skips, against plain PyTorch."""

from __future__ import annotations

import copy
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.deepspeed.engine import TrainingEngine
from deepoffload.errors import LossScaleError, UsageError
from deepoffload.optim.loss_scale import DynamicLossScale
from tests.optim.deferred import units_guessed
from tests.runtime.conftest import initialized
from tests.support.loops import assert_same_bits, in_dtype, relative_difference, weights_of
from tests.support.models import FAMILIES, batch, llama, mlp, next_token_loss, rows
from tests.support.paging import EVICTING, TIGHT, Paging, Setting
from tests.support.paging import plain as seeded

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
SCALING = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
OVERLAPS = ("deferred", "none")


class Plain:
    """An fp16 model in plain PyTorch, with fp32 masters of its weights in ``torch.optim.AdamW``."""

    def __init__(self, model: nn.Module) -> None:
        self.masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        self.model = in_dtype(model, torch.float16)
        self.inner = torch.optim.AdamW(self.masters, lr=1e-3, weight_decay=0.01, fused=True)

    def step(self, scale: float, clip: float | None = None) -> bool:
        """False when the gradients overflow."""
        weights = list(self.model.parameters())
        grads = [p.grad for p in weights]
        applied = all(bool(grad.isfinite().all()) for grad in grads)
        if applied:
            for master, grad in zip(self.masters, grads, strict=True):
                master.grad = grad.float() * (1 / scale)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self.masters, clip)
            self.inner.step()
            with torch.no_grad():
                for weight, master in zip(weights, self.masters, strict=True):
                    weight.copy_(master)
        self.model.zero_grad()
        return applied


@pytest.fixture
def config(nvme_path: Path) -> dict[str, Any]:
    return {
        "host_budget": "1MiB",
        "nvme_path": str(nvme_path),
        "debug": {"poison": True},
        "gradient_clipping": 0,
        "optimizer": ADAMW,
        "fp16": dict(SCALING),
    }


def trained(engine: TrainingEngine, micro_steps: int) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(7)
    engine.train()
    losses, scales = [], []
    for micro in range(micro_steps):
        losses.append(engine.backward(next_token_loss(engine, batch(micro))).detach())
        engine.step()
        scales.append(engine.loss_scale)
    return losses, scales


def plainly(plain: Plain, steps: int, accumulate: int, clip: float | None = None) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(7)
    plain.model.train()
    scale = DynamicLossScale(2.0**18, window=2, hysteresis=1, consecutive_hysteresis=False, least=1)
    losses, scales = [], []
    for micro in range(steps * accumulate):
        loss = next_token_loss(plain.model, batch(micro)) / accumulate
        (loss * scale.value).backward()
        losses.append(loss.detach())
        if micro % accumulate == accumulate - 1:
            scale.update(not plain.step(scale.value, clip))
        scales.append(scale.value)
    return losses, scales


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_gives_the_bits_of_plain_pytorch(family: str, overlap: str, config: dict[str, Any]) -> None:
    plain = Plain(seeded(FAMILIES[family]))
    losses, scales = plainly(plain, 4, 2)
    config |= {"step_overlap": overlap, "gradient_accumulation_steps": 2}
    with initialized(model=seeded(FAMILIES[family]), config=config) as engine:
        got, got_scales = trained(engine, 8)
        assert_same_bits(losses, got)
        assert got_scales == scales
        if family == "gpt":
            assert engine.skipped_steps > 0 and min(scales) < 2.0**18
        assert {p.dtype for p in engine.parameters()} == {torch.float16}
        assert_same_bits(weights_of(plain.model), weights_of(engine.module))
        state = engine.optimizer.state_dict()["state"]
        assert_same_bits([m.detach() for m in plain.masters], [state[n]["master"] for n in sorted(state)])


def test_clipping_is_by_the_unscaled_norm(config: dict[str, Any]) -> None:
    plain = Plain(seeded(FAMILIES["llama"]))
    initial = weights_of(plain.model)
    losses, _ = plainly(plain, 4, 1, clip=0.1)
    runs = []
    for overlap in OVERLAPS:
        config |= {"step_overlap": overlap, "gradient_clipping": 0.1}
        with initialized(model=seeded(FAMILIES["llama"]), config=config) as engine:
            got, _ = trained(engine, 4)
            norm = torch.cat([m.grad.flatten() for m in plain.masters]).double().norm()
            assert float(norm) == pytest.approx(0.1, rel=1e-3), "nothing was clipped"
            assert 0.1 < engine.get_global_grad_norm() < 10
            torch.testing.assert_close(got, losses, rtol=1e-3, atol=1e-3)
            weights = weights_of(engine.module)
            assert relative_difference(initial.values(), weights_of(plain.model).values(), weights.values()) < 1e-2
            runs.append((got, weights, engine.get_global_grad_norm()))
    assert_same_bits(*runs)


def test_masters_start_as_the_fp32_values(config: dict[str, Any]) -> None:
    """Those of parameters frozen at first start as what the weight is."""
    model = seeded(mlp)
    model[0].weight.requires_grad_(False)
    initial = [p.detach().clone() for p in model.parameters()]
    with initialized(
        model=model, optimizer=lambda p: deepoffload.CPUAdamW(model.parameters()), config=config
    ) as engine:
        assert_same_bits([p.half() for p in initial], [p.detach().clone() for p in model.parameters()])
        saved = engine.optimizer.state_dict()["state"]
        assert_same_bits(initial[1:], [saved[number]["master"] for number in range(1, len(initial))])
        model[0].weight.requires_grad_(True)
        initial[0] = initial[0].half().float()
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        engine.backward(engine(rows().half()).float().square().mean())
        engine.step()
        state = engine.optimizer.state_dict()["state"]
        assert_same_bits(initial, [state[number]["master"] for number in range(len(initial))])
        assert_same_bits([p.half() for p in initial], [p.detach().clone() for p in model.parameters()])


def test_masters_of_an_untrained_model_can_be_loaded_into_another(config: dict[str, Any]) -> None:
    with initialized(model=seeded(mlp), config=config) as engine:
        weights, saved = weights_of(engine.module), copy.deepcopy(engine.optimizer.state_dict())
    with initialized(model=mlp(), config=config) as engine:
        engine.module.load_state_dict(weights)
        engine.optimizer.load_state_dict(saved)
        got = engine.optimizer.state_dict()["state"]
        masters = [p.detach() for p in seeded(mlp).parameters()]
        assert_same_bits(masters, [got[number]["master"] for number in range(len(masters))])


# -- overflow --------------------------------------------------------------------------------------------------------


def one_step(engine: TrainingEngine, seed: int, factor: float = 1.0) -> None:
    engine.backward(engine(rows(seed=seed).half()).float().square().mean() * factor)
    engine.step()


@pytest.mark.parametrize("evict_always", [False, True])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e9])
def test_an_overflow_skips_the_step_exactly(
    bad: float, overlap: str, evict_always: bool, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config |= {"step_overlap": overlap, "debug": {"poison": True, "evict_always": evict_always}, "gradient_clipping": 1}
    config |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}}
    runs = []
    for seeds in (((1, 1.0), (2, bad), (3, 1.0)), ((1, 1.0), (3, 1.0))):
        with initialized(model=seeded(mlp), config=config) as engine:
            for seed, factor in seeds:
                before = (weights_of(engine.module), copy.deepcopy(engine.optimizer.state_dict()), engine.get_lr())
                scale = engine.loss_scale
                one_step(engine, seed, factor)
                if factor != 1.0:
                    assert not engine.was_step_applied()
                    assert engine.loss_scale == engine.stats()["loss_scale"] == scale / 2
                    assert engine.optimizer.overflow
                    assert engine.optimizer.cur_scale == engine.optimizer.loss_scale == scale / 2
                    assert engine.stats()["overflow_steps"] == engine.skipped_steps == 1
                    assert "step 2 was skipped" in caplog.text
                    assert all(p.grad is None for p in engine.parameters())
                    after = (weights_of(engine.module), engine.optimizer.state_dict(), engine.get_lr())
                    assert_same_bits(before, after)
                else:
                    assert engine.was_step_applied() and not engine.optimizer.overflow
                    assert engine.optimizer.cur_scale == scale
            runs.append((weights_of(engine.module), copy.deepcopy(engine.optimizer.state_dict()), engine.get_lr()))
    assert_same_bits(*runs)


def test_a_sum_that_overflows_is_seen(config: dict[str, Any]) -> None:
    """Each gradient is finite, but they accumulate in fp16."""
    config |= {"gradient_accumulation_steps": 2, "fp16": {"enabled": True, "loss_scale": 2}}
    with initialized(model=seeded(mlp), config=config) as engine:
        weights = weights_of(engine.module)
        for applied, factor in ((False, 40_000.0), (True, 20_000.0)):
            for micro in range(2):
                engine.backward((engine.module[0].bias.float() * factor).sum())
                assert bool(engine.module[0].bias.grad.isfinite().all()) is (applied or micro == 0)
                engine.step()
            assert engine.was_step_applied() is applied
            assert torch.equal(weights["0.bias"], engine.module[0].bias.detach()) is not applied
        assert engine.get_global_grad_norm() == pytest.approx(20_000.0 * 64**0.5)


def test_an_overflow_at_the_least_scale_is_an_error(config: dict[str, Any]) -> None:
    config["fp16"] = {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 2, "hysteresis": 2}
    with initialized(model=seeded(mlp), config=config) as engine:
        for scale in (4.0, 2.0):
            one_step(engine, 1, torch.inf)
            assert engine.loss_scale == scale
        weights = weights_of(engine.module)
        with pytest.raises(LossScaleError, match=r"step 3: .*fp16.min_loss_scale = 2.*lower the learning rate"):
            one_step(engine, 1, torch.inf)
        assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (3, 3, 2.0)
        assert_same_bits(weights, weights_of(engine.module))
        assert all(p.grad is None for p in engine.parameters())
        one_step(engine, 1)
        assert engine.was_step_applied()


def test_a_static_scale_never_changes(config: dict[str, Any]) -> None:
    """A power of two or not: the gradients are unscaled to the same values, as far as fp16 has them."""
    runs = []
    for static in (1.0, 64.0, 100.0):
        config["fp16"] = {"enabled": True, "loss_scale": static}
        with initialized(model=seeded(mlp), config=config) as engine:
            for factor in (1.0, torch.nan, torch.inf, 1.0):
                one_step(engine, 5, factor)
                assert engine.loss_scale == static
            assert engine.skipped_steps == 2
            runs.append(engine.get_global_grad_norm())
    assert runs[1:] == pytest.approx([runs[0]] * 2, rel=1e-2)


# -- the engine's own matters ----------------------------------------------------------------------------------------


def test_auto_cast_casts_positional_arguments(config: dict[str, Any]) -> None:
    Pair = namedtuple("Pair", "first second")
    seen: list[Any] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            seen[:] = [args, kwargs]
            return self.linear(args[0])

    x, tokens = rows(), torch.arange(3)
    arguments = (x, [x, tokens], {"x": x, "n": 3}, Pair(x, tokens), None)
    config["fp16"] |= {"auto_cast": True}
    with initialized(model=seeded(Net), config=config) as engine:
        engine(*arguments, plain=x)
        half = x.half()
        assert_same_bits((half, [half, tokens], {"x": half, "n": 3}, Pair(half, tokens), None), seen[0])
        assert type(seen[0][3]) is Pair and seen[1]["plain"] is x
        config["fp16"].pop("auto_cast")
    with initialized(model=seeded(Net), config=config) as engine:
        with pytest.raises(RuntimeError, match="dtype"):
            engine(x)


def test_a_model_from_a_context_takes_the_rules_from_initialize(config: dict[str, Any]) -> None:
    with deepoffload.offload_context(
        host_budget="1MiB", nvme_path=config["nvme_path"], precision="fp16", gradient_clipping=0
    ):
        model = seeded(FAMILIES["gpt"])
    with initialized(model=model, config={"fp16": dict(SCALING), "optimizer": ADAMW}) as engine:
        expected = trained(engine, 3)
    with initialized(model=seeded(FAMILIES["gpt"]), config=config) as engine:
        assert_same_bits(expected, trained(engine, 3))


def test_what_would_train_wrongly_is_refused(config: dict[str, Any]) -> None:
    model = seeded(mlp)
    with pytest.raises(UsageError, match=r"AdamW keeps no fp32 masters"):
        deepoffload.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    assert type(model[0].weight) is nn.Parameter
    with initialized(model=model, config=config) as engine:
        one_step(engine, 1)
        engine(rows().half()).float().square().mean().backward()
        with pytest.raises(UsageError, match=r"without engine.backward\(loss\)"):
            engine.step()
        engine.zero_grad()
        one_step(engine, 2)


def test_save_pretrained_saves_fp16(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with initialized(model=seeded(llama), config=config) as engine:
        trained(engine, 2)
        deepoffload.save_pretrained(engine.module, tmp_path / "out")
        weights = weights_of(engine.module)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype is torch.float16
    assert_same_bits(weights, weights_of(loaded))


# -- a plain loop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [TIGHT, EVICTING], ids=str)
def test_grad_scaler_in_a_plain_loop(setting: Setting, paging: Paging) -> None:
    fp16 = Setting(**{**vars(setting), "precision": "fp16"})
    plain, model = Plain(seeded(mlp)), paging.build(mlp, fp16)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    assert optimizer._step_supports_amp_scaling  # torch's name; with another type of weights it is false
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    for step, scale in enumerate((2.0**12, 2.0**12, 2.0**13, 2.0**12, 2.0**12)):
        assert scaler.get_scale() == scale
        factor = torch.inf if step == 2 else 1.0
        losses = []
        for each in (plain.model, model):
            loss = each(rows(seed=step).half()).float().square().mean()
            scaler.scale(loss * factor).backward()
            losses.append(loss.detach())
        assert_same_bits(*losses)
        assert plain.step(scale) is (step != 2)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.applied is (step != 2)
        optimizer.zero_grad()
    assert_same_bits(weights_of(plain.model), weights_of(model))


def test_what_grad_scaler_refuses_for_fp16_gradients(paging: Paging) -> None:
    """torch unscales fp16 gradients nowhere but inside an optimizer that says it can."""
    model = paging.build(mlp, Setting("fp16", 1.6, precision="fp16"))
    ours, torchs = deepoffload.CPUAdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(rows().half()).float().square().mean()).backward()
    weights = weights_of(model)
    for call in (lambda: scaler.unscale_(ours), lambda: scaler.step(torchs)):
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            call()
    assert_same_bits(weights, weights_of(model))


class Spoiler(nn.Module):
    """Gradients that pass it in backward are multiplied by ``factor``: those below it overflow, those above do not."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y.register_hook(lambda grad: grad * self.factor)
        return y


def test_an_overflow_undoes_what_was_updated_on_a_guess(config: dict[str, Any]) -> None:
    overflows = (4, 9)

    def train(overlap: str) -> tuple[Any, list[Any]]:
        said = {"host_budget": "192KiB", "step_overlap": overlap, "fp16": {"enabled": True, "initial_scale_power": 4}}
        said["prefetch"], said["debug"] = False, {"evict_always": True, "poison": True}
        torch.manual_seed(0)
        model, counts, losses = nn.Sequential(*mlp(depth=2), Spoiler(), *mlp(depth=4)), [], []
        with initialized(model=model, config=config | said) as engine:
            for step in range(12):
                engine.module[4].factor = float("inf") if step in overflows else 1.0
                losses.append(engine.backward(engine(rows(seed=step).half()).float().square().mean()).detach())
                guessed, undone = units_guessed(engine.module), deepoffload.stats(engine.module).get("rolled_back")
                engine.step()
                assert deepoffload.stats(engine.module).get("rolled_back") == undone, "it is known before step()"
                counts.append((guessed, undone))
            state = engine.optimizer.state_dict()["state"]
            seen = (losses, weights_of(engine.module), [state[n]["master"].clone() for n in sorted(state)])
            return (*seen, torch.tensor([engine.skipped_steps, engine.loss_scale])), counts

    expected, _ = train("none")
    got, counts = train("speculative")
    assert_same_bits(expected, got)
    assert int(got[-1][0]) == len(overflows)
    assert all((guessed == 0) == (step in overflows or step == 0) for step, (guessed, _) in enumerate(counts)), counts
    assert counts[-1][1] > 0, "units were updated, and that was undone"
