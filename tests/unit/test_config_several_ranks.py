"""What a configuration means where several ranks train one model, and what it cannot say there."""

from __future__ import annotations

import pytest

from deepoffload.config import Config, Precision, RanksConfig, StepOverlap, parse_config
from deepoffload.config.collect import KEYS
from deepoffload.errors import ConfigError, UnsupportedError


def test_the_batch_is_that_of_all_ranks():
    config = parse_config({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, world_size=4)
    assert config.train_batch_size == 24
    config = parse_config({"train_batch_size": 24, "gradient_accumulation_steps": 3}, world_size=4)
    assert config.train_micro_batch_size_per_gpu == 2
    assert parse_config(config, world_size=4) == config


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            "is not train_micro_batch_size_per_gpu = 2 x gradient_accumulation_steps = 4 x processes = 2; leave one",
        ),
        ({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 2}, "cannot be divided by train_micro_batch_size"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op = 'sum' with 2 ranks: ignoring it would change"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size = 2 with 2 ranks: .* all ranks are data-parallel"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel = 'on' with 2 ranks"),
        ({"communication_data_type": "bf16"}, "communication_data_type = 'bf16' with 2 ranks: .*precision is 'keep'"),
        ({"communication_data_type": "fp16", "precision": "bf16"}, "communication_data_type = 'fp16' with 2 ranks"),
    ],
)
def test_what_would_change_numbers_is_an_error(source, text):
    with pytest.raises(ConfigError, match=text):
        parse_config(source, world_size=2)


def test_with_one_rank_the_same_is_noted():
    sources = [
        {"gradient_allreduce_op": "sum"},
        {"sequence_parallel_size": 2},
        {"tensor_parallel": {"autotp_size": 2}},
        {"communication_data_type": "bf16"},
    ]
    for source in sources:
        assert len(parse_config(source).notes) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_may_travel_in_their_own_type_or_a_wider_one(precision):
    for wire in (precision, "fp32"):
        config = parse_config({"communication_data_type": wire, "precision": precision}, world_size=2)
        assert config.precision is Precision(precision)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            {"step_overlap": "in_backward", "durability": True, "nvme_path": "/disk"},
            'durability is not available with step_overlap = "in_backward" with several ranks .*; use .*"deferred"',
        ),
        ({"offload_optimizer": "device"}, 'offload_optimizer = "device" is not available with several .*set "cpu"'),
        ({"debug": {"copies": True}}, "debug.copies is not available with several ranks"),
    ],
)
def test_what_one_rank_can_do_and_several_cannot_is_refused(source, text):
    parse_config(source)
    with pytest.raises(UnsupportedError, match=text):
        parse_config(source, world_size=2)


def test_every_stage_is_taken_and_0_is_1():
    for stage in (1, 2, 3):
        assert parse_config({"zero_optimization": {"stage": stage}}, world_size=2).zero_stage == stage
    config = parse_config({"zero_optimization": {"stage": 0}}, world_size=2)
    assert config.zero_stage == 1
    assert [note for note in config.notes if "taken as 1" in note] == list(config.notes)
    assert parse_config(config, world_size=2).zero_stage == 1
    assert parse_config(world_size=2).zero_stage is None


def test_the_section_of_ranks():
    assert parse_config().ranks == RanksConfig(600.0, "auto")
    config = parse_config({"ranks": {"timeout_s": 20}}, ranks={"transport": "memory"})
    assert config.ranks == RanksConfig(20.0, "memory")
    assert parse_config(config) == config
    assert parse_config(Config(step_overlap=StepOverlap.NONE), world_size=2).ranks == RanksConfig()
    for section in ({"timeout_s": 0}, {"transport": "nccl"}):
        with pytest.raises(ConfigError, match="ranks.t"):
            parse_config({"ranks": section})


def test_no_key_says_that_one_process_trains():
    assert not [path for path, key in KEYS.items() if "one process trains" in key.text]
