"""The engine's methods by DeepSpeed's names do what the table says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepoffload.errors import UnsupportedError, UsageError
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import plain

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
CONSOLIDATED = "_zero3_consolidated_16bit_state_dict"
"""A method that other libraries call, for all its underscore."""
BATCH = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Any]]:
    """An engine of an mlp; closed when the test ends."""
    made = []

    def make(model: nn.Module | None = None, **config: Any) -> Any:
        given = {"host_budget": "2MiB", "optimizer": ADAM, "gradient_clipping": 0, **config}
        made.append(deepoffload.initialize(model=plain(mlp) if model is None else model, config=given)[0])
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def micro_step(engine: Any, seed: int = 0) -> None:
    engine.backward(engine(rows(seed=seed)).float().square().mean())
    engine.step()


def test_questions_about_precision(engine_of):
    engine = engine_of()
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled() and not engine.torch_autocast_enabled()
    assert engine.get_data_types() == (torch.float32, torch.float32)
    engine = engine_of(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    assert engine.bfloat16_enabled() and not engine.fp16_enabled() and not engine.bf16_master_weights_and_gradients()
    assert engine.get_data_types() == (torch.bfloat16, torch.float32)
    engine = engine_of(fp16={"enabled": True, "auto_cast": True, "initial_scale_power": 8})
    assert engine.fp16_enabled() and engine.fp16_auto_cast() and not engine.fp16_master_weights_and_gradients()
    assert engine.dynamic_loss_scale() and engine.initial_dynamic_scale() == engine.loss_scale == 256
    assert engine.optimizer.cur_scale == 256
    assert not engine_of(fp16={"enabled": True, "loss_scale": 4}).dynamic_loss_scale()


def test_questions_about_zero(engine_of, nvme_path):
    engine = engine_of()
    assert engine.zero_optimization_stage() == 0 and not engine.zero_optimization()
    assert engine.zero_offload_param() is None and engine.zero_use_cpu_optimizer()
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    section = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    engine = engine_of(zero_optimization=section)
    assert engine.zero_optimization() and engine.zero_optimization_partition_gradients()
    assert not engine.zero_optimization_partition_weights() and engine.zero_cpu_offload()
    engine = engine_of(zero_optimization={"stage": 3, "offload_param": place, "offload_optimizer": place})
    assert engine.zero_optimization_partition_weights() and engine.zero_offload_param() == "nvme"
    assert engine.zero_nvme_offload_optimizer() and not engine.zero_cpu_offload()
    assert engine.zero_gather_16bit_weights_on_model_save() is True


def test_questions_about_the_run(engine_of):
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    engine = engine_of(scheduler=schedule, steps_per_print=7, wall_clock_breakdown=True, **BATCH)
    assert engine.optimizer_name() == "adamw" and engine.optimizer_params()["lr"] == 1e-2
    assert engine.scheduler_name() == "WarmupLR" and engine.scheduler_params()["warmup_num_steps"] == 5
    assert engine.steps_per_print() == 7 and engine.wall_clock_breakdown() and not engine.dataloader_drop_last()
    assert (
        engine.get_batch_info()
        == (8, 4, 2)
        == (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )
    )
    assert engine.dp_world_size == engine.world_size == engine.get_data_parallel_world_size() == 1
    assert engine.mp_world_size == 1 and engine.global_rank == engine.get_data_parallel_rank() == 0
    assert engine.get_type() == [0.0] and engine.gradient_clipping() == 0.0
    infers = deepoffload.initialize(model=nn.Linear(2, 2), config={"host_budget": "1MiB"})[0]
    assert infers.optimizer_name() is infers.optimizer_params() is infers.scheduler_name() is None
    assert infers.get_type() == [] and not infers.zero_use_cpu_optimizer()
    infers.close()
    assert engine_of(optimizer={"type": "SGD", "params": {"lr": 0.1}}).optimizer_name() == "SGD"
    model = plain(mlp)  # the section of the configuration is not used
    given = deepoffload.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters()), config={"optimizer": ADAM}
    )
    assert given[0].optimizer_name() == "SGD" and given[0].optimizer_params() is None
    given[0].close()


# -- batches ---------------------------------------------------------------------------------------------------------


def test_another_batch_size_in_the_run(engine_of):
    engine = engine_of(**BATCH)
    reference = plain(mlp)
    optimizer = deepoffload.CPUAdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    for steps in (2, 3, 1):
        engine.set_train_batch_size(4 * steps)
        assert engine.get_batch_info() == (4 * steps, 4, steps)
        for seed in range(steps):
            assert engine.is_gradient_accumulation_boundary() is (seed == steps - 1)
            micro_step(engine, seed)
            (reference(rows(seed=seed)).square().mean() / steps).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.global_steps == 3
    assert_same_bits(weights_of(reference), weights_of(engine.module))
    engine.set_train_micro_batch_size(2)
    assert engine.get_batch_info() == (2, 2, 1)


def test_loaders_and_samples(engine_of):
    data = [(rows(1, seed=number)[0], number) for number in range(10)]
    engine = engine_of(**BATCH)
    assert engine.training_dataloader is None and engine.global_samples == 0
    for number in range(4):
        micro_step(engine, number)
    assert engine.global_samples == 2 * 8
    loader = engine.deepspeed_io(data)
    assert [len(numbers) for _, numbers in loader] == [4, 4, 2]
    assert [numbers.tolist() for _, numbers in loader] == [numbers.tolist() for _, numbers in engine.deepspeed_io(data)]
    inputs = engine.deepspeed_io(data, batch_size=5, route="eval", collate_fn=lambda found: [one for _, one in found])
    assert list(inputs) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    for arguments, config, said in (((5,), BATCH, "int is no dataset"), ((data,), {}, "say batch_size")):
        with pytest.raises(UsageError, match=said):
            engine_of(**config).deepspeed_io(*arguments)


def test_batch_sizes_that_cannot_be(engine_of):
    engine = engine_of(**BATCH)
    for size in (6, 0, -4, 4.0, True, "8"):
        with pytest.raises(ValueError, match="set_train_batch_size"):
            engine.set_train_batch_size(size)
    for size in (0, 1.5, None):
        with pytest.raises(UsageError, match="set_train_micro_batch_size"):
            engine.set_train_micro_batch_size(size)
    micro_step(engine)
    with pytest.raises(UsageError, match="in the middle of an update"):
        engine.set_train_batch_size(12)
    micro_step(engine)
    engine.set_train_batch_size(12)
    assert engine.gradient_accumulation_steps() == 3
    with pytest.raises(UsageError, match="no train_micro_batch_size_per_gpu"):
        engine_of().set_train_batch_size(4)


# -- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [{}, {"fp16": {"enabled": True, "initial_scale_power": 10}}], ids=["fp32", "fp16"])
def test_a_backward_of_the_programs_own(engine_of, section):
    one, other = engine_of(**section), engine_of(**section)
    for seed in range(3):
        inputs = rows(seed=seed).to(one.get_data_types()[0])
        one.backward(one(inputs).float().square().mean())
        other.scale(other(inputs).float().square().mean()).backward()
        one.step()
        other.step()
    assert one.global_steps == other.global_steps == 3 and one.skipped_steps == other.skipped_steps
    assert_same_bits(weights_of(one.module), weights_of(other.module))
    with pytest.raises(UsageError, match="engine.scale takes a tensor with one number"):
        one.scale(torch.ones(2))
    with pytest.raises(UsageError, match="engine.scale: the loss has no graph"):
        one.scale(torch.ones(()))


def test_scaling_without_an_optimizer():
    engine = deepoffload.initialize(model=nn.Linear(2, 2), config={"host_budget": "1MiB"})[0]
    with pytest.raises(UsageError, match="no optimizer"):
        engine.scale(engine(torch.ones(2)).sum())
    engine.close()


def test_calls_that_have_nothing_to_do(engine_of):
    engine, other = engine_of(**BATCH), engine_of(**BATCH)
    with engine.coalesce_grad_reduction():
        for seed in range(2):
            engine.backward(engine(rows(seed=seed)).square().mean())
            engine.allreduce_gradients()
            engine.step()
    for seed in range(2):
        micro_step(other, seed)
    assert_same_bits(weights_of(other.module), weights_of(engine.module))
    assert engine.managed_gradient_accumulation() is True


# -- weights ---------------------------------------------------------------------------------------------------------


def test_state_dicts(engine_of):
    model = plain(mlp)
    next(model.parameters()).requires_grad_(False)
    engine = engine_of(model)
    expected = dict(plain(mlp).state_dict())
    assert_same_bits(expected, {name: value.clone() for name, value in engine.module_state_dict().items()})
    trained = engine.module_state_dict(prefix="net.", exclude_frozen_parameters=True)
    assert [f"net.{name}" for name in expected if name != "0.weight"] == list(trained)
    assert list(getattr(engine, CONSOLIDATED)(exclude_frozen_parameters=True)) == list(expected)[1:]
    changed = {name: value + 1 for name, value in expected.items()}
    engine.load_module_state_dict({"module": changed})
    assert_same_bits(changed, weights_of(engine.module))
    engine.load_module_state_dict({"0.weight": expected["0.weight"]}, strict=False)
    assert_same_bits(changed | {"0.weight": expected["0.weight"]}, weights_of(engine.module))
    engine.load_module_state_dict(changed, custom_load_fn=lambda src, dst: dst.load_state_dict(src))
    assert_same_bits(changed, weights_of(engine.module))
    part = {name: value for name, value in expected.items() if name != "0.bias"}
    engine.load_module_state_dict(part, z3_params_to_fetch=[], allowed_missing_keys=["0.bias", "no_such"])
    assert_same_bits(expected | {"0.bias": changed["0.bias"]}, weights_of(engine.module))
    with pytest.raises(RuntimeError, match="Missing key.*2.bias"):
        engine.load_module_state_dict({"0.weight": expected["0.weight"]}, allowed_missing_keys=["0.bias"])
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_module_state_dict({"module": {}})
    with pytest.raises(UsageError, match="takes a mapping"):
        engine.load_module_state_dict("weights.pt")


def test_compiling(engine_of):
    engine = engine_of()
    assert not engine.is_compiled
    expected = engine(rows()).detach()
    engine.compile(backend="eager", compile_kwargs={"dynamic": False})
    assert engine.is_compiled
    assert_same_bits(expected, engine(rows()).detach())
    with pytest.raises(UnsupportedError, match="schedule"):
        engine.compile(schedule=[])


# -- memory ----------------------------------------------------------------------------------------------------------


def test_states_between_tasks(engine_of):
    engine = engine_of()
    micro_step(engine)
    before = weights_of(engine.module)
    engine.offload_states(
        include=[OffloadStateTypeEnum.optim_states, "lp_params"], device=OffloadDeviceEnum.cpu, non_blocking=True
    )
    engine.reload_states()
    engine.empty_partition_cache()
    assert_same_bits(before, weights_of(engine.module))
    with pytest.raises(UsageError, match="no kind of state"):
        engine.offload_states(include=["weights"])
    with pytest.raises(UsageError, match="states go to 'cpu'"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)


def test_states_of_an_engine_that_shows_copies(engine_of):
    engine = engine_of(debug={"copies": True}, device_budget="2MiB", device="cpu")
    with pytest.raises(UnsupportedError, match="device_budget"):
        engine.offload_states()
