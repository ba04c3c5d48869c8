"""What scripts use around the engine: the accelerator, process groups, checkpoints of activations, logs, loaders."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepoffload
import deepoffload.deepspeed as deepspeed
from deepoffload.deepspeed import checkpointing, comm
from deepoffload.deepspeed.accelerator import DeviceCalls, get_accelerator
from deepoffload.deepspeed.runtime import lr_schedules
from deepoffload.deepspeed.utils import zero_to_fp32, zero_to_torch
from deepoffload.errors import ConfigError, UnsupportedError, UsageError
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, plain

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_random_state_is_left() -> Iterator[None]:
    yield
    checkpointing.get_cuda_rng_tracker().reset()


# -- the accelerator -------------------------------------------------------------------------------------------------


def test_the_cpu_as_an_accelerator():
    device = DeviceCalls("cpu")
    assert device.device_name() == device.device_name(0) == device.current_device_name() == "cpu"
    assert device.device_count() == 1 and device.current_device() == 0 and device.is_available()
    assert device.communication_backend_name() == "gloo" and device.is_synchronized_device()
    assert device.is_bf16_supported() and torch.bfloat16 in device.supported_dtypes()
    assert device.on_accelerator(torch.ones(1)) and not device.is_pinned(torch.ones(1))
    assert device.Stream() is None and device.current_stream() is None and device.Event is None
    device.set_device(0)
    device.synchronize()
    device.empty_cache()
    device.reset_peak_memory_stats()
    device.range_push("step")
    device.range_pop()
    with device.stream(None), device.device(0):
        assert_same_bits(torch.ones(2), device.pin_memory(torch.ones(2)))
    called: list[int] = []
    device.lazy_call(lambda: called.append(1))
    assert called == [1] and device.get_compile_backend() == "inductor"


def test_memory_of_the_cpu_is_the_processs():
    device = DeviceCalls("cpu")
    before = device.memory_allocated()
    held = torch.ones(8 << 20)
    assert before + held.nbytes * 0.9 < device.memory_allocated() <= device.max_memory_allocated()
    assert 0 < device.available_memory() <= device.total_memory()
    assert device.memory_reserved() > 0 and device.max_memory_reserved() > 0 and device.memory_cached() > 0
    assert device.memory_stats()["allocated_bytes.all.current"] > 0


def test_tensor_types_and_random_numbers():
    device = get_accelerator()
    assert device.FloatTensor([1, 2]).dtype is torch.float32 and device.BFloat16Tensor([1.0]).dtype is torch.bfloat16
    assert device.LongTensor([[1], [2]]).shape == (2, 1) and device.HalfTensor(3).shape == ()
    device.manual_seed(5)
    state, first = device.get_rng_state(), torch.rand(3)
    device.set_rng_state(state)
    assert_same_bits(first, torch.rand(3))
    device.manual_seed_all(5)
    assert_same_bits(first, torch.rand(3))
    assert device.initial_seed() == 5 and device.default_generator(0) is torch.default_generator


@pytest.mark.parametrize(("said", "expected"), [("cpu", "cpu"), ("", "cpu"), ("npu", "UsageError")])
def test_the_accelerator_that_the_environment_names(said, expected, programs):
    program = "from deepoffload.deepspeed.accelerator import get_accelerator as get\n"
    program += "try:\n    print(get().device_name(), get() is get())\nexcept ValueError as error:\n"
    program += "    print(type(error).__name__, error)"
    done = programs.run(program, env={"DS_ACCELERATOR": said, "CUDA_VISIBLE_DEVICES": ""})
    assert done.stdout.startswith(expected), done.stdout + done.stderr


# -- process groups --------------------------------------------------------------------------------------------------


def test_a_process_alone_gets_a_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not comm.is_initialized() and comm.is_available()
    for ask in (comm.get_rank, comm.get_world_size, comm.get_local_rank, comm.barrier):
        with pytest.raises(UsageError, match=r"call deepspeed.init_distributed\(\) before"):
            ask()
    with pytest.raises(UsageError, match="dist_init_required=False"):
        deepspeed.init_distributed(dist_init_required=False)
    deepspeed.init_distributed()
    deepspeed.init_distributed(dist_init_required=True)  # there is one
    assert comm.get_rank() == comm.get_local_rank() == 0 and comm.get_world_size() == 1
    assert torch.distributed.get_world_size() == 1 and comm.get_all_ranks_from_group() == [0]
    value = torch.tensor([3.0])
    comm.all_reduce(value, op=comm.ReduceOp.SUM, prof=False, log_name="mine", debug="x")
    comm.inference_all_reduce(value)
    comm.broadcast(value, 0)
    gathered = [torch.zeros(1)]
    comm.all_gather(gathered, value)
    into = torch.zeros(1)
    comm.allgather_fn(into, value)
    for call in (comm.all_gather_into_tensor, comm.reduce_scatter_tensor, comm.reduce_scatter_fn):
        into.zero_()
        call(output_tensor=into, tensor=value, log_name="mine")  # DeepSpeed's names of the arguments
        assert torch.equal(into, value)
    comm.all_to_all_single(output=into.zero_(), tensor=value, prof=False)
    assert torch.equal(into, value)
    comm.barrier()
    assert value.item() == gathered[0].item() == into.item() == 3.0
    assert comm.get_world_size(group=comm.new_group([0])) == 1
    objects: list[Any] = [None]
    comm.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}]


def test_what_the_environment_lacks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match="has no RANK"):
        comm.init_distributed()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="has no MASTER_ADDR"):
        comm.init_distributed()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UsageError, match="WORLD_SIZE=two"):
        comm.init_distributed()
    monkeypatch.setenv("WORLD_SIZE", "1")
    comm.init_distributed()
    assert comm.get_world_size() == 1
    comm.destroy_process_group()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    with pytest.raises(UsageError, match="needs init_method"):
        comm.init_distributed(world_size=2)
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="DEEPSPEED_TIMEOUT"):
        comm.init_distributed()


RANKS = """
import os, sys, torch
import deepoffload.deepspeed as deepspeed
from deepoffload.deepspeed import comm as dist
deepspeed.init_distributed()
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
deepspeed.log_dist(f"rank {dist.get_rank()} has {value.item()}", ranks=[1], level=30)
deepspeed.log_dist("nobody", level=30)
with deepspeed.zero.GatheredParameters([torch.nn.Parameter(torch.ones(1))], modifier_rank=1):
    pass
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_of_a_launcher(tmp_path):
    (tmp_path / "script.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 1 has 3.0") == 1 and "rank 0 has" not in done.stderr and "nobody" not in done.stderr


