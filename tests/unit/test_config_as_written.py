"""Configurations as people write them for DeepSpeed: each is read, or is refused with a reason that is true.

``public_configs.json`` has the keys of 80 files and programs of the public, by the place of each; here are more habits.
"""

from __future__ import annotations

import base64
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.config import Precision, as_written, parse_config
from deepoffload.config.hjson import NoHjson, read_hjson
from deepoffload.device import Tier
from deepoffload.errors import ConfigError, UsageError
from tests.support.deepspeed_configs import HOST, STAGE3
from tests.support.deepspeed_installed import DEEPSPEED_PYTHON, needs_deepspeed

SCALE = {"loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 15, "hysteresis": 2, "min_loss_scale": 1}
BATCHES = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP = {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")}
STAGE2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "overlap_comm": False,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
NVME = {"device": "nvme", "nvme_path": "/tmp", "pin_memory": True}

READ: dict[str, dict[str, Any]] = {
    "a trainer's, stage 3 with both offloads": {
        **BATCHES,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", **SCALE},
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": {**STAGE3, "offload_optimizer": HOST, "offload_param": HOST},
        "steps_per_print": 100,
        "wall_clock_breakdown": False,
    },
    "a trainer's, with a schedule of unknown length": {
        **BATCHES,
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", **WARMUP["params"]}},
        "zero_optimization": {**STAGE3, "offload_optimizer": HOST},
    },
    "stage 2 without offload, said as none": {
        **BATCHES,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {**STAGE2, "offload_optimizer": {"device": "none", "pin_memory": True}},
    },
    "stage 2 with the switch of old": {
        "train_batch_size": 4,
        "steps_per_print": 2000,
        "prescale_gradients": False,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 9}},
        "fp16": {"enabled": True, **SCALE},
        "zero_optimization": {**STAGE2, "cpu_offload": True},
    },
    "names without their stage, and zeros": {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 0,
            "max_live_parameters": 0,
            "max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
    },
    "the older name of the gathered save": {
        "zero_optimization": {"stage": 3, "sub_group_size": 1e14, "stage3_gather_fp16_weights_on_model_save": True},
        "fp16": {"enabled": True},
    },
    "NVMe, with threads by an older name": {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**NVME, "buffer_count": 4, "pipeline_read": False, "pipeline_write": False},
            "offload_param": {**NVME, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1},
        },
        "fp16": {"enabled": True, "loss_scale": 1024},
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True},
    },
    "groups that no version of DeepSpeed has": {
        "_comment": "for four cards",
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "tag": "mine"},
        "fp8": {"enabled": True},
        "zero_optimization": {"stage": 3},
    },
    "activation checkpoints": {
        "train_batch_size": 30,
        "gradient_accumulation_steps": 3,
        "activation_checkpointing": {
            "partition_activations": True,
            "contiguous_memory_optimization": True,
            "cpu_checkpointing": True,
            "number_checkpoints": 4,
            "synchronize_checkpoint_boundary": False,
        },
    },
    "one cycle": {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 32,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": 0.004,
                "cycle_max_lr": 0.015,
                "cycle_first_step_size": 1000,
                "cycle_second_step_size": 100,
                "cycle_first_stair_count": 100,
                "cycle_second_stair_count": 100,
                "decay_step_size": 1000,
                "decay_lr_rate": 0.01,
            },
        },
    },
    "tools": {
        "tensorboard": {"enabled": True, "output_path": "runs", "job_name": "one"},
        "wandb": {"enabled": False, "project": "mine", "team": None},
        "csv_monitor": {"enabled": True, "output_path": "runs"},
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 3, "detailed": True},
        "comms_logger": {"enabled": False},
        "checkpoint": {"tag_validation": "Warn", "use_node_local_storage": True},
    },
    "types of gradients": {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    },
    "an optimizer with switches of torch's": {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "adam_w_mode": True, "fused": True}},
        "zero_force_ds_cpu_optimizer": False,
    },
    "part of the step on the device": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {**HOST, "ratio": 0.3}, "memory_efficient_linear": False}
    },
    "what other libraries set in a program": {"steps_per_print": math.inf, "zero_optimization": {"stage": 2}},
}

NUMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "masters in fp16": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, "zero_optimization": STAGE2},
        "master weights are kept in fp32",
    ),
    "masters in bf16": (
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            "zero_optimization": {**STAGE2, "offload_optimizer": HOST},
        },
        "master weights are kept in fp32",
    ),
    "clipping in the optimizer": (
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}, "fp16": {"enabled": True}},
        "say gradient_clipping instead",
    ),
    "Lamb": ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3}}}, r"initialize\(optimizer=...\)"),
    "1-bit Adam": ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, r"initialize\(optimizer=...\)"),
    "MuSGD": ({"optimizer": {"type": "MuSGD", "params": {"lr": 1e-3}}}, r"initialize\(optimizer=...\)"),
    "quantised weights": ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "never quantised"),
    "delayed updates": ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "ZenFlow delays updates"),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch.autocast"),
}
"""What DeepSpeed reads, and we refuse: it would be trained with other numbers than it asks for."""

BOTH_REFUSE: dict[str, tuple[dict[str, Any], str]] = {
    "a key of fp16 in bf16": ({"bf16": {"enabled": True, "loss_scale": 0}}, "bf16.loss_scale: unknown key"),
    "a level of Apex": ({"fp16": {"enabled": True, "opt_level": "O2"}}, "fp16.opt_level: unknown key"),
    "compile as it was": ({"compile": {"disable": False, "backend": "inductor"}}, "compile.disable: unknown key"),
    "words in another order": ({"zero_optimization": {"stage": 2, "comm_overlap": True}}, "mean .*overlap_comm"),
    "a misspelt key": (
        {"zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1e5}},
        "did you mean .*stage3_param_persistence_threshold",
    ),
    "compression": (
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        "never compressed",
    ),
    "sparse attention": ({"sparse_attention": {"mode": "fixed", "block": 16}}, "attention is the model's"),
    "quantised training": ({"quantize_training": {"enabled": True}}, "never quantised"),
}


HJSON: dict[str, tuple[str, dict[str, Any]]] = {
    "comments and a comma too many (as CoinCheung/gdGPT and TUM-DI-Lab-Graph-Scaling/ocp)": (
        """{
  // for two cards
  "train_batch_size": 8, # all of them
  /* "fp16": {"enabled": true}, */
  "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95,],}},
  "zero_optimization": {
    "stage": 1,
    "allgather_partitions": false, // 'tis "off"
  }
}""",
        {
            "train_batch_size": 8,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
            "zero_optimization": {"stage": 1, "allgather_partitions": False},
        },
    ),
    "commas that are missing at the end of a line (as CZtheHusky/rt_torch)": (
        """{
  "train_batch_size": 4
  "tensorboard": {"enabled": true, "job_name": 'one "job"'}

  "steps_per_print": 1e3
}""",
        {"train_batch_size": 4, "tensorboard": {"enabled": True, "job_name": 'one "job"'}, "steps_per_print": 1000.0},
    ),
    "no quotes and no braces": (
        """train_batch_size: 4
zero_optimization: {
  stage: 2
  offload_optimizer: {device: "cpu"}
}
wandb: {
  project: mine, and theirs
  team: null
}
""",
        {
            "train_batch_size": 4,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "wandb": {"project": "mine, and theirs", "team": None},
        },
    ),
}
"""Habits that only DeepSpeed's reader of files takes."""

PUBLIC = json.loads(Path(__file__).with_name("public_configs.json").read_text())
ALL_READ = {**READ, **{name: config for name, (config, _) in PUBLIC["read"].items()}}
ALL_NUMBERS = {**NUMBERS, **PUBLIC["numbers"]}
ALL_REFUSED = {**BOTH_REFUSE, **PUBLIC["refused"]}


def test_they_are_read():
    refused = {}
    for name, said in ALL_READ.items():
        try:
            config = parse_config(said)
            assert parse_config(config) == config, name
        except ConfigError as error:
            refused[name] = str(error)
    assert not refused


def test_torch_adam_decays_as_torchs_adamw_where_nothing_is_said():
    for kind, more, decay in (
        ("AdamW", {}, 0.01),
        ("Adam", {}, 0.01),  # AdamW, too
        ("AdamW", {"adam_w_mode": False}, 0.01),
        ("Adam", {"adam_w_mode": False}, 0.0),
        ("AdamW", {"weight_decay": 0.0}, 0.0),
        ("Adam", {"torch_adam": False}, 0.0),
    ):
        config = parse_config({"optimizer": {"type": kind, "params": {"torch_adam": True, **more}}})
        assert config.optimizer is not None and config.optimizer.params["weight_decay"] == decay
        assert "torch_adam" not in config.optimizer.params and parse_config(config) == config
    with pytest.raises(ConfigError, match="sgd has no such parameter"):
        parse_config({"optimizer": {"type": "SGD", "params": {"torch_adam": True}}})


def test_they_are_refused_with_a_reason():
    for name, (config, said) in {**ALL_NUMBERS, **ALL_REFUSED}.items():
        with pytest.raises(ConfigError, match=said):
            parse_config(config)
            pytest.fail(f"read: {name}")


@pytest.mark.parametrize("name", HJSON)
def test_files_are_read_as_deepspeed_reads_them(name, tmp_path):
    text, value = HJSON[name]
    assert read_hjson(text) == value
    (tmp_path / "ds.json").write_text(text)
    assert parse_config(tmp_path / "ds.json") == parse_config(value)
    assert parse_config(base64.urlsafe_b64encode(json.dumps(value).encode()).decode()) == parse_config(value)


@pytest.mark.parametrize(
    "text", ['{"a": 1', '{"a" 1}', "{a: [1, 2}", '{"a": "b}', "{: 1}", "[1] 2", "{a: }", '{"a": "\\x"}', "}"]
)
def test_what_is_not_even_hjson_is_refused(text, tmp_path):
    with pytest.raises(NoHjson, match="line 1"):
        read_hjson(text)
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match="not valid JSON"):
        parse_config(tmp_path / "ds.json")


