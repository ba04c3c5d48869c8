"""What DeepSpeed's own unit tests call, on one rank; docs/deepspeed_tests.md lists which of them this stands for.

The programs are ours. They make the calls of its tests of configurations, contexts, fragments and checkpoints in the
same order, and compare what those compare.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload.deepspeed as deepspeed
from deepoffload.deepspeed import utils
from deepoffload.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepoffload.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepoffload.deepspeed.zero import ZeroParamStatus
from tests.support.loops import assert_same_bits, weights_of

WIDTH = 10
ADAM = {"type": "Adam", "params": {"lr": 1.5e-4, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
MOMENTS = ("exp_avg", "exp_avg_sq")


class SimpleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for linear in self.linears:
            x = linear(x)
        return nn.functional.cross_entropy(x, y)


def train(engine: Any, steps: int = 3, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        x = torch.randn(2, WIDTH, generator=generator).to(engine.device, dtype)
        loss = engine(x, torch.randint(0, WIDTH, (2,), generator=generator).to(engine.device))
        engine.backward(loss)
        engine.step()


def small(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 2, "steps_per_print": 0, "optimizer": ADAM, "host_budget": "1MiB", **keys}


# -- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["dict", "json", "hjson", "args", "deepscale"])
def test_where_a_configuration_comes_from(way, tmp_path):
    config = small(bf16={"enabled": True})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    if way == "hjson":
        lines = json.dumps(config, indent=1).replace('"train_batch_size"', "train_batch_size").splitlines()
        file.write_text("\n".join(line.removesuffix(",") for line in lines))
    arguments: dict[str, Any] = {"config": config if way == "dict" else str(file)}
    if way in ("args", "deepscale"):
        args = argparse.ArgumentParser().parse_args([])
        setattr(args, "deepspeed_config" if way == "args" else "deepscale_config", str(file))
        args.local_rank = 0
        arguments = {"args": args}
    model = SimpleModel()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), dist_init_required=True, **arguments
    )
    train(engine, dtype=torch.bfloat16)
    assert engine.bfloat16_enabled() and engine.global_steps == 3
    engine.destroy()


# -- contexts --------------------------------------------------------------------------------------------------------


class ConvX(nn.Conv1d):
    """A subclass of a layer, with a parameter that the layer has not."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.param_in = nn.Parameter(torch.rand(5))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = ConvX(1, 3, 4)
        self.param = nn.Parameter(torch.rand(5))


def test_parameters_of_subclasses_within_and_after_the_context():
    with deepspeed.zero.Init(config=small()):
        assert deepspeed.comm.is_initialized()
        model = ConvNet()
    for param in (model.param, model.conv1.param_in):
        assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
    outside = nn.Linear(6, 3)
    assert not hasattr(outside.weight, "ds_status")
    with deepspeed.zero.GatheredParameters(model.param, modifier_rank=0):
        assert model.param.ds_status == ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
        with torch.no_grad():
            model.param.zero_()
    with deepspeed.zero.GatheredParameters(model.param):
        assert torch.equal(model.param, torch.zeros_like(model.param))
    engine, *_ = deepspeed.initialize(model=model, config=small())
    engine.destroy()


# -- fragments -------------------------------------------------------------------------------------------------------

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("device", list(OffloadDeviceEnum), ids=lambda device: device.value)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fragments_are_set_and_shown(device, dtype, nvme_path):
    place = {"device": device, **({"nvme_path": str(nvme_path)} if device == "nvme" else {})}
    config = small(zero_optimization={"stage": 3, "offload_optimizer": place})
    if dtype != "fp32":
        config[dtype] = {"enabled": True} | ({"initial_scale_power": 2} if dtype == "fp16" else {})
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = SimpleModel()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, WIDTH, generator=generator).to(engine.device, DTYPES[dtype])
    engine.backward(engine(x, torch.zeros(2, dtype=torch.long)))
    params = dict(engine.module.named_parameters())
    kept: dict[str, list[Tensor]] = {}
    for name, param in params.items():
        assert utils.safe_get_full_grad(param) is not None and utils.safe_get_local_grad(param) is not None
        values = [torch.rand(param.ds_shape, generator=generator) for _ in range(4)]
        kept[name] = [*values[:3], values[3].to(DTYPES[dtype])]
        utils.safe_set_full_fp32_param(param, values[0])
        for moment, value in zip(MOMENTS, values[1:3], strict=True):
            utils.safe_set_full_optimizer_state(param, value, moment)
        utils.safe_set_full_grad(param, kept[name][3])
    for name, param in params.items():
        shown = [utils.safe_get_full_fp32_param(param)]
        shown += [utils.safe_get_full_optimizer_state(param, moment) for moment in MOMENTS]
        assert_same_bits(kept[name], [*shown, utils.safe_get_full_grad(param)])
        local = [utils.safe_get_local_fp32_param(param)]
        local += [utils.safe_get_local_optimizer_state(param, moment) for moment in MOMENTS]
        assert_same_bits([value.flatten() for value in kept[name]], [*local, utils.safe_get_local_grad(param)])
    engine.step()
    assert utils.safe_get_full_optimizer_state(params["linears.0.weight"], "exp_avg") is not None
    engine.destroy()


