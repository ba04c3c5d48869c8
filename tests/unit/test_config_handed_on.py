"""A ``Config`` that a program hands on says again what it was read from, by every key that says it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepoffload.config import Config, as_written, parse_config
from deepoffload.config.collect import KEYS
from deepoffload.config.keys import Key, Treatment
from deepoffload.config.source import config_to_mapping
from deepoffload.errors import ConfigError, DeepOffloadError
from tests.unit.test_config import INFINITY
from tests.unit.test_config_as_written import ALL_READ
from tests.unit.test_config_keys import collected, merged, nested, other_value

CURRICULA: dict[str, dict[str, Any]] = {
    "fixed_linear": {"total_curriculum_step": 4, "difficulty_step": 8},
    "fixed_root": {"total_curriculum_step": 4, "difficulty_step": 8, "root_degree": 3},
    "fixed_discrete": {"difficulty": [8, 16], "max_step": [3]},
}
SOURCES: dict[str, dict[str, Any]] = {
    **{
        kind: {
            "curriculum_learning": {
                "enabled": True,
                "curriculum_type": "seqlen",
                "min_difficulty": 8,
                "max_difficulty": 16,
                "schedule_type": kind,
                "schedule_config": said,
            }
        }
        for kind, said in CURRICULA.items()
    },
    "checkpoints": {
        "checkpoint": {"load_universal": True, "tag_validation": "Fail", "writer": {"decoupled": True}, "share": 0.5}
    },
    "memory that grows": {"host_budget": "1GiB", "memory_may_grow": True},
    "a schedule of torch's that says None": {
        "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": 9, "epochs": None}}
    },
    "a schedule whose length is unknown": {
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}}
    },
    "durable": {"durability": {"every": 3, "path": ["/a", "/b"]}},
    "durable at once": {"durability": True, "nvme_path": "/a"},
}

COMPANIONS: dict[str, dict[str, Any]] = {
    "activation_budget": {"offload_activations": "host"},
    "offload_activations_above": {"offload_activations": "host"},
    "curriculum_learning.enabled": merged(SOURCES["fixed_linear"], {"curriculum_learning": {"enabled": False}}),
    "scheduler.params": {"scheduler": {"type": "StepLR"}},
    "data_types.param_dtype": {"precision": "fp32"},
    "data_types.grad_accum_dtype": {"precision": "bf16"},
}
"""What a key needs to be said with."""

VALUES: dict[str, Any] = {
    "scheduler.params": {"gamma": 0.5},
    "optimizer.params.beta2_decay": -0.5,
    "curriculum_learning.schedule_config.difficulty": [8, 16],
    "curriculum_learning.schedule_config.max_step": [3],
}
"""Of keys whose values are none of the usual ones."""

SAY_NOTHING = ("data_types.param_dtype",)
"""Keys that may only say what others say, too."""


@pytest.mark.parametrize("name", SOURCES)
def test_a_config_parses_to_itself(name: str) -> None:
    config = parse_config(SOURCES[name])
    assert config != Config() and parse_config(config) == config


OPTIMIZERS = ("Adam", "SGD", "Adagrad", "Muon", "Adadelta", "Adafactor", "ASGD", "NAdam", "RMSprop", "Rprop")


def read_with(key: Key) -> tuple[Config, Config]:
    """What is read without a key, and with it."""
    value = VALUES[key.path] if key.path in VALUES else other_value(key)
    without = COMPANIONS.get(key.path, {"nvme_path": "/swap"} if key.path != "nvme_path" else {})
    if not key.path.startswith("optimizer.params."):
        return parse_config(without), parse_config(merged(without, nested(key.path, value)))
    for kind in OPTIMIZERS:
        without = {"optimizer": {"type": kind}}
        with suppress(ConfigError):
            return parse_config(without), parse_config(merged(without, nested(key.path, value)))
    raise AssertionError("no optimizer has it")


def test_a_config_with_any_key_parses_to_itself() -> None:
    def rule(key: Key) -> None:
        before, config = read_with(key)
        assert parse_config(config) == config, config_to_mapping(config)
        if key.treatment is Treatment.HONOURED and key.path not in SAY_NOTHING:
            assert replace(config, notes=()) != before, "it says nothing"

    one_value = ("curriculum_learning.curriculum_type",)
    collected(
        rule, [key for key in KEYS.values() if key.treatment is not Treatment.ERROR and key.path not in one_value]
    )


PIECES = [
    *SOURCES.values(),
    *ALL_READ.values(),
    INFINITY,
    {"precision": "fp16", "fp16": {"loss_scale": 8}},
    {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "state_dtype": "8bit"}}},
    {"keep_fp32": ["norm", Config]},
    {"autotuning": {"enabled": True, "results_dir": "/r", "num_tuning_micro_batch_sizes": 2}},
    {"ranks": {"timeout_s": 3}, "debug": {"copies": True}, "aio": {"verify": True}},
    {"zero_optimization": {"stage": 0}},
    {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3},
]


@given(st.lists(st.sampled_from(PIECES), min_size=2, max_size=4), st.sampled_from((1, 2)))
def test_what_is_read_together_parses_to_itself(pieces: list[dict[str, Any]], world_size: int) -> None:
    said: dict[str, Any] = {}
    for piece in pieces:
        said = merged(said, piece)
    try:
        config = parse_config(said, world_size=world_size)
    except DeepOffloadError:
        return  # pieces that contradict each other
    again = parse_config(config, world_size=world_size)
    assert replace(again, notes=()) == replace(config, notes=())  # stage 0 has become 1, which has a note of its own


def test_ranks_compare_it_by_the_keys_of_the_table() -> None:
    for name, source in SOURCES.items():
        said = as_written(parse_config(source))
        unknown = [
            key for key in said if key not in KEYS and not key.startswith(("scheduler", "optimizer", "durability."))
        ]
        assert not unknown, f"{name}: {unknown}"
