"""A DeepSpeed file for transformers' Trainer, without its argument ``deepspeed``."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deepoffload
from deepoffload.config import parse_config
from deepoffload.errors import ConfigError, UsageError
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import batch, llama
from tests.support.trainers import arguments_of

pytest.importorskip("transformers")

from transformers import Trainer  # noqa: E402

from deepoffload.integrations.transformers import fill_auto, optimizers_of  # noqa: E402
from tests.support.deepspeed_configs import OF_TRAINER  # noqa: E402

AUTO = "auto"
CONFIG: dict[str, Any] = {
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), AUTO
    ),
    "fp16": {"enabled": AUTO, "loss_scale": 0},
    "bf16": {"enabled": AUTO},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO),
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": AUTO, "offload_optimizer": {"device": "cpu"}},
}


def arguments(folder: Path, **more: Any) -> Any:
    settings = {"max_steps": 4, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 2}
    return arguments_of(folder, gradient_accumulation_steps=2, **(settings | more))


def test_every_auto_of_the_trainers_is_filled_in(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    filled = fill_auto(tmp_path / "ds.json", arguments(tmp_path, bf16=True))
    params = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    assert filled == {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": False, "loss_scale": 0},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 4, "warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 2},
        },
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    assert not parse_config(filled).warnings and CONFIG["train_batch_size"] == AUTO
    for theirs in OF_TRAINER.values():
        assert not parse_config(fill_auto(theirs, arguments(tmp_path, bf16=True))).warnings
    assert fill_auto(filled, arguments(tmp_path, bf16=True)) == filled


def test_the_rules_are_those_of_transformers(tmp_path):
    """Compared with the class that transformers has for DeepSpeed; without DeepSpeed it lacks its base."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class Theirs(HfDeepSpeedConfig):
        locals().update({name: value for name, value in vars(HfTrainerDeepSpeedConfig).items() if name[0] != "_"})
        _dtype = None

    theirs: Any = Theirs(copy.deepcopy(CONFIG))
    theirs.mismatches = []
    args = arguments(tmp_path)
    theirs.trainer_config_process(args)
    theirs.trainer_config_finalize(args, llama(), 4)
    mine = fill_auto(CONFIG, args)
    theirs.config["zero_optimization"].pop("reduce_bucket_size")  # sets nothing here
    assert mine == theirs.config


def test_what_differs_is_named_together(tmp_path):
    said = CONFIG | {"gradient_clipping": 1.0, "train_batch_size": 8}
    with pytest.raises(ConfigError, match=r"batch_size = 8, but .* = 4; gradient_clipping = 1.0, but max_grad_norm"):
        fill_auto(said, arguments(tmp_path))
    args = arguments(tmp_path)
    args.deepspeed = "ds.json"
    with pytest.raises(UsageError, match="leave it out"):
        fill_auto(CONFIG, args)


def test_a_length_that_is_unknown_is_asked_for_where_it_is_needed(tmp_path):
    filled = fill_auto(CONFIG, arguments(tmp_path, max_steps=-1))
    with pytest.raises(ConfigError, match='total_num_steps is "auto"'):
        optimizers_of(filled, llama())
    filled = fill_auto(CONFIG, arguments(tmp_path, max_steps=-1), num_training_steps=10)
    assert filled["scheduler"]["params"]["total_num_steps"] == 10
    assert optimizers_of({}, llama()) == (None, None)
    with pytest.raises(UsageError, match="all parameters of LlamaForCausalLM are frozen"):
        optimizers_of(filled, llama().requires_grad_(False))
    with pytest.raises(ConfigError, match="scheduler without optimizer"):
        optimizers_of({"scheduler": {"type": "WarmupLR"}}, llama())


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        tokens = batch(index, rows=1)[0]
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("file", ["zero3.json", "ours", "Muon"])
def test_the_trainer_trains_as_with_a_model_in_memory(file, nvme_path, tmp_path):
    """With a file of transformers as it is, one of which nothing stays in memory, and an optimizer of another class."""
    said = CONFIG | {"zero_optimization": {"stage": 3}, "host_budget": "1MiB", "nvme_path": str(nvme_path)}
    if file == "Muon":
        said |= {"optimizer": {"type": "Muon", "params": {"lr": AUTO}}}
    (tmp_path / "ds.json").write_text(json.dumps(OF_TRAINER.get(file, said)))

    def run(paged: bool) -> Any:
        args = arguments(tmp_path)
        config = fill_auto(tmp_path / "ds.json", args)
        torch.manual_seed(0)
        if paged:
            with deepoffload.offload_context(config):
                model = llama()
        else:
            model = llama()
        made: Any = optimizers_of(config, model)
        trainer = Trainer(model, args, train_dataset=Rows(), optimizers=made)
        trainer.train()
        history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
        return history, rates, weights_of(model)

    assert_same_bits(run(False), run(True))