# -- checkpoints -----------------------------------------------------------------------------------------------------


def engine_of(model: nn.Module, config: dict[str, Any]) -> Any:
    groups = {"params": list(model.parameters()), "name": "parameters"}
    engine, *_ = deepspeed.initialize(
        config=config, model=model, model_parameters=split_params_into_different_moe_groups_for_optimizer(groups)
    )
    engine.empty_partition_cache()
    return engine


CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, bool], str | None]] = {
    "everything, stage 3": (
        {"zero_optimization": {"stage": 3, "pipeline_loading_checkpoint": True}, "wall_clock_breakdown": True},
        {"load_optimizer_states": True, "load_lr_scheduler_states": True},
        "1",
    ),
    "weights and schedule, stage 2 with cpu_offload": (
        {"zero_optimization": {"stage": 2, "cpu_offload": True}},
        {"load_optimizer_states": False, "load_lr_scheduler_states": True},
        "1",
    ),
    "weights only, bf16, the latest": (
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
        {"load_module_only": True},
        None,
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_second_engine_loads_what_the_first_has_saved(name, tmp_path):
    keys, parts, tag = CHECKPOINTS[name]
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 9}}
    config = small(scheduler=schedule, **keys)
    dtype = torch.bfloat16 if "bf16" in keys else torch.float32
    if keys["zero_optimization"]["stage"] == 3:
        models = []
        for _ in range(2):  # each in a separate engine: one engine's models are saved together
            with deepspeed.zero.Init(config_dict_or_path=config):
                models.append(SimpleModel())
    else:
        models = [SimpleModel() for _ in range(2)]
    saved = engine_of(models[0], config)
    train(saved, 4, dtype)
    saved.save_checkpoint(str(tmp_path), tag=tag)
    loaded = engine_of(models[1], config)
    path, _ = loaded.load_checkpoint(str(tmp_path), tag=tag, **parts)
    assert path is not None
    assert_same_bits(weights_of(saved.module), weights_of(loaded.module))
    if parts.get("load_optimizer_states"):
        state = [saved.optimizer.state_dict(), loaded.optimizer.state_dict()]
        assert_same_bits(*({k: dict(v) for k, v in each["state"].items()} for each in state))
    if parts.get("load_lr_scheduler_states"):
        assert saved.lr_scheduler.state_dict() == loaded.lr_scheduler.state_dict()
    if not parts.get("load_module_only"):
        assert saved.global_steps == loaded.global_steps and saved.skipped_steps == loaded.skipped_steps
    train(loaded, 1, dtype)
    saved.destroy()
    loaded.destroy()


def test_no_checkpoint_and_a_tag_validation_that_is_none(tmp_path):
    model = SimpleModel()
    engine, *_ = deepspeed.initialize(config=small(), model=model, model_parameters=model.parameters())
    assert engine.load_checkpoint(str(tmp_path)) == (None, None)
    engine.destroy()
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="checkpoint.tag_validation = 'foo'"):
        deepspeed.initialize(config=small(checkpoint={"tag_validation": "foo"}), model=SimpleModel())


def test_shared_weights_out_of_a_checkpoint(tmp_path: Path):
    def shared() -> nn.Module:
        model = nn.ModuleDict({"one": nn.Linear(8, 8), "other": nn.Linear(8, 8)})
        model["one"].weight = model["other"].weight
        return model

    model = shared()
    config = small(zero_allow_untested_optimizer=True, zero_optimization={"stage": 2})
    config.pop("optimizer")
    engine, *_ = deepspeed.initialize(config=config, model=model, optimizer=torch.optim.Adam(model.parameters()))
    engine.save_checkpoint(tmp_path, tag="checkpoint")
    state = utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="checkpoint")
    fresh = shared()
    fresh.load_state_dict(state, strict=True)
    assert_same_bits(weights_of(model), weights_of(fresh))
    engine.destroy()