def test_keys_stand_once_in_hjson_too(tmp_path):
    (tmp_path / "ds.json").write_text("{prefetch: true\nprefetch: false}")
    with pytest.raises(ConfigError, match='"prefetch" stands twice'):
        parse_config(tmp_path / "ds.json")


def test_what_is_read_otherwise_than_it_is_written_is_a_warning():
    config = parse_config(ALL_READ["a program of the public: everything in quotes"])
    assert "aio.single_submit = 'false': text, read as false; write it without quotes" in config.warnings
    assert config.prefetch and config.zero_stage == 3
    name = "a program of the public: a schedule that starts at -1, and warms up by a name that DeepSpeed replaces"
    config = parse_config(ALL_READ[name])
    assert config.scheduler is not None and config.scheduler.params["warmup_type"] == "log"
    assert "scheduler.params.warmup_type = 'cosine': taken as \"log\", as by DeepSpeed" in config.warnings
    config = parse_config({"aio": {"queue_dpeth": 1}})
    assert config.warnings == ("aio.queue_dpeth: unknown key, ignored; did you mean aio.queue_depth?",)
    with pytest.raises(ConfigError, match="prefetch = 'true': expected true or false without quotes"):
        parse_config({"prefetch": "true"})  # ours


def test_optimizers_and_schedules_of_torch_are_made_by_their_names():
    config = {
        "optimizer": {"type": "RMSprop", "params": {"lr": 1e-2, "alpha": 0.9, "centered": True}},
        "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 4}},
        "gradient_clipping": 0.0,
        "host_budget": "1MiB",
    }
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.RMSprop(plain.parameters(), lr=1e-2, alpha=0.9, centered=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    engine, *_ = deepoffload.initialize(model=model, config=config)
    for _ in range(3):
        plain(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        assert engine.get_lr() == schedule.get_last_lr()
    assert torch.equal(plain.weight, model.weight.detach().clone())
    engine.close()
    with pytest.raises(ConfigError, match="torch's StepLR refuses them.*step_size"):
        deepoffload.initialize(model=nn.Linear(2, 2), config={**config, "scheduler": {"type": "StepLR"}})
    model, config = nn.Linear(2, 2), {**config, "fp16": {"enabled": True}}
    engine, *_ = deepoffload.initialize(model=model, config=config)
    engine.close()
    without = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
    with pytest.raises(UsageError, match="keeps no fp32 masters"):
        model = nn.Linear(2, 2)
        deepoffload.initialize(model=model, optimizer=torch.optim.RMSprop(model.parameters()), config=without)


def test_what_some_of_them_mean():
    assert parse_config(READ["what other libraries set in a program"]).steps_per_print == 0
    config = parse_config(READ["NVMe, with threads by an older name"])
    assert config.nvme_path == ("/tmp",) and config.offload_param is config.offload_optimizer is Tier.NVME
    assert config.precision is Precision.FP16 and config.fp16.loss_scale == 1024
    config = parse_config(READ["stage 2 with the switch of old"])
    assert config.offload_optimizer is Tier.HOST and config.zero_stage == 2
    config = parse_config(READ["a trainer's, stage 3 with both offloads"])
    assert config.precision is Precision.KEEP and len(config.warnings) == 1
    for key in ("optimizer.params.lr", "train_batch_size", "fp16.enabled", "scheduler.params.warmup_num_steps"):
        assert f"  {key} became" in config.warnings[0]


def test_a_schedule_of_unknown_length_is_refused_where_it_would_be_built():
    said = READ["a trainer's, with a schedule of unknown length"]
    config = parse_config(said)
    assert "scheduler.params.total_num_steps became unknown" in config.warnings[0]
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match='total_num_steps is "auto".*lr_scheduler='):
        deepoffload.initialize(model=model, config={**said, "host_budget": "1MiB"})
    assert type(model.weight) is nn.Parameter
    engine, _, _, schedule = deepoffload.initialize(
        model=model,
        config={**said, "host_budget": "1MiB"},
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5),
    )
    assert schedule.get_last_lr() == [0.0005]
    engine.close()
    with pytest.raises(ConfigError, match="total_num_steps: WarmupDecayLR needs it"):
        parse_config({"scheduler": {"type": "WarmupDecayLR", "params": {}}})


