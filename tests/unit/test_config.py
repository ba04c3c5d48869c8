"""parse_config: what is accepted, what becomes of it, and what every kind of mistake is told."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepoffload.config import (
    AioBackend,
    AioConfig,
    Config,
    DebugConfig,
    GradientDtype,
    OptimizerConfig,
    Precision,
    StepOverlap,
    parse_config,
)
from deepoffload.config.collect import KEYS
from deepoffload.config.schema import DurabilityConfig
from deepoffload.device import Tier
from deepoffload.errors import ConfigError
from tests.support.deepspeed_configs import OF_TRAINER

GIB = 1 << 30

HF_ZERO3 = OF_TRAINER["zero3.json"]

FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 1, "min_loss_scale": 2.0}
}

# DeepSpeed's ZeRO-Infinity tutorial, with the disk.
INFINITY = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk/a", "buffer_count": 6, "pipeline_read": True},
        "offload_param": {"device": "nvme", "nvme_path": "/disk/b", "buffer_size": 1e8, "max_in_cpu": 1e9},
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 2, "single_submit": False, "overlap_events": True},
}


def test_nothing_said_is_the_defaults():
    assert parse_config() == Config() == parse_config({}) == parse_config(None, host_budget=None)


def test_hugging_face_example_as_it_comes():
    config = parse_config(HF_ZERO3)
    assert config.precision is Precision.KEEP
    assert config.offload_param is Tier.HOST and config.offload_optimizer is Tier.HOST
    assert config.optimizer == OptimizerConfig(
        "adamw",
        {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "bias_correction": True,
            "adamw_mode": True,
        },
    )
    assert config.scheduler is not None and config.scheduler.params["warmup_max_lr"] is None
    assert (config.gradient_clipping, config.gradient_accumulation_steps, config.train_batch_size) == (None, 1, None)
    assert config.steps_per_print == 2000
    assert config.prefetch
    noted = [note.split(":")[0].split(" = ")[0] for note in config.notes]
    assert noted == [
        "zero_optimization.stage",
        "zero_optimization.overlap_comm",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    ]


def test_zero_infinity_example():
    config = parse_config(INFINITY)
    assert config.precision is Precision.BF16
    assert config.offload_param is Tier.NVME and config.offload_optimizer is Tier.NVME
    assert config.nvme_path == ("/disk/b", "/disk/a")  # the weights' first
    assert config.aio == AioConfig(AioBackend.AUTO, 262144, 32, False)
    assert config.train_batch_size == 8
    assert any(note.startswith("aio.thread_count: inapplicable") for note in config.notes)


def test_own_keys_in_every_form():
    config = parse_config(
        device_budget=1.5e9,
        host_budget="2GiB",
        nvme_budget="500 MB",
        nvme_path=[Path("/a"), "/b"],
        offload_param="host",
        offload_optimizer=Tier.NVME,
        step_overlap="none",
        prefetch=False,
        precision="bf16",
        aio={"backend": "pool", "block_bytes": "64KiB", "queue_depth": 4, "verify": True},
        debug={"poison": True, "evict_always": True},
    )
    assert config == Config(
        device_budget=1_500_000_000,
        host_budget=2 * GIB,
        nvme_budget=500_000_000,
        nvme_path=("/a", "/b"),
        offload_param=Tier.HOST,
        offload_optimizer=Tier.NVME,
        step_overlap=StepOverlap.NONE,
        prefetch=False,
        precision=Precision.BF16,
        aio=AioConfig(AioBackend.POOL, 65536, 4, True),
        debug=DebugConfig(True, True),
    )


def test_keywords_win_over_the_source_and_none_takes_back():
    source = {**INFINITY, "host_budget": "1GiB"}
    config = parse_config(source, host_budget="3GiB", precision="fp32", aio={"queue_depth": 8}, nvme_path="/c")
    assert (config.host_budget, config.precision, config.nvme_path) == (3 * GIB, Precision.FP32, ("/c",))
    assert (config.aio.queue_depth, config.aio.block_bytes) == (8, 262144)
    assert parse_config(source, host_budget=None).host_budget is None
    assert parse_config(source, host_budget="auto").host_budget is None
    assert parse_config(source, aio=None).aio == AioConfig()
    assert parse_config(source, offload_param="host").offload_param is Tier.HOST


OFF_ABOVE_ON = [
    ({"bf16": {"enabled": True}}, {"bf16": {"enabled": False}}),
    ({"bf16": {"enabled": True}}, {"bfloat16": {"enabled": False}}),
    ({"fp16": {"enabled": True}}, {"fp16": {"enabled": False}}),
    ({"zero_optimization": {"prefetch_bucket_size": 0}}, {"zero_optimization": {"stage3_prefetch_bucket_size": 5}}),
    ({"zero_optimization": {"cpu_offload": True}}, {"zero_optimization": {"cpu_offload": False}}),
    ({"data_types": {"keep_in_fp32_modules": ["norm"]}}, {"data_types": {"keep_in_fp32_modules": "auto"}}),
    ({"data_types": {"grad_accum_dtype": "fp32"}}, {"gradient_dtype": "keep"}),
    ({"gradient_dtype": "fp32", "precision": "bf16"}, {"data_types": {"grad_accum_dtype": "bf16"}}),
]


@pytest.mark.parametrize(("source", "keywords"), OFF_ABOVE_ON, ids=str)
def test_a_keyword_that_sets_nothing_takes_back_what_the_source_sets(source, keywords):
    on, off = parse_config(source), parse_config(source, **keywords)
    default = Config(precision=Precision.BF16) if "precision" in source else Config()
    assert replace(off, notes=()) == default != replace(on, notes=())


def test_a_keyword_that_sets_nothing_leaves_other_keys_alone():
    assert parse_config({"precision": "bf16"}, bf16={"enabled": False}).precision is Precision.BF16
    assert parse_config({"prefetch": False}, zero_optimization={"stage3_prefetch_bucket_size": 5}).prefetch is False


def test_a_new_schedule_type_brings_its_own_parameters():
    source = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    same = parse_config(source, scheduler={"params": {"warmup_type": "linear"}}).scheduler
    assert same is not None and (same.params["warmup_num_steps"], same.params["warmup_type"]) == (5, "linear")
    other = parse_config(source, scheduler={"type": "LRRangeTest"}).scheduler
    assert other is not None and other.params["lr_range_test_step_size"] == 2000
    assert parse_config(source, scheduler=None).scheduler is None


@pytest.mark.parametrize(
    "source", [{}, HF_ZERO3, INFINITY, FP16, {"gradient_clipping": 0, "optimizer": {"type": "adam"}}]
)
def test_a_config_parses_to_itself(source):
    config = parse_config(source)
    assert parse_config(config) == config


def test_loss_scaling_without_fp16_is_noted():
    said = {"bf16": {"enabled": True}, "fp16": {**FP16["fp16"], "enabled": False}}
    config = parse_config(said)
    assert config.precision is Precision.BF16
    assert config.notes[-1] == "fp16: inapplicable: loss scaling belongs to fp16, which is off"
    assert not any(note.startswith("fp16: ") for note in parse_config(FP16).notes)


def test_a_config_made_by_hand_is_checked():
    with pytest.raises(ConfigError, match=r"host_budget = -1"):
        parse_config(Config(host_budget=-1))
    with pytest.raises(ConfigError, match=r"aio.block_bytes = 1000"):
        parse_config(Config(aio=AioConfig(block_bytes=1000)))


def test_optimizer_modes():
    def mode(kind, **params):
        optimizer = parse_config({"optimizer": {"type": kind, "params": params}}).optimizer
        assert optimizer is not None
        return optimizer.type, optimizer.params["adamw_mode"]

    assert mode("Adam") == ("adam", True)  # DeepSpeed's Adam decouples unless told not to
    assert mode("Adam", adam_w_mode=False) == ("adam", False)
    assert mode("AdamW", adam_w_mode=False) == ("adamw", True)


@pytest.mark.parametrize(
    ("given_keys", "expected"),
    [
        ({}, (None, None, 1)),
        ({"train_batch_size": 8}, (8, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 4}, (4, 4, 1)),
        ({"gradient_accumulation_steps": 4}, (None, None, 4)),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 4}, (8, 2, 4)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}, (8, 4, 2)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, (8, 4, 2)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, (8, 4, 2)),
    ],
)
def test_batch_triple(given_keys, expected):
    config = parse_config(given_keys)
    assert (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    ) == expected


MISTAKES = [
    ({"zero_optimization": {"stage3": 3}}, "zero_optimization.stage3: unknown key; did you mean"),
    ({"zero_optimization": {"offload_params": {"device": "cpu"}}}, "did you mean zero_optimization.offload_param?"),
    ({"fp16": {"overlap_comm": True}}, "did you mean zero_optimization.overlap_comm?"),
    ({"fp16": {"qqqqqqq": 1}}, "fp16.qqqqqqq: unknown key; docs/config.md lists all keys"),
    ({3: 1}, "3: keys are text"),
    ({"prefetch": "true"}, "prefetch = 'true': expected true or false without quotes"),
    ({"prefetch": 1}, "prefetch = 1: expected true or false"),
    ({"train_batch_size": True}, "train_batch_size = true: expected a whole number of at least 1"),
    ({"train_batch_size": 1.5}, "train_batch_size = 1.5: expected a whole number"),
    ({"gradient_clipping": float("nan")}, "gradient_clipping = nan: expected a finite number at least 0"),
    ({"gradient_clipping": -1}, "gradient_clipping = -1"),
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4: expected a whole number from 0 to 3"),
    (
        {"zero_optimization": 2},
        'zero_optimization = 2: expected an object, such as {"stage": 1}, or true or false',
    ),
    ({"aio": True}, "aio = true: expected an object"),
    (
        {"compression_training": {"pruning": {}}},
        "unknown part 'pruning'; expected layer_reduction, weight_quantization",
    ),
    ({"compression_training": {"row_pruning": []}}, "part 'row_pruning': expected an object"),
    ({"aio": {"block_size": 1000}}, "aio.block_size = 1000: expected a whole number from 4096"),
    ({"aio": {"backend": "posix"}}, 'aio.backend = \'posix\': expected one of "auto", "libaio"'),
    ({"host_budget": "2G"}, 'host_budget = \'2G\': unknown unit "G"; write "2GiB" (1024) or "2GB" (1000)'),
    ({"host_budget": 1.5}, "host_budget = 1.5: expected a whole number of bytes"),
    ({"host_budget": 0}, "host_budget = 0: expected bytes (at least 1)"),
    ({"nvme_path": ""}, "nvme_path = '': expected a directory"),
    ({"nvme_path": ["/a", "/a"]}, "expected directories that differ from each other"),
    ({"nvme_path": 3}, "nvme_path = 3: expected a directory"),
    ({"durability": True}, "durability without nvme_path: say in which directory"),
    ({"durability": True, "nvme_path": "/a", "nvme_budget": 0}, "durability with nvme_budget = 0"),
    ({"durability": {"every": 0, "path": "/a"}}, "every: expected a whole number from 1 to 1000000"),
    ({"durability": {"every": 10**20, "path": "/a"}}, "every: expected a whole number from 1 to 1000000"),
    ({"durability": DurabilityConfig(every=10**20, path=("/a",))}, "every: expected a whole number from 1 to 1000000"),
    ({"steps_per_print": -float("inf")}, "steps_per_print = -inf: expected a whole number"),
    ({"gradient_clipping": 10**400}, "expected a finite number"),
    ({"aio": {"queue_depth": 10**5000}}, "aio.queue_depth = (int of very many digits): expected"),
    ({"durability": {"each": 1}}, "unknown key 'each'; expected every and path"),
    ({"durability": {"path": 3}}, "path: expected a directory"),
    ({"durability": 1}, "durability = 1: expected true, false, or an object"),
    ({"precision": "fp16", "step_overlap": "in_backward"}, 'precision is fp16, and step_overlap = "in_backward" uses'),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled contradict each other"),
    ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis = 0: expected a whole number of at least 1"),
    (
        {"fp16": {"enabled": True, "min_loss_scale": 0}},
        "fp16.min_loss_scale = 0: expected a whole number of at least 1",
    ),
    ({"precision": "fp16", "fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window = 0: expected a whole number"),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 5}},
        "5 is above the first scale, 2 to the",
    ),
    ({"precision": "fp32", "bf16": {"enabled": True}}, "precision and bf16.enabled contradict each other"),
    ({"aio": {"block_bytes": 4096, "block_size": 8192}}, "aio.block_bytes and aio.block_size contradict each other"),
    ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}}, "data_types.grad_accum_dtype = 'fp16'"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "precision is 'keep'"),
    (
        {"gradient_dtype": "keep", "precision": "bf16", "data_types": {"grad_accum_dtype": "fp32"}},
        "gradient_dtype and data_types.grad_accum_dtype contradict each other ('keep' and 'fp32')",
    ),
    (
        {"gradient_dtype": "fp32", "precision": "bf16", "data_types": {"grad_accum_dtype": "bf16"}},
        "gradient_dtype and data_types.grad_accum_dtype contradict each other ('fp32' and 'bf16')",
    ),
    ({"offload_param": "nvme"}, "offload_param is nvme, but there is no nvme_path"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer is nvme, but there is no"),
    ({"nvme_budget": "1GB"}, "nvme_budget without nvme_path"),
    (
        {"optimizer": {"type": "MuSGD"}},
        'optimizer.type = \'MuSGD\': expected one of "adam", "adamw", "lion", "adagrad", "sgd"',
    ),
    (
        {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.99]}}},
        "optimizer.params.betas: sgd has no such parameter; it has lr, momentum",
    ),
    ({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}, "optimizer.params.eps: lion has no such parameter"),
    ({"optimizer": {"params": {"lr": 1}}}, "optimizer.params without optimizer.type"),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}},
        "optimizer.params.betas = [0.9, 1]: expected a list",
    ),
    ({"optimizer": {"type": "Adam", "params": {"qqqqqq": 0.9}}}, "optimizer.params.qqqqqq: unknown key"),
    ({"optimizer": {"type": "Adam", "params": {"momentum": 0.9}}}, "optimizer.params.momentum: adam has no such"),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "say gradient_clipping instead"),
    ({"scheduler": {"params": {}, "type": "Cosine"}}, "scheduler.type = 'Cosine': expected one of"),
    ({"scheduler": {"params": {"a": 1}}}, "scheduler.params without scheduler.type"),
    ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 1}}}, "WarmupLR has no such parameter; it has"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps: WarmupDecayLR needs it"),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": None}}},
        "scheduler.params.total_num_steps: WarmupDecayLR needs it",
    ),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": 1}}}, 'warmup_type = 1: expected "log" or "linear"'),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 7}}},
        "last_batch_iteration = 7: expected -1: a schedule starts with its run",
    ),
    ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}, "train_batch_size = 8 cannot be divided by"),
    (
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4},
        "train_batch_size = 8 is not train_micro_batch_size_per_gpu = 4 x gradient_accumulation_steps = 4",
    ),
]


@pytest.mark.parametrize(("source", "message"), MISTAKES, ids=[message[:50] for _, message in MISTAKES])
def test_mistakes_are_told(source, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(source)


UNKNOWN_AT_THE_TOP = {
    "_comment": "",
    "comms_config": "; did you mean comms_logger?",
    "cuda_visible_devices": "; docs/config.md lists all keys",
    "host_budgte": "; did you mean host_budget?",
    "zero_optimisation": "; did you mean zero_optimization?",
    "overlap_comm": "; did you mean zero_optimization.overlap_comm?",
    "qqqqqqq": "; docs/config.md lists all keys",
}


def test_unknown_keys_at_the_top_of_a_file_are_ignored_with_a_warning(tmp_path):
    file = write(tmp_path / "ds.json", json.dumps({**dict.fromkeys(UNKNOWN_AT_THE_TOP, {"a": 1}), "prefetch": False}))
    config = parse_config(file)
    assert not config.prefetch
    assert config.warnings == tuple(
        f"configuration {file}: {name}: unknown key, ignored{hint}" for name, hint in UNKNOWN_AT_THE_TOP.items()
    )


def test_zero_optimization_may_be_a_switch():
    for said, stage in ((True, 1), (False, None)):
        assert (parse_config({"zero_optimization": said}).zero_stage or None) == stage


COMPRESSION_OFF = {
    "layer_reduction": {"enabled": False, "keep_number_layers": 5},
    "weight_quantization": {"shared_parameters": {"enabled": False, "quantizer_kernel": False}},
    "sparse_pruning": {"shared_parameters": {"enabled": False}, "different_groups": {}},
    "head_pruning": {},
}


def test_compression_with_every_part_off_is_no_compression():
    assert parse_config({"compression_training": COMPRESSION_OFF}) == parse_config()
    for part in ({"layer_reduction": {"enabled": True}}, {"row_pruning": {"shared_parameters": {"enabled": True}}}):
        with pytest.raises(ConfigError, match="compression_training.*the model is never compressed"):
            parse_config({"compression_training": COMPRESSION_OFF | part})


# The ZeRO-2 example of Hugging Face's documentation, in which a trainer fills in every "auto".
HF_ZERO2 = {
    **{name: value for name, value in HF_ZERO3.items() if name != "zero_optimization"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": "auto"},
}


def test_every_auto_is_listed_with_what_it_became(tmp_path):
    file = write(tmp_path / "zero2.json", json.dumps(HF_ZERO2))
    (warning,) = parse_config(file).warnings
    head, *lines = warning.splitlines()
    assert head == f'configuration {file}: "auto" is a value for a trainer to fill in, and nothing has:'
    known_to_a_trainer = " (only the trainer or you can know it: give a value)"
    assert dict(line.strip().split(" became ") for line in lines) == {
        "fp16.enabled": "precision = 'keep'" + known_to_a_trainer,
        "bf16.enabled": "precision = 'keep'" + known_to_a_trainer,
        "optimizer.params.lr": "0.001" + known_to_a_trainer,
        "optimizer.params.betas": "[0.9, 0.999]" + known_to_a_trainer,
        "optimizer.params.eps": "1e-08" + known_to_a_trainer,
        "optimizer.params.weight_decay": "0.0" + known_to_a_trainer,
        "scheduler.params.warmup_min_lr": "0.0" + known_to_a_trainer,
        "scheduler.params.warmup_max_lr": "the optimizer's own rate" + known_to_a_trainer,
        "scheduler.params.warmup_num_steps": "1000" + known_to_a_trainer,
        "gradient_accumulation_steps": "1" + known_to_a_trainer,
        "gradient_clipping": "1.0 in initialize(), off in a plain loop" + known_to_a_trainer,
        "train_batch_size": "unknown" + known_to_a_trainer,
        "train_micro_batch_size_per_gpu": "unknown" + known_to_a_trainer,
        "zero_optimization.reduce_bucket_size": f"nothing: {KEYS['zero_optimization.reduce_bucket_size'].text}",
        "zero_optimization.overlap_comm": f"nothing: {KEYS['zero_optimization.overlap_comm'].text}",
    }


def test_what_an_auto_became_is_said_in_the_words_of_users():
    offload = {"device": "nvme", "nvme_path": "auto"}
    source = {"nvme_path": "auto", "host_budget": "auto", "keep_fp32": "auto", "device": "auto"}
    (warning,) = parse_config({**source, "zero_optimization": {"offload_param": {"nvme_path": "auto"}}}).warnings
    assert dict(line.strip().split(" became ") for line in warning.splitlines()[1:]) == {
        "nvme_path": "no path: nothing goes to NVMe",
        "zero_optimization.offload_param.nvme_path": "no path: nothing goes to NVMe",
        "host_budget": "worked out from what the machine has",
        "keep_fp32": "nothing",
        "device": "the accelerator that torch finds, else the CPU",
    }
    (warning,) = parse_config({"zero_optimization": {"offload_param": offload}}, nvme_path="/mnt/a").warnings or ("",)
    assert "()" not in warning and "[]" not in warning


def test_an_auto_that_a_keyword_decides_is_not_listed():
    source = {"gradient_clipping": "auto", "train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    assert not parse_config(source, gradient_clipping=0.5, train_batch_size=4, precision="bf16").warnings
    (warning,) = parse_config(source, gradient_clipping=0.5, precision="bf16").warnings
    assert [line.split()[0] for line in warning.splitlines()[1:]] == ["train_batch_size"]


def test_an_auto_that_is_a_value_of_its_own_is_not_listed():
    assert not parse_config({"aio": {"backend": "auto"}, "data_types": {"keep_in_fp32_modules": "auto"}}).warnings


def test_unknown_keyword():
    with pytest.raises(ConfigError, match="host_bugdet: unknown key; did you mean host_budget"):
        parse_config({}, host_bugdet="1GiB")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_file_as_text_and_as_path(tmp_path):
    file = write(tmp_path / "ds.json", json.dumps(INFINITY))
    assert parse_config(file) == parse_config(str(file))
    assert replace(parse_config(file), warnings=()) == replace(parse_config(INFINITY), warnings=())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{\n  "prefetch": true,\n  3}',
            "line 3, column 3: not valid JSON",
        ),  # Python 3.13 has another place for a comma
        (" \n", "is empty. Write the keys into it, or {} where it needs none"),
        ('{"aio": {"queue_depth": 1, "queue_depth": 2}}', 'the key "queue_depth" stands twice in one object'),
        ("[1, 2]", "expected an object {...}, not list"),
        ('{"gradient_clipping": NaN}', "not valid JSON: NaN is not a number in JSON"),
        ('{"unknown": [-Infinity]}', "not valid JSON: -Infinity is not a number in JSON"),
        ('{"prefetch": 3}', "prefetch = 3: expected true or false"),
        ('{"durability": true}', "durability without nvme_path"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_files_are_told_with_their_name(tmp_path, text, message):
    file = write(tmp_path / "bad.json", text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_config(file)
    assert "bad.json" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"missing.json': cannot be read \(No such file or directory\)"):
        parse_config(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        parse_config(tmp_path)
    with pytest.raises(ConfigError, match="give JSON text as a dict"):
        parse_config('{"prefetch": true}')
    (tmp_path / "latin.json").write_bytes(b'{"nvme_path": "/\xe9"}')
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        parse_config(tmp_path / "latin.json")


@pytest.mark.parametrize("source", [3, 1.5, ["a"], b"ds.json", object()])
def test_other_sources(source):
    with pytest.raises(ConfigError, match="path of a JSON file, a dict or a Config"):
        parse_config(source)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KNOWN_PATHS = ["host_budget", "aio", "aio.block_size", "optimizer.params.betas", "scheduler.params", "precision"]


@given(st.sampled_from(KNOWN_PATHS), json_values)
def test_any_json_value_gives_a_config_or_a_config_error(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    try:
        config = parse_config(value)
    except ConfigError:
        return
    assert parse_config(config) == config


def test_gradients_in_fp32_by_either_name() -> None:
    by_deepspeed = parse_config({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}})
    assert by_deepspeed.gradient_dtype is parse_config(gradient_dtype="fp32").gradient_dtype is GradientDtype.FP32
    assert parse_config(precision="bf16").gradient_dtype is GradientDtype.KEEP


def sections(param: str | None, optimizer: str | None) -> dict[str, object]:
    said = {"offload_param": param, "offload_optimizer": optimizer}
    return {name: {"device": "nvme", "nvme_path": path} for name, path in said.items() if path is not None}


@pytest.mark.parametrize(
    "param, optimizer, own, used, warning",
    [
        ("/a", "/a", None, ("/a",), None),
        ("/a", None, None, ("/a",), None),
        ("/a", "/b", None, ("/a", "/b"), "weights and optimizer state both go to both"),
        ("/a", "/a", "/c", ("/c",), "not used, because nvme_path is set"),
        ("/a", "/b", ["/b", "/a"], ("/b", "/a"), None),
    ],
)
def test_directories_that_differ_are_mentioned(param, optimizer, own, used, warning):
    source = {"zero_optimization": sections(param, optimizer), **({} if own is None else {"nvme_path": own})}
    config = parse_config(source)
    assert config.nvme_path == used
    assert [warning in said for said in config.warnings] == ([] if warning is None else [True])
    for said in config.warnings:
        assert f"offload_param.nvme_path = {param!r}" in said and f"offload_optimizer.nvme_path = {optimizer!r}" in said
    assert parse_config(source, nvme_path="/x").nvme_path == ("/x",)
    assert not parse_config(source, nvme_path="/x").warnings