# -- logs, loaders, devices ------------------------------------------------------------------------------------------


def test_logs(caplog):
    with caplog.at_level(logging.INFO, logger="deepoffload.deepspeed"):
        deepspeed.log_dist("one", ranks=[3])  # without a group there is one rank
        for _ in range(2):
            deepspeed.utils.log_dist_once("two")
        deepspeed.logger.warning("three")
        deepspeed.runtime.utils.see_memory_usage("before")
        deepspeed.runtime.utils.see_memory_usage("after", force=True)
    assert [record.message.split(":")[0] for record in caplog.records] == ["one", "two", "three", "after"]
    before = deepspeed.logger.level
    deepspeed.utils.set_log_level_from_string("error")
    assert deepspeed.logger.level == logging.ERROR
    deepspeed.logger.setLevel(before)
    with pytest.raises(UsageError, match="no level"):
        deepspeed.utils.set_log_level_from_string("loud")


def test_a_loader_that_starts_again():
    loader = deepspeed.utils.RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1] and iter(loader) is loader


def test_on_device():
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = nn.Linear(2, 2)
    assert layer.weight.is_meta and layer.weight.dtype is torch.bfloat16
    with deepspeed.OnDevice(dtype=torch.float16, enabled=False):
        assert torch.ones(1).dtype is torch.get_default_dtype() is torch.float32