THEIRS = """
import json, logging, sys
logging.disable(logging.CRITICAL)
import deepspeed
deepspeed.init_distributed("gloo")
from deepspeed.runtime.config import DeepSpeedConfig
read = []
for name, config in json.loads(sys.argv[1]).items():
    try:
        batch = {} if "train_micro_batch_size_per_gpu" in config else {"train_batch_size": 8}
        DeepSpeedConfig({**batch, **config})
        read.append(name)
    except Exception as error:
        print(name, type(error).__name__, error)
import hjson
print("HJSON " + json.dumps([hjson.loads(text) for text in json.loads(sys.argv[2])]))
print("READ " + json.dumps(read))
"""


def without_autos(config: Any) -> Any:
    """A configuration as a trainer hands it to DeepSpeed, which reads no ``"auto"``."""
    if not isinstance(config, dict):
        return config
    return {key: without_autos(value) for key, value in config.items() if value not in ("auto", math.inf)}


@needs_deepspeed
def test_what_the_installed_deepspeed_reads_we_read_but_for_what_changes_numbers(tmp_path):
    given = {
        name: without_autos(config)
        for name, config in (
            *ALL_READ.items(),
            *((name, pair[0]) for name, pair in (*ALL_NUMBERS.items(), *ALL_REFUSED.items())),
        )
    }
    texts = [text for text, _ in HJSON.values()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    command = [DEEPSPEED_PYTHON, "-c", THEIRS, json.dumps(given), json.dumps(texts)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    read = set(json.loads(done.stdout.rpartition("READ ")[2]))
    assert set(ALL_READ) - read == set(), done.stdout
    assert read - set(ALL_READ) == set(ALL_NUMBERS)
    texts = json.loads(done.stdout.rpartition("HJSON ")[2].partition("\n")[0])
    assert texts == [value for _, value in HJSON.values()]


def test_a_configuration_by_its_keys() -> None:
    """Ranks compare these, so all that differs is in them."""
    said: dict[str, Any] = {
        "zero_optimization": {"stage": 2},
        "checkpoint": {"load_universal": True},
        "ranks": {"timeout_s": 7},
    }
    keys = as_written(parse_config(said, host_budget="1MiB"))
    expected = {
        "zero_optimization.stage": "2",
        "checkpoint.load_universal": "true",
        "ranks.timeout_s": "7.0",
        "host_budget": "1048576",
        "gradient_clipping": "not set",
    }
    assert keys.items() >= expected.items()
    long = [f"layers.{number}" for number in range(100)]
    one, other = (as_written(parse_config(keep_fp32=[*long, last])) for last in ("norm", "head"))
    assert [key for key in one if one[key] != other[key]] == ["keep_fp32"]
