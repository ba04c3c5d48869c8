"""``initialize``: its arguments, what it returns, and what it refuses."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import deepoffload
from deepoffload.config import SchedulerConfig, parse_config
from deepoffload.config.lr_schedules import SCHEDULES, betas_at, lr_at
from deepoffload.deepspeed.schedulers import ConfiguredSchedule
from deepoffload.errors import ClosedError, ConfigError, PlacementError, UnsupportedError, UsageError
from deepoffload.params.parameter import OffloadedParameter
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows

ADAM = {"type": "Adam", "params": {"lr": 1e-3}}


@pytest.fixture
def config(nvme_path: Path) -> dict[str, Any]:
    return {"host_budget": "1MiB", "nvme_path": str(nvme_path), "step_overlap": "none", "debug": {"poison": True}}


@pytest.fixture
def initialize() -> Iterator[Callable[..., tuple[Any, Any, Any, Any]]]:
    """``deepoffload.initialize`` whose engines are closed when the test ends."""
    engines = []

    def call(**arguments: Any) -> tuple[Any, Any, Any, Any]:
        made = deepoffload.initialize(**arguments)
        engines.append(made[0])
        return made

    yield call
    for engine in engines:
        engine.close()


Initialize = Callable[..., tuple[Any, Any, Any, Any]]


def one_step(engine: Any) -> None:
    engine.backward(engine(rows()).square().mean())
    engine.step()


# -- optimizers ------------------------------------------------------------------------------------------------------


def test_the_four_things(config: dict[str, Any], initialize: Initialize) -> None:
    model = mlp()
    config |= {
        "optimizer": ADAM,
        "train_micro_batch_size_per_gpu": 4,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    data = TensorDataset(torch.randn(10, 32))
    engine, optimizer, loader, scheduler = initialize(model=model, training_data=data, config=config)
    assert engine.module is model and engine.optimizer is optimizer and engine.lr_scheduler is scheduler
    assert isinstance(optimizer, deepoffload.CPUAdam) and isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert [len(batch) for (batch,) in loader] == [4, 4, 2]
    assert all(type(param) is OffloadedParameter for param in model.parameters())


def test_no_optimizer_means_inference(config: dict[str, Any], initialize: Initialize) -> None:
    reference = mlp()
    model = mlp()
    model.load_state_dict(reference.state_dict())
    engine, optimizer, loader, scheduler = initialize(model=model, config=config)
    assert optimizer is None and loader is None and scheduler is None and engine.get_lr() == []
    with torch.no_grad():
        assert torch.equal(engine.eval()(rows()), reference(rows()))
    with pytest.raises(UsageError, match="no optimizer.*AdamW"):
        engine.step()


def test_model_parameters_may_be_groups(config: dict[str, Any], initialize: Initialize) -> None:
    model = mlp()
    groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[2].weight]}]
    engine, optimizer, *_ = initialize(model=model, model_parameters=groups, config={**config, "optimizer": ADAM})
    assert engine.get_lr() == [0.5, 1e-3]
    before = weights_of(model)
    one_step(engine)
    changed = {name for name, value in weights_of(model).items() if not torch.equal(value, before[name])}
    assert changed == {"0.weight", "2.weight"}
    assert all(param.grad is None for param in model.parameters()), "gradients that nobody uses are dropped too"


def test_frozen_parameters_are_left_alone(config: dict[str, Any], initialize: Initialize) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    engine, optimizer, *_ = initialize(model=model, config={**config, "optimizer": ADAM})
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters())) - 2
    before = weights_of(model)
    one_step(engine)
    after = weights_of(model)
    assert torch.equal(after["0.weight"], before["0.weight"]) and not torch.equal(after["2.weight"], before["2.weight"])


def test_an_optimizer_that_is_passed_in_is_the_one_used(
    config: dict[str, Any], initialize: Initialize, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "deepoffload"):
        engine, optimizer, *_ = initialize(model=model, optimizer=mine, config={**config, "optimizer": ADAM})
    assert optimizer is mine
    assert "the optimizer passed in is used" in caplog.text
    one_step(engine)


def test_torch_adam_is_used_and_ours_recommended_once(
    config: dict[str, Any], initialize: Initialize, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "deepoffload"):
        _, optimizer, *_ = initialize(model=mlp(), optimizer=torch.optim.AdamW, config=config)
    assert type(optimizer) is torch.optim.AdamW
    assert sum("deepoffload.CPUAdamW keeps the state" in line for line in caplog.messages) == 1


# -- schedules -------------------------------------------------------------------------------------------------------

SCHEDULE_PARAMETERS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "decay_step_size": 2},
    "WarmupLR": {"warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_num_steps": 2, "total_num_steps": 8},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 8},
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_configured_schedules_set_the_rate_of_every_update(
    kind: str, config: dict[str, Any], initialize: Initialize
) -> None:
    section = {"type": kind, "params": SCHEDULE_PARAMETERS[kind]}
    settings = {**config, "optimizer": ADAM, "scheduler": section}
    parsed = parse_config(settings).scheduler
    assert parsed is not None
    engine, optimizer, _, scheduler = initialize(model=mlp(), config=settings)
    seen = []
    optimizer.register_step_pre_hook(
        lambda o, args, kwargs: seen.append((o.param_groups[0]["lr"], o.param_groups[0]["betas"]))
    )
    for _ in range(10):
        one_step(engine)
    expected = [(lr_at(parsed, step, 1e-3), betas_at(parsed, step) or (0.9, 0.999)) for step in range(10)]
    assert seen == expected
    assert len(set(seen)) > 2, "a schedule that changes something"
    assert engine.get_lr() == [lr_at(parsed, 10, 1e-3)] == scheduler.get_last_lr()


def test_a_configured_schedule_can_be_resumed() -> None:
    def make(last_epoch: int = -1) -> ConfiguredSchedule:
        optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "initial_lr": 0.1}], lr=0.1)
        params = {name: parameter.default for name, parameter in SCHEDULES["WarmupLR"].items()}
        return ConfiguredSchedule(optimizer, SchedulerConfig("WarmupLR", {**params, "warmup_num_steps": 5}), last_epoch)

    first, second = make(), make()
    for _ in range(3):
        first.optimizer.step()
        first.step()
    second.load_state_dict(first.state_dict())
    for scheduler in (first, second):
        scheduler.optimizer.step()
        scheduler.step()
    assert first.get_last_lr() == second.get_last_lr() == make(last_epoch=3).get_last_lr()


@pytest.mark.parametrize("as_function", [True, False])
def test_schedulers_of_torch(as_function: bool, config: dict[str, Any], initialize: Initialize) -> None:
    model = mlp()
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=0.1)

    def make(of: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(of, step_size=1, gamma=0.1)

    given = make if as_function else make(optimizer)
    engine, _, _, scheduler = initialize(model=model, optimizer=optimizer, lr_scheduler=given, config=config)
    assert as_function or scheduler is given
    one_step(engine)
    assert engine.get_lr() == pytest.approx([0.01])


# -- data ------------------------------------------------------------------------------------------------------------


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def test_loaders(config: dict[str, Any], initialize: Initialize) -> None:
    config |= {"train_batch_size": 8, "gradient_accumulation_steps": 2, "dataloader_drop_last": True}
    _, _, loader, _ = initialize(
        model=mlp(), training_data=TensorDataset(torch.arange(10)), collate_fn=lambda items: len(items), config=config
    )
    assert isinstance(loader, DataLoader)
    assert list(loader) == [4, 4]
    _, _, loader, _ = initialize(model=mlp(), training_data=Counting(), config=config)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]], "an iterable keeps its order"


def test_map_style_data_is_shuffled(config: dict[str, Any], initialize: Initialize) -> None:
    config["train_micro_batch_size_per_gpu"] = 50
    _, _, loader, _ = initialize(model=mlp(), training_data=list(range(50)), config=config)
    (batch,) = list(loader)
    assert sorted(batch.tolist()) == list(range(50)) != batch.tolist()


def test_data_needs_a_batch_size(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu"):
        deepoffload.initialize(model=mlp(), training_data=list(range(5)), config=config)


# -- configuration ---------------------------------------------------------------------------------------------------


def test_the_configuration_may_come_from_the_command_line(
    config: dict[str, Any], initialize: Initialize, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config, "optimizer": ADAM, "gradient_accumulation_steps": 4}))
    parser = deepoffload.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed
    engine, *_ = initialize(args=args, model=mlp())
    assert engine.gradient_accumulation_steps() == 4
    engine, *_ = initialize(args=parser.parse_args([]), model=mlp(), config_params=config)
    assert engine.optimizer is None
    with pytest.raises(ConfigError, match="config and args.deepspeed_config"):
        deepoffload.initialize(args=args, model=mlp(), config=config)
    with pytest.raises(ConfigError, match="config and config_params"):
        deepoffload.initialize(model=mlp(), config=config, config_params=config)


def test_training_keys_may_be_said_after_the_context(config: dict[str, Any], initialize: Initialize) -> None:
    with deepoffload.offload_context(config):
        model = mlp()
    said = {**config, "optimizer": ADAM, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    engine, optimizer, *_ = initialize(model=model, config={**said, "gradient_clipping": 0.3})
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (6, 2)
    assert engine.gradient_accumulation_steps() == 3
    assert optimizer.max_grad_norm == engine.gradient_clipping() == 0.3


def test_batch_sizes_are_unknown_where_they_are_not_said(config: dict[str, Any], initialize: Initialize) -> None:
    engine, *_ = initialize(model=mlp(), config=config)
    assert engine.train_batch_size() is None and engine.train_micro_batch_size_per_gpu() is None


@pytest.mark.parametrize(
    ("context", "said", "name"),
    [
        ({}, {"host_budget": "2MiB"}, "host_budget"),
        ({}, {"precision": "bf16"}, "precision"),
        ({}, {"bf16": {"enabled": True}}, "precision"),
        ({}, {"aio": {"backend": "pool"}}, "aio"),
        ({"gradient_clipping": 0.5}, {"gradient_clipping": 0.6}, "gradient_clipping"),
        ({"optimizer": ADAM}, {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, "optimizer"),
        ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps"),
    ],
)
def test_configurations_that_contradict_each_other(
    context: dict[str, Any], said: dict[str, Any], name: str, config: dict[str, Any]
) -> None:
    with deepoffload.offload_context({**config, **context}) as opened:
        model = mlp()
    with pytest.raises(ConfigError, match=f"^{name}: the model was built"):
        deepoffload.initialize(model=model, config=said)
    opened.engine.close()


# -- what is refused, with the model as it was -----------------------------------------------------------------------


def refused() -> list[tuple[dict[str, Any], type[Exception], str]]:
    frozen = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
    in_backward = {"step_overlap": "in_backward"}
    return [
        ({"optimizer": "adam"}, UsageError, "takes an optimizer"),
        ({"lr_scheduler": "warmup", **frozen}, UsageError, "takes a schedule"),
        ({"lr_scheduler": lambda optimizer: None}, UsageError, "needs an optimizer"),
        ({"mpu": object()}, UnsupportedError, "all ranks are data-parallel, and this object says nothing"),
        ({"mesh_param": (1, 2)}, UnsupportedError, "model parallelism"),
        ({"config": {"optimizer": {"tpye": "Adam"}}}, ConfigError, "did you mean optimizer.type"),
        ({"config": "/does/not/exist.json"}, ConfigError, "cannot be read"),
        ({"config": {"scheduler": {"type": "WarmupLR"}}}, UsageError, "needs an optimizer"),
        ({"optimizer": torch.optim.SGD(mlp().parameters())}, UsageError, "no parameter of the optimizer"),
        ({"model_parameters": mlp().parameters(), **frozen}, UsageError, "no parameter of the optimizer"),
        ({"model_parameters": iter(()), **frozen}, UsageError, "is empty .what model.parameters.. gives"),
        ({"model_parameters": mlp()[0].weight, **frozen}, UsageError, "takes parameters or groups of them"),
        ({"model_parameters": [1, 2], **frozen}, TypeError, "can only optimize Tensors"),
        ({"optimizer": lambda params: torch.optim.SGD(params, lr=-1)}, ValueError, "Invalid learning rate"),
        ({"lr_scheduler": StepLR(torch.optim.SGD(mlp().parameters()), 1), **frozen}, UsageError, "another optimizer"),
        ({"training_data": 5, "config": {"train_batch_size": 2}}, UsageError, "int is no dataset"),
        ({"config": in_backward, **frozen}, ConfigError, "initialize.. clips to 1.0"),
        ({"config": {**in_backward, "gradient_clipping": 2}, **frozen}, ConfigError, "gradient_clipping = 2.0 asks"),
    ]


@pytest.mark.parametrize(("arguments", "error", "message"), refused(), ids=lambda value: None)
def test_what_cannot_work_is_refused_before_the_model_is_touched(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = mlp()
    with pytest.raises(error, match=message):
        deepoffload.initialize(model=model, **arguments)
    assert all(type(param) is nn.Parameter for param in model.parameters())


def test_models_that_cannot_be_trained(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"torch\.nn\.Module, not NoneType"):
        deepoffload.initialize(config=config)
    with pytest.raises(UsageError, match="frozen"):
        deepoffload.initialize(model=mlp().requires_grad_(False), config={**config, "optimizer": ADAM})
    with pytest.raises(UsageError, match="no parameters"):
        deepoffload.initialize(model=nn.ReLU(), config=config)
    with deepoffload.offload_context(config) as context:
        inside = mlp()
        with pytest.raises(UsageError, match="after the context has ended"):
            deepoffload.initialize(model=inside)
    context.engine.close()
    with pytest.raises(ClosedError, match="closed"):
        deepoffload.initialize(model=inside)


def test_two_clippings_contradict(config: dict[str, Any], initialize: Initialize) -> None:
    model = mlp()
    optimizer = deepoffload.CPUAdamW(model.parameters(), max_grad_norm=2.0)
    with pytest.raises(ConfigError, match="gradient_clipping = 1.0.*max_grad_norm = 2.0"):
        deepoffload.initialize(model=model, optimizer=optimizer, config={**config, "gradient_clipping": 1.0})
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    assert engine.gradient_clipping() == optimizer.max_grad_norm == 2.0


@pytest.mark.parametrize("swap", [True, False])
def test_a_model_that_does_not_fit_is_given_back(swap: bool, config: dict[str, Any]) -> None:
    if not swap:
        del config["nvme_path"]
    model = mlp(width=256, depth=6)
    parameters, weights = list(model.parameters()), weights_of(model)
    with pytest.raises(PlacementError if swap else ValueError):
        deepoffload.initialize(model=model, config={**config, "host_budget": "500KiB", "optimizer": ADAM})
    assert [id(param) for param in model.parameters()] == [id(param) for param in parameters]
    assert all(type(param) is nn.Parameter for param in parameters)
    assert_same_bits(weights, weights_of(model))
    model(rows(width=256)).sum().backward()
    torch.optim.SGD(parameters, lr=0.1).step()


@pytest.mark.parametrize("loss", [torch.ones(3, requires_grad=True), 1.0, torch.ones(())])
def test_losses_that_have_no_backward(loss: Any, config: dict[str, Any], initialize: Initialize) -> None:
    engine, *_ = initialize(model=mlp(), config={**config, "optimizer": ADAM})
    with pytest.raises(UsageError, match=r"engine\.backward"):
        engine.backward(loss)


# -- the engine as the model, and its end ----------------------------------------------------------------------------


def test_the_engine_stands_for_the_model(config: dict[str, Any], initialize: Initialize) -> None:
    model = mlp()
    engine, *_ = initialize(model=model, config={**config, "optimizer": ADAM})
    assert [id(p) for p in engine.parameters()] == [id(p) for p in model.parameters()]
    assert [name for name, _ in engine.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert engine.eval() is engine and not model.training and not engine.training
    assert engine.train() is engine and model.training
    assert engine.get_submodule("0") is model[0]
    with pytest.raises(AttributeError, match="neither the engine nor its Sequential has 'nothing'"):
        engine.nothing  # noqa: B018
    assert deepoffload.stats(engine).keys() <= engine.stats().keys()
    one_step(engine)
    stats = engine.stats()
    assert (stats["global_steps"], stats["micro_steps"], stats["overflow_steps"]) == (1, 1, 0)
    assert all(isinstance(value, (int, float)) for value in stats.values())
    assert "optimizer state" in engine.placement_table()
    assert engine.get_mom() == [(0.9, 0.999)]


def test_the_models_own_way_to_save_is_refused(config: dict[str, Any], initialize: Initialize, tmp_path: Path) -> None:
    engine, *_ = initialize(model=mlp(), config=config)
    with pytest.raises(UnsupportedError, match=r"deepoffload\.save_pretrained"):
        engine.save_pretrained(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_closed_engine_says_so(config: dict[str, Any], initialize: Initialize, nvme_path: Path) -> None:
    engine, *_ = initialize(model=mlp(), config={**config, "optimizer": ADAM})
    one_step(engine)
    engine.destroy()
    engine.close()
    assert list(nvme_path.iterdir()) == []
    for use in (lambda: engine(rows()), engine.step, lambda: engine.module[0].weight + 1):
        with pytest.raises(ClosedError, match="closed"):
            use()