# -- activation checkpoints ------------------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(depth=4)

    def half(self, x: Tensor, first: int, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers[first : first + 4]:
            x = layer(x)
        return F.dropout(x * scale, 0.3), x


@pytest.mark.parametrize("how", ["checkpoint", "non_reentrant_checkpoint"])
def test_activation_checkpoints_have_the_gradients_of_none(shared_paging, how):
    reference = plain(Stack)
    model = shared_paging.build(Stack, EVICTING)

    def run(stack: Any, call: Any) -> list[Any]:
        torch.manual_seed(2)
        scale = torch.full((64,), 0.5, requires_grad=True)
        x, first = call(stack.half, rows(), 0, scale=scale)
        y, second = call(stack.half, x, 4, scale=scale)
        (y.square().mean() + first.mean() + second.mean()).backward()
        return [y.detach(), scale.grad, *[param.grad.clone() for param in stack.parameters()]]

    expected = run(reference, lambda function, *args, **kwargs: function(*args, **kwargs))
    assert_same_bits(expected, run(model, getattr(checkpointing, how)))


def test_the_second_computation_draws_the_same_of_a_named_state():
    weight = torch.ones(64, requires_grad=True)

    def noisy(x: Tensor) -> Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            return F.dropout(x * weight, 0.5) * F.dropout(weight, 0.5)

    def run(call: Any) -> list[Tensor]:
        checkpointing.model_parallel_cuda_manual_seed(3)
        weight.grad = None
        one, two = call(noisy, torch.ones(64)), call(noisy, torch.ones(64))
        (one + two).sum().backward()
        return [one.detach(), two.detach(), weight.grad, torch.rand(2), *after()]

    def after() -> list[Tensor]:
        with checkpointing.get_cuda_rng_tracker().fork():
            return [torch.rand(2)]

    assert_same_bits(run(lambda function, x: function(x)), run(checkpointing.checkpoint))


def test_named_random_states():
    tracker = checkpointing.get_cuda_rng_tracker()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    tracker.add("a", 7)
    assert torch.equal(before, torch.get_rng_state())
    with tracker.fork("a"):
        first = torch.rand(2)
    torch.manual_seed(7)
    assert_same_bits(torch.rand(2), first)
    kept = tracker.get_states()
    tracker.set_states(kept)
    for call, said in (
        (lambda: tracker.add("a", 8), "'a' already"),
        (lambda: tracker.add("b", 7), "seed 7"),
        (lambda: tracker.fork("c").__enter__(), "no random state 'c'"),
    ):
        with pytest.raises(UsageError, match=said):
            call()
    tracker.reset()
    assert tracker.get_states() == {}


def test_configuring_checkpoints(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"activation_checkpointing": {"cpu_checkpointing": True}}))
    checkpointing.configure(None, deepspeed_config=str(tmp_path / "ds.json"), num_checkpoints=4, profile=True)
    assert checkpointing.is_configured()
    assert torch.equal(checkpointing.checkpoint(torch.square, torch.ones(2)), torch.ones(2))
    checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=False)
    checkpointing.set_num_layers(3)
    checkpointing.partition_activations_in_checkpoint(True)
    checkpointing.reset()

    class Cut:
        def get_model_parallel_world_size(self) -> int:
            return 2

    with pytest.raises(UnsupportedError, match="no layer is cut"):
        checkpointing.configure(Cut())
    with pytest.raises(ConfigError, match="cpu_checkpointing"):
        checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {"cpu_checkpointing": "yes"}})
    with pytest.raises(ConfigError, match="expected an object"):
        checkpointing.configure(None, deepspeed_config={"activation_checkpointing": [1]})


# -- configurations, optimizers, schedules, weights ------------------------------------------------------------------


def test_a_configuration_by_deepspeeds_attributes():
    said = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    config = deepspeed.DeepSpeedConfig(said)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (8, 4)
    assert config.bfloat16_enabled and not config.fp16_enabled and config.zero_enabled
    assert config.zero_optimization_stage == config.zero_config.stage == 3
    assert config.zero_config.offload_optimizer == "cpu" and config.zero_config.offload_param is None
    assert config.optimizer_name == "adamw" and config.optimizer_params["lr"] == 0.5
    assert config.scheduler_name == "WarmupLR" and config.config.zero_stage == 3
    assert "train_batch_size" in config.print_user_config() and not hasattr(config, "sparse_attention")
    assert config.gradient_clipping == 1.0  # what the engine clips to when nothing is said, as DeepSpeed's
    other = deepspeed.DeepSpeedConfig({"optimizer": {"type": "RMSprop"}, "gradient_clipping": 0})
    assert other.gradient_clipping == 0.0 and other.optimizer_name == "RMSprop"
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="zero_optimization.stage"):
        deepspeed.DeepSpeedConfig({"zero_optimization": {"stage": 9}})


