"""What DeepSpeed's users write and its tutorials show, where it went wrong here once."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
import deepoffload.deepspeed as deepspeed
from deepoffload.deepspeed.accelerator import get_accelerator
from deepoffload.errors import ClosedError, ConfigError, UsageError
from deepoffload.runtime.context import engine_of
from tests.support.inspect import pager_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, batch, next_token_loss


def config_of(nvme_path: Path, **changes: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "host_budget": "2MiB",
        **changes,
    }


def train(engine: Any, indices: range) -> list[torch.Tensor]:
    losses = []
    for index in indices:
        loss = next_token_loss(engine, batch(index))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return losses


def test_two_models_of_one_context_are_saved_and_loaded_each_by_its_engine(nvme_path, tmp_path):
    config = config_of(nvme_path, host_budget="3MiB")
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        models = [TinyGPT(dropout=0.0), TinyGPT(depth=1, dropout=0.0)]
    engines = [deepspeed.initialize(model=m, model_parameters=m.parameters(), config=config)[0] for m in models]
    for engine, name in zip(engines, "ab", strict=True):
        train(engine, range(2))
        engine.save_checkpoint(tmp_path / name)
    expected = [train(engine, range(2, 4)) for engine in engines]
    engines[0].load_checkpoint(tmp_path / "a")
    assert_same_bits(expected[0], train(engines[0], range(2, 4)))
    assert engines[1].global_steps == 4, "the other model is as it was"
    engines[1].load_checkpoint(tmp_path / "b")
    assert_same_bits(expected[1], train(engines[1], range(2, 4)))
    with pytest.raises(UsageError, match="a TrainingState already"):
        deepoffload.TrainingState(models[1])
    engines[0].destroy()
    with pytest.raises(ClosedError, match="the training engine was closed"):
        train(engines[0], range(1))
    train(engines[1], range(4, 5))  # it has the memory until its own end
    engines[1].destroy()
    with pytest.raises(ClosedError):
        weights_of(models[0])


def test_models_of_one_context_are_placed_in_the_order_in_which_they_are_built(nvme_path):
    """Not in that of their addresses, which differs between ranks."""
    with deepspeed.zero.Init(config_dict_or_path=config_of(nvme_path)):
        models = [nn.Linear(4, width) for width in range(1, 33)]
    widths = [
        handle.shape[0] for unit in pager_of(models[0]).units for handle in unit.handles if len(handle.shape) == 2
    ]
    assert widths == list(range(1, 33))
    engine_of(models[0]).close()


def test_models_of_one_context_that_share_a_layer_are_one_run(nvme_path, tmp_path):
    config = config_of(nvme_path)
    with deepspeed.zero.Init(config_dict_or_path=config):
        actor = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        critic = nn.Sequential(actor[0], nn.Linear(8, 1))
    first, second = (deepspeed.initialize(model=m, config=config)[0] for m in (actor, critic))
    first.save_checkpoint(tmp_path / "a")
    with pytest.raises(UsageError, match="a TrainingState already"):
        second.save_checkpoint(tmp_path / "b")
    for engine in (first, second):
        engine.destroy()


def test_a_durable_run_has_one_model(nvme_path):
    with deepoffload.offload_context(
        host_budget="2MiB", nvme_path=nvme_path, durability={"every": 1, "path": str(nvme_path)}
    ):
        models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    state = deepoffload.TrainingState(models[0])
    with pytest.raises(UsageError, match="a context of its own"):
        deepoffload.TrainingState(models[1])
    del state


def test_saved_in_the_middle_of_an_update(nvme_path, tmp_path, caplog):
    """As with DeepSpeed the gradients so far are not saved; the run itself keeps them."""
    config = config_of(nvme_path, gradient_accumulation_steps=2)
    losses = {}
    for name in ("undisturbed", "saving"):
        torch.manual_seed(0)
        engine = deepspeed.initialize(model=TinyGPT(dropout=0.0), config=config)[0]
        losses[name] = train(engine, range(3))
        if name == "saving":
            with caplog.at_level(logging.WARNING, logger="deepoffload"):
                engine.save_16bit_model(tmp_path)
                engine.save_checkpoint(tmp_path)
            assert "1 of 2 micro-steps" in caplog.text
        losses[name] += train(engine, range(3, 6))
    assert_same_bits(losses["undisturbed"], losses["saving"])
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 1 and not engine.is_gradient_accumulation_boundary()
    assert_same_bits(losses["saving"][2:4], train(engine, range(2, 4)))  # the update begins again
    assert engine.global_steps == 2
    engine.destroy()


def test_samples_per_second(nvme_path):
    """As DeepSpeed-Chat and what is made from it ask for."""
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=config_of(nvme_path, gradient_accumulation_steps=2))[0]
    timer = engine.tput_timer
    assert timer.batch_size == 4 and timer.avg_samples_per_sec() == float("-inf")
    for epoch in range(2):
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        assert (timer.epoch_count, timer.micro_step_count, timer.global_step_count) == (epoch, 4, 2 * epoch + 2)
        timer.update_epoch_count()
    assert timer.avg_samples_per_sec() == pytest.approx(4 * 2 / timer.total_elapsed_time)
    engine.set_train_batch_size(8)
    assert timer.batch_size == 8
    engine.destroy()


def test_an_optimizer_whose_state_has_other_shapes_is_saved_and_loaded(nvme_path, tmp_path):
    """Adafactor keeps one number per row and one per column."""
    config = config_of(nvme_path, optimizer={"type": "Adafactor", "params": {"lr": 1e-2}})
    found = []
    for number in range(2):
        torch.manual_seed(number)
        engine = deepspeed.initialize(model=TinyGPT(dropout=0.0), config=config)[0]
        if number:
            engine.load_checkpoint(tmp_path)
        else:
            train(engine, range(2))
            engine.save_checkpoint(tmp_path)
        found.append(train(engine, range(2, 4)))
        engine.destroy()
    assert_same_bits(*found)


def test_arguments_of_the_schedules_step(nvme_path):
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10, "warmup_type": "linear"}}
    model = nn.Linear(4, 4)
    engine = deepspeed.initialize(model=model, config=config_of(nvme_path, scheduler=schedule))[0]
    rates = []
    for number in (4, 7):
        engine.backward(engine(torch.ones(1, 4)).sum())
        before = weights_of(model)
        for wrong, said in (("epoch", "a dict, not a str"), ({"iteration": 3}, "'iteration'")):
            with pytest.raises(UsageError, match=said):
                engine.step(lr_kwargs=wrong)
        assert_same_bits(before, weights_of(model))
        engine.step(lr_kwargs={"last_batch_iteration": number})
        rates += engine.get_lr()
    assert rates == pytest.approx([4e-3, 7e-3])
    engine.destroy()


def test_settings_passed_as_args(nvme_path):
    with pytest.raises(UsageError, match="as config="):
        deepspeed.initialize(args=config_of(nvme_path), model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="has no configuration: pass config="):
        deepspeed.initialize(args=SimpleNamespace(deepspeed_config=None), model=nn.Linear(2, 2))


def test_how_many_devices_a_launcher_says_a_cpu_has(monkeypatch):
    if get_accelerator().device_name() != "cpu":
        pytest.skip("describes a machine without an accelerator")
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    assert get_accelerator().device_count() == 1
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert get_accelerator().device_count() == 4


def test_a_copy_of_a_state_dict_for_torch_save(nvme_path):
    model = nn.Linear(4, 4)
    engine = deepspeed.initialize(model=model, config=config_of(nvme_path))[0]
    clone = deepspeed.checkpoint.utils.clone_tensors_for_torch_save
    before = clone({"module": engine.module.state_dict(), "steps": [torch.ones(2), 3]})
    with torch.no_grad():
        model.weight.zero_()
    assert before["module"]["weight"].abs().sum() > 0 and before["steps"][1] == 3
    assert before["module"]["weight"].untyped_storage().nbytes() == 64
    engine.destroy()


def test_versions():
    assert (deepspeed.__version_major__, deepspeed.__version_minor__) == (0, 19)
    assert deepspeed.__git_hash__ and deepspeed.__git_branch__


@pytest.mark.parametrize("section", [{}, {"gradient_accumulation_steps": 2}])
def test_a_step_without_a_backward(section, nvme_path):
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
    model = nn.Linear(4, 4)
    engine = deepspeed.initialize(model=model, config=config_of(nvme_path, scheduler=schedule, **section))[0]
    waits = engine.gradient_accumulation_steps() - 1
    before = weights_of(model)
    for backward in (
        lambda loss: engine.backward(loss),
        lambda loss: engine.scale(loss).backward(),
        torch.Tensor.backward,
    ):
        counts = engine.global_steps, engine.lr_scheduler.last_epoch
        for _ in range(waits):
            engine.step()
        with pytest.raises(UsageError, match="no gradient has come since the last update"):
            engine.step()
        assert (engine.global_steps, engine.lr_scheduler.last_epoch) == counts
        backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert engine.global_steps == counts[0] + 1
    assert not torch.equal(before["weight"], model.weight)
    engine.destroy()


def test_a_step_with_gradients_that_autograd_keeps(nvme_path):
    """Those of float64 do not land. The program makes the backward itself."""
    model = nn.Linear(4, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {key: value for key, value in config_of(nvme_path).items() if key != "optimizer"}
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    before = weights_of(model)
    engine(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    engine.step()
    assert engine.global_steps == 1 and not torch.equal(before["weight"], model.weight)
    with pytest.raises(UsageError, match="no gradient has come since the last update"):
        engine.step()
    engine.destroy()