def test_optimizers_by_deepspeeds_names():
    params = [nn.Parameter(torch.ones(4))]
    adam = deepspeed.ops.adam.FusedAdam(params, 0.1, True, (0.8, 0.9), 1e-6, False, 0.01)
    group = adam.param_groups[0]
    assert isinstance(adam, deepoffload.CPUAdam) and group["adamw_mode"] is False and group["betas"] == (0.8, 0.9)
    assert deepspeed.ops.adam.DeepSpeedCPUAdam is deepoffload.CPUAdam
    assert isinstance(deepspeed.ops.lion.FusedLion(params, lr=0.1), deepspeed.ops.lion.DeepSpeedCPULion)
    adagrad = deepspeed.ops.adagrad.DeepSpeedCPUAdagrad
    assert adagrad(model_params=params).defaults["lr"] == 1e-2
    made = adagrad(params, 0.1, 1e-6, 0.01, False, True).defaults  # DeepSpeed's order, which is not torch's
    assert (made["lr"], made["eps"], made["weight_decay"], made["lr_decay"]) == (0.1, 1e-6, 0.01, 0.0)
    with pytest.raises(UnsupportedError, match="fp32_optimizer_states"):
        adagrad(params, fp32_optimizer_states=False)
    with pytest.raises(UnsupportedError, match="amsgrad"):
        deepspeed.ops.adam.FusedAdam(params, amsgrad=True)


@pytest.mark.parametrize(
    ("schedule", "named"),
    [
        (lr_schedules.WarmupLR, {"warmup_max_lr": 0.2, "warmup_num_steps": 4, "warmup_type": "linear"}),
        (lr_schedules.WarmupDecayLR, {"total_num_steps": 6, "warmup_num_steps": 2}),
        (lr_schedules.WarmupCosineLR, {"total_num_steps": 6, "warmup_num_steps": 2}),
        (lr_schedules.LRRangeTest, {"lr_range_test_step_size": 2}),
        (lr_schedules.OneCycle, {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3}),
    ],
)
def test_schedules_as_classes(schedule, named):
    config = {"host_budget": "1MiB", "optimizer": {"type": "Adam", "params": {"lr": 0.3}}}
    config["scheduler"] = {"type": schedule.__name__, "params": named}
    engine, _, _, expected = deepoffload.initialize(model=nn.Linear(2, 2), config=config)
    optimizer = deepoffload.CPUAdam([nn.Parameter(torch.ones(1))], lr=0.3)
    made = schedule(optimizer, **named)
    assert type(expected) is schedule
    for _ in range(8):
        assert made.get_last_lr() == expected.get_last_lr()
        assert optimizer.param_groups[0]["betas"] == engine.optimizer.param_groups[0]["betas"]
        for one, its in ((made, optimizer), (expected, engine.optimizer)):
            its.step()
            one.step()
    engine.close()


def test_arguments_of_schedules():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.3)
    made = lr_schedules.WarmupLR(optimizer, 0.0, None, 3, "linear")
    assert made.config.params["warmup_num_steps"] == 3
    for positional, named, error, said in (
        ((0.0,), {"warmup_min_lr": 0.1}, UsageError, "warmup_min_lr twice"),
        ((0, 0, 3, "log", -1, 9), {}, UsageError, "takes 5 parameters"),
        ((), {"last_batch_iteration": 4}, UsageError, "state_dict"),
        ((), {"warmup": 4}, ConfigError, "warmup"),
        ((), {"warmup_num_steps": "many"}, ConfigError, "warmup_num_steps"),
        ((), {"warmup_max_lr": [0.1, 0.2]}, ConfigError, "has 2 values, and the optimizer 1 groups"),
    ):
        with pytest.raises(error, match=said):
            lr_schedules.WarmupLR(optimizer, *positional, **named)


def test_schedules_as_deepspeeds_callers_use_them():
    def groups(*rates):
        return torch.optim.Adam([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])

    cycle = {"cycle_min_lr": [1e-3, 2e-3], "cycle_max_lr": [1e-2, 2e-2], "cycle_min_mom": [0.8, 0.85]}
    optimizer = groups(1.0, 1.0)
    made = lr_schedules.OneCycle(optimizer, **cycle, **{lr_schedules.CYCLE_FIRST_STEP_SIZE: 5})
    assert made.last_batch_iteration == -1 and made.min_lrs == made.get_lr() == [1e-3, 2e-3]
    assert made.get_mom() == [(0.9, 0.99), (0.9, 0.99)] and optimizer.param_groups[1]["betas"] == (0.85, 0.99)
    made.step(batch_iteration=4)
    assert made.get_lr() == pytest.approx(made.max_lrs) and made.max_lrs == [1e-2, 2e-2]
    assert [first for first, _ in made.get_mom()] == pytest.approx([0.8, 0.85])
    cosine = lr_schedules.WarmupCosineLR(
        groups(0.1, 0.2), total_num_steps=20, warmup_num_steps=10, warmup_type="linear"
    )
    cosine.step(5)
    assert (cosine.last_batch_iteration, cosine.get_lr_ratio(), cosine.warmup_num_steps) == (5, 0.5, 10)
    assert cosine.get_last_lr() == cosine.get_lr() == pytest.approx([0.05, 0.1]) and cosine.org_lrs == [0.1, 0.2]
    cosine.load_state_dict({"last_batch_iteration": 6})
    cosine.step()
    assert cosine.get_lr_ratio() == pytest.approx(0.7) and not hasattr(cosine, "min_lrs")
    with pytest.raises(UsageError, match="say one of"):
        cosine.step(3, epoch=4)


def test_weights_out_of_a_checkpoint(tmp_path):
    model = plain(mlp)
    next(model.parameters()).requires_grad_(False)
    config = {"host_budget": "2MiB", "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = deepoffload.initialize(model=model, config={**config, "zero_optimization": {"stage": 2}})
    for seed in range(2):
        engine.backward(engine(rows(seed=seed).bfloat16()).float().square().mean())
        engine.step()
    engine.save_checkpoint(tmp_path / "run", tag="two")
    exact = {name: deepspeed.utils.safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    assert exact["0.weight"] is None, "it is frozen"
    exact["0.weight"] = model[0].weight.detach().float()
    engine.close()
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "run"))
    assert_same_bits(dict(sorted(exact.items())), dict(sorted(state.items())))
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run", "two", True)
    assert set(exact) - set(trained) == {"0.weight"}
    fresh = zero_to_fp32.load_state_dict_from_zero_checkpoint(mlp(), tmp_path / "run")
    assert_same_bits(exact, weights_of(fresh))
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "run", tmp_path / "safe", safe_serialization=True
    )
    assert list((tmp_path / "safe").glob("*.safetensors"))
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "run", tmp_path / "out", exclude_frozen_parameters=True
    )
    assert_same_bits(trained, torch.load(tmp_path / "out" / "pytorch_model.bin"))
    convert = zero_to_fp32.convert_zero_checkpoint_to_state_dict
    convert(tmp_path / "run", tmp_path / "half", dtype="bf16", max_shard_size=1000)
    script = [sys.executable, "zero_to_fp32.py", ".", "../by_fp32"]
    assert subprocess.run(script, cwd=tmp_path / "run", timeout=100).returncode == 0
    assert "zero_to_torch import main" in (tmp_path / "run" / "zero_to_torch.py").read_text()
    zero_to_torch.main([str(tmp_path / "run"), str(tmp_path / "by_torch"), "--dtype", "bf16"])
    assert_same_bits(exact, torch.load(tmp_path / "by_fp32" / "pytorch_model.bin"))
    rounded = {name: value.bfloat16() for name, value in exact.items()}
    assert_same_bits(rounded, torch.load(tmp_path / "by_torch" / "pytorch_model.bin"))
    with pytest.raises(SystemExit, match="1"):
        zero_to_fp32.main([str(tmp_path), str(tmp_path / "none")])
    index = json.loads((tmp_path / "half" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1 and set(index) == set(exact)
    halves = {name: torch.load(tmp_path / "half" / file)[name] for name, file in index.items()}
    assert_same_bits({name: exact[name].bfloat16() for name in halves}, halves)
    for arguments, error, said in (
        ({"lazy_mode": True}, UnsupportedError, "tensor by tensor"),
        ({"tag": "three"}, UsageError, "three"),
    ):
        with pytest.raises(error, match=said):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run", **arguments)
    with pytest.raises(UnsupportedError, match="all weights"):
        convert(tmp_path / "run", tmp_path / "o", safe_serialization=True, exclude_frozen_parameters=True)
    with pytest.raises(UsageError, match="bfloat16"):
        convert(tmp_path / "run", tmp_path / "o", dtype="int8")


def test_estimates_by_deepspeeds_paths(capsys):
    stage3 = deepspeed.runtime.zero.stage3
    stage3.estimate_zero3_model_states_mem_needs_all_live(mlp(), num_gpus_per_node=1)
    deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold(total_params=1000)
    assert "offload_param" in capsys.readouterr().out
    assert stage3.estimate_zero3_model_states_mem_needs(1000, 10)[2] == 40
